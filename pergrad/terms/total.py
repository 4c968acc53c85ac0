"""A plain sum over positions (a bias, a norm's scale), and any value that no rule takes apart.

The sum stays in the backbone, where it is formed for every example: it is smaller than what it sums.
So the term is the value itself, and its only factor.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._eval import Env
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
        value = env[self.out].astype(accumulation_dtype(aval(self.out).dtype))
        return jnp.sum(weigh(value, w), axis=0)
