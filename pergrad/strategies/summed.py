"""The mean gradient alone, as `jax.grad` computes it.

The steps of a tail commute with sums over the examples, so the sum is taken of the terms, where it is
one product over examples and positions at once. Where the gradient is the same for all examples, one
of them with the weight of all says everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pergrad._statistics import Accumulator, Mean, State, Variance
from pergrad._tail import Tail
from pergrad.strategies._strategy import Examples, Job, Strategy


@dataclasses.dataclass(frozen=True)
class Summed(Strategy):
    name = "summed"

    def why_not(self, tail: Tail, statistic: Accumulator) -> str | None:
        if not tail.terms:
            return None if isinstance(statistic, (Mean, Variance)) else "not a mean"
        is_mean = isinstance(statistic, Mean) and statistic.phi is None
        return None if is_mean else "not the mean gradient"

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[State]:
        total = examples.total
        sums = tail.summed_gradients(examples.factors, examples.constants, examples.weights, total)
        if tail.terms:
            return [job.start + sums[job.grad] for job in jobs]
        return [job.statistic.add(job.start, sums[job.grad], total) for job in jobs]
