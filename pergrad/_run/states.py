"""What is known of each parameter and statistic while a plan runs, and when it has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from pergrad._statistics import LeafStatistic

Key = tuple[int, LeafStatistic]  # the number of the parameter, and the statistic


@jax.tree_util.register_pytree_node_class
class States(Mapping[Key, Any]):
    """A mapping from (parameter, statistic) to what there is of it.

    For an accumulator that is its state, and for any other statistic its value, with an example axis in
    front where there are several examples. A tail inside of loops has a state, or a value for each
    example, for every round of the loops. To JAX it is a tree of these.
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
        """The entries of some parameters and statistics."""
        return States({key: x for key, x in self.items() if is_kept(*key)})

    @property
    def accumulators(self) -> States:
        """The states of accumulators, which have no example axis."""
        return self.where(lambda _, statistic: statistic.accumulates)

    @property
    def per_example(self) -> States:
        """The values of all other statistics, which belong to single examples."""
        return self.where(lambda _, statistic: not statistic.accumulates)

    def of(self, params: tuple[int, ...]) -> States:
        """The entries of these parameters."""
        return self.where(lambda param, _: param in params)

    def tree_flatten(self) -> tuple[list[Any], tuple[Key, ...]]:
        return list(self._entries.values()), tuple(self._entries)

    @classmethod
    def tree_unflatten(cls, keys: tuple[Key, ...], values: list[Any]) -> States:
        return cls(dict(zip(keys, values, strict=True)))
