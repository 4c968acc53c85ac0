"""The ways of terms through steps that select entries and multiply them by numbers.

The steps of a tail are linear, so that a gradient is the sum of A t over the terms t, where A stands for
the steps that lead from t to the gradient. If every entry e of the gradient takes in one entry of t at
most, the number s(e), then

    (A t)[e] = c[e] t[s(e)],   or 0 if e takes in no entry of t.

If, besides, no entry of t goes to several places, A^T 1 has for each entry of t the number that it is
multiplied by on its way. With R like A, but with c = 1, R^T 1 is not 0 for exactly those entries of t
that arrive in the gradient. Both are arrays shaped like the term, the same for all examples. If a loss
sets a row to 0 before it looks the row up, the row's entries do not arrive.

Two ways have the same layout if an entry that arrives on both arrives at the same place.
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
    """One step on a way, which leads from one of the step's operands to one of its results.

    `operand` and `result` are the places of the two among the operands and the results.
    """

    step: JaxprEqn
    operand: int
    result: int

    @property
    def family(self) -> str:
        """The family of the step: "move", "scale" or "mix"."""
        return STEPS[self.step.primitive].family

    @property
    def replaces(self) -> bool:
        """Whether the step replaces some entries, by 0 or another term's, and keeps the others."""
        return self.step.primitive in REPLACING

    @property
    def stays(self) -> bool:
        """Whether the step leaves all entries in their places."""
        return self.step.primitive in STAYING or self.family == "scale"

    @property
    def growth(self) -> int:
        """How many more entries there are after the step than before it."""
        return size(self.step.outvars[self.result]) - size(self.step.invars[self.operand])

    @property
    def layout(self) -> Any:
        """A description of where entries go. If it is equal for two steps, they do the same in this."""
        places = self.step.invars[1:] if self.family == "move" else []
        return self.step.primitive, self.step.params, self.result, places


@dataclasses.dataclass(frozen=True)
class Way:
    """The way from a term of a tail to one of the tail's gradients; `strides` are in running order."""

    tail: Tail
    term: Term
    strides: tuple[Stride, ...]

    @property
    def layout(self) -> list[Any]:
        """A description of where entries go. If it is equal for two ways, they have the same layout."""
        return [stride.layout for stride in self.strides if not stride.stays]

    @property
    def repeats(self) -> bool:
        """Whether an entry of the term may go to several places."""
        return any(stride.family == "move" and stride.growth > 0 for stride in self.strides)

    @property
    def replaces(self) -> bool:
        """Whether a step on the way replaces some entries."""
        return any(stride.replaces for stride in self.strides)

    @property
    def drops(self) -> bool:
        """Whether an entry of the term may not arrive."""
        return self.replaces or any(not stride.stays and stride.growth for stride in self.strides)

    @property
    def scales(self) -> list[JaxprEqn]:
        """The steps on the way that multiply entries by numbers."""
        return [stride.step for stride in self.strides if stride.family == "scale"]

    @property
    def has_one_number(self) -> bool:
        """Whether all entries are multiplied by one and the same number."""
        numbers = [v for step in self.scales for v in step.invars if v is not self.tail.operand(step)]
        return all(size(v) == 1 for v in numbers)

    def number(self, env: Env, dtype: Any) -> jax.Array:
        """A^T 1, or one number if all entries are multiplied by the same.

        The array A^T 1 is only meant for the entries that arrive. `env` has the values of the constants.
        """
        if not self.has_one_number:
            return self._transposed(env, dtype, scales=True)
        numbers = (self.tail.number_of(step, env, dtype).reshape(()) for step in self.scales)
        return math.prod(numbers, start=jnp.ones((), dtype))

    def arrives(self, env: Env, dtype: Any) -> jax.Array:
        """R^T 1, which is not 0 for exactly those entries of the term that arrive in the gradient."""
        return self._transposed(env, dtype, replaces=True)

    def moved(self, env: Env, x: jax.Array) -> jax.Array:
        """R x for an array `x` shaped like the term, which must be 0 for entries that do not arrive."""
        return self._walked(env, x)

    def moved_back(self, env: Env, x: jax.Array) -> jax.Array:
        """R^T x, shaped like the term, for an array `x` shaped like the gradient."""
        like = jnp.zeros(aval(self.term.out).shape, x.dtype)
        return jax.vjp(lambda y: self._walked(env, y), like)[1](x)[0]

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
        """The result of one step for the operand `x`, with zeros for what comes from other terms."""
        step = stride.step
        from_terms = [v for v in distinct(step.invars) if v in self.tail.on_the_way]
        env = env | {v: jnp.zeros(aval(v).shape, x.dtype) for v in from_terms}
        env |= zip(distinct([step.invars[stride.operand]]), [x], strict=True)
        evaluate_wide([step], env)
        return env[step.outvars[stride.result]]


def ways_to(tail: Tail, place: int) -> list[Way] | None:
    """The ways of all terms to the gradient at `place`; None if a step on a way mixes entries."""
    ways: dict[Var, tuple[Stride, ...]] = {v: () for v in distinct([tail.grads[place]])}
    for step in reversed(tail.steps):
        rule = STEPS[step.primitive]
        for result, out in enumerate(step.outvars):
            for operand, v in enumerate(step.invars if out in ways else []):
                if isinstance(v, Literal) or v not in tail.on_the_way:
                    continue
                stride = Stride(step, operand, result)
                mixes = not rule.takes_single_entries(step, operand)
                if mixes or v in ways or (rule.family == "scale" and stride.growth):
                    return None
                ways[v] = (stride, *ways[out])
    return [Way(tail, term, ways[term.out]) for term in tail.terms if term.out in ways]


def of_nothing(tail: Tail, place: int, env: Env, dtype: Any) -> jax.Array | None:
    """A 0: what the steps make of terms that are 0, laid out like the gradient at `place`.

    It is NaN where a number that entries are multiplied by is not finite, and 0 elsewhere. The result is
    None if no step multiplies by a number, since all of it would be 0.
    """
    if not tail.steps_that("scale"):
        return None
    env = env | {term.out: jnp.zeros(aval(term.out).shape, dtype) for term in tail.terms}
    evaluate_wide(tail.steps, env)
    return widen(read(env, tail.grads[place]))
