"""What the study `overhead` measures at one size, and how that is drawn, written down and read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pergrad.lab.bench import price, tasks
from pergrad.lab.compare import decide
from pergrad.lab.config import TargetName
from pergrad.lab.pages import figures, report
from pergrad.lab.timing import Executable, Result

TRANSFORMER, LSTM, CNN = "transformer", "LSTM", "CNN"
TARGET: TargetName = "tpu:v5e"  # which programs are compiled for
NAMES = (tasks.PERGRAD, tasks.VMAP)


class Judged(NamedTuple):
    """What the compiler for `TARGET` says of a program."""

    seconds: float
    temp_bytes: float


@dataclasses.dataclass(frozen=True)
class Point:
    """One size, what was measured there, and what programs cost on the `target`, by candidate."""

    model: str
    width: int
    length: int
    batch_size: int
    results: Mapping[str, Result]
    judged: Mapping[str, Judged] = dataclasses.field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.model}, D {self.width}, T {self.length}"

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
        return decide.Estimate(math.exp(e.mean), math.exp(e.low), exp(e.high), e.n)


def each(
    points: Sequence[Point],
    title: str,
    caption: str,
    label: str,
    of: Callable[[Point, str], decide.Estimate],
    **options: Any,
) -> list[report.Figure]:
    """A figure for each model."""
    return [
        report.Figure(
            f"{title}, {model}",
            caption,
            _lines([p for p in points if p.model == model], label, of, **options),
        )
        for model in dict.fromkeys(point.model for point in points)
    ]


def exact(value: float) -> decide.Estimate:
    return decide.Estimate(value, value, value, 1)


def milliseconds(point: Point, name: str) -> decide.Estimate:
    result = point.results[name]
    low, _, high = (1e3 * x for x in result.quartiles)
    return decide.Estimate(1e3 * result.minimum, low, high, len(result.seconds))


def compiling(point: Point, name: str) -> decide.Estimate:
    return exact(point.results[name].ratios(point.results[tasks.FLOOR])["compile"])


def megabytes(point: Point, name: str) -> decide.Estimate:
    return exact(point.results[name].executable.temp_bytes / 1e6)


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
    # The CNN's T is fixed, so that its D makes the curve.
    widths = dict.fromkeys("" if p.model == CNN else f", D {p.width}" for p in points)
    curves = {}
    for name in names:
        for width in widths:
            alike = [p for p in points if not width or width == f", D {p.width}"]
            own = sorted(alike, key=lambda p: p.length / p.width)
            found = [(p.length / p.width, e.mean, e.low, e.high) for p in own for e in [of(p, name)]]
            curves[name + width] = tuple(np.array(found).T)
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


def table(points: Sequence[Point]) -> report.Table:
    header = ["model", "D", "T", "T / D", "B", "candidate", "fastest ms", "quartiles ms", "time x"]
    header += ["memory MB", "memory x", "compile x"]
    rows = []
    for point in points:
        for name, result in point.results.items():
            ratios = result.ratios(point.results[tasks.FLOOR])
            ratio = f"{point.length / point.width:g}"
            size = [point.model, point.width, point.length, ratio, point.batch_size]
            low, _, high = (f"{1e3 * x:.1f}" for x in result.quartiles)
            mean = point.time(name).mean
            time = [f"{1e3 * result.minimum:.1f}", f"{low} to {high}", f"{mean:.2f}"]
            memory = [f"{result.executable.temp_bytes / 1e6:.1f}", f"{ratios['memory']:.2f}"]
            rows.append([*map(str, size), name, *time, *memory, f"{ratios['compile']:.2f}"])
    return report.Table("All that was measured", header, rows)


def rows(point: Point) -> list[dict[str, Any]]:
    size = {"model": point.model, "width": point.width, "length": point.length}
    size |= {"batch_size": point.batch_size}
    return [
        *(size | numbers for numbers in price.numbers(list(point.results.values()))),
        *(
            size | {"target": TARGET, "candidate": name} | {"judged": own._asdict()}
            for name, own in point.judged.items()
        ),
    ]


def exp(x: float) -> float:
    """exp(x), infinite where that overflows, as for the interval of a single round."""
    return math.exp(x) if x < 700 else math.inf


def read(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The inverse of `rows`, of all points. What was compiled cannot be run any more."""
    by_size: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        size = row["model"], row["width"], row["length"], row["batch_size"]
        by_size.setdefault(size, []).append(row)
    points = []
    for (model, width, length, batch_size), own in by_size.items():
        results, judged = {}, {}
        for row in own:
            name = row["candidate"]
            if "judged" in row:
                judged[name] = Judged(**row["judged"])
            else:
                costs = row["lower_seconds"], row["compile_seconds"], row["temp_bytes"]
                results[name] = Result(name, Executable(_gone, *costs), tuple(row["seconds"]))
        points.append(Point(model, width, length, batch_size, results, judged))
    return points


def _gone() -> None:
    raise AssertionError("what was read from results cannot be run")
