"""A loop over examples: form a gradient, feed it to every statistic of the parameter, and forget it.

The matrix products of all rounds add up to those of the mean gradient, which is one more statistic of
the same pass. The loop needs memory for one gradient, and for the state of every statistic.

Several examples may go through one round of the loop (`at_a_time`). On accelerators one batched product
forms their gradients (`batched`). On the CPU a batched product takes up to 20 times as long as single
products, so there is one example in a round. With `"streamed:4"` users ask for four, each with a product
of its own, whose gradients share one pass over the states. For the moments of transformers with
sequences of 4 to 64 tokens, that took 0.95 to 1.13 times as long as one example in a round, and more
memory.

If the gradient and the states of its statistics do not fit into the cache, all of them would go through
memory for every example. So a large gradient is divided into blocks (`block`), one after the other. For
each block there is a loop over all examples, in which the block and its part of the states stay in the
cache. The products are the same, and each state is read and written only once.

If devices divide the states, each device keeps its shard of the states of a block before the next block
begins, so that whole states never exist. A block then has columns of every device's shard: with n shards
of d columns it has the columns k d + first, ..., k d + first + length - 1 for all k < n, and a device
keeps those of its own k.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import aval
from pergrad._cut import Divided, Examples, Tail, divided
from pergrad._ir import in_groups
from pergrad._statistics import Accumulator, LeafStatistic, Reading, State
from pergrad._strategies.base import FormingStrategy, Job
from pergrad._strategies.work import Work

# The part of the cache that a block may take, with its part of the states.
BLOCK_SHARE = 0.5
# Blocks have a multiple of LANES columns, which is the width of the registers of accelerators.
LANES = 128

# Makes one example's gradients from its factors, or a block of them, given its start and length.
Gradients = Callable[..., list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Streamed(FormingStrategy):
    """The strategy that forms gradients in a loop, `at_a_time` of them in each round.

    `batched` says whether one batched product forms the gradients of a round. `block` is the length of
    the blocks that the gradient is divided into, or None if it is not divided.
    """

    name = "streamed"
    takes_number = True

    at_a_time: int = 1
    batched: bool = False
    block: int | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.at_a_time}" if self.at_a_time > 1 else self.name

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        return None if isinstance(statistic, (Accumulator, Reading)) else "needs all gradients at once"

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # B (F_t + F_s + F_r) / product rate + (B g + 2 R s g) / memory rate + R rounds, where the
        # statistic takes F_r operations for products with one gradient, and R = B rounds of the loop
        # read and write all states. If one batched product forms the n gradients of a round, R = B / n,
        # and gradients are read again: (2 B g + 2 R s g) / memory rate. If the gradient is divided, the
        # passes have the rate of the cache, states are moved once more, 2 s g / memory rate, and every
        # block has its own rounds.
        g, s, size = work.gradient, work.accumulators, work.size
        together = self.batched and self.at_a_time > 1
        rounds = math.ceil(size / self.at_a_time) if together else size
        moved = (2 if together else 1) * size * g + 2 * rounds * s * g
        passes = work.moving(moved, at_once=g * (1 + s) / self._blocks(work))
        if self.block is not None:
            passes += work.moving(2 * s * g)
        formed = work.forming_operations + work.operations_on_formed(statistic)
        formed /= work.device.product_rate
        return formed + passes + self._blocks(work) * rounds * work.device.loop_round

    def temporary_bytes(self, work: Work) -> float:
        return work.formed * min(self.at_a_time, work.size) / self._blocks(work)

    def _blocks(self, work: Work) -> int:
        """How many blocks the gradient is divided into."""
        axis = divided(work.tail)
        return 1 if self.block is None or axis is None else math.ceil(axis.length / self.block)

    def reason_of_price(self, work: Work) -> str:
        terms = work.tail.terms
        positions = max(term.contributions for term in terms)
        what = f"sums over {positions} positions" if positions > 1 else "not a mean of factorable phi"
        return what if len(terms) == 1 else f"{what}, {len(terms)} terms"

    def fitted(self, work: Work, at_a_time: int | None) -> Streamed:
        block = _liked_block(work)
        at_a_time = at_a_time or (_liked_at_a_time(work) if block is None else 1)
        return Streamed(max(1, min(at_a_time, work.size)), work.device.batches_products, block)

    def reduce_on_devices(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        # In a loop over layers the states are those of one layer. All blocks of them are added up in one
        # operation, which runs beside other work.
        if self._axis(tail, jobs) is None or tail.levels:
            return super().reduce_on_devices(tail, jobs, examples)
        return self.reduce(tail, jobs, examples)

    def _axis(self, tail: Tail, jobs: Sequence[Job]) -> Divided | None:
        """The axis along which the gradient is divided into blocks; None if it stays whole."""
        has_blocks = self.block is not None and all(job.statistic.in_parts for job in jobs)
        return divided(tail) if has_blocks else None

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        # The factors enter the loop without their axes of length 1. XLA might have placed these axes
        # elsewhere in the layout than the loop expects, and would then copy the factors.
        factors, own_weights = examples.along
        shapes = [x.shape[1:] for x in factors]
        xs = [x.reshape(len(x), *(n for n in x.shape[1:] if n != 1)) for x in factors], own_weights

        axis = self._axis(tail, jobs)
        if self.batched and tail.levels:
            # XLA's compiler for TPUs would make some of the factors in the operation that multiplies
            # them, which slows it down. Inside the loop over layers they are made before. Outside of one
            # that would take memory, since the factors of all layers could be there at once.
            xs = lax.optimization_barrier(xs)

        def gradients(factors: list[jax.Array], block: _Block | None = None) -> list[jax.Array]:
            factors = [x.reshape(shape) for x, shape in zip(factors, shapes, strict=True)]
            if axis is not None and block is not None:
                factors[axis.factor] = block.of(factors[axis.factor], axis.factor_axis)
            return tail.gradients(factors, examples.constants)

        if axis is not None:
            states, values = self._stream_blocks(axis, tail, gradients, jobs, xs, examples)
        else:
            own = [job for job in jobs if job.statistic.accumulates]
            starts = [job.accumulator_and_state(tail)[1] for job in own]
            directions = [job.direction for job in jobs]
            states, values = self._stream(gradients, jobs, xs, examples, starts, directions)
        of_accumulators, of_readings = iter(states), iter(values)
        return [next(of_accumulators if j.statistic.accumulates else of_readings) for j in jobs]

    def _stream(
        self,
        gradients: Gradients,
        jobs: Sequence[Job],
        xs: Any,
        examples: Examples,
        states: list[State],
        directions: list[Any],
    ) -> tuple[list[State], list[jax.Array]]:
        """The states of all accumulators, and the values of all readings, after all examples.

        `xs` are the factors and weights of the examples, from which `gradients` makes one example's
        gradients. `directions` has the direction of every job.
        """
        accumulators = [(j.place, j.statistic) for j in jobs if isinstance(j.statistic, Accumulator)]
        readings = [
            (j.place, j.statistic, direction)
            for j, direction in zip(jobs, directions, strict=True)
            if isinstance(j.statistic, Reading)
        ]

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

        size = examples.size
        if not self.batched:
            return lax.scan(one, states, xs, length=size, unroll=max(1, min(self.at_a_time, size)))
        first, groups = in_groups(xs, size, self.at_a_time)
        rounds, rest = divmod(size, self.at_a_time)
        states, of_first = lax.scan(one, states, first, length=rest)
        states, of_groups = lax.scan(group, states, groups, length=rounds)
        values = [
            jnp.concatenate([a, b.reshape(size - rest, *a.shape[1:])])
            for a, b in zip(of_first, of_groups, strict=True)
        ]
        return states, values

    def _stream_blocks(
        self,
        axis: Divided,
        tail: Tail,
        gradients: Gradients,
        jobs: Sequence[Job],
        xs: Any,
        examples: Examples,
    ) -> tuple[list[State], list[jax.Array]]:
        """The same as `_stream`, one block of the gradient after the other.

        The arrays of a state are shaped like the gradient. The numbers in it do not depend on the block.
        The values of the blocks add up.
        """
        assert self.block is not None
        whole = aval(tail.grads[0])
        own = [job for job in jobs if job.statistic.accumulates]
        starts = [_start(job, whole) for job in own]
        shards = max((job.shard.number_along(axis.axis) for job in own if job.shard), default=1)

        def one_block(states: list[State], block: _Block) -> tuple[list[State], list[Any]]:
            shape = (*whole.shape[: axis.axis], shards * block.length, *whole.shape[axis.axis + 1 :])
            like = jax.ShapeDtypeStruct(shape, whole.dtype)

            def part(x: jax.Array) -> jax.Array:
                # Several directions have one more axis in front, so the axis is counted from the end.
                return block.of(x, axis.axis - len(whole.shape))

            def start_of(job: Job, start: State, state: State) -> State:
                if job.state is None:
                    assert isinstance(job.statistic, Accumulator)
                    return job.statistic.init(like)
                return jax.tree.map(lambda number, x: part(x) if x.ndim else number, start, state)

            def of_block(factors: list[jax.Array]) -> list[jax.Array]:
                return gradients(factors, block)

            def with_block(job: Job, state: State, end: State) -> State:
                own = block if job.shard is None else dataclasses.replace(block, shards=1)
                return jax.tree.map(
                    lambda x, new: own.put(x, new, axis.axis) if x.ndim else new,
                    state,
                    job.shard_of_all(end),
                )

            own_starts = [start_of(*of_job) for of_job in zip(own, starts, states, strict=True)]
            directions = [None if job.direction is None else part(job.direction) for job in jobs]
            ends, values = self._stream(of_block, jobs, xs, examples, own_starts, directions)
            return [with_block(*of_job) for of_job in zip(own, states, ends, strict=True)], values

        length = max(1, self.block // shards)
        blocks, rest = divmod(axis.length // shards, length)
        firsts = length * jnp.arange(blocks)
        states, values = lax.scan(
            lambda states, first: one_block(states, _Block(first, length, shards)), starts, firsts
        )
        values = [jnp.sum(x, axis=0) for x in values]
        if rest:
            states, of_rest = one_block(states, _Block(blocks * length, rest, shards))
            values = [a + b for a, b in zip(values, of_rest, strict=True)]
        return states, values


@dataclasses.dataclass(frozen=True)
class _Block:
    """`length` columns, from column `first` on, of each of the `shards` equal parts of an axis."""

    first: Any
    length: int
    shards: int

    def of(self, x: jax.Array, axis: int) -> jax.Array:
        """The columns of this block, along an axis of `x`."""
        if self.shards == 1:
            return lax.dynamic_slice_in_dim(x, self.first, self.length, axis)
        axis = axis % x.ndim
        block = lax.dynamic_slice_in_dim(self._parts(x, axis), self.first, self.length, axis + 1)
        return block.reshape(*x.shape[:axis], self.shards * self.length, *x.shape[axis + 1 :])

    def put(self, x: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        """`x`, in which `new` takes the place of the columns of this block."""
        if self.shards == 1:
            return lax.dynamic_update_slice_in_dim(x, new, self.first, axis)
        parts = self._parts(x, axis)
        parts = lax.dynamic_update_slice_in_dim(parts, self._parts(new, axis), self.first, axis + 1)
        return parts.reshape(x.shape)

    def _parts(self, x: jax.Array, axis: int) -> jax.Array:
        """`x` with two axes, of the parts and of their columns, in place of one."""
        return x.reshape(*x.shape[:axis], self.shards, -1, *x.shape[axis + 1 :])


def _start(job: Job, whole: Any) -> State:
    """The state of an accumulator before the first block, or the device's shard of an empty state."""
    assert isinstance(job.statistic, Accumulator)
    shape = whole.shape if job.shard is None else job.shard.shape(whole.shape)
    return job.statistic.state_or_empty(job.state, jax.ShapeDtypeStruct(shape, whole.dtype))


def _liked_at_a_time(work: Work) -> int:
    """How many examples should go through one round of the loop, if the gradient is not divided.

    An accelerator takes as many examples as its memory allows for one batched product. On the CPU,
    where products should not be batched, the number is 0 here, which stands for one.
    """
    return int(work.device.stream_size / max(work.formed, 1))


def _liked_block(work: Work) -> int | None:
    """The length of the blocks that the gradient should be divided into; None if it should stay whole.

    One example alone reads and writes every state once in any case. Blocks are of no use if the states
    do not stay in the cache from one example to the next.
    """
    axis = divided(work.tail)
    at_once = work.gradient * (1 + work.accumulators)
    room = BLOCK_SHARE * work.device.cache_size
    if axis is None or work.size == 1 or at_once <= room or not work.device.keeps_states:
        return None
    longest = max(1, int(axis.length * room / at_once / LANES)) * LANES
    # Blocks that divide the axis evenly need no shorter one at the end.
    even = (n for n in range(longest, longest // 2, -LANES) if axis.length % n == 0)
    block = next(even, longest)
    return block if block < axis.length else None
