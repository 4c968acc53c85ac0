"""Statistics of an example's whole gradient: norms, inner products, factors.

Each is made of leaves, one for every parameter. Most are sums of their leaves over the parameters:

    ||g_i||^2 = sum over parameters of ||g_i||^2,     and <g_i, v> and <g_i, g_j> in the same way.

Squares are kept in float32 at least (float64 for float64 gradients). In float32 a norm below 1e-19 is 0
and a norm above 1e19 is infinite, because its square is. This holds for every strategy, however large or
small the factors of the gradient are. A gradient that is not finite has a norm that is infinite or NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

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
    Statistic,
)

Where = Callable[[str], bool]


# Which parameters have a norm in common: all, none, or those for whose paths a function gives one name.
By = Literal["all", "leaf"] | Callable[[str], str]


@dataclasses.dataclass(frozen=True)
class SquaredNorm(Reading):
    """The squared norm `||g||^2` of one parameter's gradient, for every example."""

    @property
    def quantity(self) -> Quantity:
        return Quantity.SQUARED_NORMS

    @property
    def in_parts(self) -> bool:
        return True

    def of(self, g: jax.Array, direction: Any) -> jax.Array:
        return jnp.sum(jnp.square(widen(g)))


@dataclasses.dataclass(frozen=True)
class Projection(Reading):
    """The inner product `<g, v>` of one parameter's gradient with the direction v of the call."""

    @property
    def takes_direction(self) -> bool:
        return True

    @property
    def quantity(self) -> Quantity:
        return Quantity.PROJECTIONS

    @property
    def in_parts(self) -> bool:
        return True

    def of(self, g: jax.Array, direction: Any) -> jax.Array:
        return jnp.sum(widen(g) * direction)


@dataclasses.dataclass(frozen=True)
class Pairs(OfAllGradients):
    """The inner products `<g_i, g_j>` of one parameter's gradients, [B, B]."""

    @property
    def quantity(self) -> Quantity:
        return Quantity.PAIRS

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
    """Raises an error unless `by` is one of the values that the statistic's option `by` may have."""
    if not callable(by) and by not in ("all", "leaf"):
        raise ArgumentError(
            f"{type(statistic).__name__}: by must be 'all', 'leaf' (each parameter alone) or a function "
            f"from a parameter's path to the name of its group, not {by!r}."
        )


def norm_name(by: By, path: str) -> str:
    """The name of the norm that the parameter at `path` belongs to. Equal names have one norm."""
    if not callable(by):
        return path if by == "leaf" else by
    name = by(path)
    if not isinstance(name, str):
        raise ArgumentError(
            f"by must give the name of a group, a string, for every path. For {path} it gave {name!r}."
        )
    return name


@dataclasses.dataclass(frozen=True, repr=False)
class Norm(Selecting):
    """The l2 norm of each example's gradient, shape [B]. Example weights do not change it.

    Args:
      by: with `"all"` the result is one norm, over all parameters together. With `"leaf"` it is one norm
        for each parameter, in a tree like the parameters. With a function from a parameter's path to the
        name of a group it is one norm for each group, in a dictionary by name.
      where: a function of a parameter's path, which is a string such as `['Dense_0']['kernel']`
        (`explain` shows all paths). Only the parameters for which it returns True are used. With
        `by="leaf"` the result has None for the others.

    >>> loss = lambda p, x: jnp.mean(p["w"] * x + p["b"])
    >>> params = {"w": jnp.float32(1), "b": jnp.float32(1)}
    >>> pg.grad_stats(loss, pg.Norm())(params, jnp.array([0.0, 1.0, 3.0]))
    Array([1.       , 1.4142135, 3.1622777], dtype=float32)
    >>> pg.grad_stats(loss, pg.Norm(where=lambda path: "w" in path))(params, jnp.array([0.0, 1.0, 3.0]))
    Array([0., 1., 3.], dtype=float32)
    >>> by = lambda path: "weights" if "w" in path else "others"
    >>> pg.grad_stats(loss, pg.Norm(by=by))(params, jnp.array([0.0, 1.0, 3.0]))["weights"]
    Array([0., 1., 3.], dtype=float32)
    """

    by: By = "all"
    where: Where | None = None

    def __post_init__(self) -> None:
        check_by(self, self.by)
        self.check_where(self.where)

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (SquaredNorm(),) if self.selects(path) else ()

    def result(self, seen: Seen) -> Any:
        if not callable(self.by):
            return super().result(seen)
        groups: dict[str, list[jax.Array]] = {}
        for path, square in zip(seen.paths, seen.leaves_of(self), strict=True):
            if square is not None:
                groups.setdefault(norm_name(self.by, path), []).append(square)
        return {name: root(added_up(squares)) for name, squares in groups.items()}

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


@dataclasses.dataclass(frozen=True)
class Dot(Statistic):
    """The inner product `<g_i, v>` of each example's gradient with a direction, shape [B].

    The caller passes the direction, a tree like the parameters, as the keyword `direction`.

    >>> loss = lambda w, x: jnp.mean(x @ w)
    >>> pg.grad_stats(loss, pg.Dot())(jnp.ones(2), jnp.eye(2), direction=jnp.array([5.0, 7.0]))
    Array([5., 7.], dtype=float32)
    """

    @property
    def takes_direction(self) -> bool:
        return True

    def leaves(self, path: str) -> tuple[LeafStatistic, ...]:
        return (Projection(),)

    def of_leaves(self, leaves: Sequence[Any], tree: Callable[[Sequence[Any]], Any]) -> Any:
        return added_up(leaves)

    @property
    def merging(self) -> Merging:
        return Merging.JOINED


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
