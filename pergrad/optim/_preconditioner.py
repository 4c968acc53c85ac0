"""Adam and its relatives: momentum divided by the root of a moving average.

The plane of preconditioners: with mu2 and sigma2 the unbiased estimates of the squared mean and the
variance of an example's gradient (see `pergrad._moments`), coordinate by coordinate,

    nu = EMA[a mu2 + b sigma2],     update = EMA[gbar] / (sqrt(nu) + eps).

Since E[gbar^2] = mu^2 + sigma^2 / B, Adam is the point (1, 1/B). Others are

    MicroAdam     (1, 1)   nu = EMA[mean of g_i^2]
    MicroAdamVar  (0, 1)   nu = EMA[sigma2]
    MicroAdamMSQ  (1, 0)   nu = EMA[mu2], not clipped at 0 before it has been averaged

mu2 is noisy. Where there is no signal its mean is 0, and as a mean of the B (B - 1) / 2 products of
pairs of independent gradients it has the variance

    Var[mu2] = 2 sigma^4 / (B (B - 1))                                     whatever their distribution;

a moving average with weights w_t has sum w_t^2 times that. So half of the coordinates without signal
have a negative average, and many of the others one that is far too small. A floor of so many standard
errors says: what cannot be told from zero is taken to be as large as it could well be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from pergrad import _moments
from pergrad._errors import ArgumentError
from pergrad._ir import accumulation_dtype, wide
from pergrad._names import asked
from pergrad._statistics import Per, Statistic, checked_per
from pergrad.optim._base import StatsTransformation, chain
from pergrad.optim._found import at, found

Tree = Any
Number = Any  # a number, or an array of one under optax.inject_hyperparams
Mask = Tree | Callable[[Tree], Tree] | None


class ScaleByPreconditionerState(NamedTuple):
    """`nu` may be negative; `error` is the mean standard error of one step's estimate, if asked for."""

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
    initial_second_moment: Number | None = None,
    max_update: Number | None = None,
    floor: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Momentum, divided by the root of `nu = mean_square * mu^2 + variance * sigma^2`.

    mu and sigma^2 are the mean and the variance of an example's gradient, estimated without bias from
    every batch, and `nu` is their moving average. A negative `nu` is taken to be 0, after averaging.
    The defaults are Adam.

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
        worth 1 / (1 - b2) steps, and `nu` is not corrected for having started at 0.
      max_update: no coordinate of the result is larger than this.
      floor: `nu` is at least so many standard errors of the estimate of mu^2, times `mean_square`.
      per: what one unit is, as in `pg.Mean`: gradients of groups of k examples in place of those of
        examples. `"token"` needs equal weights, and no floor.

    It needs the statistics `mean`, `second_moment` and `count`; without the last where both weights are
    the same number, and the mean alone for Adam. A `variance` in `stats` is used in place of
    `second_moment` where the weights differ: better where the mean is thousands of times the deviation,
    and in bfloat16, which rounds the mean, already where it is ten times that.
    One example has no variance: a batch of one is refused, or under `jit` gives NaN, unless both
    weights are the same or it is Adam.

    Chained after something that changes the gradient, such as a clip, Adam's `nu` is that of the changed
    gradient, as in optax. The other points take `nu` from the statistics, which do not change with it: a
    gradient that is not the mean in `stats` is refused (NaN, where only a compiled program can see it).
    To clip both use `pergrad.optim.clipped`.
    """
    who = "scale_by_preconditioner"
    _check_weights(who, mean_square, variance)
    # Two points of the plane need no estimate: there mu2 and sigma2 add up to gbar^2, or to q.
    is_known = _is_number(mean_square) and floor is None
    is_adam = is_known and mean_square == 1 and variance == "1/B"
    is_equal = is_known and _is_number(variance) and mean_square == variance
    _check_per(who, per, is_equal)
    names = ["mean", "second_moment", "count"][: 1 if is_adam else 2 if is_equal else 3]
    stats = {name: _with_per(statistic, per) for name, statistic in asked(*names).items()}

    def second_moment(updates: Tree, given: Any) -> tuple[Tree, Tree | None]:
        """This step's `a mu2 + b sigma2`, and the standard error of its first term."""
        if is_adam:
            return jax.tree.map(lambda g: jnp.square(wide(g)), updates), None
        if is_equal:
            square = found(who, "second_moment", given, updates, per)
            return jax.tree.map(lambda q: mean_square * q, square), None
        mean = jax.tree.map(wide, found(who, "mean", given, updates))
        n = found(who, "count", given, updates) / (1 if isinstance(per, str) else per)
        _check_count(who, n)
        if "variance" in given:
            sigma2 = found(who, "variance", given, updates)
        else:
            square = found(who, "second_moment", given, updates, per)
            sigma2 = jax.tree.map(lambda g, q: _moments.variance(g, q, _like(n, q)), mean, square)
        b = 1 / n if isinstance(variance, str) else variance

        def one(g: jax.Array, s: jax.Array) -> jax.Array:
            return (mean_square * _moments.mean_square(g, s, _like(n, s)) + b * s).astype(s.dtype)

        error = None
        if floor is not None:
            of_sigma2 = mean_square * jnp.sqrt(2 / (n * (n - 1)))
            error = jax.tree.map(lambda s: (of_sigma2 * s).astype(s.dtype), sigma2)
        return jax.tree.map(one, mean, sigma2), error

    def init(params: Tree) -> ScaleByPreconditionerState:
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            if jnp.iscomplexobj(p):
                raise ArgumentError(
                    f"{who}: a parameter{at(path)} is complex; split it in two real ones."
                )
        zeros = _wide_zeros(params)
        start = 0 if initial_second_moment is None else initial_second_moment
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
        now, error_now = second_moment(updates, stats)
        count = jnp.asarray(optax.safe_increment(state.count))
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.cast_like(optax.tree.update_moment(now, state.nu, b2, 1), state.nu)
        mu_hat = optax.tree.bias_correction(mu, b1, count)
        if nesterov:
            next_mu = optax.tree.bias_correction(mu, b1, optax.safe_increment(count))
            g_hat = optax.tree.bias_correction(updates, b1, count)
            mu_hat = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, next_mu, g_hat)

        error, nu_hat = None, nu
        if floor is not None:
            error = optax.tree.cast_like(
                optax.tree.update_moment(error_now, state.error, b2, 1), state.error
            )
            # The average has the weights (1 - b2) b2^(t - s), s = 1 ... t: the root of the sum of
            # squares.
            root = floor * jnp.sqrt((1 - b2) / (1 + b2) * (1 - b2 ** (2 * count)))
            least = optax.tree.bias_correction(error, b2, count)
            nu_hat = jax.tree.map(lambda v, e: jnp.maximum(v, root.astype(e.dtype) * e), nu_hat, least)
        if initial_second_moment is None:
            nu_hat = optax.tree.bias_correction(nu_hat, b2, count)

        def one(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            out = m / (jnp.sqrt(jnp.maximum(v, 0) + eps_root) + eps)
            out = out if max_update is None else jnp.clip(out, -max_update, max_update)
            return out.astype(g.dtype)

        out = jax.tree.map(one, updates, mu_hat, nu_hat)
        mu = optax.tree.cast_like(mu, state.mu)
        return out, ScaleByPreconditionerState(count, mu, nu, error)

    return StatsTransformation(init, update, stats)


# The signatures below are written out, each: `optax.inject_hyperparams` reads them.


def preconditioned_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    mean_square: Number = 1.0,
    variance: Number | str = "1/B",
    weight_decay: Number = 0.0,
    mask: Mask = None,
    nesterov: bool = False,
    initial_second_moment: Number | None = None,
    max_update: Number | None = None,
    floor: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Adam on the plane of preconditioners: see `scale_by_preconditioner` for all but the following.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: as in `optax.adamw`: times the learning rate and the parameter.
      mask: a tree of booleans like the parameters, or a function that makes it from them: those that
        decay.

    >>> tx = pg.optim.preconditioned_adam(1e-3, mean_square=1.0, variance=0.5)
    >>> tx.stats
    {'mean': Mean(), 'second_moment': Mean(square), 'count': Count()}
    """
    direction = scale_by_preconditioner(
        b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype,
        mean_square=mean_square, variance=variance, nesterov=nesterov,
        initial_second_moment=initial_second_moment, max_update=max_update, floor=floor, per=per,
    )  # fmt: skip
    return stepped(direction, learning_rate, weight_decay, mask)


def micro_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
    nesterov: bool = False,
    initial_second_moment: Number | None = None,
    max_update: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Adam with the mean of the examples' squared gradients in place of the square of their mean.

    The point (1, 1) of the plane: see `preconditioned_adam`. Its `nu` does not depend on the size of the
    batch. With `per=k` it is the mean of the squared means of k examples: Adam with batches of k, of
    which every step sees many.

    >>> pg.optim.micro_adam(1e-3).stats
    {'mean': Mean(), 'second_moment': Mean(square)}
    """
    return preconditioned_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, mean_square=1.0, variance=1.0,
        weight_decay=weight_decay, mask=mask, nesterov=nesterov,
        initial_second_moment=initial_second_moment, max_update=max_update, per=per,
    )  # fmt: skip


def micro_adam_var(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
    nesterov: bool = False,
    initial_second_moment: Number | None = None,
    max_update: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Adam with the variance of the examples' gradients in place of their squared mean.

    The point (0, 1) of the plane: see `preconditioned_adam`. Where all examples agree the variance is
    small and the step is large.

    >>> pg.optim.micro_adam_var(1e-3).stats
    {'mean': Mean(), 'second_moment': Mean(square), 'count': Count()}
    """
    return preconditioned_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, mean_square=0.0, variance=1.0,
        weight_decay=weight_decay, mask=mask, nesterov=nesterov,
        initial_second_moment=initial_second_moment, max_update=max_update, per=per,
    )  # fmt: skip


def micro_adam_msq(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
    nesterov: bool = False,
    initial_second_moment: Number | None = None,
    max_update: Number | None = None,
    floor: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Adam with the squared mean gradient alone, without the noise of the batch.

    The point (1, 0) of the plane: see `preconditioned_adam`. The estimate of mu^2 is negative for many
    coordinates, also after averaging; it is then taken to be 0, and the step is EMA[gbar] / eps, which
    is no step to take. Use `floor=1` or `max_update=1`.

    >>> pg.optim.micro_adam_msq(1e-3, floor=1).stats
    {'mean': Mean(), 'second_moment': Mean(square), 'count': Count()}
    """
    return preconditioned_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, mean_square=1.0, variance=0.0,
        weight_decay=weight_decay, mask=mask, nesterov=nesterov,
        initial_second_moment=initial_second_moment, max_update=max_update, floor=floor, per=per,
    )  # fmt: skip


class ScaleBySquaredMomentumState(NamedTuple):
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Tree
    nu: Tree


def scale_by_squared_momentum(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-16, mu_dtype: Any = None
) -> StatsTransformation:
    """Momentum m, divided by the root of the moving average of m^2 (AdaMomentum, Wang et al. 2021).

        m = b1 m + (1 - b1) gbar,     v = b2 v + (1 - b2) m^2 + eps,     update = m_hat / sqrt(v_hat)

    m_hat and v_hat are corrected for having started at 0; m is not before it is squared, so the first
    update is 1 / (1 - b1), and `eps` adds up to eps / (1 - b2). It is beside the plane: the momentum has
    less noise than the gradient, by (1 - b1) / (1 + b1), so m^2 is nearer to mu^2. It needs the mean
    alone.
    """

    def init(params: Tree) -> ScaleBySquaredMomentumState:
        return ScaleBySquaredMomentumState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=mu_dtype),
            nu=_wide_zeros(params),
        )

    def update(
        updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, ScaleBySquaredMomentumState]:
        del params, extra_args
        count = jnp.asarray(optax.safe_increment(state.count))
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = jax.tree.map(
            lambda m, v: (b2 * v + (1 - b2) * jnp.square(wide(m)) + eps).astype(v.dtype), mu, state.nu
        )
        out = jax.tree.map(
            lambda g, m, v: (m / jnp.sqrt(v)).astype(g.dtype),
            updates,
            optax.tree.bias_correction(mu, b1, count),
            optax.tree.bias_correction(nu, b2, count),
        )
        return out, ScaleBySquaredMomentumState(count, optax.tree.cast_like(mu, state.mu), nu)

    return StatsTransformation(init, update, asked("mean"))


def ada_momentum(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-16,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
) -> StatsTransformation:
    """AdaMomentum: see `scale_by_squared_momentum`, and `preconditioned_adam` for the weight decay."""
    return stepped(scale_by_squared_momentum(b1, b2, eps, mu_dtype), learning_rate, weight_decay, mask)


def stepped(
    direction: StatsTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Number,
    mask: Mask,
) -> StatsTransformation:
    """The direction, decoupled weight decay if there is any, and the step against it."""
    decay = []
    if not _is_number(weight_decay) or weight_decay != 0:
        decay = [optax.add_decayed_weights(weight_decay, mask)]
    return chain(direction, *decay, optax.scale_by_learning_rate(learning_rate))


def _check_weights(who: str, mean_square: Number, variance: Number | str) -> None:
    for name, weight in {"mean_square": mean_square, "variance": variance}.items():
        if name == "variance" and weight == "1/B":
            continue
        if isinstance(weight, str) or (_is_number(weight) and weight < 0):
            also = ', or "1/B"' if name == "variance" else ""
            raise ArgumentError(f"{who}: {name} must be a number of at least 0{also}; not {weight!r}.")


def _check_per(who: str, per: Any, is_equal: bool) -> None:
    if isinstance(per, jax.Array):
        raise ArgumentError(
            f"{who}: per must be known when the program is made. Under optax.inject_hyperparams "
            'name it: static_args="per".'
        )
    checked_per(per)
    if per == "token" and not is_equal:
        raise ArgumentError(
            f"{who}: per='token' needs mean_square and variance to be the same number and no floor, as "
            "in micro_adam: how many tokens a parameter has seen is not known."
        )


def _check_count(who: str, n: jax.Array) -> None:
    if not isinstance(n, Tracer) and not n > 1:
        raise ArgumentError(
            f"{who}: stats has {float(n):g} gradient(s), of which there is no variance. Use larger "
            "batches, or micro_adam or preconditioned_adam(variance='1/B'), which need none."
        )


def _with_per(statistic: Statistic, per: Per) -> Statistic:
    """The statistic of units, where it depends on what a unit is."""
    is_square = getattr(statistic, "phi", None) is not None
    return dataclasses.replace(statistic, per=per) if is_square else statistic  # type: ignore[call-arg]


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float))


def _wide_zeros(params: Tree) -> Tree:
    """Zeros like the parameters, on the same devices."""
    return jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=accumulation_dtype(jnp.result_type(p))), params
    )


def _like(n: jax.Array, x: jax.Array) -> jax.Array:
    return n.astype(x.dtype)
