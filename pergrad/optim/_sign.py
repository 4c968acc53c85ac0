"""Optimizers that take a sign: of every example's gradient, of their mean, or of the momentum.

    examples   update = EMA[mean_i sign(g_i)]
    mean       update = EMA[sign(gbar)]
    momentum   update = sign(EMA[gbar])

Let an example's gradient have the signal-to-noise ratio rho = mu / sigma in one coordinate. The mean of
a batch has the ratio sqrt(B) rho, and the momentum sqrt((1 + b1) / (1 - b1)) times that. A sign costs
least where there is least noise: the sign of a Gaussian gradient has the mean erf(rho / sqrt 2), which
is about 0.8 rho for a small rho. The first two updates shrink where signs disagree, so each placement
needs its own learning rate.
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
    """Signs with momentum.

    Args:
      b1: decay of the momentum; with 0 there is no momentum. It starts at 0 and is not corrected for
        that: unless `of` is `"momentum"`, the first update is 1 - b1 times a sign or a mean of signs.
      mu_dtype: the dtype of the momentum, by default that of the parameters.
      of: what the sign is taken of, `"examples"`, `"mean"` or `"momentum"`. `"examples"` needs the
        statistics `mean` and `sign`, the others need the mean alone.
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
    """The momentum of the mean of the signs of all examples' gradients: see `scale_by_sign`.

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
    """The momentum of the sign of the mean gradient: see `scale_by_sign`.

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
