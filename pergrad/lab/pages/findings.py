"""From tuned methods to a page: what was tried, how each method did, and what that shows.

The rule is fixed here, before any run: every method is compared with the first one of its batch size, on
the half of the validation data that did not choose the learning rate, paired by seeds, at a level that
all claims share (see `decide`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Train, to_json
from pergrad.lab.pages import figures, panels, report
from pergrad.lab.run import records

SMOOTHED = 20  # points of a curve, each the mean over a twentieth of the run

Curve = tuple[Any, Any, Any, Any]  # examples seen, and the mean over seeds with its interval


def write(tuned: Mapping[str, sweep.Tuned], root: Path, out: Path, *, title: str, command: str) -> Path:
    """Writes `results.jsonl` with every run, the figures, and `report.html`, whose path is returned."""
    return report.write(page(tuned, root, title=title, command=command), out, rows(tuned))


def rows(tuned: Mapping[str, sweep.Tuned]) -> list[dict[str, Any]]:
    """Every run: its method, learning rate and seed, and how it ended."""
    return [
        {"method": name, "learning_rate": rate, "seed": seed, **run}
        for name, own in tuned.items()
        for rate, seed, run in _runs(own)
    ]


def _runs(own: sweep.Tuned) -> list[tuple[float, int, dict[str, Any]]]:
    """The learning rate, the seed and the result of every run: first of those that chose the rate."""
    tried = [(rate, seed, run) for rate, runs in own.tried.items() for seed, run in runs.items()]
    return tried + [(own.method.learning_rate, seed, run) for seed, run in own.runs.items()]


def read(rows: Sequence[Mapping[str, Any]], methods: Mapping[str, Train]) -> dict[str, sweep.Tuned]:
    """The inverse of `rows`, from the lines of a `results.jsonl`; `methods` are the methods by name."""
    out = {}
    for name, method in methods.items():
        tried: dict[float, dict[int, Any]] = {}
        runs: dict[int, Any] = {}
        rate = method.learning_rate
        for row in (row for row in rows if row.get("method") == name):
            if row["seed"] >= sweep.TUNING_SEED:
                tried.setdefault(row["learning_rate"], {})[row["seed"]] = row
            else:
                runs[row["seed"]], rate = row, row["learning_rate"]
        out[name] = sweep.Tuned(dataclasses.replace(method, learning_rate=rate), tried, runs)
    return out


def page(tuned: Mapping[str, sweep.Tuned], root: Path, *, title: str, command: str) -> report.Page:
    firsts: dict[int, str] = {}  # by batch size
    for name, own in tuned.items():
        firsts.setdefault(own.method.batch_size, name)
    pairs = [(name, firsts[own.method.batch_size]) for name, own in tuned.items()]
    verdicts = compare(tuned, [(name, first) for name, first in pairs if name != first])
    return report.Page(
        title=title,
        question=f"Which ends with the lowest loss: {'; '.join(tuned)}?",
        claim="None was made beforehand."
        + (f" Asked here: {'; '.join(v.claim for v in verdicts)}?" if verdicts else ""),
        ran=f"{count(tuned)}\n\n    {command}",
        sections=[tuning(tuned), at_best(tuned, root, verdicts)],
        config={
            "seeds": sorted(next(iter(tuned.values())).reported),
            "versions": records.versions(),
            **report.settings({name: to_json(own.method) for name, own in tuned.items()}),
        },
    )


def count(tuned: Mapping[str, sweep.Tuned]) -> str:
    """How many runs there were, in words."""
    seeds = max(len(own.reported) for own in tuned.values())
    return (
        f"{len(rows(tuned))} training runs. At the learning rate that was chosen for it, each method "
        f"ran with {seeds} seed{'s' * (seeds > 1)}, none of which chose it."
    )


def configs(tuned: Mapping[str, sweep.Tuned]) -> set[Train]:
    """The configurations of all runs."""
    return {
        dataclasses.replace(own.method, learning_rate=rate, seed=seed)
        for own in tuned.values()
        for rate, seed, _ in _runs(own)
    }


def compare(tuned: Mapping[str, sweep.Tuned], pairs: Sequence[tuple[str, str]]) -> list[decide.Verdict]:
    """Whether the first of each pair ends below the second; all pairs share the level."""
    level = decide.level_of_each(max(1, len(pairs)))
    return [
        decide.compare(
            f"{low} ends below {high}",
            tuned[low].reported,
            tuned[high].reported,
            level=level,
            names=(low, high),
        )
        for low, high in pairs
    ]


def tuning(tuned: Mapping[str, sweep.Tuned], title: str = "Learning rates") -> report.Section:
    """Which learning rates were tried, and how they did with the seeds that choose."""
    by_rate = {
        name: {rate: decide.estimate(losses) for rate, losses in own.by_rate.items()}
        for name, own in tuned.items()
    }
    notes = {
        name: f"chosen: {own.method.learning_rate:g}\ndiverged: {_diverged(own)} runs"
        for name, own in tuned.items()
    }
    return report.Section(
        title,
        "Each method was given the learning rate at the lowest point of a parabola through the best "
        "rate and its two neighbours, by the mean loss on one half of the validation data, over seeds "
        "that are not reported. " + _edges(tuned),
        figures=[
            report.Figure(
                "Final loss against learning rate",
                "Lower is better. The losses are those on the half of the validation data that chooses "
                "the learning rate, with the seeds that choose it.",
                lambda fig: figures.loss_against_rate(fig, by_rate, names=list(tuned), notes=notes),
            )
        ],
    )


def options(
    every: Mapping[str, sweep.Tuned], best: Mapping[str, str], title: str, note: str = ""
) -> report.Section:
    """Which options of each method were tried, and which one was chosen, the `best`."""
    chosen = {name + option for name, option in best.items()}
    rows = [
        [name, f"{own.method.learning_rate:.3g}", f"{own.tuning_loss:.4f}", "yes" * (name in chosen)]
        for name, own in every.items()
    ]
    table = report.Table("", ["method", "learning rate", "loss", "chosen"], rows)
    return report.Section(
        title,
        "Losses on the half of the validation data that chooses, over the seeds that choose." + note,
        figures=[
            panels.of_table(
                table,
                f"{title}: the losses that chose",
                "The lowest mean loss of the learning rates that were tried, and the rate chosen.",
            )
        ],
        tables=[table],
    )


def at_best(
    tuned: Mapping[str, sweep.Tuned], root: Path, verdicts: Sequence[decide.Verdict]
) -> report.Section:
    """How each method ended at the learning rate that was chosen for it."""
    names = list(tuned)
    best = {name: decide.estimate(list(own.reported.values())) for name, own in tuned.items()}
    curves = {
        name: curve(metric(chosen(own, root)), own.method.batch_size) for name, own in tuned.items()
    }
    return report.Section(
        "Each at its best",
        "Each method runs at the learning rate that suits it best. One half of the validation data "
        "chose that rate, with other seeds; the losses here are those on the other half. One method "
        "ends below another if its loss at the end of training is lower.",
        figures=[
            report.Figure(
                "Final loss of each method",
                "The loss at the end of training; lower is better.",
                lambda fig: figures.bars_with_intervals(fig, best, names=names),
            ),
            report.Figure(
                "Training loss",
                "Each point is the mean over a twentieth of the steps, and over the seeds.",
                lambda fig: figures.lines_with_bands(
                    fig, curves, "examples seen", "training loss (nats)", names=names
                ),
            ),
        ],
        tables=[_table(tuned, best)],
        verdicts=verdicts,
    )


def _edges(tuned: Mapping[str, sweep.Tuned]) -> str:
    left = [name for name, own in tuned.items() if own.is_on_edge]
    if not left:
        return "No best rate is the smallest or the largest that was tried."
    return (
        "For these methods it is the smallest or the largest that was tried, so another may suit them "
        f"better: {'; '.join(left)}."
    )


def _table(tuned: Mapping[str, sweep.Tuned], best: Mapping[str, decide.Estimate]) -> report.Table:
    rows = [
        [name, f"{own.method.learning_rate:g}", str(best[name]), _diverged(own)]
        for name, own in tuned.items()
    ]
    return report.Table(
        "Methods", ["method", "learning rate", "final loss (nats)", "runs that diverged"], rows
    )


def _diverged(own: sweep.Tuned) -> str:
    """How many of a method's runs diverged, those that chose its learning rate included."""
    runs = _runs(own)
    return f"{sum(run['diverged'] for _, _, run in runs)} of {len(runs)}"


def chosen(own: sweep.Tuned, root: Path) -> list[Path]:
    """The directories of the runs at the chosen learning rate, one for each seed."""
    return [records.directory(root, dataclasses.replace(own.method, seed=seed)) for seed in own.reported]


def metric(runs: Sequence[Path], key: str = "loss") -> list[list[float | None]]:
    """A metric of each run, at every step."""
    return [[row[key] for row in records.read_metrics(run)] for run in runs]


def curve(runs: Sequence[Sequence[float | None]], batch_size: int) -> Curve:
    """The curve, in up to `SMOOTHED` points, of numbers that each run has at each step.

    A run that ends with None has diverged there. A run that is shorter than the others counts as far as
    it came.
    """
    steps = max(map(len, runs))
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(steps), min(SMOOTHED, steps))])
    points = []
    for first, last in itertools.pairwise([0, *ends]):
        there = [run for run in runs if last <= len(run) or run[-1] is None]
        points.append(decide.estimate([_mean(run[first:last]) for run in there]))
    return ends * batch_size, *figures.columns(points)


def _mean(part: Sequence[float | None]) -> float:
    return np.nan if not part or None in part else float(np.mean(np.array(part, float)))
