"""What an optimizer on statistics is: one like optax's, with a dictionary of the statistics it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pergrad._errors import ArgumentError
from pergrad._ir import accumulation_dtype
from pergrad._moments import asked
from pergrad._statistics import Statistic

Tree = Any
Number = Any  # a number, or an array of one under optax.inject_hyperparams
Start = Number | str | None  # where a moving average starts: "batch" is at the first batch
Mask = Tree | Callable[[Tree], Tree] | None


class StatsTransformation(optax.GradientTransformationExtraArgs):
    """A gradient transformation of optax that looks at statistics.

    `stats` is the dictionary to give to `pg.value_and_stats`; its results go to `update` as `stats=`:

        value, stats = pg.value_and_stats(loss, tx.stats)(params, batch)
        updates, state = tx.update(stats["mean"], state, params, stats=stats)

    It can be used wherever optax takes a transformation. The transformations that optax returns
    (`optax.chain`, `optax.masked`) have no `stats`: keep the `stats` of the one that was put in, or use
    `pergrad.optim.chain`.

    >>> pg.optim.micro_adam(1e-3)
    StatsTransformation(stats={'mean': Mean(), 'second_moment': Mean(square)})
    """

    stats: dict[str, Statistic]

    def __new__(cls, init: Any, update: Any, stats: Mapping[str, Statistic]) -> StatsTransformation:
        self = super().__new__(cls, init, update)
        self.stats = dict(stats)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stats={self.stats!r})"

    # Two transformations may differ in `stats` alone, as two of `clip_examples` with different norms do.
    # If comparisons left `stats` out, `jit` would take the two for the same static argument.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, StatsTransformation) and _parts(self) == _parts(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_parts(self))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.init, self.update, self.stats

    def __deepcopy__(self, memo: Any) -> StatsTransformation:
        return StatsTransformation(*self.__getnewargs__())  # a copy of jnp.square is not jnp.square


def _parts(tx: StatsTransformation) -> tuple[Any, ...]:
    return tx.init, tx.update, tuple(sorted(tx.stats.items(), key=lambda item: item[0]))


# JAX flattens a named tuple into its fields, and would put them together again without `stats`.
jax.tree_util.register_pytree_node(
    StatsTransformation,
    lambda tx: ((tx.init, tx.update), tuple(tx.stats.items())),
    lambda stats, functions: StatsTransformation(*functions, dict(stats)),
)


def chain(*transformations: optax.GradientTransformation) -> StatsTransformation:
    """`optax.chain`, with `stats` that hold the statistics of all its parts.

    >>> tx = pg.optim.chain(pg.optim.scale_by_sign(of="examples"), optax.scale(-1e-3))
    >>> tx.stats
    {'mean': Mean(), 'sign': Mean(sign)}
    """
    stats: dict[str, Statistic] = {}
    for transformation in transformations:
        for name, statistic in getattr(transformation, "stats", {}).items():
            if stats.setdefault(name, statistic) != statistic:
                raise ArgumentError(
                    f"chain: two parts mean different statistics by {name!r}: {stats[name]!r} and "
                    f"{statistic!r}."
                )
    return StatsTransformation(*optax.chain(*transformations), stats)


def from_stats(inner: optax.GradientTransformation) -> StatsTransformation:
    """`inner`, whose `update` takes the dictionary of statistics in the place of the gradient.

    It is for code that calls `tx.update(gradient, state, params)`, hands nothing else on, and cannot be
    changed. For Flax's `TrainState` there is `pergrad.linen.TrainState`.

    `inner` gets the statistics as `stats=` and their `mean` as the gradient. Its state is that of
    `inner`. Transformations of gradients cannot stand in front of it; put them into `inner`.

    >>> tx = pg.optim.from_stats(pg.optim.micro_adam(0.5))
    >>> stats = {"mean": jnp.array([3.0]), "second_moment": jnp.array([36.0])}
    >>> updates, state = tx.update(stats, tx.init(jnp.zeros(1)))
    >>> jnp.round(updates, 3)  # -0.5 * 3 / sqrt(36)
    Array([-0.25], dtype=float32)
    """
    extra = optax.with_extra_args_support(inner)

    def update(
        updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        if not isinstance(updates, Mapping) or "mean" not in updates:
            raise ArgumentError(
                "from_stats: update takes the dictionary of statistics, with a 'mean', in the place of "
                f"the gradient; not {jax.tree.structure(updates)}. Write\n"
                "    value, stats = pg.value_and_stats(loss, tx.stats)(params, batch)\n"
                "    updates, state = tx.update(stats, state, params)"
            )
        return extra.update(updates["mean"], state, params, **(extra_args | {"stats": updates}))

    return StatsTransformation(extra.init, update, asked("mean") | stats_of(inner))


def stats_of(inner: optax.GradientTransformation) -> dict[str, Statistic]:
    """The statistics that an optimizer needs; one of optax itself needs the mean."""
    return getattr(inner, "stats", asked("mean"))


def with_learning_rate(
    transformation: StatsTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Number,
    mask: Mask,
) -> StatsTransformation:
    """The optimizer: the transformation, decoupled weight decay if there is any, the learning rate."""
    decay = []
    if not is_number(weight_decay) or weight_decay != 0:
        decay = [optax.add_decayed_weights(weight_decay, mask)]
    return chain(transformation, *decay, optax.scale_by_learning_rate(learning_rate))


def is_number(x: Any) -> bool:
    """Whether a number is known when the optimizer is made."""
    return isinstance(x, (int, float))


def wide_zeros(params: Tree) -> Tree:
    """Zeros like the parameters, on the same devices, in the dtype that sums are kept in."""
    return jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=accumulation_dtype(jnp.result_type(p))), params
    )
