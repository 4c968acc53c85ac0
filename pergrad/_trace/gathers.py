"""Parameters that are divided among devices are gathered where they are used, and not before.

The program was traced for whole parameters. It is rewritten for one device, which has a shard of some
parameters. A shard is gathered when an equation needs the whole array, and it stays a shard in equations
that only hand it on:

    cast(gather(x)) = gather(cast(x)),   and the same for transposes, barriers, slices along other axes.

So a cast to bfloat16 comes before the gather, which then moves half as many bytes. If layers are stacked
along an axis that is not divided, a loop over the layers takes the stack of shards, and each round
gathers its own layer:

    scan over gather(x)  =  scan over x, which gathers x_l in round l.

Rows of a large table are looked up in one piece of the table after the other, so that a device never
has all of it.

What a loop hands out for later, such as the cast weights of a layer, leaves it as a shard, too. Nothing
gathered is kept for the backward pass: there the shard is gathered again, behind a barrier on the
cotangent of the loss, so that XLA does not merge both gathers and keep the array in between.

The results of the program are those of the whole parameters: gradients have the parameters' shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var, aval
from pergrad._ir import (
    LOOPS,
    Division,
    Loop,
    Shard,
    dependents,
    number_of_pieces,
    read,
    starting_env,
)
from pergrad._trace.trace import Program


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """An array that has not been gathered yet: this device's part `own`, and how it is divided."""

    own: Any
    shard: Shard


Whole = Callable[..., Any]  # gathers an array, if it waits for that; see `_gathered`


def with_gathers(program: Program, shards: Sequence[Shard]) -> Program:
    """The same program for one device, whose parameters are divided as `shards` says."""
    if all(shard.is_whole for shard in shards):
        return program
    closed = ClosedJaxpr(program.jaxpr, program.consts)
    late = dependents(program.jaxpr.eqns, [program.cotangent])

    def run(*args: Any) -> list[Any]:
        params = map(_if_divided, args[: len(shards)], shards)
        return [_gathered(x) for x in _evaluate(closed, [*params, *args[len(shards) :]], late, args[-1])]

    def own(v: Var, shard: Shard) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shard.shape(aval(v).shape), aval(v).dtype)

    whole = [Shard()] * (len(program.jaxpr.invars) - len(shards))
    inputs = map(own, program.jaxpr.invars, [*shards, *whole])
    return program.replaced_by(jax.make_jaxpr(run)(*inputs))


def _if_divided(x: Any, shard: Shard) -> Any:
    return x if shard.is_whole else _Waiting(x, shard)


def _gathered(x: Any, gather: Callable[[Any], Any] | None = None, *, cotangent: Any = None) -> Any:
    """The whole array, if `x` waits to be gathered; behind a barrier on the cotangent, if given.

    With `gather`, the result is what this function makes of the device's part of `x`.
    """
    if not isinstance(x, _Waiting):
        return x
    own = x.own if cotangent is None else lax.optimization_barrier((x.own, cotangent))[0]
    return (gather or x.shard.gather)(own)


def _evaluate(
    program: ClosedJaxpr, args: Sequence[Any], late: Collection[Var] = (), cotangent: Any = None
) -> list[Any]:
    """The results of a program, some of which may wait to be gathered, as some of its arguments may.

    Equations whose results are in `late` gather behind a barrier on the `cotangent`.
    """
    env = starting_env(program, args)
    for eqn in program.jaxpr.eqns:
        ins = [read(env, v) for v in eqn.invars]
        is_late = not set(eqn.outvars).isdisjoint(late)
        whole = functools.partial(_gathered, cotangent=cotangent if is_late else None)
        waits = any(isinstance(x, _Waiting) for x in ins)
        outs = RULES[eqn.primitive](eqn, ins, whole) if waits and eqn.primitive in RULES else None
        if outs is None:
            with _compat.at_line_of(eqn):
                ins = [whole(x) for x in ins]
            outs = _compat.bind(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, v) for v in program.jaxpr.outvars]


def _in_place(eqn: JaxprEqn, ins: Sequence[Any], whole: Whole) -> list[Any]:
    """Equations that leave entries in their places. Result k is made of operand k alone."""
    outs = _compat.bind(eqn, [x.own if isinstance(x, _Waiting) else x for x in ins])
    pairs = zip(ins, outs, strict=True)
    return [_Waiting(out, x.shard) if isinstance(x, _Waiting) else out for x, out in pairs]


def _transpose(eqn: JaxprEqn, ins: Sequence[Any], whole: Whole) -> list[Any] | None:
    (x,) = ins
    return _moved(eqn, ins, x.shard.moved(eqn.params["permutation"].index))


def _squeeze(eqn: JaxprEqn, ins: Sequence[Any], whole: Whole) -> list[Any] | None:
    (x,) = ins
    removed = eqn.params["dimensions"]
    return _moved(eqn, ins, x.shard.moved(lambda dim: dim - sum(k < dim for k in removed)))


def _reshape(eqn: JaxprEqn, ins: Sequence[Any], whole: Whole) -> list[Any] | None:
    """Entries stay in order, so that the entries before a divided dimension stay before it.

    Let N(k) be the number of entries before dimension k. A dimension d that is divided by n becomes the
    dimension e of the result if N(d) = N(e) and if n divides the length of e.
    """
    (x,) = ins
    old, new = x.shard.whole_shape(x.own.shape), eqn.params["new_sizes"]
    numbers = {division.dim: division.number for division in x.shard.divisions}

    def place(dim: int) -> int | None:
        before = math.prod(old[:dim])
        starts = (e for e in range(len(new)) if math.prod(new[:e]) == before)
        return next((e for e in starts if new[e] % numbers[dim] == 0), None)

    shard = x.shard.moved(place) if eqn.params["dimensions"] is None else None
    return _moved(eqn, ins, shard, "new_sizes")


def _slice(eqn: JaxprEqn, ins: Sequence[Any], whole: Whole) -> list[Any] | None:
    """A slice that takes all entries along the divided dimensions, at the same place on all devices.

    A place that is computed may depend on the example, and then devices have slices of different places.
    """
    if not all(isinstance(v, Literal) for v in eqn.invars[1:]):
        return None
    x = ins[0]
    old, new = x.shard.whole_shape(x.own.shape), aval(eqn.outvars[0]).shape
    takes_all = all(new[division.dim] == old[division.dim] for division in x.shard.divisions)
    name = "slice_sizes" if "slice_sizes" in eqn.params else "limit_indices"
    return _moved(eqn, ins, x.shard if takes_all else None, name)


def _moved(
    eqn: JaxprEqn, ins: Sequence[Any], shard: Shard | None, lengths: str | None = None
) -> list[Any] | None:
    """The result of an equation for its first operand's shard, if the result is divided as `shard` says.

    The equation's parameter `lengths` has the lengths of whole dimensions. None if there is no `shard`.
    """
    if shard is None:
        return None
    x, *others = ins
    if lengths is not None:
        eqn = eqn.replace(params=eqn.params | {lengths: shard.shape(eqn.params[lengths])})
    (out,) = _compat.bind(eqn, [x.own, *others])
    return [_Waiting(out, shard)]


def _lookup(eqn: JaxprEqn, ins: Sequence[Any], whole: Whole) -> list[Any] | None:
    """Rows of a large table whose rows are divided, from one piece of it after the other."""
    table, indices = ins
    if not isinstance(table, _Waiting):
        return None
    single = eqn.params["dimension_numbers"].collapsed_slice_dims
    division = next((own for own in table.shard.divisions if own.dim in single), None)
    if division is None:
        return None
    shape, length = table.shard.whole_shape(table.own.shape), table.own.shape[division.dim]
    number = number_of_pieces(shape, length, of_table=True)
    if number == 1:
        return None

    def rows(own: jax.Array) -> jax.Array:
        return _rows_in_pieces(eqn, own, whole(indices), table.shard, division, number)

    with _compat.at_line_of(eqn):
        return [whole(table, rows)]


def _rows_in_pieces(
    eqn: JaxprEqn, own: jax.Array, indices: jax.Array, shard: Shard, division: Division, number: int
) -> jax.Array:
    """The rows that a `gather` looks up, if `number` pieces of the table are gathered one by one.

    A row that the table does not have is filled, or is the nearest row, as the equation says.
    """
    dims, fill = eqn.params["dimension_numbers"], eqn.params["fill_value"]
    out, length = aval(eqn.outvars[0]), own.shape[division.dim]
    fills = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    column = dims.start_index_map.index(division.dim)
    indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
    rows = indices[..., column]
    rows = rows if fills else jnp.clip(rows, 0, division.number * length - 1)
    lookups = [axis for axis in range(len(out.shape)) if axis not in dims.offset_dims]
    in_piece = eqn.replace(params=eqn.params | {"indices_are_sorted": False, "unique_indices": False})

    def with_piece(found: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
        part = lax.dynamic_slice_in_dim(own, k * (length // number), length // number, division.dim)
        piece = shard.gather(part)
        places = division.places(rows, length, number, k)
        is_here = places < piece.shape[division.dim]
        places = indices.at[..., column].set(jnp.where(is_here, places, 0))
        (new,) = _compat.bind(in_piece, [piece, places])
        return lax.select(lax.broadcast_in_dim(is_here, out.shape, lookups), new, found), None

    nothing = lax.full(out.shape, jnp.nan if fill is None else fill, out.dtype)
    return lax.scan(with_piece, nothing, jnp.arange(number))[0]


def _loop(eqn: JaxprEqn, ins: Sequence[Any], whole: Whole) -> list[Any] | None:
    """A loop over a stack of shards. Constants of the loop are gathered once, before it begins."""
    loop = Loop(eqn, eqn.params["jaxpr"])
    consts, init, xs = loop.operands(ins)
    of_rounds = [_shard_of_round(x) for x in xs]
    if not any(of_rounds):
        return None
    consts, init = ([whole(x) for x in own] for own in (consts, init))
    xs = [x.own if shard else whole(x) for x, shard in zip(xs, of_rounds, strict=True)]
    of_outputs: list[Shard | None] = []

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        pairs = zip(xs, of_rounds, strict=True)
        waiting = [_Waiting(x, shard) if shard else x for x, shard in pairs]
        outs = _evaluate(loop.body, [*consts, *carry, *waiting])
        ends, ys = map(_gathered, outs[: loop.num_carry]), outs[loop.num_carry :]
        of_outputs[:] = [y.shard if isinstance(y, _Waiting) else None for y in ys]
        return list(ends), [y.own if isinstance(y, _Waiting) else y for y in ys]

    ends, ys = loop.run(body, init, xs)
    stacked = (shard and shard.moved(lambda dim: dim + 1) for shard in of_outputs)
    return [*ends, *(_Waiting(y, shard) if shard else y for y, shard in zip(ys, stacked, strict=True))]


def _shard_of_round(x: Any) -> Shard | None:
    """How one round's entry of a loop's input is divided; None if the input must be gathered whole."""
    if not isinstance(x, _Waiting):
        return None
    return x.shard.moved(lambda dim: dim - 1 if dim else None)


# A rule gets an equation, its operands, some of which wait to be gathered, and the function that gathers
# them. It returns the results, or None if the equation needs its operands whole.
Rule = Callable[[JaxprEqn, Sequence[Any], Whole], list[Any] | None]


RULES: dict[Primitive, Rule] = {
    **dict.fromkeys([p.convert_element_type_p, p.copy_p, _compat.name_p], _in_place),
    _compat.optimization_barrier_p: _in_place,
    p.transpose_p: _transpose,
    p.squeeze_p: _squeeze,
    p.reshape_p: _reshape,
    **dict.fromkeys([p.slice_p, p.dynamic_slice_p], _slice),
    p.gather_p: _lookup,
    **dict.fromkeys(LOOPS, _loop),
}
