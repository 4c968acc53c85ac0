"""What clipping does over a whole run: no clipping, that of the mean gradient, that of every example.

Two questions are asked about either kind of clipping, since a small gain may be real and not matter:
whether it ends below no clipping, and whether it ends within `MARGIN` of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import OptimizerName, Train
from pergrad.lab.pages import figures, findings, report
from pergrad.lab.studies._study import LARGE, SMALL, Lab, Study, StudyResult

OPTIMIZERS: dict[str, OptimizerName] = {"Adam": "adam", "MicroAdam": "micro_adam"}
NONE, BATCH, EXAMPLE = "not clipped", "by batch", "by example"
MARGIN = 0.03  # nats: a smaller difference of final losses does not matter


def name_of(optimizer: str, kind: str) -> str:
    """The name of a method, such as `Adam, by batch`."""
    return f"{optimizer}, {kind}"


CLAIMS = tuple(
    (name_of(optimizer, low), name_of(optimizer, high))
    for optimizer in OPTIMIZERS
    for low, high in ((BATCH, NONE), (EXAMPLE, NONE))
)


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. `tuning_seeds` seeds, which are not reported, choose norms and learning rates."""

    base: Train
    seeds: int
    tuning_seeds: int
    rates: Mapping[str, tuple[float, ...]]  # by optimizer
    batch_norms: tuple[float, ...]
    example_norms: tuple[float, ...]
    extensions: int = 2


_RATES = {"Adam": (4e-3, 8e-3, 1.6e-2), "MicroAdam": (1.6e-2, 3.2e-2, 6.4e-2)}
PRESETS = {
    "demo": Preset(
        Train(model=SMALL, steps=200, validate_every=200, checkpoint_every=200),
        seeds=3,
        tuning_seeds=1,
        rates={name: rates[:2] for name, rates in _RATES.items()},
        batch_norms=(1.0,),
        example_norms=(2.0,),
        extensions=0,
    ),
    "quick": Preset(
        Train(model=SMALL, steps=1500, validate_every=500, checkpoint_every=500),
        seeds=8,
        tuning_seeds=2,
        rates=_RATES,
        batch_norms=(0.5, 1.0),
        example_norms=(1.0, 4.0),
    ),
    "full": Preset(
        Train(
            model=LARGE,
            steps=5000,
            validate_every=1000,
            checkpoint_every=1000,
        ),
        seeds=5,
        tuning_seeds=1,
        rates={name: tuple(rate / 2 for rate in rates) for name, rates in _RATES.items()},
        batch_norms=(0.25, 0.5, 1.0),
        example_norms=(0.5, 1.0, 2.0, 4.0),
    ),
}


def run(preset: Preset, lab: Lab) -> StudyResult:
    methods: dict[str, dict[str, Train]] = {}  # by optimizer and kind, then with every norm
    for name, optimizer in OPTIMIZERS.items():
        base = dataclasses.replace(preset.base, optimizer=optimizer)
        methods[name_of(name, NONE)] = {"": base}
        for kind, by, norms in (
            (BATCH, "batch", preset.batch_norms),
            (EXAMPLE, "example", preset.example_norms),
        ):
            methods[name_of(name, kind)] = {
                f" at {norm:g}": dataclasses.replace(base, clip=norm, clip_by=by) for norm in norms
            }

    rates = {name: preset.rates[name.split(",")[0]] for name in methods}
    found = lab.choose(methods, rates, preset)
    every, best, tuned = found.every, found.best, found.tuned
    return StudyResult(
        f"{len(findings.configs(every) | findings.configs(tuned))} training runs, with {preset.seeds} "
        f"seeds. A run takes {preset.base.steps} steps of {preset.base.batch_size} examples. Norms were "
        f"chosen together with learning rates, of the batch's gradient from "
        f"{_listed(preset.batch_norms)}, of an example's from {_listed(preset.example_norms)}.",
        [
            findings.at_best(tuned, lab.runs, decided(tuned)),
            _over_the_run(preset, tuned, lab),
            _norms(preset, every, best),
            findings.tuning(tuned),
        ],
        findings.rows(every | {name + best[name]: own for name, own in tuned.items()}),
    )


def decided(tuned: Mapping[str, sweep.Tuned]) -> list[decide.Verdict]:
    """Whether clipping ends below no clipping, and whether within `MARGIN` of it, at a shared level."""
    level = decide.level_of_each(2 * len(CLAIMS))
    losses = {name: own.reported for name, own in tuned.items()}
    verdicts = []
    for low, high in CLAIMS:
        pair: dict[str, Any] = {"level": level, "names": (low, high)}
        verdicts += [
            decide.compare(f"{low} ends below {high}", losses[low], losses[high], **pair),
            decide.equivalent(
                f"{low} ends within {MARGIN:g} of {high}",
                *(losses[low], losses[high]),
                margin=MARGIN,
                **pair,
            ),
        ]
    return verdicts


def _listed(norms: Sequence[float]) -> str:
    return ", ".join(f"{norm:g}" for norm in norms)


def _difference(a: Sequence[float | None], b: Sequence[float | None]) -> list[float | None]:
    """The difference of two curves at each step, up to where one of them diverged."""
    pairs = zip(a, b, strict=False)
    return [None if x is None or y is None else x - y for x, y in pairs]


def _over_the_run(preset: Preset, tuned: Mapping[str, sweep.Tuned], lab: Lab) -> report.Section:
    paths = {name: findings.chosen(own, lab.runs) for name, own in tuned.items()}
    losses = {name: findings.metric(runs) for name, runs in paths.items()}
    size = preset.base.batch_size
    gains = {
        name: findings.curve(
            list(map(_difference, losses[name], losses[name_of(name.split(",")[0], NONE)])), size
        )
        for name in tuned
        if NONE not in name
    }
    norms = {
        name: findings.curve(findings.metric(runs, "gradient_norm"), size)
        for name, runs in paths.items()
    }
    names = list(tuned)
    return report.Section(
        "Over the whole run",
        "Each at its own best learning rate and norm. Gradient norms are those of the mean gradient "
        "that the optimizer was given: before the batch's is clipped, after the examples' are.",
        figures=[
            report.Figure(
                "Training loss less that without clipping",
                "The difference of runs with the same seed. Below 0, the run that clips is ahead.",
                lambda fig: figures.lines_with_bands(
                    fig, gains, "examples seen", "difference of training losses (nats)", names=names
                ),
            ),
            report.Figure(
                "Norm of the mean gradient",
                "Each point is the mean over a twentieth of the steps, and over the seeds.",
                lambda fig: figures.lines_with_bands(fig, norms, "examples seen", "norm", names=names),
            ),
        ],
    )


def _norms(preset: Preset, every: Mapping[str, sweep.Tuned], best: Mapping[str, str]) -> report.Section:
    lists = {BATCH: preset.batch_norms, EXAMPLE: preset.example_norms}
    ends = [
        name
        for name, norm in best.items()
        for kind, norms in lists.items()
        if name.endswith(kind) and norm in (f" at {min(norms):g}", f" at {max(norms):g}")
    ]
    note = f" At an end of its list, so perhaps not at its best: {'; '.join(ends)}." if ends else ""
    return findings.options(every, best, "Norms", note)


STUDY = Study(
    title="Clipping, over the whole run",
    question="Does clipping every example's gradient do what clipping the batch's does, and does either "
    "change where a long run ends?",
    claim="The paper names the long-run effects of clipping as an open question (arXiv 2510.00236); it "
    "says that clipping helps MicroAdam. Tested is: clipping by batch, and by example, ends below no "
    f"clipping; and it ends within {MARGIN:g} of no clipping, so that it does not matter.",
    presets=PRESETS,
    run=run,
)
