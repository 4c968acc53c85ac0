"""The end of a run: statistics that need all examples side by side, and the parts of each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pergrad._cut import Cut, Examples, FactorPair, depends_on_cotangent, factor_pair
from pergrad._ir import Devices, evaluate_independent, needed_equations
from pergrad._plan import Schedule
from pergrad._run.microbatches import SCOPE, Outcome
from pergrad._run.reduce import Reduction
from pergrad._run.shards import Shards
from pergrad._run.states import Key, States
from pergrad._statistics import Accumulator, Phase


def part_of_all(outcome: Outcome, devices: Devices, shards: Shards) -> Outcome:
    """The outcome, in which every accumulator has this device's part of the state of all devices.

    States that are divided have been added up already.
    """
    if not devices.axes:
        return outcome
    parts: dict[Key, Any] = {
        (param, s): s.part_of_all(x, devices)
        for (param, s), x in outcome.states.items()
        if isinstance(s, Accumulator) and not shards.divides(param, s)
    }
    return outcome._replace(states=outcome.states | parts)


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
    kept = [schedule.tails[n].tail for n in outcome.factors]
    env = program.starting_env(params)
    needed = {v for tail in kept for v in tail.constants}
    evaluate_independent(needed_equations(program.jaxpr.eqns, needed), env, cut.varies)
    hands_out = any(t.hands_out_factors for t in schedule.tails)
    late = depends_on_cotangent(program) if hands_out else set()
    results = States()
    pairs: dict[int, FactorPair | None] = {}
    for number, factors in outcome.factors.items():
        t = schedule.tails[number]
        constants = [env[v] for v in t.tail.constants]
        examples = Examples(schedule.batch_size, 1 / schedule.batch_size, factors, constants)
        if choices := t.of(Phase.LAST):
            everybody = Reduction(t, _of_all(examples, devices), {}, schedule.paths)
            results |= everybody.run(choices, States())
        if t.hands_out_factors:
            pairs |= dict.fromkeys(t.tail.params, factor_pair(t.tail, late, examples))
    return results, pairs


def _of_all(examples: Examples, devices: Devices) -> Examples:
    """The examples of all devices, which include the `examples` of this device."""
    here = devices.first(examples.size), examples.size
    size, factors = devices.number * examples.size, [devices.join(x) for x in examples.factors]
    return Examples(size, 1 / size, factors, examples.constants, here if devices.axes else None)
