"""The statistics that are computed for each parameter on its own.

States of half-precision gradients are kept in float32. `Mean()` returns the parameter's own dtype, as
`jax.grad` does. The other statistics return float32 (or float64), because squares of half-precision
numbers overflow and underflow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._errors import ArgumentError
from pergrad._ir import (
    Devices,
    Shard,
    Weights,
    accumulation_dtype,
    added,
    total,
    weigh,
    weighted_sum,
)
from pergrad._statistics.base import (
    Accumulator,
    Layout,
    Merging,
    Per,
    Quantity,
    Reading,
    Shaped,
    State,
    WeightedSum,
    checked_per,
    name_of,
)


@dataclasses.dataclass(frozen=True)
class Power:
    """The function that `power` returns: `g ** p` for a whole `p`, and `|g| ** p` for any other."""

    p: int | float

    def __call__(self, g: jax.Array) -> jax.Array:
        return lax.integer_pow(g, self.p) if isinstance(self.p, int) else jnp.abs(g) ** self.p

    def __repr__(self) -> str:
        return f"power({self.p})"


def power(p: int | float) -> Power:
    """The function `g -> g ** p` for `Mean`, which is known to be factorable.

    For a `p` that is not a whole number the function is `|g| ** p`. `p` must be positive.

    >>> pg.power(3)(jnp.array([-2.0, 1.0]))
    Array([-8.,  1.], dtype=float32)
    """
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 < p < math.inf:
        raise ArgumentError(f"power needs a positive, finite number, not {p!r}.")
    return Power(int(p) if float(p).is_integer() else p)


Phi = Callable[[jax.Array], jax.Array] | None


# The functions that are known to be factorable, and their degrees.
FACTORABLE = ((jnp.square, 2), (jnp.abs, 1), (jnp.absolute, 1), (jnp.sign, 0))


@dataclasses.dataclass(frozen=True, repr=False)
class Mean(WeightedSum):
    """`E[phi(g)]`, the mean over the examples of an elementwise function of their gradients.

    The result is shaped like the parameters. Without `phi` it is the mean gradient, which is what
    `jax.grad` returns. `phi` is applied to the gradient in at least float32.

    `phi(g)` has the range of its dtype: in float32 the square of a `g` below 1e-19 is 0, and the square
    of a `g` above 1e19 is infinite. NaN and infinities are not hidden: an example whose gradient is NaN
    makes the mean NaN, unless its weight is 0. With `jnp.sign`, a gradient that has both infinite and
    NaN entries in a row or column may turn further entries of that row or column into NaN.

    Args:
      phi: an elementwise function, or None for the identity.
      per: what one unit is. With `"example"` it is an example. With a number k it is a group of k
        neighbouring examples, whose gradient is the mean of theirs. With `"token"` it is every single
        contribution to a sum over positions, times the number of contributions, so that the mean of the
        units is the example's gradient. A gradient that is not a sum over positions is one contribution.
      factorable: whether `phi(a * b) == phi(a) * phi(b)` for all numbers, which allows a cheaper
        strategy. It is known for `jnp.square`, `jnp.abs`, `jnp.sign` and `pg.power(p)`. If `phi` does
        not have this property, `factorable=True` gives wrong results.

    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> pg.grad_stats(loss, pg.Mean(jnp.square))(jnp.float32(1), jnp.array([1.0, 3.0]))
    Array(5., dtype=float32)
    """

    phi: Phi = None
    _: dataclasses.KW_ONLY
    per: Per = "example"
    factorable: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "per", checked_per(self.per))
        if self.phi is not None and not callable(self.phi):
            raise ArgumentError(
                f"phi must be an elementwise function such as jnp.square, not {self.phi!r}."
            )

    @property
    def unit(self) -> Per:
        return self.per

    @property
    def in_parts(self) -> bool:
        return True

    @property
    def merging(self) -> Merging:
        return Merging.WEIGHED

    @property
    def is_sum(self) -> bool:
        return self.phi is None

    @property
    def is_factorable(self) -> bool:
        return self.degree is not None if self.factorable is None else self.factorable

    @property
    def degree(self) -> float | None:
        """The p for which `|phi(g)|` is `|g| ** p`, or None if it is not known."""
        if self.phi is None:
            return 1
        if isinstance(self.phi, Power):
            return self.phi.p
        return next((degree for known, degree in FACTORABLE if self.phi is known), None)

    def apply(self, g: jax.Array) -> jax.Array:
        """`phi(g)` in the dtype that sums are kept in."""
        dtype = accumulation_dtype(g.dtype)
        g = g.astype(dtype)
        if self.phi is None:
            return g
        out = self.phi(g)
        if jnp.shape(out) != g.shape:
            raise ArgumentError(
                f"{self!r}: phi must be elementwise, but it turned the shape {g.shape} into "
                f"{jnp.shape(out)}. For other reductions use pg.Fold."
            )
        return jnp.asarray(out).astype(dtype)

    def init(self, like: Shaped) -> State:
        return lax.full(like.shape, 0, accumulation_dtype(like.dtype))

    def add(self, state: State, g: jax.Array, w: Weights) -> State:
        return added(state, weigh(self.apply(g), w))

    def add_all(self, state: State, gs: jax.Array, w: Weights) -> State:
        gs = self.apply(gs)
        if self.phi is not None:  # phi passes over all gradients, where the weight costs nothing
            gs, w = weigh(gs, w), 1.0
        return added(state, weighted_sum(gs, w))

    def part_of_all(self, state: State, devices: Devices) -> State:
        return state

    def finish(self, state: State, count: jax.Array, like: Shaped) -> Any:
        return state.astype(like.dtype) if self.phi is None else state

    def __repr__(self) -> str:
        phi = "" if self.phi is None else name_of(self.phi)
        said = "" if self.factorable is None else f"factorable={self.factorable}"
        return f"Mean({', '.join(filter(None, [phi, _per_of(self), said]))})"


# The mean gradient, on which other statistics are centred.
PLAIN_MEAN = Mean()


@dataclasses.dataclass(frozen=True, repr=False)
class Variance(Accumulator):
    """The unbiased variance of each coordinate over the examples, `sum (g - mean)^2 / (count - 1)`.

    The result is shaped like the parameters, is never negative, and is accurate even if the mean is
    10^4 times the deviation: every gradient is centred before it is squared (Welford 1962), and groups
    are merged by their means (Chan, Golub and LeVeque 1979). For outer products (the weights of an MLP)
    it is the second moment minus the square of the mean where that loses at most two digits.

    One example has no variance. A batch of one example is refused, and so are weights that add up to 1
    or less. Under `jit` the values of weights are not known, and the result for such weights is NaN.

    `per` says what one unit is, as for `Mean`, and the count is the number of units. For groups of k it
    is the number of examples divided by k. For `"token"` it is the number of examples times the number
    of contributions of each example.

    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> pg.grad_stats(loss, pg.Variance())(jnp.float32(1), jnp.array([1.0, 3.0]))
    Array(2., dtype=float32)
    """

    _: dataclasses.KW_ONLY
    per: Per = "example"

    def __post_init__(self) -> None:
        object.__setattr__(self, "per", checked_per(self.per))

    @property
    def unit(self) -> Per:
        return self.per

    @property
    def quantity(self) -> Quantity:
        return Quantity.CENTRED

    @property
    def in_parts(self) -> bool:
        return True

    def check_count(self, count: float) -> None:
        group = self.per if isinstance(self.per, int) else 1
        if self.per != "token" and count <= group:
            what = "example" if group == 1 else f"group of {group} examples"
            raise ArgumentError(
                f"{self!r} needs more than one {what}, and this batch counts {count:g}. Use a "
                "larger batch, or leave it out."
            )

    @property
    def merging(self) -> Merging:
        if self.per == "token":
            raise ArgumentError(
                f"{self!r} cannot be combined: how many contributions each parameter has is not in the "
                "result. Combine pg.Mean(jnp.square, per='token') and pg.Mean() instead."
            )
        return Merging.CENTRED

    def init(self, like: Shaped) -> State:
        dtype = accumulation_dtype(like.dtype)
        zeros = jnp.zeros(like.shape, dtype)
        return jnp.zeros((), dtype), zeros, zeros

    def add(self, state: State, g: jax.Array, w: Weights) -> State:
        # As `merge`, for a group of one example:
        # share' = share + w,  d = g - mean,  mean' = mean + d w / share'
        # M2' = M2 + d^2 w share / share', which is M2 + w d (g - mean') and cannot be negative
        share, mean, m2 = state
        w = jnp.asarray(w, mean.dtype)
        of_g = w / _positive(share + w)
        d = g.astype(mean.dtype) - mean
        return share + w, mean + weigh(d, of_g), m2 + weigh(jnp.square(d), of_g * share)

    def add_all(self, state: State, gs: jax.Array, w: Weights) -> State:
        gs = gs.astype(state[1].dtype)
        share = jnp.asarray(total(w, gs.shape[0]), gs.dtype)
        mean = mean_of(weighted_sum(gs, w), share)
        m2 = weighted_sum(jnp.square(gs - mean[None]), w)
        return self.merge(state, (share, mean, m2))

    def from_quantity(self, state: State | None, value: Any) -> Any:
        """Merges the (share, mean, M2) of a group with the state, which may be None."""
        _, mean, _ = value
        return self.merge(self.state_or_empty(state, mean), value)

    def merge(self, a: State, b: State) -> State:
        """The state of two groups of examples together."""
        # share = s_a + s_b,  d = mean_b - mean_a,  mean = mean_a + d s_b / share
        # M2    = M2_a + M2_b + d^2 s_a s_b / share
        (s_a, mean_a, m2_a), (s_b, mean_b, m2_b) = a, b
        share = s_a + s_b
        of_b = s_b / _positive(share)
        d = mean_b - mean_a
        return share, mean_a + d * of_b, m2_a + m2_b + jnp.square(d) * (s_a * of_b)

    def reweighed(self, state: State, factor: jax.Array) -> State:
        share, mean, m2 = state
        factor = factor.astype(m2.dtype)
        return share * factor, mean, m2 * factor

    def part_of_all(self, state: State, devices: Devices) -> State:
        # share = sum s,  mean = sum s mean_s / share,  M2 = sum (M2_s + s (mean_s - mean)^2)
        s, mean_s, m2_s = state
        share = devices.add(s)
        over = _positive(share).reshape(s.shape + (1,) * (mean_s.ndim - s.ndim))
        mean = devices.add(weigh(mean_s, s)) / over
        return share, mean, m2_s + weigh(jnp.square(mean_s - mean), s)

    @property
    def holds(self) -> Accumulator:
        return Mean(per=self.per)

    def held(self, state: State) -> State:
        share, mean, _ = state
        return weigh(mean, share)

    @property
    def can_be_divided(self) -> bool:
        return True

    def shard_of_all(self, state: State, shard: Shard) -> State:
        # As `part_of_all`, for the devices along one division after the other. They exchange the pieces
        # of their means, so that each device has those [n, ...] of its own shard.
        for division in shard.divisions:
            s, mean_s, m2_s = state
            shares = lax.all_gather(s, division.axes)
            share = jnp.sum(shares)

            def merged(
                mean_s: jax.Array, m2_s: jax.Array, division=division, shares=shares, share=share
            ) -> tuple[jax.Array, jax.Array]:
                means = division.exchange(mean_s)
                mean = mean_of(weighted_sum(means, shares), share)
                between = weighted_sum(jnp.square(means - mean[None]), shares)
                return mean, division.add(m2_s) + between

            state = share, *division.in_pieces(merged, mean_s, m2_s)
        if not shard.others.axes:
            return state
        share, mean, m2 = self.part_of_all(state, shard.others)
        return share, mean, shard.others.add(m2)

    def finish(self, state: State, count: jax.Array, like: Shaped) -> Any:
        _, _, m2 = state
        count = count.astype(m2.dtype)
        return m2 * jnp.where(count > 1, count / (count - 1), jnp.nan)

    def __repr__(self) -> str:
        return f"Variance({_per_of(self)})"


def _per_of(statistic: Mean | Variance) -> str:
    return "" if statistic.per == "example" else f"per={statistic.per!r}"


def mean_of(weighted: jax.Array, share: jax.Array) -> jax.Array:
    """The mean of a group, from the sum of w g and the sum of w. It is 0 if all weights are 0."""
    return weighted / _positive(share)


def _positive(share: jax.Array) -> jax.Array:
    """A number to divide by: `share`, or 1 where `share` is 0."""
    return jnp.where(share > 0, share, jnp.ones_like(share))


@dataclasses.dataclass(frozen=True)
class Individual(Reading):
    """The per-example gradients, with the example axis in front. Weights do not change them."""

    @property
    def layout(self) -> Layout:
        return Layout.PER_EXAMPLE_LIKE_PARAMETERS

    def of(self, g: jax.Array, direction: Any) -> jax.Array:
        return g


@dataclasses.dataclass(frozen=True, repr=False)
class Fold(Accumulator):
    """Any reduction of a parameter's per-example gradients, in the order of the batch.

    `init(zeros)` makes the first state of a parameter from zeros of the parameter's shape and dtype.
    `update(state, gradient)` returns the state after one more example. `finish(state)` returns the
    result; without it the result is the final state. An example with weight 0 is passed over, and any
    other weight counts as one.

    On several devices (`spmd_axis_name`) each device takes in its own examples, and `merge(a, b)` joins
    the state `a` of some examples with the state `b` of the examples that follow them. Merging with a
    state that `init` has just made must change nothing. Without `merge` several devices are refused.

    >>> largest = pg.Fold(jnp.zeros_like, lambda s, g: jnp.maximum(s, jnp.abs(g)))
    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> pg.grad_stats(loss, largest)(jnp.float32(1), jnp.array([1.0, -3.0]))
    Array(3., dtype=float32)
    """

    init_state: Callable[[jax.Array], Any]
    update: Callable[[Any, jax.Array], Any]
    finish_state: Callable[[Any], Any] | None = None
    merge: Callable[[Any, Any], Any] | None = None

    def __init__(
        self,
        init: Callable[[jax.Array], Any],
        update: Callable[[Any, jax.Array], Any],
        finish: Callable[[Any], Any] | None = None,
        *,
        merge: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        functions = {"init": init, "update": update, "finish": finish, "merge": merge}
        for name, function in functions.items():
            if not callable(function) and not (name in ("finish", "merge") and function is None):
                raise ArgumentError(f"Fold: {name} must be a function, not {function!r}.")
        object.__setattr__(self, "init_state", init)
        object.__setattr__(self, "update", update)
        object.__setattr__(self, "finish_state", finish)
        object.__setattr__(self, "merge", merge)

    @property
    def merging(self) -> Merging:
        raise ArgumentError(
            f"{self!r} cannot be combined: its results are finished, and states are not known any more. "
            "Use it on one batch, which may be large: with microbatch_size, or on several devices."
        )

    def init(self, like: Shaped) -> State:
        state = self.init_state(jnp.zeros(like.shape, like.dtype))
        return jax.tree.map(jnp.asarray, state)

    def add(self, state: State, g: jax.Array, w: Weights) -> State:
        new = self._checked("update", self.update(state, g), state)
        if not isinstance(w, jax.Array):
            return new
        return jax.tree.map(lambda n, s: jnp.where(w > 0, n, s), new, state)

    def add_all(self, state: State, gs: jax.Array, w: Weights) -> State:
        if not isinstance(w, jax.Array):
            return lax.scan(lambda s, g: (self.add(s, g, w), None), state, gs)[0]
        return lax.scan(lambda s, gw: (self.add(s, *gw), None), state, (gs, w))[0]

    def reweighed(self, state: State, factor: jax.Array) -> State:
        return state

    def part_of_all(self, state: State, devices: Devices) -> State:
        merge = self.merge
        if merge is None:
            raise ArgumentError(
                f"{self!r} cannot be used with spmd_axis_name: how the states of two devices are merged "
                "is not known. Give it a `merge`, a function of two states, or leave spmd_axis_name out."
            )
        return devices.merge(lambda a, b: self._checked("merge", merge(a, b), a), state)

    def as_part(self, result: Any, devices: Devices) -> Any:
        return devices.only_first(result)

    def _checked(self, who: str, new: Any, old: Any) -> Any:
        """The new state. Raises an error unless it has the tree, shapes and dtypes of the old one."""
        old_types, new_types = (
            jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), s) for s in (old, new)
        )
        if old_types != new_types:
            raise ArgumentError(
                f"Fold: {who} must return a state like the one that init made, of the same tree, "
                f"shapes and dtypes. init: {old_types}; {who}: {new_types}."
            )
        return new

    def finish(self, state: State, count: jax.Array, like: Shaped) -> Any:
        return state if self.finish_state is None else self.finish_state(state)

    def __repr__(self) -> str:
        functions = (self.init_state, self.update, self.finish_state)
        return f"Fold({', '.join(name_of(f) for f in functions if f is not None)})"
