"""How an optimizer takes the result of a statistic out of `stats`, and the checks of that result.

The result must be there, must have the tree and the shapes of the parameters, and must belong to the
gradient that the optimizer gets. A transformation in front of the optimizer may have changed the
gradient and not the statistics (`optax.clip_by_global_norm`, `optax.MultiSteps`), and nothing else would
show it. So the gradient is compared with the mean in `stats`, leaf by leaf. Its leaf may be

    the same object as the leaf of the mean      it belongs to the statistics
    an array whose numbers are known             the numbers are compared
    computed in the program that is traced       something has changed it: it is refused
    another argument of a traced program         the program compares the numbers when it runs, and gives
                                                 NaN if they differ
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from pergrad._compat import is_computed
from pergrad._errors import ArgumentError
from pergrad._ir import widen
from pergrad._moments import VOCABULARY, Stats, missing, written
from pergrad._statistics import Count, Statistic
from pergrad.optim._base import Tree


def found(
    who: str, name: str, stats: Stats | None, updates: Tree, statistic: Statistic | None = None
) -> Any:
    """The result of the statistic `name`, which is that of the vocabulary unless it is said.

    The result is a tree like the gradient `updates`, in which `optax.masked` may have left a part of the
    parameters; the count is a number. The result is refused if `updates` is not the mean gradient that
    it belongs to. If that is known only when the program runs, the result becomes NaN.
    """
    statistic = VOCABULARY[name].statistic if statistic is None else statistic
    stats = required(who, name, stats, statistic)
    if statistic == Count():
        return jnp.asarray(stats[name])
    if name == "mean":
        return aligned(who, name, stats[name], updates)
    return of_gradient(who, name, stats, updates)


def required(who: str, name: str, stats: Stats | None, statistic: Statistic) -> Stats:
    """`stats`, if it has a result of the statistic `name`."""
    if stats is None or name not in stats:
        then = (
            "(tx.stats has all that is needed), and hand the results on:\n"
            '    updates, state = tx.update(stats["mean"], state, params, stats=stats)'
        )
        raise missing(who, name, stats, written(statistic), then)
    return stats


def of_gradient(who: str, name: str, stats: Stats, updates: Tree) -> Tree:
    """A statistic like the parameters that must belong to the gradient `updates`."""
    result = aligned(who, name, stats[name], updates)
    stats = required(who, "mean", stats, VOCABULARY["mean"].statistic)
    differs = is_changed(updates, aligned(who, "mean", stats["mean"], updates))
    if differs is True:
        raise ArgumentError(
            f'{who}: the gradient given to update is not stats["mean"], to which stats[{name!r}] '
            "belongs. Write\n"
            "    pg.optim.clipped(tx, max_norm)                not a clip in front of tx\n"
            "    pg.optim.multi_steps(tx, k)                   not optax.MultiSteps(tx, k)\n"
            "    pg.optim.chain(tx, other)                     not what changes the gradient, then tx\n"
            "    pg.all_combine(tx.stats, stats, axis_name)    not lax.pmean of the gradient alone\n"
            "and hand on the statistics of this very step,\n"
            '    tx.update(stats["mean"], state, params, stats=stats)\n'
            "or, where the other statistics do belong to your gradient, such as a cast one,\n"
            '    tx.update(gradient, state, params, stats=stats | {"mean": gradient})'
        )
    return nan_if(differs, result)


def is_changed(updates: Tree, mean: Tree) -> bool | jax.Array:
    """Whether the gradient `updates` differs from the mean; an array, if only the run can tell.

    The two differ if the norm of their difference is more than rounding explains: more than the root of
    the precision times the norm of the mean. Both norms are over all parameters together, since the
    gradient of a single parameter may consist of rounding errors alone.
    """
    leaves = list(zip(jax.tree.leaves(updates), jax.tree.leaves(mean), strict=True))
    others = [(g, m) for g, m in leaves if g is not m]
    if not others:
        return False
    if any(is_computed(g) for g, _ in others):
        return True
    distance = optax.tree.norm([_distance(g, m) for g, m in others])
    allowed = optax.tree.norm([widen(m) for _, m in leaves]) * _root_of_precision(others)
    differs = distance > allowed  # False if one of them is NaN; then the update is NaN, too
    return differs if isinstance(differs, Tracer) else bool(differs)


def _distance(g: Any, m: Any) -> jax.Array:
    g, m = widen(g), widen(m)
    is_same = (g == m) | (jnp.isnan(g) & jnp.isnan(m))
    return jnp.where(is_same, 0, g - m)


def _root_of_precision(pairs: Any) -> float:
    return max(float(jnp.finfo(jnp.result_type(x)).eps) for pair in pairs for x in pair) ** 0.5


def nan_if(differs: bool | jax.Array, tree: Tree) -> Tree:
    """The tree, or NaN everywhere if the run finds that the gradient differs from the mean."""
    if differs is False:
        return tree
    return jax.tree.map(lambda x: jnp.where(differs, jnp.nan, x).astype(jnp.result_type(x)), tree)


def aligned(who: str, name: str, result: Tree, updates: Tree) -> Tree:
    """`result`, with the mark of `optax.masked` in the places where `updates` has that mark."""

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    def one(path: Any, update: Any, x: Any) -> Any:
        if is_masked(update):
            return update
        if jnp.shape(x) != jnp.shape(update):
            raise ArgumentError(
                f"{who}: stats[{name!r}] has the shape {jnp.shape(x)}{at(path)}, "
                f"but the gradient has {jnp.shape(update)} there."
            )
        return x

    try:
        return jax.tree_util.tree_map_with_path(one, updates, result, is_leaf=is_masked)
    except ArgumentError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"{who}: stats[{name!r}] is not a tree like the gradients: "
            f"{jax.tree.structure(result)}, not {jax.tree.structure(updates)}."
        ) from error


def at(path: Any) -> str:
    """Where a parameter is, for a message: nothing, if it is the only one."""
    return f" at {jax.tree_util.keystr(path)}" if path else ""
