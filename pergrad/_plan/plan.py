"""Step 3, second half: the plan, with what it costs and why.

`_choose` picks the strategies. Here the microbatch size is chosen, and for those who ask to see the plan
everything is added up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._cut import Cut, Part, Tail
from pergrad._ir import Backend, Loop, backend, counts
from pergrad._plan import table
from pergrad._plan.choose import FORMING, Choice, Forced, Phase, TailPlan, choose, number_of
from pergrad._plan.cotangent import start_from_weight
from pergrad._plan.prices import Prices
from pergrad._plan.table import Row, ratio, short
from pergrad._statistics import Accumulator, ClippedMean, LeafStatistic, SquaredNorm, per_of

ABOUT_AS_GOOD = 1.25  # one price divided by another


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What runs: how many examples at once, in whole groups of `group_size`, and how each tail does.

    `paths` are the names of the parameters.
    `weighed` are the variables that carry the weight of an example, where all have the same: then the
    backward pass starts from it.
    """

    batch_size: int
    microbatch_size: int
    group_size: int
    paths: tuple[str, ...] = dataclasses.field(repr=False)
    tails: tuple[TailPlan, ...] = dataclasses.field(repr=False)
    weighed: frozenset[Var] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Plan(Schedule):
    """What would run, one row a parameter. Print it to read it as a table; notebooks show one, too.

    `rows` has for every parameter its `path`, `shape`, `kind` of sum, `strategy`, `operations`,
    `plain_operations`, `bytes` and the `reason` for the strategy. `operations` are floating-point
    operations and `bytes` is temporary memory, both estimated for the whole batch; `plain_operations`
    and `plain_bytes` are those of `jax.grad`. Microbatches are made of whole groups of `group_size`
    examples. If several `devices` share the batch, all numbers are those of one device, which has
    `batch_size` examples.
    """

    rows: tuple[Row, ...]
    backend: str
    operations: float
    plain_operations: float
    bytes: float
    plain_bytes: float
    devices: int

    def __str__(self) -> str:
        return table.as_text(self.rows, self._totals())

    def _repr_html_(self) -> str:
        return table.as_html(self.rows, self._totals())

    def _totals(self) -> list[str]:
        """What stands below the table."""
        is_whole = self.microbatch_size == self.batch_size
        at_a_time = "all at once" if is_whole else f"{self.microbatch_size} at a time"
        each = f" on each of {self.devices} devices" if self.devices > 1 else ""
        operations = ratio(self.operations, self.plain_operations)
        return [
            f"{self.batch_size} examples{each}, {at_a_time}, planned for {self.backend}",
            f"operations: {short(self.operations)}, {operations} x jax.grad",
            f"temporary memory: {short(self.bytes)}B, {ratio(self.bytes, self.plain_bytes)} x jax.grad "
            "(both estimated)",
        ]


def make_schedule(
    cut: Cut,
    paths: Sequence[str],
    wanted: Sequence[Sequence[LeafStatistic]],
    batch_size: int,
    microbatch_size: int | str | None,
    forced: Forced,
) -> Schedule:
    """Plans a batch of `batch_size` examples, with what is `wanted` of each parameter."""
    device = backend.backend()
    if microbatch_size == "auto":
        microbatch_size = _choose_microbatch_size(cut, wanted, batch_size, device)
    assert not isinstance(microbatch_size, str)
    group_size = math.lcm(*(p for own in wanted for s in own if isinstance(p := per_of(s), int)))
    at_once = min(batch_size, microbatch_size or batch_size)
    at_once = group_size * math.ceil(at_once / group_size)
    tails = [choose(tail, wanted, at_once, device, forced) for tail in cut.all_tails()]
    started = start_from_weight(cut.program, tails)
    return Schedule(batch_size, at_once, group_size, tuple(paths), *started)


def _choose_microbatch_size(
    cut: Cut, wanted: Sequence[Sequence[LeafStatistic]], batch_size: int, device: Backend
) -> int:
    """The microbatch size m, a divisor of the batch size B, with the least to pay for its size.

    With a bytes of activations for an example, temporary memory of m a bytes has to be had from the
    operating system and paged in, unless it is little; and B / m times the parameters and the states of
    all statistics, p bytes together, come from memory, and each of n equations is started:
    m a / fresh rate + (B / m) (p / memory rate + n equations + loop step). States of tails in loops, q
    bytes, are copied into the loop and out of it: (B / m) 2 q / fresh rate more. Clipped means have
    another price with m = 1, where the gradient that is clipped is there to be looked at for its norm.
    If one at a time is about as good, it is taken: it needs the least memory, and that XLA then has no
    axis of examples to move about (see `_squeeze`) is not in the price; where the model itself is a loop
    that has not been seen to matter. On the CPU XLA runs convolutions in loops several times slower than
    outside, so they are not put into one.
    """
    a = _backbone_bytes(cut, 2) - _backbone_bytes(cut, 1)
    in_loops = {param for tail in cut.all_tails() if tail.levels for param in tail.params}
    numbers = [number_of(Accumulator, own) for own in wanted]
    states = [n * counts.nbytes(g) for n, g in zip(numbers, cut.program.grads, strict=True)]
    q = sum(states[param] for param in in_loops)
    p = sum(states) + sum(counts.nbytes(v) for v in cut.program.params)

    clips = any(isinstance(s, ClippedMean) for own in wanted for s in own)

    def clipping(m: int) -> float:
        return sum(_seconds_of_clipping(t, wanted, batch_size, m, device) for t in cut.all_tails())

    one_by_one, together = (clipping(1), clipping(batch_size)) if clips else (0.0, 0.0)

    step = p / device.memory_rate + 2 * q / device.fresh_rate + device.loop_step
    step += counts.equations(cut.backbone) * device.equation

    def seconds(m: int) -> float:
        paging = m * a / device.fresh_rate if m * a > device.kept_size else 0
        return paging + batch_size / m * step + (one_by_one if m == 1 else together)

    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    fitting = [m for m in divisors if m * a <= device.working_set] or [1]
    if device.name == "cpu" and any(eqn.primitive in counts.CONVOLUTIONS for eqn in cut.backbone):
        return max(fitting)
    best = min(fitting, key=seconds)
    has_loop = any(Loop.of(eqn) is not None for eqn in cut.backbone)
    return 1 if not has_loop and seconds(1) <= ABOUT_AS_GOOD * seconds(best) else best


def _seconds_of_clipping(
    tail: Tail, wanted: Sequence[Sequence[LeafStatistic]], size: int, at_once: int, device: Backend
) -> float:
    """Of the norms and the clipped means of `size` examples, if `at_once` go through the model."""
    seconds = 0.0
    for choice in choose(tail, wanted, at_once, device, Forced("auto")).choices:
        prices = _prices_of(choice, at_once, device)
        if _is_formed_already(choice, at_once):
            seconds += prices.seconds_of_joining()
        elif choice.phase is Phase.CLIPPED or SquaredNorm() in choice.statistics:
            seconds += prices.seconds(choice.strategy, choice.statistics[0])
    return seconds * size / at_once


def _is_formed_already(choice: Choice, at_once: int) -> bool:
    """Whether what is clipped is there, because it was formed for its norm."""
    return choice.phase is Phase.CLIPPED and at_once == 1 and choice.strategy.name in FORMING


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
        return counts.nbytes(v) * (size if v in part.varies else 1)

    def inside(eqn: JaxprEqn) -> float:
        if (cut_loop := part.loops.get(id(eqn))) is not None:
            return _part_bytes(cut_loop.step, cut_loop.loop.step.jaxpr.eqns, size)
        copies = 1 if part.varies.isdisjoint(eqn.outvars) else size
        return copies * max(map(counts.peak_bytes_of, counts.programs(eqn)), default=0)

    return counts.peak_bytes(eqns, nbytes_of, lambda v: v not in made_by_tails, inside)


def _backbone_operations(part: Part, size: int) -> tuple[float, float]:
    """Of what differs from example to example, for `size` of them, and of what does not."""
    varying = fixed = 0.0
    for eqn in part.backbone:
        if (cut_loop := part.loops.get(id(eqn))) is not None:
            inside = _backbone_operations(cut_loop.step, size)
            varying += cut_loop.loop.length * inside[0]
            fixed += cut_loop.loop.length * inside[1]
        elif part.varies.isdisjoint(eqn.outvars):
            fixed += counts.operations([eqn])
        else:
            varying += size * counts.operations([eqn])
    return varying, fixed


def describe(schedule: Schedule, cut: Cut, devices: int) -> Plan:
    """The schedule with what it costs."""
    device, paths = backend.backend(), schedule.paths
    batch_size, at_once, tails = schedule.batch_size, schedule.microbatch_size, schedule.tails
    steps = math.ceil(batch_size / at_once)
    varying, fixed = _backbone_operations(cut, batch_size)
    shapes = [tuple(aval(grad).shape) for grad in cut.program.grads]
    rows = {row.path: row for t in tails for row in _rows(t, paths, shapes, batch_size, at_once, device)}
    return Plan(
        batch_size=batch_size,
        microbatch_size=at_once,
        group_size=schedule.group_size,
        paths=paths,
        tails=tails,
        weighed=schedule.weighed,
        rows=tuple(rows[path] for path in paths),
        backend=device.name,
        operations=varying + steps * fixed + sum(row.operations for row in rows.values()),
        plain_operations=varying + fixed + sum(row.plain_operations for row in rows.values()),
        # The tails run one after the other, so the largest counts. What is kept is so until the end.
        bytes=_backbone_bytes(cut, at_once)
        + max(row.bytes for row in rows.values())
        + sum(_kept_bytes(t, batch_size) for t in tails if steps > 1),
        plain_bytes=_backbone_bytes(cut, batch_size),
        devices=devices,
    )


def _kept_bytes(tail_plan: TailPlan, batch_size: int) -> float:
    factors = tail_plan.tail.factors if tail_plan.keeps_factors else ()
    return batch_size * sum(counts.nbytes(v) for v in factors)


def _prices_of(choice: Choice, size: int, device: Backend) -> Prices:
    size = max(1, int(choice.units.per_example * size))
    return Prices(choice.units.tail, size, number_of(Accumulator, choice.statistics), device)


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
    operations -= sum(own.forming_operations for c, own in priced if _is_formed_already(c, at_once))
    kind = " + ".join(term.kind for term in tail.terms) or "constant"
    return [
        Row(
            path=paths[param],
            shape=shapes[param],
            kind=f"{times} x {kind}" if tail.levels else kind,
            strategy=", ".join(map(str, (c.strategy for c in choices))) or "-",
            operations=share * operations * batch_size / at_once,
            plain_operations=share * Prices(tail, batch_size, 1, device).plain_operations,
            bytes=max((own.temporary(c.strategy) for c, own in priced), default=0),
            reason="; ".join(dict.fromkeys(c.reason for c in choices)),
        )
        for param in tail.params
    ]
