"""The plane of preconditioners a mu^2 + b sigma^2, at several batch sizes.

The weights (c a, c b) with sqrt(c) times the learning rate are the same optimizer as (a, b). So when
learning rates are tuned, only b / a matters. Every ray from the origin is run once, at its point with
max(a, b) = 1, and all points of the ray have the colour of that run in the map.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from matplotlib.figure import Figure as Sheet

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, findings, panels, report
from pergrad.lab.studies._study import LARGE, NEVER, SMALL, Lab, Study, StudyResult

CAP = 1.0  # the largest update of a coordinate; without this bound, points with b < a / B can diverge
NAMED = {"Adam": None, "MicroAdam": (1.0, 1.0), "MicroAdamVar": (0.0, 1.0), "MicroAdamMSQ": (1.0, 0.0)}
CLAIMS = (("Adam", "MicroAdam"), ("Adam", "MicroAdamVar"), ("MicroAdamMSQ", "Adam"))

Point = tuple[float, float]  # a, the weight of mu^2; b, that of sigma^2


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. `factors` of the learning rate that a point's own scale suggests are tried.

    Every batch size sees `examples` examples. `a` and `b` ascend from 0 to 1.
    """

    base: Train
    examples: int
    batch_sizes: tuple[int, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    seeds: int
    tuning_seeds: int
    rate: float = 5.7e-3
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    extensions: int = 2

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            if 1 / size not in self.b or self.examples % size:
                raise LabError(f"the plane needs Adam's b = 1/{size}, and whole batches of {size}.")


PRESETS = {
    "demo": Preset(
        Train(model=SMALL, validate_every=NEVER, checkpoint_every=NEVER),
        examples=3200,
        batch_sizes=(16,),
        a=(0.0, 1.0),
        b=(0.0, 1 / 16, 1.0),
        seeds=3,
        tuning_seeds=1,
        factors=(1.0, 2.0),
        extensions=0,
    ),
    "quick": Preset(
        Train(model=SMALL, validate_every=NEVER, checkpoint_every=NEVER),
        examples=8192,
        batch_sizes=(4, 16, 64),
        a=(0.0, 1 / 4, 1.0),
        b=(0.0, 1 / 64, 1 / 16, 1 / 4, 1.0),
        seeds=6,
        tuning_seeds=2,
    ),
    "full": Preset(
        Train(model=LARGE, checkpoint_every=1000),
        examples=32_768,
        batch_sizes=(4, 16, 64),
        a=(0.0, 1 / 4, 1.0),
        b=(0.0, 1 / 64, 1 / 16, 1 / 4, 1.0),
        seeds=5,
        tuning_seeds=1,
        rate=2.8e-3,
    ),
}


def run(preset: Preset, lab: Lab) -> StudyResult:
    points = {_on_ray(a, b) for a in preset.a for b in preset.b if a or b}
    methods, rates = {}, {}
    for size in preset.batch_sizes:
        for a, b in sorted(points, key=_slope):
            name = _name(size, (a, b))
            methods[name] = dataclasses.replace(
                preset.base,
                optimizer="preconditioned_adam",
                batch_size=size,
                steps=preset.examples // size,
                mean_square=a,
                variance=b,
                max_update=CAP,
            )
            rates[name] = [factor * _rate(preset, size, (a, b)) for factor in preset.factors]
    tuned = lab.tune(methods, rates, preset)
    verdicts = findings.compare(tuned, claims(preset))
    return StudyResult(
        f"{findings.count(tuned)} A run sees {preset.examples} examples, in batches of "
        f"{', '.join(map(str, preset.batch_sizes))}. No coordinate moves by more than {CAP:g} times the "
        "learning rate in a step, for any point: where b < a / B the estimate of a mu^2 + b sigma^2 "
        "may be negative, and without a cap such runs can diverge (see the study adam).",
        [
            _map(preset, tuned, verdicts),
            *(
                findings.tuning(
                    {name: own for name, own in tuned.items() if own.method.batch_size == size},
                    title=f"Learning rates, batches of {size}",
                )
                for size in preset.batch_sizes
            ),
        ],
        findings.rows(tuned),
    )


def claims(preset: Preset) -> list[tuple[str, str]]:
    """Which point ends below which, at every batch size."""
    return [
        (name_of(size, low), name_of(size, high)) for size in preset.batch_sizes for low, high in CLAIMS
    ]


def name_of(batch_size: int, named: str) -> str:
    """The name of a method, such as `Adam, batch 16`."""
    return _name(batch_size, _point(named, batch_size))


def _slope(point: Point) -> float:
    a, b = point
    return b / a if a else math.inf


def _on_ray(a: float, b: float) -> Point:
    """The point of the same ray whose larger weight is 1."""
    return a / max(a, b), b / max(a, b)


def _point(name: str, batch_size: int) -> Point:
    return NAMED[name] or (1.0, 1 / batch_size)


def _name(batch_size: int, point: Point) -> str:
    """The name of a point, such as `Adam, batch 16`; its weights if it has no name."""
    named = [name for name in NAMED if _point(name, batch_size) == point]
    a, b = map(_fraction, point)
    return f"{named[0] if named else f'a = {a}, b = {b}'}, batch {batch_size}"


def _fraction(x: float) -> str:
    return str(Fraction(x).limit_denominator(10**4))


def _rate(preset: Preset, batch_size: int, point: Point) -> float:
    """The learning rate to begin with, which assumes that mu^2 and sigma^2 / B are about equal."""
    a, b = point
    guess = preset.rate * math.sqrt(a + b * batch_size)
    return 1e-3 * 2.0 ** round(math.log2(guess / 1e-3))


def _map(
    preset: Preset, tuned: Mapping[str, sweep.Tuned], verdicts: list[decide.Verdict]
) -> report.Section:
    best = {name: decide.estimate(list(own.reported.values())) for name, own in tuned.items()}

    def draw(size: int, fig: Sheet) -> None:
        values = [
            [best[_name(size, _on_ray(a, b))].mean if a or b else math.nan for b in preset.b]
            for a in preset.a
        ]
        marks = {}
        for name in NAMED:
            a, b = _point(name, size)
            marks[name] = float(preset.b.index(b)), float(preset.a.index(a))
        figures.heat_map(
            fig,
            range(len(preset.b)),
            range(len(preset.a)),
            np.array(values),
            "b, the weight of sigma^2",
            "a, the weight of mu^2",
            label="final loss (nats), mean over seeds",
            marks=marks,
            ticks=([_fraction(b) for b in preset.b], [_fraction(a) for a in preset.a]),
            missing="diverged, or nothing to divide by (a = b = 0)",
        )

    rows = [
        [name, f"{own.method.learning_rate:g}", str(best[name]), "yes" * own.is_on_edge]
        for name, own in tuned.items()
    ]
    rays = report.Table(
        "Rays, by b / a", ["point", "learning rate", "final loss", "on the edge of its grid"], rows
    )
    return report.Section(
        "The plane",
        "Losses on the half of the validation data that chose nothing, at each point's own best "
        "learning rate. (c a, c b) with sqrt(c) times the learning rate is the same optimizer, so all "
        "points of a ray from the origin have one colour.",
        figures=[
            report.Figure(
                f"Batches of {size}",
                f"Final loss at each point of the plane, with batches of {size}; darker is better.",
                functools.partial(draw, size),
            )
            for size in preset.batch_sizes
        ]
        + [
            panels.of_table(
                rays, "Final loss of each ray", "Each at the learning rate that was chosen for it."
            )
        ],
        tables=[rays],
        verdicts=verdicts,
    )


STUDY = Study(
    title="The plane of preconditioners",
    question="Adam divides by the root of an average of a mu^2 + b sigma^2 with a = 1, b = 1/B. Is that "
    "a good point of the plane?",
    claim="Adam works best when mu^2 dominates, not sigma^2 (arXiv 2510.00236): weights b above 1/B end "
    "higher, and mu^2 alone ends below Adam.",
    presets=PRESETS,
    run=run,
)
