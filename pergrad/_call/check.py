"""Tests whether a loss is the mean of its examples' own losses, and if not, finds a likely reason.

The test compares numbers: the mean of the per-example gradients with the gradient of the loss on the
whole batch. If they differ, the diagnosis tries three explanations, in this order:

1. The loss is a sum in place of a mean: the gradient is B times as large.
2. The examples have unequal weights, as in a mean over all tokens of ragged sequences: the gradient is
   sum_i c_i g_i and the loss is sum_i c_i l_i, for weights c_i that add up to one. Least squares finds
   them.
3. The examples influence each other: the loss reduces over the example axis and uses the result again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pergrad import _compat
from pergrad._call import spmd
from pergrad._call.arguments import a_key, is_key, kind
from pergrad._call.call import Call
from pergrad._call.request import ArgNums, MicrobatchSize, Request, StrategyName
from pergrad._call.wrap import returning_nothing
from pergrad._compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, aval
from pergrad._errors import ArgumentError, NotPerExampleError
from pergrad._statistics import Individual, Loss, Mean
from pergrad._trace import flat_jaxpr

COMPARED = (Mean(), Mean(jnp.square), Loss())


LARGEST_DIAGNOSIS = 2**28  # numbers in all individual gradients together


def check(
    fun: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    rtol: float | None = None,
    batch_argnums: ArgNums = 1,
    has_aux: bool = False,
    keep_batch_dim: bool = True,
    rng_argnums: ArgNums = (),
    shared_argnums: ArgNums = (),
    microbatch_size: MicrobatchSize = None,
    spmd_axis_name: str | Sequence[str] | None = None,
    param_specs: Any = None,
    strategy: StrategyName = "auto",
) -> Callable[..., None]:
    """Checks that a loss is a mean over examples that do not influence each other.

    The function that it returns takes the loss's arguments with a typical batch of two examples or more.
    It raises `NotPerExampleError` if the mean of the per-example gradients is not the gradient of the
    loss on the whole batch: statistics would then describe another loss than the one that is trained.
    It runs the model, so call it once, outside of `jit`.

    Args:
      fun: the loss, as for `value_and_stats`.
      argnums: the argument or arguments to differentiate.
      rtol: how far the two gradients may be apart, relative to the size of the examples' gradients. The
        default allows for rounding: about 1e-4 in float32, and 5e-2 if some of the model computes in
        bfloat16, whatever dtype the parameters have.
      batch_argnums: as for `value_and_stats`.
      shared_argnums: as for `value_and_stats`.
      has_aux: as for `value_and_stats`.
      keep_batch_dim: as for `value_and_stats`.
      microbatch_size: as for `value_and_stats`.
      spmd_axis_name: as for `value_and_stats`.
      param_specs: as for `value_and_stats`.
      strategy: as for `value_and_stats`.
      rng_argnums: must be empty, because the batch and its single examples would draw different random
        numbers. Check the loss without its randomness, and name the keys, which it then does not use, in
        `shared_argnums`.

    >>> pg.check(lambda w, x: jnp.mean((x @ w) ** 2))(jnp.ones(2), jnp.eye(2))
    >>> pg.check(lambda w, x: jnp.sum((x @ w) ** 2))(jnp.ones(2), jnp.eye(2))
    Traceback (most recent call last):
    pergrad._errors.NotPerExampleError: ... sum over the examples, ...
    """
    request = Request(
        fun,
        COMPARED,
        argnums,
        batch_argnums=batch_argnums,
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        rng_argnums=rng_argnums,
        shared_argnums=shared_argnums,
        microbatch_size=microbatch_size,
        spmd_axis_name=spmd_axis_name,
        param_specs=param_specs,
        strategy=strategy,
    )
    return checker(request, rtol)


def checker(request: Request, rtol: float | None) -> Callable[..., None]:
    """The function that `check` returns. The request must ask for the statistics `COMPARED`."""
    if request.rng_argnums != ():
        raise ArgumentError(
            "check cannot compare a loss that draws random numbers: the whole batch and single examples "
            "draw different ones. Switch the randomness off (deterministic=True, dropout 0), and name "
            "the keys, which are then not used, in shared_argnums in the place of rng_argnums."
        )

    @returning_nothing(request)
    def check_loss(*args: Any, **kwargs: Any) -> None:
        call = Call(request, args, kwargs)
        if call.size < 2:
            raise ArgumentError("check needs a batch of at least two examples.")
        if not request.keep_batch_dim:
            return  # A loss that takes one example cannot mix several.

        @jax.jit
        def both(params: Sequence[Any], batch: Sequence[Any]) -> Any:
            args = call.arguments(params, batch)
            each = spmd.run(request, args, kwargs)
            return each, of_batch(params, batch)

        def whole_gradient(params: Sequence[Any], batch: Sequence[Any]) -> Any:
            args = call.arguments(params, batch)
            grad_fn = jax.value_and_grad(request.fun, request.argnums, has_aux=request.has_aux)
            return grad_fn(*args, **kwargs)

        def of_batch(params: Sequence[Any], batch: Sequence[Any]) -> Any:
            return spmd.with_automatic_axes(request, whole_gradient, params, batch)

        (value, (mean, square, losses)), (whole, gradient) = both(call.params, call.batch)
        value, whole = (value[0], whole[0]) if request.has_aux else (value, whole)
        program = jax.make_jaxpr(of_batch)(call.params, call.batch).jaxpr
        eps = max(_coarsest(program), *(float(jnp.finfo(x.dtype).eps) for x in call.params))
        tolerance = eps**0.6 if rtol is None else rtol
        seen = _Seen(call, _flat(mean), _flat(gradient), losses, whole, tolerance)
        leaves = list(zip(call.paths, *map(jax.tree.leaves, (mean, gradient, square)), strict=True))
        _check_finite(seen, leaves)
        # A gradient may be zero but for rounding, as that of a bias before a softmax is. Its rounding is
        # then compared with the gradients of all parameters.
        least = 4 * eps / tolerance * np.sqrt(np.sum(_flat(square)))
        scales = [max(np.sqrt(np.sum(sq)), least) for *_, sq in leaves]
        pairs = zip(leaves, scales, strict=True)
        wrong = [path for (path, a, b, _), scale in pairs if not seen.close(a, b, scale)]
        if wrong or not seen.close(value, whole, np.mean(np.abs(losses))):
            raise NotPerExampleError(_message(wrong, seen))

    return check_loss


def _coarsest(jaxpr: Jaxpr) -> float:
    """The largest machine epsilon of all dtypes that a program computes in."""
    coarsest = 0.0
    for eqn in _compat.drop_dead_code(jaxpr).eqns:
        dtypes = [aval(v).dtype for v in eqn.outvars]
        floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        inside = [x for x in jax.tree.leaves(eqn.params) if isinstance(x, (Jaxpr, ClosedJaxpr))]
        programs = [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in inside]
        epsilons = [*(float(jnp.finfo(dtype).eps) for dtype in floats), *map(_coarsest, programs)]
        coarsest = max([coarsest, *epsilons])
    return coarsest


class _Seen(NamedTuple):
    """What is compared: the mean of the per-example gradients, and the gradient of the batch.

    Both are flat arrays over all parameters. `losses` are those of the examples, `whole_loss` is that of
    the batch, and `rtol` is the tolerance.
    """

    call: Call
    mean: np.ndarray
    gradient: np.ndarray
    losses: np.ndarray
    whole_loss: Any
    rtol: float

    def close(self, a: Any, b: Any, scale: Any) -> bool:
        """Whether `a` and `b` agree but for rounding. `scale` is the size of the numbers summed up."""
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        return bool(np.linalg.norm(a - b) <= self.rtol * (np.linalg.norm(b) + np.float64(scale)))


def _check_finite(seen: _Seen, leaves: Sequence[tuple[str, Any, Any, Any]]) -> None:
    """Refuses losses and gradients that are not finite, because they cannot be compared."""
    if not np.all(np.isfinite(seen.losses)) or not np.isfinite(seen.whole_loss):
        raise ArgumentError("check cannot compare: the loss of these examples is NaN or infinite.")
    for path, a, b, _ in leaves:
        if not np.all(np.isfinite(a)) or not np.all(np.isfinite(b)):
            raise ArgumentError(
                f"check cannot compare: the gradient of {path} is NaN or infinite for these examples."
            )


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def _message(wrong: Sequence[str], seen: _Seen) -> str:
    shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    found = (
        "the mean of the per-example gradients is not the gradient of the loss on the whole batch of "
        f"{seen.call.size} ({f'parameters {shown}' if wrong else 'the losses differ'}). "
    )
    return found + (_if_sum(seen) or _if_weighted(seen) or _if_mixed(seen))


def _if_sum(seen: _Seen) -> str | None:
    size = seen.call.size
    if not seen.close(size * seen.mean, seen.gradient, np.linalg.norm(seen.gradient)):
        return None
    return (
        f"It is {size} times as large: the loss is a sum over the examples, not a mean. Use jnp.mean or "
        "divide by the number of examples."
    )


def _if_weighted(seen: _Seen) -> str | None:
    """Looks for weights c with sum_i c_i g_i = g and sum_i c_i l_i = l."""
    call = seen.call
    if seen.mean.size < 2 * call.size or seen.mean.size * call.size > LARGEST_DIAGNOSIS:
        return None
    individual = dataclasses.replace(call.request, stats=Individual())
    _, gradients = spmd.run(individual, call.args, call.kwargs)
    rows = np.concatenate(
        [np.asarray(g, np.float64).reshape(call.size, -1) for g in jax.tree.leaves(gradients)], axis=1
    )
    c, *_ = np.linalg.lstsq(rows.T, seen.gradient, rcond=None)
    scale = np.linalg.norm(rows)
    agrees = seen.close(c @ rows, seen.gradient, scale) and seen.close(
        c @ np.asarray(seen.losses, np.float64), seen.whole_loss, np.mean(np.abs(seen.losses))
    )
    if not agrees or np.any(c < 0) or abs(c.sum() - 1) > 1e-2:
        return None
    return (
        f"It is their weighted mean: examples count between {call.size * c.min():.3g} and "
        f"{call.size * c.max():.3g} times as much as the average one. Likely the loss is a mean over "
        "all tokens of sequences of different length. Take the mean within each example first and then "
        "over examples, or keep the loss and give the numbers of tokens as example_weights."
    )


def _if_mixed(seen: _Seen) -> str:
    way_out = (
        "Statistics of single examples do not exist for such a loss. Use it with frozen statistics "
        "(evaluation mode), a norm that looks at one example (layer norm, group norm), or treat a group "
        "of examples as one."
    )
    line = _where_examples_meet(seen.call)
    if line is None and (same := _as_long_as_the_batch(seen.call)):
        return (
            f"Every single example is given {same}, which is as long as the batch: the loss takes it "
            "from the scope around it, or shared_argnums names it. If it belongs to the examples, make "
            "it an argument of the loss, and name it in batch_argnums."
        )
    if line is None and (key := _key_that_is_shared(seen.call)):
        return (
            f"The loss uses {key} that is the same for all examples: the loss takes it from the scope "
            "around it, or shared_argnums names it. All single examples draw the same numbers from it, "
            "and the whole batch draws others. Make the key an argument of the loss, and give every "
            "example a key of its own: value_and_stats(..., rng_argnums=...). For check, switch the "
            "randomness off (deterministic=True, dropout 0)."
        )
    if line is None:
        return (
            f"Its examples influence each other (batch norm, a contrastive or balancing loss). {way_out}"
        )
    return (
        f"Its examples influence each other: they meet at {line}, as in batch norm in training mode or "
        f"a contrastive loss. {way_out}"
    )


def _as_long_as_the_batch(call: Call) -> str | None:
    """An array as long as the batch that is the same for all examples, if the loss uses one."""
    return next((kind(x) for x in _shared_arrays(call) if jnp.shape(x)[:1] == (call.size,)), None)


def _key_that_is_shared(call: Call) -> str | None:
    """A PRNG key that is the same for all examples, if the loss uses one."""
    return next((a_key(x) for x in _shared_arrays(call) if is_key(x)), None)


def _shared_arrays(call: Call) -> Sequence[Any]:
    """The arrays that the loss uses besides the parameters and the examples."""
    loss = jax.make_jaxpr(
        lambda params, batch: call.request.fun(*call.arguments(params, batch), **call.kwargs)
    )
    return loss(call.params, call.batch).consts


def _where_examples_meet(call: Call) -> str | None:
    """The user's line that reduces over the example axis and whose result examples use again, if any.

    The loss is traced, but not run, for a batch whose length is a prime that divides no other dimension.
    So an axis belongs to the examples if that prime divides its length.
    """
    sizes = {d for x in [*call.params, *call.batch] for d in jnp.shape(x)}
    prime = next((p for p in (61, 67, 71, 73, 79, 83, 89, 97) if all(d % p for d in sizes)), 101)
    batch = [jax.ShapeDtypeStruct((prime, *x.shape[1:]), x.dtype) for x in call.batch]
    try:
        jaxpr = flat_jaxpr(
            lambda params, batch: call.request.fun(*call.arguments(params, batch), **call.kwargs),
            call.params,
            batch,
        )
    except Exception:  # The loss needs another batch length, so the place is not known.
        return None

    def counts(v: Any) -> int:
        return sum(d % prime == 0 for d in aval(v).shape)

    met: dict[Var, JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        with_examples = [v for v in operands if counts(v)]
        meeting = next((met[v] for v in operands if v in met), None)
        if meeting and (with_examples or any(counts(v) for v in eqn.outvars)):
            return _compat.user_line(meeting)
        if any(counts(v) > 1 for v in eqn.outvars):
            return _compat.user_line(eqn)
        if with_examples and not any(counts(v) for v in eqn.outvars):
            meeting = eqn
        if meeting:
            met |= dict.fromkeys(eqn.outvars, meeting)
    return None
