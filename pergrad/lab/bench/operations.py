"""The operations of a traced program: its matrix products and convolutions, loops included.

XLA's own count of a compiled program has the body of a loop once, however often it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core.primitives import (
    cond_p,
    conv_general_dilated_p,
    dot_general_p,
    scan_p,
    while_p,
)


def operations(jaxpr: Jaxpr) -> float:
    """Multiplications and additions; NaN if there are some in a loop whose length is not known."""
    return sum(_of_equation(eqn) for eqn in jaxpr.eqns)


def _of_equation(eqn: JaxprEqn) -> float:
    if eqn.primitive is dot_general_p:
        return _of_product(eqn)
    if eqn.primitive is conv_general_dilated_p:
        return _of_convolution(eqn)
    inner = [operations(jaxpr) for jaxpr in called(eqn)]
    if eqn.primitive is scan_p:
        return eqn.params["length"] * sum(inner)
    if eqn.primitive is cond_p:
        return max(inner)  # which branch runs is not known before the program does
    if eqn.primitive is while_p:
        return math.nan if sum(inner) else 0.0
    return sum(inner)


def _of_product(eqn: JaxprEqn) -> float:
    """Each number of the result is a sum of as many products as the summed axes have entries."""
    (summed, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape  # type: ignore[attr-defined]
    return 2 * _size(eqn) * math.prod(left[axis] for axis in summed)


def _of_convolution(eqn: JaxprEqn) -> float:
    """Each number of the result is a sum over all of the kernel that makes one output feature."""
    kernel = eqn.invars[1].aval.shape  # type: ignore[attr-defined]
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(eqn) * math.prod(kernel) / features


def _size(eqn: JaxprEqn) -> int:
    return math.prod(eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]


def called(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs that an equation calls, such as the body of a loop."""
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one
