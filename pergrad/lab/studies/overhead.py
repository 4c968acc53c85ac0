"""Time and memory against `jax.grad`, as the length T of the sequences varies beside the width D.

For a matrix of D x D, an example has D T activations and D^2 numbers of a gradient. `vmap(grad)` holds
both for all examples, so at a fixed number of tokens B T its gradients take tokens D^2 / T: they are the
larger part only where T is below D. pergrad never holds all gradients.

Candidates take turns (see `timing`), so that a disturbance of the machine meets all of them in the same
round: rounds pair times as seeds pair runs. The rule is fixed here, before any run. Times are compared
by the logarithm of their ratio in every round, at every size, at a level that all sizes of all claims
share (see `decide`). A claim about several sizes is contradicted if one of them contradicts it, and
supported if all of them support it. Memory is what XLA sets aside. It is exact, so there is no interval.

A convolutional network has T positions, too: the 64 pixels of a piece of a photograph. There D varies.
If XLA's compiler for TPUs is installed, the same programs are compiled for one, and not run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pergrad.lab.bench import compilers, price, target, tasks
from pergrad.lab.compare import decide
from pergrad.lab.config import KindName, Train
from pergrad.lab.files import to_json
from pergrad.lab.pages import panels, report
from pergrad.lab.run import images, records, train
from pergrad.lab.studies import _points
from pergrad.lab.studies._points import CNN, LSTM, NAMES, TARGET, TRANSFORMER, Point
from pergrad.lab.studies._study import Lab, Study, StudyResult
from pergrad.lab.timing import silent

PIXELS = images.PIECE**2  # of an example of the CNN
LIMIT = 1.2  # up to so many times `jax.grad` count as little
Size = tuple[str, int, int]  # model, D, T


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is measured: all D with all T / D, at a fixed number of tokens B T.

    The LSTM has `lstm_widths` and `lstm_ratios`, and the CNN `cnn_widths`.
    """

    widths: tuple[int, ...]
    ratios: tuple[float, ...]
    lstm_widths: tuple[int, ...]
    lstm_ratios: tuple[float, ...]
    cnn_widths: tuple[int, ...]
    tokens: int
    layers: int
    rounds: int
    budget: float  # seconds that a candidate may take at one size
    base: Train = dataclasses.field(default_factory=Train)

    @property
    def sizes(self) -> list[Size]:
        """The model, D and T of everything that is measured."""
        lines = [(TRANSFORMER, self.widths, self.ratios), (LSTM, self.lstm_widths, self.lstm_ratios)]
        return [
            *(
                (model, width, round(width * ratio))
                for model, widths, ratios in lines
                for width in widths
                for ratio in ratios
            ),
            *((CNN, width, PIXELS) for width in self.cnn_widths),
        ]


def run(sizes: Preset, lab: Lab) -> StudyResult:
    """Measures every size, in this process alone: others would disturb the times."""
    wanted = sizes.sizes
    points = []
    if is_compiled := compilers.is_installed(TARGET):
        compilers.use(TARGET)
    for done, (model, width, length) in enumerate(wanted, 1):
        points.append(_point(sizes, (model, width, length), is_compiled, lab.runs))
        said = ", ".join(f"{name} {points[-1].time(name).mean:.2f}" for name in NAMES)
        lab.say(f"{done} of {len(wanted)}: {points[-1].where}: {said} x jax.grad")
    machine = price.machine()
    devices = ", ".join(machine["devices"])
    ran = (
        "The mean and the second moment of per-example gradients. The models are a transformer and an "
        f"LSTM with {sizes.layers} layer{'s' * (sizes.layers > 1)}, in batches of {sizes.tokens} bytes "
        f"of text, cut into B sequences of T, and a convolutional network, in batches of as many "
        f"pixels, in pieces of {PIXELS}. The candidates take turns in {sizes.rounds} rounds, each until "
        f"it has used {sizes.budget:g} seconds. On {machine['cores']} cores ({devices}), "
        f"{machine['platform']}. The intervals are about rounds of one process: compiled again, or on "
        "another machine, times may differ by more."
    )
    return StudyResult(
        ran,
        sections(points),
        [row for p in points for row in _points.rows(p)],
    )


def sections(points: Sequence[Point]) -> list[report.Section]:
    return [_times(points), _memory(points), _compiled(points)]


def _config(sizes: Preset, model: str, width: int, length: int) -> Train:
    shape = {"layers": sizes.layers, "width": width}
    base = dataclasses.replace(sizes.base, batch_size=sizes.tokens // length)
    if model == CNN:
        pixels = dataclasses.replace(base.model, **shape)
        return dataclasses.replace(base, domain="images", data="photos", model=pixels)
    kind: KindName = "lstm" if model == LSTM else "transformer"
    sequences = dataclasses.replace(base.model, **shape, kind=kind, context=length)
    return dataclasses.replace(base, model=sequences)


def _point(sizes: Preset, size: Size, is_compiled: bool, runs: Path) -> Point:
    """Measures one size, unless the same program did so on this machine before it was interrupted."""
    measured = {
        "preset": dataclasses.asdict(sizes),
        "versions": records.versions(),
        "machine": price.machine(),
        "is_compiled": is_compiled,
    }
    measured = json.loads(to_json(measured))  # as it is read back
    file = runs / f"overhead-{'-'.join(map(str, size))}.json"
    if file.exists():
        kept = records.read_json(file)
        if kept["measured"] == measured:
            return _points.read(kept["rows"])[0]
    point = _measure(sizes, *size, is_compiled)
    runs.mkdir(parents=True, exist_ok=True)
    records.write_json(file, {"measured": measured, "rows": _points.rows(point)})
    return point


def _measure(sizes: Preset, model: str, width: int, length: int, is_compiled: bool) -> Point:
    config = _config(sizes, model, width, length)
    problem = train.make_problem(config)
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
    results = {result.name: result for result in found.results}
    abstract = jax.eval_shape(lambda *args: args, problem.params, jnp.asarray(problem.batches[0]))
    judged = {}
    for name in (tasks.FLOOR, *NAMES) if is_compiled else ():
        candidate = tasks.make(name, problem.loss, tasks.TASKS["moments"])
        found = target.judge(candidate, abstract, TARGET)
        judged[name] = _points.Judged(found.seconds, found.temp_bytes)
    return Point(model, width, length, config.batch_size, results, judged)


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
    mean, low, high = (f"{limit * _points.exp(x):.2f}" for x in (e.mean, e.low, e.high))
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
            *_points.each(
                points,
                "Time as a multiple of jax.grad",
                "Mean and second moment. The geometric mean over rounds.",
                "time x jax.grad",
                lambda p, name: p.time(name),
            ),
            *_points.each(
                points,
                "Time of one call",
                "Mean and second moment: the fastest round, and the quartiles of the rounds.",
                "ms",
                _points.milliseconds,
                **_points.ABSOLUTE,
            ),
            *_points.each(
                points,
                "Time to trace and compile, as a multiple of jax.grad",
                "Mean and second moment. It was compiled once.",
                "time to compile x jax.grad",
                _points.compiling,
            ),
        ],
        tables=[_points.table(points)],
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
            *_points.each(
                points,
                "Temporary memory as a multiple of jax.grad",
                "Mean and second moment.",
                "memory x jax.grad",
                lambda p, name: _points.exact(p.memory(name)),
            ),
            *_points.each(
                points,
                "Temporary memory",
                "Mean and second moment.",
                "MB",
                _points.megabytes,
                **_points.ABSOLUTE,
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


def _quotient(a: float, b: float) -> str:
    """a / b; "-" if b is 0, as the memory of a program that fits into the chip's registers and cache."""
    return f"{a / b:.2f}" if b else "-"


def _compiled(points: Sequence[Point]) -> report.Section:
    """What programs cost on a TPU, as its compiler says."""
    title = f"Compiled for {TARGET}, not run on it"
    if not any(point.judged for point in points):
        needed = compilers.compiler_of(TARGET)
        return report.Section(
            title,
            f"XLA's compiler for {needed.chips} is not installed. It comes with "
            f"pip install 'pergrad[{needed.extra}]'.",
        )
    rows = []
    for point in points:
        floor = point.judged[tasks.FLOOR]
        own = [point.judged[name] for name in NAMES]
        times = [f"{judged.seconds / floor.seconds:.2f}" for judged in own]
        memories = [_quotient(judged.temp_bytes, floor.temp_bytes) for judged in own]
        rows.append([point.model, str(point.width), str(point.length), *times, *memories])
    quantities = [f"{what}, {name}" for what in ("time x", "memory x") for name in NAMES]
    table = report.Table(title, ["model", "D", "T", *quantities], rows)
    return report.Section(
        title,
        "The time that the compiler estimates, and the temporary memory that it sets aside, as "
        "multiples of jax.grad's. Both are in float32, as on the CPU.",
        figures=[
            panels.of_table(
                table,
                "Time and temporary memory on the TPU, as multiples of jax.grad",
                "Mean and second moment, as the compiler estimates them.",
                names=3,
                alike=True,
            )
        ],
        tables=[table],
    )


DOUBLINGS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)

STUDY = Study(
    title="What statistics cost beside jax.grad",
    question="How much time and memory do the mean and the second moment of per-example gradients take "
    "beside jax.grad, as the number T of positions varies beside the width D, in a transformer, an LSTM "
    "and a convolutional network?",
    claim="Statistics beyond the mean cost little (arXiv 2510.00236). For sequences, vmap(grad) takes "
    "memory for gradients in proportion to B D^2 and for activations to B D T, so with T at least D the "
    "gradients are not the larger part; a transformer with 1.2 billion parameters took about 17% more "
    f"time and no more memory. Little is taken to be {LIMIT} times jax.grad.",
    presets={
        "demo": Preset(
            *((32,), (1 / 4, 1.0, 4.0), (32,), (1.0,), (16,)),
            tokens=1024,
            layers=1,
            rounds=5,
            budget=5.0,
        ),
        "quick": Preset(
            *((64, 128), DOUBLINGS, (64,), DOUBLINGS[1:-1:2], (16, 64, 256)),
            tokens=4096,
            layers=2,
            rounds=8,
            budget=20.0,
        ),
        "full": Preset(
            *((64, 128, 256), DOUBLINGS, (64, 128), DOUBLINGS[:-1], (16, 32, 64, 128, 256)),
            tokens=8192,
            layers=4,
            rounds=20,
            budget=60.0,
        ),
    },
    run=run,
    domains=("text",),  # whose sequences can grow
)
