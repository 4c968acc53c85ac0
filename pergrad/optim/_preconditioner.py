"""Adam and its relatives: momentum divided by the root of a moving average.

The plane of preconditioners: with mu2 and sigma2 the unbiased estimates of the squared mean and the
variance of an example's gradient (`pergrad._moments`), coordinate by coordinate,

    nu = EMA[a mu2 + b sigma2],     update = EMA[gbar] / (sqrt(nu) + eps).

Since E[gbar^2] = mu^2 + sigma^2 / B, Adam is the point (1, 1/B). Others are

    MicroAdam     (1, 1)   nu = EMA[mean of g_i^2]
    MicroAdamVar  (0, 1)   nu = EMA[sigma2]
    MicroAdamMSQ  (1, 0)   nu = EMA[mu2], not clipped at 0 before it has been averaged

mu2 is noisy. Where there is no signal its mean is 0, and as a mean of the B (B - 1) / 2 products of
pairs of independent gradients it has the variance

    Var[mu2] = 2 sigma^4 / (B (B - 1))                                     whatever their distribution;

a moving average with weights w_t has sum w_t^2 times that. So in about half of the coordinates without
signal (of one batch, in two thirds) the average is negative, and in many others it is far too small.
With a floor, nu is at least so many standard errors of the estimate: a squared mean below that cannot be
told from zero, and is taken to be as large as the noise could hide.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from pergrad._errors import ArgumentError
from pergrad._ir import widen
from pergrad._moments import Stats, asked, mu2_of, sigma2_of
from pergrad._statistics import Mean, Per, Statistic
from pergrad.optim._base import Number, Start, StatsTransformation, Tree, is_number, wide_zeros
from pergrad.optim._found import at, found

WHO = "scale_by_preconditioner"


class ScaleByPreconditionerState(NamedTuple):
    """`nu` may be negative. `error` averages the standard errors of the steps, if there is a floor."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Tree
    nu: Tree
    error: Tree | None


def scale_by_preconditioner(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    mean_square: Number = 1.0,
    variance: Number | str = "1/B",
    nesterov: bool = False,
    initial_second_moment: Start = None,
    max_update: Number | None = None,
    floor: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Momentum, divided by the root of `nu = mean_square * mu^2 + variance * sigma^2`.

    mu and sigma^2 are the mean and the variance of an example's gradient. Both are estimated without
    bias from every batch, and `nu` is a moving average of these estimates. A negative average is taken
    to be 0. The defaults are Adam.

    Args:
      b1: decay of the momentum.
      b2: decay of `nu`.
      eps: added to the root.
      eps_root: added under the root.
      mu_dtype: the dtype of the momentum, by default that of the parameters. `nu` is kept in float32
        (float64 for float64 parameters), also for parameters in half precision.
      mean_square: the weight a of mu^2.
      variance: the weight b of sigma^2, or `"1/B"` for one over the number of examples in the batch.
      nesterov: Nesterov momentum, as in `optax.adam`.
      initial_second_moment: where the average `nu` starts, in place of 0. It is then a guess that is
        worth 1 / (1 - b2) steps, and `nu` is not corrected for having started at 0. With `"batch"` each
        coordinate starts at the mean of the examples' squared gradients, `Mean(square)`, of the first
        batch in which it has a gradient. Adam's first update is then the mean gradient over the root of
        that, in place of its sign. This needs the statistic `second_moment`, in every step.
      max_update: no coordinate of the result is larger than this.
      floor: `nu` is at least so many standard errors of the estimate of mu^2, times `mean_square`.
      per: what one unit is, as in `pg.Mean`: gradients of groups of k examples in place of those of
        examples. `"token"` needs equal weights, and no floor.

    It needs the statistics `mean`, `second_moment` and `count`. If both weights are the same number it
    does not need the count, and Adam needs the mean alone. If the weights differ and `stats` has a
    `variance`, this is used in place of `second_moment`. It is more accurate if the mean is thousands of
    times the deviation; in bfloat16, which rounds the mean, already if it is ten times the deviation.
    One example has no variance: a batch of one is refused, or under `jit` gives NaN, unless both
    weights are the same or it is Adam.

    If something before it in a chain changes the gradient, such as a clip, Adam's `nu` is that of the
    changed gradient, as in optax. The other points take `nu` from the statistics, which do not change.
    So they refuse a gradient that is not the mean in `stats`; if only a compiled program can tell, the
    update is NaN. To clip both use `pergrad.optim.clipped`.
    """
    point = _Point(mean_square, variance, floor is not None, per)
    starts_at_batch = _starts_at_batch(initial_second_moment)
    needed = point.needed | ({"second_moment": point.square} if starts_at_batch else {})

    def init(params: Tree) -> ScaleByPreconditionerState:
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            if jnp.iscomplexobj(p):
                raise ArgumentError(
                    f"{WHO}: a parameter{at(path)} is complex; split it in two real ones."
                )
        zeros = wide_zeros(params)
        start = 0 if starts_at_batch or initial_second_moment is None else initial_second_moment
        return ScaleByPreconditionerState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=mu_dtype),
            nu=jax.tree.map(lambda z: z + jnp.asarray(start, z.dtype), zeros),
            error=None if floor is None else zeros,
        )

    def update(
        updates: Tree, state: Any, params: Tree | None = None, *, stats: Any = None, **extra_args: Any
    ) -> tuple[Tree, ScaleByPreconditionerState]:
        del params, extra_args
        now, error_now = point.estimate(updates, stats)
        count = jnp.asarray(optax.safe_increment(state.count))
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        before = state.nu
        if starts_at_batch:
            square = found(WHO, "second_moment", stats, updates, point.square)
            before = jax.tree.map(lambda v, q: jnp.where(v == 0, q, v).astype(v.dtype), before, square)
        nu = _averaged(now, before, b2)
        mu_hat = optax.tree.bias_correction(mu, b1, count)
        if nesterov:
            next_mu = optax.tree.bias_correction(mu, b1, optax.safe_increment(count))
            g_hat = optax.tree.bias_correction(updates, b1, count)
            mu_hat = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, next_mu, g_hat)

        error, nu_hat = None, nu
        if floor is not None:
            error = _averaged(error_now, state.error, b2)
            nu_hat = _at_least(floor, nu_hat, error, b2, count)
        if initial_second_moment is None:
            nu_hat = optax.tree.bias_correction(nu_hat, b2, count)

        def one(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            out = m / (jnp.sqrt(jnp.maximum(v, 0) + eps_root) + eps)
            out = out if max_update is None else jnp.clip(out, -max_update, max_update)
            return out.astype(g.dtype)

        out = jax.tree.map(one, updates, mu_hat, nu_hat)
        mu = optax.tree.cast_like(mu, state.mu)
        return out, ScaleByPreconditionerState(count, mu, nu, error)

    return StatsTransformation(init, update, needed)


@dataclasses.dataclass(frozen=True)
class _Point:
    """A point of the plane: the weights a (`mean_square`) and b (`variance`), and what a unit is."""

    mean_square: Number
    variance: Number | str
    has_floor: bool
    per: Per

    def __post_init__(self) -> None:
        for name, weight in {"mean_square": self.mean_square, "variance": self.variance}.items():
            if name == "variance" and weight == "1/B":
                continue
            if isinstance(weight, str) or (is_number(weight) and weight < 0):
                also = ', or "1/B"' if name == "variance" else ""
                raise ArgumentError(
                    f"{WHO}: {name} must be a number of at least 0{also}; not {weight!r}."
                )
        if isinstance(self.per, jax.Array):
            raise ArgumentError(
                f"{WHO}: per must be known when the program is made. Under optax.inject_hyperparams "
                'name it: static_args="per".'
            )
        if self.square.per == "token" and not self.is_equal:
            raise ArgumentError(
                f"{WHO}: per='token' needs mean_square and variance to be the same number and no floor, "
                "as in micro_adam: how many tokens a parameter has seen is not known."
            )

    # Adam and points with equal weights need no estimates, unless there is a floor.

    @property
    def is_adam(self) -> bool:
        """Whether a mu2 + b sigma2 is gbar^2."""
        a, b = self.mean_square, self.variance
        return not self.has_floor and is_number(a) and a == 1 and b == "1/B"

    @property
    def is_equal(self) -> bool:
        """Whether a mu2 + b sigma2 is a q."""
        a, b = self.mean_square, self.variance
        return not self.has_floor and is_number(a) and is_number(b) and a == b

    @property
    def square(self) -> Mean:
        """The statistic q, of units."""
        return Mean(jnp.square, per=self.per)

    @property
    def needed(self) -> dict[str, Statistic]:
        """The statistics that this point needs."""
        if self.is_adam:
            return asked("mean")
        needed = asked("mean") | {"second_moment": self.square}
        return needed if self.is_equal else needed | asked("count")

    def estimate(self, updates: Tree, stats: Any) -> tuple[Tree, Tree | None]:
        """a mu2 + b sigma2 of one batch, and the standard error of a mu2, if there is a floor."""
        if self.is_adam:
            return jax.tree.map(lambda g: jnp.square(widen(g)), updates), None
        if self.is_equal:
            square = found(WHO, "second_moment", stats, updates, self.square)
            return jax.tree.map(lambda q: self.mean_square * q, square), None
        mean = jax.tree.map(widen, found(WHO, "mean", stats, updates))
        n = self._units(updates, stats)
        sigma2 = self._sigma2(mean, n, updates, stats)
        b = 1 / n if isinstance(self.variance, str) else self.variance

        def one(g: jax.Array, s: jax.Array) -> jax.Array:
            return (self.mean_square * mu2_of(g, s, n.astype(s.dtype)) + b * s).astype(s.dtype)

        error = None
        if self.has_floor:
            of_sigma2 = self.mean_square * jnp.sqrt(2 / (n * (n - 1)))
            error = jax.tree.map(lambda s: (of_sigma2 * s).astype(s.dtype), sigma2)
        return jax.tree.map(one, mean, sigma2), error

    def _units(self, updates: Tree, stats: Stats | None) -> jax.Array:
        """The number of units, of which there must be two at least."""
        n = found(WHO, "count", stats, updates) / (1 if isinstance(self.per, str) else self.per)
        if not isinstance(n, Tracer) and not n > 1:
            raise ArgumentError(
                f"{WHO}: stats has {float(n):g} gradient(s), of which there is no variance. Use larger "
                "batches, or micro_adam or preconditioned_adam(variance='1/B'), which need none."
            )
        return n

    def _sigma2(self, mean: Tree, n: jax.Array, updates: Tree, stats: Any) -> Tree:
        if "variance" in stats:
            return found(WHO, "variance", stats, updates)
        square = found(WHO, "second_moment", stats, updates, self.square)
        return jax.tree.map(lambda g, q: sigma2_of(g, q, n.astype(q.dtype)), mean, square)


def _starts_at_batch(initial_second_moment: Start) -> bool:
    if isinstance(initial_second_moment, str) and initial_second_moment != "batch":
        raise ArgumentError(
            f'{WHO}: initial_second_moment must be None, a number or "batch"; '
            f"not {initial_second_moment!r}."
        )
    return isinstance(initial_second_moment, str)


def _averaged(now: Tree, average: Tree, decay: Number) -> Tree:
    """The moving average with one more entry, in the dtype that it has."""
    return optax.tree.cast_like(optax.tree.update_moment(now, average, decay, 1), average)


def _at_least(floor: Number, nu: Tree, error: Tree, b2: Number, count: jax.Array) -> Tree:
    """nu, or `floor` standard errors of it where it is less; `error` averages those of single steps.

    The average has the weights w_s = (1 - b2) b2^(t - s) for s = 1 ... t, and so its standard error is
    that of a single step times sqrt(sum w_s^2) = sqrt((1 - b2) / (1 + b2) (1 - b2^(2 t))).
    """
    root = floor * jnp.sqrt((1 - b2) / (1 + b2) * (1 - b2 ** (2 * count)))
    of_one_step = optax.tree.bias_correction(error, b2, count)
    return jax.tree.map(lambda v, e: jnp.maximum(v, root.astype(e.dtype) * e), nu, of_one_step)
