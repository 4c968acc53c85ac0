"""Between stages 1 and 2: sums over positions leave loops and branches.

The weights of a recurrence are constants of a loop, and their gradient adds up in the loop's carry. With
x_l and d_l the arrays that are multiplied in round l of the loop,

    carry_l = carry_(l-1) + x_l^T d_l,     so that     g = carry_0 + sum_l x_l^T d_l.

So the loop need not form the products. It hands out x_l and d_l, and its rounds become one more axis to
sum over, in one product after the loop. The algebra is that of a sum over examples: the steps of a tail
commute with the sum. A gradient may also leave a loop as an output [length, ...]. Sometimes it cannot be
reduced inside the loop (`cut`), because it is mixed with others after the loop or because one of the
statistics needs it whole. Then the loop hands out its factors, too, and there is no sum over the rounds.

The branches of a conditional hand out the factors of their tails, too. The factors of the branches that
are not taken are zeros, so that the gradient is the sum of the gradients that the tails of all branches
make.

Some equations take the gradients of several parameters together, after the sums that make them. These
equations are split, so that each gradient has its own.

A tail leaves only if its factors are smaller than its gradients. All others stay where they are, and the
answer is the same. If the single contributions to a sum are asked for, every tail leaves, since every
round of a loop contributes.

This file walks through the program, into loops and branches first; `loops` has what happens to one loop
and `branches` what happens to one conditional.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives

from pergrad import _compat
from pergrad._compat import ClosedJaxpr, JaxprEqn, Literal, Primitive, aval
from pergrad._cut.find import Walk, Wanted
from pergrad._cut.hoist.branches import leave_branches
from pergrad._cut.hoist.loops import leave_loop
from pergrad._cut.steps import is_zero
from pergrad._cut.terms import axes_of_product
from pergrad._ir import (
    LOOPS,
    Env,
    Loop,
    dependent_inputs,
    evaluate,
    is_in,
    read,
    readers_of,
    starting_env,
    variables,
)
from pergrad._trace import Program


def hoist(program: Program, wanted: Wanted) -> Program:
    """The same program, with the factors of its tails outside of loops and branches.

    If a gradient leaves a loop as an output, and all its statistics take it in by parts (`wanted`), its
    tails stay inside the loop.
    """
    if not any(eqn.primitive in RULES for eqn in program.jaxpr.eqns):
        return program
    walk = Walk.through(program, wanted, hoisted=False)
    hoisted = _hoisted(walk, ClosedJaxpr(program.jaxpr, program.consts), wanted.together)
    return program.replaced_by(hoisted)


def _hoisted(walk: Walk, program: ClosedJaxpr, together: bool) -> ClosedJaxpr:
    """The program that `walk` went through, with the factors of its tails outside of loops and branches.

    Inputs and outputs are those of `program`. `together` says whether several examples run at a time.
    """
    jaxpr = program.jaxpr
    if not any(eqn.primitive in RULES for eqn in jaxpr.eqns):
        return program

    def run(*args: Any) -> list[Any]:
        env = starting_env(program, args)
        for place, eqn in enumerate(jaxpr.eqns):
            rule = RULES.get(eqn.primitive)
            if rule is None:
                evaluate([eqn], env)
            else:
                outs = rule(walk, place, env, together)
                env.update(zip(eqn.outvars, outs, strict=True))
        return [read(env, v) for v in jaxpr.outvars]

    inputs = (jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in jaxpr.invars)
    return jax.make_jaxpr(run)(*inputs)


def _from_loop(walk: Walk, place: int, env: Env, together: bool) -> list[Any]:
    """The results of a loop, after the factors of tails have left the loops in its body and itself."""
    eqn, leaving = walk.eqns[place], walk.leaving[place]
    loop = Loop(eqn, eqn.params["jaxpr"])
    varies = [is_in(v, walk.varies) for v in eqn.invars]
    reduced_inside = {o.result for o in walk.opened.get(place, ())}
    in_parts = [i for i, k in enumerate(leaving) if k in reduced_inside]
    inputs = dependent_inputs(loop, varies)
    inside = Walk.inside(loop.body.jaxpr, inputs, leaving, in_parts, split=walk.split, hoisted=False)
    loop = Loop(eqn, _hoisted(inside, loop.body, together))
    from_zero = [is_zero(v, walk.made_by) for v in loop.operands(eqn.invars)[1]]
    leaving = [k for k in leaving if k not in reduced_inside]
    ins = [read(env, v) for v in eqn.invars]
    return leave_loop(loop, leaving, varies, from_zero, ins, split=walk.split)


def _from_branches(walk: Walk, place: int, env: Env, together: bool) -> list[Any]:
    """The results of a conditional, after the factors of tails have left its branches."""
    eqn, leaving = walk.eqns[place], walk.leaving[place]
    index_varies, *varies = (is_in(v, walk.varies) for v in eqn.invars)
    branches = []
    for branch in eqn.params["branches"]:
        inputs = itertools.compress(branch.jaxpr.invars, varies)
        inside = Walk.inside(branch.jaxpr, inputs, leaving, split=walk.split, hoisted=False)
        branches.append(_hoisted(inside, branch, together))
    ins = [read(env, v) for v in eqn.invars]
    return leave_branches(
        eqn, branches, leaving, index_varies, varies, ins, split=walk.split, together=together
    )


def _each_behind_its_own(walk: Walk, place: int, env: Env, together: bool) -> list[Any]:
    """The results of a barrier on several gradients, as one barrier on each of them.

    Then each gradient has a tail of its own. If the backbone needs one of the results, and the result
    varies, the barrier stays.
    """
    eqn, leaving = walk.eqns[place], walk.leaving[place]
    read_at_all = variables([*(v for e in walk.eqns for v in e.invars), *walk.grads, *walk.others])
    others = [v for k, v in enumerate(eqn.outvars) if k not in leaving]
    if any(v in walk.varies and v in read_at_all for v in others):
        return _compat.bind(eqn, [read(env, v) for v in eqn.invars])
    with _compat.at_line_of(eqn):
        return [lax.optimization_barrier(read(env, v)) for v in eqn.invars]


def _products_of_pieces(walk: Walk, place: int, env: Env, together: bool) -> list[Any]:
    """The results of a `split` of a product, as products of pieces: (X^T D)[:, a:b] = X^T D[:, a:b].

    Such gradients belong to weights that are joined before they are used, such as those of queries, keys
    and values. If it is not a product that is split, or not for gradients alone, the `split` stays.
    """
    eqn, leaving = walk.eqns[place], walk.leaving[place]
    axis, moves, made = eqn.params["axis"], [], _made_for(walk, eqn)
    while made is not None and made.primitive in PASSED_BY_PIECES and len(made.invars) == 1:
        axis = made.params["permutation"][axis] if made.primitive is primitives.transpose_p else axis
        moves.insert(0, made)
        made = _made_for(walk, made)
    is_gradient = len(leaving) == len(eqn.outvars)
    if made is None or made.primitive is not primitives.dot_general_p or not is_gradient:
        return _compat.bind(eqn, [read(env, v) for v in eqn.invars])

    factors = [read(env, v) for v in made.invars]
    axes = axes_of_product(made)[axis]
    pieces, start = [], 0
    for size in eqn.params["sizes"]:
        own = [
            x if a is None else lax.slice_in_dim(x, start, start + size, axis=a)
            for x, a in zip(factors, axes, strict=True)
        ]
        (piece,) = _compat.bind(made, own)
        for move in moves:
            (piece,) = _compat.bind(move, [piece])
        pieces.append(piece)
        start += size
    return pieces


# The primitives that may stand between a product and the equation that splits it.
PASSED_BY_PIECES = (primitives.transpose_p, _compat.optimization_barrier_p)


def _made_for(walk: Walk, eqn: JaxprEqn) -> JaxprEqn | None:
    """The equation that makes the first operand of `eqn`, if nothing but `eqn` reads this operand."""
    operand = eqn.invars[0]
    if isinstance(operand, Literal) or operand in variables([*walk.grads, *walk.others]):
        return None
    is_read_once = len(readers_of(walk.eqns)[operand]) == 1
    return walk.made_by.get(operand) if is_read_once else None


# A rule gets the walk, the place of an equation, the values of the variables so far, and whether several
# examples run at a time. It returns the results of the equation.
Rule = Callable[[Walk, int, Env, bool], list[Any]]


# The rules for loops and conditionals, which the factors of tails leave.
RULES: dict[Primitive, Rule] = {
    **dict.fromkeys(LOOPS, _from_loop),
    primitives.cond_p: _from_branches,
    _compat.optimization_barrier_p: _each_behind_its_own,
    _compat.split_p: _products_of_pieces,
}
