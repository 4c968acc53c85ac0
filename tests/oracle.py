"""Slow and obviously right: per-example gradients by a Python loop of `jax.value_and_grad`.

Everything that the library computes in a clever way is compared with this file, which uses nothing
of the library. The reductions are NumPy in float64; `w` holds the example weights, read as counts,
and an example of weight 0 is left out before anything is computed from it.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Tree = Any


def per_example(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    rng_argnums: int | tuple[int, ...] = (),
    has_aux: bool = False,
    keep_batch_dim: bool = True,
) -> tuple[np.ndarray, Tree, Tree]:
    """Returns `(values, aux, grads)`, each leaf with an axis of examples in front; aux or None."""
    batched, keys = _positions(batch_argnums, args), _positions(rng_argnums, args)
    num_examples = len(jax.tree.leaves([args[n] for n in sorted(batched)])[0])
    value_and_grad = jax.jit(jax.value_and_grad(fun, argnums, has_aux=has_aux))
    results = []
    for i in range(num_examples):
        example = list(args)
        for n in batched:
            index = slice(i, i + 1) if keep_batch_dim else i
            example[n] = jax.tree.map(lambda x, index=index: x[index], args[n])
        for n in keys:
            example[n] = jax.tree.map(lambda key, i=i: jax.random.split(key, num_examples)[i], args[n])
        out, grads = value_and_grad(*example)
        value, aux = out if has_aux else (out, None)
        results.append((value, aux, grads))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def mean(g: Tree, w: Any = None) -> Tree:
    """`sum_i w_i g_i / sum_i w_i`, leaf by leaf."""
    return jax.tree.map(lambda x: _mean(*_kept(x, w)), g)


def mean_of(phi: Callable[[np.ndarray], Any], g: Tree, w: Any = None) -> Tree:
    """`sum_i w_i phi(g_i) / sum_i w_i` for an elementwise `phi`, leaf by leaf."""

    def leaf(x: np.ndarray) -> np.ndarray:
        x, counts = _kept(x, w)
        return _mean(np.asarray(phi(x), np.float64), counts)

    return jax.tree.map(leaf, g)


def variance(g: Tree, w: Any = None) -> Tree:
    """Unbiased: `sum_i w_i (g_i - m)^2 / (sum_i w_i - 1)`, where `m` is the mean, leaf by leaf."""

    def leaf(x: np.ndarray) -> np.ndarray:
        x, counts = _kept(x, w)
        squares = np.square(x - _mean(x, counts))
        return np.tensordot(counts, squares, 1) / (counts.sum() - 1)

    return jax.tree.map(leaf, g)


def _mean(x: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.tensordot(counts, x, 1) / counts.sum()


def _kept(x: Any, w: Any) -> tuple[np.ndarray, np.ndarray]:
    x = np.asarray(x).astype(np.float64)
    counts = np.ones(len(x)) if w is None else np.asarray(w).astype(np.float64)
    return x[counts > 0], counts[counts > 0]


def _positions(argnums: int | tuple[int, ...], args: tuple[Any, ...]) -> set[int]:
    argnums = (argnums,) if isinstance(argnums, int) else argnums
    return {n % len(args) for n in argnums}
