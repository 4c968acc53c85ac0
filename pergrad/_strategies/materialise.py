"""The reference: form the gradients of all examples, then reduce them.

This takes memory for one copy of the parameters per example, so it is chosen for small gradients. The
tests compare every other strategy with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pergrad._cut import Examples, Tail
from pergrad._statistics import LeafStatistic, OfAllGradients, Reading
from pergrad._strategies.base import FormingStrategy, Job
from pergrad._strategies.work import Work


@dataclasses.dataclass(frozen=True)
class Materialise(FormingStrategy):
    """The strategy that forms the gradients of all examples at once."""

    name = "materialise"

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        return None

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # B (F_t + F_s) / batched rate + B F_r / product rate + B g (1 + s) / memory rate, where the
        # statistic takes F_r operations for products with one gradient
        passes = 1 + work.accumulators
        formed = work.forming_operations / work.device.batched_rate
        formed += work.operations_on_formed(statistic) / work.device.product_rate
        return formed + work.moving(work.size * work.gradient * passes)

    def temporary_bytes(self, work: Work) -> float:
        return work.formed * work.size

    def reason_of_price(self, work: Work) -> str:
        return "small"

    def sums_factors(self, tail: Tail) -> bool:
        return all(term.is_value for term in tail.terms)

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        gs = jax.vmap(
            lambda factors: tail.gradients(factors, examples.constants), axis_size=examples.size
        )(examples.factors)
        return [_fed(job, tail, gs[job.place], examples) for job in jobs]


def _fed(job: Job, tail: Tail, gs: jax.Array, examples: Examples) -> Any:
    statistic = job.statistic
    if isinstance(statistic, Reading):
        return jax.vmap(lambda g: statistic.of(g, job.direction))(gs)
    if isinstance(statistic, OfAllGradients):
        return statistic.of_all(examples.those_here(gs), examples.the_others(gs))
    return job.fed(tail, gs, examples.weights)
