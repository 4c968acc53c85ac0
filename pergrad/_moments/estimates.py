"""The two parts of a gradient's mean square: what all examples share, and how they differ.

With B examples of mean mu and variance sigma^2 in one coordinate, gbar their mean and q the mean of
their squares,

    E[gbar^2] = mu^2 + sigma^2 / B,     E[q] = mu^2 + sigma^2.

These are two equations, so both parts have an unbiased estimate:

    sigma2 = B (q - gbar^2) / (B - 1),     mu2 = gbar^2 - sigma2 / B.

sigma2 is the usual variance. mu2 is the mean of g_i g_j over all pairs i != j, so it can be negative.
One example has no pairs: both are NaN for a count of 1 or less.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

Array = Any


def sigma2_of(mean: Array, second_moment: Array, count: Array) -> Array:
    """sigma2, from gbar, q and B."""
    return correction(count) * (second_moment - jnp.square(mean))


def mu2_of(mean: Array, sigma2: Array, count: Array) -> Array:
    """mu2, from gbar, sigma2 and B."""
    return jnp.square(mean) - sigma2 / count


def correction(count: Array) -> Array:
    """B / (B - 1)."""
    return jnp.where(count > 1, count / jnp.where(count > 1, count - 1, 1), jnp.nan)
