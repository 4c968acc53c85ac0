"""The same statistics, asked for in every way there is.

A task is a group of statistics. A candidate for it is a function of a loss's parameters and batch that
returns the mean loss and the statistics. The name of a candidate that takes a few examples at a time has
their number in it: `optax micro_grad, microbatch 4`.

Two candidates compute the mean gradient alone, which everybody pays for anyway. The first candidate is
the floor, the gradient of the whole batch at once. The second one adds up the gradients of microbatches;
at its best size it is what a user has who has tuned the batch to the machine.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import pergrad as pg
from pergrad.lab import floor
from pergrad.lab.config import TaskName

FLOOR = "jax.value_and_grad"
ACCUMULATED = "accumulated grad"
FLOORS = (FLOOR, ACCUMULATED)  # they return the mean gradient and no other statistic
VMAP = "vmap(grad)"
MICRO_GRAD = "optax micro_grad"
JAX_PRIVACY = "jax_privacy"
PERGRAD = "pergrad"
MICROBATCH = ", microbatch "
AUTO = f"{PERGRAD}{MICROBATCH}auto"
# Candidates that need a microbatch size. The fastest size is searched for.
SIZED = (ACCUMULATED, MICRO_GRAD, JAX_PRIVACY)
MAX_NORM = 1.0

Tree = Any
Loss = Callable[[Tree, Any], jax.Array]
Candidate = Callable[[Tree, Any], tuple[jax.Array, dict[str, Any]]]


@dataclass(frozen=True)
class Task:
    """The same statistics in the form that each candidate needs; None if it cannot compute them.

    `reduce` is given all gradients, with leaves [B, ...]. `one` is given a single gradient and returns
    two dictionaries: what is averaged over the examples, and what is kept of each. `finish` adds
    statistics that follow from those.
    """

    statistics: Mapping[str, pg.Statistic]
    reduce: Callable[[Tree], dict[str, Any]] | None = None
    one: Callable[[Tree], tuple[dict[str, Any], dict[str, Any]]] | None = None
    finish: Callable[[dict[str, Any], int], dict[str, Any]] = lambda found, examples: found
    max_norm: float | None = None  # if the task is the mean of clipped gradients, and nothing else
    unchecked: tuple[str, ...] = ()  # statistics in which candidates may differ


def _mean(f: Callable[[jax.Array], jax.Array], g: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.mean(f(x), axis=0), g)


def _moments(g: Tree) -> dict[str, Any]:
    return {"mean": _mean(jnp.asarray, g), "second_moment": _mean(jnp.square, g)}


def _moments_of_one(g: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"mean": g, "second_moment": jax.tree.map(jnp.square, g)}, {}


def _norms(g: Tree) -> dict[str, Any]:
    return {"norm": jax.vmap(optax.tree.norm)(g)}


def _norm_of_one(g: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
    return {}, {"norm": optax.tree.norm(g)}


def _scale(norm: jax.Array) -> jax.Array:
    return jnp.minimum(1, MAX_NORM / norm)


def _clipped(g: Tree) -> dict[str, Any]:
    scale = _scale(jax.vmap(optax.tree.norm)(g))
    return {"clipped": jax.tree.map(lambda x: jnp.tensordot(scale, x, 1) / len(x), g)}


def _clipped_of_one(g: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"clipped": optax.tree.scale(_scale(optax.tree.norm(g)), g)}, {}


def _five(g: Tree) -> dict[str, Any]:
    variance = jax.tree.map(lambda x: jnp.var(x, axis=0, ddof=1), g)
    return _moments(g) | {"sign": _mean(jnp.sign, g), "variance": variance} | _norms(g)


def _five_of_one(g: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
    averaged, _ = _moments_of_one(g)
    return averaged | {"sign": jax.tree.map(jnp.sign, g)}, _norm_of_one(g)[1]


def _finish_five(found: dict[str, Any], examples: int) -> dict[str, Any]:
    """Adds the variance, computed from two moments. It is exact up to cancellation."""
    unbiased = examples / (examples - 1)
    variance = jax.tree.map(
        lambda m, s: unbiased * (s - jnp.square(m)), found["mean"], found["second_moment"]
    )
    return found | {"variance": variance}


MOMENTS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)}
FIVE = {**MOMENTS, "sign": pg.Mean(jnp.sign), "variance": pg.Variance(), "norm": pg.Norm()}

TASKS: dict[TaskName, Task] = {
    "moments": Task(MOMENTS, _moments, _moments_of_one),
    "norms": Task({"norm": pg.Norm()}, _norms, _norm_of_one),
    "clipped": Task({"clipped": pg.ClippedMean(MAX_NORM)}, _clipped, _clipped_of_one, max_norm=MAX_NORM),
    # A number that is zero up to rounding may have any sign.
    "five": Task(FIVE, _five, _five_of_one, _finish_five, unchecked=("sign",)),
    "tokens": Task({"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square, per="token")}),
}
TITLES: dict[TaskName, str] = {
    "moments": "mean and second moment",
    "norms": "norm of every gradient",
    "clipped": "mean of clipped gradients",
    "five": "mean, second moment, sign, variance and norm",
    "tokens": "mean, and second moment of tokens",
}


def of_one_position(task: Task) -> Task:
    """The task for a model whose examples have one position each, so that an example is a token."""
    if task is not TASKS["tokens"]:
        return task
    return dataclasses.replace(task, reduce=_moments, one=_moments_of_one)


def names(task: Task, *, ours: bool = False) -> tuple[str, ...]:
    """The names of the candidates for a task, the floors first, without the sizes that `SIZED` need.

    With `ours` these are the floors and pergrad alone.
    """
    can = {
        FLOOR: True,
        ACCUMULATED: True,
        VMAP: task.reduce is not None,
        MICRO_GRAD: task.one is not None,
        JAX_PRIVACY: task.max_norm is not None,
        PERGRAD: True,
        AUTO: True,
    }
    wanted = (*FLOORS, PERGRAD) if ours else {family(name) for name in can}
    return tuple(name for name, does in can.items() if does and family(name) in wanted)


def is_installed(name: str) -> bool:
    """Whether a candidate's package is installed. Only jax_privacy does not come with pergrad."""
    return family(name) != JAX_PRIVACY or importlib.util.find_spec("jax_privacy") is not None


def family(name: str) -> str:
    """The name without its microbatch size."""
    return name.partition(MICROBATCH)[0]


def make(name: str, loss: Loss, task: Task) -> Candidate:
    """The candidate of this name."""
    _, _, size = name.partition(MICROBATCH)
    return _MAKERS[family(name)](loss, task, size)


def _mean_gradient(loss: Loss, task: Task, size: str) -> Candidate:
    def run(params: Tree, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        return value, {"mean": gradient}

    return run


def _accumulated(loss: Loss, task: Task, size: str) -> Candidate:
    value_and_grad = floor.accumulated(loss, int(size))

    def run(params: Tree, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        value, gradient = value_and_grad(params, batch)
        return value, {"mean": gradient}

    return run


def _vmap_grad(loss: Loss, task: Task, size: str) -> Candidate:
    """All gradients at once, then reduced: what a user writes first."""
    reduce = task.reduce
    assert reduce is not None

    def one_example(params: Tree, example: Any) -> tuple[jax.Array, Tree]:
        return jax.value_and_grad(loss)(params, jax.tree.map(lambda x: x[None], example))

    def run(params: Tree, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        values, gradients = jax.vmap(one_example, in_axes=(None, 0))(params, batch)
        return jnp.mean(values), reduce(gradients)

    return run


def _micro_grad(loss: Loss, task: Task, size: str) -> Candidate:
    """optax's answer: `vmap(grad)` on a few examples at a time, accumulated in a loop."""
    one = task.one
    assert one is not None
    statistics_fn = optax.microbatching.micro_grad(
        loss,
        microbatch_size=int(size),
        accumulator=optax.microbatching.AccumulationType.MEAN,
        transform_fn=lambda g: one(g)[0],
        metrics_fn=lambda g: one(g)[1],
    )

    def run(params: Tree, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        averaged, individual = statistics_fn(params, batch)
        found = averaged | individual.metrics
        return jnp.mean(individual.values), task.finish(found, len(individual.values))

    return run


def _jax_privacy(loss: Loss, task: Task, size: str) -> Candidate:
    clipping = importlib.import_module("jax_privacy.clipping")  # an optional package
    assert task.max_norm is not None
    clipped_sum = clipping.clipped_grad(
        loss, l2_clip_norm=task.max_norm, microbatch_size=int(size), return_values=True
    )

    def run(params: Tree, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        total, individual = clipped_sum(params, batch)
        examples = len(individual.values)
        return jnp.mean(individual.values), {"clipped": jax.tree.map(lambda x: x / examples, total)}

    return run


def _pergrad(loss: Loss, task: Task, size: str) -> Candidate:
    microbatch_size = "auto" if size == "auto" else int(size) if size else None
    return pg.value_and_stats(loss, task.statistics, microbatch_size=microbatch_size)


_MAKERS: dict[str, Callable[[Loss, Task, str], Candidate]] = {
    FLOOR: _mean_gradient,
    ACCUMULATED: _accumulated,
    VMAP: _vmap_grad,
    MICRO_GRAD: _micro_grad,
    JAX_PRIVACY: _jax_privacy,
    PERGRAD: _pergrad,
}
