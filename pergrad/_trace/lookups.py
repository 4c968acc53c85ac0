"""A lookup in a difference becomes a difference of lookups.

A cross-entropy takes one logarithm of a probability from each row t of log_softmax(x) = x - s, where s
has one number a row:

    (x - s)[t, k_t] = x[t, k_t] - s[t].

XLA does not see that. It writes the logarithms of all probabilities to memory, a float32 array as large
as all logits, and reads one number of each row. In the form on the right there is no such array, and the
numbers are the same to the last bit. A cast moves behind the lookup in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, aval
from pergrad._ir import Env, evaluate, read, starting_env

MadeBy = Mapping[Var, JaxprEqn]


def with_early_lookups(program: ClosedJaxpr, args: Sequence[Any]) -> ClosedJaxpr:
    """The same program, in which lookups come before differences and casts wherever they can.

    `args` are arrays that the program can be traced with, or their shapes and types.
    """
    made_by: MadeBy = {v: eqn for eqn in program.jaxpr.eqns for v in eqn.outvars}
    if not any(_is_lookup(eqn) and _moves(eqn, eqn.invars[0], made_by) for eqn in program.jaxpr.eqns):
        return program

    def run(*args: Any) -> list[Any]:
        env = starting_env(program, args)
        for eqn in program.jaxpr.eqns:
            if _is_lookup(eqn):
                with _compat.at_line_of(eqn):
                    env[eqn.outvars[0]] = _looked_up(eqn, eqn.invars[0], made_by, env)
            else:
                evaluate([eqn], env)
        return [read(env, v) for v in program.jaxpr.outvars]

    return jax.make_jaxpr(run)(*args)


def _is_lookup(eqn: JaxprEqn) -> bool:
    """Whether an equation looks up rows, and gives NaN for an index out of range if not another row."""
    if eqn.primitive is not p.gather_p:
        return False
    fills, fill = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP, eqn.params["fill_value"]
    return not fills or fill is None or bool(np.isnan(fill))


def _moves(lookup: JaxprEqn, v: Atom, made_by: MadeBy) -> bool:
    """Whether the lookup in `v` can come before the equation that makes `v`."""
    eqn = _maker(v, made_by)
    if eqn is None:
        return False
    if eqn.primitive is p.convert_element_type_p:
        return _is_float(eqn.invars[0]) and _moves(lookup, eqn.invars[0], made_by)
    return eqn.primitive is p.sub_p and _repeated(lookup, eqn, made_by) is not None


def _looked_up(lookup: JaxprEqn, v: Atom, made_by: MadeBy, env: Env) -> Any:
    """The result of the lookup in `v`, from lookups as early in the program as possible."""
    eqn = _maker(v, made_by)
    if eqn is not None and eqn.primitive is p.convert_element_type_p and _is_float(eqn.invars[0]):
        return _compat.bind(eqn, [_looked_up(lookup, eqn.invars[0], made_by, env)])[0]
    found = None if eqn is None or eqn.primitive is not p.sub_p else _repeated(lookup, eqn, made_by)
    if eqn is None or found is None:
        return _compat.bind(lookup, [read(env, v), read(env, lookup.invars[1])])[0]
    x = _looked_up(lookup, eqn.invars[0], made_by, env)
    s, axes = found
    number = jnp.asarray(read(env, s))
    number = lax.squeeze(number, [a for a, n in enumerate(number.shape) if n == 1])
    return lax.sub(x, lax.broadcast_in_dim(number, jnp.shape(x), axes))


def _repeated(lookup: JaxprEqn, eqn: JaxprEqn, made_by: MadeBy) -> tuple[Atom, list[int]] | None:
    """What a difference subtracts, if that has one number for each row that the lookup keeps apart.

    The rows that a lookup keeps apart are those of its batching axes. The result is the variable that
    has the numbers, and for each of its axes that is longer than 1 the axis of the lookup's result. It
    is None if the difference subtracts anything else.
    """
    x, s = eqn.invars
    shape, axes = aval(s).shape, range(len(aval(s).shape))
    repeat = _maker(s, made_by)
    if repeat is not None and repeat.primitive is p.broadcast_in_dim_p and len(repeat.invars) == 1:
        s, axes = repeat.invars[0], repeat.params["broadcast_dimensions"]
        shape = aval(s).shape
    own = [axis for axis, n in zip(axes, shape, strict=True) if n != 1]
    numbers: lax.GatherDimensionNumbers = lookup.params["dimension_numbers"]
    batch = [a for a in range(len(aval(lookup.outvars[0]).shape)) if a not in numbers.offset_dims]
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    becomes = {axis: batch[of_indices] for axis, of_indices in pairs}
    if aval(x).shape != aval(eqn.outvars[0]).shape or not set(own) <= becomes.keys():
        return None
    found = [becomes[axis] for axis in own]
    return (s, found) if found == sorted(found) else None


def _maker(v: Atom, made_by: MadeBy) -> JaxprEqn | None:
    return None if isinstance(v, Literal) else made_by.get(v)


def _is_float(v: Atom) -> bool:
    return jnp.issubdtype(aval(v).dtype, jnp.floating)
