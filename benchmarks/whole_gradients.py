"""Norms, clipping, many statistics at once and single tokens: pergrad beside the alternatives.

    python -m benchmarks.whole_gradients --cases mlp transformer_long

Every candidate takes the same loss and batch. Within a task all return the same numbers, which is
checked before anything is timed; the first, the mean gradient alone, is what the ratios are to.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import pergrad as pg
from benchmarks.models import CASES
from benchmarks.side_by_side import provenance
from pergrad.lab import price
from pergrad.lab.price import Task
from pergrad.lab.timing import Result, table


def _five(g: Any) -> dict[str, Any]:
    over = lambda f: jax.tree.map(f, g)  # noqa: E731
    return {
        "mean": over(lambda x: jnp.mean(x, axis=0)),
        "second_moment": over(lambda x: jnp.mean(jnp.square(x), axis=0)),
        "sign": over(lambda x: jnp.mean(jnp.sign(x), axis=0)),
        "variance": over(lambda x: jnp.var(x, axis=0, ddof=1)),
        "norm": jax.vmap(optax.tree.norm)(g),
    }


FIVE = {
    "mean": pg.Mean(),
    "second_moment": pg.Mean(jnp.square),
    "sign": pg.Mean(jnp.sign),
    "variance": pg.Variance(),
    "norm": pg.Norm(),
}
TASKS = {
    "norms": price.TASKS["norms"],
    "clipping": price.TASKS["clipped"],
    "five": Task(FIVE, _five),
    "tokens": Task({"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square, per="token")}),
}
UNCHECKED = ("sign",)  # of a number that is zero but for rounding it is anything


def by_jax_privacy(loss: Any, size: int | None) -> price.Candidate | None:
    try:
        from jax_privacy import clipping
    except ImportError:
        return None
    clipped_sum = clipping.clipped_grad(
        loss, l2_clip_norm=price.MAX_NORM, microbatch_size=size, return_values=True
    )

    def run(params: Any, batch: Any) -> Any:
        total, individual = clipped_sum(params, batch)
        examples = len(individual.values)
        return jnp.mean(individual.values), {"clipped": jax.tree.map(lambda x: x / examples, total)}

    return run


def candidates(loss: Any, task: str) -> dict[str, price.Candidate]:
    """Every way to the statistics of a task, by name; the floor comes first."""
    found = price.candidates(loss, TASKS[task])
    for size in (None, *price.MICRO_GRAD_SIZES) if task == "clipping" else ():
        if (candidate := by_jax_privacy(loss, size)) is not None:
            found[f"jax_privacy, microbatch {size}"] = candidate
    return found


def run_task(case: str, task: str, rounds: int) -> list[Result]:
    model = CASES[case]
    params, batch = model.init(jax.random.key(0)), model.sample(jax.random.key(1))
    print(f"{case}, {task}: {TASKS[task].statistics}", flush=True)
    measured = price.measure(
        candidates(model.loss, task), params, batch, rounds=rounds, unchecked=UNCHECKED
    )
    results = price.best_of_each(measured)
    print(table(price.HEADER, price.cells(results)), end="\n\n", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["transformer_long", "mlp"])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each candidate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    arguments = parser.parse_args()
    print(f"Ratios are to {price.FLOOR}: fastest run, temporary memory, tracing and compiling.\n")
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
