"""The reference: form the gradients of all examples, then reduce them.

This takes memory for one copy of the parameters per example, so it is chosen for small gradients, and
if there is one example. The tests compare every other strategy with it.

If devices divide the states of a large gradient, and each has one example, the gradient is formed in
blocks, as `streamed` does it. Each device keeps its shard of the states of a block before the next block
begins, so that whole states never exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pergrad._compat import aval
from pergrad._cut import Examples, Tail, divided
from pergrad._ir import number_of_pieces, size
from pergrad._statistics import LeafStatistic, OfAllGradients, Reading
from pergrad._strategies.base import FormingStrategy, Job
from pergrad._strategies.streamed import Streamed
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

    def reduce_on_devices(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        block = _block(tail, jobs) if examples.size == 1 else None
        if block is None:
            return super().reduce_on_devices(tail, jobs, examples)
        return Streamed(block=block).reduce_on_devices(tail, jobs, examples)


def _fed(job: Job, tail: Tail, gs: jax.Array, examples: Examples) -> Any:
    statistic = job.statistic
    if isinstance(statistic, Reading):
        return jax.vmap(lambda g: statistic.of(g, job.direction))(gs)
    if isinstance(statistic, OfAllGradients):
        return statistic.of_all(examples.those_here(gs), examples.the_others(gs))
    return job.fed(tail, gs, examples.weights)


def _block(tail: Tail, jobs: Sequence[Job]) -> int | None:
    """The length of the blocks that one example's gradient is formed in; None if it is formed whole.

    Blocks of a factor are cut out of an array in another layout. So they need memory for the factor
    twice, which XLA may not need otherwise, and are worth it if the states have more entries than that.
    """
    shards, axis = [job.shard for job in jobs if job.shard is not None], divided(tail)
    if not shards or axis is None:
        return None
    gradient = tail.grads[0]
    if len(shards) * size(gradient) <= 2 * size(tail.factors[axis.factor]):
        return None
    own = axis.length // shards[0].number_along(axis.axis)
    number = number_of_pieces(aval(gradient).shape, own)
    return axis.length // number if number > 1 else None
