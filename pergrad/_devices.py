"""The devices that share a batch: which they are, and how their results come together.

Each has a part of the examples and works on these alone, in a program that is mapped over axes of a
mesh (`_spmd`). One device that has all examples is the special case of no axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from pergrad._errors import ArgumentError


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


def find_mesh(axes: Sequence[str], arrays: Sequence[Any]) -> AbstractMesh:
    """The mesh that has these axes: that of the context, or else that of one of the arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        own = (_mesh_of(x) for x in arrays)
        mesh = next((m for m in own if m is not None and not m.empty), mesh)
    if mesh.empty:
        raise ArgumentError(
            f"spmd_axis_name={_shown(axes)} needs a mesh, and none is known: neither is one set, nor do "
            "the arguments lie on one. Call this under `with jax.set_mesh(mesh):`."
        )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ArgumentError(
                f"spmd_axis_name={_shown(axes)}: the mesh has no axis {axis!r}, only "
                f"{', '.join(map(repr, mesh.axis_names))}."
            )
        if types[axis] == AxisType.Manual:
            raise ArgumentError(
                f"spmd_axis_name={_shown(axes)}: this is inside of a shard_map over {axis!r} already, "
                "where every device sees its own examples. Leave spmd_axis_name out, and merge the "
                f"results with pg.all_combine(stats, result, {_shown(axes)})."
            )
    return mesh


def explicit_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """The axes whose shardings are part of the types of arrays."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def devices_of(mesh: AbstractMesh, axes: tuple[str, ...], size: int) -> Devices:
    """The devices along these axes, if they can have equal parts of `size` examples."""
    number = math.prod(mesh.shape[axis] for axis in axes)
    if size % number:
        missing = -size % number
        raise ArgumentError(
            f"spmd_axis_name={_shown(axes)}: {size} examples cannot be divided among {number} devices. "
            f"Add {missing} to the batch, any will do, with example_weights of 0."
        )
    return Devices(axes, number)


def _mesh_of(x: Any) -> AbstractMesh | None:
    sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else getattr(x, "sharding", None)
    return sharding.mesh.abstract_mesh if isinstance(sharding, NamedSharding) else None


def _shown(axes: Sequence[str]) -> str:
    return repr(axes[0] if len(axes) == 1 else tuple(axes))
