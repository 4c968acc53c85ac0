"""A scatter-add at places that differ from example to example: the gradient of a lookup.

For one example with N lookups of rows k_1, ..., k_N of a table and their cotangents U_1, ..., U_N,

    g[k] = sum over n with k_n = k of U_n,

so that at most N rows of g are not zero. `Rows` has the gradient in that form: as many rows as there are
lookups. The first of the rows with the same k has the sum of their cotangents, and the others are zero.
An elementwise statistic that starts from these rows costs N rows per example, and never a table.
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
    """The rows of the gradients of B examples that are not zero, for N lookups in each example.

    `keys` [B, N] are the places of the rows in the table, counted through the table's indexed axes. A
    lookup outside the table has the number of rows of the table as its key. `values` [B, N, ...] are the
    rows. `first` [B, N] says whether a row is the first of its example with its key. Such a row has the
    sum over all lookups with this key, and the other rows with this key are zero.
    """

    keys: jax.Array
    values: jax.Array
    first: jax.Array

    @staticmethod
    def of(keys: jax.Array, values: jax.Array) -> Rows:
        """The rows of lookups with keys [B, N] and values [B, N, ...]. Values of equal keys add up."""
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
        """The axes of the table that an index selects from; the other axes make up a row."""

    @abc.abstractmethod
    def why_not_rows(self) -> str | None:
        """Why the term cannot be written as `Rows`, or None if it can."""

    @abc.abstractmethod
    def keys_and_values(self, env: Env) -> tuple[jax.Array, jax.Array]:
        """The keys [B, N] and the cotangents [B, N, row] of all lookups.

        The cotangents of equal keys are not added up yet. The cotangent of a lookup outside the table
        belongs to no row, so it is 0 here, even if it is not finite in the program.
        """

    @property
    def window(self) -> tuple[int, ...]:
        """The axes of the table that make up a row."""
        return tuple(a for a in range(len(aval(self.out).shape)) if a not in self.indexed)

    @property
    def table(self) -> int:
        """How many rows the table has."""
        return math.prod(self.sizes(self.indexed))

    @property
    def alike(self) -> tuple[Any, ...]:
        """A description of the table. Rows of two tables may be mixed if it is equal for both."""
        table = aval(self.out)
        return table.shape, self.indexed, accumulation_dtype(table.dtype)

    def sizes(self, axes: Collection[int]) -> tuple[int, ...]:
        """The sizes of these axes of the table."""
        return tuple(aval(self.out).shape[a] for a in axes)

    def split(self, env: Env) -> list[jax.Array]:
        keys, values = self.keys_and_values(env)
        return [keys, values]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        key, value = parts
        return self.to_table(key[None, None], value[None, None])

    def to_table(self, keys: jax.Array, values: jax.Array, rows: int | None = None) -> jax.Array:
        """A table, shaped like the term, in which `values` [B, N, row] add up at their keys [B, N].

        If there is one indexed axis, the table may have another number of `rows` along it.
        """
        size, n, *row = values.shape
        sizes = self.sizes(self.indexed) if rows is None else (rows,)
        table = jnp.zeros((math.prod(sizes), *row), values.dtype)
        table = table.at[keys.reshape(-1)].add(values.reshape(size * n, *row), mode="drop")
        table = table.reshape(*sizes, *row)
        return table.transpose(np.argsort([*self.indexed, *self.window]))

    def at(self, table: jax.Array, keys: jax.Array) -> jax.Array:
        """The rows [B, N, row] that `table`, an array shaped like the term, has at these keys [B, N].

        If there is one indexed axis, the table may have another number of rows along it.
        """
        table = table.transpose(*self.indexed, *self.window)
        rows = math.prod(table.shape[: len(self.indexed)])
        table = table.reshape(rows, *self.sizes(self.window))
        return table.at[keys].get(mode="fill", fill_value=0)

    def keys(self, indices: Sequence[jax.Array]) -> jax.Array:
        """The key of every lookup, from an array of indices for each of the indexed axes."""
        keys, inside = jnp.zeros((), jnp.int32), jnp.ones((), bool)
        for index, size in zip(indices, self.sizes(self.indexed), strict=True):
            keys = keys * size + index.astype(jnp.int32)
            inside = inside & _is_from_zero_to(size - 1, index)
        return jnp.where(inside, keys, self.table)


@dataclasses.dataclass(frozen=True)
class Scatter(Lookup):
    """A `scatter-add`, the derivative of indexing, `take` and `take_along_axis`."""

    @property
    def kind(self) -> str:
        return "scatter"

    @staticmethod
    def match(
        eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]
    ) -> Scatter | None:
        """The term, if the indices vary and the updates are added to zeros."""
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
        # A contribution has all lookups of its example, with the cotangents of all but one set to 0.
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
        # The examples are one more axis of lookups. For inner products the sum is differentiated by the
        # weights of the examples. The derivative multiplies the updates that are dropped by 0, so they
        # have to be finite.
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
        """Whether an index out of range means the nearest row; if not, it means no row at all."""
        return self.eqn.params["mode"] == lax.GatherScatterMode.CLIP

    @property
    def _mode(self) -> lax.GatherScatterMode:
        """A mode that does what the equation's mode does, and whose transpose in JAX does so, too."""
        modes = lax.GatherScatterMode
        return modes.CLIP if self._clips else modes.FILL_OR_DROP

    def _without_dropped(self, indices: jax.Array, updates: jax.Array) -> jax.Array:
        """The updates [B, ...], with 0 for those that the scatter drops, even if they are not finite."""
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
        """The indices and the updates, both [B, ...], with the updates in float32 at least."""
        _, indices, updates = (read(env, v) for v in self.eqn.invars)
        updates = with_example_axis(updates, self.eqn.invars[2] in self.factors, len(indices))
        return indices, updates.astype(accumulation_dtype(aval(self.out).dtype))


@dataclasses.dataclass(frozen=True)
class Slice(Lookup):
    """A `dynamic_update_slice` onto zeros, the derivative of `dynamic_slice`.

    It is a lookup of neighbouring rows.
    """

    @property
    def kind(self) -> str:
        return "slice"

    @staticmethod
    def match(eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]) -> Slice | None:
        """The term, if the place of the slice varies and the slice is written onto zeros."""
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
        return self.to_table(keys, weigh(values, w))


def _as_wide_index(index: jax.Array) -> jax.Array:
    """The index in an integer type that can hold the number of rows."""
    return index.astype(jnp.promote_types(index.dtype, jnp.int32))


def _is_from_zero_to(last: int, index: jax.Array) -> jax.Array:
    return (index >= 0) & (index <= last)


def _shift(axes: Collection[int]) -> tuple[int, ...]:
    """The numbers that these axes have when an example axis is put in front."""
    return tuple(int(a) + 1 for a in axes)


def _first_of_equals(keys: jax.Array) -> jax.Array:
    """For each entry of `keys` [N], the place of the first entry that is equal to it."""
    n = keys.shape[0]
    order = jnp.argsort(keys, stable=True)
    ordered = keys[order]
    new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    start = lax.cummax(jnp.where(new, jnp.arange(n), 0))
    return jnp.zeros(n, order.dtype).at[order].set(order[start])
