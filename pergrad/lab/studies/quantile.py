"""Clipping at a quantile of the examples' norms, where some of the examples are of no use.

A share of the training examples is replaced by random tokens or pixels. Their gradients are large and
say nothing. Clipping the gradient of the batch cannot tell them from the others, and clipping every
example's at a fixed norm needs the right norm, which falls as a run goes on. A quantile follows it: with
the quantile 0.8, a fifth of the examples is clipped, in every step. It is an average over the batches
before, so a step needs no second pass. Losses are those of validation data without such examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Train
from pergrad.lab.pages import findings
from pergrad.lab.studies._study import LARGE, NEVER, SMALL, Lab, Study, StudyResult

NONE, BATCH, EXAMPLE, QUANTILE = "not clipped", "by batch", "by example", "by quantile"
MARGIN = 0.02  # nats: a smaller difference of final losses does not matter
CLEAN = ", no outliers"  # follows the name of a method that has none
CLAIMS = ((QUANTILE, NONE), (QUANTILE, BATCH), (QUANTILE, EXAMPLE))


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. `base` has the share of outliers; seeds that are not reported choose norms."""

    base: Train
    seeds: int
    tuning_seeds: int
    rates: tuple[float, ...]
    batch_norms: tuple[float, ...]
    example_norms: tuple[float, ...]
    quantiles: tuple[float, ...]
    extensions: int = 2


_BASE = Train(model=SMALL, outliers=0.2, validate_every=NEVER, checkpoint_every=NEVER)
PRESETS = {
    "demo": Preset(
        dataclasses.replace(_BASE, steps=200),
        seeds=3,
        tuning_seeds=1,
        rates=(8e-3, 1.6e-2),
        batch_norms=(1.0,),
        example_norms=(2.0,),
        quantiles=(0.7,),
        extensions=0,
    ),
    "quick": Preset(
        dataclasses.replace(_BASE, steps=1000),
        seeds=6,
        tuning_seeds=2,
        rates=(4e-3, 8e-3, 1.6e-2),
        batch_norms=(0.5, 1.0),
        example_norms=(1.0, 2.0),
        quantiles=(0.5, 0.8),
    ),
    "full": Preset(
        dataclasses.replace(_BASE, model=LARGE, steps=3000),
        seeds=6,
        tuning_seeds=2,
        rates=(2e-3, 4e-3, 8e-3),
        batch_norms=(0.5, 1.0),
        example_norms=(0.5, 1.0, 2.0),
        quantiles=(0.2, 0.5, 0.8),
    ),
}


def run(preset: Preset, lab: Lab) -> StudyResult:
    base = preset.base

    def clipped(by: Any, values: tuple[float, ...]) -> dict[str, Train]:
        return {f" at {x:g}": dataclasses.replace(base, clip=x, clip_by=by) for x in values}

    methods = {
        NONE: {"": base},
        BATCH: clipped("batch", preset.batch_norms),
        EXAMPLE: clipped("example", preset.example_norms),
        QUANTILE: clipped("quantile", preset.quantiles),
        NONE + CLEAN: {"": dataclasses.replace(base, outliers=0.0)},
    }
    found = lab.choose(methods, dict.fromkeys(methods, preset.rates), preset)
    return StudyResult(
        f"{len(findings.configs(found.every) | findings.configs(found.tuned))} training runs of Adam, "
        f"with {preset.seeds} seeds. A run takes {base.steps} steps of {base.batch_size} examples, of "
        f"which {base.outliers:.0%} are random. Norms and quantiles were chosen together with learning "
        "rates.",
        [
            findings.at_best(found.tuned, lab.runs, decided(found.tuned)),
            findings.options(found.every, found.best, "Norms and quantiles"),
            findings.tuning(found.tuned),
        ],
        [
            *findings.rows(found.every),
            *findings.rows(found.tuned),
            {"best": found.best},
        ],
    )


def decided(tuned: Mapping[str, sweep.Tuned]) -> list[decide.Verdict]:
    """Whether clipping at a quantile ends below the others, and within `MARGIN` of no outliers."""
    level = decide.level_of_each(len(CLAIMS) + 1)
    losses = {name: own.reported for name, own in tuned.items()}
    clean = NONE + CLEAN
    return [
        *(
            decide.compare(
                f"{low} ends below {high}", losses[low], losses[high], level=level, names=(low, high)
            )
            for low, high in CLAIMS
        ),
        decide.equivalent(
            f"{QUANTILE} ends within {MARGIN:g} of training without outliers",
            *(losses[QUANTILE], losses[clean]),
            margin=MARGIN,
            level=level,
            names=(QUANTILE, clean),
        ),
    ]


STUDY = Study(
    title="Clipping at a quantile, with useless examples",
    question="If some of the training examples are random, does clipping every example's gradient at a "
    "quantile of their norms end below no clipping, and below clipping at a norm that was tuned?",
    claim="The paper makes none (arXiv 2510.00236). Tested is that clipping by quantile ends below no "
    "clipping, clipping by batch, and clipping by example at the best norm, and that it ends within "
    f"{MARGIN:g} of training without such examples.",
    presets=PRESETS,
    run=run,
)
