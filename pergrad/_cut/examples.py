"""The examples, or other units in their place, that a tail is reduced over."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from pergrad._ir import Weights, total


@dataclasses.dataclass(frozen=True)
class Examples:
    """The `size` examples that a tail is reduced over.

    `weights` are their shares of the whole batch: an array [size], or one number if all are equal.
    `factors` are the values of the tail's factors, each [size, ...], and `constants` those of the tail's
    constants, without an axis of examples.

    `here` matters for inner products of pairs. It has the place of the first example of this device
    and the number of its examples; inner products are wanted of these examples with all `size`
    examples. None means that all examples are this device's.
    """

    size: int
    weights: Weights
    factors: list[jax.Array]
    constants: list[jax.Array]
    here: tuple[Any, int] | None = None

    def those_here(self, x: jax.Array) -> jax.Array:
        """The rows of an array [size, ...] that belong to this device's examples."""
        return x if self.here is None else lax.dynamic_slice_in_dim(x, *self.here)

    @property
    def along(self) -> tuple[list[jax.Array], jax.Array | None]:
        """The arrays with an axis of examples: the factors, and the weights (None if one number)."""
        return self.factors, self.weights if isinstance(self.weights, jax.Array) else None

    @property
    def total(self) -> jax.Array | float:
        """The sum of the weights: 1 if these are all examples of the batch, else less."""
        return total(self.weights, self.size)
