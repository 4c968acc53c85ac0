"""Rules for the learning rate when the batch changes, over eight octaves of batch sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure as Sheet

import pergrad as pg
from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, findings, panels, report
from pergrad.lab.run import records
from pergrad.lab.studies._study import LARGE, NEVER, SMALL, Lab, Study, StudyResult

MARGIN = 0.05  # nats within which two final losses count as the same
WIDE = 4.0  # a range of more octaves than this is wide
SQRT, CONSTANT, LINEAR = "square root", "constant", "linear"
RULES = {SQRT: pg.scaling.sqrt, CONSTANT: lambda rate, kappa: rate, LINEAR: pg.scaling.linear}

Losses = Mapping[str, Mapping[int, Mapping[int, float]]]  # by rule, batch size and seed


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. The learning rate is tuned at the base's batch size, from `rates`.

    Every run sees `examples` examples.
    """

    base: Train
    examples: int
    batch_sizes: tuple[int, ...]
    seeds: int
    tuning_seeds: int
    rates: tuple[float, ...]
    extensions: int = 2

    def __post_init__(self) -> None:
        if self.base.batch_size not in self.batch_sizes:
            raise LabError(f"the batch sizes do not contain the base's, {self.base.batch_size}.")
        if whole := [size for size in self.batch_sizes if self.examples % size]:
            raise LabError(f"{self.examples} examples are no whole number of batches of {whole[0]}.")


_OCTAVES = tuple(2**i for i in range(9))
PRESETS = {
    "demo": Preset(
        Train(model=SMALL, validate_every=NEVER, checkpoint_every=NEVER),
        examples=2048,
        batch_sizes=_OCTAVES[::2],
        seeds=3,
        tuning_seeds=1,
        rates=(8e-3, 1.6e-2),
        extensions=1,
    ),
    "quick": Preset(
        Train(model=SMALL, validate_every=NEVER, checkpoint_every=NEVER),
        examples=16_384,
        batch_sizes=_OCTAVES,
        seeds=5,
        tuning_seeds=2,
        rates=(4e-3, 8e-3, 1.6e-2),
    ),
    "full": Preset(
        Train(model=LARGE, checkpoint_every=2000),
        examples=32_768,
        batch_sizes=(*_OCTAVES, 512),
        seeds=5,
        tuning_seeds=2,
        rates=(2e-3, 4e-3, 8e-3),
    ),
}


def run(preset: Preset, lab: Lab) -> StudyResult:
    home = preset.base.batch_size
    base = dataclasses.replace(preset.base, steps=preset.examples // home)
    seeds = range(preset.seeds)
    tuned = lab.tune({"Adam": base}, {"Adam": preset.rates}, preset)
    rate = tuned["Adam"].method.learning_rate
    runs = {
        (rule, size, seed): dataclasses.replace(
            base,
            batch_size=size,
            steps=preset.examples // size,
            learning_rate=float(f"{scaled(rate, size / home):.6g}"),
            seed=seed,
        )
        for size in sorted(preset.batch_sizes)
        for rule, scaled in RULES.items()
        for seed in seeds
    }
    watched = [
        dataclasses.replace(runs[SQRT, home, seed], noise_every=max(1, base.steps // 40))
        for seed in seeds
    ]
    results = lab.run([*watched, *runs.values()])
    noise_scale = _noise_scale(watched, lab)
    losses: Losses = {
        rule: {
            size: {seed: sweep.loss_of(results[runs[rule, size, seed]], "test_loss") for seed in seeds}
            for size in sorted(preset.batch_sizes)
        }
        for rule in RULES
    }
    curves = {
        rule: {
            f"batch {size}": findings.curve(
                findings.metric([records.directory(lab.runs, runs[rule, size, seed]) for seed in seeds]),
                size,
            )
            for size in sorted(preset.batch_sizes)
        }
        for rule in RULES
    }
    rows = [
        {"rule": rule, "batch_size": size, "seed": seed, "learning_rate": config.learning_rate}
        | results[config]
        for (rule, size, seed), config in runs.items()
    ]
    return StudyResult(
        f"{len({*results, *findings.configs(tuned)})} training runs, with {preset.seeds} seeds. The "
        f"learning rate was tuned at batch {home}. Every run sees {preset.examples} examples, in "
        f"batches of {min(preset.batch_sizes)} to {max(preset.batch_sizes)}. Only the learning rate "
        "follows the rule: the decays of the averages stay as they are.",
        [
            final(losses, home, noise_scale),
            _curves(curves),
            findings.tuning(tuned, title=f"The learning rate at batch {home}"),
        ],
        [*findings.rows(tuned), *rows, {"noise_scale": noise_scale, "batch_size": home}],
    )


def _noise_scale(runs: Sequence[Train], lab: Lab) -> dict[str, float]:
    """tr Sigma / |mu|^2 in the first and the second half of the base's runs: a ratio of two sums.

    Runs that diverged count as far as they came. The ratio is NaN where no signal is seen.
    """
    sums = {"first half": np.zeros(2), "second half": np.zeros(2)}
    for config in runs:
        for row in records.read_metrics(records.directory(lab.runs, config)):
            noise = row.get("noise", {})
            if noise.get("signal") is not None:
                half = "first half" if 2 * row["step"] <= config.steps else "second half"
                sums[half] += noise["signal"], noise["noise"]
    return {
        name: float(noise / signal) if signal > 0 else math.nan for name, (signal, noise) in sums.items()
    }


def _level(others: int) -> float:
    """The level of each of the section's intervals: `others` batch sizes for each rule, and one more."""
    return decide.level_of_each(len(RULES) * others + 1)


def agreeing(losses: Mapping[int, Mapping[int, float]], home: int) -> dict[int, decide.Verdict]:
    """For each batch size but `home`, whether its final loss is within `MARGIN` of that of `home`.

    The level is shared by the batch sizes of all rules, and by the claim that the rule breaks.
    """
    others = [size for size in losses if size != home]
    level = _level(len(others))
    return {
        size: decide.equivalent(
            f"batch {size} ends within {MARGIN:g} of batch {home}",
            losses[size],
            losses[home],
            margin=MARGIN,
            level=level,
            names=(f"batch {size}", f"batch {home}"),
        )
        for size in others
    }


def reach(
    verdicts: Mapping[int, decide.Verdict], home: int, answers: Sequence[str] = (decide.SUPPORTED,)
) -> tuple[int, int]:
    """The range of batch sizes around `home` in which all verdicts are among `answers`: its two ends."""
    low = high = home
    for size in sorted((s for s in verdicts if s < home), reverse=True):
        if verdicts[size].answer not in answers:
            break
        low = size
    for size in sorted(s for s in verdicts if s > home):
        if verdicts[size].answer not in answers:
            break
        high = size
    return low, high


class Octaves(NamedTuple):
    """The number of octaves over which a rule was shown to hold, and was not shown to fail."""

    shown: float
    possible: float


def octaves(verdicts: Mapping[int, decide.Verdict], home: int) -> Octaves:
    shown = reach(verdicts, home)
    possible = reach(verdicts, home, (decide.SUPPORTED, decide.NOT_SHOWN))
    return Octaves(*(float(np.log2(high / low)) for low, high in (shown, possible)))


def more_octaves(claim: str, a: Octaves, b: Octaves) -> decide.Verdict:
    """Whether one rule holds over more octaves than another.

    The octaves over which one rule was shown to hold are compared with those over which the other may
    hold. The answer has no interval of its own: each octave was decided by one.
    """
    answer = decide.NOT_SHOWN
    if a.shown > b.possible:
        answer = decide.SUPPORTED
    elif b.shown >= a.possible:
        answer = decide.CONTRADICTED
    why = f"{_said(a)} against {_said(b)}, each octave decided by seeds"
    more = a.shown - b.shown
    return decide.Verdict(claim, decide.Estimate(more, more, more, 1), answer, why)


def _said(octaves: Octaves) -> str:
    shown, possible = octaves
    return f"{shown:g} octaves" if shown == possible else f"{shown:g} octaves (at most {possible:g})"


def final(losses: Losses, home: int, noise_scale: Mapping[str, float]) -> report.Section:
    agree = {rule: agreeing(own, home) for rule, own in losses.items()}
    ranges = {rule: octaves(own, home) for rule, own in agree.items()}
    largest = max(losses[SQRT])
    verdicts = [
        more_octaves(
            f"under the {SQRT} rule runs end within {MARGIN:g} of batch {home} over more than "
            f"{WIDE:g} octaves",
            ranges[SQRT],
            Octaves(WIDE, WIDE),
        ),
        *(
            more_octaves(
                f"the {SQRT} rule holds over more octaves than the {other} one",
                ranges[SQRT],
                ranges[other],
            )
            for other in (CONSTANT, LINEAR)
        ),
        decide.compare(
            f"the {SQRT} rule breaks at large batches: batch {home} ends below batch {largest} by more "
            f"than {MARGIN:g}",
            losses[SQRT][home],
            losses[SQRT][largest],
            margin=MARGIN,
            level=_level(len(losses[SQRT]) - 1),
            names=(f"batch {home}", f"batch {largest}"),
        ),
    ]
    curves = {}
    for rule, own in losses.items():
        points = [decide.estimate(list(by_seed.values())) for by_seed in own.values()]
        curves[rule] = np.array(list(own)), *figures.columns(points)
    words = {decide.SUPPORTED: "yes", decide.CONTRADICTED: "no", decide.NOT_SHOWN: "?"}
    rows = [
        [
            str(size),
            *(
                f"{decide.estimate(list(own[size].values()))} "
                + (words[agree[rule][size].answer] if size != home else "-")
                for rule, own in losses.items()
            ),
        ]
        for size in losses[SQRT]
    ]
    held = report.Table(
        "Octaves over which a rule holds",
        ["rule", "shown", "not shown to fail"],
        [[rule, f"{own.shown:g}", f"{own.possible:g}"] for rule, own in ranges.items()],
    )
    lines = {f"noise scale, {name}": x for name, x in noise_scale.items() if math.isfinite(x)}
    return report.Section(
        "Where runs end",
        f"Losses on the half of the validation data that chose nothing. The rules start from batch "
        f"{home}, where they are the same. The noise scale tr Sigma / |mu|^2 was measured in its runs; "
        "far beyond it batches are less noisy than the gradient is large, and curves are expected to "
        "part. A rule holds as far as, from there on without a gap, the difference of final losses, "
        f"paired by seeds, is shown to be within {MARGIN:g}; a batch that ends lower does not agree "
        "either.",
        figures=[
            report.Figure(
                "Final loss against batch size",
                "The loss at the end of training, mean over seeds; lower is better. Upright lines: the "
                "measured noise scale.",
                lambda fig: figures.lines_with_bands(
                    fig, curves, "batch size (examples)", "final loss (nats)", logx=True, lines=lines
                ),
            ),
            panels.of_table(
                held,
                "Octaves over which a rule holds",
                f"Octaves of batch sizes around {home}: those for which that was shown, and those for "
                "which it was not shown to fail.",
                alike=True,
            ),
        ],
        tables=[
            report.Table(
                f"Final losses, and whether they are within {MARGIN:g} of batch {home}",
                ["batch size", *losses],
                rows,
            ),
            held,
        ],
        verdicts=verdicts,
    )


def _curves(curves: Mapping[str, Mapping[str, findings.Curve]]) -> report.Section:
    def draw(rule: str, fig: Sheet) -> None:
        figures.lines_with_bands(fig, curves[rule], "examples seen", "training loss (nats)")

    return report.Section(
        "Loss over examples seen",
        "If a rule is right, the curves of all batch sizes are one curve.",
        figures=[
            report.Figure(
                f"Training loss, {rule} rule",
                f"The learning rate of each batch size follows the {rule} rule.",
                functools.partial(draw, rule),
            )
            for rule in curves
        ],
    )


STUDY = Study(
    title="Batch size and learning rate",
    question="When the batch grows by kappa, should the learning rate stay, grow by sqrt(kappa), or by "
    "kappa, and how far does a rule carry?",
    claim="With a learning rate proportional to sqrt(B), Adam's curves over examples seen agree over a "
    "wide range of batch sizes, and break at large B (arXiv 2510.00236).",
    presets=PRESETS,
    run=run,
)
