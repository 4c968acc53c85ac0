"""How an array is divided among the devices that share a batch, and how a shard of it is made.

A parameter that is divided along the axes of the batch (FSDP) has one shard on each device. All devices
need all of it where it is used, and each keeps its own shard of a sum over devices:

    gather   [d / n] on each of n devices  ->  [d], the same on all of them
    add      [d] on each of n devices      ->  [d / n], this device's shard of the sum.

`add` is the transpose of `gather`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from pergrad._ir.devices import Devices


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
    """The dimension `dim` of an array is divided along the mesh axes `axes`, into `number` parts."""

    dim: int
    axes: tuple[str, ...]
    number: int


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

    def gather(self, x: jax.Array) -> jax.Array:
        """The whole array, from every device's shard `x`."""
        for dim, axes, _ in self.divisions:
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
        return x

    def add(self, x: jax.Array) -> jax.Array:
        """This device's shard of the sum of the devices' whole arrays `x`."""
        for dim, axes, _ in self.divisions:
            x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        named = {axis for division in self.divisions for axis in division.axes}
        others = tuple(axis for axis in self.devices.axes if axis not in named)
        return lax.psum(x, others) if others else x

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
