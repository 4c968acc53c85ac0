"""The end of a run: shares of the examples that are left, parts of each device, and the last phase.

The last phase has the statistics that need all examples side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pergrad._cut import Cut, Examples, FactorPair, depends_on_cotangent, factor_pair
from pergrad._ir import Devices, evaluate_independent, needed_equations
from pergrad._plan import Schedule
from pergrad._run.microbatches import SCOPE, Outcome
from pergrad._run.reduce import Reduction
from pergrad._run.shards import Shards
from pergrad._run.states import Key, States
from pergrad._statistics import Accumulator, Phase


def with_shares_of_kept(outcome: Outcome, kept: jax.Array) -> Outcome:
    """The outcome for shares that add up to 1, if those of the examples that are left add up to `kept`.

    If none is left, `kept` is 0, and means are NaN.
    """
    states: dict[Key, Any] = {
        (param, s): s.reweighed(x, 1 / kept)
        for (param, s), x in outcome.states.items()
        if isinstance(s, Accumulator)
    }
    return outcome._replace(states=outcome.states | states)


class Block(NamedTuple):
    """Examples that have been through the model: their number, and their factors [size, ...].

    The factors are those that are kept of each tail, by the tail's number.
    """

    size: int
    factors: dict[int, list[jax.Array]]


def part_of_all(outcome: Outcome, devices: Devices, shards: Shards) -> Outcome:
    """The outcome, in which every accumulator has this device's part of the state of all devices.

    States that are divided have been added up already. Of a parameter that is not divided, a state that
    another one holds is that of all devices, on each of them.
    """
    if not devices.axes:
        return outcome
    parts: dict[Key, Any] = {
        (param, s): s.part_of_all(x, devices)
        for (param, s), x in outcome.states.items()
        if isinstance(s, Accumulator) and not shards.divides(param, s)
    }
    held: dict[Key, Any] = {
        (param, s.holds): s.held(x)
        for (param, s), x in parts.items()
        if isinstance(s, Accumulator) and s.holds and (param, s.holds) in parts
        if param not in shards.params
    }
    return outcome._replace(states=outcome.states | parts | held)


@jax.named_scope(SCOPE)
def run_last(
    cut: Cut, schedule: Schedule, params: Sequence[Any], outcome: Outcome, devices: Devices
) -> tuple[States, dict[int, FactorPair | None]]:
    """Runs the last phase, whose statistics need the factors of all examples.

    Returns the values of these statistics, and the pair of factors of each parameter, by its number.
    Inner products are those of this device's examples with all examples, for which the factors of all
    devices are gathered.
    """
    program = cut.program
    constants_of = _constants(cut, schedule, params, outcome.factors)
    hands_out = any(t.hands_out_factors for t in schedule.tails)
    late = depends_on_cotangent(program) if hands_out else set()
    results = States()
    pairs: dict[int, FactorPair | None] = {}
    for number, factors in outcome.factors.items():
        t = schedule.tails[number]
        size = schedule.batch_size
        examples = Examples(size, 1 / size, factors, constants_of[number])
        if choices := t.of(Phase.LAST):
            everybody = Reduction(t, _of_all(examples, devices), States(), schedule.paths)
            results |= everybody.run(choices, States())
        if t.hands_out_factors:
            pairs |= dict.fromkeys(t.tail.params, factor_pair(t.tail, late, examples))
    return results, pairs


@jax.named_scope(SCOPE)
def inner_products(
    cut: Cut, schedule: Schedule, params: Sequence[Any], a: Block, b: Block | None
) -> States:
    """The inner products [A, B] of the gradients of the examples of two blocks, for each parameter.

    None for `b` stands for the block `a` itself.
    """
    results = States()
    constants_of = _constants(cut, schedule, params, a.factors)
    for number, factors in a.factors.items():
        t, constants = schedule.tails[number], constants_of[number]
        examples = Examples(a.size, 1.0, factors, constants)
        if b is not None:
            both = [jnp.concatenate(xs) for xs in zip(factors, b.factors[number], strict=True)]
            here, others = (0, a.size), (a.size, b.size)
            examples = Examples(a.size + b.size, 1.0, both, constants, here, others)
        results |= Reduction(t, examples, States(), schedule.paths).run(t.of(Phase.LAST), States())
    return results


def _constants(
    cut: Cut, schedule: Schedule, params: Sequence[Any], numbers: Iterable[int]
) -> dict[int, list[Any]]:
    """The constants of the tails with these numbers."""
    tails = {number: schedule.tails[number].tail for number in numbers}
    env = cut.program.starting_env(params)
    needed = {v for tail in tails.values() for v in tail.constants}
    evaluate_independent(needed_equations(cut.program.jaxpr.eqns, needed), env, cut.varies)
    return {number: [env[v] for v in tail.constants] for number, tail in tails.items()}


def _of_all(examples: Examples, devices: Devices) -> Examples:
    """The examples of all devices, which include the `examples` of this device."""
    here = devices.first(examples.size), examples.size
    size, factors = devices.number * examples.size, [devices.join(x) for x in examples.factors]
    return Examples(size, 1 / size, factors, examples.constants, here if devices.axes else None)
