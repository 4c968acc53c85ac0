"""Signal and noise of one batch: of each parameter, of each coordinate, and numbers made of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pergrad._errors import ArgumentError
from pergrad._ir import widen
from pergrad._moments import Stats, correction, mu2_of
from pergrad._statistics import Where
from pergrad.noise._read import flat, get, variance

Tree = Any


class SignalNoise(NamedTuple):
    """Estimates of |mu|^2 and tr Sigma; the first may be negative."""

    signal: Any
    noise: Any

    @property
    def noise_scale(self) -> jax.Array:
        """tr Sigma / |mu|^2, infinite where no signal is seen."""
        is_seen = self.signal > 0
        unseen = jnp.where(jnp.isnan(self.signal), jnp.nan, jnp.inf)
        return jnp.where(is_seen, self.noise / jnp.where(is_seen, self.signal, 1), unseen)

    @property
    def snr(self) -> jax.Array:
        """|mu| / sqrt(tr Sigma) of one example, 0 where no signal is seen."""
        return jnp.sqrt(1 / self.noise_scale)


def by_layer(
    stats: Stats, where: Where | None = None, *, example_weights: Any = None
) -> dict[str, SignalNoise]:
    """Signal and noise of each parameter, by its path, from one batch.

    `stats` has the `mean`, the `count`, and one of: `norm` (`pg.Norm(by="leaf")`; from `pg.Norm()` there
    is one entry for all parameters together), `variance`, `second_moment`. All of them must be
    statistics of examples: not of groups or tokens, and not of clipped gradients. `where` selects
    parameters by their path. Norms do not depend on the weights of the examples: if the statistics were
    computed with weights, give the same `example_weights`. One example has no variance, so the estimates
    of a batch of one are NaN.
    """
    count = get(stats, "count")
    means = flat(get(stats, "mean"), where)
    if not means:
        raise ArgumentError("pergrad.noise: where selects no parameter.")
    squares = {path: jnp.sum(jnp.square(widen(g))) for path, g in means.items()}
    if "norm" in stats:
        is_of_all = hasattr(stats["norm"], "shape") and "" not in means
        if is_of_all:
            squares = {"": sum(squares.values())}
        norms = flat(stats["norm"], None if is_of_all else where)
        count = _checked_count(count, next(iter(norms.values()), None), example_weights)
        mean_squares = {k: _mean(jnp.square(norms[k]), example_weights) for k in squares if k in norms}
        # s - G is at least 0, and rounding may make it negative.
        noises = {k: correction(count) * jnp.maximum(s - squares[k], 0) for k, s in mean_squares.items()}
    else:
        noises = {k: jnp.sum(s) for k, s in flat(variance(stats), where).items()}
    return {k: SignalNoise(squares[k] - noise / count, noise) for k, noise in noises.items()}


def total(layers: Mapping[str, SignalNoise]) -> SignalNoise:
    """Signal and noise of all layers together: both add up."""
    return SignalNoise(sum(x.signal for x in layers.values()), sum(x.noise for x in layers.values()))


def snr(stats: Stats) -> Tree:
    """The signal-to-noise ratio |mu| / sigma of one example, in each coordinate; 0 where none is seen.

    That of the mean of B examples is sqrt(B) times as much. Where all examples agree it is infinite.

    >>> stats = {"mean": jnp.array([3.0]), "second_moment": jnp.array([10.0]), "count": 5}
    >>> pg.noise.snr(stats)  # sigma^2 = (10 - 9) 5/4, mu^2 = 9 - sigma^2 / 5
    Array([2.6457512], dtype=float32)
    """
    return jax.tree.map(lambda x: x.snr, _coordinates(stats), is_leaf=_is_pair)


def share(stats: Stats) -> Tree:
    """(sigma^2 / B) / mu^2 in each coordinate: the noise in Adam's second moment, relative to mu^2."""
    n = get(stats, "count")
    return jax.tree.map(lambda x: x.noise_scale / n, _coordinates(stats), is_leaf=_is_pair)


def diversity(layers: Mapping[str, SignalNoise], count: Any) -> jax.Array:
    """Gradient diversity, sum ||g_i||^2 / ||sum g_i||^2 (Yin et al. 2018).

    It is 1 / B if all examples have the same gradient, and 1 if their gradients are orthogonal.
    """
    signal, noise = total(layers)
    return jnp.divide(signal + noise, count * signal + noise)


def outliers(norms: jax.Array, threshold: float = 3.5) -> jax.Array:
    """Which examples have an unusually large gradient, from their norms [B]: booleans [B].

    An example is an outlier if log ||g_i|| exceeds the median of the logarithms by more than `threshold`
    deviations. The deviation is 1.4826 times the median distance from the median, which for Gaussian
    numbers is the standard deviation, and at least 0.001. A norm that is NaN belongs to no example: it
    is left out of the medians and is no outlier.

    >>> pg.noise.outliers(jnp.array([1.0, 1.1, 0.9, 1.0, 50.0]))
    Array([False, False, False, False,  True], dtype=bool)
    """
    norms = widen(norms)
    logs = jnp.log(jnp.maximum(norms, jnp.finfo(norms.dtype).tiny))
    away = logs - jnp.nanmedian(logs)
    deviation = 1.4826 * jnp.nanmedian(jnp.abs(away))
    return away > threshold * jnp.maximum(deviation, 1e-3)


def _coordinates(stats: Stats) -> Tree:
    """mu2 and sigma2 of each coordinate, as a tree of pairs like the parameters."""
    n = get(stats, "count")
    return jax.tree.map(
        lambda g, s: SignalNoise(mu2_of(widen(g), s, n), s), get(stats, "mean"), variance(stats)
    )


def _checked_count(count: Any, norm: Any, example_weights: Any) -> Any:
    """The count, if it is the sum of these weights.

    Another count is refused. If the numbers are known only when the program runs, it becomes NaN.
    """
    if norm is None:
        return count
    own = jnp.sum(jnp.asarray(example_weights)) if example_weights is not None else len(norm)
    differs = jnp.abs(own - count) > 1e-3 * count
    if isinstance(differs, Tracer):
        return jnp.where(differs, jnp.nan, count)
    if differs:
        raise ArgumentError(
            f"pergrad.noise: the statistics count {float(count):g} examples, but the norms of "
            f"{len(norm)} examples would count {float(own):g}. Norms do not depend on weights: give the "
            "weights that the statistics were computed with here, too,\n"
            "    stats_fn(params, batch, example_weights=w)\n"
            "    monitor.update(stats, state, example_weights=w)"
        )
    return count


def _mean(x: jax.Array, example_weights: Any) -> jax.Array:
    """The mean over examples; an example of weight 0 counts for nothing, even if it is NaN."""
    w = jnp.ones(len(x)) if example_weights is None else jnp.asarray(example_weights)
    w = w.astype(x.dtype)
    return jnp.sum(jnp.where(w > 0, w * x, 0)) / jnp.sum(w)


def _is_pair(x: Any) -> bool:
    return isinstance(x, SignalNoise)
