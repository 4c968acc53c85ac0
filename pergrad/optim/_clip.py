"""Clipping that changes the statistics as it changes the gradient.

A clip multiplies gradients by a number c, and a statistic that is a homogeneous function of them goes
with a power of it: the mean with c, the second moment and the variance with c^2, signs not at all. To
clip the mean gradient alone, before an optimizer that divides it by the root of a second moment, clips
its steps instead.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from pergrad._errors import ArgumentError
from pergrad._names import VOCABULARY, asked
from pergrad._statistics import Mean, Statistic, wide
from pergrad._whole import By, ClippedMean
from pergrad.optim._base import StatsTransformation

Tree = Any


def clipped(inner: optax.GradientTransformation, max_norm: Any) -> StatsTransformation:
    """Scales gradients and statistics down so that the mean gradient's norm is at most `max_norm`.

    One factor for the whole step, c = min(1, max_norm / ||gbar||): `inner` sees c times the mean, c^2
    times the second moment and the variance, and signs and counts as they are, as if every example's
    gradient had been multiplied by c. What else is in `stats` does not reach it. With an optimizer of
    the mean alone it is `optax.chain(optax.clip_by_global_norm(max_norm), inner)`.

    >>> tx = pg.optim.clipped(pg.optim.micro_adam(1e-3), max_norm=1.0)
    >>> tx.stats
    {'mean': Mean(), 'second_moment': Mean(square)}
    """
    extra = optax.with_extra_args_support(inner)

    def update(
        updates: Tree, state: Any, params: Tree | None = None, *, stats: Any = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        norm = optax.tree.norm(jax.tree.map(wide, updates))  # squares of halves overflow
        c = jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1), 1)
        if stats is not None:
            known = {name: x for name, x in stats.items() if name in VOCABULARY}
            stats = {name: _times(c ** VOCABULARY[name].degree, x) for name, x in known.items()}
        return extra.update(_times(c, updates), state, params, stats=stats, **extra_args)

    return StatsTransformation(extra.init, update, _stats_of(inner))


def clip_examples(
    inner: optax.GradientTransformation, max_norm: float, by: By = "all"
) -> StatsTransformation:
    """`inner`, fed with the statistics of clipped examples: g_i min(1, max_norm / ||g_i||).

    It changes what is asked for and nothing else: every mean in `stats` becomes the mean of the clipped
    gradients, `pg.ClippedMean(max_norm, by)`.

    >>> tx = pg.optim.clip_examples(pg.optim.micro_adam(1e-3), max_norm=1.0)
    >>> tx.stats["mean"]
    ClippedMean(1.0)
    """

    def of_clipped(name: str, statistic: Statistic) -> Statistic:
        if name in VOCABULARY and VOCABULARY[name].degree == 0:
            return statistic
        if (
            not isinstance(statistic, Mean)
            or isinstance(statistic, ClippedMean)
            or statistic.per != "example"
        ):
            raise ArgumentError(
                f"clip_examples: there is no statistic {statistic!r} of clipped gradients."
            )
        return ClippedMean(max_norm, by, phi=statistic.phi)

    stats = {name: of_clipped(name, statistic) for name, statistic in _stats_of(inner).items()}
    extra = optax.with_extra_args_support(inner)
    return StatsTransformation(extra.init, extra.update, stats)


def _stats_of(inner: optax.GradientTransformation) -> dict[str, Statistic]:
    """What an optimizer needs: the mean, if it is optax's own."""
    return getattr(inner, "stats", asked("mean"))


def _times(c: jax.Array, tree: Tree) -> Tree:
    return jax.tree.map(lambda x: (c * x).astype(jnp.result_type(x)), tree)
