"""A product of two saved arrays, summed over positions: the gradient of every dense layer.

For one example, with X its inputs and D its residuals, both with a row per position t,

    g = sum_t X_t D_t^T = X^T D,

a `dot_general` whose contracted axes are the positions. Over examples i the sum
sum_i w_i X_i^T D_i is the same product with the examples as one more contracted axis. With one
position g is an outer product, and an elementwise phi with phi(ab) = phi(a) phi(b) goes inside:

    sum_i w_i phi(X_i^T D_i) = sum_i w_i phi(X_i)^T phi(D_i).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax import lax

from pergrad._compat import JaxprEqn, Var
from pergrad._eval import Env, read
from pergrad._statistics import accumulation_dtype, weigh
from pergrad.terms._term import Term


@dataclasses.dataclass(frozen=True)
class Product(Term):
    kind = "product"

    eqn: JaxprEqn

    @staticmethod
    def match(
        eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]
    ) -> Product | None:
        if len(varying) < 2:
            return None
        return Product(eqn, eqn.outvars[0], tuple(dict.fromkeys(eqn.invars)))

    @property
    def contributions(self) -> int:
        (contracted, _), _ = self.eqn.params["dimension_numbers"]
        return math.prod(self.eqn.invars[0].aval.shape[a] for a in contracted)

    def mean(self, env: Env, w: jax.Array | None, count: jax.Array) -> jax.Array:
        total = self.sum_of(lambda x: x, env, w)
        return total / count.astype(total.dtype)

    def sum_of(self, phi: Callable[[Any], Any], env: Env, w: jax.Array | None) -> jax.Array:
        """sum_i w_i phi(X_i)^T phi(D_i), kept in float32 at least."""
        x, d = (phi(read(env, v)) for v in self.eqn.invars)
        dtype = accumulation_dtype(self.out.aval.dtype)
        if w is not None:
            present = (w > 0).astype(dtype)
            x, d = weigh(x.astype(dtype), w), weigh(d.astype(dtype), present)
        (xc, dc), (xb, db) = self.eqn.params["dimension_numbers"]
        return lax.dot_general(
            x,
            d,
            (((0, *_shift(xc)), (0, *_shift(dc))), (_shift(xb), _shift(db))),
            precision=self.eqn.params["precision"],
            preferred_element_type=dtype,
        )


def _shift(axes: Collection[int]) -> tuple[int, ...]:
    """The same axes, behind the example axis."""
    return tuple(a + 1 for a in axes)
