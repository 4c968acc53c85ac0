"""What every statistic says about itself.

A statistic that is computed for each parameter on its own is a `LeafStatistic`. It has two main kinds:

- An accumulator starts from an empty state (`init`), takes in gradients one at a time (`add`) or many at
  once (`add_all`), and turns its final state into the result (`finish`). Many gradients taken in at once
  give the same state as the same gradients taken in one by one.
- A reading has a value for every example (`of`).

A statistic of an example's whole gradient is made of such leaves.

Strategies, plan and run know these kinds, but no single statistic. They ask the statistic when it is
computed (`phase`), what its units are (`unit`), which quantity can take the place of the gradients
themselves (`quantity`), which axes its result has (`layout`), and how the parts of several devices and
the results of several batches become one (`part_of_all`, `shard_of_all`, `merging`).
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from pergrad._errors import ArgumentError
from pergrad._ir import Devices, Shard, Weights, added

State = Any
Shaped = jax.Array | jax.ShapeDtypeStruct
Per = int | Literal["example", "token"]
# What a unit can be: beside those that users name, all contributions of one position together.
Unit = Per | Literal["position"]


class Phase(enum.Enum):
    """When a statistic is computed."""

    FIRST = "as soon as the factors of a tail are computed"
    KEPT = "after it is known which examples are finite, if others are dropped"
    BY_NORM = "after the norms of all gradients have been computed"
    LAST = "after all examples have been through the model"


class Quantity(enum.Enum):
    """The quantity that a statistic is computed from.

    A strategy that can give this quantity need not form the gradients. The examples have the weights
    w_i, and a parameter has the gradients g_i.
    """

    SUM = "the sum of w_i phi(g_i) for an elementwise phi"
    CENTRED = "the sum of w_i, the mean of g_i, and the sum of w_i (g_i - mean)^2"
    SQUARED_NORMS = "||g_i||^2 for every example"
    PROJECTIONS = "<g_i, v> for every example and a direction v, or several directions"
    SKETCHES = "S g_i for every example and a fixed random matrix S"
    PAIRS = "<g_i, g_j> for all pairs of examples"
    GRADIENTS = "the gradients themselves"
    FACTORS = "the factors that the gradients are made of"


class Layout(enum.Enum):
    """Which axes the result of a statistic has."""

    LIKE_PARAMETERS = "the axes of the parameters, in a tree like the parameters"
    PER_EXAMPLE = "the example axis in front"
    PER_EXAMPLE_LIKE_PARAMETERS = "the example axis in front, followed by the axes of the parameters"
    NUMBER = "no axes"


class Merging(enum.Enum):
    """How the results of several batches become one."""

    ADDED = "the results are added"
    WEIGHED = "the results are means, which are weighed by the counts of the batches"
    CENTRED = "the results are variances, which are centred on the common mean"
    JOINED = "the results are joined along the example axis"


class Seen(Protocol):
    """What a call knows of its examples at the end. Every statistic makes its result from this."""

    losses: jax.Array
    count: jax.Array
    paths: Sequence[str]

    def leaves_of(self, statistic: Statistic) -> list[Any]:
        """For each parameter the result of the statistic's last leaf, or None if there is no leaf."""
        ...

    def like_params(self, leaves: Sequence[Any]) -> Any:
        """A tree like the parameters, with the given leaves."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the final state or the values of a leaf statistic come from.

    `like` has the shape and dtype of the parameter's gradient, and `units` is the number of units,
    counted with their weights. `loops` is the number of loops that the tail of the gradient stands in. A
    state has the lengths of these loops in front, and `outward` moves its entries to their places in the
    parameter.
    """

    like: Shaped
    units: jax.Array
    loops: int
    outward: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Statistic:
    """Base class of everything that can stand in the tree given to `value_and_stats`."""

    @property
    def unit(self) -> Unit:
        """What one unit is: an example, a group of examples, or a part of a sum over positions."""
        return "example"

    def together(self, path: str) -> str:
        """A name that is equal for parameters whose values are added up position by position.

        It matters only if the unit is a position.
        """
        return "all"

    @property
    def layout(self) -> Layout:
        """Which axes the result has."""
        return Layout.PER_EXAMPLE

    @property
    def takes_direction(self) -> bool:
        """Whether the caller must pass a direction."""
        return False

    @property
    def takes_max_norm(self) -> bool:
        """Whether the caller must pass a `max_norm`."""
        return False

    @property
    def merging(self) -> Merging:
        """How the results of several batches become one."""
        raise ArgumentError(f"{self!r} cannot be combined.")

    def selects(self, path: str) -> bool:
        """Whether the statistic uses the parameter at `path`."""
        return True

    def check_count(self, count: float) -> None:
        """Raises an error if this statistic does not exist for a batch of `count` examples."""

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        """The leaf statistics of the parameter at `path`. The result is made from the last of them."""
        return ()

    def of_leaves(self, leaves: Sequence[Any], tree: Callable[[Sequence[Any]], Any]) -> Any:
        """The result of the statistic.

        `leaves` has the result of each parameter, or None for a parameter without a leaf. `tree` makes
        a tree like the parameters from such a list.
        """
        return tree(leaves)

    def result(self, seen: Seen) -> Any:
        """The result of the statistic, from all that a call knows of its examples."""
        return self.of_leaves(seen.leaves_of(self), seen.like_params)


@dataclasses.dataclass(frozen=True)
class LeafStatistic(Statistic):
    """A statistic that is computed for each parameter on its own, from that parameter's gradients."""

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (self,)

    @property
    def phase(self) -> Phase:
        """When the statistic is computed."""
        return Phase.FIRST

    @property
    def quantity(self) -> Quantity:
        """The quantity that the statistic is computed from."""
        return Quantity.GRADIENTS

    @property
    def is_sum(self) -> bool:
        """Whether the statistic is the weighted sum of the gradients and nothing else."""
        return False

    @property
    def accumulates(self) -> bool:
        """Whether the statistic has a state that takes in one example after the other."""
        return False

    @property
    def in_parts(self) -> bool:
        """Whether the statistic can take in a gradient by its parts, such as the layers of a stack.

        The results of the parts then make up the result, either entry by entry or as a sum.
        """
        return False

    @property
    def shares_weights(self) -> bool:
        """Whether the examples have the same weights in this statistic as in all others."""
        return True

    def towards(self, path: str, like: Shaped, direction: Any) -> Any:
        """What the statistic needs beside the gradients of the parameter at `path`, or None.

        It is made once for a call. `like` has the shape and dtype of the gradient. `direction` is the
        direction of the call, or None if the call has none.
        """
        return direction if self.takes_direction else None

    def operations(self, like: Shaped, examples: int, directions: int) -> float:
        """The operations of the products that the statistic makes with one gradient shaped like `like`.

        Passes over the entries do not count. `examples` is the number of examples at a time, and
        `directions` the number of directions of the call.
        """
        return 0

    def from_quantity(self, state: State | None, value: Any) -> Any:
        """The new state, or the values of all examples, from the quantity `value`.

        `state` is the state so far, or None if there is none yet.
        """
        return value

    def read_out(self, value: Any, source: Source) -> Any:
        """The result for a parameter, from the final state or from the values of all examples."""
        return value


@dataclasses.dataclass(frozen=True)
class Reading(LeafStatistic, abc.ABC):
    """A statistic with a value for every example, which does not depend on the example's weight."""

    @property
    def merging(self) -> Merging:
        return Merging.JOINED

    @abc.abstractmethod
    def of(self, g: jax.Array, direction: Any) -> jax.Array:
        """The value of one gradient. `direction` is what `towards` returned for the parameter."""

    def read_out(self, value: Any, source: Source) -> Any:
        # Each round of the loops around a tail has a part of the gradient, and the parts' values add up.
        return jnp.sum(value, axis=range(1, 1 + source.loops)) if source.loops else value


@dataclasses.dataclass(frozen=True)
class Accumulator(LeafStatistic, abc.ABC):
    """A statistic of the gradients of all examples together."""

    @property
    def accumulates(self) -> bool:
        return True

    @property
    def layout(self) -> Layout:
        return Layout.LIKE_PARAMETERS

    @abc.abstractmethod
    def init(self, like: Shaped) -> State:
        """The state before the first gradient. `like` has the shape and dtype of a gradient."""

    @abc.abstractmethod
    def add(self, state: State, g: jax.Array, w: Weights) -> State:
        """The state after one more gradient `g`, whose weight is the scalar `w`."""

    @abc.abstractmethod
    def add_all(self, state: State, gs: jax.Array, w: Weights) -> State:
        """The state after the gradients `gs` [B, ...]. Their weights `w` are [B], or one for all."""

    @property
    def holds(self) -> Accumulator | None:
        """Another accumulator of the same gradients, whose state can be read off this one's."""
        return None

    def held(self, state: State) -> State:
        """The state of the accumulator that this one holds, from its own state.

        `state` is a shard of the state of all devices, or what `part_of_all` returned. Of the latter all
        devices read the same, which is the state of all of them.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def part_of_all(self, state: State, devices: Devices) -> State:
        """This device's part of the state of all `devices`.

        The results that `finish` makes from the parts of all devices add up to the result for the whole
        batch. The leaves of a state may have the lengths of loops in front.
        """

    @property
    def can_be_divided(self) -> bool:
        """Whether devices can divide the state among them as they divide the parameter.

        Each entry of the parameter must have entries of its own in the state.
        """
        return False

    def shard_of_all(self, state: State, shard: Shard) -> State:
        """This device's shard of the state of all devices, if the state can be divided.

        `state` is that of this device's examples, for the whole parameter, which the devices divide as
        `shard` says. `from_quantity` merges the shards of several batches.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def finish(self, state: State, count: jax.Array, like: Shaped) -> Any:
        """The result, from the final state and `count`, the sum of all weights."""

    def state_or_empty(self, state: State | None, like: Shaped) -> State:
        """The state, or an empty state if `state` is None."""
        return self.init(like) if state is None else state

    def fed(self, state: State | None, gs: jax.Array, w: Weights, like: Shaped) -> State:
        """The same as `add_all`, but `state` may be None."""
        return self.add_all(self.state_or_empty(state, like), gs, w)

    def reweighed(self, state: State, factor: jax.Array) -> State:
        """The state that it would be if all weights had been multiplied by `factor`."""
        raise ArgumentError(
            f"{self!r} cannot be used with nonfinite='drop': how its state depends on the weights is "
            f"not known. Define `reweighed` in {type(self).__name__}."
        )

    def weights(self, w: jax.Array, squared_norms: jax.Array, max_norm: Any) -> jax.Array:
        """The examples' weights [B] in this statistic, from their weights `w` in all others.

        `squared_norms` [B] are those of the gradients over all parameters whose `norm_at` is the same.
        `max_norm` is that of the call for these parameters, or None if the call has none.
        """
        return w

    def norm_at(self, path: str) -> str | None:
        """The name of the norm that decides the weights at the parameter at `path`; None if none does.

        Parameters with the same name have one norm in common.
        """
        return None

    def as_part(self, result: Any, devices: Devices) -> Any:
        """This device's part of the result, from what `finish` made of its part of the state."""
        return result

    def read_out(self, value: Any, source: Source) -> Any:
        result = self.finish(value, source.units, source.like)
        return source.outward(result) if source.loops else result


def holders(statistics: Collection[LeafStatistic]) -> dict[Accumulator, Accumulator]:
    """Which of these accumulators another one of them holds, and which one that is."""
    accumulators = [statistic for statistic in statistics if isinstance(statistic, Accumulator)]
    found = {by.holds: by for by in accumulators if by.holds is not None}
    return {held: by for held, by in found.items() if held in accumulators}


@dataclasses.dataclass(frozen=True)
class WeightedSum(Accumulator, abc.ABC):
    """An accumulator whose state is the sum of w_i phi(g_i) for an elementwise function phi."""

    @property
    def quantity(self) -> Quantity:
        return Quantity.SUM

    @property
    @abc.abstractmethod
    def is_factorable(self) -> bool:
        """Whether phi(a b) = phi(a) phi(b) for all numbers."""

    @property
    @abc.abstractmethod
    def degree(self) -> float | None:
        """The p for which |phi(g)| = |g| ** p, or None if it is not known."""

    @abc.abstractmethod
    def apply(self, g: jax.Array) -> jax.Array:
        """phi(g) in the dtype that sums are kept in."""

    def fed(self, state: State | None, gs: jax.Array, w: Weights, like: Shaped) -> State:
        # Without a state nothing is added, so that JAX need not trace an addition of 0.
        return self.add_all(state, gs, w)

    def from_quantity(self, state: State | None, value: Any) -> Any:
        return added(state, value)

    def reweighed(self, state: State, factor: jax.Array) -> State:
        return state * factor.astype(state.dtype)

    @property
    def can_be_divided(self) -> bool:
        return True

    def shard_of_all(self, state: State, shard: Shard) -> State:
        return shard.add(state)


@dataclasses.dataclass(frozen=True)
class Compressing(Reading, abc.ABC):
    """A reading of a gradient that is compressed from two sides by matrices of signs."""

    @property
    def quantity(self) -> Quantity:
        return Quantity.SKETCHES

    @abc.abstractmethod
    def layout_of(self, shape: Sequence[int]) -> Any:
        """How a gradient of this shape is read as a matrix (a `SketchLayout`)."""


@dataclasses.dataclass(frozen=True)
class OfAllGradients(LeafStatistic, abc.ABC):
    """A statistic that needs the gradients of all examples side by side."""

    @property
    def phase(self) -> Phase:
        return Phase.LAST

    @abc.abstractmethod
    def of_all(self, own: jax.Array, gs: jax.Array) -> jax.Array:
        """The values [A, B] of the gradients `own` [A, ...] with the gradients `gs` [B, ...]."""


def checked_per(per: Any) -> Per:
    """The option `per`, checked. A group of one example is an example."""
    if per in ("example", "token"):
        return per
    if isinstance(per, bool) or not isinstance(per, int) or per < 1:
        raise ArgumentError(
            f"per must be 'example', 'token' or a number of examples of at least 1, not {per!r}."
        )
    return "example" if per == 1 else per


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or its `repr` if it has no name."""
    return getattr(function, "__name__", repr(function))
