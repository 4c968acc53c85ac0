"""Reduces one tail over some examples, with the strategies of its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pergrad._compat import Var, aval
from pergrad._cut import Examples, Tail, Units
from pergrad._ir import weigh
from pergrad._plan import Choice, TailPlan, keys_of
from pergrad._run.shards import Shards
from pergrad._run.states import Key, States
from pergrad._statistics import Accumulator, holders
from pergrad._strategies import Job

NAMED = 3  # how many of its parameters the name of a tail has at most


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The plan of a tail, and the examples over which the tail is reduced.

    `directions` has what statistics need beside gradients, as the direction of a call, laid out like the
    gradients of the tail. `paths` are the names of all parameters. `weighed` are the variables that
    carry the weight of an example as a factor, which are none if the backward pass started from 1.
    `shards` says how devices divide the gradients. `_units` keeps the units that have been made.
    """

    plan: TailPlan
    examples: Examples
    directions: States
    paths: Sequence[str]
    weighed: Collection[Var] = ()
    shards: Shards = dataclasses.field(default_factory=Shards)
    _units: dict[Units, Examples] = dataclasses.field(default_factory=dict)

    def run(self, choices: Sequence[Choice], states: States) -> States:
        """The new states of the choices' accumulators, and the values of their other statistics.

        An accumulator continues from its entry in `states`, if there is one. Several choices may feed
        the same accumulator, each with another kind of units. A divided state that another one holds is
        read off there, so that devices add it up once.
        """
        results: dict[Key, Any] = {}
        held = self._held(choices)
        for choice in choices:
            keys = [key for key in self.keys(choice) if key not in held]
            starts = {key: results[key] if key in results else states.get(key) for key in keys}
            if keys:
                results |= self.feed(choice, starts, self._seen_by(choice))
        return States(results | {key: by[1].held(results[by]) for key, by in held.items()})

    def _held(self, choices: Sequence[Choice]) -> dict[Key, tuple[int, Accumulator]]:
        """The divided states that another state of these choices holds, and which one that is."""
        own = {statistic for choice in choices for statistic in choice.statistics}
        return {
            (param, held): (param, by)
            for held, by in holders(own).items()
            for param in self.plan.tail.params
            if self.shards.of_state((param, held))
        }

    def keys(self, choice: Choice) -> list[Key]:
        """The pairs of a parameter and a statistic that a choice computes."""
        own = [param for param in self.plan.tail.params if param in choice.units.tail.params]
        return [(param, statistic) for param in own for statistic in choice.statistics]

    def feed(self, choice: Choice, starts: Mapping[Key, Any], examples: Examples) -> dict[Key, Any]:
        """The new states or values of all keys in `starts`, computed by the choice's strategy.

        `examples` are the units that the strategy sees, and `starts` has the state of each key so far.
        """
        tail = choice.units.tail
        jobs = [self._job(tail, key, state) for key, state in starts.items()]
        with jax.named_scope(self.name), jax.named_scope(str(choice.strategy)):
            made = choice.strategy.reduce_on_devices(tail, jobs, examples)
        triples = zip(starts.items(), jobs, made, strict=True)
        return {key: self._result(job, state, x) for (key, state), job, x in triples}

    def _job(self, tail: Tail, key: Key, state: Any) -> Job:
        """The job of a strategy. A state that devices divide begins with these examples."""
        (param, statistic), shard = key, self.shards.of_state(key)
        place, direction = tail.params.index(param), self.directions.get(key)
        return Job(place, statistic, None if shard else state, direction, shard)

    def _result(self, job: Job, state: Any, made: Any) -> Any:
        """What is left of what a strategy has made.

        A shard is merged with the state so far. The values of positions [B T, ...] get axes of both,
        [B, T, ...].
        """
        if job.shard is not None:
            return job.statistic.from_quantity(state, made)
        if job.statistic.unit != "position":
            return made
        return made.reshape(self.examples.size, -1, *made.shape[1:])

    @property
    def name(self) -> str:
        """The name of the tail in profiles."""
        return _name_of(self.plan.tail, self.paths)

    def with_weights(self, w: jax.Array) -> Reduction:
        """The same reduction, with other weights for the examples.

        Units that have been made and are weighted as the examples are need not be made again.
        """
        old = self.examples.weights
        made = {u: dataclasses.replace(x, weights=w) for u, x in self._units.items() if x.weights is old}
        return dataclasses.replace(
            self, examples=dataclasses.replace(self.examples, weights=w), _units=made
        )

    def units(self, units: Units) -> Examples:
        """The units of the examples. Each kind of units is made once."""
        if units not in self._units:
            self._units[units] = units.of(self.examples)
        return self._units[units]

    def _seen_by(self, choice: Choice) -> Examples:
        """The units that the strategy of a choice sees.

        What is read of each example does not depend on weights: an example of weight 0 has its own
        value. If the backward pass started from the weight w of an example, a sum of gradients uses
        factors and constants as they are. For any other statistic those that depend on the cotangent are
        divided by w.
        """
        if not self.weighed:
            if any(statistic.accumulates for statistic in choice.statistics):
                return self.units(choice.units)
            if choice.units.depend_on_weights:
                return choice.units.of(dataclasses.replace(self.examples, weights=1.0))
            return dataclasses.replace(self.units(choice.units), weights=1.0)
        w, tail = self.examples.weights, self.plan.tail
        assert isinstance(w, float)
        if all(statistic.is_sum for statistic in choice.statistics):
            return choice.units.of(dataclasses.replace(self.examples, weights=1.0))

        def divided(vs: Sequence[Var], xs: Sequence[jax.Array]) -> list[jax.Array]:
            return [weigh(x, 1 / w) if v in self.weighed else x for v, x in zip(vs, xs, strict=True)]

        factors = divided(tail.factors, self.examples.factors)
        constants = divided(tail.constants, self.examples.constants)
        return choice.units.of(dataclasses.replace(self.examples, factors=factors, constants=constants))


def _name_of(tail: Tail, paths: Sequence[str]) -> str:
    """The name of a tail in profiles, made of its parameters, such as `tail[params/Dense_0/kernel]`."""
    keys = [keys_of(paths[param]) for param in tail.params[:NAMED]]
    names = ["/".join(key.strip(".[]'\"") for key in own) for own in keys]
    others = len(tail.params) - len(names)
    return f"tail[{', '.join(names)}{f' and {others} more' if others else ''}]"


def empty_states(
    plan: TailPlan, accumulators: Collection[Accumulator], paths: Sequence[str], shards: Shards
) -> States:
    """The states before the first example. A tail in loops has one state for each of their rounds."""
    tail = plan.tail

    def empty(place: int, accumulator: Accumulator) -> Any:
        state = accumulator.init(shards.like(tail.params[place], accumulator, aval(tail.grads[place])))
        if not tail.levels:
            return state
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*tail.lengths, *x.shape)), state)

    return States(
        {
            (param, accumulator): empty(place, accumulator)
            for accumulator in accumulators
            for place, param in enumerate(tail.params)
            if accumulator.selects(paths[param])
        }
    )
