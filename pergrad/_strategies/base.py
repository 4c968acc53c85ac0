"""What every strategy has."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from pergrad._compat import aval
from pergrad._cut import Examples, Tail
from pergrad._statistics import Accumulator, LeafStatistic, State


@dataclasses.dataclass(frozen=True)
class Job:
    """One statistic to feed with the gradients of one of the tail's parameters.

    `grad` says which. `given` is the state of an accumulator so far, None if there is none yet, or what
    the call gives to another statistic, if anything.
    """

    grad: int
    statistic: LeafStatistic
    given: Any

    def state(self, tail: Tail) -> State:
        """The state of an accumulator so far, which is an empty one before the first gradient."""
        assert isinstance(self.statistic, Accumulator)
        return self.statistic.init(aval(tail.grads[self.grad])) if self.given is None else self.given


@dataclasses.dataclass(frozen=True)
class Strategy(abc.ABC):
    """A way to feed statistics with the gradients that a tail gives for many examples."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @abc.abstractmethod
    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        """Why the strategy cannot give this statistic, or None if it can."""

    @abc.abstractmethod
    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        """For every job the new state of its accumulator, or its values for all examples."""
