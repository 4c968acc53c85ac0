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
import jax.numpy as jnp
from jax import lax

from pergrad._cut import Examples, Tail
from pergrad._statistics import Accumulator, LeafStatistic, Reading, State
from pergrad._strategies.base import Job, Strategy


@dataclasses.dataclass(frozen=True)
class Streamed(Strategy):
    name = "streamed"

    at_a_time: int = 1
    batched: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.at_a_time}" if self.at_a_time > 1 else self.name

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        return None if isinstance(statistic, (Accumulator, Reading)) else "needs all gradients at once"

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        # Without axes of length 1: XLA copies what goes into a loop if it had put them elsewhere.
        factors, own_weights = examples.along
        shapes = [x.shape[1:] for x in factors]
        xs = [x.reshape(len(x), *(n for n in x.shape[1:] if n != 1)) for x in factors], own_weights
        accumulators = [(j.grad, j.statistic) for j in jobs if isinstance(j.statistic, Accumulator)]
        readings = [(j.grad, j.statistic, j.given) for j in jobs if isinstance(j.statistic, Reading)]

        def gradients(factors: list[jax.Array]) -> list[jax.Array]:
            factors = [x.reshape(shape) for x, shape in zip(factors, shapes, strict=True)]
            return tail.gradients(factors, examples.constants)

        def one(states: list[State], xs: Any) -> tuple[list[State], list[Any]]:
            factors, w = xs
            gs, w = gradients(factors), examples.weights if w is None else w
            pairs = zip(accumulators, states, strict=True)
            values = [reading.of(gs[k], given) for k, reading, given in readings]
            return [accumulator.add(state, gs[k], w) for (k, accumulator), state in pairs], values

        def group(states: list[State], xs: Any) -> tuple[list[State], list[Any]]:
            factors, w = xs
            gs = jax.vmap(gradients, axis_size=self.at_a_time)(factors)
            w = examples.weights if w is None else w
            pairs = zip(accumulators, states, strict=True)
            values = [
                jax.vmap(lambda g, reading=reading, given=given: reading.of(g, given))(gs[k])
                for k, reading, given in readings
            ]
            return [accumulator.add_all(state, gs[k], w) for (k, accumulator), state in pairs], values

        states = [job.state(tail) for job in jobs if isinstance(job.statistic, Accumulator)]
        size = examples.size
        if self.batched:
            steps = size // self.at_a_time
            grouped = steps * self.at_a_time
            groups = jax.tree.map(lambda x: x[:grouped].reshape(steps, self.at_a_time, *x.shape[1:]), xs)
            states, first = lax.scan(group, states, groups, length=steps)
            rest = jax.tree.map(lambda x: x[grouped:], xs)
            states, last = lax.scan(one, states, rest, length=size - grouped)
            values = [
                jnp.concatenate([a.reshape(grouped, *b.shape[1:]), b])
                for a, b in zip(first, last, strict=True)
            ]
        else:
            states, values = lax.scan(
                one, states, xs, length=size, unroll=max(1, min(self.at_a_time, size))
            )
        of_accumulators, of_readings = iter(states), iter(values)
        return [
            next(of_accumulators if isinstance(job.statistic, Accumulator) else of_readings)
            for job in jobs
        ]
