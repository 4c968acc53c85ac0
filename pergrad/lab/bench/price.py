"""What statistics of per-example gradients cost beside `jax.grad`, measured.

All candidates of a task (see `tasks`) are compiled. They are timed only if they return the same, and
then they take turns (see `timing`). Ratios are to the first candidate, the mean gradient alone; `tuned`
is the time as a multiple of that of the fastest candidate for the mean gradient alone.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pergrad as pg
from pergrad.lab import floor, timing
from pergrad.lab.bench import tasks
from pergrad.lab.bench.tasks import AUTO, FLOOR, FLOORS, PERGRAD, SIZED, Loss, Task, Tree
from pergrad.lab.errors import LabError
from pergrad.lab.timing import Executable, Result, Say, to_stderr

# The largest difference between two candidates, in norm, for any one parameter. Sums in float32 taken
# in another order differ by about 1e-6 of the result's norm.
RTOL = 1e-4


@dataclass(frozen=True)
class Comparison:
    """What was measured, the floor first, and which candidates were left out and why."""

    results: list[Result]
    left_out: Mapping[str, str]


def measure(
    loss: Loss,
    task: Task,
    params: Tree,
    batch: Any,
    *,
    names: Sequence[str] | None = None,
    rounds: int = 10,
    budget: float = 3.0,
    rtol: float = RTOL,
    say: Say = to_stderr,
) -> Comparison:
    """Compiles, checks and times the candidates of these names, by default all.

    Of candidates that want a microbatch size the fastest is taken. A candidate that raises an error is
    left out. So is pergrad's `"auto"` where it takes all examples at once, since that is what `pergrad`
    without a microbatch size does.
    """
    if rounds < 1:
        raise LabError(f"rounds must be at least 1, not {rounds}.")
    executables, left_out = build(loss, task, params, batch, names=names or tasks.names(task), say=say)
    difference = largest_difference(executables, params, batch, rtol=rtol, unchecked=task.unchecked)
    say(f"  all agree: relative difference at most {difference:.0e} (limit {rtol:.0e})\n")
    results = timing.time_all(executables, params, batch, rounds=rounds, budget=budget, say=say)
    return Comparison(results, left_out)


def build(
    loss: Loss, task: Task, params: Tree, batch: Any, *, names: Sequence[str], say: Say = to_stderr
) -> tuple[dict[str, Executable], dict[str, str]]:
    """Compiled candidates by name, and which candidates are left out and why."""
    executables, left_out = {}, {}
    for name in names:
        if not tasks.is_installed(name):
            left_out[name] = "not installed"
        elif name == AUTO and takes_all(loss, task, params, batch):
            left_out[name] = "all at once"
        else:
            try:
                found, executable = _compile(name, loss, task, params, batch, say)
            except Exception as error:
                if name in (FLOOR, PERGRAD):
                    raise
                # The fault is that of another package, and the other candidates go on.
                left_out[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            else:
                executables[found] = executable
        if name in left_out:
            say(f"  without {name}: {left_out[name]}\n")
    return executables, left_out


def _compile(
    name: str, loss: Loss, task: Task, params: Tree, batch: Any, say: Say
) -> tuple[str, Executable]:
    if name not in SIZED:
        return name, timing.compile_afresh(name, tasks.make(name, loss, task), params, batch, say=say)
    sized = ((one, tasks.make(one, loss, task)) for one in sizes(name, batch))
    return timing.fastest(sized, params, batch, say=say)


def auto_size(loss: Loss, task: Task, params: Tree, batch: Any) -> int:
    """How many examples at a time pergrad takes with `microbatch_size="auto"`."""
    return pg.explain(loss, task.statistics, microbatch_size="auto")(params, batch).microbatch_size


def takes_all(loss: Loss, task: Task, params: Tree, batch: Any) -> bool:
    """Whether pergrad takes all examples at once, both with `microbatch_size="auto"` and without.

    Clipping of layers in a loop may take fewer by default, to save memory.
    """
    plans = (
        pg.explain(loss, task.statistics, microbatch_size=size)(params, batch) for size in ("auto", None)
    )
    return all(plan.microbatch_size == floor.examples(batch) for plan in plans)


def sizes(name: str, batch: Any) -> list[str]:
    """The names of a candidate with the microbatch sizes 1, 2, 4, ... that divide the batch."""
    return [f"{name}{tasks.MICROBATCH}{size}" for size in floor.sizes(batch)]


def largest_difference(
    executables: Mapping[str, Executable],
    params: Tree,
    batch: Any,
    *,
    rtol: float = RTOL,
    unchecked: Sequence[str] = (),
) -> float:
    """The largest relative difference from the first candidate that has all of the statistics.

    Only those are compared that both candidates return.

    Raises `LabError` if a difference is above `rtol`: a candidate that returns something else is not
    worth timing. The statistics named in `unchecked` may differ.
    """
    reference = next(name for name in executables if tasks.family(name) not in FLOORS)
    expected_value, expected = executables[reference].run(params, batch)
    largest = 0.0
    for name, executable in executables.items():
        if name == reference:
            continue
        value, statistics = executable.run(params, batch)
        shared = statistics.keys() & expected.keys() - set(unchecked)
        pairs = jax.tree.map(
            _relative_difference,
            (value, {key: statistics[key] for key in shared}),
            (expected_value, {key: expected[key] for key in shared}),
        )
        difference = float(np.max(jax.tree.leaves(pairs)))
        if not difference <= rtol:  # also if it is NaN
            raise LabError(f"{name} differs from {reference} by {difference:.1e}, above {rtol:g}.")
        largest = max(largest, difference)
    return largest


def _relative_difference(actual: jax.Array, expected: jax.Array) -> float:
    scale = jnp.linalg.norm(expected)
    return float(jnp.linalg.norm(actual - expected) / jnp.where(scale == 0, 1, scale))


def numbers(results: Sequence[Result]) -> list[dict[str, Any]]:
    """All that was measured, in a form that JSON can hold."""
    tuned = tuned_seconds({result.name: result.minimum for result in results})
    return [
        {
            "candidate": result.name,
            "lower_seconds": result.executable.lower_seconds,
            "compile_seconds": result.executable.compile_seconds,
            "temp_bytes": result.executable.temp_bytes,
            "seconds": list(result.seconds),
            "minimum": result.minimum,
            "quartiles": list(result.quartiles),
            "ratios": result.ratios(results[0]) | {"tuned": result.minimum / tuned},
            "tried": dict(result.executable.tried),
        }
        for result in results
    ]


def tuned_seconds(seconds: Mapping[str, float]) -> float:
    """The time of the fastest candidate for the mean gradient alone; NaN if only one was tried."""
    floors = {tasks.family(name): time for name, time in seconds.items() if tasks.family(name) in FLOORS}
    return min(floors.values()) if len(floors) == len(FLOORS) else math.nan


def machine() -> dict[str, Any]:
    """Where the numbers were measured."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "devices": [device.device_kind for device in jax.devices()],
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor()
