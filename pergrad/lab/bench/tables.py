"""The numbers of a benchmark as tables: for the terminal, and for pages in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from pergrad.lab.tasks import FLOOR, PERGRAD, family

Row = Mapping[str, Any]

HEADER = (
    "candidate",
    "time ms",
    "quartiles",
    "time x",
    "memory MB",
    "memory x",
    "compile x",
    "process MB",
)


def in_terminal(title: str, rows: Sequence[Row]) -> Table:
    """One comparison, its floor first. Those that were left out are named, and why."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column, name in enumerate(HEADER):
        table.add_column(name, justify="right" if column else "left", no_wrap=not column)
    for row in measured(rows):
        is_ours = family(row["candidate"]) == PERGRAD
        table.add_row(*map(Text, cells(row)), style="bold" if is_ours else "")
    notes = [f"without {row['candidate']}: {row['left_out']}" for row in rows if "left_out" in row]
    if is_disturbed(rows):
        notes.append("the floor's times vary widely: was the machine busy? Do not trust these")
    table.caption = Text("\n".join(notes)) if notes else None
    return table


def is_disturbed(rows: Sequence[Row]) -> bool:
    """Whether half of the floor's runs took 1.5 times the fastest: something else was running."""
    floor = measured(rows)[0]
    return floor["quartiles"][1] > 1.5 * floor["minimum"]


def cells(row: Row) -> list[str]:
    """The texts below `HEADER`."""
    ratios, process = row["ratios"], row.get("process", {})
    low, _, high = row["quartiles"]
    return [
        row["candidate"],
        f"{1e3 * row['minimum']:.1f}",
        f"{1e3 * low:.0f} to {1e3 * high:.0f}",
        f"{ratios['time']:.2f}",
        _number(row["temp_bytes"], 1e-6, ".1f"),
        _number(ratios["memory"], 1, ".2f"),
        _number(ratios["compile"], 1, ".2f"),
        _number(process.get("peak_bytes"), 1e-6, ".0f"),
    ]


def measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "left_out" not in row]


def markdown(rows: Sequence[Row], titles: Mapping[str, str], names: Mapping[str, str]) -> str:
    """One task, a line for each model: time, and in brackets temporary memory, beside the floor's.

    `titles` are the models to show, by case; `names` the candidates, by their names without sizes.
    """
    lines = [["model", *names.values()]]
    for case, title in titles.items():
        own = [row for row in rows if row["case"] == case]
        if own:
            lines.append([title, *(_cell(own, name) for name in names)])
    return _pipes(lines)


def _cell(rows: Sequence[Row], name: str) -> str:
    own = [row for row in rows if name in (row["candidate"], _without_number(row["candidate"]))]
    if not own:
        return ""
    (row,) = own
    if "left_out" in row:
        return {"all at once": "the same"}.get(row["left_out"], "–")
    memory = row["ratios"].get("memory")
    return short(row["ratios"]["time"]) + ("" if memory is None else f" ({short(memory)})")


def _without_number(name: str) -> str:
    """`pergrad, microbatch auto` is another candidate than `pergrad`; a number is only a number."""
    return name if name.endswith("auto") else family(name)


def short(ratio: float) -> str:
    """Three digits: 0.97, 14.3, 424."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def in_processes(rows: Sequence[Row], titles: Mapping[str, str], names: Mapping[str, str]) -> str:
    """A line for each model: the most memory its process has had while running, in MB."""
    lines = [["model", *names.values()]]
    for case, title in titles.items():
        own = [row for row in measured(rows) if row["case"] == case and "process" in row]
        peaks = {_without_number(r["candidate"]): r["process"]["peak_bytes"] for r in own}
        if peaks:
            lines.append([title, *(_number(peaks.get(name), 1e-6, ".0f") for name in names)])
    return _pipes(lines)


def building(rows: Sequence[Row], titles: Mapping[str, str] | None = None) -> str:
    """A line for each model: seconds to trace and compile the floor, then multiples of them.

    `titles` are the models to show, by case; without them all, by the names of the cases.
    """
    own = [row for row in rows if row["part"] == "compile" and row["axis"] is None]
    names = list(dict.fromkeys(family(row["candidate"]) for row in own))
    lines = [["model", *(f"`{name}`" for name in names)]]
    for case, title in (titles or {row["case"]: row["case"] for row in own}).items():
        found = {
            family(row["candidate"]): row["lower_seconds"] + row["compile_seconds"]
            for row in own
            if row["case"] == case
        }
        if found:
            multiples = (short(found[n] / found[FLOOR]) if n in found else "–" for n in names[1:])
            lines.append([title, f"{short(found[FLOOR])} s", *multiples])
    return _pipes(lines) if own else ""


def _number(value: float | None, scale: float, form: str) -> str:
    """Nothing for what is not known."""
    return "" if value is None or math.isnan(value) else format(scale * value, form)


def _pipes(lines: Sequence[Sequence[str]]) -> str:
    header, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([header, "|" + "---|" * len(lines[0]), *rest])
