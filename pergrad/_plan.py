"""Step 3: a strategy for every (tail, statistic), its cost and the reason, as a table.

Every strategy that can give a statistic is priced (`_price`), and the cheapest is taken. Some feed all
statistics of a tail in one pass, so a statistic that would have another strategy joins them where that
is cheaper: the mean gradient is free then.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pergrad import _cost, _price
from pergrad._compat import JaxprEqn, Var, aval
from pergrad._cut import Cut, Part
from pergrad._price import Backend, Prices
from pergrad._statistics import Accumulator, LeafStatistic
from pergrad._tail import Tail
from pergrad._units import Units, per_of, units_of
from pergrad._whole import ClippedMean, Pairs, Saved, SquaredNorm
from pergrad.strategies import Factored, Gram, Materialise, Sparse, Strategy, Streamed, Summed
from pergrad.terms import Lookup, Total

STRATEGIES: tuple[Strategy, ...] = (
    Summed(),
    Factored(),
    Gram(),
    Sparse(),
    Streamed(),
    Materialise(),
)
FORMING = ("streamed", "materialise")
SHARED = (*FORMING, "sparse")  # one pass feeds all statistics


class Phase(enum.Enum):
    """When a statistic is computed: at once, when all norms are there, when all examples are."""

    FIRST = 1
    CLIPPED = 2
    LAST = 3

    @staticmethod
    def of(statistic: LeafStatistic) -> Phase:
        if isinstance(statistic, ClippedMean):
            return Phase.CLIPPED
        return Phase.LAST if isinstance(statistic, Pairs) else Phase.FIRST


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy for some statistics of a tail, all of the same units and phase, and why."""

    strategy: Strategy
    statistics: tuple[LeafStatistic, ...]
    reason: str
    units: Units

    @property
    def phase(self) -> Phase:
        return Phase.of(self.statistics[0])


@dataclasses.dataclass(frozen=True)
class TailPlan:
    """How a tail is reduced, and whether its factors are handed out."""

    tail: Tail
    choices: tuple[Choice, ...]
    hands_out_factors: bool

    @property
    def keeps_factors(self) -> bool:
        """Whether the factors are kept until all examples are there."""
        return self.hands_out_factors or bool(self.of(Phase.LAST))

    def of(self, phase: Phase) -> list[Choice]:
        return [choice for choice in self.choices if choice.phase is phase]

    def jobs(self, phase: Phase) -> list[tuple[int, LeafStatistic]]:
        """Which gradient (by its place in the tail) feeds which statistic of a phase, each once."""
        places, own = range(len(self.tail.grads)), self.of(phase)
        return list(dict.fromkeys((k, s) for choice in own for k in places for s in choice.statistics))

    def running(self) -> list[tuple[int, LeafStatistic]]:
        """The jobs that are done while the examples run."""
        return self.jobs(Phase.FIRST) + self.jobs(Phase.CLIPPED)


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter's line in the table. Operations and bytes are for the whole batch."""

    path: str
    shape: tuple[int, ...]
    kind: str
    strategy: str
    operations: float
    plain_operations: float
    bytes: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What would run, one row a parameter. Print it to read it as a table.

    `operations` are floating-point operations, `bytes` is temporary memory, both estimated for the
    whole batch; `plain_operations` and `plain_bytes` are those of `jax.grad`. Microbatches are made of
    whole groups of `group_size` examples.
    """

    rows: tuple[Row, ...]
    batch_size: int
    microbatch_size: int
    group_size: int
    backend: str
    operations: float
    plain_operations: float
    bytes: float
    plain_bytes: float
    tails: tuple[TailPlan, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return _as_table(self)


def make_plan(
    cut: Cut,
    wanted: Sequence[Sequence[LeafStatistic]],
    paths: Sequence[str],
    batch_size: int,
    microbatch_size: int | str | None,
    strategy: str,
) -> Plan:
    """Plans a batch of `batch_size` examples, with what is `wanted` of each parameter."""
    device = _price.backend()
    if microbatch_size == "auto":
        microbatch_size = _choose_microbatch_size(cut, wanted, batch_size, device)
    assert not isinstance(microbatch_size, str)
    group_size = math.lcm(*(p for own in wanted for s in own if isinstance(p := per_of(s), int)))
    at_once = min(batch_size, microbatch_size or batch_size)
    at_once = group_size * math.ceil(at_once / group_size)
    tails = tuple(
        TailPlan(
            tail,
            tuple(_choose_all(tail, wanted, at_once, device, strategy)),
            any(isinstance(s, Saved) for param in tail.params for s in wanted[param]),
        )
        for tail in cut.all_tails()
    )
    return _describe(cut, tails, paths, batch_size, at_once, group_size, device)


def _choose_all(
    tail: Tail, wanted: Sequence[Sequence[LeafStatistic]], size: int, device: Backend, forced: str
) -> Iterator[Choice]:
    """Choices for all statistics of a tail; those of the same phase and units share what they can."""
    together: dict[Any, list[LeafStatistic]] = {}
    for statistic in dict.fromkeys(s for param in tail.params for s in wanted[param]):
        if isinstance(statistic, Saved):
            continue
        # Clipped means have weights of their own.
        alone = statistic if isinstance(statistic, ClippedMean) else None
        together.setdefault((Phase.of(statistic), per_of(statistic), alone), []).append(statistic)
    norm: Strategy | None = None
    for (_, per, clipped), statistics in together.items():
        if clipped and size == 1 and forced == "auto" and norm is not None and norm.name in FORMING:
            # The same equations again, which XLA runs once.
            yield Choice(norm, (clipped,), "formed for its norm", Units(tail, 1))
            continue
        for units in units_of(tail, per):
            for choice in _choose(units, statistics, size, device, forced):
                norm = choice.strategy if SquaredNorm() in choice.statistics else norm
                yield choice


def _choose(
    units: Units, statistics: Sequence[LeafStatistic], size: int, device: Backend, forced: str
) -> Iterator[Choice]:
    tail, size = units.tail, max(1, int(units.per_example * size))
    prices = Prices(tail, size, _number_of(Accumulator, statistics), device)
    former = min([prices.streamed(), Materialise()], key=prices.seconds)
    chosen: dict[LeafStatistic, tuple[Strategy, str]] = {}
    for statistic in statistics:
        strategies = [prices.fitted(s) for s in STRATEGIES]
        why_not = {s.name: s.why_not(tail, statistic) for s in strategies}
        able = {s.name: s for s in strategies if why_not[s.name] is None}
        if forced in able:
            strategy, reason = able[forced], "as asked"
        else:
            best = [s for s in able.values() if s.name not in FORMING or s == former]
            if isinstance(statistic, Accumulator) and any(s.name not in FORMING for s in best):
                best = [s for s in best if s.name not in FORMING]
            strategy = min(best or able.values(), key=lambda s: prices.seconds(s, statistic))
            reason = _why(strategy, units, size)
        if forced not in ("auto", *able):
            reason = f"not {forced}: {why_not[forced]}"
        chosen[statistic] = (strategy, reason)

    running = [(s, why) for s, why in chosen.values() if s.name in SHARED]
    if forced == "auto" and running:
        for statistic, (strategy, _) in chosen.items():
            joined, _ = running[0]
            joins = prices.seconds_of_joining() < prices.seconds(strategy, statistic)
            if strategy.name not in SHARED and joined.why_not(tail, statistic) is None and joins:
                chosen[statistic] = running[0]
    for strategy in dict.fromkeys(s for s, _ in chosen.values()):
        own = tuple(statistic for statistic, (s, _) in chosen.items() if s == strategy)
        reason = "; ".join(dict.fromkeys(why for s, why in chosen.values() if s == strategy))
        yield Choice(strategy, own, reason, units)


def _number_of(kind: type[LeafStatistic], statistics: Sequence[LeafStatistic]) -> int:
    return sum(isinstance(statistic, kind) for statistic in statistics)


def _why(strategy: Strategy, units: Units, size: int) -> str:
    """The reason for a choice in a few words."""
    tail = units.tail
    if not tail.terms:
        return "the same for every example"
    term = tail.terms[0]
    match strategy.name:
        case "summed":
            return "one sum over all examples"
        case "gram":
            return "inner products of the factors"
        case "factored":
            return "an outer product for each"
        case "sparse":
            assert isinstance(term, Lookup)
            return f"touches at most {term.contributions} of {term.table} rows"
    if size == 1:
        return "one at a time"
    for term in tail.terms if units.per_example == 1 else ():
        if isinstance(term, Total) and not term.is_sum and term.made_by is not None:
            return term.origin
    if strategy.name == "materialise":
        return "small"
    positions = max(term.contributions for term in tail.terms)
    what = f"sums over {positions} positions" if positions > 1 else "not a mean of factorable phi"
    return what if len(tail.terms) == 1 else f"{what}, {len(tail.terms)} terms"


def _choose_microbatch_size(
    cut: Cut, wanted: Sequence[Sequence[LeafStatistic]], batch_size: int, device: Backend
) -> int:
    """The microbatch size m, a divisor of the batch size B, with the least to pay for its size.

    With a bytes of activations for an example, temporary memory of m a bytes has to be had from the
    operating system and paged in, and B / m times the states of all statistics, p bytes, are read and
    written: m a / fresh rate + (B / m) (2 p / memory rate + loop step). States of tails in loops, q
    bytes, are copied into the loop and out of it: (B / m) 2 q / fresh rate more. On the CPU XLA runs
    convolutions in loops several times slower than outside, so they are not put into one.
    """
    a = _backbone_bytes(cut, 2) - _backbone_bytes(cut, 1)
    in_loops = {param for tail in cut.all_tails() if tail.levels for param in tail.params}
    numbers = [_number_of(Accumulator, own) for own in wanted]
    states = [n * _cost.nbytes(g) for n, g in zip(numbers, cut.program.grads, strict=True)]
    p, q = sum(states), sum(states[param] for param in in_loops)

    def seconds(m: int) -> float:
        step = 2 * p / device.memory_rate + 2 * q / device.fresh_rate + device.loop_step
        return m * a / device.fresh_rate + batch_size / m * step

    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    fitting = [m for m in divisors if m * a <= device.working_set] or [1]
    convolves = any(eqn.primitive in _cost.CONVOLUTIONS for eqn in cut.backbone)
    return max(fitting) if convolves and device.name == "cpu" else min(fitting, key=seconds)


def _backbone_bytes(cut: Cut, size: int) -> float:
    """Temporary memory of `jax.grad` for `size` examples: all but the tails, which make its results."""
    return _part_bytes(cut, cut.program.jaxpr.eqns, size)


def _part_bytes(part: Part, eqns: Sequence[JaxprEqn], size: int) -> float:
    made_by_tails = {
        v
        for tail in part.tails
        for eqn in (*(t.eqn for t in tail.terms if t.eqn), *tail.steps)
        for v in eqn.outvars
    }
    for cut_loop in part.loops.values():
        made_by_tails |= {cut_loop.loop.eqn.outvars[k] for k in cut_loop.taken}

    def nbytes_of(v: Var) -> float:
        return _cost.nbytes(v) * (size if v in part.varies else 1)

    def inside(eqn: JaxprEqn) -> float:
        if (cut_loop := part.loops.get(id(eqn))) is not None:
            return _part_bytes(cut_loop.step, cut_loop.loop.step.jaxpr.eqns, size)
        copies = 1 if part.varies.isdisjoint(eqn.outvars) else size
        return copies * max(map(_cost.peak_bytes_of, _cost.programs(eqn)), default=0)

    return _cost.peak_bytes(eqns, nbytes_of, lambda v: v not in made_by_tails, inside)


def _backbone_operations(part: Part, size: int) -> tuple[float, float]:
    """Of what differs from example to example, for `size` of them, and of what does not."""
    varying = fixed = 0.0
    for eqn in part.backbone:
        if (cut_loop := part.loops.get(id(eqn))) is not None:
            inside = _backbone_operations(cut_loop.step, size)
            varying += cut_loop.loop.length * inside[0]
            fixed += cut_loop.loop.length * inside[1]
        elif part.varies.isdisjoint(eqn.outvars):
            fixed += _cost.operations([eqn])
        else:
            varying += size * _cost.operations([eqn])
    return varying, fixed


def _describe(
    cut: Cut,
    tails: tuple[TailPlan, ...],
    paths: Sequence[str],
    batch_size: int,
    at_once: int,
    group_size: int,
    device: Backend,
) -> Plan:
    steps = math.ceil(batch_size / at_once)
    varying, fixed = _backbone_operations(cut, batch_size)
    shapes = [tuple(aval(grad).shape) for grad in cut.program.grads]
    rows = {row.path: row for t in tails for row in _rows(t, paths, shapes, batch_size, at_once, device)}
    return Plan(
        rows=tuple(rows[path] for path in paths),
        batch_size=batch_size,
        microbatch_size=at_once,
        group_size=group_size,
        backend=device.name,
        operations=varying + steps * fixed + sum(row.operations for row in rows.values()),
        plain_operations=varying + fixed + sum(row.plain_operations for row in rows.values()),
        # The tails run one after the other, so the largest counts. What is kept is so until the end.
        bytes=_backbone_bytes(cut, at_once)
        + max(row.bytes for row in rows.values())
        + sum(_kept_bytes(t, batch_size) for t in tails if steps > 1),
        plain_bytes=_backbone_bytes(cut, batch_size),
        tails=tails,
    )


def _kept_bytes(tail_plan: TailPlan, batch_size: int) -> float:
    factors = tail_plan.tail.factors if tail_plan.keeps_factors else ()
    return batch_size * sum(_cost.nbytes(v) for v in factors)


def _prices_of(choice: Choice, size: int, device: Backend) -> Prices:
    size = max(1, int(choice.units.per_example * size))
    return Prices(choice.units.tail, size, _number_of(Accumulator, choice.statistics), device)


def _rows(
    tail_plan: TailPlan,
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    batch_size: int,
    at_once: int,
    device: Backend,
) -> list[Row]:
    """One row for each parameter of the tail; operations they share are divided among them."""
    tail, choices = tail_plan.tail, tail_plan.choices
    priced = [(c, _prices_of(c, at_once, device)) for c in choices]
    times = math.prod(tail.lengths)
    share = times / len(tail.params)
    operations = sum(own.operations_of(c.strategy, len(c.statistics)) for c, own in priced)
    kind = " + ".join(term.kind for term in tail.terms) or "constant"
    return [
        Row(
            path=paths[param],
            shape=shapes[param],
            kind=f"{times} x {kind}" if tail.levels else kind,
            strategy=", ".join(c.strategy.name for c in choices) or "-",
            operations=share * operations * batch_size / at_once,
            plain_operations=share * Prices(tail, batch_size, 1, device).plain_operations,
            bytes=max((own.temporary(c.strategy) for c, own in priced), default=0),
            reason="; ".join(dict.fromkeys(c.reason for c in choices)),
        )
        for param in tail.params
    ]


def _as_table(plan: Plan) -> str:
    head = ["parameter", "shape", "term", "strategy", "operations", "x plain", "memory", "reason"]
    body = [
        [
            row.path,
            "x".join(map(str, row.shape)) or "scalar",
            row.kind,
            row.strategy,
            _short(row.operations),
            _ratio(row.operations, row.plain_operations),
            _short(row.bytes) + "B",
            row.reason,
        ]
        for row in plan.rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, ["-" * width for width in widths], *body]
    ]
    at_a_time = (
        "all at once" if plan.microbatch_size == plan.batch_size else f"{plan.microbatch_size} at a time"
    )
    lines += [
        "",
        f"{plan.batch_size} examples, {at_a_time}, planned for {plan.backend}",
        f"operations: {_short(plan.operations)}, "
        f"{_ratio(plan.operations, plan.plain_operations)} x jax.grad",
        f"temporary memory: {_short(plan.bytes)}B, {_ratio(plan.bytes, plan.plain_bytes)} x jax.grad "
        "(both estimated)",
    ]
    return "\n".join(lines)


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"


def _ratio(number: float, plain: float) -> str:
    return f"{number / plain:.2f}" if plain else "-"
