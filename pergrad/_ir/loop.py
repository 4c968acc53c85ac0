"""A `scan` equation in words: what it takes, what its body does in one round, what it returns.

    operands:  constants, the carry's start, inputs [length, ...]
    the body:  (constants, carry, one input of each) -> (carry, one output of each)
    results:   the carry's end, outputs [length, ...]

It is rebuilt with the public `lax.scan`.
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


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `scan` equation, and its body: the equation's own or another that takes and returns the same."""

    eqn: JaxprEqn
    body: ClosedJaxpr

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
        """The values that one round starts from."""
        return starting_env(self.body, [*consts, *carry, *xs])

    def run(self, body: Callable[[Any, Any], Any], init: Any, xs: Any) -> Any:
        """`lax.scan` with this loop's length, direction and unrolling, at the user's line."""
        options = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        with _compat.at_line_of(self.eqn):
            return lax.scan(body, init, xs, **options)
