"""Runs the backbone of one example, together with the tails inside its loops.

The tails of layers that a loop runs are reduced at the end of the loop's body, and their results leave
the loop stacked. Such a tail is a call with a batching rule of its own (`custom_vmap`). For a batch this
rule reduces over the examples. It returns the states of accumulators, which have no example axis, and
the values of readings, which have one. Every such tail takes the example's weight as an argument, even
if it does not use it: a tail that did not depend on the batch would never meet our `vmap`, and a user's
own outer `vmap` would then reduce it over the wrong axis.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pergrad._compat import Literal, aval
from pergrad._cut import Cut, CutLoop, Examples, Part, Tail, positions_of
from pergrad._ir import Env, evaluate, read, with_example_axis
from pergrad._plan import Schedule, TailPlan, equations_of
from pergrad._run.reduce import Reduction
from pergrad._run.shards import Shards
from pergrad._run.states import Key, States
from pergrad._statistics import Accumulator, Phase, Reading

# A tail in a loop, as a call. Its arguments are the example's weight, the factors and the constants of
# the tail, the states so far, and the directions.
Reducer = Callable[[Any, list[Any], list[Any], States, States], States]


@dataclasses.dataclass(frozen=True)
class InLoops:
    """What the tails in loops need.

    These are the reducer of each, by the tail's number, the weight `w`, and how devices divide the
    gradients.
    """

    reducers: Mapping[int, Reducer]
    w: jax.Array
    shards: Shards


def reducers_in_loops(
    schedule: Schedule, alone: bool, shared: float | None, shards: Shards
) -> dict[int, Reducer]:
    """The reducers of all tails in loops, for one example `alone`, without `vmap`, or for a batch.

    `shared` is the weight of every example, or None if each example has its own.
    """
    make = _reducer_of_one if alone else _reducer
    return {t.tail.number: make(schedule, t, shared, shards) for t in schedule.tails if t.tail.levels}


def run_program(cut: Cut, env: Env, loops: InLoops, states: States, directions: States) -> States:
    """Runs the backbone of the whole program, whose backward pass begins after the loss is known.

    Without that order XLA might compute what only the loss needs, such as the logarithms of all
    probabilities, together with the residuals of the last layer. Both would then be in memory at once.
    """
    ct = cut.program.cotangent
    uses = [ct in eqn.invars for eqn in equations_of(cut)]
    start = uses.index(True) if any(uses) else len(uses)
    forward, backward = (
        dataclasses.replace(cut, backbone=x) for x in (cut.backbone[:start], cut.backbone[start:])
    )
    results = run_backbone(forward, env, loops, states, directions)
    loss = cut.program.value
    if not isinstance(loss, Literal) and loss in env:
        env[ct], env[loss] = lax.optimization_barrier((env[ct], env[loss]))
    return results | run_backbone(backward, env, loops, states, directions)


def run_backbone(part: Part, env: Env, loops: InLoops, states: States, directions: States) -> States:
    """Runs the backbone, adds its variables to `env`, and returns the results of tails in loops."""
    results = States()
    for x in part.backbone:
        if isinstance(x, CutLoop):
            results |= _run_loop(x, env, loops, states, directions)
        else:
            evaluate([x], env)
    return results


def _run_loop(cut_loop: CutLoop, env: Env, loops: InLoops, states: States, directions: States) -> States:
    """Runs a loop with tails inside, and returns their results, which have one entry for each round.

    If there are states from earlier microbatches, the loop carries those of all rounds, and each round
    replaces its own, which XLA does in place. If it returned its states, XLA would set aside a second
    array for those of all rounds. Without earlier states that second array is the only one.
    """
    loop, part = cut_loop.loop, cut_loop.body
    consts, init, xs = loop.operands([read(env, v) for v in loop.eqn.invars])
    params = tuple(param for tail in part.all_tails() for param in tail.params)
    outputs = [k for k in range(len(loop.eqn.outvars)) if k not in cut_loop.taken]

    def body(carry: tuple[list[Any], States], x: Any) -> tuple[tuple[list[Any], States], Any]:
        (own, of_all_rounds), (number, xs, directions) = carry, x
        inner = loop.env(consts, own, xs)
        states = jax.tree.map(lambda s: _of_round(s, number), of_all_rounds)
        results = run_backbone(part, inner, loops, states, directions)
        for tail in part.tails:
            factors, constants = ([inner[v] for v in vs] for vs in (tail.factors, tail.constants))
            so_far, towards = states.of(tail.params), loops.shards.gathered(directions, tail)
            results |= loops.reducers[tail.number](loops.w, factors, constants, so_far, towards)
        outs = [read(inner, loop.body.jaxpr.outvars[k]) for k in outputs]
        new = States({key: results[key] for key in of_all_rounds})
        of_all_rounds = jax.tree.map(lambda s, x: _with_round(s, number, x), of_all_rounds, new)
        others = States({key: x for key, x in results.items() if key not in new})
        return (outs[: loop.num_carry], of_all_rounds), (outs[loop.num_carry :], others)

    numbers, towards = jnp.arange(loop.length), directions.of(params)
    (ends, carried), (ys, others) = loop.run(body, (init, states.of(params)), (numbers, xs, towards))
    env.update({loop.eqn.outvars[k]: out for k, out in zip(outputs, [*ends, *ys], strict=True)})
    return carried | others


# JAX traces the body of a loop without rounds, too, to learn the shapes of its results.


def _of_round(x: jax.Array, number: jax.Array) -> jax.Array:
    """The entry of `x` for the round of this number."""
    is_there = x.shape[0] > 0
    return lax.dynamic_index_in_dim(x, number, 0, False) if is_there else jnp.zeros(x.shape[1:], x.dtype)


def _with_round(x: jax.Array, number: jax.Array, new: jax.Array) -> jax.Array:
    """`x`, with a new entry for the round of this number."""
    return lax.dynamic_update_index_in_dim(x, new, number, 0) if x.shape[0] > 0 else x


def _reducer(schedule: Schedule, t: TailPlan, shared: float | None, shards: Shards) -> Reducer:
    """A tail in a loop, as a call whose batching rule reduces over the examples."""

    @custom_vmap
    def reduce(
        w: Any, factors: list[Any], constants: list[Any], states: States, directions: States
    ) -> States:
        # This body never runs, because the weight always has the example axis. JAX traces it to learn
        # the shapes of the results.
        return States({key: _like_result(t.tail, key, directions.get(key), shards) for key in _keys(t)})

    @reduce.def_vmap
    def rule(
        size: int,
        batched: Any,
        w: Any,
        factors: list[Any],
        constants: list[Any],
        states: States,
        directions: States,
    ) -> tuple[States, Any]:
        factors = [with_example_axis(x, b, size) for x, b in zip(factors, batched[1], strict=True)]
        own = w if shared is None else shared
        examples = Examples(size, own, factors, constants, devices=shards.devices)
        results = _reduced(schedule, t, examples, states, directions, shards)
        has_axis = {
            key: jax.tree.map(lambda _, s=key[1]: not s.accumulates, x) for key, x in results.items()
        }
        return results, States(has_axis)

    return reduce


def _reducer_of_one(schedule: Schedule, t: TailPlan, shared: float | None, shards: Shards) -> Reducer:
    """A tail in a loop, as a call that reduces over one example, whose arrays have no example axis."""

    def reduce(
        w: Any, factors: list[Any], constants: list[Any], states: States, directions: States
    ) -> States:
        in_front = [jnp.expand_dims(x, 0) for x in factors]
        own = w[None] if shared is None else shared
        examples = Examples(1, own, in_front, constants, devices=shards.devices)
        results = _reduced(schedule, t, examples, states, directions, shards)
        return results.accumulators | {key: x[0] for key, x in results.per_example.items()}

    return reduce


def _reduced(
    schedule: Schedule,
    t: TailPlan,
    examples: Examples,
    states: States,
    directions: States,
    shards: Shards,
) -> States:
    reduction = Reduction(t, examples, directions, schedule.paths, shards=shards)
    results = reduction.run(t.of(Phase.FIRST), states)
    return States({key: results[key] for key in _keys(t)})


def _keys(t: TailPlan) -> list[Key]:
    """The keys of a tail in a loop, in the order that both functions of a reducer return them in."""
    made = {(param, s) for c in t.of(Phase.FIRST) for param in c.units.tail.params for s in c.statistics}
    keys = itertools.product(t.tail.params, t.statistics(Phase.FIRST))
    return [key for key in keys if key in made]


def _like_result(tail: Tail, key: Key, direction: Any, shards: Shards) -> Any:
    """Zeros shaped like the state of an accumulator, or like the value of a reading."""
    param, statistic = key
    place = tail.params.index(param)
    like = shards.like(param, statistic, aval(tail.grads[place]))
    if isinstance(statistic, Accumulator):
        return statistic.init(like)
    assert isinstance(statistic, Reading)
    g = jax.ShapeDtypeStruct(like.shape, like.dtype)
    shape = jax.eval_shape(lambda g: statistic.of(g, direction), g)
    positions = [positions_of(tail, place)] if statistic.unit == "position" else []
    return jnp.zeros((*positions, *shape.shape), shape.dtype)
