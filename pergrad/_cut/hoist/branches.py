"""How the factors of tails leave the branches of one conditional. `hoist` says why they do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pergrad import _compat
from pergrad._compat import Atom, ClosedJaxpr, JaxprEqn, Var, aval
from pergrad._cut.find import Walk
from pergrad._cut.hoist.leaving import can_leave
from pergrad._cut.steps import is_zero
from pergrad._cut.tail import Tail
from pergrad._ir import (
    Env,
    dependents,
    distinct,
    evaluate,
    evaluate_independent,
    needed_equations,
    read,
    starting_env,
    take_branch,
    take_by_example,
)


def leave_branches(
    eqn: JaxprEqn,
    branches: Sequence[ClosedJaxpr],
    leaving: Sequence[int],
    index_varies: bool,
    varies: Sequence[bool],
    ins: Sequence[Any],
    *,
    split: bool,
    together: bool,
) -> list[Any]:
    """The results of the conditional `eqn` for the operands `ins`, with tails evaluated after it.

    `branches` take the place of the equation's own branches. The results number `leaving` are needed
    only by tails. If such a result can be made by tails in all branches, the branches hand out the
    factors of these tails, and the result is made of them after the conditional.

    `index_varies` says whether examples may take different branches, and `varies` which of the other
    operands differ from example to example. `split` says whether the single contributions to sums are
    asked for, and `together` whether several examples run at a time.
    """
    index, *operands = ins
    results = range(len(eqn.outvars))
    tails = [_tails_of_branch(branch, leaving, varies, split) for branch in branches]

    # A result leaves the branches if it can leave all of them, together with the other results of its
    # tails. If examples may take different branches, the constants that `_constants` makes in the
    # conditional would need a copy for every example, so tails with such constants stay.
    fixed = {
        k
        for branch, own in zip(branches, tails, strict=True)
        for tail in own
        if index_varies and _constants_from_inputs(branch, tail)
        for k in tail.params
    }
    gone = set(leaving) - fixed
    while (
        stay := {k for t in itertools.chain(*tails) if not _can_leave(t, gone, split) for k in t.params}
        & gone
    ):
        gone -= stay
    tails = [[t for t in own if gone.issuperset(t.params)] for own in tails]
    kept = [k for k in results if k not in gone]

    def run(number: int) -> Callable[..., Any]:
        def branch(*operands: Any) -> Any:
            env = starting_env(branches[number], operands)
            evaluate(branches[number].jaxpr.eqns, env)
            factors = [
                [[env[v] if n == number else _full(v, 0) for v in tail.factors] for tail in own]
                for n, own in enumerate(tails)
            ]
            return [read(env, branches[number].jaxpr.outvars[k]) for k in kept], factors

        return branch

    runs = [run(number) for number in range(len(branches))]
    with _compat.at_line_of(eqn):
        if index_varies and together:
            values, factors = take_by_example(index, runs, operands)
        else:
            values, factors = take_branch(eqn, index, runs, operands)
        envs = _constants(eqn, branches, tails, varies, ins)
        out = dict(zip(kept, values, strict=True))
        out |= {k: _full(eqn.outvars[k], 0) for k in gone}
        for own, env, factors_of_own in zip(tails, envs, factors, strict=True):
            for tail, xs in zip(own, factors_of_own, strict=True):
                grads = tail.gradients(xs, [env[v] for v in tail.constants])
                made = zip(tail.params, grads, strict=True)
                out |= {k: out[k] + g.astype(out[k].dtype) for k, g in made}
    return [out[k] for k in results]


def _constants(
    eqn: JaxprEqn,
    branches: Sequence[ClosedJaxpr],
    tails: Sequence[Sequence[Tail]],
    varies: Sequence[bool],
    ins: Sequence[Any],
) -> list[Env]:
    """For each branch, the values of the constants of its tails.

    If a branch is not taken, the factors of its tails are zeros, but the constants may be anything, such
    as W / sigma with sigma = 0, and zero times infinity is NaN. So the constants that depend on the
    operands of the branch are made in the conditional, and are ones if the branch is not taken: zero
    times one is zero, and so is zero divided by one.
    """
    index, *operands = ins
    guarded = [
        distinct(v for tail in own for v in _constants_from_inputs(branch, tail))
        for branch, own in zip(branches, tails, strict=True)
    ]

    def run(number: int) -> Callable[..., Any]:
        def branch(*still: Any) -> list[list[Any]]:
            program, operands = branches[number], iter(still)
            env = starting_env(program, [None if v else next(operands) for v in varies])
            needed = needed_equations(program.jaxpr.eqns, guarded[number])
            moving = dependents(needed, itertools.compress(program.jaxpr.invars, varies))
            evaluate_independent(needed, env, moving)
            return [
                [env[v] if n == number else _full(v, 1) for v in own] for n, own in enumerate(guarded)
            ]

        return branch

    made: Sequence[Sequence[Any]] = guarded
    if any(guarded):
        still = [x for x, v in zip(operands, varies, strict=True) if not v]
        made = take_branch(eqn, index, [run(number) for number in range(len(branches))], still)
    envs = []
    for program, names, values in zip(branches, guarded, made, strict=True):
        env = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        evaluate_independent(
            program.jaxpr.eqns, env, dependents(program.jaxpr.eqns, program.jaxpr.invars)
        )
        envs.append(env | dict(zip(names, values, strict=True)))
    return envs


def _constants_from_inputs(branch: ClosedJaxpr, tail: Tail) -> list[Var]:
    """The constants of a tail that depend on the operands of its branch."""
    from_inputs = dependents(branch.jaxpr.eqns, branch.jaxpr.invars)
    return [v for v in tail.constants if v in from_inputs]


def _tails_of_branch(
    branch: ClosedJaxpr, leaving: Sequence[int], varies: Sequence[bool], split: bool
) -> list[Tail]:
    """The tails of a branch for its results number `leaving`, without those that make only zeros."""
    inputs = itertools.compress(branch.jaxpr.invars, varies)
    walk = Walk.inside(branch.jaxpr, inputs, leaving, split=split)
    tails = walk.tails(range(len(leaving)), leaving)
    return [t for t in tails if not all(is_zero(g, walk.made_by) for g in t.grads)]


def _can_leave(tail: Tail, together: set[int], split: bool) -> bool:
    """Whether a tail may leave its branch, if the results number `together` leave the branches."""
    return can_leave(tail, split) and not tail.adds and together.issuperset(tail.params)


def _full(v: Atom, number: int) -> jax.Array:
    """An array like `v` that is full of one number."""
    return jnp.full(aval(v).shape, number, aval(v).dtype)
