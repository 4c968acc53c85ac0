"""Adam at named points of the plane of preconditioners, with a learning rate and weight decay.

The signatures are written out, each, since `optax.inject_hyperparams` reads them.
"""

from __future__ import annotations

from typing import Any

import optax

from pergrad._statistics import Per
from pergrad.optim._base import Mask, Number, Start, StatsTransformation, with_learning_rate
from pergrad.optim._preconditioner import scale_by_preconditioner


def preconditioned_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    mean_square: Number = 1.0,
    variance: Number | str = "1/B",
    weight_decay: Number = 0.0,
    mask: Mask = None,
    nesterov: bool = False,
    initial_second_moment: Start = None,
    max_update: Number | None = None,
    floor: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Adam that divides by the root of an average of a mu^2 + b sigma^2, for any weights a and b.

    In every coordinate mu is the mean and sigma^2 the variance of the examples' gradients. By default a
    is 1 and b is 1/B, which is Adam. a is `mean_square` and b is `variance`. These points (a, b) are the
    plane of preconditioners. `micro_adam`, `micro_adam_var` and `micro_adam_msq` are points of it.
    `scale_by_preconditioner` describes the arguments that are not listed here.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: as in `optax.adamw`: times the learning rate and the parameter.
      mask: which parameters decay: a tree of booleans like the parameters, or a function that makes one
        from them.

    >>> tx = pg.optim.preconditioned_adam(1e-3, mean_square=1.0, variance=0.5)
    >>> tx.stats
    {'mean': Mean(), 'second_moment': Mean(square), 'count': Count()}
    """
    scaled = scale_by_preconditioner(
        b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype,
        mean_square=mean_square, variance=variance, nesterov=nesterov,
        initial_second_moment=initial_second_moment, max_update=max_update, floor=floor, per=per,
    )  # fmt: skip
    return with_learning_rate(scaled, learning_rate, weight_decay, mask)


def micro_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
    nesterov: bool = False,
    initial_second_moment: Start = None,
    max_update: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Adam with the mean of the examples' squared gradients in place of the square of their mean.

    The point (1, 1) of the plane: see `preconditioned_adam`. Its `nu` does not depend on the size of the
    batch. With `per=k` it is the mean of the squared means of k examples, as for Adam with batches of k.

    >>> pg.optim.micro_adam(1e-3).stats
    {'mean': Mean(), 'second_moment': Mean(square)}
    """
    return preconditioned_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, mean_square=1.0, variance=1.0,
        weight_decay=weight_decay, mask=mask, nesterov=nesterov,
        initial_second_moment=initial_second_moment, max_update=max_update, per=per,
    )  # fmt: skip


def micro_adam_var(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
    nesterov: bool = False,
    initial_second_moment: Start = None,
    max_update: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Adam with the variance of the examples' gradients in place of their squared mean.

    The point (0, 1) of the plane: see `preconditioned_adam`. Where all examples agree the variance is
    small and the step is large.

    >>> pg.optim.micro_adam_var(1e-3).stats
    {'mean': Mean(), 'second_moment': Mean(square), 'count': Count()}
    """
    return preconditioned_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, mean_square=0.0, variance=1.0,
        weight_decay=weight_decay, mask=mask, nesterov=nesterov,
        initial_second_moment=initial_second_moment, max_update=max_update, per=per,
    )  # fmt: skip


def micro_adam_msq(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    weight_decay: Number = 0.0,
    mask: Mask = None,
    nesterov: bool = False,
    initial_second_moment: Start = None,
    max_update: Number | None = None,
    floor: Number | None = None,
    per: Per = "example",
) -> StatsTransformation:
    """Adam with the squared mean gradient alone, without the noise of the batch.

    The point (1, 0) of the plane: see `preconditioned_adam`. The estimate of mu^2 is negative for many
    coordinates, also after averaging. It is then taken to be 0, and the update is EMA[gbar] / eps, which
    is far too large. Use `floor=1` or `max_update=1`.

    >>> pg.optim.micro_adam_msq(1e-3, floor=1).stats
    {'mean': Mean(), 'second_moment': Mean(square), 'count': Count()}
    """
    return preconditioned_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, mean_square=1.0, variance=0.0,
        weight_decay=weight_decay, mask=mask, nesterov=nesterov,
        initial_second_moment=initial_second_moment, max_update=max_update, floor=floor, per=per,
    )  # fmt: skip
