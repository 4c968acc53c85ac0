"""Cases with lookups, in every index mode, in range and out of it, and with backward rules of their own.

How to read and add cases is said in `cases`. What a lookup reads out of range is filled or clamped, and
what it would bring to the gradient is dropped or clamped. With `promise_in_bounds` it means nothing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tests.support.cases import (
    BATCH,
    Maker,
    Tree,
    array,
    case,
    data,
    dense,
    given,
    ids,
    layer,
    mse,
    over,
    param,
)


def places(low: int, high: int, *shape: int, dtype: str = "int32") -> Maker:
    """Integers from `low` to `high`; an example with room for it has both ends, and a place twice."""

    def make(r: np.random.Generator, _: object) -> Array:
        x = r.integers(low, high + 1, size=(BATCH, *shape))
        if shape and shape[-1] >= 4:
            x[..., 0], x[..., 1], x[..., -1] = low, high, x[..., 2]
        return array(x, dtype)

    return make


def pooled(p: Tree, h: Array, target: Array) -> Array:
    """What is made of rows [B, T, D] that were looked up."""
    return mse(jnp.mean(jnp.tanh(h), axis=1) @ p["out"], target)


Y = {"y": data(3)}


# Out of range.


@case({"table": param(7, 4), "out": layer(4, 6)}, {"x": ids(7, 5), "y": places(-100, 5, 5)})
def ignored_labels(p: Tree, batch: Tree) -> Array:
    # Labels of -100 are left out, as everybody writes it; no label reads what is no class.
    labels = jnp.where(batch["y"] < 0, -100, batch["y"])
    logp = jax.nn.log_softmax(dense(p["out"], jnp.tanh(p["table"][batch["x"]])))
    chosen = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    return -jnp.mean(jnp.where(labels >= 0, chosen, 0))


@case({"logits": param(3, 40), "bias": param(40)}, {"y": places(-100, 39, 3)})
def ignored_labels_of_logits(p: Tree, batch: Tree) -> Array:
    # The same, where what is looked up in is made of parameters alone; by an index, and multiplied by 0.
    labels = jnp.where(batch["y"] < 0, -100, batch["y"])
    logp = jnp.broadcast_to(jax.nn.log_softmax(p["logits"])[None], (len(labels), 3, 40))
    chosen = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    indexed = jax.nn.log_softmax(p["bias"])[labels] * (labels >= 0)
    return -jnp.mean(jnp.where(labels >= 0, chosen, 0) * jnp.exp(indexed))


@case({"table": param(7, 4), "out": param(4, 3)}, {"x": places(-9, 8, 6)} | Y)
def lookup_outside(p: Tree, batch: Tree) -> Array:
    # Plain indexing: negative ones count from the end, others out of range read the nearest row and
    # leave nothing behind. Seven is the padding that stands one behind the table.
    return pooled(p, p["table"][batch["x"]], batch["y"])


@case({"tables": param(2, 7, 4), "out": param(4, 3)}, {"x": places(-9, 8, 2, 6)} | Y)
def lookup_outside_of_several(p: Tree, batch: Tree) -> Array:
    # Several tables, each with lookups of its own, under the loss's own map.
    h = jax.vmap(lambda table, x: table[x], (0, 1), 2)(p["tables"], batch["x"])
    return pooled(p, jnp.sum(h, axis=2), batch["y"])


MODES = ("fill", "drop", "clip", "promise_in_bounds")


@case(
    {"tables": {mode: param(7, 4) for mode in MODES}, "out": param(4, 3)},
    {"x": places(-9, 8, 6), "inside": places(-7, 6, 6)} | Y,
)
def get_in_every_mode(p: Tree, batch: Tree) -> Array:
    # What is filled reads as NaN, and is left out by a choice: the cotangents that are dropped are NaN.
    h = 0
    for mode, table in p["tables"].items():
        x = batch["inside" if mode == "promise_in_bounds" else "x"]
        rows = jnp.tanh(table.at[x].get(mode=mode))
        h = h + jnp.where(jnp.isnan(rows), 0.3, jnp.square(rows))
    return pooled(p, h, batch["y"])


@case(
    {"tables": {mode: param(7, 4) for mode in ("fill", "clip", "wrap")}, "out": param(4, 3)},
    {"x": places(-9, 15, 6)} | Y,
)
def take_in_every_mode(p: Tree, batch: Tree) -> Array:
    h = 0
    for mode, table in p["tables"].items():
        rows = jnp.tanh(jnp.take(table, batch["x"], axis=0, mode=mode))
        h = h + jnp.where(jnp.isnan(rows), 0.3, jnp.square(rows))
    return pooled(p, h, batch["y"])


@case(
    {"tables": {mode: param(4, 7) for mode in ("fill", "clip", "promise_in_bounds")}},
    {"x": places(-9, 8, 4, 5), "inside": places(0, 6, 4, 5), "y": data(4, 5)},
)
def take_along_axis_in_every_mode(p: Tree, batch: Tree) -> Array:
    h = 0
    for mode, table in p["tables"].items():
        x = batch["inside" if mode == "promise_in_bounds" else "x"]
        table = jnp.broadcast_to(table[None], (len(x), 4, 7))
        entries = jnp.tanh(jnp.take_along_axis(table, x, axis=2, mode=mode))
        h = h + jnp.where(jnp.isnan(entries), 0.3, jnp.square(entries))
    return mse(h, batch["y"])


@case({"table": param(7, 4), "out": param(4, 3)}, {"x": places(-9, 8, 6)} | Y)
def filled_with_a_number(p: Tree, batch: Tree) -> Array:
    # What is out of range reads as a number that is no parameter.
    rows = p["table"].at[batch["x"]].get(mode="fill", fill_value=0.7)
    return pooled(p, rows, batch["y"])


@case({"table": param(4, 7, 3), "scale": param(), "out": param(4, 3)}, {"x": places(-9, 8, 6)} | Y)
def scaled_outside(p: Tree, batch: Tree) -> Array:
    # A table that is moved and multiplied by what is learned, then rows that are.
    table = p["scale"] * jnp.moveaxis(p["table"], 0, 2)
    rows = table.at[batch["x"], 1].get(mode="fill", fill_value=0) * p["scale"]
    return pooled(p, rows, batch["y"])


@case({"table": param(5, 6, 4), "out": param(4, 3)}, {"x": places(-7, 6, 6), "z": places(-7, 6, 6)} | Y)
def pairs_outside(p: Tree, batch: Tree) -> Array:
    # Two indices: one out of range is enough.
    rows = p["table"][batch["x"], batch["z"]] + p["table"].at[batch["z"], 2].get(mode="clip")
    return pooled(p, rows, batch["y"])


@case(
    {"bytes": param(256, 2), "more": param(300, 2), "few": param(5, 2), "out": param(2, 3)},
    {"x": places(0, 255, 6, dtype="uint8"), "z": places(-6, 5, 6, dtype="int8")} | Y,
)
def narrow_indices(p: Tree, batch: Tree) -> Array:
    # Indices of a type that does not hold the number of rows.
    x = batch["x"]
    rows = jnp.take(p["bytes"], x, axis=0) + p["more"][x] + jnp.take(p["few"], batch["z"], axis=0)
    return pooled(p, jnp.where(jnp.isnan(rows), 0.1, rows), batch["y"])


@case({"positions": param(9, 3), "table": param(7, 3), "out": param(3, 3)}, {"x": ids(7, 6)} | Y)
def more_positions_than_rows(p: Tree, batch: Tree) -> Array:
    # Places that are the same for every example, of which two are behind the last row.
    rows = p["table"][batch["x"]] * p["positions"][jnp.arange(5, 11)][None]
    return pooled(p, rows, batch["y"])


@case({"w": param(7, 3), "v": param(7, 5)}, {"i": given(-9, -2, 3, 5, 9), "y": data(4, 3)})
def slices_outside(p: Tree, batch: Tree) -> Array:
    # Starts out of range are moved until the window fits, forward and backward.
    starts = batch["i"].astype(jnp.int32)
    windows = [lax.dynamic_slice_in_dim(p["w"], i, 4) for i in starts]
    single = [lax.dynamic_index_in_dim(p["w"], i, keepdims=False) for i in starts]
    corners = [lax.dynamic_slice(p["v"], (i, i), (4, 3)) for i in starts]
    h = jnp.stack(windows) + jnp.stack(single)[:, None] * jnp.stack(corners)
    return mse(jnp.tanh(h), batch["y"])


@case({"w": param(7, 3), "v": param(7, 5)}, {"i": given(-9, -2, 3, 5, 9), "y": data(4, 3)})
def slices_outside_mapped(p: Tree, batch: Tree) -> Array:
    # The same under vmap: gathers of windows, which clip.
    def one(i: Array, y: Array) -> Array:
        window = lax.dynamic_slice_in_dim(p["w"], i, 4)
        window += lax.dynamic_index_in_dim(p["w"], i) * lax.dynamic_slice(p["v"], (i, i), (4, 3))
        return mse(jnp.tanh(window), y)

    return jnp.mean(jax.vmap(one)(batch["i"].astype(jnp.int32), batch["y"]))


WINDOWS = lax.GatherDimensionNumbers(offset_dims=(2, 3), collapsed_slice_dims=(), start_index_map=(0,))


@case({"w": param(7, 3), "out": param(3, 3)}, {"i": places(-2, 6, 4)} | Y)
def windows_outside(p: Tree, batch: Tree) -> Array:
    # Windows that stand out of the table by a part are dropped as a whole.
    def windows(mode: str) -> Array:
        i = batch["i"][..., None]
        return lax.gather(p["w"], i, WINDOWS, (2, 3), mode=mode, fill_value=0.2)

    rows = windows("fill") + jnp.square(windows("clip"))
    return pooled(p, rows.reshape(len(rows), 8, 3), batch["y"])


@case(
    {"w": param(6, 3), "v": param(6, 3), "u": param(4, 3), "out": param(3, 3)},
    {"i": places(-8, 7, 4)} | Y,
)
def written_outside(p: Tree, batch: Tree) -> Array:
    # Parameters are written at places of the data, and the data into parameters.
    i = batch["i"]
    write = jax.vmap(lambda i, u: jnp.zeros((6, 3), u.dtype).at[i].add(u), (0, None))
    h = write(i, p["u"]) + jax.vmap(lambda i: p["w"].at[i].set(0.5 * p["u"], mode="drop"))(i)
    h = h * jax.vmap(lambda i: p["v"].at[i].multiply(2.0))(i)
    return pooled(p, h, batch["y"])


# Rows that are looked up twice, and rows that are dropped, scaled or joined before they are looked up.

TWO = {"x": places(0, 6, 5), "z": places(-9, 8, 4)} | Y


@case({"table": param(7, 4), "out": param(4, 3)}, TWO)
def looked_up_twice(p: Tree, batch: Tree) -> Array:
    # A token and its neighbours, in one table: some rows are read by both, some by one of them.
    h = jnp.tanh(p["table"][batch["x"]])
    return pooled(p, h, batch["y"]) + pooled(p, p["table"].at[batch["z"]].get(mode="clip"), batch["y"])


@case({"table": param(4, 7), "scale": param(), "out": param(4, 3)}, TWO)
def looked_up_in_three_ways(p: Tree, batch: Tree) -> Array:
    # Each time the table is scaled differently, and always transposed.
    h = (3 * p["table"].T)[batch["x"]] * p["table"].T[batch["x"][:, ::-1]]
    h = h[:, :4] + jnp.take(p["table"].T * p["scale"], batch["z"], axis=0, mode="fill", fill_value=0)
    return pooled(p, h, batch["y"])


@case({"table": param(7, 4), "square": param(4, 4), "out": param(4, 3)}, TWO)
def looked_up_in_two_layouts(p: Tree, batch: Tree) -> Array:
    # A row has another place the second time; what is a row the first time is a column the second.
    h = p["table"][batch["x"]][:, :4] * p["table"][::-1].at[batch["z"]].get(mode="clip")
    return pooled(p, h + p["square"][batch["z"] % 4] * p["square"].T[batch["z"] % 3], batch["y"])


PADDED = ("set", "several", "where", "masked", "padded")


@case({name: param(7, 4) for name in PADDED} | {"out": param(4, 3)}, TWO)
def padding_row(p: Tree, batch: Tree) -> Array:
    # The row of the padding is made 0 before it is looked up, in the ways that people write it.
    x, real = batch["x"], jnp.arange(7)[:, None] > 0
    h = p["set"].at[0].set(0.0)[x] + p["several"].at[np.array([0, 3])].set(0.0)[x]
    h = h * jnp.where(real, p["where"], 0)[x] + (p["masked"] * real)[x]
    return pooled(p, h + jnp.pad(p["padded"], ((1, 0), (0, 0)))[x], batch["y"])


@case({"table": param(7, 4), "out": param(4, 3)}, TWO)
def root_of_padding_row(p: Tree, batch: Tree) -> Array:
    # The slope of the root is infinite for the row of the padding. The gradient of that row is 0 all the
    # same, since the row is set to 0.
    x = jnp.where(batch["x"] < 3, 0, batch["x"])
    return pooled(p, jnp.sqrt(jnp.abs(p["table"].at[0].set(0.0)[x])), batch["y"])


SCALES = {"rows": param(7), "columns": param(4)}


@case({"table": param(7, 4), "twice": param(7, 4), "out": param(4, 3)} | SCALES, TWO)
def scaled_rows(p: Tree, batch: Tree) -> Array:
    # Rows and columns have scales, which are learned or not. The table whose scales are learned is read
    # again, cut and masked.
    table = p["twice"] / (3 + p["rows"][:, None]) * p["columns"][None]
    masked = table.at[0].set(0.0)[1:] * jnp.arange(6.0)[:, None].astype(table.dtype)
    h = table[batch["x"]][:, :4] + jnp.take(masked, batch["z"], axis=0, mode="clip")
    rows, columns = lax.stop_gradient((p["rows"], p["columns"]))
    h = h * (p["table"] * rows[:, None] / (2 + columns[None]))[batch["x"]][:, :4]
    return pooled(p, h, batch["y"])


@case({"table": param(7, 4), "out": param(4, 3)}, TWO)
def masked_twice(p: Tree, batch: Tree) -> Array:
    # One table with two masks: what one of them leaves out comes in by the other.
    table, x = p["table"], batch["x"]
    h = table.at[0].set(0.0)[x] * jnp.where(jnp.arange(7)[:, None] == 3, 0, table)[x]
    return pooled(p, h, batch["y"])


@case({"first": param(3, 4), "second": param(4, 4), "third": param(2, 4), "out": param(4, 3)}, TWO)
def joined_tables(p: Tree, batch: Tree) -> Array:
    # Tokens of two tables that stand one behind the other, of which one is joined to a third, too.
    h = jnp.concatenate([p["first"], p["second"]])[batch["x"]][:, :4]
    joined = jnp.concatenate([p["second"], jnp.zeros((1, 4), h.dtype), 2 * p["third"]])
    return pooled(p, h * joined.at[batch["z"]].get(mode="clip"), batch["y"])


# Nothing there.


@case(
    {"w": param(4, 3), "table": param(7, 3), "b": param(3), "none": param(0, 3), "v": param(3, 2)},
    {"x": data(0, 4), "i": ids(7, 2), "few": data(0), "z": data(3)},
)
def nothing_there(p: Tree, batch: Tree) -> Array:
    # No positions, no lookups in a table, a parameter and leaves of the batch without entries.
    h = jnp.tanh(batch["x"] @ p["w"] + over(p["b"], batch["x"])) + p["table"][batch["i"][:, :0]]
    y = jnp.tanh(batch["few"] @ p["none"]) + jnp.sum(h, axis=1)
    return jnp.mean(jnp.square((batch["z"] + y) @ p["v"]))


@case({"w": param(3, 3), "v": param(3, 2)}, {"x": data(0, 3), "z": data(3)})
def scan_over_nothing(p: Tree, batch: Tree) -> Array:
    # A recurrence without steps.
    def step(h: Array, x: Array) -> tuple[Array, None]:
        return jnp.tanh(h @ p["w"] + x), None

    h, _ = lax.scan(step, batch["z"], jnp.swapaxes(batch["x"], 0, 1))
    return jnp.mean(jnp.square(h @ p["v"]))


# Backward rules of a loss's own, which are programs like any other: linear, linear and something more,
# or neither.

PLACES = np.array([0, 9, 3, -8, 4], np.int32)  # of four rows, and of six columns


def constant(g: Array) -> Array:
    return jnp.sin(jnp.arange(24, dtype=g.dtype)).reshape(4, 6)


def zeros(g: Array) -> Array:
    return jnp.zeros((4, 6), g.dtype)


def scatter_promising(g: Array) -> Array:
    rows = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lax.scatter_add(zeros(g), PLACES[:4, None], g, rows, mode="promise_in_bounds")


def windows(g: Array, start: float) -> Array:
    return lax.reduce_window(g, jnp.asarray(start, g.dtype), lax.add, (2, 2), (1, 2), "SAME")


Rule = Callable[[Array], Array]  # of a gradient [4, 6]

RULES: dict[str, dict[str, Rule]] = {
    "affine_gathers": {
        "filled": lambda g: g.at[PLACES].get(mode="fill", fill_value=5.0),
        "filled_by_two": lambda g: g.at[PLACES, 2].get(mode="fill", fill_value=-1.5),
        "then_scaled": lambda g: 3 * g.at[:, PLACES].get(mode="fill", fill_value=0.5).T,
        "filled_with_zero": lambda g: g.at[PLACES].get(mode="fill", fill_value=0),
        "clipped": lambda g: g.at[PLACES].get(mode="clip"),
        "indexed": lambda g: g[PLACES],
        "in_range": lambda g: g.at[np.array([1, 3, 1])].get(mode="fill"),
    },
    "affine_scatters": {
        "added": lambda g: constant(g).at[PLACES[:4]].add(g),
        "added_to_zeros": lambda g: zeros(g).at[PLACES[:4]].add(g),
        "added_promising": scatter_promising,
        "added_clipped": lambda g: zeros(g).at[PLACES[:4]].add(g, mode="clip"),
        "set": lambda g: constant(g).at[PLACES[:4]].set(g),
        "set_in_itself": lambda g: g.at[PLACES[:3]].set(2 * g[1:]),
        "slice_set": lambda g: lax.dynamic_update_slice(jnp.ones((5, 8), g.dtype), g, (3, -20)),
        "slice": lambda g: lax.dynamic_slice(g, (3, -20), (2, 5)),
    },
    "affine_joins": {
        "padded": lambda g: lax.pad(g, jnp.asarray(0.5, g.dtype), ((1, -1, 0), (2, 0, 1))),
        "padded_with_itself": lambda g: lax.pad(g, g[1, 2], ((1, -1, 0), (2, 0, 1))),
        "joined": lambda g: jnp.concatenate([g, constant(g)[:2], 2 * g]),
        "selected": lambda g: jnp.where(constant(g) > 0.2, g, 0.3),
        "selected_from": lambda g: jnp.where(constant(g) > 0.2, constant(g), 2 * g),
        "windows": lambda g: windows(g, 0.0),
        "windows_from": lambda g: windows(g, 0.7),
        "sum_from": lambda g: lax.reduce(g, jnp.asarray(0.7, g.dtype), lax.add, [0]),
        "shifted": lambda g: 1.5 - g / 3,
    },
    "not_linear": {
        "clamped": lambda g: jnp.clip(g, -0.01, 0.02),
        "whole_numbers": lambda g: (100 * g).astype(jnp.int32).astype(g.dtype),
        "quantised": lambda g: g.astype(jnp.float8_e4m3fn).astype(g.dtype),
        "rounded": lambda g: lax.reduce_precision(g, 8, 3),
        "squared": lambda g: g * g,
        "of_itself": lambda g: g @ g.T,
        "divided": lambda g: g / (1 + jnp.sum(g) ** 2),
        "chosen": lambda g: jnp.where(g > 0, g, 0.1 * g),
        "where_it_is": lambda g: g[jnp.argmax(g[:, 0])],
        "maximum": lambda g: jnp.maximum(g, 0.01),
    },
}


def backward(rule: Rule) -> Callable[[Array], Array]:
    """A function [4, 6] of one array, whose gradient is `rule` of that of the result."""

    @jax.custom_vjp
    def matrix(w: Array) -> Array:
        return constant(w) * jnp.mean(w)

    matrix.defvjp(lambda w: (matrix(w), None), lambda _, g: (rule(g),))
    return matrix


def like(rule: Rule) -> Maker:
    """A parameter whose gradient `rule` makes."""

    def make(r: np.random.Generator, dtype: object) -> Array:
        shape = jax.eval_shape(rule, jax.ShapeDtypeStruct((4, 6), float)).shape
        return param(*shape)(r, dtype)

    return make


def case_of(name: str, rules: dict[str, Rule]) -> None:
    """Products and lookups of parameters with these rules, and what lies behind one of them."""

    def loss(p: Tree, batch: Tree) -> Array:
        h = batch["x"] @ p["w"]
        for rule in rules:
            products, table = (backward(rules[rule])(p[name][rule]) for name in ("products", "table"))
            h = h + jnp.tanh(batch["x"] @ products) + jnp.tanh(table[batch["i"]])
        return jnp.mean(batch["y"] * h)

    loss.__name__ = name
    p = {name: {rule: like(rules[rule]) for rule in rules} for name in ("products", "table")}
    case(p | {"w": param(4, 6)}, {"x": data(3, 4), "i": ids(4, 3), "y": data(3, 6)})(loss)


for name, rules in RULES.items():
    case_of(name, rules)


def affine_backward(change: Rule) -> Callable[[Array], Array]:
    """The identity, whose backward rule is `change`."""

    @jax.custom_vjp
    def same(x: Array) -> Array:
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
    return same


@case(param(2, 3), {"x": data(2), "y": data(3)})
def filled_cotangent(w: Array, batch: Tree) -> Array:
    # A backward pass that adds something to the cotangent: it must start from 1, and not from a weight.
    filled = affine_backward(lambda g: g.at[:, np.array([1, 9, 0])].get(mode="fill", fill_value=5.0))
    return mse(filled(jnp.tanh(batch["x"] @ w)), batch["y"])


CHANGES: list[Rule] = [
    lambda g: lax.pad(g[:, 1:], jnp.asarray(0.5, g.dtype), ((0, 0, 0), (0, 1, 0))),
    lambda g: lax.dynamic_update_slice(jnp.ones_like(g), g[:, 1:], (0, 0)),
    lambda g: g.at[:, 1].set(0.5),
    lambda g: jnp.where(jnp.arange(3)[None] > 0, g, 0.5),
    lambda g: g.astype(jnp.float8_e5m2).astype(g.dtype),
]


@case([param(2, 3) for _ in CHANGES], {"x": data(2), "y": data(3)})
def affine_cotangents(p: Tree, batch: Tree) -> Array:
    # The same in other ways.
    h = 0
    for w, change in zip(p, CHANGES, strict=True):
        h = h + jnp.square(affine_backward(change)(jnp.tanh(batch["x"] @ w)))
    return mse(h, batch["y"])
