"""The reference: form every example's gradient, then reduce.

Costs as much memory as there are examples times parameters. It is the choice for small gradients and
the only one for `Individual`; every other strategy is tested against it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from pergrad._statistics import Accumulator, State
from pergrad._tail import Tail
from pergrad.strategies._strategy import Examples, Job, Strategy


@dataclasses.dataclass(frozen=True)
class Materialise(Strategy):
    name = "materialise"

    def why_not(self, tail: Tail, statistic: Accumulator) -> str | None:
        return None

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[State]:
        gs = jax.vmap(
            lambda factors: tail.gradients(factors, examples.constants), axis_size=examples.size
        )(examples.factors)
        return [job.statistic.add_all(job.start, gs[job.grad], examples.weights) for job in jobs]
