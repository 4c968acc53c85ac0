"""A gradient in blocks: where to divide a product so that a block of the gradient can be formed alone.

For a product g = X^T D, the columns from s to e of the gradient need the columns from s to e of D alone:

    g[:, s:e] = X^T D[:, s:e].

So a large gradient can be formed and reduced block by block, by the same equations, if the steps after
the product keep its entries apart and work for arrays of any size.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import JaxprEqn, aval
from pergrad._cut.steps import STEPS
from pergrad._cut.tail import Tail
from pergrad._cut.terms import Product
from pergrad._cut.terms.product import axes_of_product
from pergrad._ir import size

# The moves that work for arrays of any size and keep the order of the entries along each axis.
MOVES_OF_ANY_SIZE = {
    p.convert_element_type_p,
    p.copy_p,
    p.transpose_p,
    _compat.name_p,
    _compat.optimization_barrier_p,
}


class Divided(NamedTuple):
    """An axis along which a gradient can be divided into blocks.

    `factor` is the place of the divided factor among the tail's factors, and `factor_axis` is the axis
    in one example's array. `axis` is the axis of the gradient that it becomes, and `length` its length.
    """

    factor: int
    factor_axis: int
    axis: int
    length: int


def divided(tail: Tail) -> Divided | None:
    """The axis along which the gradient of a tail can be divided, or None if there is none.

    It is the longest axis of the larger factor that is not summed over. Every block needs the whole
    other factor, which is read again for each block.
    """
    if len(tail.terms) != 1 or len(tail.grads) != 1 or len(tail.factors) != 2:
        return None
    product = tail.terms[0]
    if not isinstance(product, Product) or not all(_takes_blocks(tail, step) for step in tail.steps):
        return None
    operands = product.eqn.invars
    larger = max((0, 1), key=lambda side: size(operands[side]))
    found = None
    for axis, axes in enumerate(axes_of_product(product.eqn)):
        own, other = axes[larger], axes[1 - larger]
        if own is None or other is not None:
            continue
        length = aval(operands[larger]).shape[own]
        if found is None or length > found.length:
            found = Divided(tail.factors.index(operands[larger]), own, _moved(tail, axis), length)
    return found


def _takes_blocks(tail: Tail, step: JaxprEqn) -> bool:
    """Whether a step does to a block what it does to the whole: it moves axes, or scales by a number."""
    if STEPS[step.primitive].family == "scale":
        return all(aval(v).shape == () for v in step.invars if v is not tail.operand(step))
    return step.primitive in MOVES_OF_ANY_SIZE


def _moved(tail: Tail, axis: int) -> int:
    """The axis of the gradient that an axis of the product becomes."""
    for step in tail.steps:
        if step.primitive is p.transpose_p:
            axis = step.params["permutation"].index(axis)
    return axis
