"""What Adam divides by: the square of the batch's mean, the examples' mean square, variance, or mu^2."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import OptimizerName, Train
from pergrad.lab.pages import findings, panels, report
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
FACTORS = (1, 2, 4, 8)  # times each method's best learning rate: where stability is judged
SPIKE = 0.5  # a loss so many nats above the lowest mean of `CALM` steps before it is a spike
CALM = 20


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. `tuning_seeds` seeds, which are not reported, choose learning rates."""

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
            steps=700,
            validate_every=700,
            checkpoint_every=700,
        ),
        seeds=7,  # the fewest with which ranks can decide two claims: 2 / 2^7 is below 0.05 / 2
        tuning_seeds=1,
        rates={name: tuple(rate / 2 for rate in rates) for name, rates in _RATES.items()},
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
    stable, rows = _stability(tuned, lab)
    return StudyResult(
        f"{findings.count(tuned)} A run takes {preset.base.steps} steps of {preset.base.batch_size} "
        "examples. "
        f"Clipped: the mean gradient to a norm of at most {CLIP:g}, and its statistics with it. Capped: "
        f"no coordinate moves by more than {CAP:g} times the learning rate in a step.",
        [
            findings.at_best(tuned, lab.runs, findings.compare(tuned, CLAIMS)),
            stable,
            findings.tuning(tuned),
        ],
        [*findings.rows(tuned), *rows],
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


def _stability(
    tuned: Mapping[str, sweep.Tuned], lab: Lab
) -> tuple[report.Section, list[dict[str, Any]]]:
    """Runs that diverged and runs with spikes, at `FACTORS` times each best learning rate."""
    runs = {
        (name, factor, seed): dataclasses.replace(
            tuned[name].method,
            learning_rate=float(f"{factor * tuned[name].method.learning_rate:.6g}"),
            seed=seed,
        )
        for name in (ADAM, *LESS_STABLE)
        for factor in FACTORS
        for seed in tuned[name].runs
    }
    results = lab.run(runs.values())
    rows = []
    for (name, factor, seed), config in runs.items():
        losses = [row["loss"] for row in records.read_metrics(records.directory(lab.runs, config))]
        diverged = results[config]["diverged"]
        rows.append(
            {"stability": name, "factor": factor, "seed": seed, "learning_rate": config.learning_rate}
            | {"diverged": diverged, "spike": diverged or has_spike(losses)}
        )
    return stability(rows), rows


def stability(rows: Sequence[Mapping[str, Any]]) -> report.Section:
    """The section on stability, from a row for each method, factor and seed."""
    cells: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    spikes: dict[str, Counter[int]] = {name: Counter() for name in (ADAM, *LESS_STABLE)}
    for row in rows:
        cells.setdefault((row["stability"], row["factor"]), []).append(row)
        spikes[row["stability"]][row["seed"]] += row["spike"]
    table = [
        [
            name,
            f"{factor}",
            f"{own[0]['learning_rate']:g}",
            f"{sum(row['diverged'] for row in own)} of {len(own)}",
            f"{sum(row['spike'] for row in own)} of {len(own)}",
        ]
        for (name, factor), own in cells.items()
    ]
    verdicts = [
        decide.by_ranks(
            f"runs of Adam have a spike at fewer of the learning rates than runs of {name}",
            spikes[ADAM],
            spikes[name],
            level=decide.level_of_each(len(LESS_STABLE)),
            names=(ADAM, name),
        )
        for name in LESS_STABLE
    ]
    runs = report.Table(
        "Runs",
        ["method", "times the best rate", "learning rate", "diverged", "with a spike"],
        table,
    )
    factors = ", ".join(map(str, FACTORS[:-1]))
    return report.Section(
        "Stability",
        f"A run has a spike if the loss of a step is more than {SPIKE:g} above the lowest mean of "
        f"{CALM} steps before it; a run that diverged has one. Each method runs at {factors} and "
        f"{FACTORS[-1]} times its own best learning rate, and the number of these rates at which a seed "
        "has a spike is compared.",
        figures=[
            panels.of_table(
                runs,
                "Runs that diverged, and runs with a spike",
                "At several multiples of each method's best learning rate.",
                names=2,
            )
        ],
        tables=[runs],
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
