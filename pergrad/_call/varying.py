"""One call in a `shard_map` that checks along which mesh axes arrays vary (`check_vma=True`).

`_ir/varying` says why such a call is traced as if nothing varied. So what the loss itself takes from the
`shard_map` is refused: a collective, and an array that it closes over and that varies.
"""

from __future__ import annotations

from typing import Any

import jax

from pergrad import _compat
from pergrad._call.arrays import Arguments
from pergrad._call.call import Call
from pergrad._call.named_axes import collective_over, refuse_varying
from pergrad._errors import ArgumentError
from pergrad._ir import evaluate_varying
from pergrad._run import Given


def varying_axes(call: Call, weights: Any, given: Given) -> frozenset[str]:
    """The mesh axes along which an argument of the call varies."""
    arrays = jax.tree.leaves((Arguments.of(call).arrays, weights, given))
    return frozenset().union(*map(_compat.varying_axes, arrays))


def run_varying(call: Call, weights: Any, given: Given, axes: frozenset[str]) -> Any:
    """The value and the results of the call, as `Call.run` returns them. All vary along `axes`."""
    arguments = Arguments.of(call)
    inputs, tree = jax.tree.flatten((arguments.arrays, weights, given))

    def run(*inputs: Any) -> Any:
        arrays, weights, given = tree.unflatten(inputs)
        return arguments.call_with(arrays).run(weights, given)

    program, out = jax.make_jaxpr(run, return_shape=True)(*map(_not_varying, inputs))
    refuse_varying(program.consts)
    if found := collective_over(program.jaxpr, axes):
        axis, eqn = found
        raise ArgumentError(
            f"the loss names the mesh axis {axis!r}, at {_compat.user_line(eqn)}, in a shard_map that "
            "checks varying axes. Pass check_vma=False to this shard_map, or leave the axis out."
        )
    return jax.tree.unflatten(jax.tree.structure(out), evaluate_varying(program, inputs, axes))


def _not_varying(x: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)
