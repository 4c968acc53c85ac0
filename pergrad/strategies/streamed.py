"""Examples one after the other: form a gradient, feed every statistic of the parameter, forget it.

All matrix products together are those of the mean gradient, which is one more statistic of the same
pass. What is needed on top is one gradient's memory and, for every statistic, its state's.

Several examples may go through one step of the loop (`at_a_time`). On accelerators their gradients are
formed by one batched product (`batched`). On the CPU that takes up to 20 times as long as single
products, which therefore stay single; but the states are read and written once for all of them, which
pays where products are short.
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
            gs, w = gradients(factors), w if shared is None else shared
            pairs = zip(jobs, states, strict=True)
            return [job.statistic.add(state, gs[job.grad], w) for job, state in pairs], None

        def group(states: list[State], xs: Any) -> tuple[list[State], None]:
            factors, w = xs
            gs = jax.vmap(gradients, axis_size=self.at_a_time)(factors)
            w = w if shared is None else shared
            pairs = zip(jobs, states, strict=True)
            return [job.statistic.add_all(state, gs[job.grad], w) for job, state in pairs], None

        states, size = [job.start for job in jobs], examples.size
        if not self.batched:
            return lax.scan(one, states, xs, length=size, unroll=min(self.at_a_time, size))[0]
        steps = size // self.at_a_time
        grouped = steps * self.at_a_time
        groups = jax.tree.map(lambda x: x[:grouped].reshape(steps, self.at_a_time, *x.shape[1:]), xs)
        states, _ = lax.scan(group, states, groups, length=steps)
        rest = jax.tree.map(lambda x: x[grouped:], xs)
        return lax.scan(one, states, rest, length=size - grouped)[0]
