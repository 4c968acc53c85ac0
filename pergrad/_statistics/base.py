"""What every statistic says of itself.

What is computed for one parameter on its own is a `LeafStatistic`, of two main kinds:

- An accumulator starts empty (`init`), takes gradients in one at a time (`add`) or many at once
  (`add_all`), and is read out at the end (`finish`). To take in many at once gives what it gives to take
  them in one by one, and two states can be merged.
- A reading is a value for every example (`of`).

Every strategy is written in these words or, where it knows better, computes the same in another way.
A statistic of an example's whole gradient is made of such leaves.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from pergrad._errors import ArgumentError
from pergrad._ir import Devices, Weights

State = Any


Shaped = jax.Array | jax.ShapeDtypeStruct


class Merging(enum.Enum):
    """How results of several batches are merged: added, weighed by the count, centred on the common
    mean, joined along the example axis."""

    ADDED = 1
    WEIGHED = 2
    CENTRED = 3
    JOINED = 4


@dataclasses.dataclass(frozen=True)
class Statistic:
    """Base class of everything that can stand in the tree given to `value_and_stats`."""

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        """What has to be computed for the parameter at `path`; the result is made of the last."""
        return ()

    def of_leaves(self, leaves: Sequence[Any], tree: Callable[[Sequence[Any]], Any]) -> Any:
        """The result, from one for each parameter (None if it has none); `tree` makes one like them."""
        return tree(leaves)

    @property
    def merging(self) -> Merging:
        """How the results of two batches become one."""
        raise ArgumentError(f"{self!r} cannot be combined.")


@dataclasses.dataclass(frozen=True)
class LeafStatistic(Statistic):
    """A statistic that is computed for each parameter on its own, from its gradients alone."""

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (self,)

    @property
    def in_parts(self) -> bool:
        """Whether a gradient may be taken in by its parts, such as the layers of a stack.

        The result is then made of those of the parts, entry by entry or as their sum.
        """
        return False


@dataclasses.dataclass(frozen=True)
class Reading(LeafStatistic, abc.ABC):
    """A value for every example, whatever its weight."""

    @property
    def merging(self) -> Merging:
        return Merging.JOINED

    @abc.abstractmethod
    def of(self, g: jax.Array, given: Any) -> jax.Array:
        """The value of one gradient; `given` is what the call gives to the statistic, if anything."""


@dataclasses.dataclass(frozen=True)
class Accumulator(LeafStatistic, abc.ABC):
    """A statistic of the gradients of all examples together."""

    @property
    def is_sum(self) -> bool:
        """Whether the state is the weighted sum of the gradients and nothing else."""
        return False

    @abc.abstractmethod
    def init(self, like: Shaped) -> State:
        """The state before the first gradient; `like` has a gradient's shape and dtype."""

    @abc.abstractmethod
    def add(self, state: State, g: jax.Array, w: Weights) -> State:
        """Takes in one gradient `g` with its weight `w`, a scalar."""

    @abc.abstractmethod
    def add_all(self, state: State, gs: jax.Array, w: Weights) -> State:
        """Takes in gradients `gs` [B, ...] with their weights `w`, [B] or one for all."""

    @abc.abstractmethod
    def part_of_all(self, state: State, devices: Devices) -> State:
        """This device's part of the state of all `devices`.

        What `finish` makes of the parts adds up to the result; for a `Fold` it is the result on the
        first device. The leaves of a state may have the steps of loops in front.
        """

    @abc.abstractmethod
    def finish(self, state: State, count: jax.Array, like: Shaped) -> Any:
        """The result, from the state and `count`, the sum of all weights."""


Per = int | Literal["example", "token"]


def checked_per(per: Any) -> Per:
    """What one unit is; groups of one are examples."""
    if per in ("example", "token"):
        return per
    if isinstance(per, bool) or not isinstance(per, int) or per < 1:
        raise ArgumentError(
            f"per must be 'example', 'token' or a number of examples of at least 1, not {per!r}."
        )
    return "example" if per == 1 else per


def per_of(statistic: Statistic) -> Per:
    """What one unit is for a statistic; an example, if it has no choice."""
    return getattr(statistic, "per", "example")


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
