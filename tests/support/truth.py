"""The truth of a case: the oracle's answer in float64, whatever the dtype under test."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import oracle
from tests.support.cases import Case

Tree = Any


@dataclass(frozen=True)
class Truth:
    """The oracle's answer: each example's loss [B], aux and gradients, leaves [B, ...]."""

    losses: np.ndarray
    aux: Tree
    grads: Tree


# Whoever jits, differentiates or maps it finds what was traced before.
traced_once = functools.lru_cache(maxsize=None)(jax.jit)


@functools.cache
def truth_of(case: Case, dtype: str) -> Truth:
    """The truth of a case in float64, from arguments that were rounded to `dtype`."""

    def widen(x: Any) -> Any:
        return np.asarray(x).astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    args = jax.tree.map(widen, case.make_args(jnp.dtype(dtype)))
    return Truth(*oracle.per_example(traced_once(case.loss), args, **options(case)))


def in_mixed_precision(case: Case, loss: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A case's `loss` and its bfloat16 arguments as most models are trained: with float32 parameters,
    which the model casts to bfloat16, and a float32 loss. The truth is that of bfloat16."""
    argnums = case.argnums if isinstance(case.argnums, tuple) else (case.argnums,)

    def cast(args: tuple[Any, ...], dtype: Any) -> tuple[Any, ...]:
        def leaf(x: Any) -> Any:
            return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return tuple(jax.tree.map(leaf, x) if n in argnums else x for n, x in enumerate(args))

    def mixed(*args: Any) -> Any:
        out = loss(*cast(args, jnp.bfloat16))
        value, *aux = out if case.has_aux else (out,)
        value = value.astype(jnp.float32)
        return (value, *aux) if case.has_aux else value

    return mixed, cast(args, jnp.float32)


def options(case: Case) -> dict[str, Any]:
    names = ("argnums", "batch_argnums", "rng_argnums", "has_aux")
    return {name: getattr(case, name) for name in names}
