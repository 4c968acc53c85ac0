"""Numbers: the dtype in which sums are kept, weights, sums and products.

The weight of an example is its share of the whole batch, so that a weighted mean is a plain sum of
weighted numbers. The weights `w` are one number if all examples have the same weight, else an array [B].
An example of weight 0 counts for nothing, even if its gradient is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pergrad._ir.backend import platform

Weights = jax.Array | float


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype in which sums of numbers of this dtype are kept: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Any) -> Any:
    """A half-precision array as float32, the dtype of its sums; any other array as it is."""
    dtype = jnp.result_type(x)
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return x.astype(jnp.float32) if half else x


def weigh(x: jax.Array, w: Weights) -> jax.Array:
    """`w * x`, but 0 where `w` is 0, even if `x` is not finite there.

    The axes of `w` are the leading axes of `x`. The zeros are those of `w` itself: an array of constant
    zeros might be shared with another one, which XLA for GPUs would then keep in memory all the while.
    """
    if not isinstance(w, jax.Array):
        return x if w == 1 else lax.mul(x, np.asarray(w, x.dtype))
    w = w.reshape(w.shape + (1,) * (x.ndim - w.ndim)).astype(x.dtype)
    return jnp.where(w != 0, w * x, lax.stop_gradient(w))


def weigh_factors(x: jax.Array, d: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`w * x` and `d`, each 0 where `w` is 0, so that the product of both is weighted by `w`."""
    return weigh(x, w), weigh(d, jnp.not_equal(w, 0))


def weighted_sum(xs: jax.Array, w: Weights) -> jax.Array:
    """`sum_i w_i xs[i]`. If all examples have the same weight, the sum is multiplied by it once."""
    if not isinstance(w, jax.Array):
        return weigh(lax.reduce_sum(xs, (0,)), w)
    return lax.reduce_sum(weigh(xs, w), (0,))


def added(state: jax.Array | None, x: jax.Array) -> jax.Array:
    """`state + x`, or `x` if there is no state yet. `lax.add` is quicker to trace than `+`."""
    if state is None:
        return x
    return lax.add(state, x) if state.dtype == x.dtype else state + x


def total(w: Weights, size: int) -> jax.Array | float:
    """The sum of the weights of `size` examples."""
    return jnp.sum(w) if isinstance(w, jax.Array) else w * size


def with_example_axis(x: Any, has_axis: bool, size: int) -> jax.Array:
    """`x` if it has an example axis already, else `x` repeated for every example: [size, ...]."""
    return x if has_axis else jnp.broadcast_to(x, (size, *jnp.shape(x)))


def in_groups(xs: Any, size: int, k: int) -> tuple[Any, Any]:
    """Arrays [size, ...] in two parts: the first size % k rows, and the rest as [size // k, k, ...]."""
    groups, rest = divmod(size, k)
    first = jax.tree.map(lambda x: x[:rest], xs)
    return first, jax.tree.map(lambda x: x[rest:].reshape(groups, k, *x.shape[1:]), xs)


def product(x: Any, d: Any, numbers: Any, dtype: Any, precision: Any = None) -> jax.Array:
    """`lax.dot_general` of `x` and `d` with the dimension numbers `numbers`.

    The result has the dtype `dtype`, which may be wider than that of the operands; None means the dtype
    of the operands.

    Accelerators sum up half-precision products in float32 if they are asked to. XLA's CPU backend widens
    the operands for that, but not in all layouts: in the others it compiles the product and then fails
    to run it ("Unsupported element type for DotThunk: BF16 x BF16 = F32"). So on the CPU the operands
    are widened here, which takes as long.

    Python decides this, for the device that programs are compiled for, and not
    `lax.platform_dependent`: the products in the body of a loop and those of single tokens stand in
    programs that are cut again, and a conditional around a product would hide it there.
    """
    is_wider = dtype is not None and dtype != jnp.promote_types(x.dtype, d.dtype)
    if is_wider and platform() == "cpu":
        x, d = x.astype(dtype), d.astype(dtype)
    return lax.dot_general(x, d, numbers, precision=precision, preferred_element_type=dtype)


def full_precision(own: Any, *dtypes: Any) -> Any:
    """The precision that keeps all digits in a product of numbers of these dtypes, or of their squares.

    `own` is the precision that the product has otherwise. Accelerators may round the operands of a
    float32 product to fewer digits. `Precision.HIGH` keeps 16 binary digits, which is what squares of
    bfloat16 numbers have, and takes half the time of `HIGHEST`. The CPU never rounds operands, and there
    the product stays as it is, so that XLA finds an equal product in the same program.
    """
    if platform() == "cpu":
        return own
    is_short = all(dtype == jnp.bfloat16 for dtype in dtypes)
    return lax.Precision.HIGH if is_short else lax.Precision.HIGHEST
