"""How the diagnostics read the results of statistics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pergrad._ir import widen
from pergrad._moments import VOCABULARY, Stats, missing, sigma2_of, written
from pergrad._statistics import Where

Tree = Any


def get(stats: Stats, name: str) -> Any:
    """The result of the statistic `name`; an error says how to ask for it if it is missing."""
    if name not in stats:
        is_own = name == "sign_factor"
        source = "pg.noise.SIGN_FACTOR" if is_own else written(VOCABULARY[name].statistic)
        raise missing("pergrad.noise", name, stats, source, "which Monitor.stats does, too.")
    return stats[name]


def flat(tree: Tree, where: Where | None) -> dict[str, Any]:
    """The leaves by their path, of the parameters that `where` selects."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = {jax.tree_util.keystr(path): x for path, x in leaves}
    return {path: x for path, x in paths.items() if where is None or where(path)}


def variance(stats: Stats) -> Tree:
    """sigma2 of each coordinate; never negative."""
    if "variance" in stats:
        return stats["variance"]
    n = get(stats, "count")

    def one(g: jax.Array, q: jax.Array) -> jax.Array:
        return jnp.maximum(sigma2_of(widen(g), q, n), 0)

    return jax.tree.map(one, get(stats, "mean"), get(stats, "second_moment"))
