"""Step 3, first half: a strategy for every (tail, statistic).

Every strategy that can give a statistic is priced (`_price`), and the cheapest is taken. Some feed all
statistics of a tail in one pass, so a statistic that would have another strategy joins them where that
is cheaper: the mean gradient is free then.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pergrad._cut import Lookup, Tail, Total, Units, units_of
from pergrad._ir import Backend
from pergrad._plan.prices import Prices
from pergrad._statistics import (
    Accumulator,
    ClippedMean,
    LeafStatistic,
    Pairs,
    Saved,
    SquaredNorm,
    per_of,
)
from pergrad._strategies import Centred, Factored, Gram, Materialise, Sparse, Strategy, Streamed, Summed

STRATEGIES: tuple[Strategy, ...] = (
    Summed(),
    Factored(),
    Centred(),
    Gram(),
    Sparse(),
    Streamed(),
    Materialise(),
)


FORMING = ("streamed", "materialise")


SHARED = (*FORMING, "sparse")  # one pass feeds all statistics


class Forced(NamedTuple):
    """The strategy that was asked for, or "auto", and how many examples it should take at a time."""

    name: str
    at_a_time: int | None = None


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


def choose(
    tail: Tail, wanted: Sequence[Sequence[LeafStatistic]], size: int, device: Backend, forced: Forced
) -> TailPlan:
    """How a tail is reduced over `size` examples, with what is `wanted` of each parameter."""
    statistics = list(dict.fromkeys(s for param in tail.params for s in wanted[param]))
    others = [s for s in statistics if not isinstance(s, Saved)]
    return TailPlan(
        tail, tuple(_choices(tail, others, size, device, forced)), len(others) < len(statistics)
    )


def _choices(
    tail: Tail, statistics: Sequence[LeafStatistic], size: int, device: Backend, forced: Forced
) -> Iterator[Choice]:
    """Choices for all statistics of a tail; those of the same phase and units share what they can."""
    together: dict[Any, list[LeafStatistic]] = {}
    for statistic in statistics:
        # Clipped means have weights of their own.
        alone = statistic if isinstance(statistic, ClippedMean) else None
        together.setdefault((Phase.of(statistic), per_of(statistic), alone), []).append(statistic)
    # One at a time, what is formed for its norm is there to be clipped.
    reuses = size == 1 and forced.name == "auto" and number_of(ClippedMean, statistics) > 0
    norm: Strategy | None = None
    for (_, per, clipped), own in together.items():
        if clipped and reuses and norm is not None and norm.name in FORMING:
            # The same equations again, which XLA runs once.
            yield Choice(norm, (clipped,), "formed for its norm", Units(tail, 1))
            continue
        for units in units_of(tail, per):
            for choice in _choose_for(units, own, size, device, forced, reuses):
                norm = choice.strategy if SquaredNorm() in choice.statistics else norm
                yield choice


def _choose_for(
    units: Units,
    statistics: Sequence[LeafStatistic],
    size: int,
    device: Backend,
    forced: Forced,
    reuses: bool,
) -> Iterator[Choice]:
    tail, size = units.tail, max(1, int(units.per_example * size))
    prices = Prices(tail, size, number_of(Accumulator, statistics), device)
    strategies = [prices.fitted(s, forced.at_a_time) for s in STRATEGIES]
    former = min((s for s in strategies if s.name in FORMING), key=prices.seconds)

    def price(strategy: Strategy, statistic: LeafStatistic) -> float:
        own = prices.seconds(strategy, statistic)
        if not (reuses and isinstance(statistic, SquaredNorm)):
            return own
        joins = strategy.name in FORMING
        return own + (prices.seconds_of_joining() if joins else prices.seconds(Summed()))

    chosen: dict[LeafStatistic, tuple[Strategy, str]] = {}
    for statistic in statistics:
        why_not = {s.name: s.why_not(tail, statistic) for s in strategies}
        able = {s.name: s for s in strategies if why_not[s.name] is None}
        if forced.name in able:
            strategy, reason = able[forced.name], "as asked"
        else:
            best = [s for s in able.values() if s.name not in FORMING or s == former]
            # A sum over examples is one product, and never dearer; as a convolution it may be.
            others = [s for s in best if s.name not in FORMING]
            if isinstance(statistic, Accumulator) and others and not prices.convolves:
                best = others
            strategy = min(best or able.values(), key=lambda s: price(s, statistic))
            reason = _why(strategy, units, size)
        if forced.name not in ("auto", *able):
            reason = f"not {forced.name}: {why_not[forced.name]}"
        chosen[statistic] = (strategy, reason)

    running = [(s, why) for s, why in chosen.values() if s.name in SHARED]
    if forced.name == "auto" and running:
        for statistic, (strategy, _) in chosen.items():
            joined, _ = running[0]
            joins = prices.seconds_of_joining() < prices.seconds(strategy, statistic)
            if strategy.name not in SHARED and joined.why_not(tail, statistic) is None and joins:
                chosen[statistic] = running[0]
    for strategy in dict.fromkeys(s for s, _ in chosen.values()):
        own = tuple(statistic for statistic, (s, _) in chosen.items() if s == strategy)
        reason = "; ".join(dict.fromkeys(why for s, why in chosen.values() if s == strategy))
        yield Choice(strategy, own, reason, units)


def number_of(kind: type[LeafStatistic], statistics: Sequence[LeafStatistic]) -> int:
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
        case "factored" | "centred":
            return "an outer product for each"
        case "sparse":
            assert isinstance(term, Lookup)
            touched = sum(term.contributions for term in tail.terms)
            return f"touches at most {touched} of {term.table} rows"
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
