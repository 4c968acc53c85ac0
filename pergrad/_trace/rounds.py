"""Loops that end when an example says so end on all devices at once.

The number of rounds of a `while` may depend on the example. If XLA divides the work of an example along
further axes of the mesh, a round may have collectives in which all devices meet, so that all must have
the same number of rounds. The loop then goes on as long as one device needs it, and a device that needs
no further round keeps its results:

    while c(x): x = f(x)   becomes   while any device's c(x): x = f(x) if c(x) else x.

A loop in a function with a derivative of its own (`custom_jvp`) ends in the same way. Who differentiates
the statistics through it gets an error, because the rule of the derivative may have loops that do not. A
loop in any other call of a program, such as a linear solver, is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from pergrad import _compat
from pergrad._compat import ClosedJaxpr, Jaxpr, JaxprEqn, aval
from pergrad._errors import ArgumentError
from pergrad._ir import (
    CUSTOM_CALLS,
    Devices,
    Loop,
    programs,
    read,
    starting_env,
    take_branch,
    without_derivative,
)
from pergrad._trace.trace import Program


def with_common_rounds(program: Program, devices: Devices) -> Program:
    """The same program, whose loops have the same number of rounds on all devices."""
    if not devices.are_teams or not _has_loops(program.jaxpr):
        return program
    closed = ClosedJaxpr(program.jaxpr, program.consts)
    inputs = [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in program.jaxpr.invars]
    return program.replaced_by(jax.make_jaxpr(lambda *args: _evaluate(devices, closed, args))(*inputs))


def _has_loops(jaxpr: Jaxpr) -> bool:
    """Whether there is a `while` in a program, or in one that it runs."""
    return any(
        eqn.primitive is primitives.while_p or any(map(_has_loops, programs(eqn))) for eqn in jaxpr.eqns
    )


def _evaluate(devices: Devices, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    env = starting_env(program, args)
    for eqn in program.jaxpr.eqns:
        outs = _results(devices, eqn, [read(env, v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, v) for v in program.jaxpr.outvars]


def _results(devices: Devices, eqn: JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    evaluate = functools.partial(_evaluate, devices)
    if eqn.primitive is primitives.while_p:
        with _compat.at_line_of(eqn):
            return _while(devices, eqn, ins)
    if not any(map(_has_loops, programs(eqn))):
        return _compat.bind(eqn, ins)
    if (loop := Loop.of(eqn)) is not None:
        return loop.rebuilt(ins, evaluate)
    if eqn.primitive is primitives.cond_p:
        index, *operands = ins
        own = eqn.params["branches"]
        branches = [lambda *args, branch=branch: evaluate(branch, args) for branch in own]
        return list(take_branch(eqn, index, branches, operands))
    if eqn.primitive in CUSTOM_CALLS:
        why = (
            "on a mesh that has axes beside those of spmd_axis_name, because it has a `while` loop. Use "
            "a mesh of these axes alone, or a loop with a fixed number of rounds."
        )
        return without_derivative(eqn, ins, evaluate, why)
    raise ArgumentError(
        f"the loss has a `while` loop inside of {eqn.primitive} at {_compat.user_line(eqn)}. The mesh "
        "has axes beside those of spmd_axis_name, and along these XLA may let all devices meet in a "
        "round of the loop. If they do not have the same number of rounds, they wait for each other for "
        "ever. Use a mesh of the axes of spmd_axis_name alone, or write the loop in the loss itself."
    )


def _while(devices: Devices, eqn: JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    end = eqn.params["cond_nconsts"]
    start = end + eqn.params["body_nconsts"]
    of_condition, of_body, init = ins[:end], ins[end:start], list(ins[start:])

    def goes_on(state: list[Any]) -> jax.Array:
        (own,) = _evaluate(devices, condition, [*of_condition, *state])
        return jnp.any(own)  # a loop that the loss maps over something has one condition for each

    def round_of(state: list[Any]) -> list[Any]:
        new, own = _evaluate(devices, body, [*of_body, *state]), goes_on(state)
        pairs = zip(new, state, strict=True)
        return [lax.select(jnp.broadcast_to(own, x.shape), x, old) for x, old in pairs]

    return lax.while_loop(lambda state: devices.any_team(goes_on(state)), round_of, init)
