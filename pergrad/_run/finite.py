"""Which examples are finite: those whose loss and whose whole gradient are.

Examples that are not finite can be dropped, as if their weight were 0. Whether one is has to be known
before its gradient is added to anything. Norms tell, and cost less than gradients: with a squared norm
||g||^2 that is at most the square of the largest number of the gradient's dtype, and is not NaN, no
entry of g can be infinite or NaN. But a finite gradient may have an infinite squared norm, which has its
range in float32 up to 1e38. If an example has such a norm and a finite loss, the gradients of the tail
are formed, one example at a time, and looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import aval
from pergrad._run.reduce import Reduction
from pergrad._run.states import States
from pergrad._statistics import SquaredNorm


def finite_examples(
    reductions: Sequence[Reduction], losses: jax.Array, w: jax.Array, read: States
) -> jax.Array:
    """Whether each example is finite, [B]. `read` has the squared norms.

    It may be wrong for an example whose weight `w` is 0, which counts for nothing in any case.
    """
    finite = jnp.isfinite(losses)
    for reduction in reductions:
        with jax.named_scope(reduction.name), jax.named_scope("finite"):
            finite &= _finite_gradients(reduction, finite & (w != 0), read)
    return finite


def _finite_gradients(reduction: Reduction, matters: jax.Array, read: States) -> jax.Array:
    """Whether each example's gradients of one tail are finite. Only those that matter are looked at."""
    tail, examples = reduction.plan.tail, reduction.examples
    squares = [lax.stop_gradient(read[param, SquaredNorm()]) for param in tail.params]
    pairs = zip(squares, tail.grads, strict=True)
    known = jnp.all(jnp.stack([x <= _largest_square(x, aval(g).dtype) for x, g in pairs]), axis=0)

    def of_one(factors: list[Any]) -> jax.Array:
        gs = tail.gradients(factors, examples.constants)
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in gs]))

    def look(factors: list[Any]) -> jax.Array:
        return lax.map(of_one, factors) if factors else jnp.broadcast_to(of_one([]), known.shape)

    factors = [lax.stop_gradient(x) for x in examples.factors]
    unknown = examples.devices.any_team(jnp.any(matters & ~known))
    return lax.cond(unknown, look, lambda _: known, factors)


def _largest_square(square: jax.Array, dtype: Any) -> float:
    """The largest squared norm that shows that a gradient of this dtype is finite."""
    largest = float(jnp.finfo(dtype).max)
    return min(largest * largest, float(jnp.finfo(square.dtype).max))
