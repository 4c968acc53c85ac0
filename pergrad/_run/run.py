"""Step 4: the rewritten program runs for all examples at once, and every tail is reduced.

The backbone of one example is evaluated under `jax.vmap`, as it stands, and hands out the factors of its
tails for all examples. Then every tail is reduced over them; XLA is free to do so as soon as its factors
are there. For clipped means tails are reduced once more, with other weights, when all norms have been
read. What needs the gradients of all examples side by side comes last, from their factors, which are
kept for it.

The tails of layers that a loop runs come at the end of its step, and their results leave the loop
stacked. Such a tail is a call with a batching rule of its own (`custom_vmap`): for a batch it reduces
over the examples and returns the states of its accumulators, which have no example axis any more, and
its readings, which have one. It is given the example's weight even if it needs none: a tail that did not
depend on the batch would never meet our `vmap`, and a user's own outer `vmap` would then reduce it over
the wrong axis.

Microbatches are a `lax.scan` around all that, which hands the states on. A batch or microbatch of one
example runs without `vmap`: an axis of length 1 in front would only be in XLA's way (see `_squeeze`). If
several devices share the batch, each does all of that with its own examples, and has then a part of the
states of all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pergrad._compat import aval
from pergrad._cut import (
    Cut,
    CutLoop,
    Examples,
    FactorPair,
    Part,
    Tail,
    depends_on_cotangent,
    factor_pair,
)
from pergrad._ir import Devices, Env, Weights, evaluate, evaluate_still, needed_equations, read
from pergrad._plan import Choice, Phase, Schedule, TailPlan, keys_of, seen_by
from pergrad._statistics import (
    Accumulator,
    ClippedMean,
    LeafStatistic,
    Projection,
    Reading,
    SquaredNorm,
    State,
    added_up,
)
from pergrad._strategies import Job

Jobs = list[tuple[int, LeafStatistic]]


Results = list[list[Any]]  # for each tail, one for each of its jobs


Numbered = dict[int, list[Any]]  # the same, by the number of the tail


Reducers = dict[int, tuple[int, Callable[..., list[Any]]]]  # by identity of the tail: number, reducer


SCOPE = "pergrad"  # the named scope of all that runs; `backbone` and tails are named within


NAMED = 3  # parameters in the name of a tail that they share


class Outcome(NamedTuple):
    """What has been seen of the examples.

    Losses [B], the leaves of `aux` [B, ...], for each tail the results of its jobs (the state of an
    accumulator, a reading [B, ...]), and by the number of the tail the factors [B, ...] that are kept.
    """

    losses: jax.Array
    aux: list[jax.Array]
    results: Results
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
    steps = math.ceil(schedule.batch_size / schedule.microbatch_size)
    given = [[_given(t.tail, *job, directions, steps) for job in t.running()] for t in schedule.tails]
    if steps == 1:
        return _run_at_once(cut, schedule, params, examples, w, given)

    # As few steps as the microbatch size allows, and of equal length (in whole groups): what is missing
    # to fill the last one is repeated from the front, with weight 0.
    length = schedule.group_size * math.ceil(schedule.batch_size / (steps * schedule.group_size))
    missing = steps * length - schedule.batch_size
    if missing:
        w = w if isinstance(w, jax.Array) else jnp.full(schedule.batch_size, w)
        w = jnp.concatenate([w, jnp.zeros(missing, w.dtype)])
        examples = [jnp.concatenate([x, x[:missing]]) for x in examples]
    own_weights = w if isinstance(w, jax.Array) else None
    xs = jax.tree.map(lambda x: x.reshape(steps, length, *x.shape[1:]), (examples, own_weights))

    def step(states: Results, xs: Any) -> tuple[Results, Any]:
        examples, own_weights = xs
        own_weights = w if own_weights is None else own_weights
        now = _either(states, given)
        out = _run_at_once(cut, schedule, params, examples, own_weights, now)
        readings = _only(schedule, Reading, out.results)
        return _only(schedule, Accumulator, out.results), (out.losses, out.aux, readings, out.factors)

    states, per_example = lax.scan(step, _only(schedule, Accumulator, given), xs)
    losses, aux, readings, factors = jax.tree.map(
        lambda x: x.reshape(steps * length, *x.shape[2:])[: schedule.batch_size], per_example
    )
    return Outcome(losses, aux, _either(states, readings), factors)


def part_of_all(schedule: Schedule, outcome: Outcome, devices: Devices) -> Outcome:
    """The outcome with this device's part of the states of all, for accumulators."""
    if not devices.axes:
        return outcome
    results = [
        [
            s.part_of_all(x, devices) if isinstance(s, Accumulator) else x
            for (_, s), x in zip(t.running(), own, strict=True)
        ]
        for t, own in zip(schedule.tails, outcome.results, strict=True)
    ]
    return outcome._replace(results=results)


@jax.named_scope(SCOPE)
def run_last(
    cut: Cut, schedule: Schedule, params: Sequence[Any], outcome: Outcome, devices: Devices
) -> tuple[Results, dict[int, FactorPair | None]]:
    """The last phase: what needs the factors of all examples.

    For each tail the results of its jobs, and by the number of the parameter its pair of factors. Inner
    products are those of the own examples with all: for them the factors of all devices are gathered.
    """
    program = cut.program
    kept = [schedule.tails[n].tail for n in outcome.factors]
    env = program.given(params)
    constants = {v for tail in kept for v in tail.constants}
    evaluate_still(needed_equations(program.jaxpr.eqns, constants), env, cut.varies)
    hands_out = any(t.hands_out_factors for t in schedule.tails)
    late = depends_on_cotangent(program) if hands_out else set()
    results: Results = []
    pairs: dict[int, FactorPair | None] = {}
    for n, t in enumerate(schedule.tails):
        jobs = t.jobs(Phase.LAST)
        factors, constants = outcome.factors.get(n, []), [env[v] for v in t.tail.constants if v in env]
        examples = Examples(schedule.batch_size, 1 / schedule.batch_size, factors, constants)
        everybody = _of_all(examples, devices) if jobs else examples
        results.append(_reduce(schedule, t.tail, t.of(Phase.LAST), jobs, [None] * len(jobs), everybody))
        if t.hands_out_factors:
            pair = factor_pair(t.tail, late, examples)
            pairs |= dict.fromkeys(t.tail.params, pair)
    return results, pairs


def _of_all(examples: Examples, devices: Devices) -> Examples:
    """The examples of all devices, of which some are here."""
    here = devices.first(examples.size), examples.size
    size, factors = devices.number * examples.size, [devices.join(x) for x in examples.factors]
    return Examples(size, 1 / size, factors, examples.constants, here if devices.axes else None)


def _run_at_once(
    cut: Cut,
    schedule: Schedule,
    params: Sequence[Any],
    examples: Sequence[Any],
    w: Weights,
    given: Results,
) -> Outcome:
    program = cut.program
    size = examples[0].shape[0]
    start = w if schedule.weighed and not isinstance(w, jax.Array) else 1.0
    in_loops = range(len(cut.tails), len(schedule.tails))
    reducer = _reducer_of_one if size == 1 else _reducer
    reducers: Reducers = {
        id(t.tail): (n, reducer(schedule, t, None if isinstance(w, jax.Array) else w))
        for n, t in enumerate(schedule.tails)
        if n in in_loops
    }

    def one(example: Sequence[Any], w: jax.Array) -> tuple[Any, Any]:
        env = program.given(params, example, start)
        by_number = _run_backbone(cut, env, reducers, w, {n: given[n] for n in in_loops})
        results = [by_number.get(n, [None] * len(own)) for n, own in enumerate(given)]
        factors = [[env[v] for v in tail.factors] for tail in cut.tails]
        constants = [[env[v] for v in tail.constants] for tail in cut.tails]
        aux = [read(env, v) for v in program.aux]
        own = read(env, program.value), aux, _only(schedule, Reading, results), factors
        return own, (_only(schedule, Accumulator, results), constants)

    own_weights = w if isinstance(w, jax.Array) else jnp.full(size, w)
    with jax.named_scope("backbone"):
        if size == 1:
            own, shared = one([x[0] for x in examples], own_weights[0])
            own = jax.tree.map(lambda x: jnp.expand_dims(x, 0), own)
        else:
            own, shared = jax.vmap(one, out_axes=(0, None))(examples, own_weights)
    (losses, aux, readings, factors), (states, constants) = own, shared

    results = _either(states, readings)
    inputs = [Examples(size, w, *own) for own in zip(factors, constants, strict=True)]
    for n, own in enumerate(inputs):
        t = schedule.tails[n]
        jobs = t.jobs(Phase.FIRST)
        results[n] = given[n][: len(jobs)]
        for choice in t.of(Phase.FIRST):
            seen = own if start == 1 else seen_by(choice, t.tail, own, schedule.weighed)
            results[n] = _reduce(schedule, t.tail, [choice], jobs, results[n], seen)
    for n, clipped in _clipped(schedule, inputs, own_weights, results, given).items():
        results[n] += clipped
    kept = {n: own.factors for n, own in enumerate(inputs) if schedule.tails[n].keeps_factors}
    return Outcome(losses, aux, results, kept)


def _run_backbone(part: Part, env: Env, reducers: Reducers, w: jax.Array, given: Numbered) -> Numbered:
    """Runs the backbone, which adds to `env`: the results of the tails in its loops, by number."""
    results: Numbered = {}
    for eqn in part.backbone:
        cut_loop = part.loops.get(id(eqn))
        if cut_loop is None:
            evaluate([eqn], env)
        else:
            results |= _run_loop(cut_loop, env, reducers, w, given)
    return results


def _run_loop(
    cut_loop: CutLoop, env: Env, reducers: Reducers, w: jax.Array, given: Numbered
) -> Numbered:
    """Runs a loop that has tails inside. Their results, one for each step, are outputs of the loop."""
    loop, taken = cut_loop.loop, cut_loop.taken
    consts, init, xs = loop.operands([read(env, v) for v in loop.eqn.invars])
    inside = [reducers[id(tail)][0] for tail in cut_loop.step.all_tails()]
    outputs = [k for k in range(len(loop.eqn.outvars)) if k not in taken]

    def step(carry: list[Any], x: Any) -> tuple[list[Any], Any]:
        own, given = x
        step_env = loop.env(consts, carry, own)
        results = _run_backbone(cut_loop.step, step_env, reducers, w, given)
        for tail in cut_loop.step.tails:
            n, reduce = reducers[id(tail)]
            factors, constants = ([step_env[v] for v in vs] for vs in (tail.factors, tail.constants))
            results[n] = reduce(w, factors, constants, given[n])
        outs = [read(step_env, loop.step.jaxpr.outvars[k]) for k in outputs]
        return outs[: loop.num_carry], (outs[loop.num_carry :], results)

    ends, (ys, results) = loop.run(step, init, (xs, {n: given[n] for n in inside}))
    env.update({loop.eqn.outvars[k]: out for k, out in zip(outputs, [*ends, *ys], strict=True)})
    return results


def _clipped(
    schedule: Schedule,
    inputs: Sequence[Examples],
    w: jax.Array,
    results: Results,
    given: Results,
) -> Numbered:
    """The clipped means of tails, which stand in no loop; `results` has the norms, `w` is [B]."""
    squares = {
        t.tail.params[k]: result
        for t, own in zip(schedule.tails, results, strict=True)
        for (k, statistic), result in zip(t.jobs(Phase.FIRST), own, strict=True)
        if isinstance(statistic, SquaredNorm)
    }

    @functools.cache
    def weights(statistic: ClippedMean, params: tuple[int, ...]) -> jax.Array:
        """The examples' weights among the clipped, from their norms over these parameters."""
        own = statistic.weight(added_up([squares[param] for param in params]))
        return jnp.where(w != 0, w * own.astype(w.dtype), 0)

    clipped: Numbered = {}
    for n, t in enumerate(schedule.tails):
        starts = dict(zip(t.running(), given[n], strict=True))
        made = {}
        for choice in t.of(Phase.CLIPPED):
            (statistic,) = choice.statistics
            assert isinstance(statistic, ClippedMean)
            places = list(range(len(t.tail.grads)))
            for together in [places] if statistic.by == "all" else [[k] for k in places]:
                params = squares if statistic.by == "all" else [t.tail.params[k] for k in together]
                jobs: Jobs = [(k, statistic) for k in together]
                own = dataclasses.replace(inputs[n], weights=weights(statistic, tuple(params)))
                ends = _reduce(schedule, t.tail, [choice], jobs, [starts[job] for job in jobs], own)
                made |= dict(zip(jobs, ends, strict=True))
        clipped[n] = [made[job] for job in t.jobs(Phase.CLIPPED)]
    return clipped


def _reducer(schedule: Schedule, t: TailPlan, shared: float | None) -> Callable[..., list[Any]]:
    """A tail in a loop as a call that, for a batch, reduces over its examples.

    `shared` is the weight of all of them, or None if each has its own.
    """
    jobs = t.jobs(Phase.FIRST)

    @custom_vmap
    def reduce(w: Any, factors: list[Any], constants: list[Any], given: list[Any]) -> list[Any]:
        # Never run, since the weight has the example axis: it says what the results look like.
        return [
            _zeros_like_reading(statistic, aval(t.tail.grads[k]), x)
            if isinstance(statistic, Reading)
            else x
            for (k, statistic), x in zip(jobs, given, strict=True)
        ]

    @reduce.def_vmap
    def rule(
        size: int,
        batched: Any,
        w: Any,
        factors: list[Any],
        constants: list[Any],
        given: list[Any],
    ) -> tuple[list[Any], Any]:
        factors = [
            x if has_axis else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, has_axis in zip(factors, batched[1], strict=True)
        ]
        examples = Examples(size, w if shared is None else shared, factors, constants)
        results = _reduce(schedule, t.tail, t.of(Phase.FIRST), jobs, given, examples)
        has_axis = [
            jax.tree.map(lambda _, s=statistic: isinstance(s, Reading), result)
            for (_, statistic), result in zip(jobs, results, strict=True)
        ]
        return results, has_axis

    return reduce


def _reducer_of_one(schedule: Schedule, t: TailPlan, shared: float | None) -> Callable[..., list[Any]]:
    """A tail in a loop as a call that reduces a batch of one, given without an example axis."""
    jobs = t.jobs(Phase.FIRST)

    def reduce(w: Any, factors: list[Any], constants: list[Any], given: list[Any]) -> list[Any]:
        in_front = [jnp.expand_dims(x, 0) for x in factors]
        examples = Examples(1, w[None] if shared is None else shared, in_front, constants)
        results = _reduce(schedule, t.tail, t.of(Phase.FIRST), jobs, given, examples)
        return [
            x[0] if isinstance(statistic, Reading) else x
            for (_, statistic), x in zip(jobs, results, strict=True)
        ]

    return reduce


def _zeros_like_reading(reading: Reading, like: Any, given: Any) -> jax.Array:
    shape = jax.eval_shape(lambda g: reading.of(g, given), jax.ShapeDtypeStruct(like.shape, like.dtype))
    return jnp.zeros(shape.shape, shape.dtype)


def _reduce(
    schedule: Schedule,
    tail: Tail,
    choices: Sequence[Choice],
    jobs: Jobs,
    given: Sequence[Any],
    examples: Examples,
) -> list[Any]:
    """The results of the jobs; a statistic takes in one kind of units after the other."""
    results = dict(zip(jobs, given, strict=True))
    for choice in choices:
        units = choice.units.tail
        own = [
            (k, statistic)
            for k, param in enumerate(tail.params)
            for statistic in choice.statistics
            if param in units.params and (k, statistic) in results
        ]
        fed = [Job(units.params.index(tail.params[k]), s, results[k, s]) for k, s in own]
        with jax.named_scope(_name_of(tail, schedule.paths)), jax.named_scope(str(choice.strategy)):
            made = choice.strategy.reduce(units, fed, choice.units.of(examples))
        results |= dict(zip(own, made, strict=True))
    return [results[job] for job in jobs]


def _name_of(tail: Tail, paths: Sequence[str]) -> str:
    """`tail[params/Dense_0/kernel]`: what profiles call a tail, after its parameters."""
    keys = [keys_of(paths[param]) for param in tail.params[:NAMED]]
    names = ["/".join(key.strip(".[]'\"") for key in own) for own in keys]
    others = len(tail.params) - len(names)
    return f"tail[{', '.join(names)}{f' and {others} more' if others else ''}]"


def _given(
    tail: Tail, k: int, statistic: LeafStatistic, directions: Sequence[Any] | None, steps: int
) -> Any:
    """What a job starts from: the direction of an inner product, an accumulator's empty state in a loop.

    The loop may be over microbatches, `steps` of them, or over layers. Elsewhere an accumulator starts
    from nothing: JAX need not trace, nor XLA remove, that 0 is added.
    """
    if isinstance(statistic, Accumulator):
        return _empty_state(tail, k, statistic) if steps > 1 or tail.levels else None
    if isinstance(statistic, Projection):
        assert directions is not None
        direction = directions[tail.params[k]]
        return tail.inward(tail.params[k], direction) if tail.levels else direction
    return None


def _empty_state(tail: Tail, grad: int, statistic: Accumulator) -> State:
    """The state before the first example; for a tail in loops one for each of their steps."""
    state = statistic.init(aval(tail.grads[grad]))
    if not tail.levels:
        return state
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*tail.lengths, *x.shape)), state)


def _only(schedule: Schedule, kind: type[LeafStatistic], results: Results) -> Results:
    """The results of one kind of statistic, and None for the others."""
    return [
        [x if isinstance(s, kind) else None for (_, s), x in zip(t.running(), own, strict=True)]
        for t, own in zip(schedule.tails, results, strict=True)
    ]


def _either(first: Results, second: Results) -> Results:
    """Where there is no first, the second."""
    return [
        [b if a is None else a for a, b in zip(*own, strict=True)]
        for own in zip(first, second, strict=True)
    ]
