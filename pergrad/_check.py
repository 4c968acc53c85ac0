"""Whether a loss is the mean of its examples' own losses, and if not, why it likely is not.

The test is by numbers: the mean of the per-example gradients against the gradient of the loss on the
whole batch. The diagnosis then tries three explanations, in this order:

1. a sum in place of a mean: the gradient is B times as large;
2. unequal weights (a mean over all tokens of ragged sequences): the gradient is sum_i c_i g_i and the
   loss sum_i c_i l_i for weights c_i that add up to one, found by least squares;
3. examples that meet: the program of the loss reduces over the example axis and goes on with the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pergrad._call import ArgNums, Call, Request
from pergrad._errors import ArgumentError, NotPerExampleError
from pergrad._run import run
from pergrad._statistics import Loss, Mean

LARGEST_DIAGNOSIS = 2**28  # numbers in all individual gradients together


def check(
    fun: Callable[..., Any], argnums: ArgNums = 0, *, rtol: float | None = None, **options: Any
) -> Callable[..., None]:
    """Checks that a loss is a mean over examples that do not influence each other.

    The function it returns takes the loss's arguments with a typical batch of two examples or more,
    and raises `NotPerExampleError` if the mean of the per-example gradients is not the gradient of the
    loss on the whole batch: statistics would then describe another loss than the one that is trained.
    It runs the model, so call it once, outside of `jit`.

    Args:
      fun: the loss, as for `value_and_stats`.
      argnums: what to differentiate.
      rtol: how far the two may be apart, relative to the size of the examples' gradients. By default
        what rounding explains: about 1e-4 in float32.
      **options: `batch_argnums`, `has_aux`, `keep_batch_dim` as for `value_and_stats`. With
        `rng_argnums` the two would draw different numbers: check the loss without its randomness.

    >>> pg.check(lambda w, x: jnp.mean((x @ w) ** 2))(jnp.ones(2), jnp.eye(2))
    >>> pg.check(lambda w, x: jnp.sum((x @ w) ** 2))(jnp.ones(2), jnp.eye(2))
    Traceback (most recent call last):
    pergrad._errors.NotPerExampleError: ... sum over the examples ...
    """
    request = Request(fun, [Mean(), Mean(jnp.square), Loss()], argnums, **options)
    if request.rng_argnums != ():
        raise ArgumentError(
            "check cannot compare a loss that draws random numbers: the whole batch and single examples "
            "draw different ones. Switch the randomness off (deterministic=True, dropout 0) and leave "
            "rng_argnums out."
        )

    def check_loss(*args: Any, **kwargs: Any) -> None:
        call = Call(request, args, kwargs)
        if call.size < 2:
            raise ArgumentError("check needs a batch of at least two examples.")
        if not request.keep_batch_dim:
            return  # a loss of one example cannot mix any
        parts, plan = call.prepare()
        value, (mean, square, losses) = call.assemble(
            parts, plan, run(parts, plan, call.params, call.examples(), None), None
        )
        value = value[0] if request.has_aux else value
        whole = jax.value_and_grad(fun, argnums, has_aux=request.has_aux)(*args, **kwargs)
        whole_value = whole[0][0] if request.has_aux else whole[0]
        wrong = [
            path
            for path, a, b, sq in zip(
                call.paths, *map(jax.tree.leaves, (mean, whole[1], square)), strict=True
            )
            if not _close(a, b, float(jnp.sqrt(jnp.sum(sq))), rtol)
        ]
        if wrong or not _close(value, whole_value, float(jnp.mean(jnp.abs(losses))), rtol):
            raise NotPerExampleError(_message(call, wrong, mean, whole[1], losses, whole_value, rtol))

    return check_loss
