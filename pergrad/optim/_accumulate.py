"""One step for the examples of several batches, with the statistics of all of them together.

The variance of a large batch is not the average of the variances of its parts, and the parts may have
different sizes. `pergrad.combine` merges results exactly, so the state holds merged results:

    gathered = combine(gathered, statistics of this batch)

It starts from zeros with a count of 0, which add nothing. Every k-th call the optimizer takes a step
with the gathered statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pergrad._errors import ArgumentError
from pergrad._moments import Stats, asked
from pergrad._statistics import Count, Merging, Statistic, combine
from pergrad.optim._base import StatsTransformation, Tree, stats_of, wide_zeros
from pergrad.optim._found import of_gradient, required

WHO = "multi_steps"


class MultiStepsState(NamedTuple):
    """`gathered` has the statistics of the last `mini_step` calls; `gradient_step` counts the steps."""

    mini_step: jax.Array
    gradient_step: jax.Array
    gathered: dict[str, Tree]
    inner: Any


def multi_steps(inner: optax.GradientTransformation, every_k: int) -> StatsTransformation:
    """Lets `inner` take one step in `every_k` calls, with the statistics of the examples of all of them.

    It does what `optax.MultiSteps` does for optimizers that look at the mean gradient alone. The batches
    may have different sizes and weights: each counts as much as its examples. The updates are 0 except
    in every `every_k`-th call. There they are the updates of `inner` for the examples of the last
    `every_k` calls together. Besides the statistics of `inner` it needs the `count`.

    The state has one more array like the parameters for every statistic, in float32 (float64 for
    float64 parameters). Statistics that `pg.combine` cannot merge and per-example results are refused.

    Args:
      inner: an optimizer. If it has no `stats`, as those of optax, it is taken to need the mean alone;
        so put optimizers that need more together with `pergrad.optim.chain`, not with `optax.chain`.
      every_k: the number of calls for one step.

    >>> tx = pg.optim.multi_steps(pg.optim.micro_adam(1e-3), every_k=4)
    >>> tx.stats
    {'mean': Mean(), 'second_moment': Mean(square), 'count': Count()}
    """
    if isinstance(every_k, bool) or not isinstance(every_k, int) or every_k < 1:
        raise ArgumentError(f"{WHO}: every_k must be a whole number of at least 1, not {every_k!r}.")
    needed = asked("mean") | stats_of(inner)
    if Count() not in needed.values():
        needed |= asked("count")
    _check(needed)
    extra = optax.with_extra_args_support(inner)

    def init(params: Tree) -> MultiStepsState:
        return MultiStepsState(
            mini_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            gathered={name: _zeros(statistic, params) for name, statistic in needed.items()},
            inner=extra.init(params),
        )

    def update(
        updates: Tree, state: Any, params: Tree | None = None, *, stats: Any = None, **extra_args: Any
    ) -> tuple[Tree, MultiStepsState]:
        now = {name: _taken(name, needed[name], stats, updates) for name in needed}
        gathered = optax.tree.cast_like(combine(needed, state.gathered, now), state.gathered)

        def step(gathered: dict[str, Tree], inner_state: Any) -> tuple[Tree, Any]:
            mean = optax.tree.cast_like(gathered["mean"], updates)
            return extra.update(mean, inner_state, params, stats=gathered | {"mean": mean}, **extra_args)

        def wait(gathered: dict[str, Tree], inner_state: Any) -> tuple[Tree, Any]:
            like, _ = jax.eval_shape(step, gathered, inner_state)
            return jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), like), inner_state

        is_last = state.mini_step == every_k - 1
        out, inner_state = lax.cond(is_last, step, wait, gathered, state.inner)
        return out, MultiStepsState(
            mini_step=(state.mini_step + 1) % every_k,
            gradient_step=state.gradient_step + is_last,
            gathered=jax.tree.map(lambda x: jnp.where(is_last, jnp.zeros_like(x), x), gathered),
            inner=inner_state,
        )

    return StatsTransformation(init, update, needed)


def _check(needed: Mapping[str, Statistic]) -> None:
    for name, statistic in needed.items():
        if statistic.merging is Merging.JOINED:
            raise ArgumentError(
                f"{WHO}: the optimizer needs {name!r}, {statistic!r}, which has an entry for every "
                "example and would grow from call to call. Use microbatch_size= of pg.value_and_stats "
                "instead."
            )


def _zeros(statistic: Statistic, params: Tree) -> Tree:
    """The result of a statistic for no examples, on the devices of the parameters."""
    return jnp.zeros([]) if statistic == Count() else wide_zeros(params)


def _taken(name: str, statistic: Statistic, stats: Stats | None, updates: Tree) -> Tree:
    """The result of a statistic for this batch. The mean is the gradient `updates`."""
    if name == "mean":
        return jax.tree.map(jnp.asarray, updates)
    stats = required(WHO, name, stats, statistic)
    if statistic == Count():
        return jnp.asarray(stats[name])
    return of_gradient(WHO, name, stats, updates)
