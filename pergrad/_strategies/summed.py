"""The mean gradient, or another weighted sum of gradients, as `jax.grad` computes it.

The steps of a tail are linear, so they commute with the sum over examples. The terms are summed before
the steps run, and a product is then one product over examples and positions at once. If the gradient is
the same for all examples, an accumulator takes it in once, with the weight of all examples together.

Inner products with a direction v have the same price, because they are derivatives of the sum:

    <g_i, v> = d/dw_i <sum_i w_i g_i, v>.
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
from pergrad._ir import Weights
from pergrad._statistics import LeafStatistic, Quantity
from pergrad._strategies.base import Job, Strategy
from pergrad._strategies.work import Work


@dataclasses.dataclass(frozen=True)
class Summed(Strategy):
    """The strategy that sums the terms over all examples before the steps run."""

    name = "summed"

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if statistic.is_sum:
            return None
        if not tail.terms:
            sums = (Quantity.SUM, Quantity.CENTRED)
            return None if statistic.quantity in sums else "not a mean"
        if statistic.quantity is not Quantity.PROJECTIONS:
            return "not the mean gradient"
        if tail.replaces and any(term.is_lookup for term in tail.terms):
            # The derivative multiplies such a row by 0, which is NaN if the row is not finite.
            return "sets rows to 0 after the lookup"
        return next((term.why_no_derivative for term in tail.terms if term.why_no_derivative), None)

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # (B F_t + F_s) / product rate + (f + g) / memory rate. Convolutions have a rate of their own.
        # For inner products with several directions, all of that for each direction.
        rate = work.device.convolution_rate if work.convolves else work.device.product_rate
        times = work.directions if statistic.quantity is Quantity.PROJECTIONS else 1
        return times * (work.summing_operations / rate + work.moving(work.factors + work.gradient))

    def operations(self, work: Work, statistics: Sequence[LeafStatistic]) -> float:
        products = [s for s in statistics if s.quantity is Quantity.PROJECTIONS]
        sums = int(len(products) < len(statistics))
        return (sums + work.directions * len(products)) * work.summing_operations

    def temporary_bytes(self, work: Work) -> float:
        return 0

    def reason(self, work: Work) -> str:
        return "one sum over all examples" if work.tail.terms else "the same for every example"

    def sums_factors(self, tail: Tail) -> bool:
        return True

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        total = examples.total

        def sums(w: Weights, total: Any) -> list[jax.Array]:
            return tail.summed_gradients(examples.factors, examples.constants, w, total)

        def projections(job: Job) -> jax.Array:
            ones = jnp.ones(examples.size, job.direction.dtype)
            _, pull = jax.vjp(lambda w: sums(w, jnp.sum(w))[job.place].astype(w.dtype), ones)
            if job.direction.ndim == len(aval(tail.grads[job.place]).shape):
                return pull(job.direction)[0]
            # One direction after the other, since a derivative takes as much memory as the factors.
            return lax.map(lambda v: pull(v)[0], job.direction).T

        def fed(job: Job, g: jax.Array) -> Any:
            if tail.terms:
                return job.from_quantity(g)
            accumulator, state = job.accumulator_and_state(tail)
            return accumulator.add(state, g, total)

        is_projection = [job.statistic.quantity is Quantity.PROJECTIONS for job in jobs]
        gs = [] if all(is_projection) else sums(examples.weights, total)
        return [
            projections(job) if is_one else fed(job, gs[job.place])
            for job, is_one in zip(jobs, is_projection, strict=True)
        ]
