"""A plain sum over positions (a bias, a norm's scale), and any value that no rule takes apart.

The sum stays in the backbone, where it is formed for every example: it is smaller than what it sums.
So the term is the value itself, and its only factor: a `Total`. Where its single contributions are asked
for, the sum is a term with what it sums as its factor: a `Sum`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._eval import Env, distinct
from pergrad._statistics import Weights, accumulation_dtype, weigh
from pergrad.terms._term import Term


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
    def is_sum(self) -> bool:
        return self.made_by is not None and self.made_by.primitive is primitives.reduce_sum_p

    def sum(self, env: Env, w: Weights) -> jax.Array:
        return jnp.sum(weigh(_wide(env[self.out], self.out), w), axis=0)

    def split(self, env: Env) -> list[jax.Array]:
        return [env[self.out][:, None]]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        return _wide(parts[0], self.out)


@dataclasses.dataclass(frozen=True)
class Sum(Term):
    eqn: JaxprEqn

    @property
    def kind(self) -> str:
        return "sum"

    @staticmethod
    def match(eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]) -> Sum | None:
        return Sum(eqn, eqn.outvars[0], distinct(eqn.invars))

    @property
    def _axes(self) -> tuple[int, ...]:
        """The axes that are summed, behind the example axis."""
        return tuple(a + 1 for a in self.eqn.params["axes"])

    @property
    def contributions(self) -> int:
        shape = aval(self.factors[0]).shape
        return math.prod(shape[a] for a in self.eqn.params["axes"])

    def sum(self, env: Env, w: Weights) -> jax.Array:
        value = _wide(env[self.factors[0]], self.out)
        return jnp.sum(weigh(value, w), axis=(0, *self._axes))

    def split(self, env: Env) -> list[jax.Array]:
        x, axes = env[self.factors[0]], self._axes
        x = jnp.moveaxis(x, axes, range(1, 1 + len(axes)))
        return [x.reshape(len(x), self.contributions, *x.shape[1 + len(axes) :])]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        return _wide(parts[0], self.out)


def _wide(x: jax.Array, out: Var) -> jax.Array:
    return x.astype(accumulation_dtype(aval(out).dtype))
