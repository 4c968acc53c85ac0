"""What candidates cost on a chip that need not be there: they are compiled for it, and not run.

The compilers are in `compilers`. Parameters and batch are abstract, shapes and types alone, so that
models of any size can be judged. The time is that of `compiled.meter`; memory is what the compiler sets
aside; traffic is what the program reads and writes in the chip's memory; and operations are those of the
traced program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import pergrad as pg
from pergrad.lab.bench import cases, compilers, price, tables, tasks
from pergrad.lab.bench.compiled import hlo, meter
from pergrad.lab.bench.compiled.chips import CHIPS
from pergrad.lab.bench.operations import operations
from pergrad.lab.bench.run import Item, Row
from pergrad.lab.bench.tasks import AUTO, FLOOR, FLOORS, PERGRAD, SIZED, Task
from pergrad.lab.config import TargetName, TaskName
from pergrad.lab.run import records
from pergrad.lab.timing import Say, past_best, to_stderr

PART = "target"  # of the rows


@dataclasses.dataclass(frozen=True)
class Judged:
    """What a program costs on a chip."""

    seconds: float
    least_seconds: float
    """The time if every conditional takes its cheapest branch, and not its most expensive one."""
    temp_bytes: float
    """What the compiler sets aside for intermediate results."""
    peak_bytes: float
    """Parameters, batch, results and intermediate results together."""
    hbm_bytes: float
    operations: float
    estimated_seconds: float | None
    """The time if all of the compiler's estimates are taken as they are; None if it makes none."""
    by_kind: Mapping[str, float]
    """The seconds of each kind of instruction."""
    unknown: tuple[str, ...]
    """Instructions that the time does not or not wholly include."""
    lower_seconds: float
    compile_seconds: float


def judge(candidate: Callable[..., Any], args: tuple[Any, ...], target: TargetName) -> Judged:
    """Compiles a function of abstract arguments for a target, for which pergrad plans in it."""
    chip = CHIPS[target]
    built = compilers.build(candidate, args, target)
    program = hlo.parse(built.text)
    cost = meter.cost(program, chip)
    return Judged(
        seconds=cost.seconds,
        least_seconds=meter.cost(program, chip, branch=min).seconds,
        temp_bytes=built.temp_bytes,
        peak_bytes=built.peak_bytes,
        hbm_bytes=cost.hbm_bytes,
        operations=operations(built.jaxpr),
        estimated_seconds=cost.estimated_seconds if chip.has_estimates else None,
        by_kind=cost.by_kind,
        unknown=cost.unknown,
        lower_seconds=built.lower_seconds,
        compile_seconds=built.compile_seconds,
    )


def items(names: Sequence[str] = (), wanted: Sequence[TaskName] = ()) -> list[Item]:
    """What to judge: all models with their usual tasks, or the cases and tasks that are chosen."""
    usual = {case: cases.LARGE_TASKS for case in cases.LARGE}
    return [
        Item(PART, case, task)
        for case in names or (*cases.CASES, *cases.LARGE)
        for task in wanted or get_args(TaskName)
        if names or task in usual.get(case, ()) or case in cases.USUAL[task]
    ]


def title(item: Item, target: TargetName) -> str:
    """What stands above the table of a comparison."""
    statistics: dict[str, str] = {**tasks.TITLES}
    model = cases.EVERY_TITLE.get(item.case, item.case)
    return f"{model}: {statistics[item.task]} (compiled for {target}, not run on it)"


def columns(target: TargetName) -> tables.Columns:
    """What the table of a comparison shows, and what the time in it is."""
    return dataclasses.replace(tables.TARGET, said=f"{tables.TARGET.said}; {CHIPS[target].about_time}")


def about(target: TargetName) -> dict[str, Any]:
    """Versions, the chip and its numbers. Only results for which these are equal are comparable."""
    versions = records.versions() | compilers.compiler_of(target).version
    return {"versions": versions, "target": target, "chip": dataclasses.asdict(CHIPS[target])}


def measure(item: Item, target: TargetName, say: Say = to_stderr, *, ours: bool = False) -> list[Row]:
    """The rows of one comparison, the floor first. With `ours` other packages are left out."""
    workload = cases.abstract(item.case)
    task = workload.task(item.task)
    head = {**dataclasses.asdict(item), "model": dict(workload.about)}
    rows = (
        floor_row(name, item.case, target, say)
        if name in FLOORS
        else _row(name, workload, task, target, say)
        for name in tasks.names(task, ours=ours)
    )
    return with_ratios([{**head, **row} for row in rows])


@functools.cache
def floor_row(name: str, case: str, target: TargetName, say: Say) -> Row:
    """The row of the mean gradient alone, which is the same program for every task."""
    workload = cases.abstract(case)
    return _row(name, workload, workload.task("moments"), target, say)


def _row(name: str, workload: cases.Workload, task: Task, target: TargetName, say: Say) -> Row:
    """What a candidate costs, at its best size if it needs one, or why it is left out."""
    args = workload.params, workload.batch

    def tried(name: str) -> Row:
        row = _tried(name, tasks.make(name, workload.loss, task), args, target)
        say(f"  {name}: {row.get('left_out') or row.get('out_of_memory') or _said(row)}\n")
        return row

    if not tasks.is_installed(name):
        return {"candidate": name, "left_out": "not installed"}
    if name in SIZED:
        return fastest(tried(one) for one in price.sizes(name, workload.batch))
    if name != AUTO:
        return tried(name)
    with pg.plan_for(target):
        if price.takes_all(workload.loss, task, *args):
            return {"candidate": name, "left_out": "all at once"}
        size = price.auto_size(workload.loss, task, *args)
    return tried(name) | {"microbatch_size": size}


def _said(row: Row) -> str:
    return f"{1e3 * row['seconds']:.3g} ms, compiled in {row['compile_seconds']:.1f} s"


def _tried(name: str, candidate: tasks.Candidate, args: tuple[Any, ...], target: TargetName) -> Row:
    try:
        return {"candidate": name, **dataclasses.asdict(judge(candidate, args, target))}
    except compilers.OutOfMemory as error:
        return {"candidate": name, "out_of_memory": str(error)}
    except Exception as error:
        if name in (FLOOR, PERGRAD):
            raise
        # The fault is that of another package, and the other candidates go on.
        return {"candidate": name, "left_out": f"{type(error).__name__}: {error}".partition("\n")[0]}


def fastest(rows: Iterable[Row]) -> Row:
    """The fastest of candidates of rising size, which are tried until they get slower or do not fit."""
    best, times = None, {}
    for row in rows:
        if "seconds" not in row:
            return best | {"tried": times} if best else row
        times[row["candidate"]] = row["seconds"]
        if best is None or row["seconds"] < best["seconds"]:
            best = row
        if past_best(times.values()):
            break
    assert best is not None
    return best | {"tried": times}


RATIOS = {
    "time": "seconds",
    "memory": "temp_bytes",
    "traffic": "hbm_bytes",
    "operations": "operations",
}


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with ratios to the first, the floor; they are NaN if that is 0 or does not fit.

    `tuned` is the time as a multiple of that of the fastest candidate for the mean gradient alone.
    """
    floor = rows[0]
    fitting = [row for row in rows if "seconds" in row]
    floors = [row["seconds"] for row in fitting if tasks.family(row["candidate"]) in FLOORS]

    def ratios(row: Row) -> dict[str, float]:
        found = {name: row[key] / (floor.get(key) or math.nan) for name, key in RATIOS.items()}
        return found | {"tuned": row["seconds"] / min(floors, default=math.nan)}

    return [row | {"ratios": ratios(row)} if row in fitting else row for row in rows]
