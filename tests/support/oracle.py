"""Slow and obviously right: per-example gradients by a Python loop of `jax.value_and_grad`.

Everything that the library computes in a clever way is compared with this file, which uses nothing
of the library. The reductions are NumPy in float64; `w` holds the example weights, read as counts,
and an example of weight 0 is left out before anything is computed from it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    value_and_grad = _value_and_grad(fun, argnums, has_aux)
    examples = {n: jax.tree.map(_as_numpy, args[n]) for n in batched}
    split = {n: jax.tree.map(lambda key: jax.random.split(key, num_examples), args[n]) for n in keys}
    results = []
    for i in range(num_examples):
        example = list(args)
        for n in batched:
            index = slice(i, i + 1) if keep_batch_dim else i
            example[n] = jax.tree.map(lambda x, index=index: x[index], examples[n])
        for n in keys:
            example[n] = jax.tree.map(lambda x, i=i: x[i], split[n])
        out, grads = value_and_grad(*example)
        value, aux = out if has_aux else (out, None)
        results.append((value, aux, grads))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


@functools.lru_cache(maxsize=8)
def _value_and_grad(fun: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool) -> Any:
    """Compiled, and kept for those who ask for the truth of one function more than once."""
    return jax.jit(jax.value_and_grad(fun, argnums, has_aux=has_aux))


def _as_numpy(x: Any) -> Any:
    """As an array of NumPy, of which a part is taken without compiling anything; keys are not one."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


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


def groups(g: Tree, k: int, w: Any = None) -> tuple[Tree, np.ndarray]:
    """Units of `k` neighbours: their weighted mean gradients, and how often each counts.

    Both go into `mean_of` and `variance` as gradients and weights do. A unit counts as its members do in
    the mean, so that the counts add up to `sum_i w_i / k`; one that counts 0 has the gradient 0.
    """
    size = len(jax.tree.leaves(g)[0])
    counts = np.ones(size) if w is None else np.asarray(w).astype(np.float64)
    units = [slice(start, start + k) for start in range(0, size, k)]

    def leaf(x: np.ndarray) -> np.ndarray:
        zero = np.zeros(np.shape(x)[1:])
        return np.stack([_mean(*_kept(x[u], counts[u])) if any(counts[u]) else zero for u in units])

    return jax.tree.map(leaf, g), np.array([np.mean(counts[u]) for u in units])


def norm(g: Tree) -> np.ndarray:
    """`||g_i||` over all leaves of the tree, [B]."""
    return np.sqrt(np.sum(np.square(_rows(g)), axis=1))


def gram(g: Tree) -> np.ndarray:
    """`<g_i, g_j>` over all leaves of the tree, [B, B]."""
    rows = _rows(g)
    return rows @ rows.T


def dot(g: Tree, v: Tree) -> np.ndarray:
    """`<g_i, v>` over all leaves of the two trees, [B]."""
    (row,) = _rows(jax.tree.map(lambda x: np.asarray(x)[None], v))
    return _rows(g) @ row


def clipped_mean(g: Tree, max_norm: float, w: Any = None, phi: Any = None) -> Tree:
    """`sum_i w_i g_i min(1, max_norm / ||g_i||) / sum_i w_i`, as `weighted_mean`."""
    return weighted_mean(g, lambda n: 1.0 if n <= max_norm else max_norm / n, w, phi)


def weighted_mean(g: Tree, weight: Callable[[Any], Any], w: Any = None, phi: Any = None) -> Tree:
    """`sum_i w_i g_i weight(||g_i||) / sum_i w_i`, the norm over all leaves of the tree.

    With `phi` it is the mean of phi of the weighted gradients. A gradient whose norm is not finite makes
    everything NaN, unless its weight `w_i` is 0.
    """
    scales = [weight(length) if np.isfinite(length) else np.nan for length in norm(g)]

    def leaf(x: np.ndarray) -> np.ndarray:
        x, counts = _kept(x, w)
        own = np.reshape(_kept(scales, w)[0], (-1, *[1] * (x.ndim - 1)))
        return _mean(own * x if phi is None else phi(own * x), counts)

    return jax.tree.map(leaf, g)


def _rows(g: Tree) -> np.ndarray:
    """The gradients as vectors, [B, number of parameters]."""
    leaves = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(g)]
    return np.concatenate([x.reshape(len(x), math.prod(x.shape[1:])) for x in leaves], axis=1)


def _mean(x: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.tensordot(counts, x, 1) / counts.sum()


def _kept(x: Any, w: Any) -> tuple[np.ndarray, np.ndarray]:
    x = np.asarray(x).astype(np.float64)
    counts = np.ones(len(x)) if w is None else np.asarray(w).astype(np.float64)
    return x[counts > 0], counts[counts > 0]


def _positions(argnums: int | tuple[int, ...], args: tuple[Any, ...]) -> set[int]:
    argnums = (argnums,) if isinstance(argnums, int) else argnums
    return {n % len(args) for n in argnums}
