"""Momentum divided by the root of the moving average of its own square."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pergrad._ir import widen
from pergrad._moments import asked
from pergrad.optim._base import Mask, Number, StatsTransformation, Tree, wide_zeros, with_learning_rate


class ScaleBySquaredMomentumState(NamedTuple):
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Tree
    nu: Tree


def scale_by_squared_momentum(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-16, mu_dtype: Any = None
) -> StatsTransformation:
    """Momentum m, divided by the root of the moving average of m^2 (AdaMomentum, Wang et al. 2021).

        m = b1 m + (1 - b1) gbar,     v = b2 v + (1 - b2) m^2 + eps,     update = m_hat / sqrt(v_hat)

    m_hat and v_hat are corrected for having started at 0. The m that is squared is not corrected, so the
    first update is 1 / (1 - b1) in size. The `eps` of all steps add up to eps / (1 - b2). This is no
    point of the plane of `scale_by_preconditioner`: the variance of the momentum is (1 - b1) / (1 + b1)
    times that of the gradient, so m^2 is nearer to mu^2. It needs the mean alone.
    """

    def init(params: Tree) -> ScaleBySquaredMomentumState:
        return ScaleBySquaredMomentumState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=mu_dtype),
            nu=wide_zeros(params),
        )

    def update(
        updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, ScaleBySquaredMomentumState]:
        del params, extra_args
        count = jnp.asarray(optax.safe_increment(state.count))
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = jax.tree.map(
            lambda m, v: (b2 * v + (1 - b2) * jnp.square(widen(m)) + eps).astype(v.dtype), mu, state.nu
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
    """Adam that divides by the root of an average of its squared momentum (Wang et al. 2021).

    It needs no statistic but the mean. `scale_by_squared_momentum` describes the average, and
    `preconditioned_adam` the arguments `weight_decay` and `mask`.

    >>> pg.optim.ada_momentum(1e-3).stats
    {'mean': Mean()}
    """
    return with_learning_rate(
        scale_by_squared_momentum(b1, b2, eps, mu_dtype), learning_rate, weight_decay, mask
    )
