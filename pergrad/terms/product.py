"""A product of two saved arrays, summed over positions: the gradient of every dense layer.

For one example, with X its inputs and D its residuals, both with a row per position t,

    g = sum_t X_t D_t^T = X^T D,

a `dot_general` whose contracted axes are the positions. Over examples i the sum
sum_i w_i X_i^T D_i is the same product with the examples as one more contracted axis. With one
position g is an outer product, and an elementwise phi with phi(ab) = phi(a) phi(b) goes inside:

    sum_i w_i phi(X_i^T D_i) = sum_i w_i phi(X_i)^T phi(D_i).

Inner products of two gradients do not need the gradients:

    <X^T D, Y^T E> = trace(D^T X Y^T E) = <X Y^T, D E^T>,

with products over features in place of positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._eval import Env, distinct, read
from pergrad._statistics import Weights, accumulation_dtype, weigh, weigh_factors
from pergrad.terms._term import Term, product


@dataclasses.dataclass(frozen=True)
class Product(Term):
    eqn: JaxprEqn

    @property
    def kind(self) -> str:
        return "product"

    @staticmethod
    def match(
        eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]
    ) -> Product | None:
        if len(varying) < 2:
            return None
        return Product(eqn, eqn.outvars[0], distinct(eqn.invars))

    @property
    def contributions(self) -> int:
        (contracted, _), _ = self.eqn.params["dimension_numbers"]
        return math.prod(aval(self.eqn.invars[0]).shape[a] for a in contracted)

    def form(self, env: Env) -> None:
        x, d = (read(env, v) for v in self.eqn.invars)
        env[self.out] = self._product(x, d, self.eqn.params["preferred_element_type"], examples=0)

    def sum(self, env: Env, w: Weights) -> jax.Array:
        return self.sum_of(lambda x: x, env, w)

    def sum_of(self, phi: Callable[[Any], Any], env: Env, w: Weights) -> jax.Array:
        """sum_i w_i phi(X_i)^T phi(D_i), kept in float32 at least."""
        x, d = (phi(read(env, v)) for v in self.eqn.invars)
        dtype = accumulation_dtype(aval(self.out).dtype)
        if isinstance(w, jax.Array):
            x, d = weigh_factors(x.astype(dtype), d.astype(dtype), w)
            return self._product(x, d, dtype, examples=1)
        # One weight for all goes where the fewest numbers are, but not into half-precision ones.
        if self.size <= min(x.size, d.size) or x.dtype != dtype:
            return weigh(self._product(x, d, dtype, examples=1), w)
        x, d = (weigh(x, w), d) if x.size <= d.size else (x, weigh(d, w))
        return self._product(x, d, dtype, examples=1)

    def split(self, env: Env) -> list[jax.Array]:
        contracted, _ = self.eqn.params["dimension_numbers"]
        parts = []
        for v, summed in zip(self.eqn.invars, contracted, strict=True):
            x = jnp.moveaxis(read(env, v), [a + 1 for a in summed], range(1, 1 + len(summed)))
            parts.append(x.reshape(len(x), self.contributions, *x.shape[1 + len(summed) :]))
        return parts

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        contracted, batched = self.eqn.params["dimension_numbers"]
        left = [
            tuple(a - sum(c < a for c in summed) for a in batch)
            for summed, batch in zip(contracted, batched, strict=True)
        ]
        x, d = parts
        dtype = accumulation_dtype(aval(self.out).dtype)
        return product(x, d, (((), ()), (left[0], left[1])), dtype)

    def in_rows(self, env: Env) -> tuple[jax.Array, jax.Array]:
        """X [B, batch, T, a] and D [B, batch, T, b], in float32 at least, from factors [B, ...]."""
        dtype = accumulation_dtype(aval(self.out).dtype)
        contracted, batched = self.eqn.params["dimension_numbers"]
        rows = []
        for v, summed, batch in zip(self.eqn.invars, contracted, batched, strict=True):
            x = read(env, v)
            free = [a for a in range(x.ndim - 1) if a not in (*summed, *batch)]
            x = x.transpose(0, *(a + 1 for a in (*batch, *summed, *free)))
            first, last = 1 + len(batch), x.ndim - len(free)
            sizes = math.prod(x.shape[1:first]), self.contributions, math.prod(x.shape[last:])
            rows.append(x.reshape(len(x), *sizes).astype(dtype))
        return rows[0], rows[1]

    def _product(self, x: Any, d: Any, dtype: Any, *, examples: int) -> jax.Array:
        """X^T D of one example (`examples=0`) or summed over an example axis in front (1).

        Contracted axes that are in front are merged into one, which is free. With several of them XLA
        would copy an operand.
        """
        (xc, dc), (xb, db) = self.eqn.params["dimension_numbers"]
        xc, dc = ((*range(examples), *(a + examples for a in axes)) for axes in (xc, dc))
        xb, db = (tuple(a + examples for a in axes) for axes in (xb, db))
        if xc == dc == tuple(range(len(xc))) and not xb:
            positions = math.prod(x.shape[: len(xc)])
            x, d = (a.reshape(positions, *a.shape[len(xc) :]) for a in (x, d))
            xc, dc = (0,), (0,)
        return product(x, d, ((xc, dc), (xb, db)), dtype, self.eqn.params["precision"])
