"""Signal and noise of the gradient over a run, layer by layer, and the batch sizes they suggest.

At the end of an annealed run the learning rate is 0, and parameters no longer move out of what they have
fitted: the noise scale then grows for that reason alone. So the claims are about runs whose learning
rate stays after its rise, and annealed runs with the same seeds show what annealing adds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import pergrad as pg
from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Model, Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, findings, panels, report
from pergrad.lab.run import records, train
from pergrad.lab.studies import _layers
from pergrad.lab.studies._study import LARGE, SMALL, Lab, Study, StudyResult

CONSTANT, ANNEALED = "constant", "cosine"  # schedules
CLOSE = 2.0  # the factor within which noise scale and critical batch size are to agree
EARLY = 0.1  # the end of warm-up, as a part of the run
AT_A_TIME = 64  # examples that go through the model at a time when a run is looked at

Noise = Sequence[Mapping[int, Mapping[str, Any]]]  # for each run what was measured, by step


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. Noise is measured `points` times in a run, the critical batch size `looks` times.

    The critical batch size needs products with the Hessian of `examples` examples: there are `probes` of
    them, with vectors of random signs.
    """

    base: Train
    seeds: int
    points: int
    looks: int
    examples: int
    probes: int


PRESETS = {
    "demo": Preset(
        Train(model=SMALL, steps=400, validate_every=400),
        seeds=3,
        points=20,
        looks=2,
        examples=128,
        probes=2,
    ),
    "quick": Preset(
        Train(model=Model(layers=2, width=64, heads=4, context=64), steps=2000, validate_every=1000),
        seeds=5,
        points=50,
        looks=5,
        examples=512,
        probes=8,
    ),
    "full": Preset(
        Train(
            model=LARGE,
            learning_rate=5e-3,
            batch_size=64,
            steps=5000,
            validate_every=1000,
        ),
        seeds=5,
        points=100,
        looks=10,
        examples=2048,
        probes=16,
    ),
}


def run(preset: Preset, lab: Lab) -> StudyResult:
    steps = preset.base.steps
    base = dataclasses.replace(
        preset.base,
        noise_every=max(1, steps // preset.points),
        checkpoint_every=steps // preset.looks,
        keep=0,
    )
    runs = [dataclasses.replace(base, seed=seed, schedule=CONSTANT) for seed in range(preset.seeds)]
    annealed = [dataclasses.replace(config, schedule=ANNEALED, keep=1) for config in runs]
    results = lab.run([*runs, *annealed])
    noise, noise_annealed = (_measured(of, lab) for of in (runs, annealed))
    if not any(noise) or not any(noise_annealed):
        raise LabError("all runs diverged before noise was measured for the first time.")
    critical = _critical(preset, runs, lab)
    losses = [
        decide.estimate([sweep.loss_of(results[config], "test_loss") for config in of])
        for of in (runs, annealed)
    ]
    return StudyResult(
        f"{preset.seeds} runs of Adam with a learning rate of {base.learning_rate:g}, which stays after "
        f"its rise, {steps} steps of {base.batch_size} examples; they end at a loss of {losses[0]}. "
        f"As many annealed runs end at {losses[1]}. Signal and noise are moving "
        f"averages over about ten measurements, of which a run has {preset.points}. Products with the "
        f"Hessian were taken {preset.looks} times in a run, over {preset.examples} examples with "
        f"{preset.probes} random signs.",
        sections(noise, noise_annealed, critical, base),
        [
            *({"schedule": c.schedule, "seed": c.seed} | results[c] for c in (*runs, *annealed)),
            *(row for of in (noise, noise_annealed) for by_step in of for row in by_step.values()),
            *critical,
        ],
    )


def sections(
    noise: Noise, annealed: Noise, critical: Sequence[Mapping[str, Any]], base: Train
) -> list[report.Section]:
    """The page's sections, from what was measured in runs without annealing, and with it."""
    return [_whole(noise, annealed, critical, base), _by_layer(noise, base)]


def read(rows: Sequence[Mapping[str, Any]]) -> tuple[Noise, Noise, list[Mapping[str, Any]]]:
    """What `sections` takes, from the rows of `results.jsonl`."""
    measured = [row for row in rows if "signal" in row]
    seeds = sorted({row["seed"] for row in measured})
    noise, annealed = (
        [
            {row["step"]: row for row in measured if (row["schedule"], row["seed"]) == (of, seed)}
            for seed in seeds
        ]
        for of in (CONSTANT, ANNEALED)
    )
    return noise, annealed, [row for row in rows if "curvature" in row]


def only_pairs(noise: Mapping[str, Any]) -> dict[str, Any]:
    """Signal and noise, of all parameters and of each one: all else follows from them."""
    return {name: x for name, x in noise.items() if name.split("/")[0] in ("signal", "noise")}


def _measured(runs: Sequence[Train], lab: Lab) -> Noise:
    return [
        {
            row["step"]: {"schedule": config.schedule, "seed": config.seed, "step": row["step"]}
            | only_pairs(row["noise"])
            for row in records.read_metrics(records.directory(lab.runs, config))
            if "noise" in row
        }
        for config in runs
    ]


def _critical(preset: Preset, runs: Sequence[Train], lab: Lab) -> list[dict[str, Any]]:
    """mu' H mu and tr(H Sigma) beside |mu|^2 and tr Sigma, of the same examples, at the checkpoints."""
    problems = [
        train.make_problem(dataclasses.replace(config, batch_size=preset.examples)) for config in runs
    ]
    loss = problems[0].loss
    size = min(AT_A_TIME, preset.examples)
    curvature = jax.jit(pg.noise.curvature(loss, probes=preset.probes, microbatch_size=size))
    stats: Any = {"mean": pg.Mean(), "norm": pg.Norm(), "count": pg.Count()}
    stats_fn = jax.jit(pg.grad_stats(loss, stats, microbatch_size=size))
    out = []
    for config, problem in zip(runs, problems, strict=True):
        for step, params in train.parameters(config, records.directory(lab.runs, config)).items():
            lab.say(f"products with the Hessian, seed {config.seed}, step {step}")
            batch = problem.batches[step]
            key = jax.random.fold_in(jax.random.key(config.seed), step)
            curved = curvature(key, params, batch)
            plain = pg.noise.total(pg.noise.by_layer(stats_fn(params, batch)))
            out.append(
                {
                    "seed": config.seed,
                    "step": step,
                    "curvature": [float(curved.signal), float(curved.noise)],
                    "identity": [float(plain.signal), float(plain.noise)],
                }
            )
    return out


def _ratio(pairs: Sequence[Sequence[float]]) -> float:
    """The sum of noise over the sum of signal; NaN where no signal is seen."""
    signal, noise = np.sum(np.array(pairs, float).reshape(-1, 2), axis=0)
    return float(noise / signal) if signal > 0 and noise > 0 else math.nan


def _band(x: Sequence[float], values: Any) -> findings.Curve:
    """The mean over seeds of `values` [seed, x], taken of logarithms, where all seeds have a value."""
    points = [decide.estimate(np.log(at).tolist()) for at in np.array(values, float).T]
    columns = np.array([[at, *np.exp([p.mean, p.low, p.high])] for at, p in zip(x, points, strict=True)])
    at, mean, low, high = columns[np.isfinite(columns[:, 1])].T
    return at, mean, low, high


def _geometric(values: Sequence[float], digits: int) -> str:
    """The geometric mean as text; "-" if one of the values is not finite."""
    if not all(map(math.isfinite, values)):
        return "-"
    return f"{math.exp(np.mean(np.log(values))):.{digits}f}"


def _if_seen(
    rule: Callable[..., decide.Verdict],
    claim: str,
    a: Mapping[int, float],
    b: Mapping[int, float],
    **options: Any,
) -> decide.Verdict:
    """The verdict of a rule; "not shown" if a ratio is NaN, which does not mean that a run diverged."""
    verdict = rule(claim, a, b, **options)
    unseen = sum(math.isnan(a[seed] - b[seed]) for seed in a)
    if not unseen:
        return verdict
    why = f"no signal, or no curvature along it, was seen with {unseen} of {len(a)} seeds"
    return dataclasses.replace(verdict, answer=decide.NOT_SHOWN, why=why)


def _steps(noise: Noise) -> list[int]:
    return sorted({step for by_step in noise for step in by_step})


def _pairs(by_step: Mapping[int, Mapping[str, Any]], steps: Sequence[int], path: str = "") -> Any:
    """Signal and noise at those of the steps that a run has reached."""
    rows = [by_step[step] for step in steps if step in by_step]
    return [(row[f"signal{path}"], row[f"noise{path}"]) for row in rows]


def _whole(
    noise: Noise, annealed: Noise, critical: Sequence[Mapping[str, Any]], base: Train
) -> report.Section:
    steps = _steps(noise)
    seeds = range(len(noise))
    scales, scales_annealed = (
        [[_ratio(_pairs(by_step, [step])) for step in steps] for by_step in of]
        for of in (noise, annealed)
    )
    early = max(0, round(EARLY * len(steps)) - 1)
    looks = sorted({row["step"] for row in critical})

    def at(key: str, seed: int, step: int | None = None) -> float:
        own = [row for row in critical if row["seed"] == seed and step in (None, row["step"])]
        return _ratio([row[key] for row in own])

    curves = {
        "noise scale": _band(steps, scales),
        "noise scale, annealed": _band(steps, scales_annealed),
        "noise scale, other examples": _band(
            looks, [[at("identity", s, k) for k in looks] for s in seeds]
        ),
        "critical batch size": _band(looks, [[at("curvature", s, k) for k in looks] for s in seeds]),
    }
    level = decide.level_of_each(4)
    verdicts = [
        _if_seen(
            decide.compare,
            f"the noise scale is lower at step {steps[early]} than at the end (logarithms)",
            {s: math.log(scales[s][early]) for s in seeds},
            {s: math.log(scales[s][-1]) for s in seeds},
            level=level,
            names=("early", "late"),
        ),
        _if_seen(
            decide.compare,
            "at the end the noise scale is lower without annealing than with it (logarithms)",
            {s: math.log(scales[s][-1]) for s in seeds},
            {s: math.log(scales_annealed[s][-1]) for s in seeds},
            level=level,
            names=("constant", "annealed"),
        ),
        _if_seen(
            decide.compare,
            "at the end noise is the larger part of Adam's second moment: "
            f"1 is lower than (sigma^2 / {base.batch_size}) / mu^2 (logarithms)",
            dict.fromkeys(seeds, 0.0),
            {s: math.log(scales[s][-1] / base.batch_size) for s in seeds},
            level=level,
            names=("1", "the ratio"),
        ),
        _if_seen(
            decide.equivalent,
            f"critical batch size and noise scale agree within a factor of {CLOSE:g} (logarithms)",
            {s: math.log(at("curvature", s)) for s in seeds},
            {s: math.log(at("identity", s)) for s in seeds},
            margin=math.log(CLOSE),
            level=level,
            names=("the critical batch size", "the noise scale"),
        ),
    ]
    rows = [
        [
            str(k),
            *(_geometric([at(key, s, k) for s in seeds], 1) for key in ("identity", "curvature")),
        ]
        for k in looks
    ]
    return report.Section(
        "Noise scale and critical batch size",
        "The noise scale tr Sigma / |mu|^2 is the batch size at which signal and noise of the mean "
        "gradient are equal. The critical batch size tr(H Sigma) / (mu' H mu), with the Hessian H, is "
        "the one at which a step along the gradient gains half of what is possible. Both are geometric "
        "means over seeds, of runs whose learning rate stays; the annealed runs have the same seeds.",
        figures=[
            report.Figure(
                "Batch sizes over training",
                "Geometric means over seeds. A step at which some seed sees no signal, or no curvature, "
                "has no point.",
                lambda fig: figures.lines_with_bands(
                    fig, curves, "step", "batch size (examples)", logy=True
                ),
            )
        ],
        tables=[
            report.Table(
                "The same examples for both", ["step", "noise scale", "critical batch size"], rows
            )
        ],
        verdicts=verdicts,
    )


def _by_layer(noise: Noise, base: Train) -> report.Section:
    steps = _steps(noise)
    measured = next(row for by_step in noise for row in by_step.values())
    paths = [name.removeprefix("signal") for name in measured if name.startswith("signal/")]
    groups = {g: [p for p in paths if _layers.group(p) == g] for g in _layers.groups(paths)}

    def share(by_step: Mapping[int, Any], steps: Sequence[int], own: Sequence[str]) -> float:
        return _ratio([pair for p in own for pair in _pairs(by_step, steps, p)]) / base.batch_size

    curves = {
        g: _band(steps, [[share(by_step, [step], own) for step in steps] for by_step in noise])
        for g, own in groups.items()
    }
    third = len(steps) // 3 or 1
    rows = [
        [
            _layers.short(path),
            *(
                _geometric([share(run, part, [path]) for run in noise], 2)
                for part in (steps[:third], steps[-third:])
            ),
        ]
        for path in paths
    ]
    layers = report.Table("Layers", ["layer", "first third", "last third"], rows)
    return report.Section(
        "Noise in Adam's second moment, by layer",
        f"(sigma^2 / B) / mu^2 with B = {base.batch_size}: where it is above 1, what Adam divides by is "
        "mostly noise. Geometric means over seeds.",
        figures=[
            report.Figure(
                "Noise share over training, by group of layers",
                "Geometric means over seeds. Above 1, noise is the larger part.",
                lambda fig: figures.lines_with_bands(
                    fig, curves, "step", "(sigma^2 / B) / mu^2", logy=True
                ),
            ),
            panels.of_table(
                layers,
                "Noise share of each layer",
                "In the first and in the last third of the run. Geometric means over seeds.",
                alike=True,
            ),
        ],
        tables=[layers],
    )


STUDY = Study(
    title="Signal and noise over a run",
    question="How much of Adam's second moment mu^2 + sigma^2 / B is noise, in which layers and when, "
    "and which batch sizes does that suggest?",
    claim="Noise grows against the signal as the loss falls, so that the batch size at which larger "
    "batches stop paying grows too (McCandlish et al. 2018). That mu^2 should dominate for Adam to be "
    "at its best (arXiv 2510.00236) makes its share worth knowing.",
    presets=PRESETS,
    run=run,
)
