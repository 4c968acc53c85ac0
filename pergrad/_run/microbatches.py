"""Runs all examples, one microbatch after the other.

The backbone of one example runs under `jax.vmap`, which returns the factors of its tails for all
examples of the microbatch. Then every tail is reduced over these examples; XLA is free to do that as
soon as the factors of the tail are computed. Tails with clipped means are reduced once more, with other
weights, after all norms are known.

A `lax.scan` runs all microbatches and hands the states on from one to the next. A batch or microbatch of
one example runs without `vmap`, because an axis of length 1 in front would only be in XLA's way. If
several devices share the batch, each device runs its own examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._cut import Cut, Examples
from pergrad._ir import Weights, read
from pergrad._plan import Schedule
from pergrad._run.backbone import InLoops, reducers_in_loops, run_program
from pergrad._run.clip import clipped_means
from pergrad._run.reduce import Directions, Reduction, empty_states
from pergrad._run.shards import Shards
from pergrad._run.states import States
from pergrad._statistics import Accumulator, Phase

SCOPE = "pergrad"  # the named scope of a run, which has a scope for the backbone and for each tail


class Outcome(NamedTuple):
    """What the first two phases return.

    `losses` are [B], and the leaves `aux` are [B, ...]. `states` has the states of accumulators and the
    values of all other statistics. `factors` has the factors [B, ...] that are kept for the last phase,
    by the number of the tail.
    """

    losses: jax.Array
    aux: list[jax.Array]
    states: States
    factors: dict[int, list[jax.Array]]


@jax.named_scope(SCOPE)
def run(
    cut: Cut,
    schedule: Schedule,
    params: Sequence[Any],
    examples: Sequence[Any],
    w: Weights,
    directions: Sequence[Any] | None,
    shards: Shards,
) -> Outcome:
    """Runs the first two phases of the schedule for the examples, whose leaves are [B, ...].

    `w` is each example's share of the batch: [B], or one number for all. `directions` has the direction
    of each parameter for inner products, or is None if no statistic takes one. `shards` says how devices
    divide the parameters, and the directions with them.
    """
    microbatch = _Microbatch(cut, schedule, params, _inward(schedule, directions, shards), shards)
    states = _starting_states(schedule, shards)
    rounds = schedule.microbatches
    if rounds == 1:
        return microbatch.run(examples, w, states)

    # There are as few microbatches as their size allows. All have the same length, which is a number of
    # whole groups. Examples from the front of the batch, with weight 0, fill up the last one.
    length = schedule.group_size * -(-schedule.batch_size // (rounds * schedule.group_size))
    missing = rounds * length - schedule.batch_size
    if missing:
        w = w if isinstance(w, jax.Array) else jnp.full(schedule.batch_size, w)
        w = jnp.concatenate([w, jnp.zeros(missing, w.dtype)])
        examples = [jnp.concatenate([x, x[:missing]]) for x in examples]
    own_weights = w if isinstance(w, jax.Array) else None
    xs = jax.tree.map(lambda x: x.reshape(rounds, length, *x.shape[1:]), (examples, own_weights))

    def body(states: States, xs: Any) -> tuple[States, Any]:
        examples, own_weights = xs
        out = microbatch.run(examples, w if own_weights is None else own_weights, states)
        ends = States({key: out.states[key] for key in states})
        return ends, (out.losses, out.aux, out.states.per_example, out.factors)

    states, per_example = lax.scan(body, states, xs)
    losses, aux, values, factors = jax.tree.map(
        lambda x: x.reshape(rounds * length, *x.shape[2:])[: schedule.batch_size], per_example
    )
    return Outcome(losses, aux, states | values, factors)


def _starting_states(schedule: Schedule, shards: Shards) -> States:
    """Empty states for all accumulators if a loop over microbatches carries them.

    Without such a loop, accumulators start without a state, so that JAX need not trace an addition of 0.
    """
    states = States()
    if schedule.microbatches > 1:
        for t in schedule.tails:
            running = t.statistics(Phase.FIRST, Phase.CLIPPED)
            states |= empty_states(t, [s for s in running if isinstance(s, Accumulator)], shards)
    return states


def _inward(schedule: Schedule, directions: Sequence[Any] | None, shards: Shards) -> dict[int, Any]:
    """The direction of each parameter, laid out like the gradient inside the loops of its tail."""
    found: dict[int, Any] = {}
    if directions is None:
        return found
    for t in schedule.tails:
        if any(statistic.takes_direction for statistic in t.statistics(Phase.FIRST)):
            for param in t.tail.params:
                found[param] = shards.inward(t.tail, param, directions[param])
    return found


class _Microbatch(NamedTuple):
    """The program that runs for each microbatch."""

    cut: Cut
    schedule: Schedule
    params: Sequence[Any]
    directions: Directions
    shards: Shards

    def run(self, examples: Sequence[Any], w: Weights, states: States) -> Outcome:
        """The outcome for these examples. Accumulators continue from `states`."""
        cut, schedule, size = self.cut, self.schedule, examples[0].shape[0]
        own_weights = w if isinstance(w, jax.Array) else jnp.full(size, w)
        # The backward pass starts from the weight of an example only if all have the same.
        weighed = () if isinstance(w, jax.Array) else schedule.weighed
        start = 1.0 if isinstance(w, jax.Array) or not weighed else w
        losses, aux, in_loops, inputs = self._run_backbone(examples, w, own_weights, start, states)
        reductions = [
            Reduction(
                schedule.tails[tail.number],
                Examples(size, w, factors, constants),
                self.shards.gathered(self.directions, tail.params),
                schedule.paths,
                weighed,
                self.shards,
            )
            for tail, (factors, constants) in zip(cut.tails, inputs, strict=True)
        ]
        results = in_loops
        for reduction in reductions:
            results |= reduction.run(reduction.plan.of(Phase.FIRST), states)
        results |= clipped_means(reductions, own_weights, results, states)
        kept = {
            reduction.plan.tail.number: reduction.examples.factors
            for reduction in reductions
            if reduction.plan.keeps_factors
        }
        return Outcome(losses, aux, results, kept)

    def _run_backbone(
        self,
        examples: Sequence[Any],
        w: Weights,
        own_weights: jax.Array,
        start: float,
        states: States,
    ) -> tuple[jax.Array, list[jax.Array], States, list[tuple[list[Any], list[Any]]]]:
        """Losses, leaves of aux, results of tails in loops, and factors and constants of other tails."""
        cut, program, size = self.cut, self.cut.program, examples[0].shape[0]
        shared = None if isinstance(w, jax.Array) else w
        reducers = reducers_in_loops(self.schedule, size, shared, self.shards)

        def one(example: Sequence[Any], w: jax.Array) -> tuple[Any, Any]:
            env = program.starting_env(self.params, example, start)
            loops = InLoops(reducers, w, self.shards)
            results = run_program(cut, env, loops, states, self.directions)
            factors = [[env[v] for v in tail.factors] for tail in cut.tails]
            constants = [[env[v] for v in tail.constants] for tail in cut.tails]
            aux = [read(env, v) for v in program.aux]
            own = read(env, program.value), aux, results.per_example, factors
            return own, (results.accumulators, constants)

        with jax.named_scope("backbone"):
            if size == 1:
                own, shared_by_all = one([x[0] for x in examples], own_weights[0])
                own = jax.tree.map(lambda x: jnp.expand_dims(x, 0), own)
            else:
                own, shared_by_all = jax.vmap(one, out_axes=(0, None))(examples, own_weights)
        (losses, aux, values, factors), (ends, constants) = own, shared_by_all
        return losses, aux, ends | values, list(zip(factors, constants, strict=True))
