"""Cases with loops and conditionals; how to read and add them is said in `cases`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from tests.support.cases import (
    SEQ,
    TEXT,
    XY,
    Tree,
    case,
    cross_entropy,
    data,
    dense,
    dropout,
    ids,
    layer,
    layer_norm,
    mse,
    norm,
    over,
    param,
    product,
    rms_norm,
    rng,
    transformer_spec,
    typed_key,
)
from tests.support.cases import block as transformer_block

# Four layers of width six, from three numbers to two.
ENDS = {"in": param(3, 6), "out": param(6, 2)}
FROZEN = rng("frozen stack").normal(size=(4, 6, 6))


def stacked(length: int, tree: Tree) -> Tree:
    """The makers of `tree`, each called `length` times and stacked."""
    return jax.tree.map(
        lambda make: lambda r, dtype: jnp.stack([make(r, dtype) for _ in range(length)]), tree
    )


def through(p: Tree, batch: Tree, run: Callable[[Array], Array]) -> Array:
    """The loss of `run` between the two layers of `ENDS`."""
    return mse(run(batch["x"] @ p["in"]) @ p["out"], batch["y"])


def tanh_layer(x: Array, w: Array) -> tuple[Array, None]:
    return jnp.tanh(x @ w), None


def by_time(x: Array) -> Array:
    return jnp.swapaxes(x, 0, 1)


def zeros(batch: Tree, *shape: int) -> Array:
    return jnp.zeros((len(batch["x"]), *shape), batch["x"].dtype)


def each(one: Callable[[Tree], Array], batch: Tree) -> Array:
    """The mean of `one` over the examples, which are called one by one, without vmap."""
    size = len(jax.tree.leaves(batch)[0])
    return jnp.mean(jnp.stack([one(jax.tree.map(lambda x, i=i: x[i], batch)) for i in range(size)]))


# Loops over stacked layers.


@case(ENDS | {"norm": stacked(7, norm(6)), "layer": stacked(7, layer(6, 6))}, SEQ)
def scan_layers_with_norms(p: Tree, batch: Tree) -> Array:
    # Products, sums and sums of products leave one loop stacked; carried and stacked results count.
    def body(x: Array, q: Tree) -> tuple[Array, Array]:
        x = x + jnp.tanh(dense(q["layer"], layer_norm(q["norm"], x)))
        return x, jnp.mean(jnp.square(x))

    x, means = lax.scan(body, batch["x"] @ p["in"], {"norm": p["norm"], "layer": p["layer"]})
    return mse(x @ p["out"], batch["y"]) + jnp.sum(means)


@case(ENDS | {"w": param(6, 24), "b": param(6, 4), "s": param(24, around=1.0)}, XY)
def scan_stack_rearranged(p: Tree, batch: Tree) -> Array:
    # Reshape, transpose and cast stand before the loop, so they come after it in the gradient.
    w = jnp.moveaxis(p["w"].reshape(6, 4, 6), 1, 0)
    s = p["s"].astype(jnp.float32).astype(p["s"].dtype).reshape(4, 6)

    def body(x: Array, q: tuple[Array, ...]) -> tuple[Array, None]:
        w, b, s = q
        return jnp.tanh(x @ w + over(b, x)) * over(s, x), None

    return through(p, batch, lambda x: lax.scan(body, x, (w, p["b"].T, s))[0])


@case(ENDS | {"v": param(4, 6, 6), "g": param(4, 6, around=1.0)}, XY)
def scan_stack_weight_norm(p: Tree, batch: Tree) -> Array:
    # After the loop the entries of each layer's gradient are mixed.
    length = jnp.sqrt(jnp.sum(jnp.square(p["v"]), axis=1, keepdims=True))
    w = p["v"] / length * p["g"][:, None]
    return through(p, batch, lambda x: lax.scan(tanh_layer, x, w)[0])


@case(ENDS | {"a": param(6, 2), "b": param(4, 2, 6)}, XY)
def scan_stack_lora(p: Tree, batch: Tree) -> Array:
    # A low-rank weight for each layer, with one factor for all: its gradient sums the layers'.
    w = jnp.asarray(FROZEN, batch["x"].dtype) + jnp.einsum("ir,lro->lio", p["a"], p["b"])
    return through(p, batch, lambda x: lax.scan(tanh_layer, x, w)[0])


@case(ENDS | {"mix": param(4, 2), "basis": param(2, 6, 6), "sum": param(4, 6)}, XY)
def scan_stack_mixed(p: Tree, batch: Tree) -> Array:
    # After the loop layers are mixed with each other: by a product, by a running sum.
    w = jnp.einsum("lk,kio->lio", p["mix"], p["basis"])

    def body(x: Array, q: Tree) -> tuple[Array, None]:
        return jnp.tanh(dense(q, x)), None

    return through(p, batch, lambda x: lax.scan(body, x, {"w": w, "b": jnp.cumsum(p["sum"], 0)})[0])


@case(ENDS | {"w": param(4, 6, 6)}, XY)
def scan_stack_twice(p: Tree, batch: Tree) -> Array:
    # Down through the layers, back up through their transposes: two loops' results are added.
    def back(x: Array, w: Array) -> tuple[Array, None]:
        return jnp.tanh(x @ w.T), None

    def run(x: Array) -> Array:
        x, _ = lax.scan(tanh_layer, x, p["w"])
        return lax.scan(back, x, p["w"], reverse=True)[0]

    return through(p, batch, run)


@case(ENDS | {"w": param(4, 6, 6)}, XY)
def scan_stack_and_outside(p: Tree, batch: Tree) -> Array:
    # The stack is also used as a whole, weighed by the example, and one of its layers is again.
    def run(x: Array) -> Array:
        return lax.scan(tanh_layer, x, p["w"])[0] @ p["w"][2]

    penalty = jnp.mean(jnp.square(batch["x"])) * jnp.sum(jnp.square(p["w"]))
    return through(p, batch, run) + penalty


@case(ENDS | {"w": param(4, 6, 6)}, XY)
def scan_stack_sliced(p: Tree, batch: Tree) -> Array:
    # A loop over the first layers and one over the rest: each result covers a part of the gradient.
    def run(x: Array) -> Array:
        x, _ = lax.scan(tanh_layer, x, p["w"][:1])
        return lax.scan(lambda x, w: (x + jnp.sin(x @ w), None), x, p["w"][1:])[0]

    return through(p, batch, run)


@case(ENDS | {"w": param(6, 6), "scale": param(4, 6, around=1.0), "b": param(6), "s": param()}, XY)
def scan_stack_and_shared(p: Tree, batch: Tree) -> Array:
    # Stacked scales, and a matrix, a bias and a number for all layers, in one loop.
    def body(x: Array, scale: Array) -> tuple[Array, None]:
        return jnp.tanh(p["s"] * x + (x * over(scale, x)) @ p["w"] + over(p["b"], x)), None

    return through(p, batch, lambda x: lax.scan(body, x, p["scale"])[0])


@case(ENDS | {"w": param(7, 6, 6)}, XY)
def scan_reverse_unrolled(p: Tree, batch: Tree) -> Array:
    # From the last layer to the first, two in a turn, which does not divide their number.
    def body(x: Array, w: Array) -> tuple[Array, Array]:
        return jnp.tanh(x @ w), x

    def run(x: Array) -> Array:
        x, before = lax.scan(body, x, p["w"], reverse=True, unroll=2)
        return x + before[0] * before[3]

    return through(p, batch, run)


@case(ENDS | {"w": param(4, 6, 6), "h": param(6, 6)}, XY)
def scan_unrolled_fully(p: Tree, batch: Tree) -> Array:
    # unroll=True, with a stacked and a shared weight.
    def body(x: Array, w: Array) -> tuple[Array, None]:
        return jnp.tanh(x @ w) @ p["h"], None

    return through(p, batch, lambda x: lax.scan(body, x, p["w"], unroll=True)[0])


def with_bias(p: Tree, batch: Tree) -> Array:
    return through(
        p, batch, lambda x: lax.scan(lambda x, w: tanh_layer(x + p["b"][None], w), x, p["w"])[0]
    )


@case(ENDS | {"w": param(1, 6, 6), "b": param(6)}, XY)
def scan_of_length_one(p: Tree, batch: Tree) -> Array:
    # One turn: the axis of the stack and a single product.
    return with_bias(p, batch)


@case(ENDS | {"w": param(0, 6, 6), "b": param(6)}, XY)
def scan_of_length_zero(p: Tree, batch: Tree) -> Array:
    # No turn: a gradient without entries, and one that is zero.
    return with_bias(p, batch)


@case(ENDS | {"w": param(6, 6)}, XY)
def scan_without_inputs(p: Tree, batch: Tree) -> Array:
    # Nothing but a length and a carry.
    def body(x: Array, _: None) -> tuple[Array, None]:
        return jnp.tanh(x @ p["w"]), None

    return through(p, batch, lambda x: lax.scan(body, x, None, length=4)[0])


# Loops and remat.


@case(ENDS | {"w": param(4, 6, 6), "h": param(6, 6)}, XY)
def remat_around_scan(p: Tree, batch: Tree) -> Array:
    # The loop itself is recomputed, and its weights stand behind a barrier.
    @jax.checkpoint
    def run(x: Array, q: Tree) -> Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w @ q["h"]), None), x, q["w"])[0]

    return through(p, batch, lambda x: run(x, p))


@case(ENDS | {"w": param(4, 6, 6), "h": param(6, 6)}, XY)
def scan_remat_saving_products(p: Tree, batch: Tree) -> Array:
    # A policy inside the loop: products are saved, the rest is recomputed; weights closed over.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def body(x: Array, w: Array) -> tuple[Array, None]:
        return jnp.tanh(jnp.sin(x @ w) @ p["h"]), None

    return through(p, batch, lambda x: lax.scan(body, x, p["w"])[0])


@case(ENDS | {"w": param(4, 6, 6), "v": param(4, 6, 6)}, XY)
def scan_remat_saving_names(p: Tree, batch: Tree) -> Array:
    # Names inside the loop, one of them on a weight.
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("hidden", "weight")
    )
    def body(x: Array, q: tuple[Array, Array]) -> tuple[Array, None]:
        w, v = q
        hidden = checkpoint_name(jnp.tanh(x @ checkpoint_name(0.5 * w, "weight")), "hidden")
        return x + jnp.sin(hidden @ v), None

    return through(p, batch, lambda x: lax.scan(body, x, (p["w"], p["v"]))[0])


@case(ENDS | {"w": param(2, 3, 6, 6), "b": param(2, 6), "h": param(6, 6)}, XY)
def scan_remat_nested(p: Tree, batch: Tree) -> Array:
    # Blocks of layers, a loop in a loop, with remat at both levels and around all.
    nothing = functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False
    )

    @nothing
    def one(x: Array, w: Array) -> tuple[Array, None]:
        return jnp.tanh(x @ w + x @ p["h"]), None

    @nothing
    def some(x: Array, q: Tree) -> tuple[Array, None]:
        return lax.scan(one, x + over(q["b"], x), q["w"])[0], None

    @nothing
    def run(x: Array) -> Array:
        return lax.scan(some, x, {"w": p["w"], "b": p["b"]})[0]

    return through(p, batch, run)


# Loops in loops.


@case(ENDS | {"w": param(2, 3, 6, 6), "scale": param(2, 6, around=1.0), "h": param(6, 6)}, SEQ)
def scan_blocks_of_layers(p: Tree, batch: Tree) -> Array:
    # Weights stacked twice, once and not at all; the shared one is used at both levels.
    def one(x: Array, w: Array) -> tuple[Array, None]:
        return jnp.tanh(x @ w + x @ p["h"]), None

    def some(x: Array, q: Tree) -> tuple[Array, None]:
        return lax.scan(one, x * over(q["scale"], x), q["w"])[0] @ p["h"], None

    return through(p, batch, lambda x: lax.scan(some, x, {"w": p["w"], "scale": p["scale"]})[0])


@case(ENDS | {"x": stacked(2, layer(6, 6)), "h": param(2, 6, 6), "start": param(2, 6)}, SEQ)
def scan_time_in_layers(p: Tree, batch: Tree) -> Array:
    # Stacked recurrent layers: inside, a slice of the stack is a constant of a loop over time.
    def one(xs: Array, q: Tree) -> tuple[Array, None]:
        def cell(h: Array, x: Array) -> tuple[Array, Array]:
            h = jnp.tanh(dense(q["x"], x) + h @ q["h"])
            return h, h

        start = jnp.broadcast_to(q["start"][None], xs.shape[1:])
        return lax.scan(cell, start, xs)[1], None

    stack = {name: p[name] for name in ("x", "h", "start")}
    return through(p, batch, lambda x: by_time(lax.scan(one, by_time(x), stack)[0]))


@case(ENDS | {"w": param(2, 6, 6), "v": param(2, 6, 6), "b": param(6)}, SEQ)
def scan_layers_in_time(p: Tree, batch: Tree) -> Array:
    # A recurrent cell that loops over stacked layers: the outer loop sums the stacks of the inner.
    def cell(states: Array, x: Array) -> tuple[Array, Array]:
        def one(x: Array, q: tuple[Array, ...]) -> tuple[Array, Array]:
            w, v, state = q
            state = jnp.tanh(x @ w + state @ v + over(p["b"], x))
            return state, state

        x, states = lax.scan(one, x, (p["w"], p["v"], states))
        return states, x

    def run(x: Array) -> Array:
        states = jnp.zeros((2, len(x), 6), x.dtype)
        return by_time(lax.scan(cell, states, by_time(x))[1])

    return through(p, batch, run)


# Recurrences: weights are constants of a loop over time, and their gradients are summed in it.


@case({"w": param(9, 24), "b": param(24), "h": param(6), "c": param(6), "out": param(6, 2)}, SEQ)
def lstm(p: Tree, batch: Tree) -> Array:
    # One product of a concatenation, its result split; the two states start at parameters.
    def cell(state: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        i, f, g, o = jnp.split(dense(p, jnp.concatenate([x, h], axis=1)), 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = tuple(jnp.broadcast_to(p[name][None], (len(batch["x"]), 6)) for name in "hc")
    _, h = lax.scan(cell, start, by_time(batch["x"]))
    return mse(by_time(h) @ p["out"], batch["y"])


@case({"x": param(3, 18), "h": param(6, 18), "b": param(18), "out": param(6, 2)}, SEQ)
def gru(p: Tree, batch: Tree) -> Array:
    # As in cuDNN: the inputs' products stand before the loop, the states' inside.
    def cell(h: Array, x: Array) -> tuple[Array, Array]:
        xr, xz, xn = jnp.split(x, 3, axis=1)
        hr, hz, hn = jnp.split(h @ p["h"] + p["b"][None], 3, axis=1)
        z = jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h
        return h, h

    _, h = lax.scan(cell, zeros(batch, 6), by_time(batch["x"] @ p["x"]))
    return mse(by_time(h) @ p["out"], batch["y"])


@case({"x": param(3, 6), "h": param(6, 6), "out": param(6, 2)}, XY)
def rnn_constant_input(p: Tree, batch: Tree) -> Array:
    # One factor does not change over the loop; the loss is added up in the carry.
    def cell(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        h, loss = carry
        h = jnp.tanh(batch["x"] @ p["x"] + h @ p["h"])
        return (h, loss + mse(h @ p["out"], batch["y"])), None

    start = zeros(batch, 6), jnp.zeros((), batch["x"].dtype)
    return lax.scan(cell, start, length=3)[0][1]


@case({"w": param(3, 2), "b": param(2), "v": param(3, 2), "s": param()}, XY | {"z": data(4, 2)})
def scan_nothing_changes(p: Tree, batch: Tree) -> Array:
    # Both factors of w are the same in every turn, one of v is; a bias and a number likewise.
    def body(total: Array, z: Array) -> tuple[Array, None]:
        return total + p["s"] * dense(p, batch["x"]) + z * (batch["x"] @ p["v"]), None

    return mse(lax.scan(body, zeros(batch, 2), by_time(batch["z"]))[0], batch["y"])


@case({"w": param(6, 6), "in": param(3, 6)}, SEQ)
def rnn_weight_many_times(p: Tree, batch: Tree) -> Array:
    # One weight four times in the body: plain, again, transposed, a slice; and once more outside.
    def cell(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(x + jnp.tanh(h @ p["w"]) @ p["w"])
        return jnp.sin(h @ p["w"].T), h @ p["w"][:, 2:4]

    _, y = lax.scan(cell, zeros(batch, 6), by_time(batch["x"] @ p["in"] @ p["w"]))
    return mse(by_time(y), batch["y"])


@case({"w": param(6, 6), "v": param(6, 6), "rate": param(4), "in": param(3, 6), "out": param(6, 2)}, SEQ)
def rnn_scaled_each_step(p: Tree, batch: Tree) -> Array:
    # The weight times a number of the step, a parameter or not: no sum of factors alone.
    def cell(h: Array, step: tuple[Array, ...]) -> tuple[Array, Array]:
        x, rate, number = step
        h = jnp.tanh(x + h @ (rate * p["w"]) + jnp.sin(h) @ (number * p["v"]))
        return h, h

    numbers = jnp.asarray([0.5, -1.0, 0.0, 2.0], batch["x"].dtype)
    steps = by_time(batch["x"] @ p["in"]), p["rate"], numbers
    return mse(by_time(lax.scan(cell, zeros(batch, 6), steps)[1]) @ p["out"], batch["y"])


@case({"w": param(5, 6, 6), "shift": param(4, 6), "in": param(3, 6), "out": param(6, 2)}, SEQ)
def scan_indexed_by_counter(p: Tree, batch: Tree) -> Array:
    # A constant of the loop is indexed by its counter, two neighbours at a time, so that they overlap.
    def body(x: Array, i: Array) -> tuple[Array, None]:
        pair = lax.dynamic_slice_in_dim(p["w"], i, 2)
        return jnp.tanh(x @ pair[0] + jnp.sin(x) @ pair[1] + over(p["shift"][3 - i], x)), None

    return through(p, batch, lambda x: lax.scan(body, x, jnp.arange(4))[0])


@case({"table": param(11, 6), "h": param(6, 6)}, TEXT)
def rnn_tied_embedding(p: Tree, batch: Tree) -> Array:
    # Inside the loop a lookup and the head's product, in one table.
    def cell(h: Array, token: Array) -> tuple[Array, Array]:
        h = jnp.tanh(p["table"][token] + h @ p["h"])
        return h, h @ p["table"].T

    h = jnp.zeros((len(batch["x"]), 6), p["h"].dtype)
    return cross_entropy(by_time(lax.scan(cell, h, by_time(batch["x"]))[1]), batch["y"])


@case({"table": param(11, 6), "out": param(6, 2)}, {"x": ids(11, 4), "y": data(2)})
def rnn_lookup_alone(p: Tree, batch: Tree) -> Array:
    # Nothing but lookups in the loop, of tokens that come again: add over time first, then phi.
    def cell(h: Array, token: Array) -> tuple[Array, None]:
        return jnp.tanh(0.5 * h + p["table"][token]), None

    h = jnp.zeros((len(batch["x"]), 6), p["out"].dtype)
    return mse(lax.scan(cell, h, by_time(batch["x"]))[0] @ p["out"], batch["y"])


@case({"in": param(3, 6), "a": param(6), "b": param(6), "s": param(), "position": param(4, 6)}, SEQ)
def rnn_diagonal(p: Tree, batch: Tree) -> Array:
    # Elementwise weights, a number, and a parameter that comes step by step, beside the data.
    def cell(h: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        x, position = step
        h = over(jnp.tanh(p["a"]), h) * h + over(p["b"], x) * x * over(position, x) + p["s"]
        return h, h

    steps = by_time(batch["x"] @ p["in"]), p["position"]
    _, h = lax.scan(cell, zeros(batch, 6), steps)
    return mse(jnp.sin(by_time(h))[..., :2], batch["y"])


@case({"x": param(3, 6), "h": param(6, 6), "out": param(12, 2)}, SEQ)
def rnn_both_ways(p: Tree, batch: Tree) -> Array:
    # Forwards and backwards in time with the same weights.
    def cell(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(x @ p["x"] + h @ p["h"])
        return h, h

    run = functools.partial(lax.scan, cell, zeros(batch, 6), by_time(batch["x"]))
    h = jnp.concatenate([run()[1], run(reverse=True)[1]], axis=2)
    return mse(by_time(h) @ p["out"], batch["y"])


@case({"x": param(3, 6), "h": param(6, 6), "v": param(6, 6), "out": param(6, 2)}, SEQ)
def rnn_truncated(p: Tree, batch: Tree) -> Array:
    # stop_gradient in the loop: at every second step, and for one weight altogether.
    def cell(h: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        x, cut = step
        h = jnp.where(cut, lax.stop_gradient(h), h)
        h = jnp.tanh(x @ p["x"] + h @ p["h"] + lax.stop_gradient(h @ p["v"]))
        return h, h

    steps = by_time(batch["x"]), jnp.arange(4) % 2 == 0
    return mse(by_time(lax.scan(cell, zeros(batch, 6), steps)[1]) @ p["out"], batch["y"])


@case({"w": param(3, 6), "decay": param(3, 6), "out": param(6, 2)}, SEQ)
def linear_recurrence(p: Tree, batch: Tree) -> Array:
    # associative_scan: products, slices and pads instead of a loop.
    def combine(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] * b[0], a[1] * b[0] + b[1]

    decay = jax.nn.sigmoid(batch["x"] @ p["decay"])
    _, h = lax.associative_scan(combine, (decay, batch["x"] @ p["w"]), axis=1)
    return mse(jnp.tanh(h) @ p["out"], batch["y"])


# What else may go through a loop.


@case({"w": param(6, 6), "in": param(3, 6), "out": param(6, 2)}, XY)
def weights_in_the_carry(p: Tree, batch: Tree) -> Array:
    # All parameters are handed on with the state: their gradients are handed back, and grow.
    def turn(_: Array, state: tuple[Tree, Array]) -> tuple[Tree, Array]:
        q, x = state
        return q, jnp.tanh(x @ q["w"])

    q, x = lax.fori_loop(0, 3, turn, (p, batch["x"] @ p["in"]))
    return mse(x @ q["out"], batch["y"])


@case(ENDS | {"a": param(6, 6), "b": param(6, 6), "c": param(6)}, XY)
def weights_that_change_places(p: Tree, batch: Tree) -> Array:
    # Two weights swap from turn to turn and a third shrinks: what grows does not stay where it is.
    def body(carry: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], None]:
        x, a, b, c = carry
        return (jnp.tanh(x @ a + over(c, x)), b, a, 0.5 * c), None

    return through(p, batch, lambda x: lax.scan(body, (x, p["a"], p["b"], p["c"]), length=3)[0][0])


@case({"w": param(3, 2), "rate": param(around=0.3)}, SEQ)
def fast_weights(p: Tree, batch: Tree) -> Array:
    # Each example trains the weights for itself, step by step, and the loss is of what it learned.
    def inner(w: Array, x: Array, y: Array) -> Array:
        return mse(jnp.tanh(x @ w), y)

    def one(example: Tree) -> Array:
        def body(w: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
            return w - p["rate"] * jax.grad(inner)(w, *step), inner(w, *step)

        return jnp.mean(lax.scan(body, p["w"], (example["x"], example["y"]))[1])

    return jnp.mean(jax.vmap(one)(batch))


@case(ENDS | {"w": param(6, 6), "v": param(6, 6)}, XY)
def scan_makes_weights(p: Tree, batch: Tree) -> Array:
    # A loop over parameters alone, whose results meet the examples: it is run back for each.
    _, w = lax.scan(lambda w, _: (jnp.tanh(w @ p["v"]), w), p["w"], length=3)
    return through(p, batch, lambda x: jnp.tanh(jnp.tanh(x @ w[1]) @ w[2]))


@case(ENDS | {"w": param(4, 6, 6), "only": param(4, 3)}, XY)
def scan_with_penalty(p: Tree, batch: Tree) -> Array:
    # The loop also adds up what depends on no example; for "only" that is all there is.
    def body(carry: tuple[Array, Array], q: Tree) -> tuple[tuple[Array, Array], None]:
        x, penalty = carry
        penalty = penalty + jnp.sum(jnp.square(q["w"])) + jnp.sum(jnp.cosh(q["only"]))
        return (jnp.tanh(x @ q["w"]), penalty), None

    start = batch["x"] @ p["in"], jnp.zeros((), batch["x"].dtype)
    (x, penalty), _ = lax.scan(body, start, {"w": p["w"], "only": p["only"]})
    return mse(x @ p["out"], batch["y"]) + 0.1 * penalty


@case(ENDS | {"w": param(4, 6, 6)}, XY, typed_key, rng_argnums=2)
def scan_with_dropout(p: Tree, batch: Tree, key: Array) -> Array:
    # A key, a counter and the state in the carry: two of them have no gradient.
    def body(carry: tuple[Array, ...], w: Array) -> tuple[tuple[Array, ...], None]:
        x, key, i = carry
        key, own = jax.random.split(key)
        return (dropout(own, jnp.tanh(x @ w)) / (1 + i), key, i + 1), None

    def run(x: Array) -> Array:
        return lax.scan(body, (x, key, jnp.zeros((), x.dtype)), p["w"])[0][0]

    return through(p, batch, run)


@jax.jit
def jitted_product(x: Array, w: Array) -> Array:
    return product(jnp.tanh(x), w)


@case(ENDS | {"w": param(4, 6, 6), "h": param(6, 6)}, XY)
def scan_custom_vjp(p: Tree, batch: Tree) -> Array:
    # In the loop a rule of the user's, twice the true one, inside a jit that is called three times.
    def body(x: Array, w: Array) -> tuple[Array, None]:
        return jitted_product(jitted_product(jitted_product(x, w), p["h"]), p["h"]), None

    return through(p, batch, lambda x: lax.scan(body, x, p["w"])[0])


@case({"w": param(3, 6), "v": param(6, 2), "b": param(2)}, SEQ)
def map_positions(p: Tree, batch: Tree) -> Array:
    # lax.map: a loop without a carry; once one by one, once three at a time, with one left over.
    def one(x: Array) -> Array:
        return jnp.tanh(x @ p["w"]) @ p["v"] + p["b"]

    def positions(xs: Array) -> Array:
        return lax.map(lambda x: one(x), xs) + lax.map(lambda x: jnp.sin(one(x)), xs, batch_size=3)

    return mse(jax.vmap(positions)(batch["x"]), batch["y"])


@case([layer(3, 6), layer(6, 2)], XY)
def map_examples(p: Tree, batch: Tree) -> Array:
    # The loss itself loops over the batch: for one example, a loop of length one.
    def one(example: Tree) -> Array:
        return mse(dense(p[1], jnp.tanh(dense(p[0], example["x"][None]))), example["y"][None])

    return jnp.mean(lax.map(one, batch))


@case({"x": param(3, 6), "h": param(6, 6), "out": param(6, 2)}, SEQ)
def vmap_of_scan(p: Tree, batch: Tree) -> Array:
    # A recurrence for one example, mapped by the user, with a vmap over two starts inside the loop.
    def one(xs: Array) -> Array:
        def cell(h: Array, x: Array) -> tuple[Array, Array]:
            h = jax.vmap(lambda h: jnp.tanh(x @ p["x"] + h @ p["h"]))(h)
            return h, h[0] * h[1]

        return lax.scan(cell, jnp.stack([jnp.zeros(6), jnp.ones(6)]).astype(xs.dtype), xs)[1]

    return mse(jax.vmap(one)(batch["x"]) @ p["out"], batch["y"])


@case({"w": param(3, 6), "v": param(6, 2)}, XY)
def while_stopped(p: Tree, batch: Tree) -> Array:
    # Loops of unknown length without a gradient: the weight's norm, and a number of turns per example.
    def norm_of(w: Array) -> Array:
        def turn(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            i, u = carry
            u = w.T @ (w @ u)
            return i + 1, u / jnp.sqrt(jnp.sum(jnp.square(u)))

        start = jnp.zeros((), jnp.int32), jnp.ones(6, w.dtype)
        return jnp.sqrt(jnp.sum(jnp.square(w @ lax.while_loop(lambda c: c[0] < 9, turn, start)[1])))

    def one(example: Tree) -> Array:
        size = lax.while_loop(lambda s: s < 3, lambda s: 2 * s, 0.1 + jnp.abs(example["x"][0]))
        h = jnp.tanh(example["x"] @ (p["w"] / norm_of(lax.stop_gradient(p["w"]))))
        return mse(h @ p["v"] * size, example["y"])

    return each(one, batch)


def scanned_spec() -> Tree:
    spec = transformer_spec({"scale": param(6, around=1.0)})
    return spec | {"blocks": stacked(2, spec["blocks"][0])}


@case(scanned_spec(), TEXT)
def transformer_scanned(p: Tree, batch: Tree) -> Array:
    # As large models are written: a loop over stacked blocks, with remat, between tied embeddings.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def body(x: Array, q: Tree) -> tuple[Array, None]:
        return transformer_block(q, x, rms_norm), None

    x, _ = lax.scan(body, p["embed"][batch["x"]] + p["positions"][None], p["blocks"])
    return cross_entropy(rms_norm(p["norm"], x) @ p["embed"].T, batch["y"])


# Mutable references.

new_ref: Any = jax.new_ref if hasattr(jax, "new_ref") else jax.array_ref


@case(ENDS | {"w": param(4, 6, 6)}, XY)
def references(p: Tree, batch: Tree) -> Array:
    # What is written into a reference, at once, in a loop and in a call, is read from it later.
    def stack(x: Array) -> Array:
        state, total = new_ref(jnp.zeros_like(x)), new_ref(jnp.zeros_like(x[:, 0]))
        state[...] = x

        def layer(_: None, w: Array) -> tuple[None, None]:
            state[...] = jnp.tanh(state[...] @ w)
            total[...] += state[...][:, 0]
            return None, None

        @jax.jit
        def finish() -> None:
            state[:, 1] = jnp.sin(total[...])

        lax.scan(layer, None, p["w"])
        finish()
        return state[...]

    return through(p, batch, stack)
