"""Means whose weights depend on norms: the tails are reduced once more, after all norms are known.

Such a mean is a mean with other weights, over the factors, which are still in memory. A tail with such a
mean never stands in a loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from pergrad._run.reduce import Reduction
from pergrad._run.states import Key, States
from pergrad._statistics import Accumulator, Phase, Quantity, added_up


def means_by_norm(
    reductions: Sequence[Reduction],
    w: jax.Array,
    read: States,
    states: States,
    max_norms: Sequence[jax.Array] | None,
) -> States:
    """The states of all means whose weights depend on norms.

    `w` are the examples' weights [B], `read` has the squared norms, and `states` has the states so far.
    `max_norms` has the largest norm at each parameter, or is None if no statistic takes one.
    """
    squares = {
        param: x
        for (param, s), x in read.items()
        if s.quantity is Quantity.SQUARED_NORMS and s.unit == "example"
    }

    @functools.cache
    def weights(statistic: Accumulator, norm: str, paths: Sequence[str]) -> jax.Array:
        """The examples' weights, from the norm with this name."""
        params = [param for param in squares if statistic.norm_at(paths[param]) == norm]
        max_norm = None if max_norms is None else max_norms[params[0]]
        return statistic.weights(w, added_up([squares[param] for param in params]), max_norm)

    results = States()
    for reduction in reductions:
        for choice in reduction.plan.of(Phase.BY_NORM):
            (statistic,) = choice.statistics
            assert isinstance(statistic, Accumulator)
            units = reduction.units(choice.units)
            for norm, params in _by_norm(statistic, reduction).items():
                own = dataclasses.replace(units, weights=weights(statistic, norm, reduction.paths))
                keys: list[Key] = [(param, statistic) for param in params]
                starts = {key: reduction.shards.start(key, states) for key in keys}
                results |= reduction.shards.ended(reduction.feed(choice, starts, own), states)
    return results


def _by_norm(statistic: Accumulator, reduction: Reduction) -> dict[str, list[int]]:
    """The parameters of a tail that the statistic selects, grouped by the norm that weighs them."""
    found: dict[str, list[int]] = {}
    for param in reduction.plan.tail.params:
        norm = statistic.norm_at(reduction.paths[param])
        if norm is not None:
            found.setdefault(norm, []).append(param)
    return found
