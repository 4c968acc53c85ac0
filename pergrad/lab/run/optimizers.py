"""From a configuration to an optimizer with the learning rate 1.

The training loop multiplies its updates by the learning rate of the step. So runs that differ in the
learning rate alone are the same program, which is compiled once.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from pergrad import optim
from pergrad.lab.config import Train


def make(config: Train) -> optim.StatsTransformation:
    """The optimizer, with updates for a learning rate of 1."""
    decay: dict[str, Any] = {"weight_decay": config.weight_decay, "mask": _matrices}
    adam = {"b1": config.b1, "b2": config.b2, "eps": config.eps, "max_update": config.max_update} | decay
    match config.optimizer:
        case "adam":
            tx = optim.preconditioned_adam(1.0, **adam)
        case "micro_adam":
            tx = optim.micro_adam(1.0, **adam)
        case "micro_adam_var":
            tx = optim.micro_adam_var(1.0, **adam)
        case "micro_adam_msq":
            tx = optim.micro_adam_msq(1.0, floor=config.floor, **adam)
        case "preconditioned_adam":
            plane = {"mean_square": config.mean_square, "variance": config.variance}
            tx = optim.preconditioned_adam(1.0, floor=config.floor, **plane, **adam)
        case "ada_momentum":
            tx = optim.ada_momentum(1.0, config.b1, config.b2, **decay)
        case "micro_sign_sgd":
            tx = optim.micro_sign_sgd(1.0, config.b1, **decay)
        case "sign_sgd":
            tx = optim.sign_sgd(1.0, config.b1, **decay)
        case "sign_ema":
            tx = optim.sign_ema(1.0, config.b1, **decay)
    if config.clip is None:
        return tx
    clip = optim.clipped if config.clip_by == "batch" else optim.clip_examples
    return clip(tx, config.clip)


def learning_rate(config: Train, step: int) -> float:
    """The learning rate of step `step`, from 0: a linear rise, then a fall along a cosine to zero."""
    warm = round(config.warmup * config.steps)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    return (
        config.learning_rate
        * 0.5
        * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))
    )


def _matrices(params: Any) -> Any:
    """The mask of weight decay: matrices and kernels have it, the scales and biases of norms do not."""
    return jax.tree.map(lambda p: p.ndim > 1, params)
