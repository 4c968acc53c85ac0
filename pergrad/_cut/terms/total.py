"""A plain sum over positions (a bias, a norm's scale), and any value that no rule takes apart.

Such a sum stays in the backbone, where it is formed for every example, because the sum is smaller than
its operand. So the term is a `Total`: its value is its only factor. If the single contributions to the
sum are asked for, the term is a `Sum`, whose factor is the array that is summed.
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
    """A value that the backbone makes for every example.

    `made_by` is the equation of the backbone that makes the value, if there is one. `origin` says in
    words which primitive made its entries.
    """

    made_by: JaxprEqn | None = None
    origin: str = ""

    @property
    def kind(self) -> str:
        return "sum" if self.is_sum else "value"

    @staticmethod
    def of(value: Var, made_by: JaxprEqn | None, origin: str) -> Total:
        """The term whose only factor is its value."""
        return Total(None, value, (value,), made_by, origin)

    @property
    def is_value(self) -> bool:
        return True

    @property
    def why_formed(self) -> str | None:
        return None if self.is_sum or self.made_by is None else self.origin

    @property
    def is_sum(self) -> bool:
        """Whether the backbone makes the value with a plain sum."""
        return self.made_by is not None and self.made_by.primitive is primitives.reduce_sum_p

    def sum(self, env: Env, w: Weights) -> jax.Array:
        return jnp.sum(weigh(widen(env[self.out]), w), axis=0)

    def split(self, env: Env) -> list[jax.Array]:
        return [env[self.out][:, None]]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        return parts[0].astype(accumulation_dtype(aval(self.out).dtype))


@dataclasses.dataclass(frozen=True)
class Sum(Term):
    """The sum of an array over its axes `axes`, which several equations may take one after the other."""

    eqn: JaxprEqn
    axes: tuple[int, ...]

    @property
    def kind(self) -> str:
        return "sum"

    @staticmethod
    def match(eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]) -> Sum | None:
        """The term of a chain of sums that ends with `eqn`; None if no axis longer than 1 is summed."""
        # The chain goes back from `eqn` to the first sum, through equations that are sums themselves or
        # that only add or drop axes of length 1.
        chain = [eqn]
        while (before := made_by.get(_operand(chain[-1]))) is not None and _keeps_or_sums_axes(before):
            chain.append(before)
        while not _is_sum(chain[-1]):
            chain.pop()
        factor = _operand(chain[-1])
        kept = _long_axes(aval(factor).shape)
        for link in reversed(chain):
            if _is_sum(link):
                here = _long_axes(aval(link.invars[0]).shape)
                stays = [a not in link.params["axes"] for a in here]
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
    """Whether an equation is a sum, or only adds or drops axes of length 1 (or casts)."""
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
    """The axes that are not of length 1."""
    return [a for a, n in enumerate(shape) if n != 1]
