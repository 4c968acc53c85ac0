"""Clipped means: the tails are reduced once more, after the norms of all gradients are known.

A clipped mean is a mean with other weights, over the factors, which are still in memory. A tail with a
clipped mean never stands in a loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax

from pergrad._run.reduce import Reduction
from pergrad._run.states import Key, States
from pergrad._statistics import Accumulator, Phase, Quantity, added_up


def clipped_means(reductions: Sequence[Reduction], w: jax.Array, read: States, states: States) -> States:
    """The states of all clipped means.

    `w` are the examples' weights [B], `read` has the squared norms, and `states` has the states so far.
    """
    squares = {param: x for (param, s), x in read.items() if s.quantity is Quantity.SQUARED_NORMS}

    @functools.cache
    def weights(statistic: Accumulator, params: tuple[int, ...]) -> jax.Array:
        """The examples' weights in the clipped mean, from their norms over these parameters."""
        return statistic.weights(w, added_up([squares[param] for param in params]))

    results = States()
    for reduction in reductions:
        for choice in reduction.plan.of(Phase.CLIPPED):
            (statistic,) = choice.statistics
            assert isinstance(statistic, Accumulator)
            units = reduction.units(choice.units)
            by_norm = _by_norm(statistic, reduction.plan.tail.params, squares)
            for norm_over, params in by_norm.items():
                own = dataclasses.replace(units, weights=weights(statistic, norm_over))
                keys: list[Key] = [(param, statistic) for param in params]
                starts = {key: reduction.shards.start(key, states) for key in keys}
                results |= reduction.shards.ended(reduction.feed(choice, starts, own), states)
    return results


def _by_norm(
    statistic: Accumulator, params: Sequence[int], squares: Mapping[int, jax.Array]
) -> dict[tuple[int, ...], list[int]]:
    """The parameters, grouped by the parameters whose common norm clips them."""
    found: dict[tuple[int, ...], list[int]] = {}
    for param in params:
        found.setdefault(statistic.norms_over(tuple(squares), param), []).append(param)
    return found
