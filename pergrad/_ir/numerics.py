"""Numbers: the dtype in which sums are kept, weights, sums and products.

An example's weight `w` is its share of the whole batch, so that a mean is a plain sum: a number if all
examples have the same weight, else an array [B]. A weight of 0 means that the example is not there,
whatever its gradient is (NaN too).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Weights = jax.Array | float


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype that sums are kept in: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Any) -> Any:
    """A half-precision array as float32, the dtype that its sums are kept in; any other as it is."""
    dtype = jnp.result_type(x)
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return x.astype(jnp.float32) if half else x


def weigh(x: jax.Array, w: Weights) -> jax.Array:
    """`w * x`, and 0 where the weight is 0 even if `x` is not finite. `w` has `x`'s leading axes."""
    if not isinstance(w, jax.Array):
        return x if w == 1 else lax.mul(x, np.asarray(w, x.dtype))
    w = w.reshape(w.shape + (1,) * (x.ndim - w.ndim)).astype(x.dtype)
    return jnp.where(w != 0, w * x, jnp.zeros((), x.dtype))


def weigh_factors(x: jax.Array, d: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`w * x` and `d` for a product of both, each 0 where the weight is 0."""
    return weigh(x, w), weigh(d, jnp.not_equal(w, 0))


def weighted_sum(xs: jax.Array, w: Weights) -> jax.Array:
    """`sum_i w_i xs[i]`; one weight for all is applied to the sum."""
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
    """The array [size, ...], repeated for every example if it has no example axis yet."""
    return x if has_axis else jnp.broadcast_to(x, (size, *jnp.shape(x)))


def in_groups(xs: Any, size: int, k: int) -> tuple[Any, Any]:
    """Arrays [size, ...] as groups of k in order: the first size % k, and then [size // k, k, ...]."""
    groups, rest = divmod(size, k)
    first = jax.tree.map(lambda x: x[:rest], xs)
    return first, jax.tree.map(lambda x: x[rest:].reshape(groups, k, *x.shape[1:]), xs)


def product(x: Any, d: Any, numbers: Any, dtype: Any, precision: Any = None) -> jax.Array:
    """A `dot_general` whose result has this dtype (None: that of its operands), maybe a wider one.

    Accelerators sum half-precision products up in float32, if asked to. XLA's CPU backend widens the
    operands, but not for all layouts: others it compiles and then does not run ("Unsupported element
    type for DotThunk: BF16 x BF16 = F32"). There the operands are widened here, which takes as long.

    The choice is made for the device that the plan is for, not by `lax.platform_dependent`: the products
    of a loop's body and of single tokens stand in programs that are cut again, and there a conditional
    would hide them.
    """
    is_wider = dtype is not None and dtype != jnp.promote_types(x.dtype, d.dtype)
    if is_wider and jax.default_backend() == "cpu":
        x, d = x.astype(dtype), d.astype(dtype)
    return lax.dot_general(x, d, numbers, precision=precision, preferred_element_type=dtype)
