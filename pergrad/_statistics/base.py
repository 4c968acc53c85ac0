"""What every statistic says of itself.

What is computed for one parameter on its own is a `LeafStatistic`, of two main kinds:

- An accumulator starts empty (`init`), takes gradients in one at a time (`add`) or many at once
  (`add_all`), and is read out at the end (`finish`). To take in many at once gives what it gives to take
  them in one by one, and two states can be merged.
- A reading is a value for every example (`of`).

A statistic of an example's whole gradient is made of such leaves.

Strategies, plan and run know no statistic by its class. They ask it: when is it computed (`phase`), of
what units (`unit`), which quantity of the gradients would do in the place of the gradients themselves
(`quantity`), which axes its result has (`layout`), how the parts of several devices and the results of
several batches become one (`part_of_all`, `merging`).
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from pergrad._errors import ArgumentError
from pergrad._ir import Devices, Weights, added

State = Any
Shaped = jax.Array | jax.ShapeDtypeStruct
Per = int | Literal["example", "token"]


class Phase(enum.Enum):
    """When a statistic is computed."""

    FIRST = "as soon as the factors of a tail are there"
    CLIPPED = "when the norms of all gradients have been read"
    LAST = "when all examples have been through the model"


class Quantity(enum.Enum):
    """What a statistic is made of, if a strategy can give that without the gradients themselves.

    With w_i the weights and g_i the gradients of a parameter.
    """

    SUM = "the sum of w_i phi(g_i) for an elementwise phi"
    CENTRED = "the sum of w_i, the mean of g_i, and the sum of w_i (g_i - mean)^2"
    SQUARED_NORMS = "||g_i||^2 for every example"
    PROJECTIONS = "<g_i, v> for every example and a direction v"
    PAIRS = "<g_i, g_j> for all pairs of examples"
    GRADIENTS = "the gradients themselves"
    FACTORS = "what the gradients are made of"


class Layout(enum.Enum):
    """Which axes a result has."""

    LIKE_PARAMETERS = "those of the parameters: a tree like them"
    PER_EXAMPLE = "the example axis in front"
    PER_EXAMPLE_LIKE_PARAMETERS = "the example axis in front, and then those of the parameters"
    NUMBER = "none"


class Merging(enum.Enum):
    """How the results of several batches become one."""

    ADDED = "they are added"
    WEIGHED = "they are means, weighed by the counts"
    CENTRED = "they are variances, centred on the common mean"
    JOINED = "they are joined along the example axis"


class Seen(Protocol):
    """What a call has seen of its examples, for a statistic to make its result of."""

    losses: jax.Array
    count: jax.Array

    def leaves_of(self, statistic: Statistic) -> list[Any]:
        """For each parameter the result of the statistic's last leaf there, or None if it has none."""
        ...

    def like_params(self, leaves: Sequence[Any]) -> Any:
        """A tree like the parameters, with these leaves."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the value of a leaf statistic comes from.

    `like` has the shape and dtype of the parameter's gradient, and `units` is the number of units,
    counted with their weights. The tail of the gradient stands in as many loops as `loops` says: a
    state then has their lengths in front, and `outward` brings its entries to where they lie in the
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
    def unit(self) -> Per:
        """What one unit is: an example, so many examples together, or a single contribution."""
        return "example"

    @property
    def layout(self) -> Layout:
        """Which axes the result has."""
        return Layout.PER_EXAMPLE

    @property
    def takes_direction(self) -> bool:
        """Whether a direction must be given at the call."""
        return False

    @property
    def merging(self) -> Merging:
        """How the results of two batches become one."""
        raise ArgumentError(f"{self!r} cannot be combined.")

    def selects(self, path: str) -> bool:
        """Whether the statistic looks at the parameter at `path`."""
        return True

    def check_count(self, count: float) -> None:
        """Raises if a batch of `count` examples does not have this statistic."""

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        """What has to be computed for the parameter at `path`; the result is made of the last one."""
        return ()

    def of_leaves(self, leaves: Sequence[Any], tree: Callable[[Sequence[Any]], Any]) -> Any:
        """The result, from one for each parameter (None if it has none); `tree` makes one like them."""
        return tree(leaves)

    def result(self, seen: Seen) -> Any:
        """The result, from all that a call has seen."""
        return self.of_leaves(seen.leaves_of(self), seen.like_params)

    def as_part(self, result: Any, devices: Devices) -> Any:
        """This device's part of the result, as it leaves the device."""
        return result


@dataclasses.dataclass(frozen=True)
class LeafStatistic(Statistic):
    """A statistic that is computed for each parameter on its own, from its gradients alone."""

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (self,)

    @property
    def phase(self) -> Phase:
        """When it is computed."""
        return Phase.FIRST

    @property
    def quantity(self) -> Quantity:
        """What it is made of."""
        return Quantity.GRADIENTS

    @property
    def is_sum(self) -> bool:
        """Whether it is the weighted sum of the gradients and nothing else."""
        return False

    @property
    def accumulates(self) -> bool:
        """Whether it has a state that takes in one example after the other."""
        return False

    @property
    def in_parts(self) -> bool:
        """Whether a gradient may be taken in by its parts, such as the layers of a stack.

        The result is then made of those of the parts, entry by entry or as their sum.
        """
        return False

    @property
    def shares_weights(self) -> bool:
        """Whether it takes the examples in with the weights that all other statistics have."""
        return True

    def from_quantity(self, state: State | None, value: Any) -> Any:
        """The new state, or the value for every example, from the quantity that it is made of."""
        return value

    def read_out(self, value: Any, source: Source) -> Any:
        """The result for a parameter, from the final state or the values of all examples."""
        return value


@dataclasses.dataclass(frozen=True)
class Reading(LeafStatistic, abc.ABC):
    """A value for every example, whatever its weight."""

    @property
    def merging(self) -> Merging:
        return Merging.JOINED

    @abc.abstractmethod
    def of(self, g: jax.Array, direction: Any) -> jax.Array:
        """The value of one gradient; `direction` is given to the statistics that take one."""

    def read_out(self, value: Any, source: Source) -> Any:
        # The steps of the loops around a tail are parts of the gradient, whose values add up.
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

        What `finish` makes of the parts adds up to the result. The leaves of a state may have the
        lengths of loops in front.
        """

    @abc.abstractmethod
    def finish(self, state: State, count: jax.Array, like: Shaped) -> Any:
        """The result, from the state and `count`, the sum of all weights."""

    def state_or_empty(self, state: State | None, like: Shaped) -> State:
        """The state, or an empty one if there is none yet."""
        return self.init(like) if state is None else state

    def fed(self, state: State | None, gs: jax.Array, w: Weights, like: Shaped) -> State:
        """As `add_all`, where there may be no state yet."""
        return self.add_all(self.state_or_empty(state, like), gs, w)

    def weights(self, w: jax.Array, squared_norms: jax.Array) -> jax.Array:
        """The weights [B] with which the examples are taken in, if their gradients have these norms."""
        return w

    def norms_over(self, params: Sequence[int], param: int) -> tuple[int, ...]:
        """Of which of the parameters `params` the norms count for the weights at `param`."""
        return ()

    def as_part(self, result: Any, devices: Devices) -> Any:
        return jax.tree.map(lambda x: x[None], result)

    def read_out(self, value: Any, source: Source) -> Any:
        result = self.finish(value, source.units, source.like)
        return source.outward(result) if source.loops else result


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
        """The p for which |phi(g)| = |g| ** p; None if it is not known."""

    @abc.abstractmethod
    def apply(self, g: jax.Array) -> jax.Array:
        """phi(g) in the dtype that sums are kept in."""

    def fed(self, state: State | None, gs: jax.Array, w: Weights, like: Shaped) -> State:
        return self.add_all(state, gs, w)  # JAX need not trace, nor XLA remove, that 0 is added.

    def from_quantity(self, state: State | None, value: Any) -> Any:
        return added(state, value)


@dataclasses.dataclass(frozen=True)
class OfAllGradients(LeafStatistic, abc.ABC):
    """A statistic that needs the gradients of all examples side by side."""

    @property
    def phase(self) -> Phase:
        return Phase.LAST

    @abc.abstractmethod
    def of_all(self, own: jax.Array, gs: jax.Array) -> jax.Array:
        """The value for the gradients `own`, which are some of the gradients `gs` [B, ...] of all."""


def checked_per(per: Any) -> Per:
    """What one unit is; groups of one are examples."""
    if per in ("example", "token"):
        return per
    if isinstance(per, bool) or not isinstance(per, int) or per < 1:
        raise ArgumentError(
            f"per must be 'example', 'token' or a number of examples of at least 1, not {per!r}."
        )
    return "example" if per == 1 else per


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
