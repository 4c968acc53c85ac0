"""The results of a call, made from the final states and values of all statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pergrad._compat import Atom, aval
from pergrad._cut import FactorPair, Tail, units_per_example
from pergrad._ir import Devices, accumulation_dtype
from pergrad._run import Shards, States
from pergrad._statistics import Accumulator, LeafStatistic, Quantity, Source, Statistic


@dataclasses.dataclass(frozen=True)
class Results:
    """What a call knows of its examples at the end. Statistics make their results from it (`Seen`).

    `tails` has the tail of each parameter by the parameter's number. `pairs` has the factors of the
    parameters whose factors were asked for. `shards` says how `devices` divide the parameters.
    """

    losses: jax.Array
    count: jax.Array
    states: States
    pairs: Mapping[int, FactorPair | None]
    tails: Mapping[int, Tail]
    grads: Sequence[Atom]
    paths: Sequence[str]
    like_params: Callable[[Sequence[Any]], Any]
    devices: Devices
    shards: Shards

    def leaves_of(self, statistic: Statistic) -> list[Any]:
        """For each parameter the result of the statistic's last leaf, or None if there is no leaf."""
        own = (statistic.leaves(path) for path in self.paths)
        return [self._of(leaves[-1], param) if leaves else None for param, leaves in enumerate(own)]

    def _of(self, statistic: LeafStatistic, param: int) -> Any:
        if statistic.quantity is Quantity.FACTORS:
            return self.pairs[param]
        tail, like = self.tails[param], aval(self.grads[param])
        if self.devices.axes:  # the sum of all parts is rounded, not the parts
            like = jax.ShapeDtypeStruct(like.shape, accumulation_dtype(like.dtype))
        of_each = units_per_example(tail, tail.params.index(param), statistic.unit)
        source = Source(
            like=self.shards.like(param, statistic, like),
            units=self.count if of_each == 1 else self.count * of_each,
            loops=len(tail.levels),
            outward=lambda x: tail.outward(param, x),
        )
        result = statistic.read_out(self.states[param, statistic], source)
        return self._part(statistic, param, result) if isinstance(statistic, Accumulator) else result

    def _part(self, statistic: Accumulator, param: int, result: Any) -> Any:
        """This device's part of a result, or its shard if the result is like a divided parameter."""
        if not self.devices.axes or self.shards.divides(param, statistic):
            return result
        part = statistic.as_part(result, self.devices)
        if param not in self.shards.params:
            return part
        shard, whole = self.shards.params[param], aval(self.grads[param]).shape
        return jax.tree.map(lambda x: shard.add(x) if x.shape == whole else x, part)
