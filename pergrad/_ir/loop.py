"""A `scan` equation in words: what it is given, what it does in a step, what it returns.

    operands:  constants, the carry's start, inputs [length, ...]
    a step:    (constants, carry, one input of each) -> (carry, one output of each)
    results:   the carry's end, outputs [length, ...]

It is rebuilt with the public `lax.scan`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax import lax
from jax.extend.core import primitives

from pergrad import _compat
from pergrad._compat import ClosedJaxpr, JaxprEqn, Primitive, Var
from pergrad._ir.dependence import is_in, varying
from pergrad._ir.equations import Env, given

T = TypeVar("T")


LOOPS: set[Primitive] = {primitives.scan_p}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `scan` equation, and its step: the equation's own or another that takes and gives the same."""

    eqn: JaxprEqn
    step: ClosedJaxpr

    @staticmethod
    def of(eqn: JaxprEqn | None) -> Loop | None:
        return Loop(eqn, eqn.params["jaxpr"]) if eqn is not None and eqn.primitive in LOOPS else None

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    @property
    def num_carry(self) -> int:
        return _compat.scan_lengths(self.eqn)[1]

    def operands(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Splits what belongs to the operands into constants, carry and inputs."""
        num_consts, num_carry = _compat.scan_lengths(self.eqn)
        end = num_consts + num_carry
        return list(operands[:num_consts]), list(operands[num_consts:end]), list(operands[end:])

    def env(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> Env:
        """What is given to one step."""
        return given(self.step, [*consts, *carry, *xs])

    def run(self, step: Callable[[Any, Any], Any], init: Any, xs: Any) -> Any:
        """`lax.scan` with this loop's length, direction and unrolling, at the user's line."""
        options = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        with _compat.at_line_of(self.eqn):
            return lax.scan(step, init, xs, **options)

    def varying_inputs(self, varies: Sequence[bool]) -> list[Var]:
        """Which of a step's inputs vary, if of the operands those do for which `varies` is true.

        What varies in the carry after one step does so in the next.
        """
        consts, carry, xs = self.operands(varies)
        inputs, results = self.step.jaxpr.invars, self.step.jaxpr.outvars
        while True:
            chosen = list(itertools.compress(inputs, [*consts, *carry, *xs]))
            reached = varying(self.step.jaxpr.eqns, chosen)
            after = [is_in(v, reached) for v in results[: self.num_carry]]
            wider = [a or b for a, b in zip(carry, after, strict=True)]
            if wider == carry:
                return chosen
            carry = wider
