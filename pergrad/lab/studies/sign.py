"""Where the sign is taken: of every example's gradient, of the batch's mean, or of the momentum."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import pergrad as pg
from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Train
from pergrad.lab.pages import findings, panels, report
from pergrad.lab.run import records, train
from pergrad.lab.studies import _found, _layers
from pergrad.lab.studies._study import LARGE, SMALL, Lab, Study, StudyResult

MICRO, MEAN, LATE = "MicroSign", "Sign", "SignEMA"  # the earliest first
CLAIMS = ((MEAN, MICRO), (LATE, MEAN))
AT_A_TIME = 64  # examples that go through the model at a time when a run is looked at


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. `tuning_seeds` seeds choose learning rates, from grids of a factor of 2.

    The signs of the gradients of `examples` examples are measured `looks` times in each of the first
    `looked_seeds` runs of SignEMA. The claims in `too_short` need longer runs than these: the page does
    not decide them, and has what longer runs found.
    """

    base: Train
    seeds: int
    tuning_seeds: int
    rates: Mapping[str, tuple[float, ...]]
    looks: int
    looked_seeds: int
    examples: int
    extensions: int = 2
    too_short: tuple[tuple[str, str], ...] = ()


_RATES = {
    MICRO: (8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    MEAN: (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    LATE: (1e-3, 2e-3, 4e-3, 8e-3),
}
PRESETS = {
    "demo": Preset(
        Train(model=SMALL, steps=300, validate_every=300, checkpoint_every=300),
        seeds=4,
        tuning_seeds=1,
        rates={
            MICRO: (1.6e-2, 3.2e-2, 6.4e-2),
            MEAN: (8e-3, 1.6e-2, 3.2e-2),
            LATE: (1e-3, 2e-3, 4e-3),
        },
        looks=0,
        looked_seeds=0,
        examples=0,
        extensions=1,
        too_short=((LATE, MEAN),),
    ),
    "quick": Preset(
        Train(model=SMALL, steps=2000, validate_every=500, checkpoint_every=500),
        seeds=8,
        tuning_seeds=3,
        rates=_RATES,
        looks=5,
        looked_seeds=3,
        examples=2048,
    ),
    "full": Preset(
        Train(
            model=LARGE,
            steps=5000,
            validate_every=1000,
            checkpoint_every=1000,
        ),
        seeds=5,
        tuning_seeds=2,
        rates={name: tuple(rate / 2 for rate in rates) for name, rates in _RATES.items()},
        looks=10,
        looked_seeds=3,
        examples=4096,
    ),
}


def run(preset: Preset, lab: Lab) -> StudyResult:
    methods = {
        MICRO: dataclasses.replace(preset.base, optimizer="micro_sign_sgd"),
        MEAN: dataclasses.replace(preset.base, optimizer="sign_sgd"),
        LATE: dataclasses.replace(preset.base, optimizer="sign_ema"),
    }
    tuned = lab.tune(methods, preset.rates, preset)
    looks = _look(preset, tuned[LATE].method, lab) if preset.looked_seeds else []
    verdicts = findings.compare(tuned, [pair for pair in CLAIMS if pair not in preset.too_short])
    verdicts += [_longer(preset, tuned, pair) for pair in preset.too_short]
    sections = [findings.at_best(tuned, lab.runs, verdicts), findings.tuning(tuned)]
    if looks:  # unless all of those runs diverged before the first look
        sections += [disagreement(looks)]
    looked = (
        f" Signs were looked at in {preset.looked_seeds} more runs of {LATE}, {preset.looks} times "
        f"each, with {preset.examples} examples."
    )
    return StudyResult(
        f"{findings.count(tuned)} A run takes {preset.base.steps} steps of {preset.base.batch_size} "
        f"examples.{looked * bool(preset.looked_seeds)}",
        sections,
        [*findings.rows(tuned), *looks],
    )


def _longer(preset: Preset, tuned: Mapping[str, sweep.Tuned], pair: tuple[str, str]) -> decide.Verdict:
    """The verdict on a claim that these runs are too short for: what longer ones found."""
    log = _found.rows("sign-quick")
    methods = {name: preset.base for name in tuned}
    longer = findings.compare(findings.read(log, methods), CLAIMS)[CLAIMS.index(pair)]
    own = findings.compare(tuned, [pair])[0]
    steps = log[0]["preset"]["base"]["steps"]
    why = (
        f"{preset.base.steps} steps are too short to tell. `{log[0]['command']}`, {steps} steps: "
        f"{longer.answer}, {longer.why}"
    )
    return dataclasses.replace(own, answer=decide.NOT_SHOWN, why=why)


def _look(preset: Preset, best: Train, lab: Lab) -> list[dict[str, Any]]:
    """For each seed, step and layer: where the mean of signs and the mean gradient disagree."""
    every = best.steps // preset.looks
    runs = [
        dataclasses.replace(best, seed=seed, checkpoint_every=every, validate_every=best.steps, keep=0)
        for seed in range(preset.looked_seeds)
    ]
    lab.run(runs)
    problems = [
        train.make_problem(dataclasses.replace(config, batch_size=preset.examples)) for config in runs
    ]
    stats_fn = jax.jit(
        pg.grad_stats(
            problems[0].loss,
            {
                "mean": pg.Mean(),
                "second_moment": pg.Mean(pg.power(2)),
                "sign": pg.Mean(jnp.sign),
                "count": pg.Count(),
            },
            microbatch_size=min(AT_A_TIME, preset.examples),
        )
    )
    out: list[dict[str, Any]] = []
    for config, problem in zip(runs, problems, strict=True):
        for step, params in train.parameters(config, records.directory(lab.runs, config)).items():
            lab.say(f"the signs of {preset.examples} examples, seed {config.seed}, step {step}")
            out += [
                {"seed": config.seed, "step": step} | row
                for row in measure(stats_fn(params, problem.batches[step]))
            ]
    return out


def measure(stats: Mapping[str, Any]) -> list[dict[str, Any]]:
    """In how many coordinates of each layer both signs are sure, and in how many of them they differ."""
    return [
        {"layer": path, "disagree": float(disagree), "sure": float(sure)}
        for path, (disagree, sure) in pg.noise.sign_disagreement(stats).items()
    ]


def disagreement(looks: list[dict[str, Any]]) -> report.Section:
    """The section on where the mean of the signs points the other way than the mean gradient."""
    groups = _layers.groups(row["layer"] for row in looks)
    steps = sorted({row["step"] for row in looks})

    def counts(name: str, step: int | None = None) -> tuple[float, float]:
        """The coordinates with different signs, and all sure ones."""
        own = [
            row
            for row in looks
            if name in ("all", _layers.group(row["layer"])) and step in (None, row["step"])
        ]
        return sum(row["disagree"] for row in own), sum(row["sure"] for row in own)

    everywhere, _ = counts("all")
    rows = [
        [
            name,
            f"{sure:.0f}",
            f"{disagree / max(sure, 1):.2%}",
            f"{disagree / everywhere:.0%}" if everywhere else "-",
        ]
        for name in (*groups, "all")
        for disagree, sure in [counts(name)]
    ]
    by_step = report.Table(
        "Sure coordinates with different signs, by step",
        ["group", *map(str, steps)],
        [
            [
                name,
                *(
                    f"{disagree / max(sure, 1):.2%}"
                    for k in steps
                    for disagree, sure in [counts(name, k)]
                ),
            ]
            for name in (*groups, "all")
        ],
    )
    coordinates = report.Table(
        "Coordinates, over all steps and seeds looked at",
        ["group", "sure coordinates", "of them with different signs", "share of all such coordinates"],
        rows,
    )
    return report.Section(
        "Where the mean and the median have different signs",
        "The mean of the signs has the sign of the median, of the examples whose gradient is not 0. "
        "Only coordinates count in which both signs are sure, being more than two standard errors from "
        "0. The last column says which layers have most of the disagreement.",
        figures=[
            panels.of_table(
                coordinates,
                "Coordinates with different signs, by group of layers",
                "Over all steps and seeds that were looked at.",
            ),
            panels.of_table(
                by_step,
                "Coordinates with different signs, by step",
                "The share of the sure coordinates in which mean and median have different signs.",
                alike=True,
            ),
        ],
        tables=[
            coordinates,
            by_step,
        ],
    )


STUDY = Study(
    title="Where the sign goes",
    question="SignSGD with momentum can take the sign of each example's gradient, of the batch's mean, "
    "or of the momentum. Does it matter, and why?",
    claim="The later the better: SignEMA ends below Sign, and Sign below MicroSign (arXiv 2510.00236). "
    "Whether the paper's reason, a signal-to-noise argument, is the reason here is the question of the "
    "study argument; in which layers it matters, that of the study arms.",
    presets=PRESETS,
    run=run,
)
