"""The mesh and the devices of a call, and how they divide its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pergrad._call.call import Call
from pergrad._errors import ArgumentError
from pergrad._ir import Devices, Division, Shard, names_in


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
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    others = [axis for axis in mesh.axis_names if axis not in axes and types[axis] != AxisType.Manual]
    return Devices(axes, number, are_teams=math.prod(mesh.shape[axis] for axis in others) > 1)


def shards_of(call: Call, mesh: AbstractMesh, devices: Devices) -> list[Shard]:
    """How the devices that share a batch divide the parameters of the call.

    The specs are those that the caller gives, or else those of the parameters. Under `jit` JAX does not
    know how an array is divided along automatic axes; such a parameter is taken to be whole.
    """
    specs = _given_specs(call, mesh) or [_spec_of(x) for x in call.params]
    return [
        Shard(devices, _divisions(x, spec, mesh, devices))
        for x, spec in zip(call.params, specs, strict=True)
    ]


def _divisions(x: Any, spec: Any, mesh: AbstractMesh, devices: Devices) -> tuple[Division, ...]:
    """The divisions of an array along the axes of the batch."""
    found = []
    for dim, entry in enumerate(spec):
        axes = tuple(axis for axis in names_in(entry) if axis in devices.axes)
        number = math.prod(mesh.shape[axis] for axis in axes)
        if number > 1 and x.shape[dim] % number == 0:
            found.append(Division(dim, axes, number))
    return tuple(found)


def _spec_of(x: Any) -> Any:
    """The spec of an array, as far as it is known."""
    is_traced = isinstance(x, Tracer)
    sharding = jax.typeof(x).sharding if is_traced else getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else P()


def _given_specs(call: Call, mesh: AbstractMesh) -> list[Any] | None:
    """The specs of all parameters that the caller gives, checked; None if there are none."""
    given = call.request.param_specs
    if given is None:
        return None
    params = call.like_params(call.params)
    try:
        spread = jax.tree.map(lambda s, x: jax.tree.map(lambda _: s, x), given, params, is_leaf=_is_spec)
    except ValueError as error:
        raise ArgumentError(
            "param_specs must be a tree like the parameters, or a tree of which each leaf stands for a "
            f"part of the parameters. {error}"
        ) from error
    specs = jax.tree.leaves(spread, is_leaf=_is_spec)
    for path, x, spec in zip(call.paths, call.params, specs, strict=True):
        _check_spec(path, x, spec, mesh)
    return specs


def _check_spec(path: str, x: Any, spec: Any, mesh: AbstractMesh) -> None:
    what = f"param_specs: the spec of {path} is {spec!r}"
    if not _is_spec(spec):
        raise ArgumentError(f"{what}, which is no jax.sharding.PartitionSpec.")
    if len(spec) > len(x.shape):
        raise ArgumentError(f"{what}, but the parameter has the shape {x.shape}.")
    for length, entry in zip(x.shape, spec, strict=False):
        for axis in names_in(entry):
            if axis not in mesh.axis_names:
                names = ", ".join(map(repr, mesh.axis_names))
                raise ArgumentError(f"{what}, but the mesh has no axis {axis!r}, only {names}.")
        number = math.prod(mesh.shape[axis] for axis in names_in(entry))
        if length % number:
            raise ArgumentError(
                f"{what}, but {length} entries cannot be divided among {number} devices: the parameter "
                f"has the shape {x.shape}."
            )


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def spec_of_shard(shard: Shard, ndim: int) -> P:
    """The spec of an array of `ndim` dimensions along the axes of the batch."""
    own = {division.dim: division.axes for division in shard.divisions}
    return P(*(own.get(dim) for dim in range(ndim)))


def _mesh_of(x: Any) -> AbstractMesh | None:
    sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else getattr(x, "sharding", None)
    return sharding.mesh.abstract_mesh if isinstance(sharding, NamedSharding) else None


def _shown(axes: Sequence[str]) -> str:
    return repr(axes[0] if len(axes) == 1 else tuple(axes))
