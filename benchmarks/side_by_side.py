"""Mean and second moment of per-example gradients: pergrad beside what a user would pick instead.

    python -m benchmarks.side_by_side --cases mlp transformer_long --json results.json

Every candidate takes the same loss and batch. All but the first, the mean gradient alone, return
the same statistics; that they do is checked before anything is timed.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pergrad as pg
from benchmarks.models import CASES
from pergrad.lab.timing import Program, Result, compile_all, table, time_all

STATISTICS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)}

FLOOR = "jax.value_and_grad"
REFERENCE = "vmap(grad)"
MICRO_GRAD = "optax micro_grad"
MICRO_GRAD_SIZES = (1, 2, 4, 8)

# The largest difference from the reference, in norm, for any one parameter. Sums in float32 taken
# in another order differ by about 1e-6 of the result's norm.
RTOL = 1e-4

Loss = Callable[[Any, Any], jax.Array]
Candidate = Callable[[Any, Any], tuple[jax.Array, dict[str, Any]]]


def mean_gradient(loss: Loss) -> Candidate:
    """What everybody pays anyway: the floor."""

    def run(params, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        return value, {"mean": gradient}

    return run


def vmap_grad(loss: Loss) -> Candidate:
    """All gradients at once, then reduced: what a user writes first."""

    def one_example(params, example):
        return jax.value_and_grad(loss)(params, jax.tree.map(lambda x: x[None], example))

    def run(params, batch):
        values, gradients = jax.vmap(one_example, in_axes=(None, 0))(params, batch)
        return jnp.mean(values), {
            "mean": jax.tree.map(lambda g: jnp.mean(g, axis=0), gradients),
            "second_moment": jax.tree.map(lambda g: jnp.mean(g**2, axis=0), gradients),
        }

    return run


def micro_grad(loss: Loss, microbatch_size: int) -> Candidate:
    """optax's answer: `vmap(grad)` on a few examples at a time, accumulated in a loop."""
    statistics_fn = optax.microbatching.micro_grad(
        loss,
        microbatch_size=microbatch_size,
        accumulator=optax.microbatching.AccumulationType.MEAN,
        transform_fn=lambda g: {"mean": g, "second_moment": jax.tree.map(jnp.square, g)},
    )

    def run(params, batch):
        statistics, individual = statistics_fn(params, batch)
        return jnp.mean(individual.values), statistics

    return run


def candidates(
    loss: Loss,
    micro_grad_sizes: Sequence[int] = MICRO_GRAD_SIZES,
    pergrad_sizes: Sequence[int | str] = ("auto",),
) -> dict[str, Candidate]:
    """Every way to the statistics, by name; the floor comes first."""
    found = {FLOOR: mean_gradient(loss), REFERENCE: vmap_grad(loss)}
    for size in micro_grad_sizes:
        found[f"{MICRO_GRAD}, microbatch {size}"] = micro_grad(loss, size)
    found["pergrad"] = pg.value_and_stats(loss, STATISTICS)
    for size in pergrad_sizes:
        found[f"pergrad, microbatch {size}"] = pg.value_and_stats(loss, STATISTICS, microbatch_size=size)
    return found


def largest_difference(programs: Mapping[str, Program], params: Any, batch: Any) -> float:
    """The largest relative difference from the reference, over all candidates and parameters.

    Raises `ValueError` if one is above `RTOL`: what does not return the same is not worth timing.
    """
    expected_value, expected = programs[REFERENCE].run(params, batch)
    largest = 0.0
    for name, program in programs.items():
        value, statistics = program.run(params, batch)
        pairs = jax.tree.map(
            _relative_difference,
            (value, statistics),
            (expected_value, {key: expected[key] for key in statistics}),
        )
        difference = float(np.max(jax.tree.leaves(pairs)))
        if not difference <= RTOL:  # also if it is NaN
            raise ValueError(f"{name} differs from {REFERENCE} by {difference:.1e}, above {RTOL}")
        largest = max(largest, difference)
    return largest


def _relative_difference(actual: jax.Array, expected: jax.Array) -> float:
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


def with_best_micro_grad(results: Sequence[Result]) -> list[Result]:
    """The results with micro_grad at its fastest microbatch size only."""
    best = min(
        (result for result in results if result.name.startswith(MICRO_GRAD)),
        key=lambda result: result.minimum,
    )
    return [r for r in results if r is best or not r.name.startswith(MICRO_GRAD)]


def cost_table(results: Sequence[Result]) -> str:
    """Costs of each result; the ratios are to the first."""
    rows = []
    for result in results:
        ratios = result.ratios(results[0])
        rows.append(
            [
                result.name,
                f"{1e3 * result.minimum:.1f}",
                f"{ratios['time']:.2f}",
                f"{ratios['memory']:.2f}",
                f"{ratios['compile']:.2f}",
            ]
        )
    return table(["candidate", "time ms", "time x", "memory x", "compile x"], rows)


def run_case(name: str, rounds: int, pergrad_sizes: Sequence[int | str]) -> list[Result]:
    """Check and time every candidate on one case, and print its table."""
    model = CASES[name]
    params = model.init(jax.random.key(0))
    batch = model.sample(jax.random.key(1))
    print(f"{name}: {model}, {_parameter_count(params) / 1e6:.1f}M parameters", flush=True)
    programs = compile_all(candidates(model.loss, pergrad_sizes=pergrad_sizes), params, batch)
    difference = largest_difference(programs, params, batch)
    print(f"all candidates agree: relative difference at most {difference:.0e} (limit {RTOL:.0e})")
    results = time_all(programs, params, batch, rounds=rounds)
    print(cost_table(with_best_micro_grad(results)), end="\n\n", flush=True)
    return results


def _parameter_count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def provenance() -> dict[str, Any]:
    """What is needed to know where the numbers come from."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")}
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions},
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "devices": [device.device_kind for device in jax.devices()],
        },
    }


def case_numbers(name: str, results: Sequence[Result]) -> dict[str, Any]:
    """All that was measured on one case."""
    return {
        "model": dataclasses.asdict(CASES[name]),
        "results": [_result_numbers(result, floor=results[0]) for result in results],
    }


def _result_numbers(result: Result, floor: Result) -> dict[str, Any]:
    return {
        "candidate": result.name,
        "lower_seconds": result.program.lower_seconds,
        "compile_seconds": result.program.compile_seconds,
        "temp_bytes": result.program.temp_bytes,
        "seconds": result.seconds,
        "minimum": result.minimum,
        "quartiles": result.quartiles,
        "ratios": result.ratios(floor),
    }


def _commit() -> str | None:
    """The commit of this code, with `-dirty` if the checkout has changes; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(
            command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each candidate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument(
        "--microbatch",
        nargs="+",
        type=int,
        default=[],
        metavar="SIZE",
        help="time pergrad with these microbatch sizes too",
    )
    arguments = parser.parse_args()
    print(f"{FLOOR} returns the mean gradient; the others mean and second moment.")
    print("Ratios are to it: fastest run, temporary memory, tracing and compiling.\n")
    report = {**provenance(), "cases": {}}
    for case in arguments.cases:
        results = run_case(case, arguments.rounds, ["auto", *arguments.microbatch])
        report["cases"][case] = case_numbers(case, results)
        if arguments.json:  # after each case, so that an interrupted run is not lost
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
