"""How often signs agree with mu: formulas for Gaussian gradients, and what is measured.

Let an example's gradient be Gaussian in one coordinate, with the mean mu, the deviation sigma, and rho =
mu / sigma. Its sign has the mean e = erf(rho / sqrt 2) and the deviation sqrt(1 - e^2), so the ratio

    s(rho) = e / sqrt(1 - e^2).

A mean over B examples multiplies a ratio by sqrt(B), and momentum with the decay b by sqrt(n) with n =
(1 + b) / (1 - b). The three placements of the sign differ in what they multiply:

    early    EMA[mean_i sign(g_i)]    sqrt(B n) s(rho)
    middle   EMA[sign(gbar)]          sqrt(n) s(sqrt(B) rho)
    late     EMA[gbar], then the sign s(sqrt(B n) rho) after the sign, sqrt(B n) rho before it

An average with the ratio r has the right sign with the probability Phi(r), if it is about Gaussian. So
for each coordinate the argument predicts how often each placement points the right way.

The measure was fixed before anything ran: the share of the coordinates whose sign agrees with that of
mu, each weighted by |mu|, in averages over fresh batches. It is measured for the gradients as they are,
for Gaussian surrogates with the same mu and sigma in each coordinate, and predicted by the formulas. mu
and sigma are estimated from many other examples. What the gradients do and their surrogates do not, is
not explained by signal and noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import erf, ndtr

import pergrad as pg
from pergrad.lab.studies import _layers

EARLY, MIDDLE, LATE = PLACES = ("early", "middle", "late")
REAL, SURROGATE, FORMULA = KINDS = ("gradients", "Gaussian", "predicted")
EDGES = 0.01 * 2.0 ** np.arange(0, 11)  # of the bins of sqrt(B) |rho|

Tree = Any
Shares = Mapping[str, Mapping[str, float]]  # by kind and place


# The formulas.


def kept(rho: Any) -> Any:
    """s(rho): the ratio of mean and deviation of the sign of a Gaussian number whose ratio is `rho`.

    >>> [round(float(kept(rho)), 3) for rho in (0.01, 1.0, 2.0)]
    [0.008, 0.934, 3.114]
    """
    e = erf(np.asarray(rho, float) / np.sqrt(2))
    return e / np.sqrt(np.maximum(1 - e**2, np.finfo(float).tiny))


def ratios(rho: Any, batch_size: int, b1: float) -> dict[str, Any]:
    """The signal-to-noise ratio of what each placement averages, of which the sign is then taken.

    >>> {place: round(float(r), 3) for place, r in ratios(0.1, 16, 0.9).items()}
    {'early': 1.391, 'middle': 1.429, 'late': 1.744}
    """
    n = (1 + b1) / (1 - b1)
    return {
        EARLY: np.sqrt(batch_size * n) * kept(rho),
        MIDDLE: np.sqrt(n) * kept(np.sqrt(batch_size) * np.asarray(rho)),
        LATE: np.sqrt(batch_size * n) * np.asarray(rho),
    }


def predicted(rho: Any, batch_size: int, b1: float) -> dict[str, Any]:
    """The probability with which each placement has the sign of `rho`."""
    return {place: ndtr(np.abs(ratio)) for place, ratio in ratios(rho, batch_size, b1).items()}


# What is measured.


class Moments(NamedTuple):
    """mu and sigma of one example's gradient, in every coordinate."""

    mu: Tree
    sigma: Tree


def make_trial(
    draw: Callable[[Any, Any], tuple[Tree, Tree]], b1: float
) -> Callable[[Any, Moments, Any], dict[str, Tree]]:
    """A function of (parameters, moments, inputs): whether each placement has the sign of mu.

    `draw` makes the mean gradient and the mean of the examples' signs of one batch from something for
    all batches, the first argument, and from one entry of `inputs`. The result is 1 where the sign of
    the average is that of mu, 0 where it is the opposite, and 1/2 where the average is 0.
    """

    def trial(given: Any, moments: Moments, inputs: Any) -> dict[str, Tree]:
        def step(averages: dict[str, Tree], one: Any) -> tuple[dict[str, Tree], None]:
            mean, signs = draw(given, one)
            now = {EARLY: signs, MIDDLE: jax.tree.map(jnp.sign, mean), LATE: mean}
            new = jax.tree.map(lambda old, x: b1 * old + (1 - b1) * x, averages, now)
            return new, None

        zeros: dict[str, Tree] = {place: jax.tree.map(jnp.zeros_like, moments.mu) for place in PLACES}
        averages, _ = jax.lax.scan(step, zeros, inputs)
        right = lambda mu, x: (1 + jnp.sign(mu) * jnp.sign(x)) / 2  # noqa: E731
        return {place: jax.tree.map(right, moments.mu, averages[place]) for place in PLACES}

    return jax.jit(trial)


def of_gradients(loss: Callable[[Tree, Any], jax.Array]) -> Callable[[Tree, Any], tuple[Tree, Tree]]:
    """Draws from a loss: `(parameters, batch)` to the mean gradient and the mean of signs."""
    stats_fn = pg.grad_stats(loss, {"mean": pg.Mean(), "sign": pg.Mean(jnp.sign)})

    def draw(params: Tree, batch: Any) -> tuple[Tree, Tree]:
        stats = stats_fn(params, batch)
        return stats["mean"], stats["sign"]

    return draw


def of_gaussians(batch_size: int) -> Callable[[Moments, Any], tuple[Tree, Tree]]:
    """Draws from Gaussian numbers with the same mu and sigma: `(moments, key)` to the two means."""

    def draw(moments: Moments, key: jax.Array) -> tuple[Tree, Tree]:
        leaves, tree = jax.tree.flatten(moments.mu)
        keys = tree.unflatten(jax.random.split(key, len(leaves)))
        g = jax.tree.map(
            lambda mu, sigma, k: mu + sigma * jax.random.normal(k, (batch_size, *mu.shape)),
            moments.mu,
            moments.sigma,
            keys,
        )
        return jax.tree.map(lambda x: x.mean(0), g), jax.tree.map(lambda x: jnp.sign(x).mean(0), g)

    return draw


class Look(NamedTuple):
    """One run at one step: the shares by kind and place, by group of layers and by bin of noise."""

    seed: int
    step: int
    shares: Shares
    groups: Mapping[str, Mapping[str, Any]]  # by group: its weight, and its shares
    bins: Mapping[str, Mapping[str, Any]]  # by kind and place: the share in each bin, not weighted


def summed(
    moments: Moments, right: Mapping[str, Mapping[str, Tree]], batch_size: int, b1: float
) -> tuple[Shares, dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The shares of all coordinates, of those of each group, and of those in each bin of sqrt(B) |rho|.

    `right` has the kinds that were measured. A coordinate in which mu is exactly 0 has no sign to agree
    with, and no weight.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(moments.mu)]
    mu, sigma = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in moments)
    sizes = [x.size for x in jax.tree.leaves(moments.mu)]
    group_of = np.repeat([_layers.group(path) for path in paths], sizes)
    weight = np.abs(mu).astype(float)
    rho = np.divide(mu, sigma, out=np.zeros_like(mu), where=sigma > 0)
    every: dict[str, dict[str, Any]] = {
        kind: {p: np.concatenate([np.ravel(x) for x in jax.tree.leaves(own[p])]) for p in PLACES}
        for kind, own in right.items()
    }
    every[FORMULA] = predicted(rho, batch_size, b1)

    def shares(where: Any) -> dict[str, dict[str, float]]:
        return {
            kind: {p: float(np.average(x[where], weights=weight[where])) for p, x in own.items()}
            for kind, own in every.items()
        }

    names = [name for name in _layers.groups(paths) if weight[group_of == name].sum() > 0]
    groups = {
        name: {
            "weight": float(weight[group_of == name].sum() / weight.sum()),
            **shares(group_of == name),
        }
        for name in names
    }
    bin_of = np.digitize(np.sqrt(batch_size) * np.abs(rho), EDGES)
    counted = [bin_of == i for i in range(1, len(EDGES))]
    bins = {
        kind: {
            p: [float(x[own].mean()) if own.any() else None for own in counted] for p, x in of.items()
        }
        for kind, of in every.items()
    }
    return shares(weight > 0), groups, bins
