"""The largest norm at each parameter, from the `max_norm` of a call.

It is one number; or, if statistics clip each parameter alone, a tree of numbers that is a prefix of the
parameters' tree; or, if they clip groups of parameters, a mapping from the groups' names to numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pergrad._call.arguments import is_number_like, kind
from pergrad._errors import ArgumentError
from pergrad._statistics import Accumulator


def max_norms_of(stats: Any, max_norm: Any, params: Any, paths: Sequence[str]) -> list[jax.Array] | None:
    """The largest norm at each parameter, or None if no statistic takes one.

    `params` is the tree of the parameters with their numbers as leaves, and `paths` are their names. A
    parameter that no statistic selects has any number.
    """
    takers = [s for s in jax.tree.leaves(stats) if isinstance(s, Accumulator) and s.takes_max_norm]
    if not takers:
        return None
    if max_norm is None:
        raise ArgumentError(
            f"{takers[0]!r} needs a max_norm at every call: stats_fn(..., max_norm=1.0). Or write it "
            "into the statistic, pg.ClippedMean(1.0)."
        )
    if is_number_like(max_norm):
        return [_checked(max_norm, "max_norm")] * len(paths)
    by_norm = [[s.norm_at(path) for path in paths] for s in takers]
    other = next((s for s, names in zip(takers, by_norm, strict=True) if names != by_norm[0]), None)
    if other is not None:
        raise ArgumentError(
            f"{takers[0]!r} and {other!r} have different norms, so max_norm must be one number for both."
        )
    names = by_norm[0]
    if names == [name and path for name, path in zip(names, paths, strict=True)]:
        found = _of_parameters(max_norm, params, names)
    elif isinstance(max_norm, Mapping):
        found = _of_groups(max_norm, {name for name in names if name is not None})
        found = {i: found[name] for i, name in enumerate(names) if name is not None}
    else:
        raise ArgumentError(f"max_norm must be a number for {takers[0]!r}, not {kind(max_norm)}.")
    return [found.get(i, jnp.zeros(())) for i in range(len(paths))]


def _of_parameters(max_norm: Any, params: Any, names: Sequence[str | None]) -> dict[int, jax.Array]:
    """The largest norm at each selected parameter, by its number, from a prefix of their tree."""
    found: dict[int, Any] = {}

    def fill(number: Any, below: Any) -> None:
        found.update({i: number for i in jax.tree.leaves(below) if names[i] is not None})

    try:
        jax.tree.map(fill, max_norm, params, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ArgumentError(
            "max_norm must be a number or a tree of numbers that is a prefix of the parameters' tree, "
            f"{jax.tree.structure(params)}; it is {jax.tree.structure(max_norm)}."
        ) from error
    return {i: _checked(number, f"max_norm of {names[i]}") for i, number in found.items()}


def _of_groups(max_norm: Mapping[Any, Any], names: set[str]) -> dict[str, jax.Array]:
    """The largest norm of each group, by the group's name."""
    if set(max_norm) != names and len(names) == 1:
        raise ArgumentError(
            "there is one norm for all parameters, so max_norm must be one number. For a number for "
            "each parameter write pg.ClippedMean(by='leaf')."
        )
    if set(max_norm) != names:
        raise ArgumentError(
            "max_norm must be a number, or have a number for each group of parameters. Their names are "
            f"{', '.join(sorted(names))}; max_norm has {', '.join(map(str, max_norm)) or 'none'}."
        )
    return {name: _checked(number, f"max_norm of {name}") for name, number in max_norm.items()}


def _checked(number: Any, what: str) -> jax.Array:
    """A number as an array, after a look at its shape, its dtype and, if it is known, its value."""
    is_real = is_number_like(number) and any(
        jnp.issubdtype(jnp.result_type(number), real) for real in (jnp.floating, jnp.integer)
    )
    if not is_real or jnp.shape(number) != ():
        raise ArgumentError(f"{what} must be a number of at least 0, not {kind(number)}.")
    if not isinstance(number, Tracer) and not np.asarray(number) >= 0:
        raise ArgumentError(f"{what} must be a number of at least 0, not {number!r}.")
    return jnp.asarray(number)
