"""A loss must not name the axes of the batch, along which every device has its own examples.

The loss sees one example, on one device. A collective over these axes would mix examples of different
devices, and a statistic of single examples does not exist for such a loss. A sharding constraint says
nothing along them: it is passed over where JAX lets it through (a `NamedSharding`), and refused by JAX
otherwise (a `PartitionSpec`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pergrad import _compat
from pergrad._call.request import as_tuple
from pergrad._compat import Jaxpr, JaxprEqn
from pergrad._errors import ArgumentError
from pergrad._ir import Devices, programs


def refuse_collectives(jaxpr: Jaxpr, devices: Devices) -> None:
    """Raises an error if the loss has a collective operation over the axes of the batch."""
    if found := collective_over(jaxpr, devices.axes):
        axis, eqn = found
        raise ArgumentError(
            f"the loss uses {eqn.primitive} over the mesh axis {axis!r}, at {_compat.user_line(eqn)}. "
            "spmd_axis_name divides the examples along this axis, so the loss would mix examples of "
            "different devices. Leave it out: the loss sees one example, and pergrad adds up over "
            "devices."
        )


def collective_over(jaxpr: Jaxpr, axes: Collection[str]) -> tuple[str, JaxprEqn] | None:
    """The first equation that names one of these mesh axes, and the axis; None if there is none."""
    for eqn in jaxpr.eqns:
        named = [axis for axis in _names_of(eqn) if axis in axes]
        if named:
            return named[0], eqn
        inner = (collective_over(program, axes) for program in programs(eqn))
        if found := next(filter(None, inner), None):
            return found
    return None


def refuse_varying(arrays: Sequence[Any]) -> None:
    """Raises an error if arrays that the loss closes over, or its results, vary along a mesh axis.

    The arguments of the loss do not, as far as JAX knows (`_ir/varying`).
    """
    axes = sorted({axis for x in arrays for axis in _compat.varying_axes(x)})
    if axes:
        raise ArgumentError(
            f"the loss closes over an array that varies along the mesh axis {axes[0]!r}, in a shard_map "
            "that checks varying axes. Pass the array as an argument, by shared_argnums, or pass "
            "check_vma=False to this shard_map."
        )


def _names_of(eqn: JaxprEqn) -> list[Any]:
    """The names of mapped axes that an equation has among its parameters."""
    return [name for key in ("axes", "axis_name") for name in as_tuple(eqn.params.get(key, ()))]


@contextlib.contextmanager
def constraints_explained(devices: Devices) -> Iterator[None]:
    """Says what to write in place of a sharding constraint that names an axis of the batch."""
    try:
        yield
    except ValueError as error:
        if not devices.axes or "with_sharding_constraint" not in str(error):
            raise
        raise ArgumentError(
            f"the loss has a sharding constraint that JAX refuses, at {_compat.line_of_error(error)}. "
            f"Along {', '.join(map(repr, devices.axes))}, which spmd_axis_name names, every device has "
            "its own examples, and the loss sees one of them. Give the constraint as "
            "jax.sharding.NamedSharding(mesh, spec), of which pergrad leaves these axes out, or leave "
            f"them out of the spec. JAX: {error}"
        ) from error
