"""Norms and inner products of gradients from the factors, without the gradients.

For a product g = X^T D with T positions,

    ||g||^2 = <X X^T, D D^T>        and        <g_i, g_j> = <X_i X_j^T, D_i D_j^T>,

That takes T^2 (a + b) multiplications, while forming a gradient [a, b] takes T a b. With one position
the squared norm is ||x||^2 ||d||^2. If the steps after the product only move its entries and multiply
them by one number c, squared norms and inner products are c^2 times as large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._cut import Examples, Product, Tail
from pergrad._statistics import LeafStatistic, Quantity
from pergrad._strategies.base import Job, Strategy
from pergrad._strategies.work import Work


@dataclasses.dataclass(frozen=True)
class InnerProducts(Strategy):
    """The strategy that computes norms and inner products of gradients from inner products of factors.

    `batched` says whether all examples share one batched product, or each has a product of its own.
    """

    name = "gram"

    batched: bool = False

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if statistic.quantity not in (Quantity.SQUARED_NORMS, Quantity.PAIRS):
            return "not a norm or an inner product"
        if len(tail.terms) != 1 or not isinstance(tail.terms[0], Product):
            return "not a single product"
        return tail.why_not_similar()

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # B F_g / product rate + 2 f / memory rate + B rounds, or, if batched, B F_g / batched rate +
        # 2 f / memory rate. The inner products of all pairs take B times as many operations.
        operations = work.size * _operations_of_one(work) * _others(work, statistic)
        device = work.device
        rate = device.batched_rate if self.batched else device.product_rate
        rounds = 0 if self.batched else work.size * device.loop_round
        return operations / rate + work.moving(2 * work.factors) + rounds

    def operations(self, work: Work, statistics: Sequence[LeafStatistic]) -> float:
        others = (_others(work, statistic) for statistic in statistics)
        return sum(others) * work.size * _operations_of_one(work)

    def temporary_bytes(self, work: Work) -> float:
        return 2 * work.positions**2 * 4 if work.positions > 1 else 0

    def reason(self, work: Work) -> str:
        return "inner products of the factors"

    def fitted(self, work: Work, at_a_time: int | None) -> InnerProducts:
        """The batched variant if one batched product takes less time than a loop of single products."""
        operations, device = _operations_of_one(work), work.device
        looped = operations / device.product_rate + device.loop_round
        return InnerProducts(batched=operations / device.batched_rate < looped)

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        (product,) = tail.terms
        assert isinstance(product, Product)
        env = tail.env(examples.factors, examples.constants)
        x, d = product.in_rows(env)
        square = jnp.square(tail.similarity(env, x.dtype))

        def quantity(job: Job) -> jax.Array:
            of_pairs = job.statistic.quantity is Quantity.PAIRS
            return square * (self._pairs(x, d, examples) if of_pairs else self._norms(x, d))

        return [job.from_quantity(quantity(job)) for job in jobs]

    def _norms(self, x: jax.Array, d: jax.Array) -> jax.Array:
        if x.shape[2] == 1:
            return jnp.sum(_squares(x) * _squares(d), axis=1)

        def norm(x: jax.Array, d: jax.Array) -> jax.Array:
            return jnp.sum(jnp.einsum("gta,gsa->gts", x, x) * jnp.einsum("gtb,gsb->gts", d, d))

        return self._map(norm, x, d)

    def _pairs(self, x: jax.Array, d: jax.Array, examples: Examples) -> jax.Array:
        own_x, own_d = (examples.those_here(a) for a in (x, d))
        x, d = (examples.the_others(a) for a in (x, d))

        def row(x_i: jax.Array, d_i: jax.Array) -> jax.Array:
            xs, ds = jnp.einsum("gta,jgsa->gtjs", x_i, x), jnp.einsum("gtb,jgsb->gtjs", d_i, d)
            return jnp.sum(xs * ds, axis=(0, 1, 3))

        if x.shape[1] == x.shape[2] == 1:
            return (own_x[:, 0, 0] @ x[:, 0, 0].T) * (own_d[:, 0, 0] @ d[:, 0, 0].T)
        return self._map(row, own_x, own_d)

    def _map(self, f: Callable[..., jax.Array], x: jax.Array, d: jax.Array) -> jax.Array:
        return jax.vmap(f)(x, d) if self.batched else lax.map(lambda xd: f(*xd), (x, d))


def _squares(x: jax.Array) -> jax.Array:
    """The squared norm of each matrix, which has one row."""
    return jnp.sum(jnp.square(x), axis=(2, 3))


def _others(work: Work, statistic: LeafStatistic) -> int:
    """With how many gradients an inner product of each is taken."""
    return work.size if statistic.quantity is Quantity.PAIRS else 1


def _operations_of_one(work: Work) -> float:
    """F_g = 2 T^2 (a + b): the operations for the norm of one example's gradient, from its factors."""
    return 2 * work.positions * work.factor_numbers
