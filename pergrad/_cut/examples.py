"""The examples, or other units in their place, that a tail is reduced over."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from pergrad._ir import Devices, Weights, total


@dataclasses.dataclass(frozen=True)
class Examples:
    """The `size` examples that a tail is reduced over.

    `weights` are their shares of the whole batch: an array [size], or one number if all are equal.
    `factors` are the values of the tail's factors, each [size, ...], and `constants` those of the tail's
    constants, without an axis of examples.

    `here` and `others` matter for inner products of pairs. Each has the place of a first example and a
    number of examples. Inner products are wanted of the examples `here`, such as those of this device,
    with the examples `others`. None means all examples.

    `devices` are those that share the batch.
    """

    size: int
    weights: Weights
    factors: list[jax.Array]
    constants: list[jax.Array]
    here: tuple[Any, int] | None = None
    others: tuple[Any, int] | None = None
    devices: Devices = dataclasses.field(default_factory=Devices)

    def those_here(self, x: jax.Array) -> jax.Array:
        """The rows of an array [size, ...] that belong to the examples `here`."""
        return x if self.here is None else lax.dynamic_slice_in_dim(x, *self.here)

    def the_others(self, x: jax.Array) -> jax.Array:
        """The rows of an array [size, ...] that belong to the examples `others`."""
        return x if self.others is None else lax.dynamic_slice_in_dim(x, *self.others)

    @property
    def along(self) -> tuple[list[jax.Array], jax.Array | None]:
        """The arrays with an axis of examples: the factors, and the weights (None if one number)."""
        return self.factors, self.weights if isinstance(self.weights, jax.Array) else None

    @property
    def total(self) -> jax.Array | float:
        """The sum of the weights: 1 if these are all examples of the batch, else less."""
        return total(self.weights, self.size)
