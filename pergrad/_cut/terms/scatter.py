"""A scatter-add at places that differ from example to example: the gradient of a lookup.

For one example with N lookups of rows k_1, ..., k_N of a table and their cotangents U_1, ..., U_N,

    g[k] = sum over n with k_n = k of U_n,

so of all rows of g at most N are not zero. `Rows` brings an example into that form, with equal k
added up: as many rows as lookups, of which the first of every k holds the sum and the others are
empty. From there an elementwise statistic costs N rows per example and never the table.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._cut.steps import is_zero
from pergrad._cut.terms._term import Term
from pergrad._ir import Env, Weights, accumulation_dtype, distinct, read, weigh, with_example_axis


class Rows(NamedTuple):
    """What is not zero in B examples' gradients: `values` [B, N, ...], `keys` and `first` [B, N].

    A key counts through the table's indexed axes; a lookup outside the table has the key `table`.
    """

    keys: jax.Array
    values: jax.Array
    first: jax.Array

    @staticmethod
    def of(keys: jax.Array, values: jax.Array) -> Rows:
        """From keys [B, N] and values [B, N, ...], with those of equal keys added up."""
        slots = jax.vmap(_first_of_equals)(keys)
        values = jax.vmap(lambda v, slot: jnp.zeros_like(v).at[slot].add(v))(values, slots)
        return Rows(keys, values, slots == jnp.arange(keys.shape[1])[None])


@dataclasses.dataclass(frozen=True)
class Lookup(Term):
    """A gradient that is zero outside of the rows that an example looked up."""

    eqn: JaxprEqn

    @property
    def is_lookup(self) -> bool:
        return True

    @property
    @abc.abstractmethod
    def indexed(self) -> tuple[int, ...]:
        """The axes of the table that are looked up along; the others make up a row."""

    @abc.abstractmethod
    def why_not_rows(self) -> str | None:
        """Why the term cannot be written as `Rows`, or None if it can."""

    @abc.abstractmethod
    def keys_and_values(self, env: Env) -> tuple[jax.Array, jax.Array]:
        """Keys [B, N] and cotangents [B, N, row] of all lookups, equal keys not yet added up.

        The cotangent of a lookup outside the table is 0, whatever it was: it belongs to no row.
        """

    @property
    def window(self) -> tuple[int, ...]:
        return tuple(a for a in range(len(aval(self.out).shape)) if a not in self.indexed)

    @property
    def table(self) -> int:
        """How many rows there are."""
        return math.prod(self.sizes(self.indexed))

    @property
    def alike(self) -> tuple[Any, ...]:
        """What tables have in common if the rows of one may be taken for rows of the other."""
        table = aval(self.out)
        return table.shape, self.indexed, accumulation_dtype(table.dtype)

    def sizes(self, axes: Collection[int]) -> tuple[int, ...]:
        return tuple(aval(self.out).shape[a] for a in axes)

    def split(self, env: Env) -> list[jax.Array]:
        keys, values = self.keys_and_values(env)
        return [keys, values]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        key, value = parts
        return self.to_table(key[None, None], value[None, None, None])[0]

    def to_table(self, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Adds up `values` [B, N, S, row] at their keys: S arrays shaped like the term, in front."""
        size, n, s, *row = values.shape
        table = jnp.zeros((self.table, s, *row), values.dtype)
        table = table.at[keys.reshape(-1)].add(values.reshape(size * n, s, *row), mode="drop")
        table = jnp.moveaxis(table, 1, 0).reshape(s, *self.sizes(self.indexed), *row)
        return table.transpose(0, *_shift(np.argsort([*self.indexed, *self.window])))

    def at(self, table: jax.Array, keys: jax.Array) -> jax.Array:
        """The rows of an array shaped like the term, for every key: [B, N, row]."""
        table = table.transpose(*self.indexed, *self.window)
        table = table.reshape(self.table, *self.sizes(self.window))
        return table.at[keys].get(mode="fill", fill_value=0)

    def keys(self, indices: Sequence[jax.Array]) -> jax.Array:
        """The key of every lookup from its index along each of the indexed axes."""
        keys, inside = jnp.zeros((), jnp.int32), jnp.ones((), bool)
        for index, size in zip(indices, self.sizes(self.indexed), strict=True):
            keys = keys * size + index.astype(jnp.int32)
            inside = inside & _is_from_zero_to(size - 1, index)
        return jnp.where(inside, keys, self.table)


@dataclasses.dataclass(frozen=True)
class Scatter(Lookup):
    """`scatter-add`, what indexing, `take` and `take_along_axis` leave behind."""

    @property
    def kind(self) -> str:
        return "scatter"

    @staticmethod
    def match(
        eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]
    ) -> Scatter | None:
        if 1 not in varying or not is_zero(eqn.invars[0], made_by):
            return None
        return Scatter(eqn, eqn.outvars[0], distinct(eqn.invars[i] for i in varying))

    @property
    def contributions(self) -> int:
        return math.prod(aval(self.eqn.invars[1]).shape[:-1])

    @property
    def indexed(self) -> tuple[int, ...]:
        return self.eqn.params["dimension_numbers"].scatter_dims_to_operand_dims

    def why_not_rows(self) -> str | None:
        dims, updates = self.eqn.params["dimension_numbers"], aval(self.eqn.invars[2]).shape
        if dims.operand_batching_dims:
            return "the lookup has batching axes"
        if set(dims.inserted_window_dims) != set(self.indexed):
            return "a lookup takes more than one row"
        if tuple(updates[a] for a in dims.update_window_dims) != self.sizes(self.window):
            return "a lookup takes parts of rows"
        if self.table >= np.iinfo(np.int32).max:
            return "the table has more rows than an int32 counts"
        return None

    def keys_and_values(self, env: Env) -> tuple[jax.Array, jax.Array]:
        indices, updates = self._read(env)
        size, n = indices.shape[0], self.contributions
        window = _shift(self.eqn.params["dimension_numbers"].update_window_dims)
        lookups = tuple(a for a in range(updates.ndim) if a not in window)
        values = updates.transpose(*lookups, *window).reshape(size, n, *self.sizes(self.window))
        along = [_as_wide_index(indices[..., k]).reshape(size, n) for k in range(len(self.indexed))]
        if self._clips:
            sizes = self.sizes(self.indexed)
            along = [jnp.clip(i, 0, s - 1) for i, s in zip(along, sizes, strict=True)]
        keys = self.keys(along)
        return keys, weigh(values, keys < self.table)

    def split(self, env: Env) -> list[jax.Array]:
        if self.why_not_rows() is None:
            return super().split(env)
        # All lookups of the example, with the cotangents of all but one set to 0.
        indices, updates = self._read(env)
        dims, n = self.eqn.params["dimension_numbers"], self.contributions
        lookups = [a for a in range(updates.ndim - 1) if a not in dims.update_window_dims]
        shape = [updates.shape[a + 1] for a in lookups]
        own = jnp.eye(n, dtype=bool).reshape(n, *shape)
        own = jnp.expand_dims(own, [a + 1 for a in dims.update_window_dims])[None]
        return [
            jnp.broadcast_to(indices[:, None], (len(indices), n, *indices.shape[1:])),
            jnp.where(own, self._without_dropped(indices, updates)[:, None], 0),
        ]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        if self.why_not_rows() is None:
            return super().contribution(parts)
        indices, updates = parts
        zeros = jnp.zeros(aval(self.out).shape, updates.dtype)
        dims = self.eqn.params["dimension_numbers"]
        return lax.scatter_add(zeros, indices, updates, dims, mode=self._mode)

    def sum(self, env: Env, w: Weights) -> jax.Array:
        # The examples are one more axis of lookups. Their weights may be differentiated by, for inner
        # products; then what is dropped is multiplied by 0, so it has to be finite.
        indices, updates = self._read(env)
        if isinstance(w, jax.Array):
            updates = self._without_dropped(indices, updates)
        dims = self.eqn.params["dimension_numbers"]
        dims = dims._replace(
            update_window_dims=_shift(dims.update_window_dims),
            scatter_indices_batching_dims=_shift(dims.scatter_indices_batching_dims),
        )
        zeros = jnp.zeros(aval(self.out).shape, updates.dtype)
        return lax.scatter_add(zeros, indices, weigh(updates, w), dims, mode=self._mode)

    @property
    def _clips(self) -> bool:
        """Whether an index out of range means the nearest that is in range, or nothing at all."""
        return self.eqn.params["mode"] == lax.GatherScatterMode.CLIP

    @property
    def _mode(self) -> lax.GatherScatterMode:
        """The equation's mode, or the one that does the same and has a transpose that does."""
        modes = lax.GatherScatterMode
        return modes.CLIP if self._clips else modes.FILL_OR_DROP

    def _without_dropped(self, indices: jax.Array, updates: jax.Array) -> jax.Array:
        """The updates [B, ...] with 0 for those that the scatter drops, whatever they were."""
        if self._clips:
            return updates
        dims, table = self.eqn.params["dimension_numbers"], aval(self.out).shape
        windows = _shift(dims.update_window_dims)
        one_row = (*dims.inserted_window_dims, *dims.operand_batching_dims)
        spread = [a for a in range(len(table)) if a not in one_row]
        extent = dict(zip(spread, (updates.shape[a] for a in windows), strict=True))
        inside = jnp.ones(indices.shape[:-1], bool)
        for k, a in enumerate(self.indexed):
            inside &= _is_from_zero_to(table[a] - extent.get(a, 1), _as_wide_index(indices[..., k]))
        return jnp.where(jnp.expand_dims(inside, windows), updates, 0)

    def _read(self, env: Env) -> tuple[jax.Array, jax.Array]:
        """Indices and updates with the example axis in front, updates in float32 at least."""
        _, indices, updates = (read(env, v) for v in self.eqn.invars)
        updates = with_example_axis(updates, self.eqn.invars[2] in self.factors, len(indices))
        return indices, updates.astype(accumulation_dtype(aval(self.out).dtype))


@dataclasses.dataclass(frozen=True)
class Slice(Lookup):
    """`dynamic_update_slice` onto zeros, what `dynamic_slice` leaves behind: neighbouring lookups."""

    @property
    def kind(self) -> str:
        return "slice"

    @staticmethod
    def match(eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]) -> Slice | None:
        table, part, *_ = (aval(v).shape for v in eqn.invars)
        moves = any(i >= 2 for i in varying) and table != part
        if not moves or not is_zero(eqn.invars[0], made_by):
            return None
        return Slice(eqn, eqn.outvars[0], distinct(eqn.invars[i] for i in varying))

    @property
    def contributions(self) -> int:
        return math.prod(aval(self.eqn.invars[1]).shape[a] for a in self.indexed)

    @property
    def indexed(self) -> tuple[int, ...]:
        table, part = aval(self.out).shape, aval(self.eqn.invars[1]).shape
        return tuple(a for a in range(len(table)) if part[a] != table[a])

    def why_not_rows(self) -> str | None:
        if self.table >= np.iinfo(np.int32).max:
            return "the table has more rows than an int32 counts"
        return None

    def keys_and_values(self, env: Env) -> tuple[jax.Array, jax.Array]:
        size = env[self.factors[0]].shape[0]
        part, *starts = (
            with_example_axis(read(env, v), v in self.factors, size) for v in self.eqn.invars[1:]
        )
        table_shape, part_shape = aval(self.out).shape, aval(self.eqn.invars[1]).shape
        places = np.indices([part_shape[a] for a in self.indexed]).reshape(len(self.indexed), -1)
        along = []
        for a, place in zip(self.indexed, places, strict=True):
            start = jnp.clip(starts[a], 0, table_shape[a] - part_shape[a]).astype(jnp.int32)
            along.append(start[:, None] + place[None].astype(np.int32))
        values = part.transpose(0, *_shift(self.indexed), *_shift(self.window))
        values = values.reshape(values.shape[0], self.contributions, *self.sizes(self.window))
        values = values.astype(accumulation_dtype(values.dtype))
        return self.keys(along), values

    def sum(self, env: Env, w: Weights) -> jax.Array:
        keys, values = self.keys_and_values(env)
        return self.to_table(keys, weigh(values, w)[:, :, None])[0]


def _as_wide_index(index: jax.Array) -> jax.Array:
    """The index in a type that holds the number of rows."""
    return index.astype(jnp.promote_types(index.dtype, jnp.int32))


def _is_from_zero_to(last: int, index: jax.Array) -> jax.Array:
    return (index >= 0) & (index <= last)


def _shift(axes: Collection[int]) -> tuple[int, ...]:
    """The same axes, behind the example axis."""
    return tuple(int(a) + 1 for a in axes)


def _first_of_equals(keys: jax.Array) -> jax.Array:
    """For each entry of `keys` [N] the place of the first entry equal to it."""
    n = keys.shape[0]
    order = jnp.argsort(keys, stable=True)
    ordered = keys[order]
    new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    start = lax.cummax(jnp.where(new, jnp.arange(n), 0))
    return jnp.zeros(n, order.dtype).at[order].set(order[start])
