"""The signal-to-noise argument for late signs, tested coordinate by coordinate at frozen parameters.

`_agreement` has the argument, what it predicts, and how it is measured. The measure was fixed before
anything ran: the share of the coordinates whose sign agrees with that of mu, each weighted by |mu|, in
averages over fresh batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pergrad as pg
from pergrad.lab.compare import decide
from pergrad.lab.config import Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, panels, report
from pergrad.lab.run import records, train
from pergrad.lab.studies import _agreement
from pergrad.lab.studies._agreement import (
    EARLY,
    EDGES,
    FORMULA,
    KINDS,
    LATE,
    MIDDLE,
    PLACES,
    REAL,
    SURROGATE,
    Look,
    Moments,
)
from pergrad.lab.studies._study import LARGE, NEVER, SMALL, Lab, Study, StudyResult

MARGIN = 0.01  # of the weighted share within which two shares count as the same
AT_A_TIME = 64  # examples that go through the model at a time when mu is measured
ELSEWHERE = 10**6  # added to a run's seed, for an order of the examples that no run has


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. Each run is looked at after each of `looks` equal parts, but not at its end.

    mu and sigma come from `examples` examples. Each placement takes `trials` averages over `batches`
    batches of the base's size.
    """

    base: Train
    seeds: int
    looks: int
    examples: int
    batches: int
    trials: int


PRESETS = {
    "demo": Preset(
        Train(model=SMALL, optimizer="sign_ema", learning_rate=4e-3, steps=300, validate_every=NEVER),
        seeds=3,
        looks=3,
        examples=2048,
        batches=40,
        trials=2,
    ),
    "quick": Preset(
        Train(model=SMALL, optimizer="sign_ema", learning_rate=4e-3, steps=2000, validate_every=NEVER),
        seeds=4,
        looks=4,
        examples=15_360,
        batches=44,
        trials=6,
    ),
    "full": Preset(
        Train(model=LARGE, optimizer="sign_ema", learning_rate=2e-3, steps=5000, validate_every=NEVER),
        seeds=5,
        looks=4,
        examples=32_768,
        batches=44,
        trials=6,
    ),
}


class Functions(NamedTuple):
    """What is compiled once for all runs."""

    moments: Callable[[Any, Any], Any]
    trials: Mapping[str, Callable[..., Any]]  # by kind


def _compile(config: Train) -> Functions:
    loss = train.make_problem(config).loss
    stats: Any = {"mean": pg.Mean(), "variance": pg.Variance()}
    draws = {
        REAL: _agreement.of_gradients(loss),
        SURROGATE: _agreement.of_gaussians(config.batch_size),
    }
    return Functions(
        jax.jit(pg.grad_stats(loss, stats, microbatch_size=AT_A_TIME)),
        {kind: _agreement.make_trial(draw, config.b1) for kind, draw in draws.items()},
    )


def _look(preset: Preset, config: Train, compiled: Functions, lab: Lab) -> list[Look]:
    """Looks at one run, after each part of it."""
    elsewhere = dataclasses.replace(config, seed=config.seed + ELSEWHERE)
    batches = train.make_problem(elsewhere).batches
    first = preset.examples // config.batch_size  # the first batch without an example of mu's
    for_mu = np.concatenate([batches[i] for i in range(first)])
    out = []
    for step, params in train.parameters(config, records.directory(lab.runs, config)).items():
        if step == config.steps:
            continue
        lab.say(f"signs that agree with mu, seed {config.seed}, step {step}")
        found = compiled.moments(params, for_mu)
        moments = Moments(found["mean"], jax.tree.map(jnp.sqrt, found["variance"]))
        right: dict[str, Any] = {}
        for i in range(preset.trials):
            numbers = range(first + i * preset.batches, first + (i + 1) * preset.batches)
            fresh = np.stack([batches[number] for number in numbers])
            key = jax.random.fold_in(jax.random.key(config.seed), step * preset.trials + i)
            inputs = {REAL: (params, fresh), SURROGATE: (moments, jax.random.split(key, len(numbers)))}
            for kind, trial in compiled.trials.items():
                given, each = inputs[kind]
                one = trial(given, moments, each)
                right[kind] = jax.tree.map(jnp.add, right[kind], one) if i else one
        right = jax.tree.map(lambda x: np.asarray(x) / preset.trials, right)
        moments = jax.tree.map(np.asarray, moments)
        out.append(
            Look(config.seed, step, *_agreement.summed(moments, right, config.batch_size, config.b1))
        )
    return out


# The answers.


def run(preset: Preset, lab: Lab) -> StudyResult:
    every = preset.base.steps // preset.looks
    base = dataclasses.replace(preset.base, checkpoint_every=every, keep=0)
    runs = [dataclasses.replace(base, seed=seed) for seed in range(preset.seeds)]
    lab.run(runs)
    compiled = _compile(base)
    looks = [look for config in runs for look in _look(preset, config, compiled, lab)]
    if len({look.seed for look in looks}) < preset.seeds:
        raise LabError("a run diverged before the first look; choose a lower learning rate.")
    return StudyResult(
        f"{preset.seeds} runs of SignEMA with a learning rate of {base.learning_rate:g}, {base.steps} "
        f"steps of {base.batch_size} examples, looked at after each of {preset.looks} equal parts but "
        f"the last. There, mu and sigma come from {preset.examples} examples, and each placement of the "
        f"sign takes {preset.trials} averages over {preset.batches} fresh batches, with the decay "
        f"{base.b1:g}.",
        [_shares(looks), _by_noise(looks), by_group(looks)],
        [look._asdict() for look in looks],
    )


def _wrong(looks: Sequence[Look], kind: str, place: str) -> dict[int, float]:
    """One minus the share, the mean over a run's looks, by seed."""
    seeds = sorted({look.seed for look in looks})
    return {
        seed: float(np.mean([1 - look.shares[kind][place] for look in looks if look.seed == seed]))
        for seed in seeds
    }


def _lead(looks: Sequence[Look], kind: str, ahead: str, behind: str) -> dict[int, float]:
    """By how much one placement's share is above another's, by seed."""
    a, b = _wrong(looks, kind, ahead), _wrong(looks, kind, behind)
    return {seed: b[seed] - a[seed] for seed in a}


def verdicts(looks: Sequence[Look]) -> list[decide.Verdict]:
    """All claims share the level. A placement is better if its share of wrong signs is lower."""
    level = decide.level_of_each(8)
    wrong = {(k, p): _wrong(looks, k, p) for k in KINDS for p in PLACES}
    none = dict.fromkeys(wrong[REAL, LATE], 0.0)

    def lower(claim: str, a: tuple[str, str], b: tuple[str, str]) -> decide.Verdict:
        names = (", ".join(a), ", ".join(b))
        return decide.compare(claim, wrong[a], wrong[b], level=level, names=names)

    def same(claim: str, a: Mapping[int, float], b: Mapping[int, float]) -> decide.Verdict:
        return decide.equivalent(claim, a, b, margin=MARGIN, level=level)

    return [
        lower("late signs are right more often than middle ones", (REAL, LATE), (REAL, MIDDLE)),
        same(
            f"signal and noise explain it: Gaussian surrogates have the same lead within {MARGIN:g}",
            _lead(looks, REAL, LATE, MIDDLE),
            _lead(looks, SURROGATE, LATE, MIDDLE),
        ),
        lower("middle signs are right more often than early ones", (REAL, MIDDLE), (REAL, EARLY)),
        same(
            "signal and noise do not predict that: for Gaussian surrogates middle and early are the "
            f"same within {MARGIN:g}",
            _lead(looks, SURROGATE, MIDDLE, EARLY),
            none,
        ),
        lower(
            "early signs are right less often than those of their Gaussian surrogates",
            (SURROGATE, EARLY),
            (REAL, EARLY),
        ),
        *(
            same(
                f"the formula predicts how often {place} signs of Gaussian surrogates are right, within "
                f"{MARGIN:g}",
                wrong[SURROGATE, place],
                wrong[FORMULA, place],
            )
            for place in PLACES
        ),
    ]


def _shares(looks: Sequence[Look]) -> report.Section:
    steps = sorted({look.step for look in looks})

    def at(step: int, kind: str, place: str) -> decide.Estimate:
        return decide.estimate([look.shares[kind][place] for look in looks if look.step == step])

    curves = {
        f"{place}, {kind}": (steps, *figures.columns(at(step, kind, place) for step in steps))
        for place in PLACES
        for kind in KINDS
    }
    rows = [
        [f"{place}, {kind}", *(str(at(step, kind, place)) for step in steps)]
        for place in PLACES
        for kind in KINDS
    ]
    leads = report.Table(
        "Leads, by step",
        ["", *map(str, steps)],
        [
            [f"{ahead} less {behind}, {kind}", *_leads(looks, steps, kind, ahead, behind)]
            for ahead, behind in ((LATE, MIDDLE), (MIDDLE, EARLY))
            for kind in KINDS
        ],
    )
    return report.Section(
        "Signs that agree with mu",
        "The share of the coordinates in which the sign of an average agrees with the sign of mu, each "
        "weighted by |mu|. Early: the sign of every example's gradient is taken, then averages. Middle: "
        "of the batch's mean, then momentum. Late: of the momentum. Gaussian surrogates have the same "
        "mu and sigma in every coordinate; the formulas predict their shares.",
        figures=[
            report.Figure(
                "Share of right signs",
                "Weighted by |mu|. Where gradients and their Gaussian surrogates differ, signal and "
                "noise are not the reason.",
                lambda fig: figures.lines_with_bands(
                    fig, curves, "step", "share of right signs, weighted by |mu|"
                ),
            ),
            panels.of_table(
                leads,
                "Leads of later signs, by step",
                "By how much the share of right signs of one placement is above that of another.",
                alike=True,
            ),
        ],
        tables=[
            report.Table("Shares, by step", ["", *map(str, steps)], rows),
            leads,
        ],
        verdicts=verdicts(looks),
    )


def _leads(looks: Sequence[Look], steps: Sequence[int], kind: str, ahead: str, behind: str) -> list[str]:
    by_step = ([look for look in looks if look.step == step] for step in steps)
    return [str(decide.estimate(list(_lead(own, kind, ahead, behind).values()))) for own in by_step]


def _by_noise(looks: Sequence[Look]) -> report.Section:
    """The share of right signs against the ratio of the batch's mean."""
    middles = np.sqrt(EDGES[1:] * EDGES[:-1])
    curves = {}
    for place in PLACES:
        for kind in (REAL, FORMULA):
            values = np.array([look.bins[kind][place] for look in looks], float)
            there = np.flatnonzero(np.isfinite(values).all(0))
            points = [decide.estimate(values[:, i].tolist()) for i in there]
            curves[f"{place}, {kind}"] = middles[there], *figures.columns(points)
    return report.Section(
        "Coordinates of more and of less noise",
        "Coordinates with about the same ratio sqrt(B) |mu| / sigma of the batch's mean, each counted "
        "alike. Bands are over runs and steps.",
        figures=[
            report.Figure(
                "Share of right signs against the signal-to-noise ratio",
                "At 0.5 signs are no better than chance.",
                lambda fig: figures.lines_with_bands(
                    fig, curves, "sqrt(B) |mu| / sigma", "share of right signs", logx=True
                ),
            )
        ],
    )


def by_group(looks: Sequence[Look]) -> report.Section:
    names = list(looks[0].groups)

    def mean(name: str, of: Callable[[Mapping[str, Any]], float]) -> float:
        return float(np.mean([of(look.groups[name]) for look in looks]))

    def short_of_surrogate(name: str, place: str) -> float:
        return mean(name, lambda own: own[SURROGATE][place] - own[REAL][place])

    rows = [
        [
            name,
            f"{mean(name, lambda own: own['weight']):.1%}",
            *(f"{short_of_surrogate(name, place):.4f}" for place in PLACES),
        ]
        for name in names
    ]
    table = report.Table("", ["group", "weight", *PLACES], rows)
    return report.Section(
        "Where gradients fall short of Gaussian ones",
        "The weighted share of right signs of Gaussian surrogates less that of gradients, in each group "
        "of layers, mean over runs and steps. The weight of a group is its part of the sum of |mu|.",
        figures=[
            panels.of_table(
                table,
                "Shortfall of each group of layers",
                "The weight of each group, and by how much early, middle and late signs of gradients "
                "are right less often than those of their surrogates.",
            )
        ],
        tables=[table],
    )


STUDY = Study(
    title="The signal-to-noise argument, by coordinate",
    question="Does the signal-to-noise ratio of each coordinate explain why a later sign is better?",
    claim="A sign should be taken as late as possible, by a signal-to-noise argument (arXiv "
    "2510.00236). For Gaussian gradients the argument predicts that late signs are right more often "
    "than middle ones, and middle ones about as often as early ones. That prediction is derived here, "
    "not the paper's.",
    presets=PRESETS,
    run=run,
)
