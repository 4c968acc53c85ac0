"""From tuned methods to a page: what was tried, how each did, and what may be said about it.

The rule is fixed here, before any run: every method is compared with the first one of its batch size,
on the half of the validation data that chose nothing, paired by seeds, at a level that all claims share
(see `decide`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.lab import config as configs
from pergrad.lab import decide, figures, report, sweep
from pergrad.lab.files import disk_errors
from pergrad.lab.runs import directory, read_metrics, versions
from pergrad.lab.sweep import Tuned

SMOOTHED = 20  # points of a curve, each the mean over a twentieth of the run

Curve = tuple[Any, Any, Any, Any]  # examples seen, and the mean over seeds with its interval


def write(tuned: Mapping[str, Tuned], root: Path, out: Path, *, title: str, command: str) -> Path:
    """`results.jsonl` with every run, `report.html`, and the figures; returns the path of the page."""
    rows = [
        {"method": name, "learning_rate": rate, "seed": seed, **run}
        for name, own in tuned.items()
        for rate, by_seed in own.runs.items()
        for seed, run in by_seed.items()
    ]
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return report.write(page(tuned, root, title=title, command=command), out)


def page(tuned: Mapping[str, Tuned], root: Path, *, title: str, command: str) -> report.Page:
    names = list(tuned)
    firsts: dict[int, str] = {}  # by batch size
    for name, own in tuned.items():
        firsts.setdefault(own.method.batch_size, name)
    pairs = [(name, firsts[own.method.batch_size]) for name, own in tuned.items()]
    pairs = [(name, first) for name, first in pairs if name != first]
    level = decide.level_of_each(max(1, len(pairs)))
    verdicts = [
        decide.compare(
            f"{name} ends below {first}",
            tuned[name].reported,
            tuned[first].reported,
            level=level,
            names=(name, first),
        )
        for name, first in pairs
    ]
    by_rate = {
        name: {rate: _estimate(runs.values(), "tune_loss") for rate, runs in own.runs.items()}
        for name, own in tuned.items()
    }
    best = {name: decide.estimate(list(own.reported.values())) for name, own in tuned.items()}
    curves = {name: _curve(own, root) for name, own in tuned.items()}
    tuning = report.Section(
        "Learning rates",
        "A method has the learning rate with the lowest mean loss on one half of the validation data. "
        + _edges(tuned),
        figures=[
            report.Figure(
                "Final loss against learning rate",
                "On the half of the validation data that chooses.",
                lambda fig: figures.loss_against_rate(fig, by_rate, names=names),
            )
        ],
    )
    result = report.Section(
        "Each at its best",
        "Losses on the other half of the validation data, which chose nothing.",
        figures=[
            report.Figure(
                "Final loss of each method",
                "At its own best learning rate.",
                lambda fig: figures.bars_with_intervals(fig, best, names=names),
            ),
            report.Figure(
                "Training loss",
                "At the best learning rate, over examples seen.",
                lambda fig: figures.lines_with_bands(fig, curves, "examples seen", "loss", names=names),
            ),
        ],
        tables=[_table(tuned, best)],
        verdicts=verdicts,
    )
    seeds = sorted(tuned[names[0]].reported)
    runs = sum(len(own.runs) for own in tuned.values()) * len(seeds)
    return report.Page(
        title=title,
        question=f"Which ends with the lowest loss: {'; '.join(names)}?",
        claim="None was made beforehand."
        + (f" Asked here: {'; '.join(v.claim for v in verdicts)}?" if verdicts else ""),
        ran=f"{runs} runs, {len(seeds)} seeds.\n\n    {command}",
        sections=[tuning, result],
        config={
            "seeds": seeds,
            "versions": versions(),
            "methods": {name: configs.to_json(own.method) for name, own in tuned.items()},
        },
    )


def _estimate(runs: Any, name: str) -> decide.Estimate:
    return decide.estimate([sweep.loss_of(run, name) for run in runs])


def _edges(tuned: Mapping[str, Tuned]) -> str:
    left = [name for name, own in tuned.items() if own.is_on_edge]
    if not left:
        return "No best value sits on the edge of its grid."
    return f"On the edge of its grid, so perhaps not at its best: {', '.join(left)}."


def _table(tuned: Mapping[str, Tuned], best: Mapping[str, decide.Estimate]) -> report.Table:
    rows: list[Sequence[str]] = []
    for name, own in tuned.items():
        runs = [run for by_seed in own.runs.values() for run in by_seed.values()]
        diverged = sum(run["diverged"] for run in runs)
        rows.append(
            [name, f"{own.method.learning_rate:g}", str(best[name]), f"{diverged} of {len(runs)}"]
        )
    return report.Table("Methods", ["method", "learning rate", "final loss", "runs that diverged"], rows)


def _curve(own: Tuned, root: Path) -> Curve:
    paths = [directory(root, dataclasses.replace(own.method, seed=seed)) for seed in own.reported]
    return curve([[row["loss"] for row in read_metrics(path)] for path in paths], own.method.batch_size)


def curve(runs: Sequence[Sequence[float | None]], batch_size: int) -> Curve:
    """Of a number at each step of each run, in up to `SMOOTHED` points.

    A run that ends with None has diverged there. One that is shorter than the others counts as far as it
    came.
    """
    steps = max(map(len, runs))
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(steps), min(SMOOTHED, steps))])
    points = []
    for first, last in itertools.pairwise([0, *ends]):
        there = [run for run in runs if last <= len(run) or run[-1] is None]
        points.append(decide.estimate([_mean(run[first:last]) for run in there]))
    return ends * batch_size, *np.array([[p.mean, p.low, p.high] for p in points]).T


def _mean(part: Sequence[float | None]) -> float:
    return np.nan if not part or None in part else float(np.mean(np.array(part, float)))
