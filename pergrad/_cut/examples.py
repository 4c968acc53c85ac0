"""What a tail is reduced over: examples, or units in their place."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from pergrad._ir import Weights, total


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
