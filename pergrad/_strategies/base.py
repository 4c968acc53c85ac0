"""What every strategy has."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from pergrad._compat import aval
from pergrad._cut import Examples, Tail
from pergrad._ir import Weights
from pergrad._statistics import Accumulator, LeafStatistic, State
from pergrad._strategies.work import Work


@dataclasses.dataclass(frozen=True)
class Job:
    """One statistic to feed with the gradients of one of the tail's parameters.

    `place` says which of the tail's gradients. `state` is that of an accumulator so far, or None if
    there is none yet. `direction` is there for the statistics that take one.
    """

    place: int
    statistic: LeafStatistic
    state: State | None = None
    direction: Any = None

    def accumulator_and_state(self, tail: Tail) -> tuple[Accumulator, State]:
        """The statistic, and its state so far, which is an empty one before the first gradient."""
        assert isinstance(self.statistic, Accumulator)
        return self.statistic, self.statistic.state_or_empty(self.state, aval(tail.grads[self.place]))

    def fed(self, tail: Tail, gs: Any, w: Weights) -> State:
        """The state after all of the gradients `gs` [B, ...] have been taken in."""
        assert isinstance(self.statistic, Accumulator)
        return self.statistic.fed(self.state, gs, w, aval(tail.grads[self.place]))

    def from_quantity(self, value: Any) -> Any:
        """The new state, or the values of all examples, from what the statistic is made of."""
        return self.statistic.from_quantity(self.state, value)


@dataclasses.dataclass(frozen=True)
class Strategy(abc.ABC):
    """A way to feed statistics with the gradients that a tail gives for many examples.

    A strategy says all that the plan has to know of it. `forms_gradients`: every example's gradient is
    formed. `feeds_all`: one pass feeds all statistics that take part. `takes_number`: users may say how
    many examples it takes at a time, as in `"streamed:8"`.
    """

    name: ClassVar[str]
    forms_gradients: ClassVar[bool] = False
    feeds_all: ClassVar[bool] = False
    takes_number: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @abc.abstractmethod
    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        """Why the strategy cannot give this statistic, or None if it can."""

    @abc.abstractmethod
    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        """For every job the new state of its accumulator, or its values for all examples."""

    @abc.abstractmethod
    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        """The price: for this statistic or, where one pass feeds all, for all of them."""

    @abc.abstractmethod
    def operations(self, work: Work, statistics: int) -> float:
        """Floating-point operations for so many statistics."""

    @abc.abstractmethod
    def temporary_bytes(self, work: Work) -> float:
        """Bytes of temporary memory."""

    @abc.abstractmethod
    def reason(self, work: Work) -> str:
        """Why the strategy is taken, in a few words."""

    def fitted(self, work: Work, at_a_time: int | None) -> Strategy:
        """The strategy as the device likes it; with `at_a_time` examples at a time, if it can."""
        return self

    def sums_factors(self, tail: Tail) -> bool:
        """Whether all it does with the factors is to sum them up, after something elementwise."""
        return False


def reason_to_form(work: Work, otherwise: str) -> str:
    """Why gradients are formed: because of the batch, because of the program, or `otherwise`."""
    if work.size == 1:
        return "one at a time"
    terms = work.tail.terms if work.units.per_example == 1 else ()
    return next((term.why_formed for term in terms if term.why_formed), otherwise)
