"""What pages show, made up: drawings of all kinds, runs that never ran, a page with everything."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pergrad.lab.compare.decide import Estimate, compare, estimate
from pergrad.lab.config import Train, to_json
from pergrad.lab.pages import figures
from pergrad.lab.pages.report import Figure, Page, Section, Table

LOST = Estimate(math.nan, -math.inf, math.inf, 3)

STEPS = np.arange(1, 41)
FALL = 2 + 3 / STEPS
CURVES = {
    "Adam": (STEPS, FALL, FALL - 0.1, FALL + 0.1),
    "SignSGD": (STEPS, np.where(STEPS < 20, FALL + 0.5, np.nan), FALL, FALL + 1),
    "one seed": (STEPS, FALL + 0.2, np.full(40, -np.inf), np.full(40, np.inf)),
    "never": (STEPS, np.full(40, np.inf), np.full(40, np.nan), np.full(40, np.nan)),
}
RATES = {
    "Adam": {1e-3: estimate([2.0, 2.1, 2.2]), 3e-3: estimate([1.8, 1.9, 1.9]), 1e-2: LOST},
    "SignSGD": {1e-4: estimate([2.5]), 1e-3: estimate([2.3])},
    "never": {1e-3: LOST},
}
BEST = {"Adam": estimate([1.8, 1.9, 1.9]), "SignSGD": estimate([2.3]), "never": LOST}
X, Y = [1e-4, 1e-3, 1e-2], [0.0, 1.0]
MAP = [[1.0, 2.0, math.nan], [3.0, 4.0, math.inf]]


def a_map(fig, values=MAP):
    marks = {"best": (1e-4, 0.0), "theory": (3e-4, 0.5)}
    figures.heat_map(fig, X, Y, values, "rate", "mix", label="loss", marks=marks, logx=True)


DRAWINGS = {
    "lines": lambda fig: figures.lines_with_bands(fig, CURVES, "step", "loss", logx=True),
    "rates": lambda fig: figures.loss_against_rate(fig, RATES),
    "bars": lambda fig: figures.bars_with_intervals(fig, BEST),
    "map": a_map,
}


def made(path: Path, config: Train, losses: Sequence[float | None], *, data: str = "a") -> Path:
    """The files of a run with these losses, of which None is one that is not finite."""
    path.mkdir(parents=True)
    about = {"config": to_json(config), "data": {"name": data, "digest": data}, "versions": {}}
    (path / "config.json").write_text(json.dumps(about))
    rows = [{"step": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if len(losses) == config.steps:
        end = dict.fromkeys(("train_loss", "tune_loss", "test_loss"), losses[-1])
        end = {"steps": len(losses), "diverged": losses[-1] is None, **end}
        (path / "result.json").write_text(json.dumps(end))
    return path


def a_line(sheet):
    sheet.add_subplot().plot([1, 2, 3], [3, 1, 2])


LINE = Figure("A line", "It goes down and up.", a_line)


def a_page(text="text", drawn=(LINE,)):
    """A page with figures, a table, verdicts and settings, all of which say `text`."""
    table = Table(text, [text, "loss"], [[text, "1.5"], ["x", "-2e-3 (1 seed)"]])
    losses = {0: 1.0, 1: 1.1, 2: 1.2}
    verdicts = [
        compare(text, losses, {seed: x + 1 + x / 9 for seed, x in losses.items()}),
        compare(text, losses, {seed: x - 1 - x / 9 for seed, x in losses.items()}),
        dataclasses.replace(compare("unclear", losses, losses), why=text),
    ]
    sections = [
        Section(text, text, drawn, [table], verdicts),
        Section("2", f"one\n\n    {text}\n\ntwo"),
    ]
    config = {text: text, "versions": {text: text, "jax": "0.7"}, "seeds": [0, 1, text], "none": {}}
    return Page(text, text, text, text, sections, config)
