"""Cases with conditionals and mixtures of experts; how to read and add them is said in `cases`."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.support.cases import SEQ, XY, Tree, case, dense, given, ids, layer, mse, param, step
from tests.support.cases_loops import ENDS, each, through

# Conditionals.


@case({"a": layer(3, 2), "b": param(3, 6), "c": param(6, 2), "s": param()}, XY)
def cond_on_example(p: Tree, batch: Tree) -> Array:
    # Each example takes its own branch, with parameters of its own: the others' gradient is zero.
    def one(example: Tree) -> Array:
        y = lax.cond(
            example["x"][0] > 0,
            lambda x: jnp.tanh(x @ p["a"]["w"] + p["a"]["b"]),
            lambda x: p["s"] * (jnp.sin(x @ p["b"]) @ p["c"]),
            example["x"],
        )
        return mse(y, example["y"])

    return each(one, batch)


@case({"w": param(3, 3), "b": param(3), "out": param(3, 2)}, XY, step(3))
def cond_shared_parameters(p: Tree, batch: Tree, i: Array) -> Array:
    # Both branches use the same weight in products of the same shape, and it is used outside, too.
    def yes(x: Array) -> Array:
        return jnp.tanh(x @ p["w"] + p["b"][None])

    def no(x: Array) -> Array:
        return jnp.sin(x @ p["w"].T) * p["b"][None]

    x = lax.cond(i < 3, yes, no, batch["x"])
    return mse(lax.cond(i > 2, no, yes, x @ p["w"]) @ p["out"], batch["y"])


@case({"w": param(3, 6), "out": param(6, 2)}, SEQ)
def cond_products_differ(p: Tree, batch: Tree) -> Array:
    # By the example, one weight is in a product over all positions or over none.
    def one(example: Tree) -> Array:
        x = example["x"]
        h = lax.cond(
            x[0, 0] > 0,
            lambda: jnp.mean(jnp.tanh(x @ p["w"]), axis=0),
            lambda: jnp.tanh(jnp.mean(x, axis=0) @ p["w"]),
        )
        return mse(h @ p["out"], example["y"][0])

    return each(one, batch)


@case({"w": param(3, 6), "v": param(6, 2)}, XY)
def cond_on_parameters(p: Tree, batch: Tree) -> Array:
    # Predicates from the parameters: clipping of a weight, which is in both branches or in one.
    def clipped(w: Array) -> Array:
        size = jnp.sqrt(jnp.sum(jnp.square(w)))
        return lax.cond(size > 1, lambda: w / size, lambda: w)

    y = jnp.tanh(batch["x"] @ clipped(p["w"])) @ clipped(0.01 * p["v"])
    return mse(lax.cond(p["v"][0, 0] > 9, lambda: 2 * y, lambda: y + jnp.sum(p["v"])), batch["y"])


@case(
    {"w": param(6, 6), "table": param(7, 6), "b": param(6)} | ENDS,
    XY | {"which": given(0, 2, 1, 3, 0), "token": ids(7)},
)
def switch_on_example(p: Tree, batch: Tree) -> Array:
    # A product, a lookup, nothing at all; an index beyond the last branch means the last.
    def one(example: Tree) -> Array:
        h = example["x"] @ p["in"]
        branches = [
            lambda h: jnp.tanh(h @ p["w"] + p["b"]),
            lambda h: h * p["table"][example["token"]],
            lambda h: h,
        ]
        h = lax.switch(example["which"].astype(jnp.int32), branches, h)
        return mse(h @ p["out"], example["y"])

    return each(one, batch)


@case({"w": param(3, 6), "v": param(6, 6), "out": param(6, 2)}, XY, step(2))
def cond_nested(p: Tree, batch: Tree, i: Array) -> Array:
    # A conditional in a conditional in a remat, one by argument, one by example.
    @jax.checkpoint
    def one(q: Tree, x: Array) -> Array:
        def inner(h: Array) -> Array:
            return lax.cond(x[1] < 0, lambda: jnp.tanh(h @ q["v"]), lambda: h @ q["v"].T)

        return lax.cond(i > 1, inner, jnp.sin, x @ q["w"]) @ q["out"]

    return each(lambda example: mse(one(p, example["x"]), example["y"]), batch)


FLAGS = jnp.array([True, False, False, True])


@case(ENDS | {"w": param(4, 6, 6), "b": param(4, 6), "h": param(6, 6)}, XY)
def cond_in_scan(p: Tree, batch: Tree) -> Array:
    # A flag for each layer says whether its own weight is used, or the one that they share.
    def body(x: Array, q: Tree) -> tuple[Array, None]:
        own, shared = lambda: dense(q["layer"], x), lambda: x @ p["h"]
        return jnp.tanh(lax.cond(q["flag"], own, shared)), None

    stack = {"layer": {"w": p["w"], "b": p["b"]}, "flag": FLAGS}
    return through(p, batch, lambda x: lax.scan(body, x, stack)[0])


@case({"x": param(3, 6), "h": param(6, 6), "v": param(6, 6), "out": param(6, 2)}, SEQ)
def cond_in_scan_by_example(p: Tree, batch: Tree) -> Array:
    # At each step the example's input says which weight is used; the first step is special to all.
    def one(example: Tree) -> Array:
        def cell(h: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
            i, x = step
            h = lax.cond(i == 0, lambda h: x @ p["x"], lambda h: h + x @ p["x"], h)
            h = lax.cond(x[0] > 0, lambda h: jnp.tanh(h @ p["h"]), lambda h: h * jnp.sin(h @ p["v"]), h)
            return h, h

        _, h = lax.scan(cell, jnp.zeros(6, example["x"].dtype), (jnp.arange(4), example["x"]))
        return mse(h @ p["out"], example["y"])

    return each(one, batch)


@case(ENDS | {"w": param(4, 6, 6), "h": param(6, 6)}, XY, step(1))
def scan_in_cond(p: Tree, batch: Tree, i: Array) -> Array:
    # Loops in the branches, over the same stack and of different lengths; by argument, then by example.
    def deep(x: Array) -> Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w @ p["h"]), None), x, p["w"])[0]

    def shallow(x: Array) -> Array:
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, p["w"][1:3])[0]

    def one(example: Tree) -> Array:
        x = lax.cond(i > 0, deep, shallow, example["x"] @ p["in"])
        return mse(lax.cond(example["x"][2] > 0, deep, shallow, x) @ p["out"], example["y"])

    return each(one, batch)


@case(ENDS | {"w": param(6, 6), "stop": param(6)}, XY)
def scan_until_done(p: Tree, batch: Tree) -> Array:
    # Adaptive computation: an example that is done skips the rest of the turns.
    def one(example: Tree) -> Array:
        def turn(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            h, left = carry
            go = lambda: (jnp.tanh(h @ p["w"]), left * jax.nn.sigmoid(h @ p["stop"]))  # noqa: E731
            return lax.cond(left > 0.3, go, lambda: carry), None

        start = example["x"] @ p["in"], jnp.ones((), example["x"].dtype)
        (h, left), _ = lax.scan(turn, start, length=3)
        return mse(left * (h @ p["out"]), example["y"])

    return each(one, batch)


# Mixtures of experts: four of them, for each of four positions.

EXPERTS = {"gate": param(3, 7), "w": param(7, 3, 6), "v": param(7, 6, 2)}


def gates(p: Tree, x: Array) -> Array:
    """The experts' probabilities, and a choice that rounding does not change."""
    return jax.nn.softmax(8 * (x @ p["gate"]))


@case(EXPERTS, SEQ)
def experts_gathered(p: Tree, batch: Tree) -> Array:
    # Each position looks up the matrices of its expert: a scatter-add of outer products.
    gate = gates(p, batch["x"])
    best = jnp.argmax(gate, axis=2)
    h = jax.nn.gelu(jnp.einsum("btd,btdf->btf", batch["x"], p["w"][best]))
    y = jnp.einsum("btf,btfk->btk", h, p["v"][best])
    return mse(y * jnp.max(gate, axis=2, keepdims=True), batch["y"])


@case(EXPERTS, SEQ)
def experts_top_two(p: Tree, batch: Tree) -> Array:
    # Two experts for each position, looked up by another function, weighed by their gates.
    gate, best = lax.top_k(gates(p, batch["x"]), 2)
    h = jax.nn.gelu(jnp.einsum("btd,btedf->btef", batch["x"], jnp.take(p["w"], best, axis=0)))
    y = jnp.einsum("bte,btef,btefk->btk", gate, h, jnp.take(p["v"], best, axis=0))
    return mse(y, batch["y"])


@case(EXPERTS, SEQ)
def experts_with_capacity(p: Tree, batch: Tree) -> Array:
    # Positions are sent to the experts' slots by products with zeros and ones; some find none.
    gate = gates(p, batch["x"])
    chosen = jax.nn.one_hot(jnp.argmax(gate, axis=2), 7, dtype=jnp.int32)
    slot = jnp.sum(chosen * (jnp.cumsum(chosen, axis=1) - 1), axis=2)
    sent = jnp.einsum("bte,bts->btes", chosen, jax.nn.one_hot(slot, 2, dtype=jnp.int32))
    sent = sent.astype(gate.dtype)
    h = jnp.einsum("btes,btd->besd", sent, batch["x"])
    h = jnp.einsum("besf,efk->besk", jax.nn.gelu(jnp.einsum("besd,edf->besf", h, p["w"])), p["v"])
    return mse(jnp.einsum("btes,bte,besk->btk", sent, gate, h), batch["y"])


@case(EXPERTS, SEQ)
def experts_ragged(p: Tree, batch: Tree) -> Array:
    # Positions of all examples sorted by expert, a product for each group; some groups are empty.
    x = batch["x"].reshape(-1, 3)
    gate = gates(p, x)
    best = jnp.argmax(gate, axis=1)
    order = jnp.argsort(best)
    sizes = jnp.bincount(best, length=7).astype(jnp.int32)
    h = jax.nn.gelu(lax.ragged_dot(x[order], p["w"], sizes))
    y = lax.ragged_dot(h, p["v"], sizes)[jnp.argsort(order)] * jnp.max(gate, axis=1, keepdims=True)
    return mse(y.reshape(-1, 4, 2), batch["y"])


@case(EXPERTS, SEQ)
def experts_ragged_of_one_size(p: Tree, batch: Tree) -> Array:
    # Groups of fixed sizes, the same for all examples: expert choice, where experts choose their tokens.
    x = batch["x"].reshape(-1, 3)
    scores, chosen = lax.top_k(jax.nn.softmax(x @ p["gate"]).T, 2)
    sizes = jnp.full(7, 2, jnp.int32)
    h = jax.nn.gelu(lax.ragged_dot(x[chosen.reshape(-1)], p["w"], sizes))
    y = lax.ragged_dot(h, p["v"], sizes) * scores.reshape(-1, 1)
    return mse(jnp.zeros((len(x), 2)).at[chosen.reshape(-1)].add(y).reshape(-1, 4, 2), batch["y"])


@case(EXPERTS, SEQ)
def experts_ragged_by_example(p: Tree, batch: Tree) -> Array:
    # The weights depend on the example, so the product is mapped over both operands.
    x = batch["x"].reshape(-1, 3)
    best = jnp.argmax(gates(p, x), axis=1)
    order = jnp.argsort(best)
    sizes = jnp.bincount(best, length=7).astype(jnp.int32)
    w, v = (p[name] * (1 + jnp.square(jnp.mean(x[-1]))) for name in "wv")
    y = lax.ragged_dot(jax.nn.gelu(lax.ragged_dot(x[order], w, sizes)), v, sizes)
    return mse(y[jnp.argsort(order)].reshape(-1, 4, 2), batch["y"])


@case(EXPERTS, XY)
def experts_switched(p: Tree, batch: Tree) -> Array:
    # A switch over functions of slices of the stacked weights; the gate is learned through its value.
    def one(example: Tree) -> Array:
        gate = gates(p, example["x"])
        experts = [lambda x, i=i: jax.nn.gelu(x @ p["w"][i]) @ p["v"][i] for i in range(3)]
        best = jnp.argmax(gate[:3])
        return mse(gate[best] * lax.switch(best, experts, example["x"]), example["y"])

    return each(one, batch)
