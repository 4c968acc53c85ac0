"""Random projections of gradients from the factors, without the gradients.

A projection compresses a gradient, read as a matrix, from both sides (`_statistics/sketch`). For a
product g = X^T D with T positions that is

    P^T g Q = (X P)^T (D Q),

which takes T (m a + n b + a b) multiplications, while forming a gradient [m, n] takes T m n. Each factor
must have the axes of one side of the matrix. An axis that both factors have, such as that of experts or
of stacked layers, may be on either side: it is summed over last, as the positions are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import aval
from pergrad._cut import Examples, FactorLayout, Tail, factor_layout
from pergrad._ir import widen
from pergrad._statistics import Compressing, LeafStatistic, Signs, SketchLayout
from pergrad._strategies.base import Job, Strategy
from pergrad._strategies.work import Work

# Names of axes for `jnp.einsum`: the example, the position, and the compressed rows or columns.
EXAMPLE, POSITION, COMPRESSED = 100, 101, 102


@dataclasses.dataclass(frozen=True)
class Projected(Strategy):
    """The strategy that compresses the factors, and multiplies what is left of them.

    `batched` says whether all examples share one batched product, or each has a product of its own.
    """

    name = "projected"

    batched: bool = False

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if not isinstance(statistic, Compressing):
            return "not a random projection"
        if len(tail.grads) != 1:
            return "several gradients share steps"
        layout = statistic.layout_of(aval(tail.grads[0]).shape)
        if not layout.compresses:
            return "small"
        factors = factor_layout(tail)
        if factors is None:
            return "not a single product, or more than moved after it"
        return None if _first_is_columns(layout, factors) is not None else "the factors share a side"

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # B T (m a + n b) / product rate + B T a b / batched rate + 2 f / memory rate, or, if not
        # batched, all at the product rate, and B rounds
        sides, products = _operations_of_one(work, statistic)
        device = work.device
        rate = device.batched_rate if self.batched else device.product_rate
        rounds = 0 if self.batched else work.size * device.loop_round
        patches = work.size * sum(term.scratch for term in work.tail.terms)
        moving = work.moving(2 * work.factors + 2 * patches)
        return work.size * (sides / device.product_rate + products / rate) + moving + rounds

    def operations(self, work: Work, statistics: Sequence[LeafStatistic]) -> float:
        return work.size * sum(sum(_operations_of_one(work, s)) for s in statistics)

    def temporary_bytes(self, work: Work) -> float:
        return work.factors / 2 + work.size * sum(term.scratch for term in work.tail.terms)

    def reason(self, work: Work) -> str:
        return "products of projected factors"

    def fitted(self, work: Work, at_a_time: int | None) -> Projected:
        """The batched variant if products are batched on the device, or if there is one position."""
        return Projected(batched=work.device.batches_products or work.positions == 1)

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        factors = factor_layout(tail)
        assert factors is not None
        arrays = factors.arrays(examples)
        return [job.from_quantity(self._projections(job, factors, arrays)) for job in jobs]

    def _projections(
        self, job: Job, factors: FactorLayout, arrays: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        statistic, signs = job.statistic, job.direction
        assert isinstance(statistic, Compressing)
        layout = statistic.layout_of(aval(factors.tail.grads[0]).shape)
        first_is_columns = _first_is_columns(layout, factors)
        assert first_is_columns is not None
        shared = _shared(layout, factors)
        x, d = (
            _compressed(x, _long(layout, side.numbers), shared, layout, signs, is_columns)
            for x, side, is_columns in zip(
                arrays, factors.sides, (first_is_columns, not first_is_columns), strict=True
            )
        )
        rows, columns = (d, x) if first_is_columns else (x, d)

        def product(rows: jax.Array, columns: jax.Array) -> jax.Array:
            return jnp.tensordot(rows, columns, [list(range(rows.ndim - 1))] * 2)

        if rows[0].size == rows.shape[-1]:  # one position: an outer product
            rows, columns = (a.reshape(len(a), -1) for a in (rows, columns))
            u = rows[:, :, None] * columns[:, None]
        elif self.batched:
            u = jax.vmap(product)(rows, columns)
        else:
            u = lax.map(lambda both: product(*both), (rows, columns))
        return jax.vmap(signs.spread)(u)


def _compressed(
    x: jax.Array,
    axes: Sequence[int],
    shared: Sequence[int],
    layout: SketchLayout,
    signs: Signs,
    is_columns: bool,
) -> jax.Array:
    """X P or D Q, [B, positions, shared..., a or b], from a factor with these axes of the parameter."""
    own = layout.axes[layout.split :] if is_columns else layout.axes[: layout.split]
    x = widen(x).reshape(*x.shape[:2], *(layout.shape[k] for k in axes))
    side = signs.side(layout, is_columns)
    left, right = [EXAMPLE, POSITION, *axes], [*own, COMPRESSED]
    return jnp.einsum(x, left, side, right, [EXAMPLE, POSITION, *shared, COMPRESSED])


def _long(layout: SketchLayout, numbers: Sequence[int]) -> list[int]:
    """Those axes of the parameter that are longer than 1."""
    return [k for k in numbers if k in layout.axes]


def _shared(layout: SketchLayout, factors: FactorLayout) -> list[int]:
    """The axes of the parameter that both factors have."""
    first, second = (_long(layout, side.numbers) for side in factors.sides)
    return [k for k in first if k in second]


def _first_is_columns(layout: SketchLayout, factors: FactorLayout) -> bool | None:
    """Whether the first factor has the columns of the matrix and the second the rows.

    None if a factor has axes of its own on both sides.
    """
    shared = _shared(layout, factors)
    first, second = ({k for k in side.numbers if k in layout.axes} for side in factors.sides)
    first, second = first - set(shared), second - set(shared)
    rows, columns = set(layout.axes[: layout.split]), set(layout.axes[layout.split :])
    if first <= rows and second <= columns:
        return False
    return True if first <= columns and second <= rows else None


def _operations_of_one(work: Work, statistic: LeafStatistic) -> tuple[float, float]:
    """2 T (m a + n b) and 2 T a b: the operations for one example."""
    assert isinstance(statistic, Compressing)
    layout = statistic.layout_of(aval(work.tail.grads[0]).shape)
    m, n, a, b = layout.m, layout.n, layout.a, layout.b
    return 2 * work.positions * (m * a + n * b), 2 * work.positions * a * b
