"""The devices that share a batch, and how sums over them are taken.

Every device has a part of the examples and works on its own examples alone. All devices run one program,
which is mapped over axes of a mesh. If there is one device, which has all examples, there are no axes.
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
    """The devices along the mesh axes `axes`, `number` of them. Every one of them calls the methods.

    `axes` is empty for a single device. If the mesh has further axes, each of these devices is a team of
    several (`are_teams`), and XLA divides the work of a team along the further axes.
    """

    axes: tuple[str, ...] = ()
    number: int = 1
    are_teams: bool = False

    def any_team(self, condition: jax.Array) -> jax.Array:
        """What a branch is taken by, in place of the device's own `condition`, which is one truth value.

        XLA adds collectives to what a team does, and all teams must meet in some of them. So a branch
        that one team needs is taken by all.
        """
        return lax.psum(condition.astype("int32"), self.axes) > 0 if self.are_teams else condition

    def add(self, x: jax.Array) -> jax.Array:
        """The sum of the devices' `x`."""
        return lax.psum(x, self.axes) if self.axes else x

    def join(self, x: jax.Array) -> jax.Array:
        """The devices' arrays `x` [size, ...], one behind the other: an array for all examples."""
        return lax.all_gather(x, self.axes, tiled=True) if self.axes else x

    def first(self, size: int) -> Any:
        """The place in the whole batch of this device's first example, if each device has `size`."""
        return lax.axis_index(self.axes) * size if self.axes else 0

    def merge(self, two: Callable[[Any, Any], Any], state: Any) -> Any:
        """The states of all devices, merged into one; the result is on the first device.

        `two` merges the states of two devices, the earlier one first. The devices form a tree of
        log2(number) levels. At level k every 2^(k+1)-th device takes in the state of the device 2^k
        further on, which has merged the states of up to 2^k devices by then. So a device never holds
        more than two states.
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
        """`x` on the first device, and zeros shaped like it on all others."""
        return _select(self.first(1) == 0, x, jax.tree.map(jnp.zeros_like, x))


def _select(condition: Any, x: Any, y: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)
