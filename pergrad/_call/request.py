"""What the caller asks for: the options of `value_and_stats`, checked once, before any call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np

from pergrad._errors import ArgumentError
from pergrad._plan import Forced
from pergrad._statistics import LeafStatistic, SquaredNorm, Statistic
from pergrad._strategies import STRATEGIES

ArgNums = int | Sequence[int]


MicrobatchSize = int | Literal["auto"] | None


Nonfinite = Literal["keep", "drop"]


# Editors offer these names. Any other string must be a name with a number, such as `"streamed:8"`.
StrategyName = (
    Literal[
        "auto",
        "summed",
        "factored",
        "centred",
        "gram",
        "projected",
        "streamed",
        "sparse",
        "materialise",
    ]
    | str
)


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of `value_and_stats`, whose docstring explains them."""

    fun: Callable[..., Any]
    stats: Any
    argnums: ArgNums = 0
    _: dataclasses.KW_ONLY
    batch_argnums: ArgNums = 1
    has_aux: bool = False
    keep_batch_dim: bool = True
    rng_argnums: ArgNums = ()
    shared_argnums: ArgNums = ()
    microbatch_size: MicrobatchSize = None
    spmd_axis_name: str | Sequence[str] | None = None
    param_specs: Any = None
    strategy: StrategyName = "auto"
    nonfinite: Nonfinite = "keep"

    def __post_init__(self) -> None:
        if not callable(self.fun):
            raise ArgumentError(f"fun must be a function, not {self.fun!r}.")
        for name in ("argnums", "batch_argnums", "rng_argnums", "shared_argnums"):
            if not all(_is_int(n) for n in as_tuple(getattr(self, name))):
                raise ArgumentError(
                    f"{name} must be an int or a tuple of ints, not {getattr(self, name)!r}."
                )
        if not as_tuple(self.argnums):
            raise ArgumentError("argnums is empty: there is nothing to differentiate.")
        if not as_tuple(self.batch_argnums):
            raise ArgumentError("batch_argnums is empty: some argument must hold the examples.")
        self._check_statistics()
        size = self.microbatch_size
        if size is not None and size != "auto" and not (_is_int(size) and int(size) >= 1):
            raise ArgumentError(
                f"microbatch_size must be None, 'auto' or a number of at least 1, not {size!r}."
            )
        if self.spmd_axis_name is not None:
            if not self.axes or not all(isinstance(name, str) for name in self.axes):
                raise ArgumentError(
                    "spmd_axis_name must be None, the name of a mesh axis or several names, not "
                    f"{self.spmd_axis_name!r}."
                )
            if len(set(self.axes)) < len(self.axes):
                raise ArgumentError(f"spmd_axis_name={self.spmd_axis_name!r} names an axis twice.")
        elif self.param_specs is not None:
            raise ArgumentError(
                "param_specs says how parameters are sharded over the axes of the batch, which "
                "spmd_axis_name must name: spmd_axis_name='data'."
            )
        _as_forced(self.strategy)
        if self.nonfinite not in get_args(Nonfinite):
            raise ArgumentError(f"nonfinite must be 'keep' or 'drop', not {self.nonfinite!r}.")

    @property
    def forced(self) -> Forced:
        """The strategy that `strategy` names, and its number of examples at a time."""
        return _as_forced(self.strategy)

    @property
    def drops(self) -> bool:
        """Whether examples that are not finite are dropped."""
        return self.nonfinite == "drop"

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the batch is sharded."""
        return () if self.spmd_axis_name is None else as_tuple(self.spmd_axis_name)

    def _check_statistics(self) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(self.stats)
        if not leaves:
            raise ArgumentError("stats is empty: ask for something, for example {'mean': pg.Mean()}.")
        for path, leaf in leaves:
            if not isinstance(leaf, Statistic):
                where = f"stats{jax.tree_util.keystr(path)}"
                is_class = isinstance(leaf, type) and issubclass(leaf, Statistic)
                hint = f" Write pg.{leaf.__name__}(), with parentheses." if is_class else ""
                raise ArgumentError(
                    f"{where} must be a statistic such as pg.Mean(), not {leaf!r}.{hint}"
                )

    def wanted(self, path: str) -> list[LeafStatistic]:
        """The leaf statistics to compute for the parameter at `path`, without duplicates.

        If examples that are not finite are dropped, the norm of every parameter is needed.
        """
        leaves = [leaf for s in jax.tree.leaves(self.stats) for leaf in s.leaves(path)]
        return list(dict.fromkeys([SquaredNorm(), *leaves] if self.drops else leaves))


def takes_direction(stats: Any) -> bool:
    """Whether one of these statistics needs a direction from the caller."""
    return any(isinstance(s, Statistic) and s.takes_direction for s in jax.tree.leaves(stats))


def takes_max_norm(stats: Any) -> bool:
    """Whether one of these statistics needs a largest norm from the caller."""
    return any(isinstance(s, Statistic) and s.takes_max_norm for s in jax.tree.leaves(stats))


def _as_forced(strategy: str) -> Forced:
    name, colon, number = str(strategy).partition(":")
    asked = next((s for s in STRATEGIES if s.name == name), None)
    if strategy == "auto" or (asked is not None and not colon):
        return Forced(asked)
    if asked is not None and asked.takes_number and number.isdecimal() and int(number) >= 1:
        return Forced(asked, int(number))
    names = ["auto", *(s.name for s in STRATEGIES)]
    raise ArgumentError(
        f"strategy must be one of {', '.join(names)}, or 'streamed:4' for four examples at a time; not "
        f"{strategy!r}."
    )


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def as_tuple(numbers: Any) -> tuple[Any, ...]:
    """A tuple or list as a tuple, and anything else as a tuple of one."""
    return tuple(numbers) if isinstance(numbers, (tuple, list)) else (numbers,)
