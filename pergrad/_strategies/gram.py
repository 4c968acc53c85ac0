"""Norms and inner products of gradients from the factors, without the gradients.

For a product g = X^T D with T positions,

    ||g||^2 = <X X^T, D D^T>        and        <g_i, g_j> = <X_i X_j^T, D_i D_j^T>,

T^2 (a + b) multiplications in place of the T a b that forming a gradient [a, b] takes. With one position
it is ||x||^2 ||d||^2. A gradient that is c times the moved entries of such a product has c^2 times that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._cut import Examples, Product, Tail
from pergrad._statistics import LeafStatistic, Pairs, SquaredNorm
from pergrad._strategies.base import Job, Strategy


@dataclasses.dataclass(frozen=True)
class Gram(Strategy):
    """`batched` says whether the products of all examples are one batched product, or single ones."""

    name = "gram"

    batched: bool = False

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if not isinstance(statistic, (SquaredNorm, Pairs)):
            return "not a norm or an inner product"
        if len(tail.terms) != 1 or not isinstance(tail.terms[0], Product):
            return "not a single product"
        return tail.why_not_similar()

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        (product,) = tail.terms
        assert isinstance(product, Product)
        env = tail.env(examples.factors, examples.constants)
        x, d = product.in_rows(env)
        square = jnp.square(tail.similarity(env, x.dtype))
        return [
            square
            * (self._pairs(x, d, examples) if isinstance(job.statistic, Pairs) else self._norms(x, d))
            for job in jobs
        ]

    def _norms(self, x: jax.Array, d: jax.Array) -> jax.Array:
        if x.shape[2] == 1:
            return jnp.sum(_squares(x) * _squares(d), axis=1)

        def norm(x: jax.Array, d: jax.Array) -> jax.Array:
            return jnp.sum(jnp.einsum("gta,gsa->gts", x, x) * jnp.einsum("gtb,gsb->gts", d, d))

        return self._map(norm, x, d)

    def _pairs(self, x: jax.Array, d: jax.Array, examples: Examples) -> jax.Array:
        def row(x_i: jax.Array, d_i: jax.Array) -> jax.Array:
            xs, ds = jnp.einsum("gta,jgsa->gtjs", x_i, x), jnp.einsum("gtb,jgsb->gtjs", d_i, d)
            return jnp.sum(xs * ds, axis=(0, 1, 3))

        if x.shape[1] == x.shape[2] == 1:
            x, d = x[:, 0, 0], d[:, 0, 0]
            return (examples.those_here(x) @ x.T) * (examples.those_here(d) @ d.T)
        return self._map(row, examples.those_here(x), examples.those_here(d))

    def _map(self, f: Callable[..., jax.Array], x: jax.Array, d: jax.Array) -> jax.Array:
        return jax.vmap(f)(x, d) if self.batched else lax.map(lambda xd: f(*xd), (x, d))


def _squares(x: jax.Array) -> jax.Array:
    """The squared norm of the only row of each matrix."""
    return jnp.sum(jnp.square(x), axis=(2, 3))
