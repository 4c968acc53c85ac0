"""What is true of each primitive: one table, from which all sets of primitives follow.

A rule for a single primitive (how many operations it does, how it is inlined, how it loses an axis)
stands in the file that uses it. Facts about primitives that several files use stand here, as flags.
"""

from __future__ import annotations

import enum

from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import Primitive


class Is(enum.Flag):
    """What can be true of a primitive. A primitive may have several of these flags."""

    # An entry of the result depends only on the operands' entries at the same place.
    ELEMENTWISE = enum.auto()
    # Every entry of the result is an entry of an operand, or a constant: nothing is computed.
    MOVE = enum.auto()
    # XLA counts its operations apart from others.
    TRANSCENDENTAL = enum.auto()
    # Result k depends on operand k and on no other.
    ONE_TO_ONE = enum.auto()
    # The result is the sum of the two operands.
    ADDITION = enum.auto()
    # Some entries of an operand are replaced; the others stay where they are.
    REPLACING = enum.auto()
    # An entry of an operand that goes into the result goes to the same place there.
    STAYING = enum.auto()
    # If the result is as large as the operand, its entries are the operand's, in the same order.
    IN_ORDER = enum.auto()
    # XLA writes the result to memory and does not fuse it into the equations that read it.
    WRITES = enum.auto()
    # XLA reads the operands from memory and does not fuse the equations that make them into it.
    READS = enum.auto()
    # It runs programs. Their inputs are its last operands, and their outputs are its results.
    RUNS_BRANCHES = enum.auto()
    # It is a `scan`, which `Loop` describes.
    LOOP = enum.auto()
    # It is a convolution, which XLA's CPU backend runs more slowly in a loop.
    CONVOLUTION = enum.auto()
    # It is a matrix product.
    PRODUCT = enum.auto()


_OPAQUE = Is.READS | Is.WRITES
_MEASURED_APART = Is.ELEMENTWISE | Is.TRANSCENDENTAL

PRIMITIVES: dict[Primitive, Is] = {
    # An entry of the result is made of entries at the same place.
    **dict.fromkeys(
        [
            *(p.sub_p, p.mul_p, p.div_p, p.neg_p, p.max_p, p.min_p, p.abs_p, p.sign_p),
            *(p.integer_pow_p, p.square_p, p.eq_p, p.ne_p, p.lt_p, p.le_p, p.gt_p, p.ge_p),
            *(p.and_p, p.or_p, p.not_p),
        ],
        Is.ELEMENTWISE,
    ),
    **dict.fromkeys(
        [
            *(p.exp_p, p.exp2_p, p.expm1_p, p.log_p, p.log1p_p, p.logistic_p, p.tanh_p, p.erf_p),
            *(p.sin_p, p.cos_p, p.pow_p, p.sqrt_p, p.rsqrt_p, p.cbrt_p),
        ],
        _MEASURED_APART,
    ),
    **dict.fromkeys([p.add_p, p.add_jaxvals_p], Is.ELEMENTWISE | Is.ADDITION | Is.STAYING),
    p.select_n_p: Is.ELEMENTWISE | Is.REPLACING | Is.STAYING,
    p.convert_element_type_p: Is.ELEMENTWISE | Is.MOVE | Is.STAYING | Is.IN_ORDER,
    **dict.fromkeys([p.copy_p, _compat.name_p], Is.ELEMENTWISE | Is.MOVE | Is.STAYING),
    p.stop_gradient_p: Is.ELEMENTWISE | Is.MOVE,
    # An entry of the result is an entry from another place.
    **dict.fromkeys([p.broadcast_in_dim_p, p.reshape_p, p.squeeze_p], Is.MOVE | Is.IN_ORDER),
    **dict.fromkeys(
        [
            *(p.concatenate_p, p.dynamic_slice_p, p.dynamic_update_slice_p, p.iota_p, p.pad_p),
            *(p.rev_p, p.slice_p, p.transpose_p, _compat.sharding_constraint_p),
        ],
        Is.MOVE,
    ),
    _compat.optimization_barrier_p: Is.MOVE | Is.ONE_TO_ONE,
    p.gather_p: Is.MOVE | Is.WRITES,
    p.scatter_p: Is.REPLACING | Is.STAYING,
    # An entry of the result is a sum, or is made of many entries.
    **dict.fromkeys([p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p], Is.WRITES),
    **dict.fromkeys([p.dot_general_p, _compat.ragged_dot_general_p], _OPAQUE | Is.PRODUCT),
    **dict.fromkeys([p.scatter_add_p, p.sort_p, p.cumsum_p], _OPAQUE),
    p.conv_general_dilated_p: _OPAQUE | Is.CONVOLUTION,
    # The equation runs programs.
    p.scan_p: _OPAQUE | Is.LOOP,
    **dict.fromkeys([p.cond_p, p.custom_jvp_call_p], Is.RUNS_BRANCHES),
}


def those_that_are(what: Is) -> frozenset[Primitive]:
    """The primitives that have this flag."""
    return frozenset(primitive for primitive, own in PRIMITIVES.items() if what in own)


ONE_TO_ONE = those_that_are(Is.ONE_TO_ONE)
ADDITIONS = those_that_are(Is.ADDITION)
LOOPS = those_that_are(Is.LOOP)
