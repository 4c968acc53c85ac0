"""Statistics of an example's whole gradient: norms, clipped means, inner products, factors.

Each is made of leaves, one for every parameter. Most are sums of their leaves over the parameters:

    ||g_i||^2 = sum over parameters of ||g_i||^2,     and <g_i, v> and <g_i, g_j> in the same way.

A clipped mean needs the norms of all parameters before its first sum, but no second backward pass: once
the norms are known, it is a mean with other weights, w_i phi(min(1, C / ||g_i||)), over the factors,
which are still in memory.

Squares are kept in float32 at least (float64 for float64 gradients). In float32 a norm below 1e-19 is 0
and a norm above 1e19 is infinite, because its square is. This holds for every strategy, however large or
small the factors of the gradient are. A gradient that is not finite has a norm that is infinite or NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from pergrad._errors import ArgumentError
from pergrad._ir import widen
from pergrad._statistics.base import (
    Layout,
    LeafStatistic,
    Merging,
    OfAllGradients,
    Phase,
    Quantity,
    Reading,
    Seen,
    Shaped,
    Statistic,
    Unit,
    name_of,
)
from pergrad._statistics.of_parameters import Mean, Phi

Where = Callable[[str], bool]


By = Literal["all", "leaf"]


PerExample = Literal["example", "token"]


@dataclasses.dataclass(frozen=True)
class _OfPositions(Reading):
    """A reading of an example's gradient, or of what each position contributes to it."""

    per: PerExample = "example"

    @property
    def unit(self) -> Unit:
        return "position" if self.per == "token" else "example"


@dataclasses.dataclass(frozen=True)
class SquaredNorm(_OfPositions):
    """The squared norm `||g||^2` of one parameter's gradient, for every example or position."""

    @property
    def quantity(self) -> Quantity:
        return Quantity.SQUARED_NORMS

    @property
    def in_parts(self) -> bool:
        return True

    def of(self, g: jax.Array, direction: Any) -> jax.Array:
        return jnp.sum(jnp.square(widen(g)))


@dataclasses.dataclass(frozen=True)
class Projection(_OfPositions):
    """The inner product `<g, v>` of one parameter's gradient with each direction v of the call."""

    @property
    def takes_direction(self) -> bool:
        return True

    @property
    def quantity(self) -> Quantity:
        return Quantity.PROJECTIONS

    @property
    def in_parts(self) -> bool:
        return True

    def operations(self, like: Shaped, examples: int, directions: int) -> float:
        return 2 * directions * math.prod(like.shape) if directions > 1 else 0

    def of(self, g: jax.Array, direction: Any) -> jax.Array:
        if direction.ndim == g.ndim:
            return jnp.sum(widen(g) * direction)
        return jnp.tensordot(direction, widen(g), g.ndim)


@dataclasses.dataclass(frozen=True)
class Pairs(OfAllGradients):
    """The inner products `<g_i, g_j>` of one parameter's gradients, [B, B]."""

    @property
    def quantity(self) -> Quantity:
        return Quantity.PAIRS

    def operations(self, like: Shaped, examples: int, directions: int) -> float:
        return 2 * examples * math.prod(like.shape)

    def of_all(self, own: jax.Array, gs: jax.Array) -> jax.Array:
        own, gs = (widen(x).reshape(len(x), -1) for x in (own, gs))
        return own @ gs.T


@dataclasses.dataclass(frozen=True)
class Saved(LeafStatistic):
    """The factors of one parameter's gradients: a `FactorPair`, or None if there is no such pair."""

    @property
    def phase(self) -> Phase:
        return Phase.LAST

    @property
    def quantity(self) -> Quantity:
        return Quantity.FACTORS


@dataclasses.dataclass(frozen=True, repr=False)
class Selecting(Statistic):
    """A statistic of the parameters that `where` selects by their paths, or of all without `where`."""

    def selects(self, path: str) -> bool:
        where = getattr(self, "where", None)
        return where is None or bool(where(path))

    def __repr__(self) -> str:
        fields = [(f.name, f.default, getattr(self, f.name)) for f in dataclasses.fields(self)]
        changed = (f"{name}={value!r}" for name, default, value in fields if value != default)
        return f"{type(self).__name__}({', '.join(changed)})"

    def check_where(self, where: Any) -> None:
        """Raises an error unless `where` is a function or None."""
        if where is not None and not callable(where):
            raise ArgumentError(
                f"{type(self).__name__}: where must be a function of a parameter's path, a string such "
                f"as \"['block']['w']\", that returns True or False; not {where!r}."
            )


def added_up(leaves: Sequence[Any]) -> jax.Array:
    """The sum of the leaves that are not None."""
    return functools.reduce(jnp.add, [x for x in leaves if x is not None])


def root(square: jax.Array) -> jax.Array:
    """The square root, whose derivative at 0 is defined to be 0."""
    is_zero = square == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, square)))


def check_by(statistic: Statistic, by: Any) -> None:
    if by not in get_args(By):
        name = type(statistic).__name__
        raise ArgumentError(f"{name}: by must be 'all' or 'leaf' (each parameter alone), not {by!r}.")


def check_per(statistic: Statistic, per: Any) -> None:
    """Raises an error unless `per` is one of the values that the statistic's option `per` may have."""
    if per not in get_args(PerExample):
        name = type(statistic).__name__
        raise ArgumentError(
            f"{name}: per must be 'example' or 'token' (each position alone), not {per!r}. Groups of "
            "examples are units of pg.Mean and pg.Variance."
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Norm(Selecting):
    """The l2 norm of each example's gradient, shape [B]. Example weights do not change it.

    Args:
      by: with `"all"` the result is one norm, over all parameters together. With `"leaf"` it is one norm
        for each parameter, in a tree like the parameters.
      where: a function of a parameter's path, which is a string such as `['Dense_0']['kernel']`
        (`explain` shows all paths). Only the parameters for which it returns True are used. With
        `by="leaf"` the result has None for the others.
      per: with `"token"` the result has the norm of what each position contributes, [B, T].

    With `per="token"` the gradient of an example is the mean of T parts, one for each position, and the
    result has the norms of the parts. A part is T times what its position adds to the sums over
    positions in which the gradients of the selected parameters end: one of T products, one lookup, one
    summand of a bias. If a parameter is in several such sums, as a tied embedding is, the part has the
    summands of all of them. A gradient that is the same for all examples belongs to every part. Without
    positions T is 1.

    All selected parameters must have the same number of positions, or an error names two that differ.
    Position embeddings have one, because their gradient is no sum over positions: leave them out with
    `where`, or use `by="leaf"`, where each parameter may have positions of its own. Position t is place
    t in the sum, in the order in which the model has its positions there. If a model reverses, sorts or
    transposes its positions between two layers, these orders differ, which cannot be seen from here. A
    ragged product, whose tokens are sorted by expert, is refused.

    >>> loss = lambda p, x: jnp.mean(p["w"] * x + p["b"])
    >>> params = {"w": jnp.float32(1), "b": jnp.float32(1)}
    >>> pg.grad_stats(loss, pg.Norm())(params, jnp.array([0.0, 1.0, 3.0]))
    Array([1.       , 1.4142135, 3.1622777], dtype=float32)
    >>> pg.grad_stats(loss, pg.Norm(where=lambda path: "w" in path))(params, jnp.array([0.0, 1.0, 3.0]))
    Array([0., 1., 3.], dtype=float32)
    """

    by: By = "all"
    where: Where | None = None
    _: dataclasses.KW_ONLY
    per: PerExample = "example"

    def __post_init__(self) -> None:
        check_by(self, self.by)
        self.check_where(self.where)
        check_per(self, self.per)

    @property
    def unit(self) -> Unit:
        return "position" if self.per == "token" else "example"

    def together(self, path: str) -> str:
        return "all" if self.by == "all" else path

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (SquaredNorm(self.per),) if self.selects(path) else ()

    def of_leaves(self, leaves: Sequence[Any], tree: Callable[[Sequence[Any]], Any]) -> Any:
        if self.by == "all":
            return root(added_up(leaves))
        return tree([square if square is None else root(square) for square in leaves])

    @property
    def merging(self) -> Merging:
        return Merging.JOINED


@dataclasses.dataclass(frozen=True, repr=False)
class Gram(Selecting):
    """The inner products `<g_i, g_j>` of the examples' gradients, [B, B]. Weights do not change them.

    `where` selects parameters as in `Norm`. The inputs and residuals of the layers of these parameters
    are kept in memory until all microbatches have been through the model.

    >>> loss = lambda w, x: jnp.mean(x @ w)
    >>> pg.grad_stats(loss, pg.Gram())(jnp.ones(2), jnp.array([[1.0, 0.0], [3.0, 4.0]]))
    Array([[ 1.,  3.],
           [ 3., 25.]], dtype=float32)
    """

    where: Where | None = None

    def __post_init__(self) -> None:
        self.check_where(self.where)

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (Pairs(),) if self.selects(path) else ()

    def of_leaves(self, leaves: Sequence[Any], tree: Callable[[Sequence[Any]], Any]) -> Any:
        return added_up(leaves)

    @property
    def merging(self) -> Merging:
        raise ArgumentError(
            f"{self!r} cannot be combined: inner products between the examples of two batches are in "
            "the results of neither. Use it on one batch; with microbatch_size that may be large."
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Dot(Selecting):
    """The inner product `<g_i, v>` of each example's gradient with a direction, shape [B].

    The caller passes the direction, a tree like the parameters, as the keyword `direction`. If every
    leaf of it has one more axis in front, of the same length K, these are K directions, and the result
    is [B, K]. Weights do not change it.

    Args:
      per: with `"token"` the result has the inner products of what each position contributes, [B, T],
        or [B, T, K]. Their mean over positions is the inner product of the example's gradient. `Norm`
        says what a part is, and which parameters have positions in common.
      where: selects parameters as in `Norm`. The direction is a tree like all parameters in any case.

    >>> loss = lambda w, x: jnp.mean(x @ w)
    >>> pg.grad_stats(loss, pg.Dot())(jnp.ones(2), jnp.eye(2), direction=jnp.array([5.0, 7.0]))
    Array([5., 7.], dtype=float32)
    >>> pg.grad_stats(loss, pg.Dot())(jnp.ones(2), jnp.ones((4, 2)), direction=jnp.ones((3, 2))).shape
    (4, 3)
    >>> square, x = lambda w, x: jnp.mean((x @ w) ** 2), jnp.eye(2)[None]  # an example of two positions
    >>> dot = pg.Dot(per="token")
    >>> pg.grad_stats(square, dot)(jnp.ones(2), x, direction=jnp.array([5.0, 7.0]))
    Array([[10., 14.]], dtype=float32)
    """

    _: dataclasses.KW_ONLY
    per: PerExample = "example"
    where: Where | None = None

    def __post_init__(self) -> None:
        self.check_where(self.where)
        check_per(self, self.per)

    @property
    def unit(self) -> Unit:
        return "position" if self.per == "token" else "example"

    @property
    def takes_direction(self) -> bool:
        return True

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (Projection(self.per),) if self.selects(path) else ()

    def of_leaves(self, leaves: Sequence[Any], tree: Callable[[Sequence[Any]], Any]) -> Any:
        return added_up(leaves)

    @property
    def merging(self) -> Merging:
        return Merging.JOINED


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ClippedMean(Mean):
    """`sum_i w_i phi(c_i g_i) / sum_i w_i` with `c_i = min(1, max_norm / ||g_i||)`: clipped gradients.

    Without `phi` it is the mean of the clipped gradients, with the shapes and dtypes of the parameters.
    Multiply it by the number of examples to get their sum. If `max_norm` is 0, the result is 0. If
    `max_norm` is infinite, nothing is clipped. An example whose norm is not finite makes the result NaN,
    unless its weight is 0.

    Args:
      max_norm: a gradient with a larger norm is scaled down to this norm.
      by: with `"all"` an example's gradient is clipped as a whole, by its norm over all parameters. With
        `"leaf"` the gradient of each parameter is clipped by its own norm.
      phi: None, or one of the functions that `Mean` knows to be factorable, such as `jnp.square`.

    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> pg.grad_stats(loss, pg.ClippedMean(2.0))(jnp.float32(1), jnp.array([1.0, 5.0]))
    Array(1.5, dtype=float32)
    """

    max_norm: float = math.inf
    by: By = "all"

    def __init__(self, max_norm: float, by: By = "all", *, phi: Phi = None) -> None:
        check_by(self, by)
        is_number = isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool)
        if not is_number or not max_norm >= 0:
            raise ArgumentError(
                "ClippedMean: max_norm must be a number of at least 0, known when the function is made, "
                f"not {max_norm!r}."
            )
        if not Mean(phi).is_factorable:
            raise ArgumentError(
                f"ClippedMean: phi must be jnp.square, jnp.abs, jnp.sign or pg.power(p), not {phi!r}."
            )
        object.__setattr__(self, "phi", phi)
        object.__setattr__(self, "max_norm", float(max_norm))
        object.__setattr__(self, "by", by)

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (SquaredNorm(), self)

    @property
    def phase(self) -> Phase:
        return Phase.CLIPPED

    @property
    def in_parts(self) -> bool:
        return False

    @property
    def shares_weights(self) -> bool:
        return False

    def weights(self, w: jax.Array, squared_norms: jax.Array) -> jax.Array:
        own = self.weight(squared_norms)
        return jnp.where(w != 0, w * own.astype(w.dtype), 0)

    def norms_over(self, params: Sequence[int], param: int) -> tuple[int, ...]:
        return tuple(params) if self.by == "all" else (param,)

    def weight(self, squared_norm: jax.Array) -> jax.Array:
        """The factor phi(c) by which clipping changes an example's weight: phi(c g) = phi(c) phi(g).

        c is 1 for a gradient of zeros, and NaN for a gradient that is not finite.
        """
        norm = root(squared_norm)
        c = jnp.where(norm > self.max_norm, self.max_norm / jnp.where(norm > 0, norm, 1), 1)
        return self.apply(jnp.where(jnp.isfinite(norm), c, jnp.nan))

    def __repr__(self) -> str:
        by = "" if self.by == "all" else f", by={self.by!r}"
        return (
            f"ClippedMean({self.max_norm}{by}{'' if self.phi is None else f', phi={name_of(self.phi)}'})"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Factors(Selecting):
    """The factors of each parameter's gradients: the saved inputs and residuals of its layer.

    The result is a tree like the parameters. It has a `FactorPair` for every parameter whose gradient is
    a sum of outer products over positions, such as the weights of dense layers and convolutions. It has
    None for every other parameter. `where` selects parameters as in `Norm`.

    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> pair = pg.grad_stats(loss, pg.Factors())(jnp.ones((3, 2)), jnp.ones((8, 3)))
    >>> pair.inputs.shape, pair.residuals.shape
    ((8, 1, 3), (8, 1, 2))
    """

    where: Where | None = None

    def __post_init__(self) -> None:
        self.check_where(self.where)

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (Saved(),) if self.selects(path) else ()

    @property
    def merging(self) -> Merging:
        return Merging.JOINED


@dataclasses.dataclass(frozen=True)
class Loss(Statistic):
    """Each example's loss, shape [B]. Example weights do not change it."""

    def result(self, seen: Seen) -> Any:
        return seen.losses

    @property
    def merging(self) -> Merging:
        return Merging.JOINED


@dataclasses.dataclass(frozen=True)
class Count(Statistic):
    """The number of examples; with example weights it is the sum of the weights."""

    @property
    def layout(self) -> Layout:
        return Layout.NUMBER

    def result(self, seen: Seen) -> Any:
        return seen.count

    @property
    def merging(self) -> Merging:
        return Merging.ADDED
