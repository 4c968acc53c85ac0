"""Clipping that changes the statistics as it changes the gradient.

A clip multiplies gradients by a number c. This multiplies their statistics by a power of c: the mean by
c, the second moment and the variance by c^2, and the mean of the signs by 1. If only the mean gradient
were clipped, an optimizer that divides it by the root of a second moment would get a momentum that is
clipped and a preconditioner that is not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from pergrad._errors import ArgumentError
from pergrad._ir import widen
from pergrad._moments import VOCABULARY, Stats
from pergrad._statistics import By, ClippedMean, Mean, Statistic
from pergrad.optim._base import StatsTransformation, Tree, stats_of
from pergrad.optim._found import aligned, is_changed, nan_if


def clipped(inner: optax.GradientTransformation, max_norm: Any) -> StatsTransformation:
    """Scales gradients and statistics down so that the mean gradient's norm is at most `max_norm`.

    All gradients of a step are multiplied by the same factor c = min(1, max_norm / ||gbar||): `inner`
    gets c times the mean, c^2 times the second moment and the variance, and the signs and the count as
    they are. Other statistics in `stats` do not reach it. If `inner` needs the mean alone, the result is
    `optax.chain(optax.clip_by_global_norm(max_norm), inner)`.

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
        norm = optax.tree.norm(jax.tree.map(widen, updates))  # half-precision squares overflow
        c = jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1), 1)
        scaled = _times(c, updates)
        if stats is not None:
            stats = _scaled(stats, c, updates, scaled)
        return extra.update(scaled, state, params, stats=stats, **extra_args)

    return StatsTransformation(extra.init, update, stats_of(inner))


def clip_examples(
    inner: optax.GradientTransformation, max_norm: float | None, by: By = "all"
) -> StatsTransformation:
    """`inner` with the statistics of clipped examples, g_i min(1, max_norm / ||g_i||).

    Only `stats` changes: every mean in it becomes the mean of the clipped gradients,
    `pg.ClippedMean(max_norm, by)`. If `max_norm` is None, the function that computes the statistics
    takes it at each call.

    >>> tx = pg.optim.clip_examples(pg.optim.micro_adam(1e-3), max_norm=1.0)
    >>> tx.stats["mean"]
    ClippedMean(1.0)
    """

    unchanged = [entry.statistic for entry in VOCABULARY.values() if entry.degree == 0]

    def of_clipped(statistic: Statistic) -> Statistic:
        if statistic in unchanged:
            return statistic
        phi, factorable = (getattr(statistic, field, None) for field in ("phi", "factorable"))
        if statistic != Mean(phi, factorable=factorable):
            raise ArgumentError(
                f"clip_examples: there is no statistic {statistic!r} of clipped gradients."
            )
        return ClippedMean(max_norm, by, phi=phi)

    stats = {name: of_clipped(statistic) for name, statistic in stats_of(inner).items()}
    extra = optax.with_extra_args_support(inner)
    return StatsTransformation(extra.init, extra.update, stats)


def _scaled(stats: Stats, c: jax.Array, updates: Tree, scaled: Tree) -> Stats:
    """The statistics of gradients c g, whose mean is `scaled`, which is c times `updates`.

    If something before the clip has changed `updates`, it is not the mean in `stats`. Then the result
    has c times the mean in `stats`, and `inner` finds that its gradient is another one. An optimizer of
    the mean alone accepts that.
    """
    known = {name: x for name, x in stats.items() if name in VOCABULARY}
    out = {name: _times(c ** VOCABULARY[name].degree, x) for name, x in known.items()}
    if "mean" not in stats:
        return out
    differs = is_changed(updates, aligned("clipped", "mean", stats["mean"], updates))
    if differs is True:
        return out
    others = {name: x if name == "count" else nan_if(differs, x) for name, x in out.items()}
    return others | {"mean": scaled}


def _times(c: jax.Array, tree: Tree) -> Tree:
    return jax.tree.map(lambda x: (c * x).astype(jnp.result_type(x)), tree)
