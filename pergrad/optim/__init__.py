"""Optimizers on statistics of per-example gradients, made as optax makes them.

    tx = pg.optim.micro_adam(1e-3)
    stats_fn = pg.value_and_stats(loss, tx.stats)
    value, stats = stats_fn(params, batch)
    updates, state = tx.update(stats["mean"], state, params, stats=stats)

Adam's family is a plane of preconditioners (`_preconditioner`), the sign's is a choice of where to take
it (`_sign`). Both can be clipped together with their statistics (`_clip`), and take one step for many
batches (`_accumulate`).
"""

from pergrad.optim._accumulate import MultiStepsState, multi_steps
from pergrad.optim._base import StatsTransformation, chain
from pergrad.optim._clip import clip_examples, clipped
from pergrad.optim._preconditioner import (
    ScaleByPreconditionerState,
    ScaleBySquaredMomentumState,
    ada_momentum,
    micro_adam,
    micro_adam_msq,
    micro_adam_var,
    preconditioned_adam,
    scale_by_preconditioner,
    scale_by_squared_momentum,
)
from pergrad.optim._sign import ScaleBySignState, micro_sign_sgd, scale_by_sign, sign_ema, sign_sgd

__all__ = [
    "MultiStepsState",
    "ScaleByPreconditionerState",
    "ScaleBySignState",
    "ScaleBySquaredMomentumState",
    "StatsTransformation",
    "ada_momentum",
    "chain",
    "clip_examples",
    "clipped",
    "micro_adam",
    "micro_adam_msq",
    "micro_adam_var",
    "micro_sign_sgd",
    "multi_steps",
    "preconditioned_adam",
    "scale_by_preconditioner",
    "scale_by_sign",
    "scale_by_squared_momentum",
    "sign_ema",
    "sign_sgd",
]
