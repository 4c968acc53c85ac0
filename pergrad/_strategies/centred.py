"""The variance of outer products: from two matrix products, or where these lose digits from a loop.

If an example's gradient is one outer product g_i = x_i d_i^T, the squared deviations from the mean are

    M2 = sum_i w_i (g_i - mean)^2 = sum_i w_i g_i^2 - share mean^2,      share = sum_i w_i,

with  share mean = X^T diag(w) D  and  sum_i w_i g_i^2 = (X^2)^T diag(w) D^2,  two matrix products. The
difference loses as many digits as the sum of squares is larger than M2. So it counts only if no
coordinate has a sum of squares of more than MOST_LOST times its M2. Both products are computed in full
precision for that. On accelerators the default precision rounds float32 factors to fewer digits than
the difference needs.

Otherwise the deviations are formed, which costs next to no operations for outer products, and added up
in a loop. The loop takes sixteen examples at a time in one pass over M2, in which XLA fuses all
elementwise operations. Welford's method takes one example after the other, and reads and writes the mean
and M2 for each of them.

Which of the two runs is decided when the gradients are known (`lax.cond`). Gradients that are almost the
same for all examples in some coordinate are rare if there are many examples. Among few examples some
coordinate of a large matrix has such gradients by chance, so that there is the loop alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._cut import Examples, Tail
from pergrad._ir import in_groups, weigh
from pergrad._statistics import LeafStatistic, Mean, Quantity, mean_of
from pergrad._strategies.base import Job, Strategy
from pergrad._strategies.factored import sum_of_phi, why_not_an_outer_product
from pergrad._strategies.work import Work

AT_A_TIME = 16  # examples in one pass over M2
# The sum of squares may be so many times M2. The difference of two sums in float32 then has a relative
# error of 1e-5, or of 5e-4 on accelerators if the factors are bfloat16.
MOST_LOST = 64.0
FEWEST = 16  # examples for which products are tried

SUM, SQUARES = Mean(), Mean(jnp.square)


@dataclasses.dataclass(frozen=True)
class Centred(Strategy):
    """The strategy that computes the mean and the squared deviations of all outer products."""

    name = "centred"

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if statistic.quantity is not Quantity.CENTRED:
            return "not a variance"
        return why_not_an_outer_product(tail)

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # n (B F_t + F_s) / product rate for n products. Then 3 g / memory rate for the difference, or
        # B g / memory rate for the loop.
        products = self._products(work) * work.summing_operations / work.device.product_rate
        passes = 3 if self._products(work) > 1 else work.size
        return products + work.moving(passes * work.gradient, at_once=3 * work.gradient)

    def operations(self, work: Work, statistics: Sequence[LeafStatistic]) -> float:
        products = self._products(work)
        passes = 1 if products > 1 else work.size
        return len(statistics) * (products * work.summing_operations + 4 * passes * work.numbers)

    def temporary_bytes(self, work: Work) -> float:
        return self._products(work) * work.gradient

    def _products(self, work: Work) -> int:
        """How many products there are, if the difference loses no digits."""
        return 2 if work.size >= FEWEST else 1

    def reason(self, work: Work) -> str:
        return "an outer product for each"

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        g = sum_of_phi(tail, SUM, examples, in_full=True)
        share = jnp.asarray(examples.total, g.dtype)
        mean = mean_of(g, share)
        if examples.size < FEWEST:
            m2 = _squares_around(mean, tail, examples)
        else:
            squares = sum_of_phi(tail, SQUARES, examples, in_full=True)
            m2 = squares - share * jnp.square(mean)
            m2 = lax.cond(
                examples.devices.any_team(~jnp.all(squares <= MOST_LOST * m2)),  # so if one is NaN
                lambda: _squares_around(mean, tail, examples),
                lambda: m2,
            )
        return [job.from_quantity((share, mean, m2)) for job in jobs]


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
