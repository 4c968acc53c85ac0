"""What Adam divides by: the square of the batch's mean, the examples' mean square, variance, or mu^2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import OptimizerName, Train
from pergrad.lab.pages import findings, report
from pergrad.lab.run import records
from pergrad.lab.studies._study import LARGE, SMALL, Lab, Study, StudyResult

ADAM, MICRO, VAR, MSQ, CAPPED = (
    "Adam",
    "MicroAdam",
    "MicroAdamVar",
    "MicroAdamMSQ",
    "MicroAdamMSQ capped",
)
NAMES: dict[str, OptimizerName] = {
    ADAM: "adam",
    MICRO: "micro_adam",
    VAR: "micro_adam_var",
    MSQ: "micro_adam_msq",
    CAPPED: "micro_adam_msq",
}
CAP = 1.0  # the largest update of a coordinate, before the learning rate, of the capped MSQ
CLIP = 1.0  # the largest norm of the mean gradient, in the clipped half of the runs
CLIPPED = ", clipped"
CLAIMS = (
    (ADAM, MICRO),
    (ADAM, VAR),
    (MICRO + CLIPPED, MICRO),
    (VAR + CLIPPED, VAR),
    (ADAM + CLIPPED, MICRO + CLIPPED),
    (ADAM + CLIPPED, VAR + CLIPPED),
    (CAPPED, MICRO),
    (CAPPED, ADAM),
)
LESS_STABLE = (MICRO, VAR)  # the methods that are said to be less stable than Adam
SPIKE = 0.5  # a loss so many nats above the lowest mean of `CALM` steps before it is a spike
CALM = 20


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. The first `tuning_seeds` seeds choose learning rates, from `rates`."""

    base: Train
    seeds: int
    tuning_seeds: int
    rates: Mapping[str, tuple[float, ...]]
    extensions: int = 2


_RATES = {
    ADAM: (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    MICRO: (1.6e-2, 3.2e-2, 6.4e-2, 0.128),
    VAR: (1.6e-2, 3.2e-2, 6.4e-2, 0.128),
    MSQ: (1e-4, 4e-4, 1.6e-3, 6.4e-3),
    CAPPED: (4e-3, 8e-3, 1.6e-2, 3.2e-2),
}
PRESETS = {
    "demo": Preset(
        Train(model=SMALL, batch_size=16, steps=200, validate_every=200, checkpoint_every=200),
        seeds=3,
        tuning_seeds=1,
        rates={name: rates[1:3] for name, rates in _RATES.items()},
        extensions=0,
    ),
    "quick": Preset(
        Train(model=SMALL, batch_size=64, steps=300, validate_every=300, checkpoint_every=300),
        seeds=8,
        tuning_seeds=2,
        rates=_RATES,
    ),
    "full": Preset(
        Train(
            model=LARGE,
            batch_size=64,
            steps=3000,
            validate_every=1000,
            checkpoint_every=1000,
        ),
        seeds=5,
        tuning_seeds=1,
        rates={name: tuple(rate / 4 for rate in rates) for name, rates in _RATES.items()},
    ),
}


def run(preset: Preset, lab: Lab) -> StudyResult:
    methods = {
        name + suffix: dataclasses.replace(
            preset.base, optimizer=optimizer, max_update=CAP if name == CAPPED else None, clip=clip
        )
        for suffix, clip in (("", None), (CLIPPED, CLIP))
        for name, optimizer in NAMES.items()
    }
    tuned = lab.tune(
        methods, {name: preset.rates[name.removesuffix(CLIPPED)] for name in methods}, preset
    )
    return StudyResult(
        f"{findings.count(tuned)} A run takes {preset.base.steps} steps of {preset.base.batch_size} "
        "examples. "
        f"Clipped: the mean gradient to a norm of at most {CLIP:g}, and its statistics with it. Capped: "
        f"no coordinate moves by more than {CAP:g} times the learning rate in a step.",
        [
            findings.at_best(tuned, lab.runs, findings.compare(tuned, CLAIMS)),
            _stability(tuned, lab.runs),
            findings.tuning(tuned),
        ],
        findings.rows(tuned),
    )


def has_spike(losses: Sequence[float | None]) -> bool:
    """Whether a loss is None, or more than `SPIKE` above the lowest mean of `CALM` steps before it.

    >>> has_spike([3.0] * 30 + [3.6] + [3.0] * 30), has_spike([3.0] * 60), has_spike([3.0] * 30 + [None])
    (True, False, True)
    """
    if None in losses:
        return True
    x = np.array(losses, float)
    if len(x) <= CALM:
        return False
    means = np.convolve(x, np.full(CALM, 1 / CALM), "valid")
    return bool(np.any(x[CALM:] > np.minimum.accumulate(means)[:-1] + SPIKE))


def _stability(tuned: Mapping[str, sweep.Tuned], root: Path) -> report.Section:
    """Runs that diverged and runs with spikes, at the chosen learning rate and at all."""
    rows: list[list[str]] = []
    spikes: dict[str, dict[int, float]] = {}
    for name, own in tuned.items():
        cells: list[str] = []
        spikes[name] = {}
        for rates in ([own.method.learning_rate], list(own.runs)):
            runs: list[tuple[dict[str, Any], bool]] = []
            for rate in rates:
                for seed, result in own.runs[rate].items():
                    config = dataclasses.replace(own.method, learning_rate=rate, seed=seed)
                    losses = [
                        row["loss"] for row in records.read_metrics(records.directory(root, config))
                    ]
                    runs.append((result, result["diverged"] or has_spike(losses)))
                    if rate == own.method.learning_rate:
                        spikes[name][seed] = float(runs[-1][1])
            diverged = sum(result["diverged"] for result, _ in runs)
            cells += [f"{diverged} of {len(runs)}", f"{sum(spike for _, spike in runs)} of {len(runs)}"]
        rows.append([name, *cells])
    verdicts = [
        decide.compare(
            f"runs of Adam have a spike less often than runs of {name}",
            spikes[ADAM],
            spikes[name],
            level=decide.level_of_each(len(LESS_STABLE)),
            names=(ADAM, name),
        )
        for name in LESS_STABLE
    ]
    return report.Section(
        "Stability",
        f"A run has a spike if the loss of a step is more than {SPIKE:g} above the lowest mean of "
        f"{CALM} steps before it; a run that diverged has one. At the chosen learning rate, and over "
        "the whole grid, which is not the same for all methods.",
        tables=[
            report.Table(
                "Runs",
                ["method", "diverged", "with a spike", "diverged, all rates", "with a spike, all rates"],
                rows,
            )
        ],
        verdicts=verdicts,
    )


STUDY = Study(
    title="What Adam divides by",
    question="Adam divides by the root of an average of gbar^2 = mu^2 + sigma^2 / B. What if the "
    "average is of the examples' squares (MicroAdam), of their variance (MicroAdamVar), or of mu^2 "
    "alone (MicroAdamMSQ), and what does clipping change?",
    claim="Adam is best when mu^2 dominates: MicroAdam and MicroAdamVar are less stable, clipping helps "
    "them, and they still end behind Adam (arXiv 2510.00236).",
    presets=PRESETS,
    run=run,
)
