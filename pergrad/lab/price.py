"""What statistics of per-example gradients cost beside `jax.grad`, measured.

Every candidate takes the same loss, parameters and batch, and returns the mean loss and the statistics
of a task. That all return the same is checked before anything is timed (see `timing`). The first
candidate, the mean gradient alone, is what everybody pays anyway: ratios are to it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pergrad as pg
from pergrad.lab.config import TaskName
from pergrad.lab.errors import LabError
from pergrad.lab.timing import Program, Result, Say, compile_all, time_all, to_stderr

if TYPE_CHECKING:  # benchmarks can do without a page and without rich
    from rich.table import Table as RichTable

    from pergrad.lab import report

FLOOR = "jax.value_and_grad"
PERGRAD = "pergrad"
VMAP = "vmap(grad)"
MICRO_GRAD = "optax micro_grad"
MICRO_GRAD_SIZES = (1, 2, 4, 8)
MAX_NORM = 1.0

# The largest difference between two candidates, in norm, for any one parameter. Sums in float32 taken
# in another order differ by about 1e-6 of the result's norm; in bfloat16 every product is rounded.
RTOL = 1e-4
RTOL_BFLOAT16 = 0.1

Tree = Any
Loss = Callable[[Tree, Any], jax.Array]
Candidate = Callable[[Tree, Any], tuple[jax.Array, dict[str, Any]]]


@dataclass(frozen=True)
class Task:
    """The same statistics, asked for in three ways.

    `reduce` is given all gradients, leaves [B, ...]. `one` is given a single gradient and returns what
    is averaged over the examples and what is kept of each; None for what cannot be said so.
    """

    statistics: Mapping[str, pg.Statistic]
    reduce: Callable[[Tree], dict[str, Any]] | None = None
    one: Callable[[Tree], tuple[dict[str, Any], dict[str, Any]]] | None = None


def _moments(g: Tree) -> dict[str, Any]:
    return {
        "mean": jax.tree.map(lambda x: jnp.mean(x, axis=0), g),
        "second_moment": jax.tree.map(lambda x: jnp.mean(jnp.square(x), axis=0), g),
    }


def _norms(g: Tree) -> dict[str, Any]:
    return {"norm": jax.vmap(optax.tree.norm)(g)}


def _clipped(g: Tree) -> dict[str, Any]:
    scale = _scale(jax.vmap(optax.tree.norm)(g))
    return {"clipped": jax.tree.map(lambda x: jnp.tensordot(scale, x, 1) / len(x), g)}


def _scale(norm: jax.Array) -> jax.Array:
    return jnp.minimum(1, MAX_NORM / norm)


TASKS: dict[TaskName, Task] = {
    "moments": Task(
        {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)},
        _moments,
        lambda g: ({"mean": g, "second_moment": jax.tree.map(jnp.square, g)}, {}),
    ),
    "norms": Task({"norm": pg.Norm()}, _norms, lambda g: ({}, {"norm": optax.tree.norm(g)})),
    "clipped": Task(
        {"clipped": pg.ClippedMean(MAX_NORM)},
        _clipped,
        lambda g: ({"clipped": optax.tree.scale(_scale(optax.tree.norm(g)), g)}, {}),
    ),
}


def mean_gradient(loss: Loss) -> Candidate:
    """What everybody pays anyway: the floor."""

    def run(params: Tree, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        return value, {"mean": gradient}

    return run


def vmap_grad(loss: Loss, reduce: Callable[[Tree], dict[str, Any]]) -> Candidate:
    """All gradients at once, then reduced: what a user writes first."""

    def one_example(params: Tree, example: Any) -> tuple[jax.Array, Tree]:
        return jax.value_and_grad(loss)(params, jax.tree.map(lambda x: x[None], example))

    def run(params: Tree, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        values, gradients = jax.vmap(one_example, in_axes=(None, 0))(params, batch)
        return jnp.mean(values), reduce(gradients)

    return run


def micro_grad(
    loss: Loss, one: Callable[[Tree], tuple[dict[str, Any], dict[str, Any]]], microbatch_size: int
) -> Candidate:
    """optax's answer: `vmap(grad)` on a few examples at a time, accumulated in a loop."""
    statistics_fn = optax.microbatching.micro_grad(
        loss,
        microbatch_size=microbatch_size,
        accumulator=optax.microbatching.AccumulationType.MEAN,
        transform_fn=lambda g: one(g)[0],
        metrics_fn=lambda g: one(g)[1],
    )

    def run(params: Tree, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        averaged, individual = statistics_fn(params, batch)
        return jnp.mean(individual.values), averaged | individual.metrics

    return run


def candidates(
    loss: Loss,
    task: Task = TASKS["moments"],
    micro_grad_sizes: Sequence[int] = MICRO_GRAD_SIZES,
    pergrad_sizes: Sequence[int | Literal["auto"]] = ("auto",),
) -> dict[str, Candidate]:
    """Every way to the statistics of a task, by name; the floor comes first."""
    found = {FLOOR: mean_gradient(loss)}
    if task.reduce is not None:
        found[VMAP] = vmap_grad(loss, task.reduce)
    if task.one is not None:
        for size in micro_grad_sizes:
            found[f"{MICRO_GRAD}, microbatch {size}"] = micro_grad(loss, task.one, size)
    found[PERGRAD] = pg.value_and_stats(loss, task.statistics)
    for size in pergrad_sizes:
        found[f"{PERGRAD}, microbatch {size}"] = pg.value_and_stats(
            loss, task.statistics, microbatch_size=size
        )
    return found


def largest_difference(
    programs: Mapping[str, Program],
    params: Tree,
    batch: Any,
    *,
    rtol: float = RTOL,
    unchecked: Collection[str] = (),
) -> float:
    """The largest relative difference from the second candidate, in what a candidate has in common.

    Raises `LabError` if one is above `rtol`: what does not return the same is not worth timing. The
    statistics named in `unchecked` may differ.
    """
    _, reference, *_ = programs
    expected_value, expected = programs[reference].run(params, batch)
    largest = 0.0
    for name, program in programs.items():
        value, statistics = program.run(params, batch)
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


def measure(
    found: Mapping[str, Candidate],
    params: Tree,
    batch: Any,
    *,
    rounds: int = 15,
    budget: float = 10.0,
    rtol: float = RTOL,
    unchecked: Collection[str] = (),
    say: Say = to_stderr,
) -> list[Result]:
    """Candidates compiled, checked and timed, as `timing` does it; the results in their order."""
    if rounds < 1:
        raise LabError(f"rounds must be at least 1, not {rounds}.")
    programs = compile_all(found, params, batch, say=say)
    difference = largest_difference(programs, params, batch, rtol=rtol, unchecked=unchecked)
    say(f"  all agree: relative difference at most {difference:.0e} (limit {rtol:.0e})\n")
    return time_all(programs, params, batch, rounds=rounds, budget=budget, say=say)


def best_of_each(results: Sequence[Result]) -> list[Result]:
    """Of candidates that differ in their microbatch size the fastest, but pergrad's as they are."""
    best: dict[str, Result] = {}
    for result in results:
        family = result.name if result.name.startswith(PERGRAD) else result.name.split(",")[0]
        if family not in best or result.minimum < best[family].minimum:
            best[family] = result
    return list(best.values())


# What is told.

HEADER = ("candidate", "time ms", "time x", "memory MB", "memory x", "compile x")


def cells(results: Sequence[Result]) -> list[list[str]]:
    """The rows below `HEADER`; the ratios are to the first result."""
    rows = []
    for result in results:
        ratios = result.ratios(results[0])
        rows.append(
            [
                result.name,
                f"{1e3 * result.minimum:.1f}",
                f"{ratios['time']:.2f}",
                f"{result.program.temp_bytes / 1e6:.1f}",
                f"{ratios['memory']:.2f}",
                f"{ratios['compile']:.2f}",
            ]
        )
    return rows


def report_table(title: str, results: Sequence[Result]) -> report.Table:
    """For a page."""
    from pergrad.lab import report

    return report.Table(title, HEADER, cells(results))


def rich_table(title: str, results: Sequence[Result]) -> RichTable:
    """For the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for column, name in enumerate(HEADER):
        table.add_column(name, justify="right" if column else "left", no_wrap=not column)
    for row in cells(results):
        table.add_row(*map(Text, row), style="bold" if row[0].startswith(PERGRAD) else "")
    return table


def numbers(results: Sequence[Result]) -> list[dict[str, Any]]:
    """All that was measured, as JSON has it."""
    return [
        {
            "candidate": result.name,
            "lower_seconds": result.program.lower_seconds,
            "compile_seconds": result.program.compile_seconds,
            "temp_bytes": result.program.temp_bytes,
            "seconds": list(result.seconds),
            "minimum": result.minimum,
            "quartiles": list(result.quartiles),
            "ratios": result.ratios(results[0]),
        }
        for result in results
    ]


def machine() -> dict[str, Any]:
    """Where the numbers were measured."""
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "devices": [device.device_kind for device in jax.devices()],
    }
