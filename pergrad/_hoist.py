"""Between step 1 and step 2: sums over positions leave loops and branches.

The weights of a recurrence are constants of a loop, and their gradient adds up in its carry. With x_l
and d_l what is multiplied in step l of the loop,

    carry_l = carry_(l-1) + x_l^T d_l,     so that     g = carry_0 + sum_l x_l^T d_l:

the loop need not form the products. It hands out x_l and d_l, and its steps become one more axis to sum
over, in one product after the loop. The algebra is that of a sum over examples: the steps of a tail
commute with it. A gradient that leaves a loop as an output [length, ...] is treated alike, without the
sum, if it cannot be reduced inside (`_cut`): because it is mixed with others after the loop, or because
one of the statistics wants it whole.

The branches of a conditional hand out the factors of their tails in the same way. Those of the branches
that are not taken are zeros, so that the gradient is the sum of what the tails of all branches make.

Only what is smaller than the gradient leaves. All else stays where it is, and the answer is the same.
Where the single contributions to a sum are asked for everything leaves, since the steps of a loop
contribute.
Here the program is walked through, from the inside out; one loop or conditional is done in `_leave`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import primitives

from pergrad._compat import ClosedJaxpr, JaxprEqn, Primitive, aval
from pergrad._eval import evaluate, given, read
from pergrad._flow import is_in
from pergrad._leave import leave_branches, leave_loop
from pergrad._loop import LOOPS, Loop
from pergrad._steps import is_zero
from pergrad._trace import Program
from pergrad._walk import Walk, Wanted


def hoist(program: Program, wanted: Wanted) -> Program:
    """The same program with the factors of its tails outside of loops and branches.

    Where all statistics take a gradient in by parts, tails stay inside the loop that it leaves as an
    output.
    """
    if not any(eqn.primitive in RULES for eqn in program.jaxpr.eqns):
        return program
    walk = Walk.through(program, wanted, hoisted=False)
    hoisted = _hoisted(walk, ClosedJaxpr(program.jaxpr, program.consts), wanted.together)
    return program.replaced_by(hoisted)


def _hoisted(walk: Walk, program: ClosedJaxpr, together: bool) -> ClosedJaxpr:
    """The program that `walk` went through, hoisted; it takes and gives the same."""
    jaxpr = program.jaxpr
    if not any(eqn.primitive in RULES for eqn in jaxpr.eqns):
        return program

    def run(*args: Any) -> list[Any]:
        env = given(program, args)
        for eqn in jaxpr.eqns:
            rule = RULES.get(eqn.primitive)
            if rule is None:
                evaluate([eqn], env)
            else:
                outs = rule(walk, eqn, [read(env, v) for v in eqn.invars], together)
                env.update(zip(eqn.outvars, outs, strict=True))
        return [read(env, v) for v in jaxpr.outvars]

    inputs = (jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in jaxpr.invars)
    return jax.make_jaxpr(run)(*inputs)


def _from_loop(walk: Walk, eqn: JaxprEqn, ins: Sequence[Any], together: bool) -> list[Any]:
    loop = Loop(eqn, eqn.params["jaxpr"])
    varies = [is_in(v, walk.varies) for v in eqn.invars]
    leaving = walk.leaving[id(eqn)]
    reduced_inside = {o.result for o in walk.opened.get(id(eqn), ())}
    in_parts = [i for i, k in enumerate(leaving) if k in reduced_inside]
    given = loop.varying_inputs(varies)
    inside = Walk.inside(loop.step.jaxpr, given, leaving, in_parts, split=walk.split, hoisted=False)
    loop = Loop(eqn, _hoisted(inside, loop.step, together))
    from_zero = [is_zero(v, walk.made_by) for v in loop.operands(eqn.invars)[1]]
    leaving = [k for k in leaving if k not in reduced_inside]
    return leave_loop(loop, leaving, varies, from_zero, ins, split=walk.split)


def _from_branches(walk: Walk, eqn: JaxprEqn, ins: Sequence[Any], together: bool) -> list[Any]:
    index_varies, *varies = (is_in(v, walk.varies) for v in eqn.invars)
    leaving = walk.leaving[id(eqn)]
    branches = [
        _hoisted(Walk.inside(b.jaxpr, given, leaving, split=walk.split, hoisted=False), b, together)
        for b in eqn.params["branches"]
        for given in [itertools.compress(b.jaxpr.invars, varies)]
    ]
    return leave_branches(
        eqn, branches, leaving, index_varies, varies, ins, split=walk.split, together=together
    )


RULES: dict[Primitive, Callable[[Walk, JaxprEqn, Sequence[Any], bool], list[Any]]] = {
    **dict.fromkeys(LOOPS, _from_loop),
    primitives.cond_p: _from_branches,
}
