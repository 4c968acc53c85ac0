"""What the loss takes from the scope around it, where that most likely makes the results wrong.

Such arrays are constants of the gradient program, the same for all examples. Two of them are refused:

  a batch   A loss that gets x and takes y from outside compares each single x with the y of all
            examples. An array as long as the batch is taken for one if the loss runs with one example
            and with the whole batch, but not with another number of examples.
  a key     All examples draw the same numbers from it, such as one dropout mask for all.

`shared_argnums` says of an array that it is meant to be the same for all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._call.arguments import a_key, is_key, kind
from pergrad._compat import JaxprEqn, Var
from pergrad._errors import ArgumentError
from pergrad._ir import Loop, dependent_inputs, dependents, is_in
from pergrad._trace import Program

DRAWS = (p.random_bits_p, p.random_gamma_p)


def refuse_batch(
    program: Program, given: Sequence[Any], size: int, loss_of_batch: Callable[[int], Any]
) -> None:
    """Refuses a loss that takes a part of the batch of `size` examples from the scope around it.

    `given` are the arguments that are the same for all examples, and `loss_of_batch` traces the loss for
    so many examples.
    """
    arrays = [x for x in _from_outside(program, given).values() if jnp.shape(x)[:1] == (size,)]
    if size == 1 or not arrays or _error_of(lambda: loss_of_batch(size)):
        return
    error = _error_of(lambda: loss_of_batch(2 if size > 2 else 3))
    if error:
        raise ArgumentError(
            f"the loss takes {kind(arrays[0])} from the scope around it. That is as long as the batch "
            f"of {size} examples, and the loss fails for batches of other lengths, at "
            f"{_compat.line_of_error(error)}. Every single example would meet all of the array. If it "
            "belongs to the examples, make it an argument of the loss, and name that in batch_argnums. "
            "If it is the same for all examples, make it an argument that shared_argnums names."
        ) from error


def refuse_key(program: Program, given: Sequence[Any]) -> None:
    """Refuses a loss whose random numbers come from a key that it takes from the scope around it."""
    keys = {v: x for v, x in _from_outside(program, given).items() if is_key(x)}
    if not keys:
        return
    line = _drawn_alike(program.jaxpr.eqns, keys, program.example)
    if line:
        raise ArgumentError(
            f"the loss draws random numbers, which it uses at {line}, from "
            f"{a_key(next(iter(keys.values())))} that it takes from the scope around it: all examples "
            "would draw the same numbers, such as one dropout mask for all. Make the key an argument of "
            "the loss, `loss(params, batch, key)`, and write rng_argnums=2, so that each example has a "
            "key of its own. If all examples shall draw the same numbers, write shared_argnums=2."
        )


def _from_outside(program: Program, given: Sequence[Any]) -> dict[Var, Any]:
    """The constants of the program that are not among the arguments `given`, by shape and dtype."""
    known = {(jnp.shape(x), jnp.result_type(x)) for x in given}
    pairs = zip(program.jaxpr.constvars, program.consts, strict=True)
    return {v: x for v, x in pairs if (jnp.shape(x), x.dtype) not in known}


def _error_of(run: Callable[[], Any]) -> Exception | None:
    """The error with which the user's code fails, if it does."""
    try:
        run()
    except Exception as error:
        return error
    return None


def _drawn_alike(
    eqns: Sequence[JaxprEqn], keys: Collection[Var], example: Collection[Var]
) -> str | None:
    """Where numbers are used that are drawn from one of the keys, and from nothing of the example's.

    The draw may stand in a loop. A key into which a number of the example was folded is its own.
    """
    keyed, own = (dependents(eqns, sources, inside=True) for sources in (keys, example))
    for place, eqn in enumerate(eqns):
        if eqn.primitive in DRAWS and is_in(eqn.invars[0], keyed) and not is_in(eqn.invars[0], own):
            return _line_of_use(eqns[place:], eqn)
        loop = Loop.of(eqn)
        if loop is not None:
            depends = ([is_in(v, reached) for v in eqn.invars] for reached in (keyed, own))
            inside = (dependent_inputs(loop, d, inside=True) for d in depends)
            if found := _drawn_alike(loop.body.jaxpr.eqns, *inside):
                return found
    return None


def _line_of_use(eqns: Sequence[JaxprEqn], draw: JaxprEqn) -> str:
    """The first line of the user's that uses what the equation `draw` draws, in a function of JAX."""
    drawn = dependents(eqns, draw.outvars)
    users = (eqn for eqn in eqns if any(is_in(v, drawn) for v in (*eqn.invars, *eqn.outvars)))
    return _compat.user_line(next(filter(_compat.has_user_line, users), draw))
