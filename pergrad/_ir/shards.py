"""How an array is divided among the devices that share a batch, and how a shard of it is made.

A parameter that is divided along the axes of the batch (FSDP) has one shard on each device. All devices
need all of it where it is used, and each keeps its own shard of a sum over devices:

    gather   [d / n] on each of n devices  ->  [d], the same on all of them
    add      [d] on each of n devices      ->  [d / n], this device's shard of the sum.

`add` is the transpose of `gather`. If each device needs its shard of every device's array, and not of
the sum, they exchange them:

    exchange [d] on each of n devices      ->  [n, d / n].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._ir.devices import Devices

# An array of more entries than this is exchanged in pieces, of at most so many entries. For smaller
# arrays the time that each piece takes to begin would cost more than their memory is worth. The pieces
# of a table are larger, because all lookups are made again for each of them.
LARGEST = 2**25
LARGEST_PIECE = 2**22
LARGEST_PIECE_OF_TABLE = 2**24


def number_of_pieces(shape: Sequence[int], length: int, *, of_table: bool = False) -> int:
    """Into how many pieces of the same length an array is cut, if it is large.

    A part of the array, of which each device has one, has the length `length` along the axis that is
    cut. Every piece has entries of all parts.
    """
    entries = math.prod(shape)
    least = -(-entries // (LARGEST_PIECE_OF_TABLE if of_table else LARGEST_PIECE))
    numbers = (k for k in range(least, 16 * least) if length % k == 0)
    return next(numbers, 1) if entries > LARGEST else 1


def names_in(entry: Any) -> tuple[str, ...]:
    """The names of mesh axes in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple) else ()


def without_axes(spec: Any, axes: Collection[str]) -> list[Any]:
    """The entries of a `PartitionSpec`, without these mesh axes."""

    def kept(entry: Any) -> Any:
        names = names_in(entry)
        return (tuple(name for name in names if name not in axes) or None) if names else entry

    return [kept(entry) for entry in spec]


class Division(NamedTuple):
    """The dimension `dim` of an array is divided along the mesh axes `axes`, into `number` parts.

    Devices add up and gather along one mesh axis after the other. Along an axis that is a ring of chips
    a TPU scatters what it adds up. Along several axes at once, its compiler first makes the whole sum on
    every chip, and it gathers along three axes by adding up whole arrays.
    """

    dim: int
    axes: tuple[str, ...]
    number: int

    def gather(self, x: jax.Array) -> jax.Array:
        """The whole array, from every device's part `x`."""
        for axis in reversed(self.axes):
            x = lax.all_gather(x, axis, axis=self.dim, tiled=True)
        return x

    def add(self, x: jax.Array) -> jax.Array:
        """This device's part of the sum of the devices' whole arrays `x`."""
        for axis in self.axes:
            x = lax.psum_scatter(x, axis, scatter_dimension=self.dim, tiled=True)
        return x

    def exchange(self, x: jax.Array) -> jax.Array:
        """This device's part of every device's whole array `x`, one behind the other: [number, ...]."""
        return lax.all_to_all(x[None], self.axes, split_axis=self.dim + 1, concat_axis=0, tiled=True)

    def in_pieces(
        self, of_piece: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array
    ) -> tuple[jax.Array, ...]:
        """What `of_piece` makes of whole arrays, which is this device's part of each result.

        Large arrays are handed over in pieces, one after the other, so that `of_piece` needs memory for
        one piece. With n parts of d columns, a piece has some of the d columns of every part.
        """
        shape = arrays[0].shape
        before, own, after = shape[: self.dim], shape[self.dim] // self.number, shape[self.dim + 1 :]
        number = number_of_pieces(shape, own)
        if number == 1:
            return of_piece(*arrays)
        length = own // number

        def piece(k: jax.Array) -> tuple[jax.Array, ...]:
            parts = (x.reshape(*before, self.number, own, *after) for x in arrays)
            cut = (lax.dynamic_slice_in_dim(x, k * length, length, self.dim + 1) for x in parts)
            return of_piece(*(x.reshape(*before, self.number * length, *after) for x in cut))

        return tuple(self.joined(x) for x in lax.map(piece, jnp.arange(number)))

    def joined(self, pieces: jax.Array) -> jax.Array:
        """This device's part of an array, from its parts [number, ...] of the pieces of the array."""
        x = jnp.moveaxis(pieces, 0, self.dim)
        return x.reshape(*x.shape[: self.dim], -1, *x.shape[self.dim + 2 :])

    def places(self, rows: jax.Array, length: int, number: int, k: jax.Array) -> jax.Array:
        """The places of rows in piece k of `number` pieces of a table, whose parts have `length` rows.

        The table is divided along its rows. Row i is row r = i mod d of part i // d of d rows, and piece
        k has the rows k l, ..., k l + l - 1 of every part, with l = d / number. A row that is in another
        piece, or that the table does not have, has the number of rows of the piece for its place.
        """
        own, r = length // number, rows % length
        is_here = (rows >= 0) & (rows < self.number * length) & (r // own == k)
        return jnp.where(is_here, rows // length * own + r % own, self.number * own)


@dataclasses.dataclass(frozen=True)
class Shard:
    """How an array is divided among `devices`: along each of the `divisions`. Without any it is whole.

    The devices along axes that no division names have the same shard.
    """

    devices: Devices = dataclasses.field(default_factory=Devices)
    divisions: tuple[Division, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every device has all of the array."""
        return not self.divisions

    @property
    def others(self) -> Devices:
        """The devices that have the same shard: those along axes that no division names."""
        named = {axis for division in self.divisions for axis in division.axes}
        number = self.devices.number // math.prod(division.number for division in self.divisions)
        return Devices(tuple(axis for axis in self.devices.axes if axis not in named), number)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of a shard of an array with the shape `whole`."""
        own = list(whole)
        for dim, _, number in self.divisions:
            own[dim] //= number
        return tuple(own)

    def whole_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of an array whose shards have the shape `own`."""
        whole = list(own)
        for dim, _, number in self.divisions:
            whole[dim] *= number
        return tuple(whole)

    def number_along(self, dim: int) -> int:
        """Into how many parts the dimension `dim` is divided."""
        return math.prod(division.number for division in self.divisions if division.dim == dim)

    def gather(self, x: jax.Array) -> jax.Array:
        """The whole array, from every device's shard `x`."""
        for division in self.divisions:
            x = division.gather(x)
        return x

    def add(self, x: jax.Array) -> jax.Array:
        """This device's shard of the sum of the devices' whole arrays `x`."""
        for division in self.divisions:
            x = division.add(x)
        return self.others.add(x)

    def moved(self, place: Callable[[int], int | None]) -> Shard | None:
        """The same division of an array whose dimension `place(dim)` is the dimension `dim` of this.

        None if there is no such dimension for one that is divided.
        """
        places = [place(division.dim) for division in self.divisions]
        found = [dim for dim in places if dim is not None]
        if len(found) < len(places):
            return None
        pairs = zip(self.divisions, found, strict=True)
        return Shard(self.devices, tuple(division._replace(dim=dim) for division, dim in pairs))
