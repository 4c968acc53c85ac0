"""What the backward pass starts from: 1, or the weight of an example.

A gradient is linear in the cotangent of the loss, from which the backward pass starts. If it starts from
the weight w in place of 1, as in `jax.grad` of a mean, the examples' gradients come out as w g_i, and
their mean is a plain sum. So no factor has to be copied to multiply it by w. Statistics that need g_i
itself divide the factors that depend on the cotangent by w, in a pass that they make over the factors
anyway:

    sum_i w g_i = X^T D_w        sum_i w phi(g_i) = phi(X)^T (w phi(D_w / w))        with D_w = w D.

So the backward pass starts from the weight if all examples have the same weight, and if every other
statistic makes such a pass. It starts from 1 if a gradient is not known to be linear in the cotangent (a
`custom_vjp` may clip its cotangent, or ignore it), and also in half precision, which would round the
weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._cut import STEPS, adds, is_zero
from pergrad._ir import ONE_TO_ONE, accumulation_dtype, dependents, is_in
from pergrad._plan.choose import TailPlan
from pergrad._statistics import Phase
from pergrad._strategies import Summed
from pergrad._trace import Program


def start_from_weight(
    program: Program, tails: Sequence[TailPlan]
) -> tuple[tuple[TailPlan, ...], frozenset[Var]]:
    """The plans of the tails, and the variables that carry the weight w of an example as a factor.

    If there are no such variables, the backward pass starts from 1. If there are some, it starts from w,
    and mean gradients have a choice of their own in the plans.
    """
    weighed = _linear_in_cotangent(program) if all(map(_passes_over_factors, tails)) else None
    return (tuple(tails), frozenset()) if weighed is None else (tuple(map(_apart, tails)), weighed)


def _passes_over_factors(t: TailPlan) -> bool:
    """Whether all statistics of the tail sum up its factors after elementwise operations."""
    return not t.hands_out_factors and all(
        choice.phase is Phase.FIRST and choice.strategy.sums_factors(t.tail) for choice in t.choices
    )


def _apart(t: TailPlan) -> TailPlan:
    """The plan of a tail, changed so that its mean gradients are summed by a choice of their own."""
    choices = []
    for choice in t.choices:
        for strategy, wants_sums in ((Summed(), True), (choice.strategy, False)):
            own = tuple(s for s in choice.statistics if s.is_sum is wants_sums)
            choices += [dataclasses.replace(choice, strategy=strategy, statistics=own)] if own else []
    return dataclasses.replace(t, choices=tuple(choices))


def _linear_in_cotangent(program: Program) -> frozenset[Var] | None:
    """The variables that depend on the cotangent, or None if the backward pass must start from 1.

    It must unless all of these variables and all gradients are linear in the cotangent, and none of the
    variables is in half precision.
    """
    found = dependents(program.jaxpr.eqns, {program.cotangent})
    made_by: dict[Var, JaxprEqn] = {}
    for eqn in program.jaxpr.eqns:
        made_by |= dict.fromkeys(eqn.outvars, eqn)
        operands = [i for i, v in enumerate(eqn.invars) if is_in(v, found)]
        if operands and eqn.primitive not in ONE_TO_ONE:
            step = STEPS.get(eqn.primitive)
            if step is None or not step.is_linear(eqn, operands) or adds(eqn, operands, made_by):
                return None
    if not all(is_in(grad, found) or is_zero(grad, made_by) for grad in program.grads):
        return None
    dtypes = {aval(v).dtype for v in found}
    return frozenset(found) if all(accumulation_dtype(d) == d for d in dtypes) else None
