"""Step 4: the rewritten program runs for all examples at once, and every tail is reduced.

The program of one example is evaluated under `jax.vmap`, the backbone as it stands. A tail is a call
with a batching rule of its own (`custom_vmap`): for a batch it reduces over the examples and returns
the states of its statistics, which have no example axis any more. The tails come after the whole
backbone, so that XLA is free to run each as soon as its factors are there. Those of layers that a loop
runs come at the end of its step, and their states leave the loop stacked.

Each tail is given the example's weight even if it needs none: a tail that did not depend on the batch
would never meet our `vmap`, and a user's own outer `vmap` would then reduce it over the wrong axis.

Microbatches are a `lax.scan` around all that, which hands the states on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pergrad._compat import aval
from pergrad._cut import Cut, CutLoop, Part
from pergrad._eval import Env, evaluate, read
from pergrad._plan import Plan, TailPlan
from pergrad._statistics import Accumulator, Individual, State, Weights
from pergrad._tail import Tail
from pergrad.strategies import Examples, Job

States = list[list[State]]
Numbered = dict[int, list[State]]  # by the number of the tail
Reducers = dict[int, tuple[int, Callable[..., list[State]]]]  # by identity of the tail: number, reducer


class Outcome(NamedTuple):
    """Losses [B], the leaves of `aux` [B, ...], and for each tail the state of each of its jobs."""

    losses: jax.Array
    aux: list[jax.Array]
    states: States


def run(cut: Cut, plan: Plan, params: Sequence[Any], examples: Sequence[Any], w: Weights) -> Outcome:
    """Runs the plan for the leaves `examples` [B, ...].

    `w` is each example's share of the batch, [B], or one number for all.
    """
    empty = _empty_states(plan)
    steps = math.ceil(plan.batch_size / plan.microbatch_size)
    if steps == 1:
        return _run_at_once(cut, plan, params, examples, w, empty)

    # As few steps as the microbatch size allows, and of equal length: what is missing to fill the
    # last one is repeated from the front, with weight 0.
    length = math.ceil(plan.batch_size / steps)
    missing = steps * length - plan.batch_size
    if missing:
        w = w if isinstance(w, jax.Array) else jnp.full(plan.batch_size, w)
        w = jnp.concatenate([w, jnp.zeros(missing, w.dtype)])
        examples = [jnp.concatenate([x, x[:missing]]) for x in examples]
    own_weights = w if isinstance(w, jax.Array) else None
    xs = jax.tree.map(lambda x: x.reshape(steps, length, *x.shape[1:]), (examples, own_weights))

    def step(states: States, xs: Any) -> tuple[States, Any]:
        examples, own_weights = xs
        out = _run_at_once(
            cut, plan, params, examples, w if own_weights is None else own_weights, states
        )
        # Individual gradients are not handed on but stacked, like losses.
        handed_on = _where_individual(plan, empty, out.states)
        stacked = _where_individual(plan, out.states, None)
        return handed_on, (out.losses, out.aux, stacked)

    states, per_example = lax.scan(step, empty, xs)
    losses, aux, stacked = jax.tree.map(
        lambda x: x.reshape(steps * length, *x.shape[2:])[: plan.batch_size], per_example
    )
    return Outcome(losses, aux, _where_individual(plan, stacked, states))


def _run_at_once(
    cut: Cut,
    plan: Plan,
    params: Sequence[Any],
    examples: Sequence[Any],
    w: Weights,
    starts: States,
) -> Outcome:
    program = cut.program
    shared = None if isinstance(w, jax.Array) else w
    reducers = {id(t.tail): (n, _reducer(t, shared)) for n, t in enumerate(plan.tails)}

    def one(example: Sequence[Any], w: jax.Array) -> tuple[Any, list[Any], States]:
        env = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        env |= zip(program.params, params, strict=True)
        env |= zip(program.example, example, strict=True)
        states = _run_part(cut, env, reducers, w, dict(enumerate(starts)))
        in_order = [states[n] for n in range(len(starts))]
        return read(env, program.value), [read(env, v) for v in program.aux], in_order

    w = w if isinstance(w, jax.Array) else jnp.full(examples[0].shape[0], w)
    return Outcome(*jax.vmap(one, out_axes=(0, 0, None))(examples, w))


def _run_part(part: Part, env: Env, reducers: Reducers, w: jax.Array, starts: Numbered) -> Numbered:
    """Runs the backbone, which adds to `env`, and then the tails: their states, by number."""
    states: Numbered = {}
    for eqn in part.backbone:
        cut_loop = part.loops.get(id(eqn))
        if cut_loop is None:
            evaluate([eqn], env)
        else:
            states |= _run_loop(cut_loop, env, reducers, w, starts)
    for tail in part.tails:
        n, reduce = reducers[id(tail)]
        factors, constants = ([env[v] for v in vs] for vs in (tail.factors, tail.constants))
        states[n] = reduce(w, factors, constants, starts[n])
    return states


def _run_loop(
    cut_loop: CutLoop, env: Env, reducers: Reducers, w: jax.Array, starts: Numbered
) -> Numbered:
    """Runs a loop that has tails inside. Their states, one for each step, are outputs of the loop."""
    loop, taken = cut_loop.loop, cut_loop.taken
    consts, init, xs = loop.operands([read(env, v) for v in loop.eqn.invars])
    inside = [reducers[id(tail)][0] for tail in cut_loop.step.all_tails()]
    results = [k for k in range(len(loop.eqn.outvars)) if k not in taken]

    def step(carry: list[Any], x: Any) -> tuple[list[Any], Any]:
        own, starts = x
        step_env = loop.env(consts, carry, own)
        states = _run_part(cut_loop.step, step_env, reducers, w, starts)
        outs = [read(step_env, loop.step.jaxpr.outvars[k]) for k in results]
        return outs[: loop.num_carry], (outs[loop.num_carry :], states)

    ends, (ys, states) = loop.run(step, init, (xs, {n: starts[n] for n in inside}))
    env.update({loop.eqn.outvars[k]: out for k, out in zip(results, [*ends, *ys], strict=True)})
    return states


def _reducer(tail_plan: TailPlan, shared: float | None) -> Callable[..., list[State]]:
    """A tail as a call that, for a batch, reduces over its examples.

    `shared` is the weight of all of them, or None if each has its own.
    """
    tail = tail_plan.tail

    @custom_vmap
    def reduce(w: Any, factors: list[Any], constants: list[Any], starts: list[State]) -> list[State]:
        # Never run, since the weight has the example axis: it says what the states look like.
        return [
            jnp.zeros((1, *state.shape[1:]), state.dtype) if isinstance(statistic, Individual) else state
            for (_, statistic), state in zip(tail_plan.jobs(), starts, strict=True)
        ]

    @reduce.def_vmap
    def rule(
        size: int,
        batched: Any,
        w: Any,
        factors: list[Any],
        constants: list[Any],
        starts: list[State],
    ) -> tuple[list[State], Any]:
        factors = [
            x if has_axis else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, has_axis in zip(factors, batched[1], strict=True)
        ]
        examples = Examples(size, w if shared is None else shared, factors, constants)
        jobs = [Job(*job, start) for job, start in zip(tail_plan.jobs(), starts, strict=True)]
        states: list[State] = []
        for choice in tail_plan.choices:
            own = jobs[len(states) : len(states) + len(tail.grads) * len(choice.statistics)]
            states += choice.strategy.reduce(tail, own, examples)
        return states, jax.tree.map(lambda _: False, states)

    return reduce


def _empty_states(plan: Plan) -> States:
    return [[_empty_state(tail_plan.tail, *job) for job in tail_plan.jobs()] for tail_plan in plan.tails]


def _empty_state(tail: Tail, grad: int, statistic: Accumulator) -> State:
    """The state before the first example; for a tail in loops one for each of their steps."""
    state = statistic.init(aval(tail.grads[grad]))
    if not tail.levels:
        return state
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*tail.lengths, *x.shape)), state)


def _where_individual(plan: Plan, yes: States | None, no: States | None) -> States:
    """The states of `yes` for `Individual`, those of `no` for the other statistics."""
    return [
        [
            None if source is None else source[t][j]
            for j, (_, statistic) in enumerate(tail_plan.jobs())
            for source in [yes if isinstance(statistic, Individual) else no]
        ]
        for t, tail_plan in enumerate(plan.tails)
    ]
