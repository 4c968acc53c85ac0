"""The mean gradient alone, as `jax.grad` computes it, and weighted sums in general.

The steps of a tail commute with sums over the examples, so the sum is taken of the terms, where it is
one product over examples and positions at once. Where the gradient is the same for all examples, one
of them with the weight of all says everything.

Inner products with a direction v have the same price, since they are the derivative of the sum:

    <g_i, v> = d/dw_i <sum_i w_i g_i, v>.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pergrad._cut import Examples, Ragged, Tail
from pergrad._ir import Weights, added
from pergrad._statistics import Accumulator, LeafStatistic, Mean, Projection, Variance
from pergrad._strategies.base import Job, Strategy


@dataclasses.dataclass(frozen=True)
class Summed(Strategy):
    name = "summed"

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if isinstance(statistic, Accumulator) and statistic.is_sum:
            return None
        if not tail.terms:
            return None if isinstance(statistic, (Mean, Variance)) else "not a mean"
        if not isinstance(statistic, Projection):
            return "not the mean gradient"
        has_ragged = any(isinstance(term, Ragged) for term in tail.terms)
        return "JAX cannot differentiate the sum of a ragged product" if has_ragged else None

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        total = examples.total

        def sums(w: Weights, total: Any) -> list[jax.Array]:
            return tail.summed_gradients(examples.factors, examples.constants, w, total)

        def projections(job: Job) -> jax.Array:
            ones = jnp.ones(examples.size, job.given.dtype)
            _, pull = jax.vjp(lambda w: sums(w, jnp.sum(w))[job.grad].astype(w.dtype), ones)
            return pull(job.given)[0]

        def fed(job: Job, g: jax.Array) -> Any:
            assert isinstance(job.statistic, Accumulator)
            return added(job.given, g) if tail.terms else job.statistic.add(job.state(tail), g, total)

        is_projection = [isinstance(job.statistic, Projection) for job in jobs]
        gs = [] if all(is_projection) else sums(examples.weights, total)
        return [
            projections(job) if is_one else fed(job, gs[job.grad])
            for job, is_one in zip(jobs, is_projection, strict=True)
        ]
