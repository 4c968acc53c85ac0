"""Runs all examples, one microbatch after the other.

The backbone of one example runs under `jax.vmap`, which returns the factors of its tails for all
examples of the microbatch. Then every tail is reduced over these examples; XLA is free to do that as
soon as the factors of the tail are computed. Tails with means whose weights depend on norms are reduced
once more, with these weights, after all norms are known. If examples that are not finite are dropped,
every accumulator waits for the norms.

A `lax.scan` runs all microbatches and hands the states on from one to the next. A batch or microbatch of
one example runs without `vmap`, because an axis of length 1 in front would only be in XLA's way. If
several devices share the batch, each device runs its own examples.

Under `vmap` a conditional whose branch depends on the example runs all branches. Without it only one
runs, and on another device another one. That must not happen if XLA divides the work of each device
along further axes of the mesh, since then a branch may have collectives in which all devices meet.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import aval
from pergrad._cut import Cut, Examples
from pergrad._ir import Devices, Weights, read, takes_branches_by
from pergrad._plan import Schedule
from pergrad._run.backbone import InLoops, reducers_in_loops, run_program
from pergrad._run.by_norm import means_by_norm
from pergrad._run.finite import finite_examples
from pergrad._run.reduce import Reduction, empty_states
from pergrad._run.shards import Shards
from pergrad._run.states import Key, States
from pergrad._statistics import Accumulator, Phase
from pergrad._trace import Program

SCOPE = "pergrad"  # the named scope of a run, which has a scope for the backbone and for each tail


class Given(NamedTuple):
    """What the caller passes by keyword, as one array for each parameter.

    `directions` are those of inner products, and `max_norms` are the largest norms. They are None if no
    statistic takes them. Several directions of a parameter have one more axis in front.
    """

    directions: Sequence[Any] | None = None
    max_norms: Sequence[Any] | None = None


NOTHING = Given()
WHOLE = Shards()


class Outcome(NamedTuple):
    """What all phases but the last return.

    `losses` are [B], and the leaves `aux` are [B, ...]. `states` has the states of accumulators and the
    values of all other statistics. `factors` has the factors [B, ...] that are kept for the last phase,
    by the number of the tail. `finite` [B] says which examples were not dropped, or is None if none is.
    """

    losses: jax.Array
    aux: list[jax.Array]
    states: States
    factors: dict[int, list[jax.Array]]
    finite: jax.Array | None


@jax.named_scope(SCOPE)
def run(
    cut: Cut,
    schedule: Schedule,
    params: Sequence[Any],
    examples: Sequence[Any],
    w: Weights,
    given: Given = NOTHING,
    shards: Shards = WHOLE,
) -> Outcome:
    """Runs all phases of the schedule but the last for the examples, whose leaves are [B, ...].

    `w` is each example's share of the batch: [B], or one number for all. If examples are dropped, the
    states are those for the shares of the others, which then do not add up to 1. `shards` says how
    devices divide the parameters, and the directions with them.
    """
    directions = _directions(cut, schedule, given.directions, shards)
    microbatch = _Microbatch(cut, schedule, params, directions, given.max_norms, shards)
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
        return ends, out._replace(states=out.states.per_example)

    states, per_example = lax.scan(body, states, xs)
    out = jax.tree.map(
        lambda x: x.reshape(rounds * length, *x.shape[2:])[: schedule.batch_size], per_example
    )
    return out._replace(states=states | out.states)


def runs_alone(program: Program, devices: Devices) -> bool:
    """Whether a single example runs without `vmap`."""
    return not (devices.are_teams and takes_branches_by(program.jaxpr.eqns, program.example))


def _starting_states(schedule: Schedule, shards: Shards) -> States:
    """Empty states for all accumulators if a loop over microbatches carries them.

    Without such a loop, accumulators start without a state, so that JAX need not trace an addition of 0.
    """
    states = States()
    if schedule.microbatches > 1:
        for t in schedule.tails:
            running = t.statistics(Phase.FIRST, Phase.KEPT, Phase.BY_NORM)
            accumulators = [s for s in running if isinstance(s, Accumulator)]
            states |= empty_states(t, accumulators, schedule.paths, shards)
    return states


def _directions(
    cut: Cut, schedule: Schedule, directions: Sequence[Any] | None, shards: Shards
) -> States:
    """What statistics need beside gradients, for each parameter, as the direction of a call.

    In a tail in loops, a direction is laid out like the gradient inside the loops. The axis of several
    directions then stands behind the axes of the loops.
    """
    found: dict[Key, Any] = {}
    for t in schedule.tails:
        for param, statistic in itertools.product(t.tail.params, t.statistics(Phase.FIRST)):
            like, direction = aval(cut.program.grads[param]), None
            if directions is not None and statistic.takes_direction:
                inward = functools.partial(shards.inward, t.tail, param)
                if directions[param].ndim > len(like.shape):
                    inward = jax.vmap(inward, out_axes=len(t.tail.levels))
                direction = inward(directions[param])
            own = statistic.towards(schedule.paths[param], like, direction)
            if own is not None:
                found[param, statistic] = own
    return States(found)


class _Microbatch(NamedTuple):
    """The program that runs for each microbatch."""

    cut: Cut
    schedule: Schedule
    params: Sequence[Any]
    directions: States
    max_norms: Sequence[Any] | None
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
                Examples(size, w, factors, constants, devices=self.shards.devices),
                self.shards.gathered(self.directions, tail),
                schedule.paths,
                weighed,
                self.shards,
            )
            for tail, (factors, constants) in zip(cut.tails, inputs, strict=True)
        ]
        results = in_loops
        for reduction in reductions:
            results |= reduction.run(reduction.plan.of(Phase.FIRST), states)
        finite = None
        if schedule.drops:
            finite = finite_examples(reductions, losses, own_weights, results)
            own_weights = jnp.where(finite, own_weights, 0)
            for reduction in reductions:
                kept = reduction.with_weights(own_weights)
                results |= kept.run(reduction.plan.of(Phase.KEPT), states)
        results |= means_by_norm(reductions, own_weights, results, states, self.max_norms)
        factors = {
            reduction.plan.tail.number: reduction.examples.factors
            for reduction in reductions
            if reduction.plan.keeps_factors
        }
        return Outcome(losses, aux, results, factors, finite)

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
        alone = size == 1 and runs_alone(program, self.shards.devices)
        reducers = reducers_in_loops(self.schedule, alone, shared, self.shards)

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
            if alone:
                own, shared_by_all = one([x[0] for x in examples], own_weights[0])
                own = jax.tree.map(lambda x: jnp.expand_dims(x, 0), own)
            else:
                own, shared_by_all = jax.vmap(one, out_axes=(0, None))(examples, own_weights)
        (losses, aux, values, factors), (ends, constants) = own, shared_by_all
        return losses, aux, ends | values, list(zip(factors, constants, strict=True))
