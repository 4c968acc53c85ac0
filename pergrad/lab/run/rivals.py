"""Optimizers that the study `rivals` compares with. They are not part of the library.

All three have Adam's momentum m, an average of the mean gradients gbar, and differ in what they do with
the noise that the examples show. mu2 and sigma2 are the estimates of a coordinate's squared mean and
variance (`pergrad.optim`), B is the number of examples, and EMA is a moving average.

    share_adam      nu = EMA[mu2 + s sigma2 / B], where s, from 0 to 1, is the part of |gbar|^2 that is
                    noise, of each layer by itself. A layer that is all noise is divided by what Adam
                    divides by, and one that is all signal by mu^2. No coordinate of the update is
                    larger than 1, since nu may be near 0.
    shrunk_adam     The momentum is multiplied by m^2 / (m^2 + Var[m]), which is small where noise could
                    have made it. Gradients with the variance sigma^2 / B give it the variance
                    (1 - b1) / (1 + b1) sigma^2 / B. It is divided by what Adam divides by.
    corrected_adam  The batch is cut into K groups, and nu = EMA[q], where q is the mean of the groups'
                    squared gradients. The inverse root of an estimate is too large on average: to the
                    second order, E[nu^(-1/2)] is (1 + 3/8 Var[nu] / nu^2) times that of E[nu]. The
                    groups tell Var[nu], and this is taken off (the idea is that of arXiv 2605.20756,
                    which also takes gradient and divisor from different groups; here both are from the
                    whole batch).
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
    noise: Tree


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
    per = batch_size // GROUPS
    needed = {
        "mean": pg.Mean(),
        "second_moment": pg.Mean(pg.power(2), per=per),
        "fourth_moment": pg.Mean(pg.power(4), per=per),
        "count": pg.Count(),
    }

    def estimate(at: dict[str, jax.Array], B: jax.Array) -> tuple[jax.Array, jax.Array]:
        del B
        q = at["second_moment"]
        return q, jnp.maximum(at["fourth_moment"] - q**2, 0) / (GROUPS - 1)

    def update(m: jax.Array, nu: jax.Array, noise: jax.Array) -> jax.Array:
        of_nu = (1 - b2) / (1 + b2) * noise
        kept = 1 - 3 / 8 * of_nu / jnp.maximum(nu**2, 1e-30)
        return jnp.maximum(kept, 0) * m / (jnp.sqrt(nu) + eps)

    return _averaging(needed, estimate, update, b1, b2)


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
