"""From a configuration to an optimizer with the learning rate 1.

The training loop multiplies its updates by the learning rate of the step. So runs that differ in the
learning rate alone are the same program, which is compiled once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pergrad as pg
from pergrad import optim
from pergrad.lab.config import Train
from pergrad.lab.errors import LabError
from pergrad.lab.run import rivals


def make(config: Train) -> optim.StatsTransformation:
    """The optimizer, with updates for a learning rate of 1."""
    decay: dict[str, Any] = {"weight_decay": config.weight_decay, "mask": _matrices}
    adam = {"b1": config.b1, "b2": config.b2, "eps": config.eps, "max_update": config.max_update} | decay
    match config.optimizer:
        case "adam":
            start = "batch" if config.start_at_batch else None
            tx = optim.preconditioned_adam(1.0, initial_second_moment=start, **adam)
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
            if config.mean_signs:
                tx = _signs_of_means(tx, config.mean_signs.split(","))
        case "sign_sgd":
            tx = optim.sign_sgd(1.0, config.b1, **decay)
        case "sign_ema":
            tx = optim.sign_ema(1.0, config.b1, **decay)
        case "share_adam" | "shrunk_adam" | "corrected_adam":
            tx = _rival(config)
    if config.clip is None:
        return tx
    if config.clip_by == "quantile":
        tx = optim.clip_examples(tx, None)
        return optim.StatsTransformation(tx.init, tx.update, {**tx.stats, "norm": pg.Norm("all")})
    clip = optim.clipped if config.clip_by == "batch" else optim.clip_examples
    return clip(tx, config.clip)


def _rival(config: Train) -> optim.StatsTransformation:
    for name in ("weight_decay", "max_update", "clip"):
        if getattr(config, name):
            raise LabError(f"{config.optimizer} has no {name}: leave it out.")
    options = config.b1, config.b2, config.eps
    if config.optimizer == "corrected_adam":
        return rivals.corrected_adam(*options, config.batch_size)
    return (rivals.share_adam if config.optimizer == "share_adam" else rivals.shrunk_adam)(*options)


def learning_rate(config: Train, step: int) -> float:
    """The learning rate of step `step`, from 0: a linear rise, then a fall along a cosine to zero.

    With the schedule `constant` it does not fall.
    """
    warm = round(config.warmup * config.steps)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    if config.schedule == "constant":
        return config.learning_rate
    return (
        config.learning_rate
        * 0.5
        * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))
    )


def _signs_of_means(tx: optim.StatsTransformation, names: Sequence[str]) -> optim.StatsTransformation:
    """In the layers of these names the optimizer is given sign(mean g) in place of mean sign(g)."""

    def init(params: Any) -> Any:
        if unknown := {*names} - names_of(params):
            raise LabError(f"mean_signs: the model has no layer {', '.join(sorted(unknown))}.")
        return tx.init(params)

    def update(updates: Any, state: Any, params: Any = None, *, stats: Any, **extra: Any) -> Any:
        def of(path: Any, mean: jax.Array, sign: jax.Array) -> jax.Array:
            return jnp.sign(mean) if _on(path) & {*names} else sign

        signs = jax.tree_util.tree_map_with_path(of, stats["mean"], stats["sign"])
        return tx.update(updates, state, params, stats=stats | {"sign": signs}, **extra)

    return optim.StatsTransformation(init, update, tx.stats)


def names_of(params: Any) -> set[str]:
    """All names on the paths of parameters: those of layers, and of what they hold."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(params))
    return {name for path in paths for name in _on(path)}


def _on(path: Any) -> set[str]:
    return {*re.findall(r"\w+", jax.tree_util.keystr(path))}


def _matrices(params: Any) -> Any:
    """The mask of weight decay: matrices and kernels have it, the scales and biases of norms do not."""
    return jax.tree.map(lambda p: p.ndim > 1, params)
