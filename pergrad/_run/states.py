"""The states of accumulators and the values of other statistics, for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from pergrad._statistics import LeafStatistic

Key = tuple[int, LeafStatistic]  # the number of the parameter, and the statistic


@jax.tree_util.register_pytree_node_class
class States(Mapping[Key, Any]):
    """A mapping from a parameter and a statistic to the state or the value of the statistic.

    An accumulator has a state, and any other statistic has a value, with an example axis in front unless
    a single example runs without one. If the tail of the parameter stands in loops, there is a state or
    a value for every round of the loops. To JAX the mapping is a tree whose leaves are these arrays.
    """

    def __init__(self, entries: Mapping[Key, Any] | None = None) -> None:
        self._entries = dict(entries or {})

    def __getitem__(self, key: Key) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __or__(self, other: Mapping[Key, Any]) -> States:
        return States(self._entries | dict(other))

    def where(self, is_kept: Callable[[int, LeafStatistic], bool]) -> States:
        """The entries whose parameter and statistic the predicate `is_kept` accepts."""
        return States({key: x for key, x in self.items() if is_kept(*key)})

    @property
    def accumulators(self) -> States:
        """The states of accumulators, which have no example axis."""
        return self.where(lambda _, statistic: statistic.accumulates)

    @property
    def per_example(self) -> States:
        """The per-example values of all statistics that are not accumulators."""
        return self.where(lambda _, statistic: not statistic.accumulates)

    def of(self, params: tuple[int, ...]) -> States:
        """The entries of these parameters."""
        return self.where(lambda param, _: param in params)

    def tree_flatten(self) -> tuple[list[Any], tuple[Key, ...]]:
        """The entries and the keys, as JAX asks for them."""
        return list(self._entries.values()), tuple(self._entries)

    @classmethod
    def tree_unflatten(cls, keys: tuple[Key, ...], values: list[Any]) -> States:
        """The mapping from these keys to these entries."""
        return cls(dict(zip(keys, values, strict=True)))
