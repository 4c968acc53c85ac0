"""The matrix of a random projection, slowly and from its definition. It imports nothing of the library.

`matrix` has a column for each entry of a parameter, so that the projection of a gradient is a product
with this matrix. It is that of the module `_statistics/sketch`, whose docstring defines it.
"""

import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np


@functools.cache
def matrix(path: str, shape: tuple[int, ...], dim: int, seed: int) -> np.ndarray:
    """The matrix [dim, number of entries] of the parameter at `path`."""
    if not math.prod(shape):
        return np.zeros((dim, 0))
    sides = _sides(shape)
    lengths = _compressed(sides, dim) if len(sides) == 2 else sides
    keys = jax.random.split(_key(path, seed), 4)
    both = [
        np.eye(n) if n == length else _signs(key, n, length) / math.sqrt(length)
        for n, length, key in zip(sides, lengths, keys, strict=False)
    ]
    compression = functools.reduce(np.kron, both, np.eye(1)).T
    entries = math.prod(lengths)
    rounds = max(1, math.ceil(entries / dim))
    signs = _signs(keys[2], rounds, dim)
    places = np.asarray(jax.random.randint(keys[3], (rounds,), 0, dim, jnp.int32))
    spread = np.zeros((dim, entries))
    for entry in range(entries):
        row, column = divmod(entry, dim)
        spread[(column + places[row]) % dim, entry] = signs[row, column]
    return spread @ compression


def _sides(shape: tuple[int, ...]) -> list[int]:
    """The numbers of rows and columns of a gradient, or its length if it has one axis or none."""
    long = [n for n in shape if n != 1]
    if len(long) < 2:
        return [math.prod(long)]
    splits = [[math.prod(long[:k]), math.prod(long[k:])] for k in range(1, len(long))]
    return min(splits, key=max)


def _compressed(sides: list[int], dim: int) -> list[int]:
    m, n = sides
    a = min(m, math.ceil(math.sqrt(4 * dim)))
    b = min(n, math.ceil(4 * dim / a))
    return [min(m, math.ceil(4 * dim / b)), b]


def _key(path: str, seed: int) -> jax.Array:
    key = jax.random.wrap_key_data(
        jnp.array([seed >> 32, seed % 2**32], jnp.uint32), impl="threefry2x32"
    )
    digest = hashlib.sha256(path.encode()).digest()
    for start in (0, 4):
        key = jax.random.fold_in(key, int.from_bytes(digest[start : start + 4], "little"))
    return key


def _signs(key: jax.Array, rows: int, columns: int) -> np.ndarray:
    bits = np.asarray(jax.random.bits(key, (rows, columns), jnp.uint8))
    return np.where(bits % 2 == 0, 1.0, -1.0)
