"""The best learning rate as a function of the batch size, measured as a law.

For each optimizer and each batch size, every seed runs on a grid of learning rates over the same number
of examples. A parabola through the three lowest losses of a seed, over the logarithm of the learning
rate, has its lowest point at that seed's best rate. The best rate is the mean over seeds, with its
interval. Its slope is that of log(best rate) over log(batch size), fitted by least squares for each seed
by itself. A rule is a slope:

    square root   1/2   Adam and signs, whose updates do not depend on the size of the gradient; `sde`
                        has the same learning rates, and also moves the decays
    linear        1     gradient descent, and MicroAdam, whose preconditioner does not depend on B
    constant      0

The rules hold where noise is most of a batch's gradient, so slopes are taken apart below and above the
noise scale, which is measured in the runs of Adam at the middle batch size. All of this was fixed before
the runs: below the noise scale the slope is to be that of the optimizer's rule within a quarter, above
it the slope is to be lower.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import OptimizerName, Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, panels, report
from pergrad.lab.run import records
from pergrad.lab.studies._study import LARGE, NEVER, SMALL, Lab, Study, StudyResult

ADAM, MICRO, SIGN, LATE = "Adam", "MicroAdam", "Sign", "SignEMA"
OPTIMIZERS: dict[str, OptimizerName] = {
    ADAM: "adam",
    MICRO: "micro_adam",
    SIGN: "sign_sgd",
    LATE: "sign_ema",
}
SLOPES = {"square root": 0.5, "linear": 1.0, "constant": 0.0}
# The slope below the noise scale that theory says of each optimizer.
RULE = {ADAM: "square root", MICRO: "linear", SIGN: "square root", LATE: "square root"}
MARGIN = 0.25  # a slope within it of a rule's is that rule's, as no other rule is as near
NOISE_MEASURED = 20  # times in a run of Adam at the middle batch size

Curve = Mapping[float, float]  # final losses by learning rate


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run: `rates` are the grids at batch 16, moved by the square-root rule to the others.

    A grid grows by one step, at most `extensions` times, where the best rate of the mean over seeds lies
    on its edge.
    """

    base: Train
    examples: int
    batch_sizes: tuple[int, ...]
    seeds: int
    rates: Mapping[str, tuple[float, ...]]
    extensions: int = 2

    def __post_init__(self) -> None:
        if ADAM not in self.rates or HOME not in self.batch_sizes:
            raise LabError(
                f"the noise scale is measured in runs of {ADAM} at batch {HOME}: include them."
            )
        if whole := [size for size in self.batch_sizes if self.examples % size]:
            raise LabError(f"{self.examples} examples are no whole number of batches of {whole[0]}.")
        if short := [name for name, grid in self.rates.items() if len(grid) < 3]:
            raise LabError(f"{short[0]} has fewer than three learning rates, too few for a parabola.")


HOME = 16
_RATES = {
    ADAM: (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    MICRO: (1.6e-2, 3.2e-2, 6.4e-2, 0.128),
    SIGN: (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    LATE: (1e-3, 2e-3, 4e-3, 8e-3),
}
_SHORT = Train(model=SMALL, validate_every=NEVER, checkpoint_every=NEVER)
PRESETS = {
    "demo": Preset(
        _SHORT,
        examples=1024,
        batch_sizes=(4, 16, 64),
        seeds=3,
        rates={name: _RATES[name][1:] for name in (ADAM, LATE)},
        extensions=1,
    ),
    "quick": Preset(
        _SHORT,
        examples=4096,
        batch_sizes=(1, 4, 16, 64, 256),
        seeds=6,
        rates={name: rates[1:] for name, rates in _RATES.items()},
    ),
    "full": Preset(
        Train(model=LARGE, validate_every=NEVER, checkpoint_every=2000),
        examples=8192,
        batch_sizes=(1, 4, 16, 64, 256),
        seeds=5,
        rates={name: tuple(rate / 2 for rate in rates) for name, rates in _RATES.items()},
    ),
}


# The law, from losses.


def lowest(curve: Curve) -> float:
    """The logarithm of the best learning rate (`sweep.vertex`), or NaN if it is not known."""
    found = sweep.vertex(curve)
    return math.nan if found is None else found


def slope(best: Mapping[int, float]) -> float:
    """The slope of log(best rate) over log(batch size); NaN if a best rate is not known.

    >>> round(slope({1: math.log(0.01), 4: math.log(0.02), 16: math.log(0.04)}), 3)
    0.5
    """
    if len(best) < 2:
        return math.nan
    sizes = sorted(best)
    return float(np.polyfit(np.log(sizes), [best[size] for size in sizes], 1)[0])


def parts(sizes: Sequence[int], noise_scale: float) -> dict[str, list[int]]:
    """The batch sizes below and above the noise scale; the one nearest to it belongs to both."""
    ordered = sorted(sizes)
    if not math.isfinite(noise_scale):
        return {"below": ordered}
    nearest = min(ordered, key=lambda size: abs(math.log(size / noise_scale)))
    return {
        "below": [size for size in ordered if size <= nearest],
        "above": [size for size in ordered if size >= nearest],
    }


# The runs.


def run(preset: Preset, lab: Lab) -> StudyResult:
    seeds = range(preset.seeds)
    curves = {
        (name, size): _curves(preset, lab, name, size)
        for name in preset.rates
        for size in sorted(preset.batch_sizes)
    }
    noise_scale = _noise_scale(preset, lab, {s: lowest(curves[ADAM, HOME][s]) for s in seeds})
    best = {
        name: {
            size: {s: lowest(curves[name, size][s]) for s in seeds}
            for size in sorted(preset.batch_sizes)
        }
        for name in preset.rates
    }
    rows = [
        {"optimizer": name, "batch_size": size, "seed": s, "learning_rate": rate, "tune_loss": loss}
        for (name, size), by_seed in curves.items()
        for s, curve in by_seed.items()
        for rate, loss in curve.items()
    ]
    return StudyResult(
        f"{len(rows)} training runs, with {preset.seeds} seeds. Every run sees {preset.examples} "
        f"examples. Grids of learning rates have a factor of 2. The decays of the averages stay as they "
        f"are. The noise scale, measured in {preset.seeds} more runs of Adam at batch {HOME}, is "
        f"{noise_scale:.0f}.",
        [section(best, noise_scale)],
        [*rows, {"noise_scale": noise_scale}],
    )


def _curves(preset: Preset, lab: Lab, name: str, size: int) -> dict[int, dict[float, float]]:
    """The final losses of each seed by learning rate, on a grid that grows where it has to."""
    base = dataclasses.replace(
        preset.base, optimizer=OPTIMIZERS[name], batch_size=size, steps=preset.examples // size
    )
    grid = sorted(_rounded(rate * math.sqrt(size / HOME)) for rate in preset.rates[name])
    seeds, extensions = range(preset.seeds), preset.extensions
    while True:
        runs = {
            (seed, rate): dataclasses.replace(base, seed=seed, learning_rate=rate)
            for seed in seeds
            for rate in grid
        }
        results = lab.run(runs.values())
        curves = {
            seed: {rate: sweep.loss_of(results[runs[seed, rate]], "tune_loss") for rate in grid}
            for seed in seeds
        }
        lowest_at = {min(grid, key=lambda rate: curves[s][rate]) for s in seeds}
        new = [_rounded(grid[0] / 2)] * (grid[0] in lowest_at)
        new += [_rounded(grid[-1] * 2)] * (grid[-1] in lowest_at)
        if not new or not extensions:
            return curves
        grid, extensions = sorted([*grid, *new]), extensions - 1


def _noise_scale(preset: Preset, lab: Lab, best: Mapping[int, float]) -> float:
    """tr Sigma / |mu|^2 over whole runs of Adam at batch 16, each at its best rate: a ratio of sums."""
    steps = preset.examples // HOME
    base = dataclasses.replace(
        preset.base, batch_size=HOME, steps=steps, noise_every=max(1, steps // NOISE_MEASURED)
    )
    middle = preset.rates[ADAM][len(preset.rates[ADAM]) // 2]
    runs = [
        dataclasses.replace(
            base,
            seed=seed,
            learning_rate=_rounded(math.exp(at)) if math.isfinite(at) else middle,
        )
        for seed, at in best.items()
    ]
    lab.run(runs)
    sums = np.zeros(2)
    for config in runs:
        for row in records.read_metrics(records.directory(lab.runs, config)):
            noise = row.get("noise", {})
            if noise.get("signal") is not None:
                sums += noise["signal"], noise["noise"]
    signal, noise = sums
    return float(noise / signal) if signal > 0 else math.nan


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


# The answers.

Best = Mapping[str, Mapping[int, Mapping[int, float]]]  # logarithms, by optimizer, batch size and seed


def slopes(best: Mapping[int, Mapping[int, float]], sizes: Sequence[int]) -> dict[int, float]:
    """The slope of one optimizer over some batch sizes, by seed."""
    seeds = next(iter(best.values()))
    return {seed: slope({size: best[size][seed] for size in sizes}) for seed in seeds}


def verdicts(best: Best, noise_scale: float) -> list[decide.Verdict]:
    """Whether the slope is that of the optimizer's rule below the noise scale, and lower above it."""
    found = []
    level = decide.level_of_each(len(best) * 2)
    for name, own in best.items():
        for part, sizes in parts(list(own), noise_scale).items():
            if len(sizes) < 2:
                continue
            of = slopes(own, sizes)
            span = f"{name}, from batch {sizes[0]} to {sizes[-1]}, {part} the noise scale"
            rule = RULE[name]
            at = dict.fromkeys(of, SLOPES[rule])
            options: Any = {"level": level, "names": (name, rule)}
            if part == "below":
                claim = (
                    f"{span}: the best learning rate has the slope {SLOPES[rule]:g} within {MARGIN:g}"
                )
                verdict = decide.equivalent(claim, of, at, margin=MARGIN, **options)
            else:
                claim = f"{span}: the best learning rate has a slope below {SLOPES[rule]:g}"
                verdict = decide.compare(claim, of, at, **options)
            unknown = sum(map(math.isnan, of.values()))
            if unknown:
                why = f"a best learning rate is not known for {unknown} of {len(of)} seeds"
                verdict = dataclasses.replace(verdict, answer=decide.NOT_SHOWN, why=why)
            found.append(verdict)
    return found


def section(best: Best, noise_scale: float) -> report.Section:
    def estimated(values: Any) -> decide.Estimate | None:
        known = [x for x in values if math.isfinite(x)]
        return decide.estimate(known) if known else None

    curves, rows = {}, []
    for name, own in best.items():
        at = {size: estimated(by_seed.values()) for size, by_seed in own.items()}
        there = {size: e for size, e in at.items() if e is not None}
        curves[name] = np.array(list(there)), *np.exp(figures.columns(there.values()))
        rows.append([name, *(_shown(at[size], own[size]) for size in own)])
    table = [
        [name, part, f"{sizes[0]} to {sizes[-1]}", str(estimated(slopes(own, sizes).values()) or "-")]
        for name, own in best.items()
        for part, sizes in parts(list(own), noise_scale).items()
        if len(sizes) > 1
    ]
    found = report.Table("Slopes", ["optimizer", "noise scale", "batch sizes", "slope"], table)
    sizes = sorted(next(iter(best.values())))
    curves |= _lines(curves, sizes)
    lines = {"noise scale": noise_scale} if math.isfinite(noise_scale) else {}
    return report.Section(
        "The best learning rate of every batch size",
        "For each seed, the lowest point of a parabola through the three lowest final losses over the "
        "logarithm of the learning rate, on the half of the validation data that chooses. Means over "
        "the seeds whose best rate is not on the edge of the grid, and intervals, of logarithms.",
        figures=[
            report.Figure(
                "Best learning rate against batch size",
                "Geometric means over seeds. Rules begin at Adam's best rate for the smallest batch.",
                lambda fig: figures.lines_with_bands(
                    fig,
                    curves,
                    "batch size (examples)",
                    "best learning rate",
                    logx=True,
                    logy=True,
                    lines=lines,
                ),
            ),
            panels.of_table(
                found,
                "Slopes of the best learning rate",
                "Of its logarithm over that of the batch size, below and above the noise scale.",
                names=3,
            ),
        ],
        tables=[
            report.Table("Best learning rates", ["optimizer", *map(str, sizes)], rows),
            found,
        ],
        verdicts=verdicts(best, noise_scale),
    )


def _lines(curves: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """The rules as lines, from Adam's best rate on."""
    at, rates, *_ = curves.get(ADAM, (np.array([]), np.array([])))
    if not len(at):
        return {}
    x = np.array(sizes, float)
    drawn = {}
    for rule in ("square root", "linear"):
        y = rates[0] * (x / at[0]) ** SLOPES[rule]
        drawn[f"rule: {rule}"] = (x, y, y, y)
    return drawn


def _shown(e: decide.Estimate | None, by_seed: Mapping[int, float]) -> str:
    """The geometric mean with its interval, and how many seeds it is of, if not all."""
    if e is None:
        return "-"
    mean, low, high = (f"{x:.2g}" for x in np.exp([e.mean, e.low, e.high]))
    few = f", {e.n} of {len(by_seed)} seeds" * (e.n < len(by_seed))
    return f"{mean} ({low} to {high}{few})" if e.n > 1 else f"{mean} (1 seed)"


STUDY = Study(
    title="The best learning rate as a law of the batch size",
    question="How does the best learning rate grow with the batch size, below and above the noise "
    "scale?",
    claim="With a learning rate proportional to sqrt(B), runs of Adam agree over a wide range of batch "
    "sizes, and break at large ones (arXiv 2510.00236). If so, the best rate grows with the slope 1/2 "
    "below the noise scale, for Adam and for signs. For MicroAdam, whose preconditioner does not depend "
    "on B, theory says 1.",
    presets=PRESETS,
    run=run,
)
