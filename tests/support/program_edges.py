"""More parts of random programs: guards, conditionals, keys, ids out of range, and losses with masks.

A guard is a conditional that avoids a division by zero or the logarithm of zero. Some examples of a
random program are zero, so that guards are needed. The bound `LEAST` takes the place of zero: what is
zero in one order of additions may be a rounding error in another, and must take the same branch.

The example `e` of an operation has `tokens` [B, T] below the size of the vocabulary, `ids` [B, T] of
which some are out of range, `labels` [B, T] of which some are `IGNORED`, and a PRNG `key` or None.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.support.cases import over
from tests.support.program_parts import (
    IGNORED,
    OPERATIONS,
    VOCABULARY,
    Make,
    Tree,
    fit,
    stack,
    swap_time,
    table,
    tanh_layer,
)

LEAST = 1e-3
Operation = Callable[[Array, Tree, Make], Array]


def square_of(h: Array) -> Array:
    return jnp.sum(jnp.square(h))


# Guards.


def guarded_input(h: Array, e: Tree, w: Make) -> Array:
    size = square_of(h)
    return lax.cond(size > LEAST, lambda: h / jnp.sqrt(size), lambda: h) @ w(h.shape[2], 3)


def guarded_product(h: Array, e: Tree, w: Make) -> Array:
    """The branch that some examples do not take has a factor 0 / 0 for them."""
    matrix, size = w(h.shape[2], 3), square_of(h)
    return lax.cond(size > LEAST, lambda: (h / size) @ matrix, lambda: jnp.sin(h @ matrix))


def guarded_direction(h: Array, e: Tree, w: Make) -> Array:
    matrix = w(h.shape[2], 3)

    def direction() -> Array:
        y = h @ matrix
        return jnp.tanh(y / jnp.sqrt(square_of(y)))

    return lax.cond(square_of(h) > LEAST, direction, lambda: h @ matrix)


def guarded_logarithm(h: Array, e: Tree, w: Make) -> Array:
    size = square_of(h)
    scale = lax.cond(size > LEAST, lambda: jnp.log(size), lambda: jnp.zeros_like(size))
    return h + scale * over(w(2, h.shape[2])[1], h)


def guarded_switch(h: Array, e: Tree, w: Make) -> Array:
    matrix, size = w(h.shape[2], h.shape[2]), square_of(h)
    branches = [lambda: h @ matrix, lambda: (h / size) @ matrix, lambda: h @ matrix.T / jnp.sqrt(size)]
    return lax.switch((size > LEAST).astype(jnp.int32) + (size > 9), branches)


def guarded_mean(h: Array, e: Tree, w: Make) -> Array:
    """The mean over the positions whose token is large, if there are any."""
    mask = fit(e["tokens"][..., None] > 3, h).astype(h.dtype)
    count, total = jnp.sum(mask), jnp.sum(h * mask, axis=1, keepdims=True)
    mean = lax.cond(count > 0, lambda: total / count, lambda: jnp.zeros_like(total))
    return h + mean @ w(h.shape[2], h.shape[2])


def guarded_in_time(h: Array, e: Tree, w: Make) -> Array:
    matrix = w(h.shape[2], h.shape[2])

    def cell(state: Array, x: Array) -> tuple[Array, Array]:
        size = square_of(x)
        state = lax.cond(
            size > LEAST, lambda: jnp.tanh(state + x / jnp.sqrt(size) @ matrix), lambda: state
        )
        return state, state

    return swap_time(lax.scan(cell, jnp.zeros_like(h[:, 0]), swap_time(h))[1])


def guarded_state(h: Array, e: Tree, w: Make) -> Array:
    """A state that starts from zero, and for some examples stays there, has norm 1 from then on."""
    matrix = w(h.shape[2], h.shape[2])

    def unit(state: Array) -> Array:
        along = lambda: state / jnp.sqrt(square_of(state))  # noqa: E731
        either = lambda: lax.cond(state[0, 0] > 0, along, lambda: jnp.sin(along()))  # noqa: E731
        return lax.cond(square_of(state) > LEAST, either, lambda: state)

    def cell(state: Array, x: Array) -> tuple[Array, Array]:
        state = jnp.tanh(x + unit(state) @ matrix)
        return state, state

    return swap_time(lax.scan(cell, jnp.zeros_like(h[:, 0]), swap_time(h))[1])


def guarded_for_all(h: Array, e: Tree, w: Make) -> Array:
    """The branch that no example takes divides the weight by zero."""
    first, second = w(h.shape[2], 7), w(3, 7).T
    zero = 0 * square_of(lax.stop_gradient(second))
    scaled = jax.checkpoint(lambda: first @ (second / zero))
    return h @ lax.cond(zero > LEAST, scaled, lambda: first @ second)


def guarded_by_where(h: Array, e: Tree, w: Make) -> Array:
    size = square_of(h)
    inverse = jnp.where(size > LEAST, lax.rsqrt(jnp.where(size > LEAST, size, 1)), 0)
    return h @ w(h.shape[2], 3) * inverse


def guarded_weight(h: Array, e: Tree, w: Make) -> Array:
    """Two matrices of norm 1 where they can be, of which the second is zero."""
    matrix = w(h.shape[2], h.shape[2])

    def unit(matrix: Array) -> Array:
        size = square_of(matrix)
        return lax.cond(size > LEAST, lambda: matrix / jnp.sqrt(size), lambda: matrix)

    return jnp.tanh(h @ unit(matrix)) + h @ unit(matrix - lax.stop_gradient(matrix))


# Conditionals. Tokens decide, which no rounding changes.


def cond_in_time(h: Array, e: Tree, w: Make) -> Array:
    matrices = stack(h, w, 2)

    def cell(state: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        x, token = step
        state = lax.cond(
            token > 2,
            lambda: jnp.tanh(x + state @ matrices[0]),
            lambda: jnp.sin(state) + x @ matrices[1],
        )
        return state, state

    steps = (swap_time(h), fit(e["tokens"], h)[0])
    return swap_time(lax.scan(cell, jnp.zeros_like(h[:, 0]), steps)[1])


def skips_in_time(h: Array, e: Tree, w: Make) -> Array:
    matrix = w(h.shape[2], h.shape[2])

    def cell(state: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        x, token = step
        state = lax.cond(token > 2, lambda: jnp.tanh(x + state @ matrix), lambda: state)
        return state, state + x

    steps = (swap_time(h), fit(e["tokens"], h)[0])
    return swap_time(lax.scan(cell, jnp.zeros_like(h[:, 0]), steps, reverse=True)[1])


def scan_in_cond(h: Array, e: Tree, w: Make) -> Array:
    matrices = stack(h, w, 3)
    scanned = lambda h: lax.scan(tanh_layer, h, matrices)[0]  # noqa: E731
    return lax.cond(e["tokens"][0, 0] > 2, scanned, lambda h: h @ matrices[1], h)


def switch_in_layers(h: Array, e: Tree, w: Make) -> Array:
    def layer(h: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
        i, matrix = step
        branches = [lambda: jnp.tanh(h @ matrix), lambda: h * over(matrix[0], h), lambda: h]
        return lax.switch((i + e["tokens"][0, 0]) % 3, branches), None

    return lax.scan(layer, h, (jnp.arange(3), stack(h, w, 3)))[0]


def cond_of_positions(h: Array, e: Tree, w: Make) -> Array:
    matrix = w(h.shape[2], h.shape[2])

    def position(x: Array, token: Array) -> Array:
        return lax.cond(token > 2, lambda: jnp.tanh(x @ matrix), lambda: x * matrix[0])

    return jax.vmap(jax.vmap(position))(h, fit(e["tokens"], h))


def lookup_in_cond(h: Array, e: Tree, w: Make) -> Array:
    rows, tokens = table(h, w), e["tokens"]
    return h + lax.cond(tokens[0, 0] > 2, lambda: fit(rows[tokens], h), lambda: h * over(rows[0], h))


# Keys.


def kept(key: Array, *shape: int) -> Array:
    return jax.random.bernoulli(key, jnp.float32(0.7), shape)


def dropout(h: Array, e: Tree, w: Make) -> Array:
    return jnp.where(kept(e["key"], *h.shape[1:])[None], h / 0.7, 0) @ w(h.shape[2], 5)


def noise(h: Array, e: Tree, w: Make) -> Array:
    # Uniform numbers of this range are the same in every program. A normal one is rounded as XLA likes.
    drawn = jax.random.uniform(e["key"], h.shape[1:], jnp.float32, -1, 1).astype(h.dtype)
    return h + drawn[None] * over(w(2, h.shape[2])[0], h)


def dropped_weight(h: Array, e: Tree, w: Make) -> Array:
    matrix = w(h.shape[2], 3)
    return h @ jnp.where(kept(e["key"], *matrix.shape), matrix, 0)


def dropped_layer(h: Array, e: Tree, w: Make) -> Array:
    matrix = w(h.shape[2], h.shape[2])
    return lax.cond(kept(e["key"]), lambda: jnp.tanh(h @ matrix), lambda: h)


def dropout_in_time(h: Array, e: Tree, w: Make) -> Array:
    matrix = w(h.shape[2], h.shape[2])

    def cell(state: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        x, key = step
        state = jnp.tanh(x + jnp.where(kept(key, h.shape[2])[None], state, 0) @ matrix)
        return state, state

    steps = (swap_time(h), jax.random.split(e["key"], h.shape[1]))
    return swap_time(lax.scan(cell, jnp.zeros_like(h[:, 0]), steps)[1])


def drawn_rows(h: Array, e: Tree, w: Make) -> Array:
    return h + table(h, w)[jax.random.randint(e["key"], (h.shape[1],), 0, VOCABULARY)][None]


# Ids out of range.


def masked_ids(h: Array, e: Tree, w: Make) -> Array:
    is_id = (e["ids"] >= 0) & (e["ids"] < VOCABULARY)
    rows = table(h, w)[jnp.where(is_id, e["ids"], 0)]
    return h + fit(jnp.where(is_id[..., None], rows, 0), h)


def taken(mode: str, **options: float) -> Operation:
    return lambda h, e, w: h + fit(jnp.take(table(h, w), e["ids"], axis=0, mode=mode, **options), h)


def of_tokens(operation: Callable[[Array, Array, Make], Array]) -> Operation:
    return lambda h, e, w: operation(h, e["tokens"], w)


WITH_KEY: dict[str, Operation] = {
    "dropout": dropout,
    "noise": noise,
    "dropped weight": dropped_weight,
    "dropped layer": dropped_layer,
    "dropout in time": dropout_in_time,
    "drawn rows": drawn_rows,
}
WITHOUT_KEY: dict[str, Operation] = {
    **{name: of_tokens(operation) for name, operation in OPERATIONS.items()},
    "guarded input": guarded_input,
    "guarded product": guarded_product,
    "guarded direction": guarded_direction,
    "guarded logarithm": guarded_logarithm,
    "guarded switch": guarded_switch,
    "guarded mean": guarded_mean,
    "guarded in time": guarded_in_time,
    "guarded state": guarded_state,
    "guarded for all": guarded_for_all,
    "guarded by where": guarded_by_where,
    "guarded weight": guarded_weight,
    "cond in time": cond_in_time,
    "skips in time": skips_in_time,
    "scan in cond": scan_in_cond,
    "switch in layers": switch_in_layers,
    "cond of positions": cond_of_positions,
    "lookup in cond": lookup_in_cond,
    "ids": lambda h, e, w: h + fit(table(h, w)[e["ids"]], h),
    "ids fill": taken("fill", fill_value=0),
    "ids clip": taken("clip"),
    "ids wrap": taken("wrap"),
    "ids get": lambda h, e, w: h + fit(table(h, w).at[e["ids"]].get(mode="fill", fill_value=0.5), h),
    "ids one hot": lambda h, e, w: (
        h + fit(jax.nn.one_hot(e["ids"], VOCABULARY, dtype=h.dtype) @ table(h, w), h)
    ),
    "ids masked": masked_ids,
}


# Losses of the last activations.


def labels_of(h: Array, e: Tree) -> Array:
    """A class for each position, [B, T], or `IGNORED`."""
    labels = fit(e["labels"], h)
    return jnp.where(labels == IGNORED, IGNORED, labels % h.shape[2])


def picked(h: Array, labels: Array) -> Array:
    return jnp.take_along_axis(jax.nn.log_softmax(h), labels[..., None], axis=2)[..., 0]


def masked_mean(x: Array, mask: Array) -> Array:
    return jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(jnp.sum(mask), 1).astype(x.dtype)


def safe_labels(h: Array, e: Tree) -> Array:
    labels = labels_of(h, e)
    return -masked_mean(picked(h, jnp.where(labels == IGNORED, 0, labels)), labels != IGNORED)


def raw_labels(h: Array, e: Tree) -> Array:
    """`IGNORED` is looked up, which is out of range, and what is found there does not count."""
    labels = labels_of(h, e)
    return -masked_mean(picked(h, labels), labels != IGNORED)


def one_hot_labels(h: Array, e: Tree) -> Array:
    """The row of `IGNORED` is zero."""
    return -jnp.mean(jax.nn.log_softmax(h) * jax.nn.one_hot(labels_of(h, e), h.shape[2], dtype=h.dtype))


def guarded_labels(h: Array, e: Tree) -> Array:
    labels = labels_of(h, e)
    counts = (labels != IGNORED).astype(h.dtype)
    total, count = jnp.sum(picked(h, jnp.maximum(labels, 0)) * counts), jnp.sum(counts)
    return lax.cond(count > 0, lambda: -total / count, lambda: jnp.zeros_like(total))


def guarded_cosine(h: Array, e: Tree) -> Array:
    pooled = jnp.sum(h, axis=(0, 1))
    size = square_of(pooled)
    return lax.cond(size > LEAST, lambda: pooled[0] / jnp.sqrt(size), lambda: jnp.zeros_like(size))


HEADS: dict[str, Callable[[Array, Tree], Array]] = {
    "squares": lambda h, e: jnp.mean(jnp.square(h - 0.3)),
    "labels": safe_labels,
    "raw labels": raw_labels,
    "one hot labels": one_hot_labels,
    "guarded labels": guarded_labels,
    "guarded cosine": guarded_cosine,
}
