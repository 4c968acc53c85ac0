"""All measurements, a row for each candidate, in one JSON file.

A row says what was measured (`part`, `case`, `task`; `axis` and `size` where a model grows), the
candidate, and its numbers, or why it was `left_out`; for `microbatch_size="auto"` also which size that
was. The file is written after every comparison, so that it has all that an interrupted run has measured.
The same command again, at the same commit, measures the rest.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pergrad.lab.bench import cases, peak, price, tasks
from pergrad.lab.bench.tasks import AUTO, FLOOR, MICRO_GRAD, MICROBATCH, PERGRAD, VMAP
from pergrad.lab.config import CaseName, PartName, TaskName
from pergrad.lab.errors import LabError
from pergrad.lab.files import disk_errors, to_json
from pergrad.lab.run import records
from pergrad.lab.timing import LEAST, Executable, Say, to_stderr

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure."""

    rounds: int = 30
    """At most so many timed runs of each candidate, which take turns; the fastest counts."""
    budget: float = 4.0
    """Seconds after which a candidate sits out the remaining rounds."""
    peak: tuple[TaskName, ...] = ("moments",)
    """Tasks for which each candidate also runs in a process of its own, for the memory of all of it."""
    builds: int = 15
    """At most so many builds of each where compilation is what is measured; the fastest counts.

    They end when those of the floor have used up the budget, but not before `LEAST` of them.
    """

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise LabError(f"rounds must be at least 1, not {self.rounds}.")


@dataclasses.dataclass(frozen=True)
class Item:
    """One comparison: a task on a model, perhaps with one of its sizes grown."""

    part: str
    case: str
    task: str
    axis: str | None = None
    size: int | None = None

    def __str__(self) -> str:
        grown = "" if self.axis is None else f", {self.axis} {self.size}"
        titles: dict[str, str] = {**tasks.TITLES}
        return f"{self.case}{grown}: {titles.get(self.task, self.task)}"


def items(
    parts: Sequence[PartName] = (),
    names: Sequence[str] = (),
    wanted: Sequence[TaskName] = (),
) -> list[Item]:
    """What to measure: all parts, or only the cases and tasks that are chosen."""
    parts = parts or (("models",) if names or wanted else get_args(PartName))
    found = []
    if "models" in parts:
        found += [
            Item("models", case, task)
            for case in names or get_args(CaseName)
            for task in wanted or get_args(TaskName)
            if names or case in cases.USUAL[task]
        ]
    if "compile" in parts:
        found += [Item("compile", case, "moments") for case in names or get_args(CaseName)]
    for part, axes in (("growth", cases.GROWTH), ("compile", cases.COMPILED)):
        if part in parts and not (names and part == "compile"):
            found += [
                Item(part, "transformer", "moments", axis, size)
                for axis, (_, sizes) in axes.items()
                for size in sizes
            ]
    return found


def run(
    wanted: Sequence[Item],
    measure: Callable[[Item], list[Row]],
    about: Mapping[str, Any],
    out: Path,
    say: Say = to_stderr,
) -> list[Row]:
    """Measures what is `wanted`, writes it to the file `out` with `about`, and returns all rows."""
    with disk_errors(out):  # before anything is measured that could not be written
        out.parent.mkdir(parents=True, exist_ok=True)
    rows = _done(out, about)
    done = comparisons(rows)
    start = time.monotonic()
    for index, item in enumerate(wanted, 1):
        say(f"{index} of {len(wanted)}, {time.monotonic() - start:.0f} s: {item}\n")
        if item in done:
            say("  is there already\n")
            continue
        rows += measure(item)
        records.write_json(out, {"about": about, "results": rows})
    return rows


def about(settings: Settings) -> dict[str, Any]:
    """Versions, machine and settings. Only numbers for which these are equal are comparable."""
    return {
        "versions": records.versions(),
        "machine": price.machine(),
        "settings": dataclasses.asdict(settings),
    }


def _done(out: Path, about: Mapping[str, Any]) -> list[Row]:
    """The rows of an interrupted run of the same code; none if the checkout has changes."""
    if not out.exists() or about["versions"]["pergrad"].endswith("-dirty"):
        return []
    found = records.read_json(out)
    return found["results"] if found.get("about") == json.loads(to_json(about)) else []


def comparisons(rows: Iterable[Row]) -> dict[Item, list[Row]]:
    """The rows of each comparison, in order."""
    found: dict[Item, list[Row]] = {}
    for row in rows:
        found.setdefault(_item(row), []).append(row)
    return found


def _item(row: Row) -> Item:
    return Item(**{field.name: row[field.name] for field in dataclasses.fields(Item)})


def measure(item: Item, settings: Settings, say: Say = to_stderr, *, ours: bool = False) -> list[Row]:
    """The rows of one comparison that `items` lists. With `ours` models leave other packages out."""
    names: tuple[str, ...]
    match item.part:
        case "growth":
            workload, names = _grown(item, cases.GROWTH), (FLOOR, VMAP, MICRO_GRAD, PERGRAD)
        case "compile":
            workload = _grown(item, cases.COMPILED) if item.axis else cases.workload(item.case)
            return _compiled(item, workload, settings, say)
        case _:
            workload = cases.workload(item.case)
            names = tasks.names(workload.task(item.task), ours=ours)
    args = workload.loss, workload.task(item.task), workload.params, workload.batch
    found = price.measure(
        *args,
        names=names,
        rounds=settings.rounds,
        budget=settings.budget,
        say=say,
    )
    rows = [{**_head(item, workload), **numbers} for numbers in price.numbers(found.results)]
    for row in rows:
        if row["candidate"] == AUTO:
            row["microbatch_size"] = price.auto_size(*args)
    if item.part == "models" and item.task in settings.peak:
        for row in rows:
            row["process"] = peak.in_a_process(item.case, item.task, row["candidate"])
            say(f"  {row['candidate']}: {row['process']['peak_bytes'] / 1e6:.0f} MB in its process\n")
    left_out = found.left_out.items()
    return rows + [
        {**_head(item, workload), "candidate": name, "left_out": why} for name, why in left_out
    ]


def _compiled(item: Item, workload: cases.Workload, settings: Settings, say: Say) -> list[Row]:
    names = (FLOOR, VMAP, f"{MICRO_GRAD}{MICROBATCH}1", PERGRAD)
    args = workload.loss, workload.task(item.task), workload.params, workload.batch
    rounds: list[dict[str, Executable]] = []
    spent = 0.0
    while len(rounds) < settings.builds and (len(rounds) < LEAST or spent < settings.budget):
        executables, _ = price.build(*args, names=names, say=say)
        rounds.append(executables)
        spent += executables[FLOOR].build_seconds
    executables = {
        name: min((built[name] for built in rounds), key=lambda executable: executable.build_seconds)
        for name in rounds[0]
    }
    return [
        {
            **_head(item, workload),
            "candidate": name,
            "lower_seconds": executable.lower_seconds,
            "compile_seconds": executable.compile_seconds,
            "temp_bytes": executable.temp_bytes,
            "builds": len(rounds),
        }
        for name, executable in executables.items()
    ]


def _head(item: Item, workload: cases.Workload) -> dict[str, Any]:
    return {**dataclasses.asdict(item), "model": dict(workload.about)}


def _grown(item: Item, axes: Mapping[str, tuple[str, tuple[int, ...]]]) -> cases.Workload:
    assert item.axis is not None and item.size is not None
    return cases.of_model(cases.grown(cases.SMALL, axes[item.axis][0], item.size))
