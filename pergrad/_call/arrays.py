"""A call as a function of the arrays among its arguments, for JAX's transformations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from pergrad._call.call import Call
from pergrad._call.request import Request

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The leaves of the arguments of a call. The leaves that are no arrays stay as they are."""

    request: Request
    leaves: Sequence[Any]
    tree: Any

    @staticmethod
    def of(call: Call) -> Arguments:
        leaves, tree = jax.tree.flatten((tuple(call.args), dict(call.kwargs)))
        return Arguments(call.request, leaves, tree)

    @property
    def arrays(self) -> list[Any]:
        """The arrays among the leaves."""
        return self.arrays_among(self.leaves)

    def arrays_among(self, items: Sequence[T]) -> list[T]:
        """Those of the items, one for each leaf, that belong to arrays."""
        return [item for item, leaf in zip(items, self.leaves, strict=True) if _is_array(leaf)]

    def call_with(self, arrays: Sequence[Any], *devices: Any) -> Call:
        """The same call with these arrays, on these devices."""
        own = iter(arrays)
        leaves = [next(own) if _is_array(leaf) else leaf for leaf in self.leaves]
        args, kwargs = self.tree.unflatten(leaves)
        return Call(self.request, args, kwargs, *devices)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))
