"""What the sign of a gradient keeps of the signal, and whether it points the same way.

Let the gradient of an example have the mean mu, the deviation sigma and the density f in one coordinate.
If mu is small, the mean of sign(g) is 2 f(0) mu, and the deviation of sign(g) is 1. So the ratio of mean
to deviation is mu / sigma for the gradient, and 2 f(0) mu for its sign. The sign keeps the part

    2 f(0) sigma

of the signal-to-noise ratio: sqrt(2 / pi) = 0.80 for Gaussian gradients, 0.58 for uniform ones, and 1.41
for Laplace's.

`SIGN_FACTOR` estimates this part. Let p(h) be the share of the examples with 0 < |g| < h sigma. These
gradients lie in an interval of the width 2 h sigma, so p(h) / h estimates 2 f(0) sigma. If the density
has a kink at 0, as Laplace's has, this estimate has an error that is proportional to h. The error
cancels in

    2 p(h / 2) / (h / 2) - p(h) / h.

sigma is estimated as well: an example is compared with the deviation of the examples that came before it
on the same device. The first `BEFORE` examples of a device are used for that deviation alone. A gradient
that is exactly 0 has the sign 0 and does not belong to the density.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pergrad._ir import widen
from pergrad._moments import Stats
from pergrad._statistics import Fold, Variance, Where
from pergrad.noise._read import flat, get, variance

H = 0.2
BEFORE = 8


class _State(NamedTuple):
    """What is known after some examples.

    `examples` and `trials` are numbers: of all examples, and of those that were compared with a
    deviation. The others are like the parameter: the mean of the gradients, the sum of their squared
    distances from it, and the sum of 2 p(h / 2) / (h / 2) - p(h) / h over the trials.
    """

    examples: jax.Array
    trials: jax.Array
    mean: jax.Array
    m2: jax.Array
    factors: jax.Array


def _init_sign_factor(zeros: jax.Array) -> _State:
    zeros = widen(zeros)
    none = jnp.zeros((), zeros.dtype)
    return _State(none, none, zeros, zeros, zeros)


def _update_sign_factor(state: _State, g: jax.Array) -> _State:
    n, trials, mean, m2, factors = state
    g = g.astype(mean.dtype)
    sigma = jnp.sqrt(m2 / jnp.maximum(n - 1, 1))

    def density(h: float) -> jax.Array:
        """p(h) / h of this example alone."""
        return ((jnp.abs(g) > 0) & (jnp.abs(g) < h * sigma)) / h

    is_trial = n >= BEFORE
    factor = jnp.where(is_trial, 2 * density(H / 2) - density(H), 0).astype(g.dtype)
    away = g - mean
    new_mean = mean + away / (n + 1)
    new_m2 = m2 + away * (g - new_mean)
    return _State(n + 1, trials + is_trial, new_mean, new_m2, factors + factor)


def _merge_sign_factors(a: _State, b: _State) -> _State:
    n, mean, m2 = Variance().merge(*((s.examples, s.mean, s.m2) for s in (a, b)))
    return _State(n, a.trials + b.trials, mean, m2, a.factors + b.factors)


def _finish_sign_factor(state: _State) -> jax.Array:
    is_known = (state.m2 > 0) & (state.trials > 0)
    return jnp.where(is_known, state.factors / jnp.maximum(state.trials, 1), jnp.nan)


SIGN_FACTOR = Fold(
    _init_sign_factor, _update_sign_factor, _finish_sign_factor, merge=_merge_sign_factors
)
"""A statistic: 2 f(0) sigma in each coordinate, the part of the signal-to-noise ratio that a sign keeps.

The estimate from one batch is rough: average it over many coordinates with `jnp.nanmean`. It is NaN
where all examples agree, and in batches of at most 8 examples (on several devices: if no device has more
than 8).
"""


def sign_disagreement(
    stats: Stats, where: Where | None = None, *, z: float = 2.0
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """In how many coordinates the mean gradient and the mean of the signs have different signs.

    The mean of the signs has the sign of the median, if few gradients are 0. The result has two numbers
    for each parameter: the coordinates in which the two signs differ, and the coordinates in which both
    signs are sure, which means that both means are more than `z` standard errors from 0. Only sure
    coordinates are counted in the first number; the others cannot be told from noise. `stats` has
    `mean`, `sign`, `count`, and `variance` or `second_moment`.
    """
    n = get(stats, "count")
    means, signs, variances = (
        flat(x, where) for x in (get(stats, "mean"), get(stats, "sign"), variance(stats))
    )

    def one(g: jax.Array, sign: jax.Array, sigma2: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_sure = jnp.abs(g) > z * jnp.sqrt(jnp.maximum(sigma2, 0) / n)
        is_sure &= jnp.abs(sign) > z * jnp.sqrt(jnp.maximum(1 - jnp.square(sign), 0) / n)
        disagree = is_sure & (jnp.sign(g) != jnp.sign(sign))
        return jnp.sum(disagree, dtype=sigma2.dtype), jnp.sum(is_sure, dtype=sigma2.dtype)

    return {k: one(widen(g), signs[k], variances[k]) for k, g in means.items()}
