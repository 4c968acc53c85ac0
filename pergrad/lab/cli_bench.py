"""The command `pergrad bench`: what statistics cost, measured here or compiled for another chip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import tyro
from rich.console import Console
from rich.text import Text

from pergrad.lab.config import CaseName, LargeName, PartName, TargetName, TaskName
from pergrad.lab.errors import LabError
from pergrad.lab.files import disk_errors


def bench(
    loss: Annotated[str | None, tyro.conf.Positional] = None,
    cases: tuple[CaseName | LargeName, ...] = (),
    tasks: tuple[TaskName, ...] = (),
    parts: tuple[PartName, ...] = (),
    rounds: int = 30,
    budget: float = 4.0,
    peak: tuple[TaskName, ...] = ("moments",),
    rates: bool = False,
    target: TargetName | None = None,
    ours: bool = False,
    out: Path = Path("bench"),
) -> None:
    """Measure what statistics cost on this machine.

    Time, memory and compilation of pergrad beside `jax.grad`, `vmap(grad)`, optax and jax_privacy, in
    one process that wants the machine for itself. Without options all models, how one of them grows,
    and compilation, in an hour or more on two cores. The same command again continues.

    Args:
        loss: yours: `MODULE:FUNCTION`, which returns a loss, its parameters and a batch.
        cases: these models only; the last nine, from `large_mlp` on, only with --target.
        tasks: these statistics only.
        parts: models, growth of one as its sizes grow, compilation; all if nothing else is chosen.
        rounds: at most so many timed runs of each candidate, which take turns; the fastest counts.
        budget: seconds after which a candidate sits out the remaining rounds.
        peak: tasks for which each candidate also runs in a process of its own, for the memory of it all.
        rates: measure the rates that the plan prices strategies with, in place of statistics; with
            --target those of a TPU that is not there, as its compiler has them.
        target: compile for this chip and judge the compiled programs; nothing runs.
        ours: leave out other packages and `vmap(grad)`, which take most of the time.
        out: where `results.json` and the figures go, or `rates.json`, or a target's `tpu-v5e.json`.
    """
    if rates:
        if loss or cases or tasks or parts:
            raise LabError("--rates measures the machine: no loss, cases, tasks or parts.")
        _bench_rates(rounds, budget, target, out / "rates.json")
        return
    if target:
        if parts:
            raise LabError("--target compiles models, and has no parts.")
        _bench_target(target, (*cases, loss) if loss else cases, tasks, ours, out)
        return
    if large := [name for name in cases if name in get_args(LargeName)]:
        raise LabError(f"{', '.join(large)}: too large to run here. With --target it is compiled.")
    from pergrad.lab.bench import drawings, grid, run, tables

    console = Console()
    wanted = run.items(parts, (*cases, loss) if loss else cases, tasks)
    settings = run.Settings(rounds, budget, peak)
    every = run.run(
        wanted,
        lambda item: run.measure(item, settings, ours=ours),
        run.about(settings),
        out / "results.json",
    )
    for item, rows in run.comparisons(every).items():
        if item.part == "models":
            tables.show(console, str(item), rows, tables.RUNS)
    if (built := grid.building(every)).lines:
        console.print(
            Text(f"seconds to trace and compile, then multiples of them\n{built}"), soft_wrap=True
        )
    console.print(f"times are the fastest of at most {rounds} rounds")
    for path in (out / "results.json", *drawings.write(every, out)):
        console.print(Text(str(path), "bold"), soft_wrap=True)


def _bench_rates(rounds: int, budget: float, target: TargetName | None, out: Path) -> None:
    from pergrad.lab.bench import compilers, rates
    from pergrad.lab.run import records

    if rounds < 1:
        raise LabError(f"rounds must be at least 1, not {rounds}.")
    with disk_errors(out):  # before anything is measured that could not be written
        out.parent.mkdir(parents=True, exist_ok=True)
    known = rates.of_package()
    if target:
        compilers.use(target)
        name, found = target, rates.compiled(target)
        written = rates.with_compiled(known, found, target)
    else:
        name, found = rates.name_of_today(known), rates.measure(rounds=rounds, budget=budget)
        written = rates.with_measured(known, found)
    records.write_json(out, written)
    print(rates.table(known[name]["rates"], found))
    Console().print(Text(str(out), "bold"), soft_wrap=True)


def _bench_target(
    target: TargetName, names: Sequence[str], wanted: Sequence[TaskName], ours: bool, out: Path
) -> None:
    from pergrad.lab.bench import compilers, run, tables
    from pergrad.lab.bench import target as targets

    compilers.use(target)
    console = Console()
    path = out / f"{target.replace(':', '-')}.json"
    every = run.run(
        targets.items(names, wanted),
        lambda item: targets.measure(item, target, ours=ours),
        targets.about(target),
        path,
    )
    for item, rows in run.comparisons(every).items():
        tables.show(console, targets.title(item, target), rows, targets.columns(target))
    console.print(Text(str(path), "bold"), soft_wrap=True)
