"""The ways of terms through steps that select entries and multiply them by numbers.

The steps are linear, so that a gradient is a sum of what they make of each term t. If every entry of it
takes in one entry of t at most, they make of t

    (A t)[e] = c[e] t[s(e)],   or 0 where no entry comes in,

and if no entry of t is repeated, A^T 1 says for each of them by what it is multiplied on its way, and
R^T 1, with R like A but with c = 1, whether it arrives at all. Both are arrays like the term, the same
for all examples. A row that is set to 0 before it is looked up is one that does not arrive.

Two ways have the same layout if an entry that arrives on both comes to the same place on both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pergrad._compat import JaxprEqn, Literal, Var, aval
from pergrad._cut.steps import REPLACING, STAYING, STEPS
from pergrad._cut.tail import Tail
from pergrad._cut.terms import Term
from pergrad._ir import Env, distinct, evaluate_wide, read, size, widen


class Stride(NamedTuple):
    """One step on a way: from which of its operands to which of its results."""

    step: JaxprEqn
    operand: int
    result: int

    @property
    def family(self) -> str:
        return STEPS[self.step.primitive].family

    @property
    def replaces(self) -> bool:
        """Whether some entries become 0, or another term's, and the others stay in their places."""
        return self.step.primitive in REPLACING

    @property
    def stays(self) -> bool:
        """Whether all entries have the places that they had before."""
        return self.step.primitive in STAYING or self.family == "scale"

    @property
    def growth(self) -> int:
        """How many more entries there are than before."""
        return size(self.step.outvars[self.result]) - size(self.step.invars[self.operand])

    @property
    def layout(self) -> Any:
        """Where entries go; equal for steps that bring them to the same places."""
        places = self.step.invars[1:] if self.family == "move" else []
        return self.step.primitive, self.step.params, self.result, places


@dataclasses.dataclass(frozen=True)
class Way:
    """The way of one term of a tail to one of its gradients."""

    tail: Tail
    term: Term
    strides: tuple[Stride, ...]

    @property
    def layout(self) -> list[Any]:
        """Two ways with equal lists bring entries to the same places."""
        return [stride.layout for stride in self.strides if not stride.stays]

    @property
    def repeats(self) -> bool:
        """Whether an entry of the term may come to several places."""
        return any(stride.family == "move" and stride.growth > 0 for stride in self.strides)

    @property
    def replaces(self) -> bool:
        return any(stride.replaces for stride in self.strides)

    @property
    def drops(self) -> bool:
        """Whether an entry of the term may come to no place."""
        return self.replaces or any(not stride.stays and stride.growth for stride in self.strides)

    @property
    def scales(self) -> list[JaxprEqn]:
        return [stride.step for stride in self.strides if stride.family == "scale"]

    @property
    def has_one_number(self) -> bool:
        """Whether all entries are multiplied by one and the same number."""
        numbers = [v for step in self.scales for v in step.invars if v is not self.tail.operand(step)]
        return all(size(v) == 1 for v in numbers)

    def number(self, env: Env, dtype: Any) -> jax.Array:
        """A^T 1 for the entries that arrive, or the one number of all."""
        if not self.has_one_number:
            return self._transposed(env, dtype, scales=True)
        numbers = (self.tail.number_of(step, env, dtype).reshape(()) for step in self.scales)
        return math.prod(numbers, start=jnp.ones((), dtype))

    def arrives(self, env: Env, dtype: Any) -> jax.Array:
        """R^T 1: not 0 for each entry that comes to a place in the gradient."""
        return self._transposed(env, dtype, replaces=True)

    def moved(self, env: Env, x: jax.Array) -> jax.Array:
        """R x for an array `x` like the term that is 0 where entries do not arrive."""
        return self._walked(env, x)

    def _transposed(self, env: Env, dtype: Any, **does: bool) -> jax.Array:
        x = jnp.zeros(aval(self.term.out).shape, dtype)
        out, pull = jax.vjp(lambda x: self._walked(env, x, **does), x)
        return pull(jnp.ones(out.shape, out.dtype))[0]

    def _walked(
        self, env: Env, x: jax.Array, *, scales: bool = False, replaces: bool = False
    ) -> jax.Array:
        for stride in self.strides:
            if stride.family == "scale":
                x = x * self.tail.number_of(stride.step, env, x.dtype) if scales else x
            elif not stride.stays or (stride.replaces and replaces):
                x = self._taken(stride, env, x)
        return x

    def _taken(self, stride: Stride, env: Env, x: jax.Array) -> jax.Array:
        """One step, with zeros for what comes from other terms."""
        step = stride.step
        from_terms = [v for v in distinct(step.invars) if v in on_the_way(self.tail)]
        env = env | {v: jnp.zeros(aval(v).shape, x.dtype) for v in from_terms}
        env |= zip(distinct([step.invars[stride.operand]]), [x], strict=True)
        evaluate_wide([step], env)
        return env[step.outvars[stride.result]]


def ways_to(tail: Tail, place: int) -> list[Way] | None:
    """The ways of all terms to the gradient at `place`; None if entries mix on the way."""
    ways: dict[Var, tuple[Stride, ...]] = {v: () for v in distinct([tail.grads[place]])}
    for step in reversed(tail.steps):
        rule = STEPS[step.primitive]
        for result, out in enumerate(step.outvars):
            for operand, v in enumerate(step.invars if out in ways else []):
                if isinstance(v, Literal) or v not in on_the_way(tail):
                    continue
                stride = Stride(step, operand, result)
                mixes = not rule.takes_single_entries(step, operand)
                if mixes or v in ways or (rule.family == "scale" and stride.growth):
                    return None
                ways[v] = (stride, *ways[out])
    return [Way(tail, term, ways[term.out]) for term in tail.terms if term.out in ways]


def on_the_way(tail: Tail) -> set[Var]:
    """What comes from terms."""
    return {v for step in tail.steps for v in step.outvars} | {term.out for term in tail.terms}


def of_nothing(tail: Tail, place: int, env: Env, dtype: Any) -> jax.Array | None:
    """A 0: NaN where a number on the way is not finite, else 0; None if there is no number."""
    if not tail.steps_that("scale"):
        return None
    env = env | {term.out: jnp.zeros(aval(term.out).shape, dtype) for term in tail.terms}
    evaluate_wide(tail.steps, env)
    return widen(read(env, tail.grads[place]))
