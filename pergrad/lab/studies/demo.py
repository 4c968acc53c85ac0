"""What a new user sees in two minutes: the noise scale of a run as it grows, and where a sign goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pergrad.lab.config import Train
from pergrad.lab.pages import figures, report
from pergrad.lab.run import records
from pergrad.lab.studies import sign
from pergrad.lab.studies._study import NEVER, SMALL, Lab, Study, StudyResult


@dataclasses.dataclass(frozen=True)
class Preset:
    """A run whose noise is measured, and how much of the study `sign` is run."""

    base: Train
    sign: sign.Preset


# The learning rate stays after its rise: a noise scale also grows when the learning rate falls.
PRESET = Preset(
    Train(
        model=SMALL,
        steps=500,
        schedule="constant",
        noise_every=10,
        validate_every=NEVER,
        checkpoint_every=NEVER,
    ),
    sign.PRESETS["demo"],
)


def run(preset: Preset, lab: Lab) -> StudyResult:
    lab.run([preset.base])
    measured = noise_of(records.read_metrics(records.directory(lab.runs, preset.base)))
    signs = sign.run(preset.sign, lab)
    return StudyResult(
        f"One run of Adam, {preset.base.steps} steps of {preset.base.batch_size} examples, with a "
        "learning rate that stays after its rise. Its noise was measured every "
        f"{preset.base.noise_every} steps. Then the study of signs: {signs.ran}",
        [_noise(preset.base, measured), *signs.sections],
        [*measured, *signs.rows],
    )


def noise_of(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The moving averages of signal and noise at the steps at which they were measured."""
    return [
        {"step": row["step"], "signal": row["noise"]["signal"], "noise": row["noise"]["noise"]}
        for row in metrics
        if "noise" in row
    ]


def noise_scale(measured: Sequence[Mapping[str, Any]]) -> float:
    """The sum of the noise over the sum of the signal; NaN if no signal is seen."""
    known = [(row["signal"], row["noise"]) for row in measured if row["signal"] is not None]
    signal, noise = np.sum(np.array(known).reshape(-1, 2), axis=0)
    return float(noise / signal) if signal > 0 else float("nan")


def in_words(measured: Sequence[Mapping[str, Any]]) -> str:
    """What a run showed: its noise scale in the first and in the last third."""
    third = max(1, len(measured) // 3)
    first, last = noise_scale(measured[:third]), noise_scale(measured[-third:])
    if not (np.isfinite(first) and np.isfinite(last)):
        return "In this run too little signal was seen to tell a noise scale."
    numbers = f"from {first:.0f} in the first third of the run to {last:.0f} in the last third"
    said = "grew" if last > first else "did not grow in this run: it went"
    return f"The noise scale {said} {numbers}."


def _noise(base: Train, measured: Sequence[Mapping[str, Any]]) -> report.Section:
    points = [(row["step"], noise_scale([row])) for row in measured]
    steps, scales = np.array(points or [(0, np.nan)]).T
    return report.Section(
        "The noise scale of a run",
        "The noise scale tr Sigma / |mu|^2 is the batch size at which the noise of the mean gradient is "
        "as large as the gradient itself. It comes from the norms of the examples' gradients and of "
        f"their mean. {in_words(measured)} A single run has no interval: pergrad study snr has several "
        "seeds.",
        figures=[
            report.Figure(
                "Noise scale over training",
                "Each point divides moving averages over about ten measurements. A step at which no "
                "signal is seen has no point.",
                lambda fig: figures.lines_with_bands(
                    fig,
                    {"noise scale": (steps, scales, scales, scales)},
                    "step",
                    "noise scale (examples)",
                    logy=True,
                    reference=(base.batch_size, f"the batch, {base.batch_size} examples"),
                ),
            )
        ],
    )


STUDY = Study(
    title="Per-example gradients, seen",
    question="How large is the noise of a training run beside its signal, and does it matter whether a "
    "sign is taken of each example's gradient or of their mean?",
    claim="Noise grows against the signal as the loss falls (McCandlish et al. 2018). The later the "
    "sign, the better (arXiv 2510.00236).",
    presets={"demo": PRESET},
    run=run,
)
