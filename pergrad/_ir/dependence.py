"""What depends on what in a list of equations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pergrad._compat import Atom, JaxprEqn, Literal, Var
from pergrad._ir.equations import Env, evaluate, read
from pergrad._ir.primitives import ONE_TO_ONE


def variables(atoms: Iterable[Atom]) -> set[Var]:
    return {v for v in atoms if not isinstance(v, Literal)}


def is_in(atom: Atom, variables: Collection[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def varying(eqns: Iterable[JaxprEqn], given: Iterable[Var]) -> set[Var]:
    """The variables that depend on those `given`, and these themselves."""
    varies = set(given)
    for eqn in eqns:
        if eqn.primitive in ONE_TO_ONE:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            varies |= {out for v, out in pairs if is_in(v, varies)}
        elif variables(eqn.invars) & varies:
            varies |= set(eqn.outvars)
    return varies


def needed_equations(
    eqns: Iterable[JaxprEqn], needed: Iterable[Var], always: Collection[int] = ()
) -> tuple[JaxprEqn, ...]:
    """The equations that make what is needed, have an effect, or are in `always` (by identity)."""
    needed = set(needed)
    kept = []
    for eqn in reversed(list(eqns)):
        if eqn.effects or id(eqn) in always or any(v in needed for v in eqn.outvars):
            needed |= variables(eqn.invars)
            kept.append(eqn)
    return tuple(reversed(kept))


def evaluate_still(eqns: Sequence[JaxprEqn], env: Env, moving: Collection[Var]) -> None:
    """Runs the equations that depend on nothing that moves."""
    for eqn in eqns:
        if eqn.primitive in ONE_TO_ONE:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            env.update({out: read(env, v) for v, out in pairs if out not in moving})
        elif not eqn.effects and not any(is_in(v, moving) for v in eqn.invars):
            evaluate([eqn], env)
