"""Statistics of lookups from the rows that were looked up, never from the whole table.

With v_ir the rows of example i, k_ir their places in the table (equal places added up first) and
n = sum_i w_i, the rows of a table that an example did not touch have the gradient 0, so

    sum_i w_i phi(g_i)[k]    = n phi(0) + sum over rows with k_ir = k of w_i (phi(v_ir) - phi(0))
    sum_i w_i (g_i[k] - m)^2 = (n - t) m^2 + sum over rows with k_ir = k of w_i (v_ir - m)^2

with m the mean of g_i[k] and t the weight of the examples that touch k. No difference of large numbers
appears in the second, and neither can be told from the dense computation but by its cost. Steps after
the lookup may move entries, and multiply all of them by one number; the rows are multiplied by it at
once. A squared norm is the sum of the squares of an example's rows; for inner products of two examples'
gradients the rows of one are laid out in a table, where those of the others are looked up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._statistics import LeafStatistic, Mean, Variance, Weights, added, total, weigh
from pergrad._tail import Tail
from pergrad._whole import Pairs, SquaredNorm
from pergrad.strategies._strategy import Examples, Job, Strategy
from pergrad.terms import Lookup
from pergrad.terms.scatter import Rows

_MEAN = Mean()


@dataclasses.dataclass(frozen=True)
class Sparse(Strategy):
    name = "sparse"

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if not isinstance(statistic, (Mean, Variance, SquaredNorm, Pairs)):
            return "needs the whole gradient"
        if len(tail.terms) != 1 or not isinstance(tail.terms[0], Lookup):
            return "not a single lookup"
        if len(tail.grads) != 1 or tail.steps_that("mix"):
            return "mixes entries after the lookup"
        if why_not := tail.why_not_one_number():
            return why_not
        if isinstance(statistic, Mean) and not _is_finite_at_zero(statistic):
            return "phi(0) is not known to be finite"
        if isinstance(statistic, (SquaredNorm, Pairs)) and (why_not := tail.why_not_similar()):
            return why_not
        return tail.terms[0].why_not_rows()

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        (lookup,) = tail.terms
        assert isinstance(lookup, Lookup)
        env, w = tail.env(examples.factors, examples.constants), examples.weights
        rows = lookup.rows(env)
        scale = tail.similarity(env, rows.values.dtype)
        rows = rows._replace(values=rows.values * scale)
        n = jnp.asarray(examples.total, rows.values.dtype)

        means = list(dict.fromkeys(j.statistic for j in jobs if isinstance(j.statistic, Mean)))
        if any(isinstance(job.statistic, Variance) for job in jobs):
            means = list(dict.fromkeys([*means, _MEAN]))
        sums: dict[Mean, jax.Array] = {}
        if means:
            zero = 0 * scale  # NaN if the number is not finite, as it would be in the whole gradient
            columns = [weigh(mean.apply(rows.values) - mean.apply(zero), w) for mean in means]
            table = lookup.to_table(rows.keys, jnp.stack(columns, axis=2))
            sums = {mean: table[i] + n * mean.apply(zero) for i, mean in enumerate(means)}

        def moved(table: jax.Array) -> jax.Array:
            """The table after the moves, which commute with any phi; its rows are scaled already."""
            return tail.moved_and_scaled(env | {lookup.out: table}, lambda _, x: x)

        def result(job: Job) -> Any:
            match job.statistic:
                case Variance():
                    mean = sums[_MEAN] / jnp.maximum(n, jnp.finfo(n.dtype).tiny)
                    m2 = _squares_around(mean, lookup, rows, w, n)
                    mean, m2 = moved(mean), moved(m2)
                    return job.statistic.merge(job.state(tail), (n, mean, m2))
                case Mean():
                    return added(job.given, moved(sums[job.statistic]))
                case SquaredNorm():
                    return _squared_norms(rows)
                case Pairs():
                    return _pairs(lookup, rows, examples)
            raise AssertionError(job.statistic)

        return [result(job) for job in jobs]


def _squared_norms(rows: Rows) -> jax.Array:
    return jnp.sum(jnp.square(rows.values), axis=range(1, rows.values.ndim))


def _pairs(lookup: Lookup, rows: Rows, examples: Examples) -> jax.Array:
    def row(own: tuple[jax.Array, jax.Array]) -> jax.Array:
        keys, values = own
        (table,) = lookup.to_table(keys[None], values[None, :, None])
        return jnp.sum(lookup.at(table, rows.keys) * rows.values, axis=range(1, rows.values.ndim))

    return lax.map(row, (examples.those_here(rows.keys), examples.those_here(rows.values)))


def _squares_around(mean: jax.Array, lookup: Lookup, rows: Rows, w: Weights, n: jax.Array) -> jax.Array:
    first = rows.first.reshape(*rows.first.shape, *(1,) * (rows.values.ndim - 2))
    first = jnp.broadcast_to(first, rows.values.shape).astype(rows.values.dtype)
    is_there = jnp.not_equal(w, 0).astype(first.dtype) if isinstance(w, jax.Array) else 1.0
    apart = first * jnp.square(rows.values - lookup.at(mean, rows.keys))
    columns = [weigh(apart, w), weigh(first, w), weigh(first, is_there)]
    m2, t, touching = lookup.to_table(rows.keys, jnp.stack(columns, axis=2))
    # A row that all touch has t = n, which rounding would miss: a whole number tells.
    all_touch = touching == total(is_there, rows.first.shape[0])
    return m2 + jnp.where(all_touch, 0, jnp.maximum(n - t, 0)) * jnp.square(mean)


def _is_finite_at_zero(mean: Mean) -> bool:
    if mean.factorable is None and mean.is_factorable:
        return True  # 0, for every function that is known to be factorable
    try:
        with jax.ensure_compile_time_eval():
            return bool(jnp.isfinite(mean.apply(jnp.zeros((), jnp.float32))))
    except Exception:  # phi closes over a traced value, or is not elementwise
        return False
