"""The mesh and the devices of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from pergrad._errors import ArgumentError
from pergrad._ir import Devices


def find_mesh(axes: Sequence[str], arrays: Sequence[Any]) -> AbstractMesh:
    """The mesh of the context, or else that of one of the arrays. It must have these axes."""
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
    """The explicit axes of the mesh, along which an array's sharding is part of its type."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def devices_of(mesh: AbstractMesh, axes: tuple[str, ...], size: int) -> Devices:
    """The devices along these axes. Raises an error if they cannot share `size` examples equally."""
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
