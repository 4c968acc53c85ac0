"""A product of two saved arrays, summed over positions: the gradient of every dense layer.

For one example, with X its inputs and D its residuals, both with a row per position t,

    g = sum_t X_t D_t^T = X^T D,

a `dot_general` whose contracted axes are the positions. The sum over examples sum_i w_i X_i^T D_i is the
same product, with the examples as one more contracted axis. If there is one position, g is an outer
product, and an elementwise phi with phi(ab) = phi(a) phi(b) may be applied to its factors:

    sum_i w_i phi(X_i^T D_i) = sum_i w_i phi(X_i)^T phi(D_i).

The inner product of two gradients can be computed without them:

    <X^T D, Y^T E> = trace(D^T X Y^T E) = <X Y^T, D E^T>,

where the products X Y^T and D E^T sum over features, not over positions.

Squares and other powers of a large or small factor may leave the range of floats, even if those of the
product do not. So one factor is multiplied by a number s and the other is divided by it, such that both
become about equally large. As s is a power of two, nothing is rounded:

    x d^T = (s x) (d / s)^T      with      max |s x| ~ max |d / s| ~ sqrt(max |x d^T|).

Each example has its own s (`balanced`), and for norms each position has its own (`in_rows`). Squares of
the factors then overflow only if those of the gradient do. With G the largest entry of an example's
gradient, an entry whose square is below 1e-38 G may be lost in float32. If G is below 1, such a square
is below the smallest float anyway.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._cut.terms._term import Term
from pergrad._ir import (
    Env,
    Weights,
    accumulation_dtype,
    distinct,
    full_precision,
    product,
    read,
    weigh,
    weigh_factors,
)


@dataclasses.dataclass(frozen=True)
class Product(Term):
    """A `dot_general` of two arrays X and D that both differ from example to example."""

    eqn: JaxprEqn

    @property
    def kind(self) -> str:
        return "product"

    @staticmethod
    def match(
        eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]
    ) -> Product | None:
        """The term, if both operands vary."""
        if len(varying) < 2:
            return None
        return Product(eqn, eqn.outvars[0], distinct(eqn.invars))

    @property
    def contributions(self) -> int:
        (contracted, _), _ = self.eqn.params["dimension_numbers"]
        return math.prod(aval(self.eqn.invars[0]).shape[a] for a in contracted)

    def form(self, env: Env) -> None:
        x, d = (read(env, v) for v in self.eqn.invars)
        dtype, precision = (self.eqn.params[k] for k in ("preferred_element_type", "precision"))
        env[self.out] = self._product(x, d, dtype, examples=0, precision=precision)

    def sum(self, env: Env, w: Weights) -> jax.Array:
        return self.sum_of(*self.read(env), w)

    def read(self, env: Env) -> tuple[jax.Array, jax.Array]:
        """The factors X and D [B, ...], with their other axes as in the equation."""
        x, d = (read(env, v) for v in self.eqn.invars)
        return x, d

    def sum_of(self, x: jax.Array, d: jax.Array, w: Weights, *, in_full: bool = False) -> jax.Array:
        """sum_i w_i X_i^T D_i, in float32 at least, from factors [B, ...].

        The product has the precision of the equation. With `in_full` no digits of the factors are lost
        that the gradient's own factors, or their squares, can have.
        """
        dtype = accumulation_dtype(aval(self.out).dtype)
        precision = self.eqn.params["precision"]
        if in_full:
            precision = full_precision(precision, *(aval(v).dtype for v in self.eqn.invars))
        product = functools.partial(self._product, dtype=dtype, examples=1, precision=precision)
        if isinstance(w, jax.Array):
            return product(*weigh_factors(x.astype(dtype), d.astype(dtype), w))
        # If all examples have the same weight, the smallest of the two factors and the product is
        # multiplied by it, but no half-precision factor is.
        if self.size <= min(x.size, d.size) or x.dtype != dtype:
            return weigh(product(x, d), w)
        return product(weigh(x, w), d) if x.size <= d.size else product(x, weigh(d, w))

    def split(self, env: Env) -> list[jax.Array]:
        contracted, _ = self.eqn.params["dimension_numbers"]
        parts = []
        for v, summed in zip(self.eqn.invars, contracted, strict=True):
            x = jnp.moveaxis(read(env, v), [a + 1 for a in summed], range(1, 1 + len(summed)))
            parts.append(x.reshape(len(x), self.contributions, *x.shape[1 + len(summed) :]))
        return parts

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        contracted, batched = self.eqn.params["dimension_numbers"]
        left = [
            tuple(a - sum(c < a for c in summed) for a in batch)
            for summed, batch in zip(contracted, batched, strict=True)
        ]
        x, d = parts
        dtype = accumulation_dtype(aval(self.out).dtype)
        return product(x, d, (((), ()), (left[0], left[1])), dtype)

    def in_rows(self, env: Env) -> tuple[jax.Array, jax.Array]:
        """s X [B, batch, T, a] and D / s [B, batch, T, b], with an s for each position t.

        Both are in float32 at least.
        """
        dtype = accumulation_dtype(aval(self.out).dtype)
        contracted, batched = self.eqn.params["dimension_numbers"]
        rows = []
        for v, summed, batch in zip(self.eqn.invars, contracted, batched, strict=True):
            x = read(env, v)
            free = [a for a in range(x.ndim - 1) if a not in (*summed, *batch)]
            x = x.transpose(0, *(a + 1 for a in (*batch, *summed, *free)))
            first, last = 1 + len(batch), x.ndim - len(free)
            sizes = math.prod(x.shape[1:first]), self.contributions, math.prod(x.shape[last:])
            rows.append(x.reshape(len(x), *sizes).astype(dtype))
        x, d = rows
        s, inverse = _balance(*(_largest(a, (3,))[..., None] for a in rows))
        return x * s, d * inverse

    def balanced(self, x: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The factors s x and d / s [B, ...], in float32 at least, with an s for every example."""
        dtype = accumulation_dtype(aval(self.out).dtype)
        x, d = x.astype(dtype), d.astype(dtype)
        s, inverse = _balance(self._each(0, x, _largest), self._each(1, d, _largest))
        return x * self._along(0, x, s), d * self._along(1, d, inverse)

    def beside_zeros(self, x: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Whether, for the same example, D has a zero (to go with X) and X has one (to go with D)."""
        x_zero, d_zero = (self._each(k, a == 0, jnp.any) for k, a in enumerate((x, d)))
        return self._along(0, x, d_zero), self._along(1, d, x_zero)

    def _each(self, operand: int, x: jax.Array, reduce: Callable[..., jax.Array]) -> jax.Array:
        """Reduces a factor [B, ...] over all axes but those of examples and batches, to [B, *batch]."""
        own = self._example_axes(operand)
        out = reduce(x, tuple(a for a in range(x.ndim) if a not in own))
        return out.transpose(np.argsort(np.argsort(own)))

    def _along(self, operand: int, x: jax.Array, each: jax.Array) -> jax.Array:
        """The array `each` [B, *batch], with axes of length 1 added, to go with the factor `x`."""
        own = self._example_axes(operand)
        shape = [n if a in own else 1 for a, n in enumerate(x.shape)]
        return each.transpose(np.argsort(own)).reshape(shape)

    def _example_axes(self, operand: int) -> tuple[int, ...]:
        """The axes of a factor [B, ...] that both factors have and that are not summed over."""
        _, batched = self.eqn.params["dimension_numbers"]
        return 0, *(a + 1 for a in batched[operand])

    def _product(self, x: Any, d: Any, dtype: Any, *, examples: int, precision: Any) -> jax.Array:
        """X^T D of one example (`examples=0`), or its sum over an example axis in front (`examples=1`).

        If the contracted axes come first in both factors, they are merged into one, which costs nothing.
        With several contracted axes XLA would copy an operand.
        """
        (xc, dc), (xb, db) = self.eqn.params["dimension_numbers"]
        xc, dc = ((*range(examples), *(a + examples for a in axes)) for axes in (xc, dc))
        xb, db = (tuple(a + examples for a in axes) for axes in (xb, db))
        if xc == dc == tuple(range(len(xc))) and not xb:
            positions = math.prod(x.shape[: len(xc)])
            x, d = (a.reshape(positions, *a.shape[len(xc) :]) for a in (x, d))
            xc, dc = (0,), (0,)
        return product(x, d, ((xc, dc), (xb, db)), dtype, precision)


def _largest(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The largest magnitude along these axes, as a constant for derivatives."""
    return jnp.max(jnp.abs(lax.stop_gradient(x)), axis=axes, initial=0)


def _balance(x: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The powers of two s and 1/s for which s x and d / s are about equal. `x` and `d` are not negative.

    If one of the two is 0, the other becomes about 1. If one of them is not finite, s is 1. The powers
    of two are made from the bits of their exponents.
    """
    info = jnp.finfo(x.dtype)
    bits, bias = jnp.dtype(f"int{info.bits}"), info.maxexp - 1

    def exponent(a: jax.Array) -> jax.Array:
        return lax.shift_right_logical(lax.bitcast_convert_type(a, bits), bits.type(info.nmant)) - bias

    def two_to(k: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.shift_left(k + bias, bits.type(info.nmant)), x.dtype)

    of_x, of_d = exponent(x), exponent(d)
    of_x, of_d = jnp.where(x == 0, -of_d, of_x), jnp.where(d == 0, -of_x, of_d)
    k = jnp.clip((of_d - of_x) // 2, 1 - bias, bias - 1)
    k = jnp.where(jnp.isfinite(x) & jnp.isfinite(d), k, 0)
    return two_to(k), two_to(-k)


def axes_of_product(eqn: JaxprEqn) -> list[tuple[int | None, int | None]]:
    """For each axis of a product, the axis of the first and of the second operand that it comes from.

    An axis that comes from one operand alone has None for the other.
    """
    contracted, batched = eqn.params["dimension_numbers"]
    axes: list[tuple[int | None, int | None]] = list(zip(*batched, strict=True))
    for side, v in enumerate(eqn.invars):
        for a in range(len(aval(v).shape)):
            if a not in (*contracted[side], *batched[side]):
                axes.append((None, a) if side else (a, None))
    return axes
