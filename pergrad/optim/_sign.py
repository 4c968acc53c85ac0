"""Where the sign goes: of every example, of their mean, or of the momentum.

    examples   update = EMA[mean_i sign(g_i)]
    mean       update = EMA[sign(gbar)]
    momentum   update = sign(EMA[gbar])

For one coordinate with the signal-to-noise ratio rho = mu / sigma of an example, the mean of a batch has
sqrt(B) rho and its momentum sqrt((1 + b1) / (1 - b1)) times that. A sign costs least where there is
least noise: of one Gaussian gradient it keeps erf(rho / sqrt 2), about 0.8 rho. The first two updates
shrink where signs disagree, so each placement wants its own learning rate.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from pergrad._errors import ArgumentError
from pergrad._moments import asked
from pergrad.optim._base import Mask, Number, StatsTransformation, Tree, with_learning_rate
from pergrad.optim._found import found

Placement = Literal["examples", "mean", "momentum"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


class ScaleBySignState(NamedTuple):
    mu: Tree


def scale_by_sign(
    b1: Number = 0.9, mu_dtype: Any = None, *, of: Placement = "momentum"
) -> StatsTransformation:
    """Signs with momentum; `of` says of what: `"examples"`, `"mean"` or `"momentum"`.

    Args:
      b1: decay of the momentum, which starts at 0 and is not corrected for it: the first update of the
        first two is 1 - b1 times a sign. With 0 there is no momentum.
      mu_dtype: the dtype of the momentum, by default that of the parameters.
      of: what the sign is taken of. `"examples"` needs the statistics `mean` and `sign`, the others the
        mean alone.
    """
    who = "scale_by_sign"
    if of not in PLACEMENTS:
        raise ArgumentError(f"{who}: of must be one of {PLACEMENTS}, not {of!r}.")

    def init(params: Tree) -> ScaleBySignState:
        return ScaleBySignState(mu=optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(
        updates: Tree, state: Any, params: Tree | None = None, *, stats: Any = None, **extra_args: Any
    ) -> tuple[Tree, ScaleBySignState]:
        del params, extra_args
        now = updates
        if of == "examples":
            now = found(who, "sign", stats, updates)
        elif of == "mean":
            now = jax.tree.map(jnp.sign, updates)
        mu = optax.tree.update_moment(now, state.mu, b1, 1)
        out = jax.tree.map(jnp.sign, mu) if of == "momentum" else mu
        out = jax.tree.map(lambda g, x: x.astype(g.dtype), updates, out)
        return out, ScaleBySignState(optax.tree.cast_like(mu, state.mu))

    return StatsTransformation(
        init, update, asked("mean", "sign") if of == "examples" else asked("mean")
    )


def micro_sign_sgd(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
) -> StatsTransformation:
    """The sign of every example's gradient, their mean, its momentum: see `scale_by_sign`.

    `weight_decay` and `mask` are those of `preconditioned_adam`.

    >>> pg.optim.micro_sign_sgd(1e-3).stats
    {'mean': Mean(), 'sign': Mean(sign)}
    """
    return with_learning_rate(
        scale_by_sign(b1, mu_dtype, of="examples"), learning_rate, weight_decay, mask
    )


def sign_sgd(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
) -> StatsTransformation:
    """The sign of the mean gradient, and its momentum: see `scale_by_sign`.

    With `b1=0` it is `optax.sign_sgd`. `weight_decay` and `mask` are those of `preconditioned_adam`.

    >>> pg.optim.sign_sgd(1e-3).stats
    {'mean': Mean()}
    """
    return with_learning_rate(scale_by_sign(b1, mu_dtype, of="mean"), learning_rate, weight_decay, mask)


def sign_ema(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
) -> StatsTransformation:
    """The sign of the momentum: see `scale_by_sign`. Without weight decay it is `optax.signum`.

    `weight_decay` and `mask` are those of `preconditioned_adam`.

    >>> pg.optim.sign_ema(1e-3).stats
    {'mean': Mean()}
    """
    return with_learning_rate(
        scale_by_sign(b1, mu_dtype, of="momentum"), learning_rate, weight_decay, mask
    )
