"""A plain sum over positions (a bias, a norm's scale), and any value that no rule takes apart.

The sum stays in the backbone, where it is formed for every example: it is smaller than what it sums.
So the term is the value itself, and its only factor: a `Total`. Where its single contributions are asked
for, the sum is a term with what it sums as its factor: a `Sum`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from pergrad._compat import JaxprEqn, Literal, Var, aval
from pergrad._cut.terms._term import Term
from pergrad._ir import Env, Is, Weights, accumulation_dtype, those_that_are, weigh, widen


@dataclasses.dataclass(frozen=True)
class Total(Term):
    """`made_by` is the equation of the backbone that makes the value, if there is one.

    `origin` says in words what made its entries.
    """

    made_by: JaxprEqn | None = None
    origin: str = ""

    @property
    def kind(self) -> str:
        return "sum" if self.is_sum else "value"

    @staticmethod
    def of(value: Var, made_by: JaxprEqn | None, origin: str) -> Total:
        return Total(None, value, (value,), made_by, origin)

    @property
    def is_value(self) -> bool:
        return True

    @property
    def why_formed(self) -> str | None:
        return None if self.is_sum or self.made_by is None else self.origin

    @property
    def is_sum(self) -> bool:
        return self.made_by is not None and self.made_by.primitive is primitives.reduce_sum_p

    def sum(self, env: Env, w: Weights) -> jax.Array:
        return jnp.sum(weigh(widen(env[self.out]), w), axis=0)

    def split(self, env: Env) -> list[jax.Array]:
        return [env[self.out][:, None]]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        return parts[0].astype(accumulation_dtype(aval(self.out).dtype))


@dataclasses.dataclass(frozen=True)
class Sum(Term):
    """The sum over the axes `axes` of its factor, which may be taken in several equations."""

    eqn: JaxprEqn
    axes: tuple[int, ...]

    @property
    def kind(self) -> str:
        return "sum"

    @staticmethod
    def match(eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]) -> Sum | None:
        # From this sum back to the first one, through what leaves the axes as they are but for ones.
        chain = [eqn]
        while (before := made_by.get(_operand(chain[-1]))) is not None and _keeps_or_sums_axes(before):
            chain.append(before)
        while not _is_sum(chain[-1]):
            chain.pop()
        factor = _operand(chain[-1])
        kept = _long_axes(aval(factor).shape)
        for step in reversed(chain):
            if _is_sum(step):
                here = _long_axes(aval(step.invars[0]).shape)
                stays = [a not in step.params["axes"] for a in here]
                kept = list(itertools.compress(kept, stays))
        axes = tuple(a for a in _long_axes(aval(factor).shape) if a not in kept)
        return Sum(eqn, eqn.outvars[0], (factor,), axes) if axes else None

    @property
    def contributions(self) -> int:
        return math.prod(aval(self.factors[0]).shape[a] for a in self.axes)

    def form(self, env: Env) -> None:
        x = jnp.sum(env[self.factors[0]], axis=self.axes)
        env[self.out] = x.reshape(aval(self.out).shape).astype(aval(self.out).dtype)

    def sum(self, env: Env, w: Weights) -> jax.Array:
        value = env[self.factors[0]].astype(accumulation_dtype(aval(self.out).dtype))
        value = jnp.sum(weigh(value, w), axis=(0, *(a + 1 for a in self.axes)))
        return value.reshape(aval(self.out).shape)

    def split(self, env: Env) -> list[jax.Array]:
        x = env[self.factors[0]]
        x = jnp.moveaxis(x, [a + 1 for a in self.axes], range(1, 1 + len(self.axes)))
        return [x.reshape(len(x), self.contributions, *aval(self.out).shape)]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        return parts[0].astype(accumulation_dtype(aval(self.out).dtype))


def _is_sum(eqn: JaxprEqn) -> bool:
    return eqn.primitive is primitives.reduce_sum_p


def _keeps_or_sums_axes(eqn: JaxprEqn) -> bool:
    """Whether an equation is a sum, or leaves all entries where they are but for axes of length 1."""
    if _is_sum(eqn):
        return True
    if eqn.primitive not in KEEPING or isinstance(eqn.invars[0], Literal):
        return False
    before, after = (aval(v).shape for v in (eqn.invars[0], eqn.outvars[0]))
    return [n for n in before if n != 1] == [n for n in after if n != 1]


def _operand(eqn: JaxprEqn) -> Var:
    (v, *_) = eqn.invars
    assert isinstance(v, Var)
    return v


KEEPING = those_that_are(Is.IN_ORDER)


def _long_axes(shape: Sequence[int]) -> list[int]:
    return [a for a, n in enumerate(shape) if n != 1]
