"""Norms, clipping, many statistics at once and single tokens: pergrad beside the alternatives.

    python -m benchmarks.whole_gradients --cases mlp transformer_long

Every candidate takes the same loss and batch. Within a task all return the same numbers, which is
checked before anything is timed; the first, the mean gradient alone, is what the ratios are to.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pergrad as pg
from benchmarks.models import CASES
from benchmarks.side_by_side import FLOOR, MICRO_GRAD_SIZES, RTOL, cost_table, provenance
from pergrad.lab.timing import Result, compile_all, time_all

MAX_NORM = 1.0
FIVE = {
    "mean": pg.Mean(),
    "second_moment": pg.Mean(jnp.square),
    "sign": pg.Mean(jnp.sign),
    "variance": pg.Variance(),
    "norm": pg.Norm(),
}
TASKS: dict[str, Any] = {
    "norms": {"norm": pg.Norm()},
    "clipping": {"clipped": pg.ClippedMean(MAX_NORM)},
    "five": FIVE,
    "tokens": {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square, per="token")},
}

Candidate = Callable[[Any, Any], Any]


def mean_gradient(loss: Any) -> Candidate:
    return jax.value_and_grad(loss)


def by_pergrad(loss: Any, statistics: Any, **options: Any) -> Candidate:
    return pg.grad_stats(loss, statistics, **options)


def by_vmap(loss: Any, task: str) -> Candidate:
    """All gradients at once, then reduced: what a user writes first."""

    def run(params: Any, batch: Any) -> Any:
        def one(example: Any) -> Any:
            return jax.grad(loss)(params, jax.tree.map(lambda x: x[None], example))

        g = jax.vmap(one)(batch)
        norm = jax.vmap(optax.tree.norm)(g)
        over = lambda f: jax.tree.map(f, g)  # noqa: E731
        if task == "norms":
            return {"norm": norm}
        if task == "clipping":
            scale = jnp.minimum(1, MAX_NORM / norm)
            return {"clipped": over(lambda x: jnp.tensordot(scale, x, 1) / len(x))}
        return {
            "mean": over(lambda x: jnp.mean(x, axis=0)),
            "second_moment": over(lambda x: jnp.mean(jnp.square(x), axis=0)),
            "sign": over(lambda x: jnp.mean(jnp.sign(x), axis=0)),
            "variance": over(lambda x: jnp.var(x, axis=0, ddof=1)),
            "norm": norm,
        }

    return run


def by_micro_grad(loss: Any, task: str, size: int) -> Candidate:
    """optax's answer: `vmap(grad)` on a few examples at a time, accumulated in a loop."""
    means = {
        "clipping": lambda g: optax.tree.scale(jnp.minimum(1, MAX_NORM / optax.tree.norm(g)), g),
        "norms": lambda g: jnp.zeros(()),
    }
    micro_grad = optax.microbatching.micro_grad(
        loss,
        microbatch_size=size,
        accumulator=optax.microbatching.AccumulationType.MEAN,
        transform_fn=means[task],
        metrics_fn=optax.tree.norm,
    )

    def run(params: Any, batch: Any) -> Any:
        result, individual = micro_grad(params, batch)
        return {"clipped": result} if task == "clipping" else {"norm": individual.metrics}

    return run


def by_jax_privacy(loss: Any, size: int | None) -> Candidate | None:
    try:
        from jax_privacy import clipping
    except ImportError:
        return None
    clipped_sum = clipping.clipped_grad(loss, l2_clip_norm=MAX_NORM, microbatch_size=size)

    def run(params: Any, batch: Any) -> Any:
        examples = len(jax.tree.leaves(batch)[0])
        return {"clipped": jax.tree.map(lambda x: x / examples, clipped_sum(params, batch))}

    return run


def candidates(loss: Any, task: str) -> dict[str, Candidate]:
    """Every way to the statistics of a task, by name; the floor comes first."""
    found: dict[str, Candidate | None] = {FLOOR: mean_gradient(loss)}
    found["pergrad"] = by_pergrad(loss, TASKS[task])
    found["pergrad, microbatch auto"] = by_pergrad(loss, TASKS[task], microbatch_size="auto")
    if task != "tokens":  # which nobody else has
        found["vmap(grad)"] = by_vmap(loss, task)
    if task in ("norms", "clipping"):
        for size in MICRO_GRAD_SIZES:
            found[f"optax micro_grad, microbatch {size}"] = by_micro_grad(loss, task, size)
    if task == "clipping":
        for size in (None, *MICRO_GRAD_SIZES):
            found[f"jax_privacy, microbatch {size}"] = by_jax_privacy(loss, size)
    return {name: candidate for name, candidate in found.items() if candidate is not None}


def check(outputs: dict[str, Any]) -> float:
    """The largest relative difference between candidates; raises `ValueError` above `RTOL`."""
    first, *others = outputs.values()

    def difference(a: Any, b: Any) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    pairs = [jax.tree.leaves(jax.tree.map(difference, first, other)) for other in others]
    largest = max((d for pair in pairs for d in pair), default=0.0)
    if not largest <= RTOL:  # also if it is NaN
        raise ValueError(f"the candidates differ by {largest:.1e}, above {RTOL}")
    return largest


def best_of_each(results: Sequence[Result]) -> list[Result]:
    """Of candidates that differ in their microbatch size the fastest, but pergrad's as they are."""
    best: dict[str, Result] = {}
    for result in results:
        family = result.name if result.name.startswith("pergrad") else result.name.split(",")[0]
        if family not in best or result.minimum < best[family].minimum:
            best[family] = result
    return list(best.values())


def run_task(case: str, task: str, rounds: int) -> list[Result]:
    model = CASES[case]
    params, batch = model.init(jax.random.key(0)), model.sample(jax.random.key(1))
    print(f"{case}, {task}: {TASKS[task]}", flush=True)
    programs = compile_all(candidates(model.loss, task), params, batch)
    outputs = {name: p.run(params, batch) for name, p in programs.items() if name != FLOOR}
    signs_differ = task == "five"  # the sign of a number that is zero but for rounding is anything
    for output in outputs.values() if signs_differ else ():
        del output["sign"]
    print(f"relative difference at most {check(outputs):.0e} (limit {RTOL:.0e})")
    results = best_of_each(time_all(programs, params, batch, rounds=rounds))
    print(cost_table(results), end="\n\n", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["transformer_long", "mlp"])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each candidate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    arguments = parser.parse_args()
    print(f"Ratios are to {FLOOR}: fastest run, temporary memory, tracing and compiling.\n")
    report: dict[str, Any] = {**provenance(), "cases": {}}
    for case in arguments.cases:
        for task in arguments.tasks:
            results = run_task(case, task, arguments.rounds)
            numbers = {r.name: {**r.ratios(results[0]), "seconds": r.seconds} for r in results}
            report["cases"].setdefault(case, {})[task] = numbers
            if arguments.json:  # after each task, so that an interrupted run is not lost
                arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
