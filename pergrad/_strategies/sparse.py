"""Statistics of lookups from the rows that were looked up, never from the whole table.

Example i looks up the rows at the places k_ir of a table, and these rows have the gradients v_ir. Rows
of an example at equal places are added up first. A row that an example did not look up has the gradient
0. With n = sum_i w_i,

    sum_i w_i phi(g_i)[k]    = n phi(0) + sum over rows with k_ir = k of w_i (phi(v_ir) - phi(0))
    sum_i w_i (g_i[k] - m)^2 = (n - t) m^2 + sum over rows with k_ir = k of w_i (v_ir - m)^2

where m is the mean of g_i[k] and t is the weight of the examples that look up k. The second sum has no
difference of large numbers. Both give the numbers of the dense computation, at a lower cost.

Several lookups in one table are one lookup with the rows of all. Steps after the lookups may select
entries and multiply them by numbers c (`_cut/ways`). Each row is then multiplied by the numbers at its
place as soon as it is read, and the steps move only a finished table of sums to the places of the
gradient. If c is not finite, an example that did not look up the entry has 0 c = NaN there, and all
examples are treated as if they had it:

    sum_i w_i phi(g_i)[k] = n phi(0 c).

A squared norm is the sum of the squares of those rows of an example that arrive in the gradient. For the
inner products of two examples' gradients the rows of one are laid out in a table, in which the rows of
the other are looked up; for the inner product with a direction they are looked up in the direction.
For a random projection P^T g Q they are looked up in P: it is the sum over rows of P[k_ir]^T (v_ir Q).

If devices divide the rows of a large table, its sums are made in pieces. A piece has rows of every
device's shard, and each device keeps its own rows of a piece before the next piece begins. So a device
never has a whole table of sums.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import aval
from pergrad._cut import Examples, Lookup, Rows, Tail, Way, of_nothing, ways_to
from pergrad._ir import (
    Division,
    accumulation_dtype,
    counts,
    number_of_pieces,
    total,
    weigh,
)
from pergrad._statistics import PLAIN_MEAN, Compressing, LeafStatistic, Quantity, WeightedSum
from pergrad._strategies.base import Job, Strategy
from pergrad._strategies.work import Work

# The quantities that rows are enough for.
OF_ROWS = (
    Quantity.SUM,
    Quantity.CENTRED,
    Quantity.SQUARED_NORMS,
    Quantity.PROJECTIONS,
    Quantity.SKETCHES,
    Quantity.PAIRS,
)


# Names of axes for `jnp.einsum`: the example, the lookup, and compressed rows, followed by columns.
EXAMPLE, LOOKUP, COMPRESSED = 100, 101, 102


@dataclasses.dataclass(frozen=True)
class Sparse(Strategy):
    """The strategy that computes statistics of lookups from the rows that were looked up."""

    name = "sparse"
    feeds_all = True

    def why_not(self, tail: Tail, statistic: LeafStatistic) -> str | None:
        if statistic.quantity not in OF_ROWS:
            return "needs the whole gradient"
        if not tail.looks_up:
            return "not lookups alone"
        if tail.adds:
            return "adds something after the lookup"
        if isinstance(statistic, WeightedSum) and not _is_finite_at_zero(statistic):
            return "phi(0) is not known to be finite"
        reasons = (_why_not_rows(tail, place, statistic) for place in range(len(tail.grads)))
        return next(filter(None, reasons), None)

    def seconds(self, work: Work, statistic: LeafStatistic) -> float:
        # (2 + s) (f + g) / memory rate
        return work.moving((2 + work.accumulators) * (work.factors + work.gradient))

    def operations(self, work: Work, statistics: Sequence[LeafStatistic]) -> float:
        return 2 * len(statistics) * work.size * work.factor_numbers

    def temporary_bytes(self, work: Work) -> float:
        """The bytes of the rows that all examples looked up, once more for each accumulator."""
        lookups = [term for term in work.tail.terms if isinstance(term, Lookup)]
        rows = sum(t.contributions * counts.nbytes(t.out) / t.table for t in lookups)
        return work.size * rows * (1 + work.accumulators)

    def reason(self, work: Work) -> str:
        terms = [term for term in work.tail.terms if isinstance(term, Lookup)]
        touched = sum(term.contributions for term in terms)
        return f"touches at most {touched} of {terms[0].table} rows"

    def reduce(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        looked_up = {
            place: _LookedUp(tail, place, tuple(j for j in jobs if j.place == place), examples)
            for place in dict.fromkeys(job.place for job in jobs)
        }
        return [job.from_quantity(looked_up[job.place].quantity(job)) for job in jobs]

    def reduce_on_devices(self, tail: Tail, jobs: Sequence[Job], examples: Examples) -> list[Any]:
        cut = _cut_of(tail, jobs)
        if cut is None:
            return super().reduce_on_devices(tail, jobs, examples)
        divided = tuple(job for job in jobs if job.shard is not None)
        of_pieces = iter(_LookedUp(tail, 0, divided, examples).in_pieces(cut))
        of_examples = iter(self.reduce(tail, [job for job in jobs if job.shard is None], examples))
        return [next(of_examples if job.shard is None else of_pieces) for job in jobs]


class _Cut(NamedTuple):
    """How a table is cut into `number` pieces: along its rows, which devices divide."""

    division: Division
    number: int


def _cut_of(tail: Tail, jobs: Sequence[Job]) -> _Cut | None:
    """How the table of a tail's only gradient is cut into pieces; None if it stays whole."""
    shard = next((job.shard for job in jobs if job.shard is not None), None)
    if shard is None or len(tail.grads) != 1 or tail.steps_that("scale"):
        return None
    ways = ways_to(tail, 0)
    if not ways or any(way.layout for way in ways):
        return None
    indexed = _lookup_of(ways[0]).indexed
    division = next((own for own in shard.divisions if (own.dim,) == indexed), None)
    if division is None:
        return None
    shape = aval(tail.grads[0]).shape
    number = number_of_pieces(shape, shape[division.dim] // division.number, of_table=True)
    return _Cut(division, number) if number > 1 else None


def _why_not_rows(tail: Tail, place: int, statistic: LeafStatistic) -> str | None:
    """Why the gradient at `place` is not made of rows with selected and scaled entries, or None."""
    ways = ways_to(tail, place)
    if not ways:
        return "mixes entries after the lookup"
    lookups = [_lookup_of(way) for way in ways]
    if any(lookup.alike != lookups[0].alike for lookup in lookups):
        return "lookups in tables of several shapes"
    if any(way.layout != ways[0].layout for way in ways):
        return "lookups in tables that are laid out differently"
    if any(way.repeats for way in ways):
        if statistic.quantity in (Quantity.SQUARED_NORMS, Quantity.PAIRS):
            return "repeats entries after the lookup"
        if not all(way.has_one_number and not way.replaces for way in ways):
            return "repeats entries and scales or drops them one by one"
    if isinstance(statistic, Compressing):
        if not statistic.layout_of(aval(tail.grads[place]).shape).compresses:
            return "small"
        if any(way.layout for way in ways):
            return "moves entries after the lookup"
    return next(filter(None, (lookup.why_not_rows() for lookup in lookups)), None)


def _lookup_of(way: Way) -> Lookup:
    assert isinstance(way.term, Lookup)
    return way.term


class _Piece(NamedTuple):
    """A piece of a table: how many rows it has, and the `looked_up` rows, with their keys in it."""

    length: int
    looked_up: Rows


@dataclasses.dataclass(frozen=True)
class _LookedUp:
    """The rows that all examples looked up for the gradient at `place`, for the statistics of `jobs`.

    If there is a `piece`, it takes the place of the table. Rows of other pieces are outside of it.
    """

    tail: Tail
    place: int
    jobs: tuple[Job, ...]
    examples: Examples
    piece: _Piece | None = None

    @functools.cached_property
    def env(self) -> Any:
        """The values of the tail's factors and constants."""
        return self.tail.env(self.examples.factors, self.examples.constants)

    @functools.cached_property
    def ways(self) -> list[Way]:
        """The ways from the lookups to the gradient."""
        ways = ways_to(self.tail, self.place)
        assert ways
        return ways

    @property
    def table(self) -> Lookup:
        """The first lookup, which stands for all: the tables of all lookups are alike."""
        return _lookup_of(self.ways[0])

    @property
    def dtype(self) -> Any:
        """The dtype that sums are kept in."""
        return accumulation_dtype(aval(self.table.out).dtype)

    @property
    def n(self) -> jax.Array:
        """The sum of all weights."""
        return jnp.asarray(self.examples.total, self.dtype)

    @functools.cached_property
    def of_nothing(self) -> jax.Array | None:
        """The numbers 0 c, laid out like the gradient, or None if no step multiplies by a number."""
        return of_nothing(self.tail, self.place, self.env, self.dtype)

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows as they arrive in the gradient. An entry that does not arrive is 0."""
        if self.piece is not None:
            return self.piece.looked_up
        all_keys, all_values = [], []
        for way in self.ways:
            lookup = _lookup_of(way)
            keys, values = lookup.keys_and_values(self.env)
            number = way.number(self.env, self.dtype)
            values = values * (number if number.ndim == 0 else lookup.at(number, keys))
            if way.drops:
                arrives = lookup.at(way.arrives(self.env, self.dtype), keys)
                values = jnp.where(arrives != 0, values, 0)
            all_keys.append(keys)
            all_values.append(values)
        return Rows.of(jnp.concatenate(all_keys, axis=1), jnp.concatenate(all_values, axis=1))

    def to_table(self, values: jax.Array) -> jax.Array:
        """A table in which values [B, N, ...] of the rows add up at their places."""
        length = None if self.piece is None else self.piece.length
        return self.table.to_table(self.rows.keys, values, length)

    @functools.cached_property
    def sums(self) -> dict[WeightedSum, jax.Array]:
        """For all phi that are needed, the sums over rows of w_i (phi(v_ir) - phi(0)), as tables."""
        statistics = [job.statistic for job in self.jobs]
        means = dict.fromkeys(s for s in statistics if isinstance(s, WeightedSum))
        if any(s.quantity is Quantity.CENTRED for s in statistics):
            means |= {PLAIN_MEAN: None}
        values, zero, w = self.rows.values, jnp.zeros((), self.dtype), self.examples.weights

        def table(mean: WeightedSum) -> jax.Array:
            own = weigh(mean.apply(values) - mean.apply(zero), w)
            return self.to_table(own)

        return {mean: table(mean) for mean in means}

    def moved(self, x: jax.Array) -> jax.Array:
        """The array `x`, which is laid out like the table, laid out like the gradient.

        Entries of the gradient that no entry of the table goes to are 0.
        """
        return self.ways[0].moved(self.env, x)

    def in_pieces(self, cut: _Cut) -> list[Any]:
        """For every job this device's shard of the state of all devices, one piece after the other."""
        division, number = cut
        length = self.table.table // division.number

        def of_piece(k: jax.Array) -> list[Any]:
            keys = division.places(self.rows.keys, length, number, k)
            piece = _Piece(division.number * length // number, self.rows._replace(keys=keys))
            own = dataclasses.replace(self, piece=piece)
            return [job.shard_of_all(job.from_quantity(own.quantity(job))) for job in self.jobs]

        states = lax.map(of_piece, jnp.arange(number))
        # The numbers in a state do not depend on the piece.
        return jax.tree.map(lambda x: division.joined(x) if x.ndim > 1 else x[0], states)

    def quantity(self, job: Job) -> Any:
        """The quantity that the statistic of a job is computed from."""
        statistic = job.statistic
        if isinstance(statistic, WeightedSum):
            return self._sum(statistic)
        match statistic.quantity:
            case Quantity.CENTRED:
                return self._centred()
            case Quantity.SQUARED_NORMS:
                return _squared_norms(self.rows) + self._square_of_nothing()
            case Quantity.PROJECTIONS:
                return self._projections(job.direction)
            case Quantity.SKETCHES:
                return self._sketches(job)
            case Quantity.PAIRS:
                return _pairs(self.table, self.rows, self.examples) + self._square_of_nothing()
        raise AssertionError(statistic)

    def _sum(self, mean: WeightedSum) -> jax.Array:
        zero, z = jnp.zeros((), self.dtype), self.of_nothing
        own = self.moved(self.sums[mean]) + self.n * mean.apply(zero)
        return own if z is None else jnp.where(z == 0, own, self.n * mean.apply(z))

    def _centred(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        mean = self.sums[PLAIN_MEAN] / jnp.maximum(self.n, jnp.finfo(self.dtype).tiny)
        if self.examples.devices.axes:
            # The mean takes the place of the sum. Otherwise XLA would make the squares of the mean, too,
            # while the sum is still there, and on many devices whole tables are what takes most memory.
            mean = lax.optimization_barrier(mean)
        m2 = self._squares_around(mean)
        z = 0 if self.of_nothing is None else self.of_nothing
        return self.n, self.moved(mean) + z, self.moved(m2) + z

    def _squares_around(self, mean: jax.Array) -> jax.Array:
        # Rows of length 1 stand for `first`, so that no further table as large as the mean is made.
        rows, w = self.rows, self.examples.weights
        first = rows.first.reshape(*rows.first.shape, *(1,) * (rows.values.ndim - 2))
        first = first.astype(rows.values.dtype)
        is_there = jnp.not_equal(w, 0).astype(first.dtype) if isinstance(w, jax.Array) else 1.0
        apart = first * jnp.square(rows.values - self.table.at(mean, rows.keys))
        m2, t, touching = map(self.to_table, (weigh(apart, w), weigh(first, w), weigh(first, is_there)))
        # For a row that all examples look up, t = n. Rounding could hide that, so examples are counted.
        all_touch = touching == total(is_there, rows.first.shape[0])
        return m2 + jnp.where(all_touch, 0, jnp.maximum(self.n - t, 0)) * jnp.square(mean)

    def _projections(self, direction: jax.Array) -> jax.Array:
        """<g_i, v>: each row times the part of v where the row arrives."""
        rows, nothing = self.rows, self.of_nothing

        def on_one(direction: jax.Array) -> jax.Array:
            v = self.table.at(self.ways[0].moved_back(self.env, direction), rows.keys)
            own = jnp.sum(rows.values * v, axis=range(1, v.ndim))
            return own if nothing is None else own + jnp.sum(nothing * direction)

        is_one = direction.ndim == len(aval(self.tail.grads[self.place]).shape)
        return on_one(direction) if is_one else lax.map(on_one, direction).T

    def _sketches(self, job: Job) -> jax.Array:
        """The random projections; the table is laid out like the gradient."""
        statistic, signs = job.statistic, job.direction
        assert isinstance(statistic, Compressing)
        shape = aval(self.tail.grads[self.place]).shape
        layout, lookup, rows = statistic.layout_of(shape), self.table, self.rows
        indices = jnp.unravel_index(rows.keys, lookup.sizes(lookup.indexed))
        index_of = dict(zip(lookup.indexed, indices, strict=True))
        window = [k for k in lookup.window if k in layout.axes]
        values = rows.values.reshape(*rows.keys.shape, *(shape[k] for k in window))
        operands: list[Any] = [values, [EXAMPLE, LOOKUP, *window]]
        sides = layout.axes[: layout.split], layout.axes[layout.split :]
        for is_columns, axes in enumerate(sides):
            side, named = signs.side(layout, bool(is_columns)), [*axes, COMPRESSED + is_columns]
            found = [k for k in axes if k in index_of]
            if found:
                side = jnp.moveaxis(side, [axes.index(k) for k in found], range(len(found)))
                side = side[tuple(index_of[k] for k in found)]
                named = [EXAMPLE, LOOKUP, *(k for k in named if k not in found)]
            operands += [side, named]
        u = jnp.einsum(*operands, [EXAMPLE, COMPRESSED, COMPRESSED + 1])
        out = jax.vmap(signs.spread)(u)
        return out if self.of_nothing is None else out + statistic.of(self.of_nothing, signs)[None]

    def _square_of_nothing(self) -> jax.Array | int:
        """The squared norm of 0 c."""
        return 0 if self.of_nothing is None else jnp.sum(jnp.square(self.of_nothing))


def _squared_norms(rows: Rows) -> jax.Array:
    return jnp.sum(jnp.square(rows.values), axis=range(1, rows.values.ndim))


def _pairs(lookup: Lookup, rows: Rows, examples: Examples) -> jax.Array:
    other_keys, other_values = (examples.the_others(x) for x in (rows.keys, rows.values))

    def row(own: tuple[jax.Array, jax.Array]) -> jax.Array:
        keys, values = own
        table = lookup.to_table(keys[None], values[None])
        return jnp.sum(lookup.at(table, other_keys) * other_values, axis=range(1, other_values.ndim))

    return lax.map(row, (examples.those_here(rows.keys), examples.those_here(rows.values)))


def _is_finite_at_zero(mean: WeightedSum) -> bool:
    if mean.degree is not None:
        return True  # phi(0) is 0 for every phi that is known to be factorable
    try:
        with jax.ensure_compile_time_eval():
            return bool(jnp.isfinite(mean.apply(jnp.zeros((), jnp.float32))))
    except Exception:  # phi closes over a traced value, or is not elementwise
        return False
