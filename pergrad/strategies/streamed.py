"""Examples one after the other: form a gradient, feed every statistic of the parameter, forget it.

All matrix products together are those of the mean gradient, which is one more statistic of the same
pass. What is needed on top is one gradient's memory and, for every statistic, its state's.

Several examples go through one step of the loop (`at_a_time`). On the CPU their products stay single
products, since a batched one is slow there; what is gained is that the statistics' states are read and
written once for all of them. On accelerators they form one batched product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from pergrad._statistics import Accumulator, Individual, State
from pergrad._tail import Tail
from pergrad.strategies._strategy import Examples, Job, Strategy


@dataclasses.dataclass(frozen=True)
class Streamed(Strategy):
    name = "streamed"

    at_a_time: int = 1
    batched: bool = False

    def why_not(self, tail: Tail, statistic: Accumulator) -> str | None:
        return "asks for all gradients" if isinstance(statistic, Individual) else None

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[State]:
        shared = None if isinstance(examples.weights, jax.Array) else examples.weights
        xs = (examples.factors, examples.weights if shared is None else None)

        def gradients(factors: list[jax.Array]) -> list[jax.Array]:
            return tail.gradients(factors, examples.constants)

        def one(states: list[State], xs: Any) -> tuple[list[State], None]:
            factors, w = xs
            gs = gradients(factors)
            w = w if shared is None else shared
            return [j.statistic.add(s, gs[j.grad], w) for j, s in zip(jobs, states, strict=True)], None

        def many(states: list[State], xs: Any) -> tuple[list[State], None]:
            factors, w = xs
            gs = jax.vmap(gradients, axis_size=self.at_a_time)(factors)
            w = w if shared is None else shared
            return [
                j.statistic.add_all(s, gs[j.grad], w) for j, s in zip(jobs, states, strict=True)
            ], None

        states, size = [job.start for job in jobs], examples.size
        if not self.batched:
            return lax.scan(one, states, xs, length=size, unroll=min(self.at_a_time, size))[0]
        steps, rest = divmod(size, self.at_a_time)
        whole = size - rest
        groups = jax.tree.map(lambda x: x[:whole].reshape(steps, self.at_a_time, *x.shape[1:]), xs)
        states, _ = lax.scan(many, states, groups, length=steps)
        return lax.scan(one, states, jax.tree.map(lambda x: x[whole:], xs), length=rest)[0]
