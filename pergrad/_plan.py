"""Step 3: a strategy for every (tail, statistic), its cost and the reason, as a table.

Every strategy that can give a statistic is priced (`_price`), and the cheapest is taken. Those that
form gradients do it once for all statistics of a tail, so a statistic that would have its own strategy
joins them where that is cheaper: the mean gradient is free then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pergrad import _compat, _cost, _price
from pergrad._cut import Cut
from pergrad._price import Backend, Prices
from pergrad._statistics import Accumulator, Individual
from pergrad._tail import Tail
from pergrad.strategies import Factored, Materialise, Sparse, Strategy, Streamed, Summed
from pergrad.terms import Lookup, Total

STRATEGIES: tuple[Strategy, ...] = (Summed(), Factored(), Sparse(), Streamed(), Materialise())
FORMING = ("streamed", "materialise")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy for some statistics of a tail, and why."""

    strategy: Strategy
    statistics: tuple[Accumulator, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class TailPlan:
    """How a tail is reduced."""

    tail: Tail
    choices: tuple[Choice, ...]

    def jobs(self) -> list[tuple[int, Accumulator]]:
        """Which gradient (by its place in the tail) feeds which statistic, choice by choice."""
        places = range(len(self.tail.grads))
        return [(k, s) for choice in self.choices for k in places for s in choice.statistics]


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
    whole batch; `plain_operations` and `plain_bytes` are those of `jax.grad`.
    """

    rows: tuple[Row, ...]
    batch_size: int
    microbatch_size: int
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
    statistics: Sequence[Accumulator],
    paths: Sequence[str],
    batch_size: int,
    microbatch_size: int | str | None,
    strategy: str,
) -> Plan:
    """Plans these statistics of a batch of `batch_size` examples."""
    device = _price.backend()
    if microbatch_size == "auto":
        microbatch_size = _choose_microbatch_size(cut, statistics, batch_size, device)
    assert not isinstance(microbatch_size, str)
    at_once = min(batch_size, microbatch_size or batch_size)
    tails = tuple(
        TailPlan(tail, _choose(tail, statistics, at_once, device, strategy)) for tail in cut.tails
    )
    return _describe(cut, tails, paths, batch_size, at_once, device)


def _choose(
    tail: Tail, statistics: Sequence[Accumulator], size: int, device: Backend, forced: str
) -> tuple[Choice, ...]:
    prices = Prices(tail, size, len(statistics), device)
    former = min([prices.streamed(), Materialise()], key=prices.seconds)
    chosen: dict[Accumulator, tuple[Strategy, str]] = {}
    for statistic in statistics:
        why_not = {s.name: s.why_not(tail, statistic) for s in STRATEGIES}
        able = {s.name: s for s in STRATEGIES if why_not[s.name] is None}
        without_forming = [s for name, s in able.items() if name not in FORMING]
        if forced in able:
            strategy = prices.streamed() if forced == "streamed" else able[forced]
            reason = "as asked"
        elif isinstance(statistic, Individual):
            strategy, reason = Materialise(), "asks for the gradients themselves"
        elif without_forming:
            strategy = min(without_forming, key=prices.seconds)
            reason = _why(strategy, tail, size)
        else:
            strategy, reason = former, _why(former, tail, size)
        if forced not in ("auto", *able):
            reason = f"not {forced}: {why_not[forced]}"
        chosen[statistic] = (strategy, reason)

    forming = [s for s, _ in chosen.values() if s.name in FORMING]
    if forced == "auto" and forming:
        for statistic, (strategy, _) in chosen.items():
            if prices.seconds_of_joining() < prices.seconds(strategy) and strategy not in forming:
                chosen[statistic] = next((s, why) for s, why in chosen.values() if s in forming)
    return tuple(
        Choice(
            strategy,
            tuple(statistic for statistic, (s, _) in chosen.items() if s == strategy),
            "; ".join(dict.fromkeys(why for s, why in chosen.values() if s == strategy)),
        )
        for strategy in dict.fromkeys(s for s, _ in chosen.values())
    )


def _why(strategy: Strategy, tail: Tail, size: int) -> str:
    """The reason for a choice in a few words."""
    if not tail.terms:
        return "the same for every example"
    term = tail.terms[0]
    match strategy.name:
        case "summed":
            return "the mean alone: one sum over examples and positions"
        case "factored":
            return "an outer product for each example"
        case "sparse":
            assert isinstance(term, Lookup)
            return f"touches at most {term.contributions} of {term.table} rows"
        case "streamed":
            terms = "" if len(tail.terms) == 1 else f", {len(tail.terms)} terms"
            return f"sums over {max(t.contributions for t in tail.terms)} positions{terms}"
    return _why_materialised(tail, size)


def _why_materialised(tail: Tail, size: int) -> str:
    if size == 1:
        return "one example at a time"
    for term in tail.terms:
        if isinstance(term, Total) and not term.is_sum and term.made_by is not None:
            return f"small; made by {term.made_by.primitive} at {_compat.user_line(term.made_by)}"
    return "small"


def _choose_microbatch_size(
    cut: Cut, statistics: Sequence[Accumulator], batch_size: int, device: Backend
) -> int:
    return batch_size


def _describe(
    cut: Cut,
    tails: tuple[TailPlan, ...],
    paths: Sequence[str],
    batch_size: int,
    at_once: int,
    device: Backend,
) -> Plan:
    steps = math.ceil(batch_size / at_once)
    varying = [eqn for eqn in cut.backbone if not cut.varies.isdisjoint(eqn.outvars)]
    fixed = [eqn for eqn in cut.backbone if cut.varies.isdisjoint(eqn.outvars)]
    backbone = batch_size * _cost.operations(varying) + steps * _cost.operations(fixed)
    rows: list[Row] = [None] * len(paths)  # type: ignore[list-item]
    for tail_plan in tails:
        tail = tail_plan.tail
        n_statistics = sum(len(c.statistics) for c in tail_plan.choices)
        prices = Prices(tail, at_once, n_statistics, device)
        plain = batch_size * prices.operations
        for k, param in enumerate(tail.params):
            share = 1 / len(tail.params)
            size = _cost.size(tail.grads[k])
            operations = sum(
                share * plain * (len(c.statistics) if c.strategy.name == "factored" else 1)
                + batch_size * size * 2 * len(c.statistics) * (c.strategy.name in FORMING)
                for c in tail_plan.choices
            )
            rows[param] = Row(
                path=paths[param],
                shape=tuple(tail.grads[k].aval.shape),
                kind=" + ".join(t.kind for t in tail.terms) or "constant",
                strategy=", ".join(c.strategy.name for c in tail_plan.choices),
                operations=operations,
                plain_operations=share * plain,
                bytes=share * sum(prices.temporary(c.strategy) for c in tail_plan.choices),
                reason="; ".join(c.reason for c in tail_plan.choices),
            )
    plain_bytes = 0.0
    return Plan(
        rows=tuple(rows),
        batch_size=batch_size,
        microbatch_size=at_once,
        backend=device.name,
        operations=backbone + sum(row.operations for row in rows),
        plain_operations=backbone + sum(row.plain_operations for row in rows),
        bytes=plain_bytes + max(row.bytes for row in rows),
        plain_bytes=plain_bytes,
        tails=tails,
    )


def _as_table(plan: Plan) -> str:
    return "\n".join(str(r) for r in plan.rows)
