"""Batch sizes that follow the noise: a ramp that a noise monitor drives, beside fixed sizes.

All plans see the same examples in the same order. The rate of a batch of B is sqrt(B / 16) times that of
batches of 16, and rises and falls with the examples seen, not with the steps.

    fixed      batches of one size
    by hand    the size doubles after each quarter of the examples
    monitor    the size doubles when the noise scale, divided by 2.7, is at least twice the size: the
               study `snr` found the critical batch size to be 2.7 times smaller than the noise scale

Every plan's learning rate is tuned alike, on seeds that are not among those that are reported. A plan
saves steps or loss, never examples: all of them see equally many.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pergrad as pg
from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Train, to_json
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, panels, report
from pergrad.lab.run import optimizers, records, train
from pergrad.lab.studies._study import LARGE, SMALL, Lab, Study, StudyResult

HOME = 16  # the batch size that learning rates are given for
ABOVE_CRITICAL = 2.7  # how many times the noise scale is larger than the critical batch size
NOISE_DECAY = 0.99  # of the monitor's averages, each step
LOOK_EVERY = 128  # examples between two looks at the monitor
MARGIN = 0.02  # nats within which two final losses count as the same

# The size of the next batches, from the part of the examples that is done, the noise scale and the size.
Plan = Callable[[float, float, int], int]


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. Ramps begin at the smaller of the two sizes in `fixed` and end at `largest`."""

    base: Train
    examples: int
    fixed: tuple[int, int]
    largest: int
    seeds: int
    tuning_seeds: int
    rates: tuple[float, ...]
    extensions: int = 1

    def __post_init__(self) -> None:
        if self.examples % max(self.largest, LOOK_EVERY) or self.largest > LOOK_EVERY:
            raise LabError(
                f"the examples are a multiple of {LOOK_EVERY}, and the largest batch is at most that."
            )


_RATES = (5.6e-3, 8e-3, 1.1e-2, 1.6e-2, 2.3e-2)  # a factor of about sqrt(2)
PRESETS = {
    "demo": Preset(
        Train(model=SMALL),
        examples=4096,
        fixed=(8, 16),
        largest=64,
        seeds=3,
        tuning_seeds=1,
        rates=_RATES[1:4:2],
        extensions=0,
    ),
    "quick": Preset(
        Train(model=SMALL),
        examples=16_384,
        fixed=(8, 16),
        largest=64,
        seeds=6,
        tuning_seeds=1,
        rates=_RATES[1:],
    ),
    "full": Preset(
        Train(model=LARGE),
        examples=65_536,
        fixed=(8, 16),
        largest=128,
        seeds=8,
        tuning_seeds=2,
        rates=tuple(rate / 2 for rate in _RATES),
    ),
}


# The plans.


def fixed(size: int, done: float, noise_scale: float, now: int) -> int:
    del done, noise_scale, now
    return size


def by_hand(first: int, largest: int, done: float, noise_scale: float, now: int) -> int:
    """Twice the size after each quarter.

    >>> [by_hand(8, 64, done, math.nan, 8) for done in (0, 0.24, 0.25, 0.5, 0.9)]
    [8, 8, 16, 32, 64]
    """
    del noise_scale, now
    return min(first * 2 ** int(4 * done), largest)


def by_monitor(first: int, largest: int, done: float, noise_scale: float, now: int) -> int:
    """Twice the size if that is at most the critical batch size, as the noise scale tells it.

    >>> [by_monitor(8, 64, 0.5, noise, 16) for noise in (80.0, 87.0, 1e6, math.nan)]
    [16, 32, 32, 16]
    """
    del done
    now = max(now, first)
    return min(2 * now, largest) if noise_scale / ABOVE_CRITICAL >= 2 * now else now


def plans(preset: Preset) -> dict[str, Plan]:
    small, large = preset.fixed
    ends = small, preset.largest
    return {
        f"fixed {small}": functools.partial(fixed, small),
        f"fixed {large}": functools.partial(fixed, large),
        "ramp by hand": functools.partial(by_hand, *ends),
        "ramp by monitor": functools.partial(by_monitor, *ends),
    }


# One run.


class Step(NamedTuple):
    """The functions of all runs, which are compiled once for each batch size."""

    tx: Any
    monitor: pg.noise.Monitor
    step: Callable[..., tuple[Any, ...]]
    validate: Callable[[Any, Any], jax.Array]


def make_step(config: Train) -> Step:
    loss = train.make_problem(config).loss
    tx, monitor = optimizers.make(config), pg.noise.Monitor(decay=NOISE_DECAY)
    stats_fn = pg.value_and_stats(loss, tx.stats | monitor.stats)

    def step(params: Any, state: Any, noise: Any, batch: Any, rate: Any) -> tuple[Any, ...]:
        value, stats = stats_fn(params, batch)
        updates, state = tx.update(stats["mean"], state, params, stats=stats)
        params = optax.apply_updates(params, jax.tree.map(lambda u: rate * u, updates))
        return params, state, monitor.update(stats, noise), value

    validate = jax.jit(lambda params, examples: loss(params, jnp.asarray(examples)))
    return Step(tx, monitor, jax.jit(step), validate)


def run_plan(config: Train, plan: Plan, preset: Preset, compiled: Step) -> dict[str, Any]:
    """One run: `config` has the seed and the learning rate of batches of 16."""
    first = preset.fixed[0]
    problem = train.make_problem(dataclasses.replace(config, batch_size=first))
    params = problem.params
    state, noise = compiled.tx.init(params), compiled.monitor.init(params)
    scheduled = dataclasses.replace(config, steps=preset.examples)
    size, seen, steps, value = plan(0.0, math.nan, first), 0, 0, jnp.zeros(())
    grown = [[0, size]]
    while seen < preset.examples and np.isfinite(value):
        if seen and seen % LOOK_EVERY == 0:
            noise_scale = compiled.monitor.summary(noise)["noise_scale"]
            new = plan(seen / preset.examples, math.nan if noise_scale is None else noise_scale, size)
            if new != size:
                size = new
                grown.append([seen, size])
        rate = optimizers.learning_rate(scheduled, seen) * math.sqrt(size / HOME)
        batch = np.concatenate([problem.batches[(seen + at) // first] for at in range(0, size, first)])
        params, state, noise, value = compiled.step(params, state, noise, batch, rate)
        seen, steps = seen + size, steps + 1
    ends = {"tune_loss": problem.tune, "test_loss": problem.test}
    losses = {name: records.plain(compiled.validate(params, part)) for name, part in ends.items()}
    diverged = seen < preset.examples or None in losses.values()
    return {
        "diverged": diverged,
        "steps": steps,
        "train_loss": None,
        **(dict.fromkeys(losses) if diverged else losses),
        "grown": grown,
    }


def _cached(
    name: str, config: Train, plan: Plan, preset: Preset, step: Step, root: Path
) -> tuple[dict[str, Any], bool]:
    """The result of a run, and whether it was run now: what is done is not run again."""
    about = {"plan": name, "examples": preset.examples, "fixed": preset.fixed, "largest": preset.largest}
    text = json.dumps({"config": to_json(config), **about}, sort_keys=True)
    path = root / f"ramp-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    if (done := records.read_result(path)) is not None:
        return done, False
    result = run_plan(config, plan, preset, step)
    path.mkdir(parents=True, exist_ok=True)
    records.write_json(path / "result.json", result)
    return result, True


# The study.

Runs = Mapping[str, Mapping[int, dict[str, Any]]]  # by plan and seed


def run(preset: Preset, lab: Lab) -> StudyResult:
    step = make_step(preset.base)
    rows: dict[Any, dict[str, Any]] = {}
    known = len(plans(preset)) * (len(preset.rates) * preset.tuning_seeds + preset.seeds)

    def one(name: str, plan: Plan, rate: float, seed: int) -> dict[str, Any]:
        config = dataclasses.replace(preset.base, learning_rate=rate, seed=seed)
        result, is_new = _cached(name, config, plan, preset, step, lab.runs)
        rows[name, rate, seed] = {"plan": name, "learning_rate": rate, "seed": seed, **result}
        if is_new:
            lab.told(config, result, len(rows), max(len(rows), known))
        return result

    chosen: dict[str, float] = {}
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for name, plan in plans(preset).items():
        chosen[name] = _tune(preset, functools.partial(one, name, plan))
        runs[name] = {seed: one(name, plan, chosen[name], seed) for seed in range(preset.seeds)}
    return StudyResult(
        f"{len(rows)} training runs of Adam, each over {preset.examples} examples. Learning rates were "
        f"chosen on {preset.tuning_seeds} seeds of their own, and each plan then ran with "
        f"{preset.seeds} other seeds.",
        [ended(preset, runs, chosen)],
        list(rows.values()),
    )


def _tune(preset: Preset, one: Callable[[float, int], dict[str, Any]]) -> float:
    """The learning rate with the lowest mean loss. The grid grows where the best is on its edge."""
    grid, extensions = sorted(preset.rates), preset.extensions
    while True:
        seeds = range(sweep.TUNING_SEED, sweep.TUNING_SEED + preset.tuning_seeds)
        losses = {rate: [one(rate, seed)["tune_loss"] for seed in seeds] for rate in grid}
        means = {rate: math.inf if None in own else float(np.mean(own)) for rate, own in losses.items()}
        best = min(grid, key=lambda rate: means[rate])
        if best not in (grid[0], grid[-1]) or not extensions:
            return best
        outer = grid[0] ** 2 / grid[1] if best == grid[0] else grid[-1] ** 2 / grid[-2]
        grid, extensions = sorted([*grid, float(f"{outer:.3g}")]), extensions - 1


def verdicts(preset: Preset, losses: Mapping[str, Mapping[int, float]]) -> list[decide.Verdict]:
    small, large = (f"fixed {size}" for size in preset.fixed)
    level = decide.level_of_each(3)

    def options(a: str, b: str) -> Any:
        return {"level": level, "names": (a, b)}

    ramp, hand = "ramp by monitor", "ramp by hand"
    return [
        *(
            decide.compare(
                f"{ramp} ends below {other}", losses[ramp], losses[other], **options(ramp, other)
            )
            for other in (large, hand)
        ),
        decide.equivalent(
            f"{ramp} ends within {MARGIN:g} of {small}, which takes more steps",
            losses[ramp],
            losses[small],
            margin=MARGIN,
            **options(ramp, small),
        ),
    ]


def ended(preset: Preset, runs: Runs, chosen: Mapping[str, float]) -> report.Section:
    losses = {
        name: {
            seed: math.inf if run["test_loss"] is None else run["test_loss"] for seed, run in own.items()
        }
        for name, own in runs.items()
    }
    ends = {name: decide.estimate(list(own.values())) for name, own in losses.items()}
    rows = [
        [
            name,
            f"{chosen[name]:g}",
            str(ends[name]),
            f"{preset.examples}",
            f"{np.mean([run['steps'] for run in own.values()]):.0f}",
        ]
        for name, own in runs.items()
    ]
    table = report.Table("Plans", ["plan", "learning rate", "final loss", "examples", "steps"], rows)
    curves = {name: _sizes(preset, list(own.values())) for name, own in runs.items()}
    return report.Section(
        "Where runs end, and in how many steps",
        "Losses on the half of the validation data that chose nothing, with seeds that chose nothing. "
        f"Learning rates are those of batches of {HOME}.",
        figures=[
            panels.of_table(
                table,
                "Final loss and steps of each plan",
                "The loss at the end of training; lower is better. Steps are means over seeds.",
            ),
            report.Figure(
                "Batch sizes over training",
                "Geometric means over seeds.",
                lambda fig: figures.lines_with_bands(
                    fig, curves, "examples seen", "batch size (examples)", logy=True
                ),
            ),
        ],
        tables=[table],
        verdicts=verdicts(preset, losses),
    )


def _sizes(preset: Preset, runs: Sequence[Mapping[str, Any]]) -> Any:
    """The batch sizes of runs over the examples seen: a curve."""
    x = np.linspace(0, preset.examples, 21)[:-1]
    of = [[_size_at(run["grown"], at) for at in x] for run in runs]
    points = [decide.estimate(np.log2(column).tolist()) for column in np.array(of, float).T]
    return x, *2 ** figures.columns(points)


def _size_at(grown: Sequence[Sequence[int]], seen: float) -> int:
    return [size for start, size in grown if start <= seen][-1]


STUDY = Study(
    title="Batch sizes that follow the noise",
    question="Do batches that grow with the measured noise scale end lower, or take fewer steps, than "
    "batches of one size?",
    claim="The batch size at which larger batches stop paying grows over a run (McCandlish et al. "
    "2018). So a ramp that follows the noise should end below fixed batches that take as many steps, "
    "and need fewer steps than fixed batches that end as low.",
    presets=PRESETS,
    run=run,
)
