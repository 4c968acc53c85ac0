"""The variance of outer products in two passes: the mean first, then the squares of what is left.

Where an example's gradient is one outer product x d^T, forming it again costs next to nothing. So the
mean is taken first, as one product over all examples, and then

    M2 = sum_i w_i (x_i d_i^T - mean)^2

without a product: sixteen examples at a time in one pass over M2, in which XLA fuses all that is
elementwise. Welford's way, one example after the other, reads and writes the mean and M2 for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._cut import Examples, Tail
from pergrad._ir import weigh
from pergrad._statistics import LeafStatistic, Variance
from pergrad._strategies.base import Job, Strategy
from pergrad._strategies.factored import why_not_an_outer_product

AT_A_TIME = 16


@dataclasses.dataclass(frozen=True)
class Centred(Strategy):
    name = "centred"

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        return why_not_an_outer_product(tail) if isinstance(statistic, Variance) else "not a variance"

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        total = examples.total
        (g,) = tail.summed_gradients(examples.factors, examples.constants, examples.weights, total)
        states = []
        for job in jobs:
            variance, state = job.statistic, job.state(tail)
            assert isinstance(variance, Variance)
            _, like, _ = state
            share = jnp.asarray(total, like.dtype)
            mean = variance.mean_of(g.astype(like.dtype), share)
            m2 = _squares_around(mean, tail, examples)
            states.append(variance.merge(state, (share, mean, m2)))
        return states


def _squares_around(mean: jax.Array, tail: Tail, examples: Examples) -> jax.Array:
    """sum_i w_i (g_i - mean)^2."""

    def added(m2: jax.Array, xs: Any) -> jax.Array:
        factors, w = xs
        for i in range(len(factors[0])):
            (g,) = tail.gradients([x[i] for x in factors], examples.constants)
            own = jnp.asarray(examples.weights if w is None else w[i], mean.dtype)
            m2 = m2 + weigh(jnp.square(g.astype(mean.dtype) - mean), own)
        return m2

    steps, rest = divmod(examples.size, AT_A_TIME)
    m2 = added(jnp.zeros_like(mean), jax.tree.map(lambda x: x[:rest], examples.along))
    if not steps:
        return m2
    groups = jax.tree.map(lambda x: x[rest:].reshape(steps, AT_A_TIME, *x.shape[1:]), examples.along)
    m2, _ = lax.scan(lambda m2, xs: (added(m2, xs), None), m2, groups, length=steps)
    return m2
