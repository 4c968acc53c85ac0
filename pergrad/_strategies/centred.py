"""The variance of outer products in two passes: first the mean, then the squared deviations from it.

If an example's gradient is one outer product x d^T, forming it again costs next to nothing. So the first
pass computes the mean, as one product over all examples, and the second pass computes

    M2 = sum_i w_i (x_i d_i^T - mean)^2

without a matrix product. It takes sixteen examples at a time in one pass over M2, in which XLA fuses all
elementwise operations. Welford's method takes one example after the other, and reads and writes the mean
and M2 for each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import aval
from pergrad._cut import Examples, Tail
from pergrad._ir import accumulation_dtype, in_groups, weigh
from pergrad._statistics import LeafStatistic, Quantity, mean_of
from pergrad._strategies.base import Job, Strategy
from pergrad._strategies.factored import why_not_an_outer_product
from pergrad._strategies.work import Work

AT_A_TIME = 16  # examples in one pass over M2


@dataclasses.dataclass(frozen=True)
class Centred(Strategy):
    """The strategy that computes the mean, and then the squared deviations of all outer products."""

    name = "centred"

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if statistic.quantity is not Quantity.CENTRED:
            return "not a variance"
        return why_not_an_outer_product(tail)

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # (B F_t + F_s) / product rate + B g / memory rate for each statistic
        products = work.summing_operations / work.device.product_rate
        return products + work.moving(work.size * work.gradient, at_once=3 * work.gradient)

    def operations(self, work: Work, statistics: Sequence[LeafStatistic]) -> float:
        return len(statistics) * (work.summing_operations + 4 * work.size * work.numbers)

    def temporary_bytes(self, work: Work) -> float:
        return work.gradient

    def reason(self, work: Work) -> str:
        return "an outer product for each"

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        total = examples.total
        (g,) = tail.summed_gradients(examples.factors, examples.constants, examples.weights, total)
        g = g.astype(accumulation_dtype(aval(tail.grads[0]).dtype))
        share = jnp.asarray(total, g.dtype)
        mean = mean_of(g, share)
        centred = share, mean, _squares_around(mean, tail, examples)
        return [job.from_quantity(centred) for job in jobs]


def _squares_around(mean: jax.Array, tail: Tail, examples: Examples) -> jax.Array:
    """M2 = sum_i w_i (g_i - mean)^2."""

    def added(m2: jax.Array, xs: Any) -> jax.Array:
        factors, w = xs
        for i in range(len(factors[0])):
            (g,) = tail.gradients([x[i] for x in factors], examples.constants)
            own = jnp.asarray(examples.weights if w is None else w[i], mean.dtype)
            m2 = m2 + weigh(jnp.square(g.astype(mean.dtype) - mean), own)
        return m2

    first, groups = in_groups(examples.along, examples.size, AT_A_TIME)
    m2 = added(jnp.zeros_like(mean), first)
    if examples.size < AT_A_TIME:
        return m2
    return lax.scan(lambda m2, xs: (added(m2, xs), None), m2, groups)[0]
