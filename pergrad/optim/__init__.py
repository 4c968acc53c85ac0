"""Optimizers on statistics of per-example gradients, made as optax makes them.

    tx = pg.optim.micro_adam(1e-3)
    stats_fn = pg.value_and_stats(loss, tx.stats)
    value, stats = stats_fn(params, batch)
    updates, state = tx.update(stats["mean"], state, params, stats=stats)

Adam and its relatives divide the momentum by a root. They are points on a plane of preconditioners
(`_preconditioner`, `_adam`), except for one that takes the root of its squared momentum
(`_squared_momentum`). Others take a sign: of every example, of the mean, or of the momentum (`_sign`).
Every optimizer can be clipped together with its statistics (`_clip`), and can take one step for several
batches (`_accumulate`). `from_stats` is for training loops that hand on a gradient and nothing else.
"""

from pergrad.optim._accumulate import MultiStepsState, multi_steps
from pergrad.optim._adam import micro_adam, micro_adam_msq, micro_adam_var, preconditioned_adam
from pergrad.optim._base import StatsTransformation, chain, from_stats
from pergrad.optim._clip import clip_examples, clipped
from pergrad.optim._preconditioner import ScaleByPreconditionerState, scale_by_preconditioner
from pergrad.optim._sign import ScaleBySignState, micro_sign_sgd, scale_by_sign, sign_ema, sign_sgd
from pergrad.optim._squared_momentum import (
    ScaleBySquaredMomentumState,
    ada_momentum,
    scale_by_squared_momentum,
)

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
    "from_stats",
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
