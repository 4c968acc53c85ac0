"""Merges the results of several batches into the results of one batch with all their examples.

A mean is weighed by the count of its batch, n = sum w. With the means m and the unbiased variances v of
all batches, and N = sum n,

    mean     = sum n m / N
    variance = (sum (n - 1) v + n (m - mean)^2) / (N - 1).

Per-example results are joined along the example axis. A batch whose count is 0 adds nothing, even if its
means are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad import _compat
from pergrad._errors import ArgumentError
from pergrad._ir import accumulation_dtype, weigh
from pergrad._statistics.base import Merging, Statistic
from pergrad._statistics.of_examples import Count
from pergrad._statistics.of_parameters import Mean


def combine(stats: Any, a: Any, b: Any) -> Any:
    """Merges the results of two batches, as if all their examples had been in one batch.

    Means and variances need a `pg.Count()` among the statistics, which says how much each batch counts.
    A variance also needs the `pg.Mean()` of the same units. `Norm`, `Dot`, `Project`, `Loss`,
    `Individual` and `Factors` have the examples of `a`, followed by the examples of `b`. `Gram`, `Fold`
    and `Variance(per="token")` cannot be merged. A batch whose count is 1 or less has no variance, and
    then the merged batch has none either. The merged variance is as exact as the means, which
    `pg.Mean()` rounds to the parameter's dtype.

    Args:
      stats: the tree of statistics that was passed to `value_and_stats`.
      a: the results for one batch.
      b: the results for another batch.

    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> stats = {"mean": pg.Mean(), "variance": pg.Variance(), "count": pg.Count()}
    >>> of = lambda *xs: pg.grad_stats(loss, stats)(jnp.float32(1), jnp.array(xs))
    >>> both = pg.combine(stats, of(1.0, 2.0), of(3.0, 4.0, 5.0))
    >>> both["mean"], both["variance"], both["count"]
    (Array(3., dtype=float32), Array(2.5, dtype=float32), Array(5., dtype=float32))
    """
    return _Batches(stats, [a, b], lambda xs: sum(xs[1:], xs[0]), jnp.concatenate).merged()


def all_combine(stats: Any, result: Any, axis_name: Any) -> Any:
    """Merges the results of all members of a mapped axis of `shard_map`, `pmap` or `vmap`, as `combine`.

    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> stats = {"mean": pg.Mean(), "count": pg.Count()}
    >>> def of(x):
    ...     return pg.all_combine(stats, pg.grad_stats(loss, stats)(jnp.float32(1), x), "hosts")
    >>> jax.vmap(of, axis_name="hosts")(jnp.array([[1.0, 2.0], [3.0, 6.0]]))["mean"]
    Array([3., 3.], dtype=float32)
    """
    return _Batches(
        stats,
        [result],
        lambda xs: lax.psum(xs[0], axis_name),
        lambda xs: _compat.all_gather_for_all(xs[0], axis_name),
    ).merged()


class _Batches:
    """The results of the batches that are to be merged.

    `results` has those of the batches that this program holds. `add` and `join` take a list with one
    array for each of these, and return the sum, or the concatenation, of the arrays of all batches.
    """

    def __init__(
        self,
        stats: Any,
        results: Sequence[Any],
        add: Callable[[Sequence[Any]], Any],
        join: Callable[[Sequence[Any]], Any],
    ) -> None:
        self.add, self.join = add, join
        statistics, self.tree = jax.tree.flatten(stats)
        for statistic in statistics:
            if not isinstance(statistic, Statistic):
                raise ArgumentError(f"stats must hold statistics such as pg.Mean(), not {statistic!r}.")
        try:
            flat = [self.tree.flatten_up_to(result) for result in results]
        except ValueError as error:
            raise ArgumentError(
                f"a result is not one of these statistics, whose tree is {self.tree}."
            ) from error
        # For each statistic its results, one for each batch.
        self.results = list(zip(statistics, zip(*flat, strict=True), strict=True))

    def merged(self) -> Any:
        """The merged results, in the tree of the statistics."""
        return self.tree.unflatten([self._merged(s, results) for s, results in self.results])

    def _merged(self, statistic: Statistic, results: Sequence[Any]) -> Any:
        match statistic.merging:
            case Merging.ADDED:
                return self.add(results)
            case Merging.JOINED:
                return jax.tree.map(lambda *x: self.join(x), *results)
            case Merging.WEIGHED:
                return jax.tree.map(lambda *m: self._mean(statistic, m).astype(m[0].dtype), *results)
            case Merging.CENTRED:
                assert statistic.unit != "position"
                mean = Mean(per=statistic.unit)
                means = self._find(mean, f"{statistic!r} cannot be combined without")
                return jax.tree.map(
                    lambda *vm: self._variance(statistic, vm[: len(results)], vm[len(results) :]),
                    *results,
                    *means,
                )

    def _find(self, wanted: Statistic, why: str) -> Sequence[Any]:
        """The results of the statistic `wanted`, which must be in the tree; `why` begins the error."""
        for statistic, results in self.results:
            if statistic == wanted:
                return results
        raise ArgumentError(f"{why} a pg.{wanted!r} among the statistics. Add one.")

    def _counts(self, statistic: Statistic, dtype: Any) -> list[jax.Array]:
        counts = self._find(
            Count(), f"{statistic!r} is weighed by the number of examples, which cannot be known without"
        )
        units = statistic.unit if isinstance(statistic.unit, int) else 1
        return [jnp.asarray(n).astype(dtype) / units for n in counts]

    def _mean(self, statistic: Statistic, means: Sequence[Any]) -> jax.Array:
        dtype = accumulation_dtype(jnp.result_type(means[0]))
        counts = self._counts(statistic, dtype)
        total = self.add([weigh(m.astype(dtype), n) for m, n in zip(means, counts, strict=True)])
        return total / self.add(counts)

    def _variance(self, statistic: Statistic, of: Sequence[Any], means: Sequence[Any]) -> jax.Array:
        mean, dtype = self._mean(statistic, means), of[0].dtype
        counts = self._counts(statistic, dtype)
        squares = [
            weigh((n - 1) * v + n * jnp.square(m.astype(dtype) - mean), n > 0)
            for v, m, n in zip(of, means, counts, strict=True)
        ]
        return self.add(squares) / (self.add(counts) - 1)
