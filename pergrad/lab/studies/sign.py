"""Where the sign is taken: of every example's gradient, of the batch's mean, or of the momentum."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pergrad as pg
from pergrad.lab.compare import decide
from pergrad.lab.config import Train
from pergrad.lab.pages import figures, findings, report
from pergrad.lab.run import records, train
from pergrad.lab.studies import _layers
from pergrad.lab.studies._study import LARGE, SMALL, Lab, Study, StudyResult

MICRO, MEAN, LATE = "MicroSign", "Sign", "SignEMA"  # the earliest first
CLAIMS = ((MEAN, MICRO), (LATE, MEAN))
LOOKED_AT = ("all", "embedding", "head")  # the groups whose signal must fall when signs are taken
AT_A_TIME = 64  # examples that go through the model at a time when a run is looked at


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. `tuning_seeds` seeds choose learning rates, from grids of a factor of 2.

    The signs of the gradients of `examples` examples are measured `looks` times in each of the first
    `looked_seeds` runs of SignEMA.
    """

    base: Train
    seeds: int
    tuning_seeds: int
    rates: Mapping[str, tuple[float, ...]]
    looks: int
    looked_seeds: int
    examples: int
    extensions: int = 2


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
            MICRO: (8e-3, 1.6e-2, 3.2e-2),
            MEAN: (8e-3, 1.6e-2, 3.2e-2),
            LATE: (1e-3, 2e-3, 4e-3),
        },
        looks=2,
        looked_seeds=3,
        examples=512,
        extensions=1,
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
            steps=10_000,
            validate_every=1000,
            checkpoint_every=1000,
        ),
        seeds=5,
        tuning_seeds=2,
        rates={name: tuple(rate / 4 for rate in rates) for name, rates in _RATES.items()},
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
    looks = _look(preset, tuned[LATE].method, lab)
    verdicts = findings.compare(tuned, CLAIMS)
    sections = [findings.at_best(tuned, lab.runs, verdicts), findings.tuning(tuned)]
    if looks:  # unless all of those runs diverged before the first look
        sections += [_kept(preset, looks), _disagreement(looks)]
    return StudyResult(
        f"{findings.count(tuned)} A run takes {preset.base.steps} steps of {preset.base.batch_size} "
        f"examples. Signs were looked at in {preset.looked_seeds} more runs of {LATE}, {preset.looks} "
        f"times each, with {preset.examples} examples.",
        sections,
        [*findings.rows(tuned), *looks],
    )


def _look(preset: Preset, best: Train, lab: Lab) -> list[dict[str, Any]]:
    """For each seed, step and layer: signal and noise before and after the sign, and disagreements."""
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
                "nonzero": pg.Mean(lambda g: (g != 0).astype(g.dtype)),
                "sign_factor": pg.noise.SIGN_FACTOR,
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
    """What signs keep, in each layer, from statistics of one batch.

    Signs have a mean and a variance like any other numbers, so their signal and noise are estimated by
    the same formulas. `factor` is 2 f(0) sigma, what a coordinate's sign is expected to keep.
    """
    signs = {"mean": stats["sign"], "second_moment": stats["nonzero"], "count": stats["count"]}
    gradient = {name: stats[name] for name in ("mean", "second_moment", "count")}
    before, after = pg.noise.by_layer(gradient), pg.noise.by_layer(signs)
    disagree = pg.noise.sign_disagreement({**gradient, "sign": stats["sign"]})
    factors = {
        jax.tree_util.keystr(path): jnp.mean(x, where=jnp.isfinite(x))
        for path, x in jax.tree_util.tree_leaves_with_path(stats["sign_factor"])
    }
    return [
        {
            "layer": path,
            "before": [float(before[path].signal), float(before[path].noise)],
            "after": [float(after[path].signal), float(after[path].noise)],
            "factor": float(factors[path]),
            "disagree": float(disagree[path][0]),
            "sure": float(disagree[path][1]),
        }
        for path in before
    ]


def _kept(preset: Preset, looks: list[dict[str, Any]]) -> report.Section:
    """Signal to noise before and after the sign."""
    seeds = range(preset.looked_seeds)
    steps = sorted({row["step"] for row in looks})
    of = functools.partial(_snr, looks)
    level = decide.level_of_each(len(LOOKED_AT))
    verdicts = [
        decide.compare(
            f"signs have a lower signal-to-noise ratio than gradients ({name})",
            {seed: of("after", name, seed) for seed in seeds},
            {seed: of("before", name, seed) for seed in seeds},
            level=level,
            names=("signs", "gradients"),
        )
        for name in LOOKED_AT
    ]
    bars = {
        f"{name}, {what}": decide.estimate([of(key, name, seed) for seed in seeds])
        for name in (*_layers.GROUPS, "all")
        for key, what in (("before", "gradients"), ("after", "signs"))
    }
    points = {
        what: [decide.estimate([of(key, "all", seed, step) for seed in seeds]) for step in steps]
        for key, what in (("before", "gradients"), ("after", "signs"))
    }
    curves = {name: (steps, *figures.columns(at)) for name, at in points.items()}
    layers = list(dict.fromkeys(row["layer"] for row in looks))
    rows = [
        [
            _layers.short(layer),
            f"{_snr_of(own, 'before'):.4f}",
            f"{_snr_of(own, 'after'):.4f}",
            _kept_of(own),
            f"{np.mean([row['factor'] for row in own if np.isfinite(row['factor'])] or np.nan):.2f}",
        ]
        for layer in layers
        for own in [[row for row in looks if row["layer"] == layer]]
    ]
    return report.Section(
        "Signal and noise before and after the sign",
        "The signal-to-noise ratio |mu| / sqrt(tr Sigma) of one example's gradient, and of its signs: "
        "signal and noise are added up over the steps looked at, in the table over seeds too. A layer's "
        "ratio before the sign counts coordinates with large gradients for more, after it all for the "
        "same, so it may rise although every coordinate loses. What a coordinate's sign is expected to "
        "keep of its own ratio is 2 f(0) sigma, with f the density of its gradient: 0.80 if Gaussian.",
        figures=[
            report.Figure(
                "Signal-to-noise ratio of one example, by group of layers",
                "The size of the mean gradient, divided by the spread of one example's gradient around "
                "it, before and after signs are taken. The scale is logarithmic.",
                lambda fig: figures.bars_with_intervals(
                    fig,
                    bars,
                    xlabel="signal-to-noise ratio, mean and 95% interval over seeds",
                    kind=lambda name: name.split(", ")[1],
                    log=True,
                ),
            ),
            report.Figure(
                "Signal-to-noise ratio over training",
                "The same ratio for all parameters together, at the steps that were looked at.",
                lambda fig: figures.lines_with_bands(fig, curves, "step", "signal-to-noise ratio"),
            ),
        ],
        tables=[
            report.Table(
                "Layers",
                [
                    "layer",
                    "ratio of gradients",
                    "ratio of signs",
                    "part kept",
                    "expected of a coordinate",
                ],
                rows,
            )
        ],
        verdicts=verdicts,
    )


def _snr(looks: list[dict[str, Any]], key: str, group: str, seed: int, step: int | None = None) -> float:
    """|mu| / sqrt(tr Sigma) of a group of layers: both are summed over the layers, then divided."""
    return _snr_of(
        [
            row
            for row in looks
            if row["seed"] == seed
            and (step is None or row["step"] == step)
            and group in ("all", _layers.group(row["layer"]))
        ],
        key,
    )


def _snr_of(rows: list[dict[str, Any]], key: str) -> float:
    if not rows:  # the run diverged before
        return math.nan
    signal, noise = np.sum([row[key] for row in rows], axis=0)
    return float(np.sqrt(max(signal, 0) / noise)) if noise > 0 else 0.0


def _kept_of(rows: list[dict[str, Any]]) -> str:
    before = _snr_of(rows, "before")
    return f"{_snr_of(rows, 'after') / before:.2f}" if before > 0 else "-"


def _disagreement(looks: list[dict[str, Any]]) -> report.Section:
    """The section on where the mean of the signs points the other way than the mean gradient."""
    everywhere = sum(row["disagree"] for row in looks)
    rows = []
    for name in (*_layers.GROUPS, "all"):
        own = [row for row in looks if name in ("all", _layers.group(row["layer"]))]
        disagree, sure = (sum(row[key] for row in own) for key in ("disagree", "sure"))
        rows.append(
            [
                name,
                f"{sure:.0f}",
                f"{disagree / max(sure, 1):.2%}",
                f"{disagree / everywhere:.0%}" if everywhere else "-",
            ]
        )
    return report.Section(
        "Where the mean and the median have different signs",
        "The mean of the signs has the sign of the median, of the examples whose gradient is not 0. "
        "Only coordinates count in which both signs are sure, being more than two standard errors from "
        "0. The last column says which layers explain the disagreement.",
        tables=[
            report.Table(
                "Coordinates, over all steps and seeds looked at",
                [
                    "group",
                    "sure coordinates",
                    "of them with different signs",
                    "share of all such coordinates",
                ],
                rows,
            )
        ],
    )


STUDY = Study(
    title="Where the sign goes",
    question="SignSGD with momentum can take the sign of each example's gradient, of the batch's mean, "
    "or of the momentum. Does it matter, and why?",
    claim="The later the better: SignEMA ends below Sign, and Sign below MicroSign, because a sign "
    "costs signal, and averages before it cost nothing (arXiv 2510.00236).",
    presets=PRESETS,
    run=run,
)
