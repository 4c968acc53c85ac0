"""What every strategy has."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from pergrad._compat import aval
from pergrad._cut import Examples, Tail
from pergrad._ir import Shard, Weights
from pergrad._statistics import Accumulator, LeafStatistic, State
from pergrad._strategies.work import Work


@dataclasses.dataclass(frozen=True)
class Job:
    """One statistic that is to be computed for one of the tail's parameters.

    `place` is the place of the parameter's gradient among the tail's gradients. `state` is the state of
    an accumulator so far, or None if there is none yet. `direction` is the direction of the call, or
    None if the call has none. `shard` says how devices divide the state of the accumulator; None if each
    has all of it.
    """

    place: int
    statistic: LeafStatistic
    state: State | None = None
    direction: Any = None
    shard: Shard | None = None

    def accumulator_and_state(self, tail: Tail) -> tuple[Accumulator, State]:
        """The statistic, and its state so far. Before the first gradient that is an empty state."""
        assert isinstance(self.statistic, Accumulator)
        return self.statistic, self.statistic.state_or_empty(self.state, aval(tail.grads[self.place]))

    def fed(self, tail: Tail, gs: Any, w: Weights) -> State:
        """The state after all of the gradients `gs` [B, ...] have been taken in."""
        assert isinstance(self.statistic, Accumulator)
        return self.statistic.fed(self.state, gs, w, aval(tail.grads[self.place]))

    def from_quantity(self, value: Any) -> Any:
        """The new state, or the values of all examples, from the statistic's `Quantity`."""
        return self.statistic.from_quantity(self.state, value)

    def shard_of_all(self, made: Any) -> Any:
        """What a device keeps of what it has made of its own examples."""
        if self.shard is None:
            return made
        assert isinstance(self.statistic, Accumulator)
        return self.statistic.shard_of_all(made, self.shard)


@dataclasses.dataclass(frozen=True)
class Strategy(abc.ABC):
    """A way to compute statistics of the gradients that a tail gives for many examples.

    The attributes and methods tell the plan all that it has to know about a strategy.
    `forms_gradients` says whether the strategy forms every example's gradient. `feeds_all` says whether
    one pass over the examples feeds all of the statistics. `takes_number` says whether users may choose
    how many examples the strategy takes at a time, as in `"streamed:8"`.
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
        """For every job the new state of its accumulator, or the values of all examples.

        If devices share the examples, these are the results for this device's examples.
        """

    def reduce_on_devices(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        """As `reduce`, but if devices divide a state, this device's shard of the state of all devices.

        A job whose state is divided has no state so far.
        """
        own = [dataclasses.replace(job, shard=None) for job in jobs]
        made = self.reduce(tail, own, examples)
        return [job.shard_of_all(x) for job, x in zip(jobs, made, strict=True)]

    @abc.abstractmethod
    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        """The price of this statistic, or of all statistics if one pass feeds all of them."""

    @abc.abstractmethod
    def operations(self, work: Work, statistics: Sequence[LeafStatistic]) -> float:
        """The number of floating-point operations for these statistics."""

    @abc.abstractmethod
    def temporary_bytes(self, work: Work) -> float:
        """The bytes of temporary memory that the strategy needs."""

    @abc.abstractmethod
    def reason(self, work: Work) -> str:
        """Why the strategy is chosen, in a few words."""

    def fitted(self, work: Work, at_a_time: int | None) -> Strategy:
        """The variant of the strategy that suits the device.

        If the strategy takes a number, `at_a_time` is that number, or None if users did not choose one.
        """
        return self

    def sums_factors(self, tail: Tail) -> bool:
        """Whether the strategy only sums the factors over examples, after elementwise operations."""
        return False


@dataclasses.dataclass(frozen=True)
class FormingStrategy(Strategy):
    """A strategy that forms every example's gradient, and feeds all statistics with it."""

    forms_gradients = True
    feeds_all = True

    def operations(self, work: Work, statistics: Sequence[LeafStatistic]) -> float:
        # A statistic takes about two operations for every number of a gradient, and its products.
        passes = 2 * work.size * len(statistics) * work.numbers
        products = sum(work.operations_on_formed(statistic) for statistic in statistics)
        return work.forming_operations + passes + products

    def reason(self, work: Work) -> str:
        if not work.tail.terms:
            return "the same for every example"
        if work.size == 1:
            return "one at a time"
        terms = work.tail.terms if work.units.per_example == 1 else ()
        own = (term.why_formed for term in terms if term.why_formed)
        return next(own, self.reason_of_price(work))

    @abc.abstractmethod
    def reason_of_price(self, work: Work) -> str:
        """The reason, if neither the batch nor the program leaves another choice."""
