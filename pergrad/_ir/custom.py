"""Calls with a derivative of their own, whose programs are run in another way than they were traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import JaxprEqn
from pergrad._errors import ArgumentError
from pergrad._ir.loop import Evaluate

CUSTOM_CALLS = (p.custom_jvp_call_p, p.custom_vjp_call_p)


def without_derivative(eqn: JaxprEqn, ins: Sequence[Any], evaluate: Evaluate, why: str) -> list[Any]:
    """The results of such a call, whose program `evaluate` runs. Its derivative is refused.

    Only those who differentiate the statistics need the derivative. Its rule was traced for a program
    that runs as it is. `why` ends the message of the error: where that is so, and what to do.
    """

    @jax.custom_jvp
    def call(*args: Any) -> list[Any]:
        return evaluate(_compat.as_closed(eqn.params["call_jaxpr"]), args)

    @call.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise ArgumentError(
            "statistics cannot be differentiated through the custom derivative at "
            f"{_compat.user_line(eqn)} {why}"
        )

    return call(*ins)
