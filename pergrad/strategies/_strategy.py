"""What every strategy has."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax import lax

from pergrad._compat import aval
from pergrad._statistics import Accumulator, LeafStatistic, State, Weights, total
from pergrad._tail import Tail


@dataclasses.dataclass(frozen=True)
class Examples:
    """What a tail is reduced over: `size` examples.

    Their shares of the whole batch are `weights`, [size] or one for all. The tail's factors are
    [size, ...], its constants are as they are. Inner products of pairs are wanted for those that are
    `here`, the first and how many, with all; None: for all of them.
    """

    size: int
    weights: Weights
    factors: list[jax.Array]
    constants: list[jax.Array]
    here: tuple[Any, int] | None = None

    def those_here(self, x: jax.Array) -> jax.Array:
        """Of an array [size, ...] the part of the examples that are here."""
        return x if self.here is None else lax.dynamic_slice_in_dim(x, *self.here)

    @property
    def along(self) -> tuple[list[jax.Array], jax.Array | None]:
        """What has an axis of examples: the factors, and the weights unless there is one for all."""
        return self.factors, self.weights if isinstance(self.weights, jax.Array) else None

    @property
    def total(self) -> jax.Array | float:
        """The share of these examples of the whole batch; less than 1 for a microbatch."""
        return total(self.weights, self.size)


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
