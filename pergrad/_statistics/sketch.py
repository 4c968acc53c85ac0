"""Random projections of gradients to a few numbers, which keep inner products in expectation.

The gradients of all parameters are projected to `dim` numbers by independent random matrices, and the
projections are added up. The matrix of a parameter depends on its shape, its path and the key alone, so
that all strategies, batches and devices have the same.

A gradient with two or more axes (axes of length 1 do not count) is read as a matrix G [m, n]: its axes
are split where the larger of m and n is smallest. It is compressed from both sides,

    U = P^T G Q        with random signs P [m, a] / sqrt(a) and Q [n, b] / sqrt(b),

and for a product G = X^T D that is (X P)^T (D Q), which needs no gradient. Here a b is about 4 dim, and
a side that is not longer than a or b stays as it is. The entries of U, or those of a gradient with fewer
axes, are then given random signs and written in rows of length dim. Every row is rotated by a random
number of places, and the rows are added up.

Inner products. For random signs s the product (s^T x) (s^T y) has the mean x^T y and the variance

    v(x, y) = |x|^2 |y|^2 + (x^T y)^2 - 2 sum_i x_i^2 y_i^2.

So P^T P = I in expectation, both ways of compression keep inner products in expectation, and so does
the last step: two entries meet with probability 1/dim at most, and their product has a random sign. Its
variance is at most v(u, w) / dim, and 0 for gradients of at most dim entries. With g_i, h_i the rows of
two matrices G and H, and G_j, H_j their columns, the variance of <P^T G Q, P^T H Q> is

    V(G H^T) / a + V(G^T H) / b + W / (a b),       V(M) = ||M||^2 + tr(M^2) - 2 sum_i M_ii^2,

    W = ||G||^2 ||H||^2 + <G, H>^2 + ||G H^T||^2 + ||G^T H||^2 + 4 sum_ij G_ij^2 H_ij^2
        - 2 sum_i (|g_i|^2 |h_i|^2 + (g_i^T h_i)^2) - 2 sum_j (|G_j|^2 |H_j|^2 + (G_j^T H_j)^2),

where 1/a is 0 for a side that stays as it is. (For given Q, <P^T G Q, P^T H Q> = tr(P P^T M) with
M = H Q Q^T G^T, whose variance is V(M) / a. The variance is the mean of that plus the variance of the
mean tr(Q Q^T G^T H), and E[Q Q^T X Q Q^T] = X + (X^T + tr(X) I - 2 diag(X)) / b.) As each of V and W is
at most a multiple of ||G||^2 ||H||^2, the variance of the whole is at most

    ((1 + 2/a) (1 + 2/b) (1 + 2/dim) - 1) ||G||^2 ||H||^2.

Two parameters p and q have independent projections, whose inner products are 0 in expectation:

    Var = sum over p of Var_p + sum over p < q of
          (||g_p||^2 ||h_q||^2 + ||g_q||^2 ||h_p||^2 + 2 <g_p, h_p> <g_q, h_q>) / dim.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pergrad._errors import ArgumentError
from pergrad._ir import accumulation_dtype, widen
from pergrad._statistics.base import Compressing, LeafStatistic, Merging, Shaped
from pergrad._statistics.of_examples import Selecting, Where, added_up

OVERSAMPLED = 4  # entries of U for each of the dim numbers


class SketchLayout(NamedTuple):
    """How a gradient is read as a matrix, and how far the matrix is compressed.

    `axes` are the axes of the gradient that are longer than 1. The first `split` of them are the rows of
    the matrix, and the others are its columns. `a` and `b` are the numbers of rows and columns after
    compression; for a gradient of less than two axes there is one column.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    split: int
    a: int
    b: int

    @staticmethod
    def of(shape: Sequence[int], dim: int) -> SketchLayout:
        """The layout of a gradient of this shape that is projected to `dim` numbers."""
        axes = tuple(k for k, n in enumerate(shape) if n != 1)
        sizes = [shape[k] for k in axes]
        splits = range(1, len(sizes)) if len(sizes) > 1 else [len(sizes)]
        split = min(splits, key=lambda k: max(math.prod(sizes[:k]), math.prod(sizes[k:])))
        m, n = math.prod(sizes[:split]), math.prod(sizes[split:])
        if len(sizes) < 2:
            return SketchLayout(tuple(shape), axes, split, m, n)
        entries = OVERSAMPLED * dim
        a = min(m, math.ceil(math.sqrt(entries)))
        b = min(n, math.ceil(entries / max(a, 1)))
        return SketchLayout(tuple(shape), axes, split, min(m, math.ceil(entries / max(b, 1))), b)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The lengths of the axes that are rows."""
        return tuple(self.shape[k] for k in self.axes[: self.split])

    @property
    def column_shape(self) -> tuple[int, ...]:
        """The lengths of the axes that are columns."""
        return tuple(self.shape[k] for k in self.axes[self.split :])

    @property
    def m(self) -> int:
        """The number of rows."""
        return math.prod(self.row_shape)

    @property
    def n(self) -> int:
        """The number of columns."""
        return math.prod(self.column_shape)

    @property
    def compresses(self) -> bool:
        """Whether the matrix is compressed at all."""
        return self.a < self.m or self.b < self.n


class Signs(NamedTuple):
    """The random numbers of one parameter's projection.

    `rows` is P [*row_shape, a] and `columns` is Q [*column_shape, b]; a side that stays as it is has
    None. `signs` [rounds, dim] are those of the entries of U in rows of length dim, and `places`
    [rounds] says how far each of these rows is rotated.
    """

    rows: jax.Array | None
    columns: jax.Array | None
    signs: jax.Array
    places: jax.Array

    @staticmethod
    def of(layout: SketchLayout, dim: int, key: jax.Array, dtype: Any) -> Signs:
        """The random numbers for gradients with this layout."""
        of_rows, of_columns, of_entries, of_places = jax.random.split(key, 4)
        rounds = max(1, math.ceil(layout.a * layout.b / dim))

        def signs(key: jax.Array, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
            # The bits do not depend on the dtype of floats, nor on the device.
            is_positive = jax.random.bits(key, shape, jnp.uint8) % 2 == 0
            return jnp.where(is_positive, jnp.asarray(scale, dtype), jnp.asarray(-scale, dtype))

        def side(key: jax.Array, shape: tuple[int, ...], length: int) -> jax.Array | None:
            if length == math.prod(shape):
                return None
            return signs(key, (*shape, length), length**-0.5)

        return Signs(
            side(of_rows, layout.row_shape, layout.a),
            side(of_columns, layout.column_shape, layout.b),
            signs(of_entries, (rounds, dim)),
            jax.random.randint(of_places, (rounds,), 0, dim, jnp.int32),
        )

    def side(self, layout: SketchLayout, columns: bool) -> jax.Array:
        """P, or Q for `columns`, with the identity for a side that stays as it is."""
        own, shape = (self.columns, layout.column_shape) if columns else (self.rows, layout.row_shape)
        if own is not None:
            return own
        return jnp.eye(math.prod(shape), dtype=self.signs.dtype).reshape(*shape, -1)

    def compressed(self, layout: SketchLayout, g: jax.Array) -> jax.Array:
        """U = P^T G Q of one gradient."""
        u = g.reshape(layout.m, layout.n)
        rows, columns = (
            x if x is None else x.reshape(-1, x.shape[-1]) for x in (self.rows, self.columns)
        )
        if columns is not None and layout.m < layout.n:
            u, columns = u @ columns, None
        u = u if rows is None else rows.T @ u
        return u if columns is None else u @ columns

    def spread(self, u: jax.Array) -> jax.Array:
        """The dim numbers of one gradient, from U."""
        rounds, dim = self.signs.shape
        u = jnp.pad(u.reshape(-1), (0, rounds * dim - u.size)).reshape(rounds, dim) * self.signs
        if rounds == 1:
            return jnp.roll(u[0], self.places[0])
        taken = (jnp.arange(dim)[None] - self.places[:, None]) % dim
        return jnp.sum(jnp.take_along_axis(u, taken, axis=1), axis=0)


@dataclasses.dataclass(frozen=True)
class Sketch(Compressing):
    """The projection of one parameter's gradient to `dim` numbers; `key` is that of `Project`."""

    dim: int
    key: int

    def layout_of(self, shape: Sequence[int]) -> SketchLayout:
        """The layout of a gradient of this shape."""
        return SketchLayout.of(shape, self.dim)

    def towards(self, path: str, like: Shaped, direction: Any) -> Signs:
        words = np.array([self.key >> 32, self.key & 0xFFFFFFFF], np.uint32)
        key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
        for word in np.frombuffer(hashlib.sha256(path.encode()).digest()[:8], "<u4"):
            key = jax.random.fold_in(key, word)
        return Signs.of(self.layout_of(like.shape), self.dim, key, accumulation_dtype(like.dtype))

    def operations(self, like: Shaped, examples: int, directions: int) -> float:
        layout = self.layout_of(like.shape)
        m, n, a, b = layout.m, layout.n, layout.a, layout.b
        first, second = (m * n * b, m * a * b) if m < n else (m * n * a, n * a * b)
        return 2 * (first + second) if layout.compresses else 0

    def of(self, g: jax.Array, direction: Signs) -> jax.Array:
        return direction.spread(direction.compressed(self.layout_of(g.shape), widen(g)))


@dataclasses.dataclass(frozen=True, repr=False)
class Project(Selecting):
    """A random projection of each example's gradient to `dim` numbers, [B, dim].

    Inner products of projections are those of the gradients in expectation, so that the projections of
    the examples of a data set are a small stand-in for their gradients: for the similarity of examples,
    data selection, the influence of training examples, or norms. Nothing is divided by the number of
    parameters: `|S g_i|^2` is `||g_i||^2` in expectation. Weights do not change the result. It has
    float32, for float64 parameters float64.

    Args:
      dim: the number of entries of a projection, at least 1.
      key: an int from 0 to 2^64 - 1, or a PRNG key of JAX, whose first 64 bits are taken as such an int.
        `Project(64, 7)` and `Project(64, jax.random.key(7))` are equal. The key is a part of the
        statistic, which is hashable, so it must not be a tracer.
      where: a function of a parameter's path, as in `Norm`. Only the parameters for which it returns
        True are projected.

    The projection of a parameter depends on the key, on its path and its shape, and on nothing else. So
    results of several batches, microbatches, devices and strategies belong together, as long as the
    parameters' tree, `argnums` and `dim` stay the same.

    The variance of `<S g, S h>`, over keys, depends on the shapes of the parameters. For one parameter
    with at most `dim` entries there is none. For one with a single axis it is at most
    `2 ||g||^2 ||h||^2 / dim`. A matrix is compressed from both sides, to a rows and b columns with a b
    about 4 dim, because the projection of a product of inputs and residuals then needs no gradient:
    `(X P)^T (D Q)`. Its variance is at most `((1 + 2/a) (1 + 2/b) (1 + 2/dim) - 1) ||g||^2 ||h||^2`. For
    `dim=512` that is 0.094, so that an inner product is off by about 0.3 `||g|| ||h||` at worst, which
    are gradients of rank 1. With k singular values of about the same size it is about 0.3 / sqrt(k) of
    that, but not less than sqrt(2 / dim). The projections of several parameters are independent.

    Layers that a `scan` runs are projected after the loop, so their inputs and residuals leave the loop.
    A gradient that is not finite has a projection that is not finite, in some entries at least.

    >>> loss = lambda w, x: jnp.mean(x @ w)
    >>> x = jnp.array([[3.0, 0.0], [0.0, 4.0], [3.0, 4.0]])
    >>> projections = pg.grad_stats(loss, pg.Project(8, 0))(jnp.ones(2), x)
    >>> projections.shape
    (3, 8)
    >>> projections @ projections.T  # exact here, since the gradients have less than 8 entries
    Array([[ 9.,  0.,  9.],
           [ 0., 16., 16.],
           [ 9., 16., 25.]], dtype=float32)
    """

    dim: int
    key: Any
    _: dataclasses.KW_ONLY
    where: Where | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, (int, np.integer)) or self.dim < 1:
            raise ArgumentError(f"Project: dim must be a number of at least 1, not {self.dim!r}.")
        self.check_where(self.where)
        object.__setattr__(self, "dim", int(self.dim))
        object.__setattr__(self, "key", _as_int(self.key))

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (Sketch(self.dim, self.key),) if self.selects(path) else ()

    def of_leaves(self, leaves: Sequence[Any], tree: Callable[[Sequence[Any]], Any]) -> Any:
        return added_up(leaves)

    @property
    def merging(self) -> Merging:
        return Merging.JOINED


def _as_int(key: Any) -> int:
    """The key as an int that is hashable: an int as it is, and the first 64 bits of a PRNG key."""
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool) and 0 <= key < 2**64:
        return int(key)
    if isinstance(key, Tracer):
        raise ArgumentError(
            "Project: the key must be known when the statistic is made, because it is a part of the "
            "statistic. It is a tracer: make the statistic outside of jit, or give it an int."
        )
    if isinstance(key, jax.Array):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key)
        if key.dtype == jnp.uint32 and key.ndim == 1 and key.size >= 2:
            high, low = (int(word) for word in np.asarray(key)[:2])
            return (high << 32) | low
    raise ArgumentError(f"Project: key must be an int from 0 to 2^64 - 1 or one PRNG key, not {key!r}.")
