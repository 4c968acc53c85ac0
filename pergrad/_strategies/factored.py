"""E[phi(g)] as one matrix product, for every phi with phi(ab) = phi(a) phi(b).

The tail must be one outer product g = x d^T per example, followed by steps that only move entries or
multiply them by numbers. Then

    sum_i w_i phi(g_i) = sum_i w_i phi(x_i) phi(d_i)^T = phi(X)^T diag(w) phi(D),

which is a product over the examples, and phi(c g) = phi(c) phi(g) for a number c.

Floating-point numbers need care that depends on the degree p of phi, |phi(g)| = |g|^p. For p > 1, phi of
a factor may overflow or underflow where phi(g) does not, so the factors are balanced first
(`Product.balanced`). For p = 0, the sign, 0 * inf is NaN but phi(0) phi(inf) is 0. So phi of an infinite
entry is set to NaN if the other factor of the same example has a zero. The sum is then NaN wherever
phi(g) is NaN, and possibly also where g is infinite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from pergrad._cut import Examples, Product, Tail
from pergrad._ir import Env
from pergrad._statistics import LeafStatistic, WeightedSum
from pergrad._strategies.base import Job, Strategy
from pergrad._strategies.work import Work


@dataclasses.dataclass(frozen=True)
class Factored(Strategy):
    """The strategy that applies phi to the factors and multiplies them over all examples."""

    name = "factored"

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if not isinstance(statistic, WeightedSum):
            return "not a mean"
        if not statistic.is_factorable:
            return "phi is not known to be factorable"
        return why_not_an_outer_product(tail)

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # (B F_t + F_s) / product rate + (2 f + g) / memory rate for each statistic
        products = work.summing_operations / work.device.product_rate
        return products + work.moving(2 * work.factors + work.gradient)

    def operations(self, work: Work, statistics: Sequence[LeafStatistic]) -> float:
        return len(statistics) * work.summing_operations

    def temporary_bytes(self, work: Work) -> float:
        return work.factors

    def reason(self, work: Work) -> str:
        return "an outer product for each"

    def sums_factors(self, tail: Tail) -> bool:
        return True

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        means = [cast(WeightedSum, job.statistic) for job in jobs]
        sums = [sum_of_phi(tail, mean, examples) for mean in means]
        return [job.from_quantity(x) for job, x in zip(jobs, sums, strict=True)]


def sum_of_phi(tail: Tail, mean: WeightedSum, examples: Examples, *, in_full: bool = False) -> jax.Array:
    """sum_i w_i phi(g_i) for the phi of `mean`, from the factors of outer products g_i.

    With `in_full` the product keeps all digits of the factors that float32 has.
    """
    (product,) = tail.terms
    assert isinstance(product, Product)
    env = tail.env(examples.factors, examples.constants)
    factors = _phi_of_factors(product, mean, env)
    env[product.out] = product.sum_of(*factors, examples.weights, in_full=in_full)
    return tail.moved_and_scaled(env, lambda step, x: x * mean.apply(tail.number_of(step, env, x.dtype)))


def _phi_of_factors(product: Product, mean: WeightedSum, env: Env) -> tuple[jax.Array, jax.Array]:
    """phi(X) and phi(D), adjusted so that their product is NaN wherever phi of the gradient is NaN."""
    x, d = product.read(env)
    if mean.is_sum:
        return x, d
    if mean.degree is None or mean.degree > 1:
        x, d = product.balanced(x, d)
    of_x, of_d = mean.apply(x), mean.apply(d)
    if mean.degree is not None and mean.degree > 0:
        return of_x, of_d
    x_zeros, d_zeros = product.beside_zeros(x, d)
    x_hides, d_hides = (jnp.isinf(a) & jnp.isfinite(b) for a, b in ((x, of_x), (d, of_d)))
    return jnp.where(x_hides & x_zeros, jnp.nan, of_x), jnp.where(d_hides & d_zeros, jnp.nan, of_d)


def why_not_an_outer_product(tail: Tail) -> str | None:
    """Why one example's gradient is not an outer product with moved and scaled entries, or None."""
    if len(tail.terms) != 1 or not isinstance(tail.terms[0], Product):
        return "not a single product"
    if tail.terms[0].contributions != 1:
        return "sums over positions"
    if len(tail.grads) != 1 or tail.steps_that("mix"):
        return "mixes entries after the product"
    return None
