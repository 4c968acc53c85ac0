"""Optimizers that the study `rivals` compares with. They are not part of the library.

All three have Adam's momentum m, an average of the mean gradients gbar, and differ in what they do with
the noise that the examples show. Two of them cap their updates, at 1 in each coordinate, since what they
divide by may be near 0. mu2 and sigma2 are the estimates of a coordinate's squared mean and
variance (`pergrad.optim`), B is the number of examples, and EMA is a moving average.

    share_adam      nu = EMA[mu2 + s sigma2 / B], where s, from 0 to 1, is the part of |gbar|^2 that is
                    noise, of each layer by itself. A layer that is all noise is divided by what Adam
                    divides by, and one that is all signal by mu^2. Capped.
    shrunk_adam     The momentum is multiplied by m^2 / (m^2 + Var[m]), which is small where noise could
                    have made it. Gradients with the variance sigma^2 / B give it the variance
                    (1 - b1) / (1 + b1) sigma^2 / B. It is divided by what Adam divides by.
    corrected_adam  Adam without two biases (arXiv 2605.20756). The batch is cut into K groups. No group
                    is divided by its own gradient: with g_r the gradient of group r, m_r the momentum
                    that has g_r in place of gbar, and p_r the root of nu with the square of the others'
                    mean, (K gbar - g_r) / (K - 1), in place of gbar^2, the update is the mean of
                    m_r / p_r. And 1 / p is too large on average, by Var[p] / p^3 to the second order.
                    The spread of the p_r tells Var[p] (the jackknife), and this is taken off. Capped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import pergrad as pg
from pergrad import optim
from pergrad.lab.errors import LabError

GROUPS = 8  # of a batch, for corrected_adam
MOMENTS = {"mean": pg.Mean(), "variance": pg.Variance(), "count": pg.Count()}

Tree = Any
# From a leaf of every statistic and their number of examples: what nu and the noise average.
Estimate = Callable[[dict[str, jax.Array], jax.Array], tuple[jax.Array, jax.Array]]
# From the averages of a coordinate's gradient, of nu and of the noise: its update.
Update = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class State(NamedTuple):
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Tree
    nu: Tree
    noise: Tree  # None if it is not averaged


def share_adam(b1: float, b2: float, eps: float) -> optim.StatsTransformation:
    def estimate(at: dict[str, jax.Array], B: jax.Array) -> tuple[jax.Array, jax.Array]:
        sigma2 = at["variance"]
        whole = jnp.sum(at["mean"] ** 2)
        s = jnp.where(whole > 0, jnp.sum(sigma2) / B / jnp.where(whole > 0, whole, 1), 1)
        return at["mean"] ** 2 - (1 - jnp.clip(s, 0, 1)) * sigma2 / B, jnp.zeros_like(sigma2)

    def update(m: jax.Array, nu: jax.Array, noise: jax.Array) -> jax.Array:
        del noise
        return jnp.clip(m / (jnp.sqrt(jnp.maximum(nu, 0)) + eps), -1, 1)

    return _averaging(MOMENTS, estimate, update, b1, b2)


def shrunk_adam(b1: float, b2: float, eps: float) -> optim.StatsTransformation:
    def estimate(at: dict[str, jax.Array], B: jax.Array) -> tuple[jax.Array, jax.Array]:
        return at["mean"] ** 2, at["variance"] / B

    def update(m: jax.Array, nu: jax.Array, noise: jax.Array) -> jax.Array:
        of_momentum = (1 - b1) / (1 + b1) * noise
        kept = m**2 / jnp.maximum(m**2 + of_momentum, 1e-30)
        return kept * m / (jnp.sqrt(nu) + eps)

    return _averaging(MOMENTS, estimate, update, b1, b2)


def corrected_adam(b1: float, b2: float, eps: float, batch_size: int) -> optim.StatsTransformation:
    if batch_size % GROUPS:
        raise LabError(
            f"corrected_adam cuts a batch into {GROUPS} groups, and {batch_size} examples cannot be: "
            f"choose a --batch-size that {GROUPS} divides."
        )

    def init(params: Tree) -> State:
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return State(jnp.zeros([], jnp.int32), mu, nu, None)

    def direction(m: jax.Array, v: jax.Array, gs: jax.Array, count: jax.Array) -> jax.Array:
        """From the averages before this step, and the examples' gradients in it."""
        of_groups = jnp.mean(gs.reshape(GROUPS, -1, *gs.shape[1:]), 1)
        of_others = (jnp.sum(of_groups, 0, keepdims=True) - of_groups) / (GROUPS - 1)
        m_r = (b1 * m[None] + (1 - b1) * of_groups) / (1 - b1**count)
        p_r = jnp.sqrt((b2 * v[None] + (1 - b2) * of_others**2) / (1 - b2**count)) + eps
        variance = (GROUPS - 1) * jnp.var(p_r, 0, keepdims=True)
        kept = jnp.maximum(1 - variance / jnp.maximum(p_r**2, 1e-30), 0)
        return jnp.clip(jnp.mean(kept * m_r / p_r, 0), -1, 1)

    def update(
        updates: Tree, state: State, params: Tree | None = None, *, stats: Any, **extra: Any
    ) -> tuple[Tree, State]:
        del params, extra
        count = state.count + 1
        out = jax.tree.map(
            lambda m, v, gs: -direction(m, v, gs, count), state.mu, state.nu, stats["gradients"]
        )
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, b2, 2)
        return out, State(count, mu, nu, None)

    return optim.StatsTransformation(init, update, {"mean": pg.Mean(), "gradients": pg.Individual()})


def _averaging(
    needed: dict[str, Any], estimate: Estimate, update_of: Update, b1: float, b2: float
) -> optim.StatsTransformation:
    """An optimizer, with updates for a learning rate of 1, that averages what `estimate` tells."""

    def init(params: Tree) -> State:
        mu, nu, noise = (jax.tree.map(jnp.zeros_like, params) for _ in range(3))
        return State(jnp.zeros([], jnp.int32), mu, nu, noise)

    def update(
        updates: Tree, state: State, params: Tree | None = None, *, stats: Any, **extra: Any
    ) -> tuple[Tree, State]:
        del params, extra
        count = state.count + 1
        B = jnp.asarray(stats["count"], jnp.float32)
        names = [name for name in needed if name != "count"]
        trees = [stats[name] for name in names]
        pairs = jax.tree.map(lambda *leaves: estimate(dict(zip(names, leaves, strict=True)), B), *trees)
        treedef = jax.tree.structure(updates)
        nu_now, noise_now = (
            treedef.unflatten([pair[i] for pair in treedef.flatten_up_to(pairs)]) for i in range(2)
        )
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(nu_now, state.nu, b2, 1)
        noise = optax.tree.update_moment(noise_now, state.noise, b2, 1)
        out = jax.tree.map(
            lambda m, v, w: -update_of(m, v, w),
            optax.tree.bias_correction(mu, b1, count),
            optax.tree.bias_correction(nu, b2, count),
            optax.tree.bias_correction(noise, b2, count),
        )
        return out, State(count, mu, nu, noise)

    return optim.StatsTransformation(init, update, needed)
