"""The reference: form every example's gradient, then reduce.

Costs as much memory as there are examples times parameters. It is the choice for small gradients; every
other strategy is tested against it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pergrad._cut import Examples, Tail
from pergrad._statistics import Accumulator, LeafStatistic, Mean, Pairs, Reading
from pergrad._strategies.base import Job, Strategy


@dataclasses.dataclass(frozen=True)
class Materialise(Strategy):
    name = "materialise"

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        return None

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        gs = jax.vmap(
            lambda factors: tail.gradients(factors, examples.constants), axis_size=examples.size
        )(examples.factors)
        return [_feed(job, tail, gs[job.grad], examples) for job in jobs]


def _feed(job: Job, tail: Tail, gs: jax.Array, examples: Examples) -> Any:
    statistic = job.statistic
    if isinstance(statistic, Reading):
        return jax.vmap(lambda g: statistic.of(g, job.given))(gs)
    if isinstance(statistic, Pairs):
        return statistic.of_all(examples.those_here(gs), gs)
    assert isinstance(statistic, Accumulator)
    state = job.given if isinstance(statistic, Mean) else job.state(tail)
    return statistic.add_all(state, gs, examples.weights)
