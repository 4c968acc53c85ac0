"""A loop over examples: form a gradient, feed it to every statistic of the parameter, and forget it.

The matrix products of all rounds add up to those of the mean gradient, which is one more statistic of
the same pass. The loop needs memory for one gradient, and for the state of every statistic.

Several examples may go through one round of the loop (`at_a_time`). On accelerators one batched product
forms their gradients (`batched`). On the CPU a batched product takes up to 20 times as long as single
products, so each example has a product of its own. The states are still read and written only once a
round, which pays if the products are short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._cut import Examples, Tail
from pergrad._ir import in_groups
from pergrad._statistics import Accumulator, LeafStatistic, Reading, State
from pergrad._strategies.base import FormingStrategy, Job
from pergrad._strategies.work import Work

# On the CPU, TOGETHER examples share one pass over the states if such a pass takes more than the part
# WORTH_SHARING of the time of an example's products. With more examples at a time the program of the
# loop becomes larger, but not faster.
TOGETHER, WORTH_SHARING = 4, 0.4


@dataclasses.dataclass(frozen=True)
class Streamed(FormingStrategy):
    """The strategy that forms gradients in a loop, `at_a_time` of them in each round.

    `batched` says whether one batched product forms the gradients of a round.
    """

    name = "streamed"
    takes_number = True

    at_a_time: int = 1
    batched: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.at_a_time}" if self.at_a_time > 1 else self.name

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        return None if isinstance(statistic, (Accumulator, Reading)) else "needs all gradients at once"

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # B (F_t + F_s) / product rate + B g (1 + 2 s) / memory rate + B rounds
        g, s = work.gradient, work.accumulators
        passes = work.moving(work.size * g * (1 + 2 * s), at_once=g * (1 + s))
        formed = work.forming_operations / work.device.product_rate
        return formed + passes + work.size * work.device.loop_round

    def temporary_bytes(self, work: Work) -> float:
        return work.formed * min(self.at_a_time, work.size)

    def reason_of_price(self, work: Work) -> str:
        terms = work.tail.terms
        positions = max(term.contributions for term in terms)
        what = f"sums over {positions} positions" if positions > 1 else "not a mean of factorable phi"
        return what if len(terms) == 1 else f"{what}, {len(terms)} terms"

    def fitted(self, work: Work, at_a_time: int | None) -> Streamed:
        at_a_time = at_a_time or _liked_at_a_time(work)
        return Streamed(max(1, min(at_a_time, work.size)), batched=work.device.stream_size > 0)

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        # The factors enter the loop without their axes of length 1. XLA might have placed these axes
        # elsewhere in the layout than the loop expects, and would then copy the factors.
        factors, own_weights = examples.along
        shapes = [x.shape[1:] for x in factors]
        xs = [x.reshape(len(x), *(n for n in x.shape[1:] if n != 1)) for x in factors], own_weights
        accumulators = [(j.place, j.statistic) for j in jobs if isinstance(j.statistic, Accumulator)]
        readings = [
            (j.place, j.statistic, j.direction) for j in jobs if isinstance(j.statistic, Reading)
        ]

        def gradients(factors: list[jax.Array]) -> list[jax.Array]:
            factors = [x.reshape(shape) for x, shape in zip(factors, shapes, strict=True)]
            return tail.gradients(factors, examples.constants)

        def one(states: list[State], xs: Any) -> tuple[list[State], list[Any]]:
            factors, w = xs
            gs, w = gradients(factors), examples.weights if w is None else w
            pairs = zip(accumulators, states, strict=True)
            values = [reading.of(gs[k], direction) for k, reading, direction in readings]
            return [accumulator.add(state, gs[k], w) for (k, accumulator), state in pairs], values

        def group(states: list[State], xs: Any) -> tuple[list[State], list[Any]]:
            factors, w = xs
            gs = jax.vmap(gradients, axis_size=self.at_a_time)(factors)
            w = examples.weights if w is None else w
            pairs = zip(accumulators, states, strict=True)
            values = [
                jax.vmap(lambda g, reading=reading, v=direction: reading.of(g, v))(gs[k])
                for k, reading, direction in readings
            ]
            return [accumulator.add_all(state, gs[k], w) for (k, accumulator), state in pairs], values

        own = [job for job in jobs if job.statistic.accumulates]
        states: list[State] = [job.accumulator_and_state(tail)[1] for job in own]
        size = examples.size
        if self.batched:
            first, groups = in_groups(xs, size, self.at_a_time)
            rounds, rest = divmod(size, self.at_a_time)
            states, of_first = lax.scan(one, states, first, length=rest)
            states, of_groups = lax.scan(group, states, groups, length=rounds)
            values = [
                jnp.concatenate([a, b.reshape(size - rest, *a.shape[1:])])
                for a, b in zip(of_first, of_groups, strict=True)
            ]
        else:
            states, values = lax.scan(
                one, states, xs, length=size, unroll=max(1, min(self.at_a_time, size))
            )
        of_accumulators, of_readings = iter(states), iter(values)
        return [next(of_accumulators if j.statistic.accumulates else of_readings) for j in jobs]


def _liked_at_a_time(work: Work) -> int:
    """How many examples should go through one round of the loop.

    An accelerator takes as many examples as its memory allows for one batched product. On the CPU each
    example has a product of its own, and a few examples share one pass over the states if these passes
    take a large part of the time. They never do for a convolution, whose patches take longer.
    """
    device = work.device
    if device.stream_size:
        return int(device.stream_size / max(work.formed, 1))
    if work.convolves:
        return 1
    products = (work.term_operations + work.step_operations) / device.product_rate
    passes = work.moving(work.gradient * (1 + 2 * work.accumulators), at_once=0)
    return TOGETHER if passes > WORTH_SHARING * products else 1
