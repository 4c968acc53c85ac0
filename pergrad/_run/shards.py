"""Statistics of parameters that are divided among devices: each device keeps its own shard of them.

A tail makes the gradients of whole parameters, of this device's examples. As soon as it is reduced, the
devices add up its states, and each device keeps its shard of the sum
(`Strategy.reduce_on_devices`). So whole states exist for one tail at a time. A tail in a loop over
layers does that in every round. With several microbatches, the shards are merged with those of the
microbatches before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import primitives

from pergrad._compat import aval
from pergrad._cut import Cut, Tail
from pergrad._ir import Devices, Shard
from pergrad._run.states import Key, States
from pergrad._statistics import Accumulator, LeafStatistic


@dataclasses.dataclass(frozen=True)
class Shards:
    """How devices divide the parameters, and the gradients that tails make of them.

    `params` has the shards of all parameters that are divided, by the parameter's number. `grads` has
    that of the parameter's gradient where its tail stands, for all gradients that are divided there.
    `devices` are those that share the batch.
    """

    params: Mapping[int, Shard] = dataclasses.field(default_factory=dict)
    grads: Mapping[int, Shard] = dataclasses.field(default_factory=dict)
    devices: Devices = dataclasses.field(default_factory=Devices)

    @staticmethod
    def of(params: Sequence[Shard], cut: Cut, devices: Devices) -> Shards:
        """The shards of the gradients that the tails of `cut` make."""
        divided = [(param, tail) for tail in cut.all_tails() for param in tail.params]
        inside = {param: _inside(tail, param, params[param]) for param, tail in divided}
        return Shards(
            {param: shard for param, shard in enumerate(params) if not shard.is_whole},
            {param: shard for param, shard in inside.items() if shard is not None},
            devices,
        )

    def divides(self, param: int, statistic: LeafStatistic) -> bool:
        """Whether the state of the statistic is divided like the parameter."""
        is_able = isinstance(statistic, Accumulator) and statistic.can_be_divided
        return is_able and param in self.grads

    def like(self, param: int, statistic: LeafStatistic, grad: Any) -> Any:
        """The shape and dtype of that part of a gradient that the statistic's state is about."""
        if not self.divides(param, statistic):
            return grad
        return jax.ShapeDtypeStruct(self.grads[param].shape(grad.shape), grad.dtype)

    def of_state(self, key: Key) -> Shard | None:
        """How the state of a statistic is divided; None if it is not."""
        return self.grads[key[0]] if self.divides(*key) else None

    def inward(self, tail: Tail, param: int, direction: jax.Array) -> jax.Array:
        """The direction of a parameter, laid out like the gradient inside the loops of its tail.

        It is given as this device's shard, and stays one if the gradient is divided there.
        """
        shape = aval(tail.grads[tail.params.index(param)]).shape
        if param in self.grads:
            shape = self.grads[param].shape(shape)
        elif param in self.params:
            direction = self.params[param].gather(direction)
        return tail.inward(param, direction, shape) if tail.levels else direction

    def gathered(self, directions: States, tail: Tail) -> States:
        """What statistics of a tail need beside its gradients, with whole directions in place of shards.

        Several directions have one more axis in front.
        """
        own = directions.of(tail.params)
        divided = [key for key in own if key[0] in self.grads and key[1].takes_direction]
        return own | {key: self._gathered(tail, key[0], own[key]) for key in divided}

    def _gathered(self, tail: Tail, param: int, direction: jax.Array) -> jax.Array:
        gather = self.grads[param].gather
        one = aval(tail.grads[tail.params.index(param)])
        return (jax.vmap(gather) if direction.ndim > len(one.shape) else gather)(direction)


def _inside(tail: Tail, param: int, shard: Shard) -> Shard | None:
    """How a gradient is divided inside the loops of its tail; None if it is not.

    Inside a loop an array lacks the axis of the loop's rounds, which must not be divided. On the way out
    of a loop, entries may be transposed and cast.
    """
    if shard.is_whole:
        return None
    inside: Shard | None = shard
    for level in reversed(tail.levels):
        for eqn in reversed(level.ways[param][1]):
            if inside is None or eqn.primitive not in PASSED:
                return None
            if eqn.primitive is primitives.transpose_p:
                inside = inside.moved(lambda dim, eqn=eqn: eqn.params["permutation"][dim])
        inside = inside and inside.moved(lambda dim: dim - 1 if dim else None)
    return inside


# What may happen to the entries of a divided gradient on their way out of a loop.
PASSED = (primitives.transpose_p, primitives.convert_element_type_p)
