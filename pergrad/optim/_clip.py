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
from pergrad._ir import wide
from pergrad._moments import VOCABULARY, Stats
from pergrad._statistics import By, ClippedMean, Mean, Statistic
from pergrad.optim._base import StatsTransformation, Tree, stats_of
from pergrad.optim._found import aligned, is_changed, unless


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
    if isinstance(max_norm, (int, float)) and not max_norm >= 0:
        raise ArgumentError(f"clipped: max_norm must be a number of at least 0, not {max_norm!r}.")
    extra = optax.with_extra_args_support(inner)

    def update(
        updates: Tree, state: Any, params: Tree | None = None, *, stats: Any = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        norm = optax.tree.norm(jax.tree.map(wide, updates))  # squares of halves overflow
        c = jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1), 1)
        scaled = _times(c, updates)
        if stats is not None:
            stats = _scaled(stats, c, updates, scaled)
        return extra.update(scaled, state, params, stats=stats, **extra_args)

    return StatsTransformation(extra.init, update, stats_of(inner))


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
        phi, factorable = (getattr(statistic, field, None) for field in ("phi", "factorable"))
        if statistic != Mean(phi, factorable=factorable):
            raise ArgumentError(
                f"clip_examples: there is no statistic {statistic!r} of clipped gradients."
            )
        return ClippedMean(max_norm, by, phi=phi)

    stats = {name: of_clipped(name, statistic) for name, statistic in stats_of(inner).items()}
    extra = optax.with_extra_args_support(inner)
    return StatsTransformation(extra.init, extra.update, stats)


def _scaled(stats: Stats, c: jax.Array, updates: Tree, scaled: Tree) -> Stats:
    """The statistics of gradients c g; their mean is `scaled`, unless `updates` was another already.

    Whether that matters is for `inner` to say: it does not to an optimizer of the mean alone.
    """
    known = {name: x for name, x in stats.items() if name in VOCABULARY}
    out = {name: _times(c ** VOCABULARY[name].degree, x) for name, x in known.items()}
    if "mean" not in stats:
        return out
    differs = is_changed(updates, aligned("clipped", "mean", stats["mean"], updates))
    if differs is True:
        return out
    others = {name: x if name == "count" else unless(differs, x) for name, x in out.items()}
    return others | {"mean": scaled}


def _times(c: jax.Array, tree: Tree) -> Tree:
    return jax.tree.map(lambda x: (c * x).astype(jnp.result_type(x)), tree)
