"""Stage 3, first part: a strategy for every tail and statistic.

Every strategy that can give a statistic is priced, and the cheapest one is chosen. Some strategies feed
all statistics of a tail in one pass. If such a pass runs anyway, a statistic with another strategy joins
it where that is cheaper. The mean gradient, for example, then costs next to nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pergrad._cut import Tail, Units, formed_gradients, units_of
from pergrad._ir import Backend
from pergrad._statistics import LeafStatistic, Phase, Quantity
from pergrad._strategies import STRATEGIES, Materialise, Strategy, Summed, Work

WAITING = (Phase.KEPT, Phase.BY_NORM)  # the phases that begin when norms are known
SMALL = 0.4  # gradients that take so much of the memory of their factors may be kept in their place


class Forced(NamedTuple):
    """The strategy that the caller asked for, and how many examples it shall take at a time.

    `strategy` is None if the cheapest one is to be chosen, and `at_a_time` is None if the caller did not
    say.
    """

    strategy: Strategy | None = None
    at_a_time: int | None = None


class Asked(NamedTuple):
    """What a call asks for, beside its statistics.

    If `drops` is true, examples that are not finite are dropped, and accumulators wait for the norms of
    all parameters. Inner products are taken with so many `directions`.
    """

    forced: Forced
    drops: bool
    directions: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy for some statistics of a tail, which all have the same units.

    `phase` says when they are computed. `reason` says why the strategy was chosen, `work` says how much
    it has to do, and `seconds` is its price, both for the examples that run at a time.
    """

    phase: Phase
    strategy: Strategy
    statistics: tuple[LeafStatistic, ...]
    reason: str
    work: Work
    seconds: float

    @property
    def units(self) -> Units:
        """The units that the statistics are about."""
        return self.work.units


@dataclasses.dataclass(frozen=True)
class TailPlan:
    """How a tail is reduced, and whether `Factors` hands out its factors to the caller."""

    tail: Tail
    choices: tuple[Choice, ...]
    hands_out_factors: bool

    @property
    def keeps_factors(self) -> bool:
        """Whether the factors are kept until all examples have been through the model."""
        return self.hands_out_factors or bool(self.of(Phase.LAST))

    def of(self, phase: Phase) -> list[Choice]:
        """The choices whose statistics are computed in this phase."""
        return [choice for choice in self.choices if choice.phase is phase]

    def statistics(self, *phases: Phase) -> list[LeafStatistic]:
        """The statistics of these phases, each once."""
        own = (choice for phase in phases for choice in self.of(phase))
        return list(dict.fromkeys(s for choice in own for s in choice.statistics))

    @property
    def temporary_bytes(self) -> float:
        """The temporary memory of the tail, for the examples that run at a time."""
        return max((c.strategy.temporary_bytes(c.work) for c in self.choices), default=0)

    @property
    def seconds_of_waiting(self) -> float:
        """The price of the norms and of what waits for them, for the examples that run at a time."""
        norms = (c for c in self.of(Phase.FIRST) if any(map(_is_norm, c.statistics)))
        waiting = (c for c in self.choices if c.phase in WAITING)
        return sum(choice.seconds for choice in (*norms, *waiting))


def choose(
    tail: Tail,
    wanted: Sequence[Sequence[LeafStatistic]],
    size: int,
    device: Backend,
    asked: Asked,
) -> TailPlan:
    """How a tail is reduced over `size` examples. `wanted` has the statistics of every parameter."""
    statistics = list(dict.fromkeys(s for param in tail.params for s in wanted[param]))
    others = [s for s in statistics if s.quantity is not Quantity.FACTORS]
    choices = _choices(tail, others, size, device, asked)
    return TailPlan(tail, choices, len(others) < len(statistics))


def _choices(
    tail: Tail,
    statistics: Sequence[LeafStatistic],
    size: int,
    device: Backend,
    asked: Asked,
) -> tuple[Choice, ...]:
    """The choices for all statistics of a tail.

    Statistics with the same phase, the same units and the same weights may share a pass.
    """
    together: dict[Any, list[LeafStatistic]] = {}
    for statistic in statistics:
        alone = None if statistic.shares_weights else statistic
        waits = asked.drops and statistic.accumulates and statistic.phase is Phase.FIRST
        phase = Phase.KEPT if waits else statistic.phase
        together.setdefault((phase, statistic.unit, alone), []).append(statistic)
    waiting = any(phase in WAITING and unit == "example" for phase, unit, _ in together)
    may_form_once = waiting and asked.forced.strategy is None and _may_be_kept(tail, size, device)
    choices: list[Choice] = []
    for (phase, unit, _), own in together.items():
        accumulators = sum(statistic.accumulates for statistic in own)
        for units in units_of(tail, unit):
            work = Work.of(units, size, accumulators, device, asked.directions)
            choices += _choose_for(phase, work, own, asked.forced, may_form_once)
    return _formed_once(tail, choices) if may_form_once else tuple(choices)


def _may_be_kept(tail: Tail, size: int, device: Backend) -> bool:
    """Whether the gradients of `size` examples may be kept until all norms are known.

    They may if there is one example, or if they take much less memory than their factors, which would be
    kept instead. Convolutions have such gradients. Gradients of half the size are not worth it: their
    factors are activations, which often stay in memory anyway. With them, clipping a transformer with
    256 positions took 6% more time on the CPU and 29% more memory.
    """
    (units,) = units_of(tail, "example")
    work = Work.of(units, size, 1, device)
    return size == 1 or size * work.gradient <= SMALL * work.factors


def _choose_for(
    phase: Phase,
    work: Work,
    statistics: Sequence[LeafStatistic],
    forced: Forced,
    may_form_once: bool,
) -> Iterator[Choice]:
    """The choices for statistics that may share a pass.

    With `may_form_once`, one gradient may serve both the norm and the mean that waits for it
    (`_formed_once`). The price of the norm then includes that of the mean.
    """
    strategies = [s.fitted(work, forced.at_a_time) for s in STRATEGIES]
    asked = next((s for s in strategies if _is_asked_for(s, forced)), None)
    forming = [s for s in strategies if s.forms_gradients]
    former = min(forming, key=lambda s: s.seconds(work, statistics[0]))
    chosen: dict[LeafStatistic, tuple[Strategy, str]] = {}
    for statistic in statistics:
        why_not = {s: s.why_not(work.tail, statistic) for s in strategies}
        if asked is not None and why_not[asked] is None:
            chosen[statistic] = asked, "as asked"
            continue
        able = [s for s in strategies if why_not[s] is None]
        # Of two ways to form gradients only the cheaper one competes with the other strategies.
        competing = [s for s in able if not s.forms_gradients or s == former]
        cheapest = _cheapest(competing or able, work, statistic, may_form_once)
        reason = cheapest.reason(work) if asked is None else f"not {asked.name}: {why_not[asked]}"
        chosen[statistic] = cheapest, reason
    if forced.strategy is None:
        chosen = _joined(chosen, work)

    for strategy in dict.fromkeys(s for s, _ in chosen.values()):
        own = tuple(statistic for statistic, (s, _) in chosen.items() if s == strategy)
        reason = "; ".join(dict.fromkeys(why for s, why in chosen.values() if s == strategy))
        accumulators = sum(statistic.accumulates for statistic in own)
        own_work = dataclasses.replace(work, accumulators=accumulators)
        yield Choice(phase, strategy, own, reason, own_work, strategy.seconds(own_work, own[0]))


def _cheapest(
    able: Sequence[Strategy], work: Work, statistic: LeafStatistic, may_form_once: bool
) -> Strategy:
    """The cheapest of the strategies that are able to give a statistic."""

    def price(strategy: Strategy) -> float:
        own = strategy.seconds(work, statistic)
        if not (may_form_once and _is_norm(statistic)):
            return own
        formed = strategy.forms_gradients
        return own + (
            work.seconds_of_joining(statistic) if formed else Summed().seconds(work, statistic)
        )

    # A sum over examples is one product, which never costs more than forming all gradients first. The
    # only exception is a sum that is a convolution.
    others = [s for s in able if not s.forms_gradients]
    if statistic.accumulates and others and not work.convolves:
        return min(others, key=price)
    return min(able, key=price)


def _joined(
    chosen: dict[LeafStatistic, tuple[Strategy, str]], work: Work
) -> dict[LeafStatistic, tuple[Strategy, str]]:
    """The choices, where a statistic joins a pass that runs for others anyway if that is cheaper."""
    passes = [pair for pair in chosen.values() if pair[0].feeds_all]
    if not passes:
        return chosen
    joined, _ = passes[0]

    def joins(strategy: Strategy, statistic: LeafStatistic) -> bool:
        is_cheaper = work.seconds_of_joining(statistic) < strategy.seconds(work, statistic)
        is_able = joined.why_not(work.tail, statistic) is None
        return not strategy.feeds_all and is_able and is_cheaper

    return {s: passes[0] if joins(own[0], s) else own for s, own in chosen.items()}


def _is_asked_for(strategy: Strategy, forced: Forced) -> bool:
    return type(strategy) is type(forced.strategy)


def _is_norm(statistic: LeafStatistic) -> bool:
    return statistic.quantity is Quantity.SQUARED_NORMS and statistic.unit == "example"


def _formed_once(tail: Tail, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices, changed so that norms and what waits for them share the gradients that are formed.

    The gradients formed for the norm are reused. If none are formed for the norm, nothing changes.
    """
    norms = [c for c in choices if c.strategy.forms_gradients and any(map(_is_norm, c.statistics))]
    if not norms:
        return tuple(choices)
    units = formed_gradients(tail)

    def from_formed(choice: Choice) -> Choice:
        work = dataclasses.replace(choice.work, units=units)
        if choice.phase is Phase.FIRST:
            return dataclasses.replace(choice, strategy=Materialise(), work=work)
        return Choice(
            phase=choice.phase,
            strategy=Materialise(),
            statistics=choice.statistics,
            reason="formed for its norm",
            work=work,
            seconds=choice.work.seconds_of_joining(choice.statistics[0]),
        )

    waits = [c.phase in WAITING and c.units.tail is tail for c in choices]
    uses_formed = [c in norms or own for c, own in zip(choices, waits, strict=True)]
    pairs = zip(choices, uses_formed, strict=True)
    return tuple(from_formed(choice) if uses else choice for choice, uses in pairs)
