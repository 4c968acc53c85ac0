"""Axes of length 1 leave the program while its calls are inlined.

A loss of a batch is traced with a batch of one, so that nearly every array has an axis of length 1, and
`vmap` puts the axis of the examples next to it. XLA then does not see that this is the program of
`jax.grad`: on the CPU it copies operands of products to transpose them, and it fuses less. Without the
axes of length 1 the two programs are alike, and they have fewer equations.

This file has a rule for each primitive that can do without such axes. A rule gets its operands without
them and returns its result without them. Any other equation gets its operands in the shapes that the
program gives them (`as_known`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p
from jax.sharding import AxisType

from pergrad import _compat
from pergrad._compat import Atom, JaxprEqn, Primitive, aval
from pergrad._ir import Is, those_that_are

# The result of an equation without axes of length 1, from operands without them; None if this equation
# needs them after all.
Rule = Callable[[JaxprEqn, Sequence[Any]], Any]


def as_known(values: Sequence[Any], atoms: Sequence[Atom]) -> list[Any]:
    """The values of `atoms`, reshaped to the shapes that the program gives these atoms."""
    return [_shaped(x, _shape(v)) for x, v in zip(values, atoms, strict=True)]


def _shaped(x: Any, shape: tuple[int, ...]) -> Any:
    return x if jnp.shape(x) == shape else lax.reshape(x, shape)


def squeezed(x: Any) -> Any:
    """`x` without its axes of length 1."""
    shape = jnp.shape(x)
    return lax.squeeze(x, [i for i, n in enumerate(shape) if n == 1]) if 1 in shape else x


def evaluate_squeezed(eqn: JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation, without axes of length 1 if there is a rule for its primitive.

    The operands `ins` may lack axes of length 1.
    """
    rule = RULES.get(eqn.primitive)
    has_unit_axes = any(1 in aval(v).shape for v in (*eqn.invars, *eqn.outvars))
    is_sharded = any(_is_explicit(value) for name, value in eqn.params.items() if "sharding" in name)
    if rule is not None and has_unit_axes and not is_sharded:
        with _compat.at_line_of(eqn):
            out = rule(eqn, [squeezed(x) for x in ins])
        if out is not None:
            return out if isinstance(out, list) else [out]
    return _compat.bind(eqn, as_known(ins, eqn.invars))


def _is_explicit(sharding: Any) -> bool:
    """Whether a sharding has explicit axes. If all axes are automatic, the sharding says nothing."""
    return sharding is not None and AxisType.Explicit in sharding.mesh.axis_types


def _kept(shape: Sequence[int]) -> dict[int, int]:
    """For each axis that is not of length 1, the number that it has when the others are dropped."""
    return {axis: k for k, axis in enumerate(axis for axis, n in enumerate(shape) if n != 1)}


def _of(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """The numbers that those of `axes` that are not of length 1 have when the others are dropped."""
    kept = _kept(shape)
    return tuple(kept[axis] for axis in axes if axis in kept)


def _shape(v: Atom) -> tuple[int, ...]:
    return tuple(aval(v).shape)


def _bind(eqn: JaxprEqn, ins: Sequence[Any], **params: Any) -> Any:
    out = eqn.primitive.bind(*ins, **(eqn.params | params))
    return list(out) if eqn.primitive.multiple_results else out


def _elementwise(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    """An elementwise equation. An operand keeps an axis of length 1 where the result is longer."""
    kept = _kept(_shape(eqn.outvars[0]))
    shapes = [tuple(shape[axis] for axis in kept) if shape else () for shape in map(_shape, eqn.invars)]
    return _bind(eqn, [_shaped(x, shape) for x, shape in zip(ins, shapes, strict=True)])


def _reduction(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    axes = _of(_shape(eqn.invars[0]), eqn.params["axes"])
    return _bind(eqn, ins, axes=axes) if axes else ins[0]


def _product(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    shapes = [_shape(v) for v in eqn.invars]
    numbers = tuple(tuple(map(_of, shapes, pair)) for pair in eqn.params["dimension_numbers"])
    return _bind(eqn, ins, dimension_numbers=numbers)


def _broadcast(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    if len(ins) > 1:
        return None
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    kept = _kept(shape)
    longer = tuple(shape[axis] for axis in kept)
    if jnp.shape(ins[0]) == longer:
        return ins[0]
    own = [axis for axis, n in zip(axes, _shape(eqn.invars[0]), strict=True) if n != 1]
    return _bind(eqn, ins, shape=longer, broadcast_dimensions=tuple(kept[axis] for axis in own))


def _reshape(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    if eqn.params.get("dimensions") is not None or len(ins) > 1:
        return None
    shape = tuple(n for n in _shape(eqn.outvars[0]) if n != 1)
    return ins[0] if jnp.shape(ins[0]) == shape else lax.reshape(ins[0], shape)


def _transpose(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    axes = _of(_shape(eqn.invars[0]), eqn.params["permutation"])
    return _bind(eqn, ins, permutation=axes) if axes != tuple(range(len(axes))) else ins[0]


def _along(eqn: JaxprEqn, ins: Sequence[Any], name: str) -> Any:
    """For an equation that splits or joins arrays along one axis, if no array has length 1 there.

    `name` is the parameter of the equation that says which axis it is.
    """
    axis, arrays = eqn.params[name], [_shape(v) for v in (*eqn.invars, *eqn.outvars)]
    if any(shape[axis] == 1 for shape in arrays):
        return None
    return _bind(eqn, ins, **{name: _kept(arrays[0])[axis]})


def _slice(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if any((n == 1) != (m == 1) for n, m in zip(before, after, strict=True)):
        return None
    parts = {name: eqn.params[name] for name in ("start_indices", "limit_indices", "strides")}
    kept = _kept(before)
    params = {name: all_ and tuple(all_[axis] for axis in kept) for name, all_ in parts.items()}
    return _bind(eqn, ins, **params)


def _pad(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    kept, config = _kept(_shape(eqn.invars[0])), eqn.params["padding_config"]
    is_padded = any(any(ends) for axis, (*ends, _) in enumerate(config) if axis not in kept)
    if is_padded or any(_shape(eqn.outvars[0])[axis] == 1 for axis in kept):
        return None
    return _bind(eqn, ins, padding_config=tuple(config[axis] for axis in kept))


def _gather(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    """A gather without axes of length 1, in its operand, its indices, its windows and its result.

    The result has the axes of the indices but the last one, and those axes of a window that are not
    collapsed (`offset_dims`). So an axis of length 1 in the result is either an axis of the indices or
    an axis of a window, which can be collapsed.
    """
    old: lax.GatherDimensionNumbers = eqn.params["dimension_numbers"]
    operand, indices, out = map(_shape, (*eqn.invars, *eqn.outvars))
    kept, sizes = _kept(operand), eqn.params["slice_sizes"]
    if not set(old.start_index_map) <= kept.keys():
        return None
    vectors, places = _index_vectors(ins[1], indices, old.start_indices_batching_dims)
    batch = [a for a in range(len(out)) if a not in old.offset_dims]
    own = sorted([batch[a] for a in places] + [a for a in old.offset_dims if out[a] != 1])
    collapsed = [a for a in kept if a in old.collapsed_slice_dims or sizes[a] == 1]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=_places(own, old.offset_dims),
        collapsed_slice_dims=_of(operand, [a for a in collapsed if a not in old.operand_batching_dims]),
        start_index_map=_of(operand, old.start_index_map),
        operand_batching_dims=_of(operand, old.operand_batching_dims),
        start_indices_batching_dims=_places(places, old.start_indices_batching_dims),
    )
    sizes = tuple(sizes[a] for a in kept)
    return squeezed(_bind(eqn, [ins[0], vectors], dimension_numbers=numbers, slice_sizes=sizes))


def _scatter(eqn: JaxprEqn, ins: Sequence[Any]) -> Any:
    """A scatter without axes of length 1. Its updates are to it what the result is to a gather."""
    old: lax.ScatterDimensionNumbers = eqn.params["dimension_numbers"]
    operand, indices, updates = map(_shape, eqn.invars)
    if not set(old.scatter_dims_to_operand_dims) <= _kept(operand).keys():
        return None
    vectors, places = _index_vectors(ins[1], indices, old.scatter_indices_batching_dims)
    batch = [a for a in range(len(updates)) if a not in old.update_window_dims]
    own = sorted([batch[a] for a in places] + [a for a in old.update_window_dims if updates[a] != 1])
    elsewhere = {*old.inserted_window_dims, *old.operand_batching_dims}
    window = [a for a in range(len(operand)) if a not in elsewhere]
    pairs = zip(window, old.update_window_dims, strict=True)
    inserted = sorted([*old.inserted_window_dims, *(a for a, u in pairs if updates[u] == 1)])
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=_places(own, old.update_window_dims),
        inserted_window_dims=_of(operand, inserted),
        scatter_dims_to_operand_dims=_of(operand, old.scatter_dims_to_operand_dims),
        operand_batching_dims=_of(operand, old.operand_batching_dims),
        scatter_indices_batching_dims=_places(places, old.scatter_indices_batching_dims),
    )
    values = lax.reshape(ins[2], [updates[a] for a in own])
    return _bind(eqn, [ins[0], vectors, values], dimension_numbers=numbers)


def _index_vectors(indices: Any, shape: Sequence[int], batching: Sequence[int]) -> tuple[Any, list[int]]:
    """The indices with few axes of length 1, and which of their axes are left, apart from the last.

    The last axis holds a vector, and stays. If each index belongs to one row of the operand, as the
    labels of a cross-entropy do, then all other axes that are not of length 1 are batching axes. XLA's
    TPU compiler fuses such a gather or scatter only if there is one more axis, of length 1.
    """
    places = range(len(shape) - 1)
    left = [a for a in places if shape[a] != 1]
    if left and set(left) <= set(batching):
        left = sorted(left + [a for a in places if shape[a] == 1 and a not in batching][-1:])
    return lax.reshape(indices, [*(shape[a] for a in left), shape[-1]]), left


def _places(left: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """The places among the axes `left` of those of `axes` that are among them."""
    return tuple(left.index(a) for a in axes if a in left)


RULES: dict[Primitive, Rule] = {
    p.dot_general_p: _product,
    p.broadcast_in_dim_p: _broadcast,
    p.reshape_p: _reshape,
    p.squeeze_p: lambda eqn, ins: ins[0],
    p.transpose_p: _transpose,
    p.slice_p: _slice,
    p.pad_p: _pad,
    p.concatenate_p: lambda eqn, ins: _along(eqn, ins, "dimension"),
    p.gather_p: _gather,
    **dict.fromkeys([p.scatter_p, p.scatter_add_p], _scatter),
    _compat.split_p: lambda eqn, ins: _along(eqn, ins, "axis"),
    **dict.fromkeys([p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p, p.reduce_and_p], _reduction),
    **dict.fromkeys(those_that_are(Is.ELEMENTWISE), _elementwise),
}
