"""All examples, one microbatch after the other.

The backbone of one example is evaluated under `jax.vmap`, as it stands, and hands out the factors of its
tails for all examples of the microbatch. Then every tail is reduced over them; XLA is free to do so as
soon as its factors are there. For clipped means tails are reduced once more, with other weights, when
all norms have been read.

Microbatches are a `lax.scan` around all that, which hands the states on. A batch or microbatch of one
example runs without `vmap`: an axis of length 1 in front would only be in XLA's way. If several devices
share the batch, each does all of that with its own examples, and has then a part of the states of all.
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
from pergrad._run.backbone import InLoops, reducers_in_loops, run_backbone
from pergrad._run.clip import clipped_means
from pergrad._run.reduce import Directions, Reduction, empty_states
from pergrad._run.states import States
from pergrad._statistics import Accumulator, Phase

SCOPE = "pergrad"  # the named scope of all that runs; `backbone` and tails are named within


class Outcome(NamedTuple):
    """What has been seen of the examples.

    Losses [B], the leaves of `aux` [B, ...], the states of accumulators and the values of all other
    statistics, and by the number of the tail the factors [B, ...] that are kept.
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
    directions: Sequence[Any] | None = None,
) -> Outcome:
    """Runs the first two phases of the schedule for the leaves `examples` [B, ...].

    `w` is each example's share of the batch, [B], or one number for all. `directions` has one for each
    parameter, for inner products.
    """
    microbatch = _Microbatch(cut, schedule, params, _inward(schedule, directions))
    states = _starting_states(schedule)
    rounds = schedule.microbatches
    if rounds == 1:
        return microbatch.run(examples, w, states)

    # As few microbatches as their size allows, all of equal length (in whole groups). What is missing to
    # fill the last one is repeated from the front, with weight 0.
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


def _starting_states(schedule: Schedule) -> States:
    """Empty states for the accumulators that a loop carries on: over microbatches, or over layers.

    Elsewhere an accumulator starts from nothing: JAX need not trace, nor XLA remove, that 0 is added.
    """
    states = States()
    for t in schedule.tails:
        if schedule.microbatches > 1 or t.tail.levels:
            running = t.statistics(Phase.FIRST, Phase.CLIPPED)
            states |= empty_states(t, [s for s in running if isinstance(s, Accumulator)])
    return states


def _inward(schedule: Schedule, directions: Sequence[Any] | None) -> dict[int, Any]:
    """The directions of the parameters, laid out like the gradients in the loops of their tails."""
    found: dict[int, Any] = {}
    if directions is None:
        return found
    for t in schedule.tails:
        if any(statistic.takes_direction for statistic in t.statistics(Phase.FIRST)):
            for param in t.tail.params:
                direction = directions[param]
                found[param] = t.tail.inward(param, direction) if t.tail.levels else direction
    return found


class _Microbatch(NamedTuple):
    """What runs for each microbatch."""

    cut: Cut
    schedule: Schedule
    params: Sequence[Any]
    directions: Directions

    def run(self, examples: Sequence[Any], w: Weights, states: States) -> Outcome:
        """The outcome for these examples; accumulators go on from `states`."""
        cut, schedule, size = self.cut, self.schedule, examples[0].shape[0]
        own_weights = w if isinstance(w, jax.Array) else jnp.full(size, w)
        starts_from_weight = bool(schedule.weighed) and not isinstance(w, jax.Array)
        losses, aux, in_loops, inputs = self._run_backbone(examples, w, own_weights, states)
        reductions = [
            Reduction(
                schedule.tails[tail.number],
                Examples(size, w, factors, constants),
                self.directions,
                schedule.paths,
                schedule.weighed if starts_from_weight else (),
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
        self, examples: Sequence[Any], w: Weights, own_weights: jax.Array, states: States
    ) -> tuple[jax.Array, list[jax.Array], States, list[tuple[list[Any], list[Any]]]]:
        """Losses, leaves of aux, results of tails in loops, factors and constants of the others."""
        cut, program, size = self.cut, self.cut.program, examples[0].shape[0]
        shared = None if isinstance(w, jax.Array) else w
        start = shared if self.schedule.weighed and shared is not None else 1.0
        reducers = reducers_in_loops(self.schedule, size, shared)
        inner = {
            param: v
            for t in self.schedule.tails
            for param, v in self.directions.items()
            if t.tail.levels and param in t.tail.params
        }

        def one(example: Sequence[Any], w: jax.Array) -> tuple[Any, Any]:
            env = program.starting_env(self.params, example, start)
            results = run_backbone(cut, env, InLoops(reducers, w), states, inner)
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
