"""What the backward pass starts from: 1, or the weight of an example.

A gradient is linear in the cotangent of the loss that the backward pass starts from. With the weight w
in place of 1, as `jax.grad` of a mean has it, the examples' gradients come out as w g_i, and their mean
is a plain sum: no factor is multiplied by w, and copied for that. Statistics of g_i itself divide by w
what came from the cotangent, where they pass over it anyway:

    sum_i w g_i = X^T D_w        sum_i w phi(g_i) = phi(X)^T (w phi(D_w / w))        with D_w = w D.

So it is done where all other statistics do pass over the factors, and all examples have the same
weight. It is not done where a gradient is not known to be linear in the cotangent (a `custom_vjp` may
clip what it is given, or take no notice of it), nor in half precision, which would round the weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import jax

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._cut import STEPS, Examples, Tail, Total, adds, is_zero
from pergrad._ir import ONE_TO_ONE, accumulation_dtype, is_in, weigh
from pergrad._plan.choose import Choice, Phase, TailPlan
from pergrad._statistics import Accumulator, LeafStatistic
from pergrad._strategies import Summed
from pergrad._trace import Program


def start_from_weight(
    program: Program, tails: Sequence[TailPlan]
) -> tuple[tuple[TailPlan, ...], frozenset[Var]]:
    """The tails, and what is w times its value when the backward pass starts from w.

    Nothing is if it should start from 1; otherwise mean gradients are summed on their own.
    """
    weighed = _linear_in_cotangent(program) if all(map(_passes_over_factors, tails)) else None
    return (tuple(tails), frozenset()) if weighed is None else (tuple(map(_apart, tails)), weighed)


def seen_by(choice: Choice, tail: Tail, examples: Examples, weighed: Collection[Var]) -> Examples:
    """What a strategy is given of examples for which the backward pass started from their weight."""
    w = examples.weights
    assert isinstance(w, float)
    if all(map(_is_sum, choice.statistics)):
        return dataclasses.replace(examples, weights=1.0)

    def divided(vs: Sequence[Var], xs: Sequence[jax.Array]) -> list[jax.Array]:
        return [weigh(x, 1 / w) if v in weighed else x for v, x in zip(vs, xs, strict=True)]

    factors, constants = examples.factors, examples.constants
    return dataclasses.replace(
        examples, factors=divided(tail.factors, factors), constants=divided(tail.constants, constants)
    )


def _passes_over_factors(t: TailPlan) -> bool:
    """Whether factors are summed up, after something elementwise, and nothing else is done with them."""
    forms = any(not isinstance(term, Total) for term in t.tail.terms)
    names = ("summed", "factored") if forms else ("summed", "factored", "materialise")
    return not t.hands_out_factors and all(
        choice.phase is Phase.FIRST and choice.strategy.name in names for choice in t.choices
    )


def _apart(t: TailPlan) -> TailPlan:
    """The tail with its mean gradients summed, whatever is done for other statistics."""
    choices = []
    for choice in t.choices:
        for strategy, wants_sums in ((Summed(), True), (choice.strategy, False)):
            own = tuple(s for s in choice.statistics if _is_sum(s) is wants_sums)
            choices += [dataclasses.replace(choice, strategy=strategy, statistics=own)] if own else []
    return dataclasses.replace(t, choices=tuple(choices))


def _is_sum(statistic: LeafStatistic) -> bool:
    return isinstance(statistic, Accumulator) and statistic.is_sum


def _linear_in_cotangent(program: Program) -> frozenset[Var] | None:
    """What depends on the cotangent, if all of that and the gradients are linear in it, and wide."""
    found = {program.cotangent}
    made_by: dict[Var, JaxprEqn] = {}
    for eqn in program.jaxpr.eqns:
        made_by |= dict.fromkeys(eqn.outvars, eqn)
        operands = [i for i, v in enumerate(eqn.invars) if is_in(v, found)]
        if eqn.primitive in ONE_TO_ONE:
            found |= {eqn.outvars[i] for i in operands}
        elif operands:
            step = STEPS.get(eqn.primitive)
            if step is None or not step.is_linear(eqn, operands) or adds(eqn, operands, made_by):
                return None
            found |= set(eqn.outvars)
    if not all(is_in(grad, found) or is_zero(grad, made_by) for grad in program.grads):
        return None
    dtypes = {aval(v).dtype for v in found}
    return frozenset(found) if all(accumulation_dtype(d) == d for d in dtypes) else None
