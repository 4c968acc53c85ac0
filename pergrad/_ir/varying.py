"""Programs in a `shard_map` that checks along which mesh axes every array varies (`check_vma=True`).

There the type of an array names the manual axes along which devices have different values of it. The
operands of an equation must have the same axes, the carry of a loop must keep them, and JAX's functions
cast arrays accordingly while a program is traced. A cast transposes to a sum over devices. So if a loss
is differentiated with respect to parameters that are the same on all devices, JAX adds up the gradients
of all devices in the middle of the program. No example has such a gradient.

So pergrad traces a call for arrays whose types name no axis, and the program has no casts. Here it is
run with every array cast to all axes: the inputs of the program, its constants, and what an equation
makes of nothing, such as an `iota`. Then all operands agree, also inside loops and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Primitive, aval
from pergrad._ir.conditional import take_branch
from pergrad._ir.custom import CUSTOM_CALLS, without_derivative
from pergrad._ir.equations import Env, read, starting_env
from pergrad._ir.loop import Evaluate, Loop
from pergrad._ir.shards import names_in


def evaluate_varying(program: ClosedJaxpr, args: Sequence[Any], axes: frozenset[str]) -> list[Any]:
    """The results of a program. All its arrays vary along the mesh axes `axes`."""

    def vary(x: Any) -> Any:
        return _compat.as_varying(x, axes)

    def evaluate(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        env = {v: vary(x) for v, x in starting_env(program, args).items()}
        for eqn in program.jaxpr.eqns:
            ins = [vary(_typed(env, v)) for v in eqn.invars]
            rule = RULES.get(eqn.primitive)
            outs = rule(eqn, ins, evaluate) if rule else _compat.bind(eqn, ins)
            env.update(zip(eqn.outvars, map(vary, outs), strict=True))
        return [vary(_typed(env, v)) for v in program.jaxpr.outvars]

    return evaluate(program, args)


def _typed(env: Env, v: Atom) -> Any:
    """The value of an atom. A literal, which may be a Python number, becomes an array of its dtype."""
    return jnp.asarray(v.val, aval(v).dtype) if isinstance(v, Literal) else read(env, v)


def _loop(eqn: JaxprEqn, ins: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    return Loop(eqn, eqn.params["jaxpr"]).rebuilt(ins, evaluate)


def _branches(eqn: JaxprEqn, ins: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    branches = [lambda *args, b=b: evaluate(b, args) for b in eqn.params["branches"]]
    with _compat.at_line_of(eqn):
        return take_branch(eqn, ins[0], branches, ins[1:])


def _while(eqn: JaxprEqn, ins: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    """The results of a `while` loop, which may be mapped over examples.

    Then its test has the axis of the examples. The loop goes on as long as one of them does, and keeps
    the carry of the others.
    """
    of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, body = list(ins[:of_test]), list(ins[of_test : of_test + of_body])

    def goes_on(carry: list[Any]) -> jax.Array:
        return evaluate(eqn.params["cond_jaxpr"], [*test, *carry])[0]

    def one_round(carry: list[Any]) -> list[Any]:
        new, going = evaluate(eqn.params["body_jaxpr"], [*body, *carry]), goes_on(carry)
        if not going.ndim:
            return new
        return [
            jnp.where(going.reshape(going.shape + (1,) * (x.ndim - going.ndim)), x, old)
            for x, old in zip(new, carry, strict=True)
        ]

    with _compat.at_line_of(eqn):
        start = list(ins[of_test + of_body :])
        return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), one_round, start)


def _call(eqn: JaxprEqn, ins: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    return evaluate(_compat.as_closed(eqn.params["jaxpr"]), ins)


def _custom_call(eqn: JaxprEqn, ins: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    """The rule of the call's derivative was made for arrays that do not vary."""
    why = "in a shard_map that checks varying axes. Pass check_vma=False to this shard_map."
    return without_derivative(eqn, ins, evaluate, why)


def _reshard(eqn: JaxprEqn, ins: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    """A change of layout. An array that no axis divides, as far as its type says, stays as it is."""
    (x,) = ins
    specs = jax.typeof(x).sharding.spec, eqn.params["dst_sharding"].spec
    is_divided = any(names_in(entry) for spec in specs for entry in spec)
    return _compat.bind(eqn, ins) if is_divided else [x]


RULES: dict[Primitive, Callable[[JaxprEqn, Sequence[Any], Evaluate], list[Any]]] = {
    p.scan_p: _loop,
    p.cond_p: _branches,
    p.while_p: _while,
    p.jit_p: _call,
    _compat.reshard_p: _reshard,
    **dict.fromkeys(CUSTOM_CALLS, _custom_call),
}
