"""The mean gradient alone, as `jax.grad` computes it.

Every step of a tail commutes with the mean over the examples, so the mean is taken of the terms, where
it is one product over examples and positions at once. A gradient that is the same for all examples is
its own mean, and one example whose weight is that of all of them says all about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

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
        count = examples.count(jnp.result_type(float))
        means = tail.mean_gradients(
            tail.env(examples.factors, examples.constants), examples.weights, count
        )
        return [job.statistic.add(job.start, means[job.grad], count) for job in jobs]
