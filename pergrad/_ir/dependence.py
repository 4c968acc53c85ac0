"""What depends on what in a list of equations. Questions about the flow of data are answered here."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import Atom, Jaxpr, JaxprEqn, Literal, Var
from pergrad._ir.equations import Env, evaluate, programs, read
from pergrad._ir.loop import Loop
from pergrad._ir.primitives import ONE_TO_ONE, Is, those_that_are


def variables(atoms: Iterable[Atom]) -> set[Var]:
    """The variables among these atoms, without the literals."""
    return {v for v in atoms if not isinstance(v, Literal)}


def is_in(atom: Atom, variables: Collection[Var]) -> bool:
    """Whether an atom is one of these variables. A literal never is."""
    return not isinstance(atom, Literal) and atom in variables


def dependents(eqns: Iterable[JaxprEqn], sources: Iterable[Var], *, inside: bool = False) -> set[Var]:
    """The variables `sources`, and all variables that depend on one of them.

    If one operand of an equation depends on the sources, all results of the equation are assumed to
    depend on them. With `inside`, the programs of loops, conditionals and calls are looked into, to see
    which of their results do.
    """
    reached = set(sources)
    for eqn in eqns:
        depends = [is_in(v, reached) for v in eqn.invars]
        if eqn.primitive in ONE_TO_ONE:
            reached |= set(itertools.compress(eqn.outvars, depends))
        elif not any(depends):
            continue
        elif inside and (loop := Loop.of(eqn)) is not None:
            body = loop.body.jaxpr
            within = dependents(body.eqns, dependent_inputs(loop, depends, inside=True), inside=True)
            reached |= _results_of(eqn, [is_in(v, within) for v in body.outvars])
        elif inside and eqn.primitive in RUNNING_BRANCHES:
            for program in programs(eqn):
                # The index of a conditional is no input of its branches.
                before = len(depends) - len(program.invars)
                own = itertools.compress(program.invars, depends[before:])
                within = dependents(program.eqns, own, inside=True)
                by_index = any(depends[:before])
                reached |= _results_of(eqn, [by_index or is_in(v, within) for v in program.outvars])
        else:
            reached |= set(eqn.outvars)
    return reached


RUNNING_BRANCHES = those_that_are(Is.RUNS_BRANCHES)


def takes_branches_by(eqns: Sequence[JaxprEqn], sources: Iterable[Var]) -> bool:
    """Whether a conditional takes its branch by one of the variables `sources`, also inside of loops.

    In programs that other equations run, such as a `while` loop or a function with a derivative of its
    own, every conditional is assumed to.
    """
    reached = dependents(eqns, sources)
    for eqn in eqns:
        depends = [is_in(v, reached) for v in eqn.invars]
        loop = Loop.of(eqn)
        if loop is not None:
            if takes_branches_by(loop.body.jaxpr.eqns, dependent_inputs(loop, depends)):
                return True
        elif eqn.primitive in RUNNING_BRANCHES:
            for program in programs(eqn):
                before = len(depends) - len(program.invars)
                own = itertools.compress(program.invars, depends[before:])
                if any(depends[:before]) or takes_branches_by(program.eqns, own):
                    return True
        elif any(depends) and any(map(_has_branches, programs(eqn))):
            return True
    return False


def _has_branches(jaxpr: Jaxpr) -> bool:
    """Whether there is a conditional in a program, or in one that it runs."""
    return any(eqn.primitive is p.cond_p or any(map(_has_branches, programs(eqn))) for eqn in jaxpr.eqns)


def _results_of(eqn: JaxprEqn, chosen: Iterable[bool]) -> set[Var]:
    return set(itertools.compress(eqn.outvars, chosen))


def dependent_inputs(loop: Loop, depends: Sequence[bool], *, inside: bool = False) -> list[Var]:
    """The inputs of a loop's body that depend on some sources outside of the loop.

    `depends` says for each operand of the loop whether it depends on these sources. `inside` is that of
    `dependents`. If a part of the carry depends on the sources after one round, it is an input of the
    body that depends on them in the next round.
    """
    consts, carry, xs = loop.operands(depends)
    body = loop.body.jaxpr
    while True:
        chosen = list(itertools.compress(body.invars, [*consts, *carry, *xs]))
        reached = dependents(body.eqns, chosen, inside=inside)
        after = [is_in(v, reached) for v in body.outvars[: loop.num_carry]]
        wider = [a or b for a, b in zip(carry, after, strict=True)]
        if wider == carry:
            return chosen
        carry = wider


def readers_of(eqns: Iterable[JaxprEqn]) -> dict[Var, list[JaxprEqn]]:
    """For every variable, the equations that read it. An equation that reads it twice is there twice."""
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for v in eqn.invars:
            if not isinstance(v, Literal):
                readers.setdefault(v, []).append(eqn)
    return readers


def needed_equations(eqns: Sequence[JaxprEqn], needed: Iterable[Var]) -> tuple[JaxprEqn, ...]:
    """The equations from which the variables `needed` are computed, and those that have an effect."""
    return tuple(eqns[i] for i in needed_places(eqns, needed))


def needed_places(
    eqns: Sequence[JaxprEqn], needed: Iterable[Var], always: Collection[int] = ()
) -> list[int]:
    """The places in `eqns` of the equations from which the variables `needed` are computed.

    Equations that have an effect count as needed, and so do those at the places `always`.
    """
    needed = set(needed)
    kept = []
    for place in reversed(range(len(eqns))):
        eqn = eqns[place]
        if _compat.has_effects(eqn) or place in always or any(v in needed for v in eqn.outvars):
            needed |= variables(eqn.invars)
            kept.append(place)
    return kept[::-1]


def evaluate_independent(eqns: Sequence[JaxprEqn], env: Env, moving: Collection[Var]) -> None:
    """Computes the results that are not in `moving` and adds them to `env`.

    `moving` holds some variables and all that depend on them. Equations with effects are not run.
    """
    for eqn in eqns:
        if eqn.primitive in ONE_TO_ONE:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            env.update({out: read(env, v) for v, out in pairs if out not in moving})
        elif not _compat.has_effects(eqn) and not any(is_in(v, moving) for v in eqn.invars):
            evaluate([eqn], env)
