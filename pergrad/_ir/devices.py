"""The devices that share a batch, and how sums over them are taken.

Each device has a part of the examples and works on these alone, in a program that is mapped over axes of
a mesh. One device that has all examples is the special case of no axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Devices:
    """As many as there are along the mesh axes `axes`. The methods are for one of them to call."""

    axes: tuple[str, ...] = ()
    number: int = 1

    def add(self, x: jax.Array) -> jax.Array:
        """The sum over all devices."""
        return lax.psum(x, self.axes) if self.axes else x

    def join(self, x: jax.Array) -> jax.Array:
        """The examples of all devices, from the own [size, ...]."""
        return lax.all_gather(x, self.axes, tiled=True) if self.axes else x

    def first(self, size: int) -> Any:
        """The place in the batch of the first own example, if each device has `size`."""
        return lax.axis_index(self.axes) * size if self.axes else 0

    def merge(self, two: Callable[[Any, Any], Any], state: Any) -> Any:
        """On the first device the states of all, merged two at a time in their order.

        A tree of log2(number) levels: at the one of 2^k every 2^(k+1)-th device takes in the state of
        the one 2^k further on, which has those of 2^k devices by then. So two states are here at most.
        """
        here, far = self.first(1), 1
        while far < self.number:
            pairs = [(i + far, i) for i in range(0, self.number - far, 2 * far)]
            other = jax.tree.map(lambda x, p=pairs: lax.ppermute(x, self.axes, p), state)
            takes = (here % (2 * far) == 0) & (here + far < self.number)
            state = _select(takes, two(state, other), state)
            far *= 2
        return state

    def only_first(self, x: Any) -> Any:
        """On the first device `x`, on the others zeros like it."""
        return _select(self.first(1) == 0, x, jax.tree.map(jnp.zeros_like, x))


def _select(condition: Any, x: Any, y: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)
