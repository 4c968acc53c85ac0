"""Time and memory against `jax.grad`, as the length T of the sequences varies beside the width D.

For a matrix of D x D, an example has D T activations and D^2 numbers of a gradient. `vmap(grad)` holds
both for all examples, so at a fixed number of tokens B T its gradients take tokens D^2 / T: they are the
larger part only where T is below D. pergrad never holds all gradients.

Candidates take turns (see `timing`), so that a disturbance of the machine meets all of them in the same
round: rounds pair times as seeds pair runs. The rule is fixed here, before any run. Times are compared
by the logarithm of their ratio in every round, at every size, at a level that all sizes of all claims
share (see `decide`). A claim about several sizes is contradicted if one of them contradicts it, and
supported if all of them support it. Memory is what XLA sets aside. It is exact, so there is no interval.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pergrad.lab.bench import price, tasks
from pergrad.lab.compare import decide
from pergrad.lab.config import Train
from pergrad.lab.pages import figures, report
from pergrad.lab.run import train
from pergrad.lab.studies._study import Lab, Study, StudyResult
from pergrad.lab.timing import Result, silent

LIMIT = 1.2  # up to so many times `jax.grad` count as little
NAMES = (tasks.PERGRAD, tasks.VMAP)


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is measured: all D with all T / D, at a fixed number of tokens B T."""

    widths: tuple[int, ...]
    ratios: tuple[float, ...]
    tokens: int
    layers: int
    rounds: int
    budget: float  # seconds that a candidate may take at one size
    base: Train = dataclasses.field(default_factory=Train)


@dataclasses.dataclass(frozen=True)
class Point:
    """One size, and what was measured there, by candidate."""

    width: int
    length: int
    batch_size: int
    results: Mapping[str, Result]

    @property
    def where(self) -> str:
        return f"D {self.width}, T {self.length}"

    def log_times(self, name: str, beside: str) -> dict[int, float]:
        """The logarithms of a candidate's times, in the rounds that both candidates have."""
        rounds = min(len(self.results[name].seconds), len(self.results[beside].seconds))
        return {i: math.log(self.results[name].seconds[i]) for i in range(rounds)}

    def memory(self, name: str) -> float:
        """Memory as a multiple of that of `jax.grad`."""
        return self.results[name].ratios(self.results[tasks.FLOOR])["memory"]

    def time(self, name: str) -> decide.Estimate:
        """Time as a multiple of `jax.grad`'s: the geometric mean over rounds, with its interval."""
        ours, floor = self.log_times(name, tasks.FLOOR), self.log_times(tasks.FLOOR, name)
        e = decide.estimate([ours[i] - floor[i] for i in ours])
        return decide.Estimate(math.exp(e.mean), math.exp(e.low), _exp(e.high), e.n)


def run(sizes: Preset, lab: Lab) -> StudyResult:
    """Measures every size, in this process alone: others would disturb the times."""
    wanted = [(width, round(width * ratio)) for width in sizes.widths for ratio in sizes.ratios]
    points = []
    for done, (width, length) in enumerate(wanted, 1):
        points.append(_measure(sizes, width, length))
        said = ", ".join(f"{name} {points[-1].time(name).mean:.2f}" for name in NAMES)
        lab.say(f"{done} of {len(wanted)}: {points[-1].where}: {said} x jax.grad")
    machine = price.machine()
    devices = ", ".join(machine["devices"])
    ran = (
        "The mean and the second moment of per-example gradients. The model is "
        f"{'an LSTM' if sizes.base.model.kind == 'lstm' else 'a transformer'} with {sizes.layers} "
        f"block{'s' * (sizes.layers > 1)}, in batches of {sizes.tokens} bytes of text, cut "
        f"into B sequences of T. The candidates take turns in {sizes.rounds} rounds, each until it "
        f"has used {sizes.budget:g} seconds. On {machine['cores']} cores ({devices}), "
        f"{machine['platform']}. The intervals are about rounds of one process: compiled again, or on "
        "another machine, times may differ by more."
    )
    return StudyResult(ran, [_times(points), _memory(points)], [row for p in points for row in _rows(p)])


def _measure(sizes: Preset, width: int, length: int) -> Point:
    batch_size = sizes.tokens // length
    model = dataclasses.replace(sizes.base.model, layers=sizes.layers, width=width, context=length)
    problem = train.make_problem(dataclasses.replace(sizes.base, model=model, batch_size=batch_size))
    found = price.measure(
        problem.loss,
        tasks.TASKS["moments"],
        problem.params,
        problem.batches[0],
        names=(tasks.FLOOR, tasks.VMAP, tasks.PERGRAD),
        rounds=sizes.rounds,
        budget=sizes.budget,
        say=silent,
    )
    return Point(width, length, batch_size, {result.name: result for result in found.results})


# The claims.


def time_verdict(
    claim: str, points: Sequence[Point], name: str, beside: str, limit: float = 1.0, *, level: float
) -> decide.Verdict:
    """Whether `name` takes less than `limit` times the time of `beside`, at every point.

    `level` is that of the interval at one point.
    """
    each = []
    for point in points:
        bound = {i: x + math.log(limit) for i, x in point.log_times(beside, name).items()}
        each.append(decide.compare(claim, point.log_times(name, beside), bound, level=level))
    count = [sum(v.answer == answer for v in each) for answer in (decide.SUPPORTED, decide.CONTRADICTED)]
    answer = (
        decide.SUPPORTED
        if count[0] == len(each)
        else decide.CONTRADICTED
        if count[1]
        else decide.NOT_SHOWN
    )
    worst, point = max(zip(each, points, strict=True), key=lambda pair: pair[0].difference.mean)
    e = worst.difference
    mean, low, high = (f"{limit * _exp(x):.2f}" for x in (e.mean, e.low, e.high))
    why = (
        f"supported at {count[0]} and contradicted at {count[1]} of {len(each)} sizes; the largest "
        f"ratio is {mean} ({100 * level:.3g}%: {low} to {high}, {e.n} rounds), at {point.where}"
    )
    return decide.Verdict(claim, e, answer, why)


def memory_verdict(claim: str, points: Sequence[Point], name: str, limit: float) -> decide.Verdict:
    """Whether `name` needs at most `limit` times the memory of `jax.grad`, at every point."""
    ratios = [point.memory(name) for point in points]
    within = sum(ratio <= limit for ratio in ratios)
    at = int(np.argmax(ratios))  # the place of the largest, or of NaN if there is one
    most, beyond = ratios[at], ratios[at] - limit
    exact = decide.Estimate(beyond, beyond, beyond, len(ratios))
    if math.isnan(most):
        return decide.Verdict(
            claim, exact, decide.NOT_SHOWN, "XLA does not say how much memory is needed"
        )
    why = (
        f"so at {within} of {len(ratios)} sizes; the largest ratio is {most:.2f}, at {points[at].where}"
    )
    return decide.Verdict(
        claim, exact, decide.SUPPORTED if within == len(ratios) else decide.CONTRADICTED, why
    )


def _times(points: Sequence[Point]) -> report.Section:
    long = [point for point in points if point.length >= point.width]
    level = decide.level_of_each(2 * len(long) + len(points))
    return report.Section(
        "Time",
        "Ratios are between runs of the same round.",
        figures=[
            report.Figure(
                "Time as a multiple of jax.grad",
                "Mean and second moment. The geometric mean over rounds.",
                _lines(points, "time x jax.grad", lambda p, name: p.time(name)),
            ),
            report.Figure(
                "Time of one call",
                "Mean and second moment: the fastest round, and the quartiles of the rounds.",
                _lines(points, "ms", _milliseconds, **ABSOLUTE),
            ),
            report.Figure(
                "Time to trace and compile, as a multiple of jax.grad",
                "Mean and second moment. It was compiled once.",
                _lines(points, "time to compile x jax.grad", _compile),
            ),
        ],
        tables=[_table(points)],
        verdicts=[
            time_verdict(
                f"with T at least D, {tasks.PERGRAD} takes less than {LIMIT} times jax.grad",
                *(long, tasks.PERGRAD, tasks.FLOOR, LIMIT),
                level=level,
            ),
            time_verdict(
                f"with T at least D, {tasks.VMAP} takes less than {LIMIT} times jax.grad",
                *(long, tasks.VMAP, tasks.FLOOR, LIMIT),
                level=level,
            ),
            time_verdict(
                f"{tasks.PERGRAD} is faster than {tasks.VMAP} at every T / D",
                *(points, tasks.PERGRAD, tasks.VMAP),
                level=level,
            ),
        ],
    )


def _memory(points: Sequence[Point]) -> report.Section:
    long = [point for point in points if point.length >= point.width]
    return report.Section(
        "Memory",
        "What XLA sets aside for intermediate results. Parameters, batch and results come on top: "
        "with a second moment, the results are twice those of jax.grad.",
        figures=[
            report.Figure(
                "Temporary memory as a multiple of jax.grad",
                "Mean and second moment.",
                _lines(points, "memory x jax.grad", lambda p, name: _exact(p.memory(name))),
            ),
            report.Figure(
                "Temporary memory",
                "Mean and second moment.",
                _lines(points, "MB", _megabytes, **ABSOLUTE),
            ),
        ],
        verdicts=[
            memory_verdict(
                f"with T at least D, {tasks.VMAP} needs at most {LIMIT} times the memory of jax.grad",
                *(long, tasks.VMAP, LIMIT),
            ),
            memory_verdict(
                f"{tasks.PERGRAD} needs at most {LIMIT} times the memory of jax.grad at every T / D",
                *(points, tasks.PERGRAD, LIMIT),
            ),
        ],
    )


def _exact(value: float) -> decide.Estimate:
    return decide.Estimate(value, value, value, 1)


def _milliseconds(point: Point, name: str) -> decide.Estimate:
    result = point.results[name]
    low, _, high = (1e3 * x for x in result.quartiles)
    return decide.Estimate(1e3 * result.minimum, low, high, len(result.seconds))


def _compile(point: Point, name: str) -> decide.Estimate:
    return _exact(point.results[name].ratios(point.results[tasks.FLOOR])["compile"])


def _megabytes(point: Point, name: str) -> decide.Estimate:
    return _exact(point.results[name].executable.temp_bytes / 1e6)


# For figures of times and bytes themselves, which `jax.grad` has, too.
ABSOLUTE: dict[str, Any] = {
    "names": (tasks.FLOOR, *NAMES),
    "interval": "quartiles over rounds",
    "reference": None,
}


def _lines(
    points: Sequence[Point],
    label: str,
    of: Callable[[Point, str], decide.Estimate],
    *,
    names: Sequence[str] = NAMES,
    interval: str = "95% interval over rounds",
    reference: tuple[float, str] | None = (1.0, "jax.grad"),
) -> Callable[..., None]:
    widths = dict.fromkeys(point.width for point in points)
    curves = {}
    for name in names:
        for width in widths:
            own = sorted((p for p in points if p.width == width), key=lambda p: p.length)
            found = [(p.length / p.width, e.mean, e.low, e.high) for p in own for e in [of(p, name)]]
            curves[f"{name}, D {width}"] = tuple(np.array(found).T)
    return lambda fig: figures.lines_with_bands(
        fig,
        curves,
        "T / D",
        label,
        logx=True,
        logy=True,
        interval=interval,
        reference=reference,
    )


def _table(points: Sequence[Point]) -> report.Table:
    header = ["D", "T", "T / D", "B", "candidate", "fastest ms", "quartiles ms", "time x"]
    header += ["memory MB", "memory x", "compile x"]
    rows = []
    for point in points:
        for name, result in point.results.items():
            ratios = result.ratios(point.results[tasks.FLOOR])
            size = [point.width, point.length, f"{point.length / point.width:g}", point.batch_size]
            low, _, high = (f"{1e3 * x:.1f}" for x in result.quartiles)
            mean = point.time(name).mean
            time = [f"{1e3 * result.minimum:.1f}", f"{low} to {high}", f"{mean:.2f}"]
            memory = [f"{result.executable.temp_bytes / 1e6:.1f}", f"{ratios['memory']:.2f}"]
            rows.append([*map(str, size), name, *time, *memory, f"{ratios['compile']:.2f}"])
    return report.Table("All that was measured", header, rows)


def _rows(point: Point) -> list[dict[str, Any]]:
    size = {"width": point.width, "length": point.length, "batch_size": point.batch_size}
    return [size | numbers for numbers in price.numbers(list(point.results.values()))]


def _exp(x: float) -> float:
    """exp(x), infinite where that overflows, as for the interval of a single round."""
    return math.exp(x) if x < 700 else math.inf


DOUBLINGS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)

STUDY = Study(
    title="What statistics cost beside jax.grad",
    question="How much time and memory do the mean and the second moment of per-example gradients take "
    "beside jax.grad, as the length T of the sequences varies beside the width D of a transformer?",
    claim="Statistics beyond the mean cost little (arXiv 2510.00236). For sequences, vmap(grad) takes "
    "memory for gradients in proportion to B D^2 and for activations to B D T, so with T at least D the "
    "gradients are not the larger part; a transformer with 1.2 billion parameters took about 17% more "
    f"time and no more memory. Little is taken to be {LIMIT} times jax.grad.",
    presets={
        "demo": Preset((32,), (1 / 4, 1.0, 4.0), tokens=1024, layers=1, rounds=5, budget=5.0),
        "quick": Preset((64, 128), DOUBLINGS, tokens=4096, layers=2, rounds=8, budget=40.0),
        "full": Preset((64, 128, 256), DOUBLINGS, tokens=8192, layers=4, rounds=20, budget=90.0),
    },
    run=run,
    domains=("text",),  # whose sequences can grow
)
