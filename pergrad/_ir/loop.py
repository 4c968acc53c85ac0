"""A `scan` equation as a loop: what it takes, what its body does in one round, and what it returns.

    operands:  constants, the carry's start, inputs [length, ...]
    the body:  (constants, carry, one input of each) -> (carry, one output of each)
    results:   the carry's end, outputs [length, ...]

`Loop.run` rebuilds the equation with the public `lax.scan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax import lax

from pergrad import _compat
from pergrad._compat import ClosedJaxpr, JaxprEqn
from pergrad._ir.equations import Env, starting_env
from pergrad._ir.primitives import LOOPS

T = TypeVar("T")
Evaluate = Callable[[ClosedJaxpr, Sequence[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `scan` equation, and the program that is run in every round.

    `body` is the equation's own program, or another one with the same inputs and outputs.
    """

    eqn: JaxprEqn
    body: ClosedJaxpr

    @staticmethod
    def of(eqn: JaxprEqn | None) -> Loop | None:
        """The loop that an equation is, with the equation's own body; None if it is no loop."""
        return Loop(eqn, eqn.params["jaxpr"]) if eqn is not None and eqn.primitive in LOOPS else None

    @property
    def length(self) -> int:
        """How many rounds the loop has."""
        return self.eqn.params["length"]

    @property
    def num_carry(self) -> int:
        """How many arrays the carry has. Of the loop's results, these come first."""
        return _compat.scan_lengths(self.eqn)[1]

    def operands(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Splits a sequence with an item for each operand into those of constants, carry and inputs."""
        num_consts, num_carry = _compat.scan_lengths(self.eqn)
        end = num_consts + num_carry
        return list(operands[:num_consts]), list(operands[num_consts:end]), list(operands[end:])

    def env(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> Env:
        """The values that the body starts from in one round."""
        return starting_env(self.body, [*consts, *carry, *xs])

    def run(self, body: Callable[[Any, Any], Any], init: Any, xs: Any) -> Any:
        """`lax.scan` with this loop's length, direction and unrolling.

        What it traces has the user's line of this loop's equation.
        """
        options = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        with _compat.at_line_of(self.eqn):
            return lax.scan(body, init, xs, **options)

    def rebuilt(self, operands: Sequence[Any], evaluate: Evaluate) -> list[Any]:
        """The results of the loop, whose body is run by `evaluate(program, arguments)`."""
        consts, init, xs = self.operands(operands)

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = evaluate(self.body, [*consts, *carry, *x])
            return outs[: self.num_carry], outs[self.num_carry :]

        ends, ys = self.run(body, init, xs)
        return [*ends, *ys]
