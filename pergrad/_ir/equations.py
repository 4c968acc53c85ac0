"""Reading and running equations: the loop that knows no primitive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from pergrad import _compat
from pergrad._compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, aval
from pergrad._ir.numerics import widen

Env = dict[Var, Any]


def distinct(atoms: Iterable[Atom]) -> tuple[Var, ...]:
    """The variables among these atoms, each once, in the order in which they first appear."""
    return tuple(dict.fromkeys(v for v in atoms if not isinstance(v, Literal)))


def starting_env(program: ClosedJaxpr, args: Sequence[Any]) -> Env:
    """The values that a program starts from: those of its constants and of its inputs."""
    names = [*program.jaxpr.constvars, *program.jaxpr.invars]
    return dict(zip(names, [*program.consts, *args], strict=True))


def read(env: Env, atom: Atom) -> Any:
    """The value of a variable, or of a literal."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def evaluate(eqns: Sequence[JaxprEqn], env: Env) -> None:
    """Runs the equations in order and adds their results to `env`."""
    for eqn in eqns:
        outs = _compat.bind(eqn, [read(env, v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))


def programs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs that an equation runs: the body of a loop, or the branches of a conditional."""
    return [jaxpr for value in eqn.params.values() for jaxpr in _programs(value)]


def _programs(value: Any) -> list[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, Jaxpr):
        return [value]
    if isinstance(value, (tuple, list)):
        return [jaxpr for x in value for jaxpr in _programs(x)]
    return []


def evaluate_wide(eqns: Sequence[JaxprEqn], env: Env) -> None:
    """As `evaluate`, but half-precision numbers become float32, and casts to fewer bits are left out.

    An equation that runs a program of its own, such as how a scatter-add adds two numbers, gets its
    operands in the dtypes that this program was traced with.
    """
    for eqn in eqns:
        args = [widen(read(env, v)) for v in eqn.invars]
        if eqn.primitive is primitives.convert_element_type_p and _narrows(eqn, args[0]):
            outs = args
        elif programs(eqn):
            pairs = zip(args, eqn.invars, strict=True)
            outs = _compat.bind(eqn, [lax.convert_element_type(x, aval(v).dtype) for x, v in pairs])
        else:
            outs = _compat.bind(eqn, args)
        env.update(zip(eqn.outvars, [widen(x) for x in outs], strict=True))


def rounds(eqn: JaxprEqn) -> bool:
    """Whether an equation is a cast from float64 to float32."""
    return (
        eqn.primitive is primitives.convert_element_type_p
        and jnp.finfo(eqn.params["new_dtype"]).bits == 32
        and jnp.finfo(aval(eqn.invars[0]).dtype).bits == 64
    )


def _narrows(eqn: JaxprEqn, x: Any) -> bool:
    return jnp.finfo(eqn.params["new_dtype"]).bits < jnp.finfo(jnp.result_type(x)).bits
