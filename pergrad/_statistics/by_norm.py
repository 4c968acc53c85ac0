"""Means in which an example's weight depends on the norm of its gradient, as clipping needs it.

Such a mean needs the norms of all parameters before its first sum, but no second backward pass: once the
norms n_i are known, it is a mean with other weights over the factors, which are still in memory. A
factorable phi can be taken of the weight alone,

    phi(c(n_i) g_i) = phi(c(n_i)) phi(g_i),

so the weights are w_i phi(c(n_i)), where w_i are those of the call.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pergrad._errors import ArgumentError
from pergrad._statistics.base import LeafStatistic, Phase, name_of
from pergrad._statistics.of_examples import (
    By,
    Selecting,
    SquaredNorm,
    Where,
    check_by,
    norm_name,
    root,
)
from pergrad._statistics.of_parameters import Mean, Phi

Weight = Callable[..., jax.Array]  # of the norms [B]; elementwise


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class WeightedMean(Selecting, Mean):
    """`sum_i w_i phi(c_i g_i) / sum_i w_i` with `c_i = weight(||g_i||)`: weights that depend on norms.

    The weights `w_i` are the example weights of the call, by default 1: `weight` changes what an example
    adds, and not how often it counts. Without `phi` it is the mean of `c_i g_i`, with the shapes and
    dtypes of the parameters. It takes one backward pass, and costs as much as `ClippedMean`.

    How far one example can move the result follows from `weight`. An example adds `c_i g_i` to the sum,
    the result times the count, which is at most `s = max over n of n |weight(n)|` long: `s = c` for
    automatic clipping, `c / (n + 0.01)`. So an example of weight 1 that comes or goes moves the sum by
    at most `s`, and the mean of n examples by at most `2 s / n`. With norms of `G` groups or parameters
    it is `s sqrt(G)` in the place of `s`.

    `weight` is also called with the norm 0, of a gradient of zeros, where it should be finite (`1 / n`
    makes the result NaN). A norm that is infinite or NaN makes the result NaN whatever `weight` returns,
    unless the example's weight is 0. Norms have the range of their squares, up to 1.8e19 in float32.

    Args:
      weight: an elementwise function of the norms, [B], in at least float32. It may return any numbers,
        also negative ones. Use the same function object for every call: another one compiles anew.
      phi: None, or one of the functions that `Mean` knows to be factorable, such as `jnp.square`.
      by: whose norm it is. With `"all"` it is the norm of the example's whole gradient. With `"leaf"`
        the gradient of each parameter is weighted by its own norm. With a function from a parameter's
        path to the name of a group, each group of parameters is weighted by its norm.
      where: a function of a parameter's path, as for `Norm`. Only the parameters for which it returns
        True are in the norms and in the result, which has None for the others.

    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> automatic = pg.WeightedMean(lambda norm: 1 / (norm + 1))
    >>> pg.grad_stats(loss, automatic)(jnp.float32(1), jnp.array([1.0, 3.0]))
    Array(0.625, dtype=float32)
    """

    weight: Weight
    by: By
    where: Where | None

    def __init__(
        self, weight: Weight, phi: Phi = None, *, by: By = "all", where: Where | None = None
    ) -> None:
        if not callable(weight):
            raise ArgumentError(
                f"{type(self).__name__}: weight must be a function of the norms, not {weight!r}."
            )
        check_by(self, by)
        self.check_where(where)
        if not Mean(phi).is_factorable:
            raise ArgumentError(
                f"{type(self).__name__}: phi must be jnp.square, jnp.abs, jnp.sign or pg.power(p), not "
                f"{phi!r}."
            )
        for name, value in (("weight", weight), ("phi", phi), ("by", by), ("where", where)):
            object.__setattr__(self, name, value)

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (SquaredNorm(), self) if self.selects(path) else ()

    @property
    def phase(self) -> Phase:
        return Phase.BY_NORM

    @property
    def in_parts(self) -> bool:
        return False

    @property
    def shares_weights(self) -> bool:
        return False

    def norm_at(self, path: str) -> str | None:
        return norm_name(self.by, path) if self.selects(path) else None

    def weights(self, w: jax.Array, squared_norms: jax.Array, max_norm: Any) -> jax.Array:
        counts = w != 0
        # Padding may be NaN, and its derivatives too, so `weight` does not meet it.
        norms = root(jnp.where(counts, squared_norms, 1))
        own = self.weight(norms, max_norm) if self.takes_max_norm else self.weight(norms)
        if jnp.shape(own) != norms.shape:
            raise ArgumentError(
                f"{self!r}: weight must be elementwise, but it turned norms of the shape {norms.shape} "
                f"into {jnp.shape(own)}."
            )
        own = self.apply(jnp.where(jnp.isfinite(norms), own, jnp.nan).astype(norms.dtype))
        return jnp.where(counts, w * own.astype(w.dtype), 0)

    def __repr__(self) -> str:
        return f"WeightedMean({', '.join([name_of(self.weight), *self._options()])})"

    def _options(self) -> list[str]:
        """The options that are not the default, as they are written."""
        by = repr(self.by) if isinstance(self.by, str) else name_of(self.by)
        options = {"by": None if self.by == "all" else by}
        options |= {n: f and name_of(f) for n, f in (("phi", self.phi), ("where", self.where))}
        return [f"{name}={value}" for name, value in options.items() if value is not None]


@dataclasses.dataclass(frozen=True)
class Clip:
    """The weight `min(1, max_norm / norm)`. If `max_norm` is None, the caller passes it."""

    max_norm: float | None

    def __call__(self, norm: jax.Array, max_norm: Any = None) -> jax.Array:
        most = max_norm if self.max_norm is None else self.max_norm
        # It is 1 for a gradient of zeros, and NaN if a `max_norm` of the call is negative or NaN.
        c = jnp.where(norm > most, most / jnp.where(norm > 0, norm, 1), 1)
        return c if self.max_norm is not None else jnp.where(most >= 0, c, jnp.nan)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ClippedMean(WeightedMean):
    """`sum_i w_i phi(c_i g_i) / sum_i w_i` with `c_i = min(1, max_norm / ||g_i||)`: clipped gradients.

    It is the `WeightedMean` with this weight. Without `phi` it is the mean of the clipped gradients,
    with the shapes and dtypes of the parameters. Multiply it by the number of examples to get their sum.
    If `max_norm` is 0, the result is 0. If `max_norm` is infinite, nothing is clipped. An example whose
    norm is not finite makes the result NaN, unless its weight is 0.

    How far one example can move the result: an example of weight 1 that comes or goes moves the sum by
    at most C, up to rounding, and the mean of n examples by at most 2 C / n. C is `max_norm` for
    `by="all"`, and the root of the sum of squared `max_norm`s for parameters (`by="leaf"`) and groups:
    `max_norm * sqrt(G)` if all G of them have the same. With `phi=jnp.abs` that holds as well, with
    `jnp.square` it holds for C^2, and with `pg.power(p)` for C^p if p is at least 1. With `jnp.sign`
    clipping bounds nothing.

    Args:
      max_norm: a gradient with a larger norm is scaled down to this norm. Without it the caller passes
        it, as `stats_fn(params, batch, max_norm=c)`, and another value does not compile anew. It is then
        a number; or for `by="leaf"` a tree of numbers, which is a prefix of the parameters' tree; or for
        groups a mapping from their names to numbers. Under `jit` a negative number or NaN gives NaN.
      by: with `"all"` an example's gradient is clipped as a whole, by its norm over all parameters. With
        `"leaf"` the gradient of each parameter is clipped by its own norm. With a function from a
        parameter's path to the name of a group, each group of parameters is clipped by its own norm.
      phi: None, or one of the functions that `Mean` knows to be factorable, such as `jnp.square`.
      where: a function of a parameter's path, as for `Norm`. Only the parameters for which it returns
        True are in the norms and in the result, which has None for the others.

    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> pg.grad_stats(loss, pg.ClippedMean(2.0))(jnp.float32(1), jnp.array([1.0, 5.0]))
    Array(1.5, dtype=float32)
    >>> pg.grad_stats(loss, pg.ClippedMean())(jnp.float32(1), jnp.array([1.0, 5.0]), max_norm=4.0)
    Array(2.5, dtype=float32)
    """

    def __init__(
        self,
        max_norm: float | None = None,
        by: By = "all",
        *,
        phi: Phi = None,
        where: Where | None = None,
    ) -> None:
        is_number = isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool)
        if max_norm is not None and not (is_number and max_norm >= 0):
            raise ArgumentError(
                "ClippedMean: max_norm must be a number of at least 0, known when the function is made, "
                f"not {max_norm!r}. Without it, ClippedMean() takes a max_norm at each call, which may "
                "be an array."
            )
        weight = Clip(None if max_norm is None else float(max_norm))
        super().__init__(weight, phi, by=by, where=where)

    @property
    def max_norm(self) -> float | None:
        """The largest norm, or None if the caller passes it."""
        assert isinstance(self.weight, Clip)
        return self.weight.max_norm

    @property
    def takes_max_norm(self) -> bool:
        return self.max_norm is None

    def __repr__(self) -> str:
        own = [] if self.max_norm is None else [str(self.max_norm)]
        return f"ClippedMean({', '.join([*own, *self._options()])})"
