"""Mean and second moment of per-example gradients: pergrad beside what a user would pick instead.

    python -m benchmarks.side_by_side --cases mlp transformer_long --json results.json

Every candidate takes the same loss and batch. All but the first, the mean gradient alone, return
the same statistics; that they do is checked before anything is timed.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from benchmarks.models import CASES
from pergrad.lab import price
from pergrad.lab.timing import Result, table


def run_case(name: str, rounds: int, pergrad_sizes: Sequence[int | Literal["auto"]]) -> list[Result]:
    """Check and time every candidate on one case, and print its table."""
    model = CASES[name]
    params = model.init(jax.random.key(0))
    batch = model.sample(jax.random.key(1))
    print(f"{name}: {model}, {_parameter_count(params) / 1e6:.1f}M parameters", flush=True)
    candidates = price.candidates(model.loss, pergrad_sizes=pergrad_sizes)
    results = price.measure(candidates, params, batch, rounds=rounds)
    print(table(price.HEADER, price.cells(price.best_of_each(results))), end="\n\n", flush=True)
    return results


def _parameter_count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def provenance() -> dict[str, Any]:
    """What is needed to know where the numbers come from."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")}
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions},
        "machine": price.machine(),
    }


def case_numbers(name: str, results: Sequence[Result]) -> dict[str, Any]:
    """All that was measured on one case."""
    return {
        "model": dataclasses.asdict(CASES[name]),
        "results": price.numbers(results),
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
    print(f"{price.FLOOR} returns the mean gradient; the others mean and second moment.")
    print("Ratios are to it: fastest run, temporary memory, tracing and compiling.\n")
    report = {**provenance(), "cases": {}}
    for case in arguments.cases:
        results = run_case(case, arguments.rounds, ["auto", *arguments.microbatch])
        report["cases"][case] = case_numbers(case, results)
        if arguments.json:  # after each case, so that an interrupted run is not lost
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
