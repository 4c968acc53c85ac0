"""Small models that every statistic and every strategy must get right.

A case is an unmodified training loss: a scalar, the mean over the examples of the batch that it is
given, whatever their number. `make_args(dtype)` builds its arguments, with a batch of `BATCH`
examples. Sizes are tiny and differ from each other and from `BATCH`, so that a wrong axis shows.
All broadcasting is explicit: the models pass `jax.numpy_rank_promotion("raise")`.

To add a case, write its loss under `@case(...)`, with one tree of makers for each argument and a
comment on what it catches.
"""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Tree = Any
Maker = Callable[[np.random.Generator, Any], Any]

BATCH = 5


@dataclass(frozen=True)
class Case:
    name: str
    loss: Callable[..., Any]
    make_args: Callable[[Any], tuple[Any, ...]]
    argnums: int | tuple[int, ...] = 0
    batch_argnums: int | tuple[int, ...] = 1
    rng_argnums: int | tuple[int, ...] = ()
    has_aux: bool = False


ADDED: list[Case] = []


def case(*specs: Tree, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the loss that follows to the cases; `specs` has a tree of makers for each argument."""

    def add(loss: Callable[..., Any]) -> Callable[..., Any]:
        def make_args(dtype: Any) -> tuple[Any, ...]:
            r = rng(loss.__name__)
            return jax.tree.map(lambda make: make(r, dtype), specs)

        ADDED.append(Case(loss.__name__, loss, make_args, **options))
        return loss

    return add


# Makers: what stands in a case's specs, and is called to make one array.


def array(x: Any, dtype: Any = None) -> Array:
    """As `jnp.asarray`, which compiles a program for each new shape."""
    return jax.device_put(np.asarray(x, dtype))


def in_float64(tree: Tree) -> Tree:
    """The tree with its floats in float64."""

    def widen(x: Any) -> Any:
        return array(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(widen, tree)


def rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def param(*shape: int, around: float = 0.0) -> Maker:
    return lambda r, dtype: array(around + 0.5 * r.normal(size=shape), dtype)


def data(*shape: int) -> Maker:
    return lambda r, dtype: array(r.normal(size=(BATCH, *shape)), dtype)


def ids(vocab: int, *shape: int) -> Maker:
    """Integers below `vocab`; along the last axis, the first one comes again at the end."""

    def make(r: np.random.Generator, dtype: Any) -> Array:
        x = r.integers(vocab, size=(BATCH, *shape))
        if shape:
            x[..., -1] = x[..., 0]
        return array(x, jnp.int32)

    return make


def given(*values: float) -> Maker:
    return lambda r, dtype: array(values, dtype)


def step(value: int) -> Maker:
    return lambda r, dtype: array(value, jnp.int32)


def typed_key(r: np.random.Generator, dtype: Any) -> Array:
    return jax.random.key(int(r.integers(1000)))


def raw_key(r: np.random.Generator, dtype: Any) -> Array:
    return jax.random.PRNGKey(int(r.integers(1000)))


def layer(d_in: int, d_out: int) -> Tree:
    return {"w": param(d_in, d_out), "b": param(d_out)}


def norm(d: int) -> Tree:
    return {"scale": param(d, around=1.0), "bias": param(d)}


XY = {"x": data(3), "y": data(2)}  # regression from three numbers to two
SEQ = {"x": data(4, 3), "y": data(4, 2)}  # the same at four positions
TEXT = {"x": ids(11, 4), "y": ids(11, 4)}  # next-token prediction, four positions
TAGS = {"x": ids(11, 6), "y": data(3)}  # six tokens to three numbers
IMAGE = {"x": data(7, 6, 2), "y": data(3)}  # two channels of 7 by 6 to three numbers


# What the models are made of.


def over(v: Array, x: Array) -> Array:
    """`v` with leading axes of length one, so that it has the rank of `x`."""
    return jnp.expand_dims(v, tuple(range(x.ndim - v.ndim)))


def dense(p: Tree, x: Array) -> Array:
    y = x @ p["w"]
    return y + over(p["b"], y)


def layer_norm(p: Tree, x: Array) -> Array:
    x = x - jnp.mean(x, -1, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-3)
    return x * over(p["scale"], x) + over(p["bias"], x)


def rms_norm(p: Tree, x: Array) -> Array:
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-3)
    return x * over(p["scale"], x)


def mse(y: Array, target: Array) -> Array:
    return jnp.mean(jnp.square(y - target))


def cross_entropy(logits: Array, labels: Array) -> Array:
    logp = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], -1))


def dropout(key: Array, x: Array) -> Array:
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


# Dense layers.


@case(param(3, 2), XY)
def linear_regression(w: Array, batch: Tree) -> Array:
    # The smallest: one product, and a bare array for the parameters.
    return mse(batch["x"] @ w, batch["y"])


@case([layer(3, 7), layer(7, 4), layer(4, 2)], XY)
def mlp(p: Tree, batch: Tree) -> Array:
    # Products and plain sums of several layers, in a list of dictionaries.
    x = batch["x"]
    for q in p[:-1]:
        x = jnp.tanh(dense(q, x))
    return mse(dense(p[-1], x), batch["y"])


@case([param(7, 3), param(2, 7)], XY)
def mlp_transposed(p: Tree, batch: Tree) -> Array:
    # The tail ends in a transpose.
    return mse(jax.nn.gelu(batch["x"] @ p[0].T) @ p[1].T, batch["y"])


@case([layer(3, 7), layer(7, 2)], XY)
def vmap_inside(p: Tree, batch: Tree) -> Array:
    # A loss that is written for one example and mapped by the user.
    def one(x: Array, y: Array) -> Array:
        return mse(dense(p[1], jnp.tanh(dense(p[0], x))), y)

    return jnp.mean(jax.vmap(one)(batch["x"], batch["y"]))


@case({"w": param(3, 4), "v": param(4, 4), "out": param(4, 2)}, XY)
def shared_layer(p: Tree, batch: Tree) -> Array:
    # Two terms for one parameter, to be added before any statistic.
    h = jnp.tanh(jnp.tanh(batch["x"] @ p["w"]) @ p["v"])
    return mse(jnp.tanh(h @ p["v"]) @ p["out"], batch["y"])


@case({"w": param(3, 7), "out": param(3, 2)}, XY)
def shared_transposed(p: Tree, batch: Tree) -> Array:
    # Two terms in different layouts: an autoencoder with W and W.T.
    return mse(jnp.tanh(batch["x"] @ p["w"]) @ p["w"].T @ p["out"], batch["y"])


@case({"a": param(3), "b": param(3), "c": param()}, {"x": data(3)})
def linear_loss(p: Tree, batch: Tree) -> Array:
    # Gradients that are the same variable of the program twice, and a literal.
    return jnp.mean(batch["x"] @ (p["a"] + p["b"])) + p["c"]


@case({"w": param(3, 2), "unused": param(4), "none": None, "empty": {}}, XY)
def unused_parameter(p: Tree, batch: Tree) -> Array:
    # A gradient that is always zero, and empty places in the tree.
    return mse(batch["x"] @ p["w"], batch["y"])


@case({"a": param(), "c": param()}, {"x": data(), "y": data()})
def scalar_parameters(p: Tree, batch: Tree) -> Array:
    # Parameters without axes, examples that are one number.
    return mse(jnp.tanh(p["a"] * batch["x"]) + p["c"], batch["y"])


# Elementwise and broadcast.


@case({"w": param(4, 3), "out": param(3, 2)}, SEQ)
def elementwise(p: Tree, batch: Tree) -> Array:
    # No sum at all: the gradient of an example is an elementwise product.
    return mse(jnp.tanh(batch["x"] * p["w"][None]) @ p["out"], batch["y"])


@case({"pos": param(4, 3), "scale": param(3), "row": param(4), "out": param(3, 2)}, SEQ)
def broadcast(p: Tree, batch: Tree) -> Array:
    # Sums over the batch, over batch and positions, and over batch and features.
    h = jnp.tanh((batch["x"] + p["pos"][None]) * p["scale"][None, None])
    return mse((h * p["row"][None, :, None]) @ p["out"], batch["y"])


@case([layer(3, 7), norm(7), layer(7, 2)], SEQ)
def layer_norm_mlp(p: Tree, batch: Tree) -> Array:
    # A norm's scale and bias: sums of products that are not matrix products.
    return mse(dense(p[2], layer_norm(p[1], jnp.tanh(dense(p[0], batch["x"])))), batch["y"])


# A parameter that is rearranged before it is used.


@case({"w": param(12), "v": param(2, 4)}, XY)
def reshaped(p: Tree, batch: Tree) -> Array:
    # The tail ends in a reshape; splitting and merging axes.
    return mse(jnp.tanh(batch["x"] @ p["w"].reshape(3, 4)) @ p["v"].reshape(4, 2), batch["y"])


@case({"w": param(2, 6, 3), "v": param(6, 2)}, SEQ)
def permuted(p: Tree, batch: Tree) -> Array:
    # A permutation of three axes that is not its own inverse.
    w = jnp.transpose(p["w"], (2, 0, 1))
    h = jnp.einsum("btd,dhk->bthk", batch["x"], w)
    return mse(jnp.einsum("bthk,kh->bth", jnp.tanh(h), p["v"]), batch["y"])


@case({"qkv": param(3, 18), "out": param(6, 2)}, SEQ)
def fused_qkv(p: Tree, batch: Tree) -> Array:
    # One product, whose output is split: the gradient's factor is a concatenation.
    q, k, v = jnp.split(batch["x"] @ p["qkv"], 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("btk,bsk->bts", q, k))
    return mse(jnp.einsum("bts,bsk->btk", weights, v) @ p["out"], batch["y"])


@case({"w": param(3, 6)}, SEQ)
def sliced_parameter(p: Tree, batch: Tree) -> Array:
    # Static slices of one parameter, also strided and reversed: each term covers a part of it.
    h = jnp.tanh(batch["x"] @ p["w"][:, :2]) * (batch["x"] @ p["w"][:, 3:5])
    return mse(h + p["w"][None, None, 0, ::-3], batch["y"])


@case({"w": param(6, 4), "out": param(4, 2)}, XY)
def split_parameter(p: Tree, batch: Tree) -> Array:
    # jnp.split of the parameter itself.
    gate, up = jnp.split(p["w"], 2)
    return mse((jax.nn.silu(batch["x"] @ gate) * (batch["x"] @ up)) @ p["out"], batch["y"])


@case({"w": param(2, 3, 3), "out": param(3, 2)}, XY)
def stacked_layers(p: Tree, batch: Tree) -> Array:
    # W[0] and W[1] of one stacked parameter.
    x = jnp.tanh(batch["x"] @ p["w"][0])
    return mse(jnp.tanh(x @ p["w"][1]) @ p["out"], batch["y"])


@case({"a": param(3, 4), "b": param(3, 2), "c": param(4, 2)}, XY)
def concatenated(p: Tree, batch: Tree) -> Array:
    # Concatenated and padded parameters: the tails end in slices.
    h = jnp.tanh(batch["x"] @ jnp.concatenate([p["a"], p["b"]], axis=1))
    return mse(h @ jnp.pad(p["c"], ((1, 1), (0, 0))), batch["y"])


@case({"w": param(3, 4), "v": param(4, 2)}, XY)
def cumulative(p: Tree, batch: Tree) -> Array:
    # Linear steps that change the entries of the gradient: a running sum, a triangle, a reversal.
    h = jnp.tanh(batch["x"] @ jnp.cumsum(p["w"], axis=1))
    return mse(h @ jnp.tril(p["v"])[::-1], batch["y"])


@case({"w": param(3, 4), "v": param(4, 2), "s": param(around=1.0), "t": param(2)}, XY)
def scaled_parameters(p: Tree, batch: Tree) -> Array:
    # muP style: weights times a constant, a scalar parameter, exp of a parameter of each column.
    h = jnp.tanh(batch["x"] @ (3**-0.5 * p["w"]))
    return mse(h @ (0.25 * p["s"] * p["v"] * jnp.exp(p["t"])[None]), batch["y"])


@case({"v": param(3, 2), "g": param(2, around=1.0)}, SEQ)
def weight_norm(p: Tree, batch: Tree) -> Array:
    # A tail that is linear in the example but dense in the parameter: the norm's Jacobian.
    length = jnp.sqrt(jnp.sum(jnp.square(p["v"]), axis=0, keepdims=True))
    return mse(batch["x"] @ (p["v"] / length * p["g"][None]), batch["y"])


@case({"w": param(3, 2)}, XY)
def cast_parameter(p: Tree, batch: Tree) -> Array:
    # A cast in the tail (from bfloat16): it comes before phi, not after the sum.
    x = batch["x"].astype(jnp.promote_types(batch["x"].dtype, jnp.float32))
    return mse(x @ p["w"].astype(x.dtype), batch["y"].astype(x.dtype))


# Low rank.

FROZEN = rng("frozen").normal(size=(3, 2))


@case({"a": param(3, 6), "b": param(6, 2)}, SEQ)
def lora_merged(p: Tree, batch: Tree) -> Array:
    # The product of two parameters; the frozen weight is a constant of the program.
    w = jnp.asarray(FROZEN, batch["x"].dtype) + p["a"] @ p["b"]
    return mse(batch["x"] @ w, batch["y"])


@case({"a": param(3, 1), "b": param(1, 2)}, SEQ, param(3, 2))
def lora_factors(p: Tree, batch: Tree, frozen: Array) -> Array:
    # An axis of length one that is not the batch.
    return mse(batch["x"] @ frozen + 2.0 * (batch["x"] @ p["a"] @ p["b"]), batch["y"])


# Products with more axes.


@case(param(3, 2), {"x": data(3), "z": data(2)})
def bilinear(w: Array, batch: Tree) -> Array:
    # Both sides of the weight are data.
    return jnp.mean(jnp.tanh(jnp.einsum("bi,ij,bj->b", batch["x"], w, batch["z"])))


@case({"w": param(2, 3, 6), "v": param(2, 6, 7)}, {"x": data(4, 2, 3), "y": data(4, 7)})
def heads(p: Tree, batch: Tree) -> Array:
    # h is a batch axis of the first product and contracted, with k, in the second.
    h = jnp.tanh(jnp.einsum("bthd,hdk->bthk", batch["x"], p["w"]))
    return mse(jnp.einsum("bthk,hkl->btl", h, p["v"]), batch["y"])


@case({"w": param(4, 6), "v": param(3, 2)}, {"x": data(4, 3), "y": data(6, 2)})
def mixer(p: Tree, batch: Tree) -> Array:
    # A product over positions: the summed axis is the features.
    return mse(jnp.tanh(jnp.einsum("btd,ts->bsd", batch["x"], p["w"])) @ p["v"], batch["y"])


@case({"gate": layer(3, 4), "w": param(4, 3, 7), "v": param(4, 7, 2)}, XY)
def mixture_of_experts(p: Tree, batch: Tree) -> Array:
    # A softmax gate over experts that all run.
    gate = jax.nn.softmax(dense(p["gate"], batch["x"]))
    h = jax.nn.gelu(jnp.einsum("bd,edf->bef", batch["x"], p["w"]))
    return mse(jnp.einsum("be,bef,efk->bk", gate, h, p["v"]), batch["y"])


@case({"w": param(3, 6), "v": param(6, 2)}, SEQ)
def preferred_element_type(p: Tree, batch: Tree) -> Array:
    # Products that accumulate in, and return, a wider type than their operands.
    wide = jnp.promote_types(batch["x"].dtype, jnp.float32)
    dims = (((2,), (0,)), ((), ()))
    h = lax.dot_general(batch["x"], p["w"], dims, preferred_element_type=wide)
    h = jnp.tanh(h).astype(batch["x"].dtype)
    y = lax.dot_general(h, p["v"], dims, preferred_element_type=wide)
    return mse(y, batch["y"].astype(wide))


# Embeddings.


@case({"table": param(11, 4), "out": param(4, 3)}, TAGS)
def embedding_indexed(p: Tree, batch: Tree) -> Array:
    # A scatter-add with a token that comes twice in an example: add first, then phi.
    return mse(jnp.mean(jnp.tanh(p["table"][batch["x"]]), axis=1) @ p["out"], batch["y"])


@case({"table": param(11, 4), "out": param(4, 3)}, TAGS)
def embedding_take(p: Tree, batch: Tree) -> Array:
    # jnp.take: another gather, which fills what is out of bounds.
    h = jnp.tanh(jnp.take(p["table"], batch["x"], axis=0))
    return mse(jnp.mean(h, axis=1) @ p["out"], batch["y"])


@case({"table": param(4, 11), "out": param(4, 3)}, TAGS)
def embedding_columns(p: Tree, batch: Tree) -> Array:
    # The looked-up axis is not the first.
    h = jnp.tanh(jnp.take(p["table"], batch["x"], axis=1, mode="clip"))
    return mse(jnp.einsum("dbt,dk->bk", h, p["out"]), batch["y"])


@case({"table": param(4, 11), "scale": param(), "out": param(4, 3)}, TAGS)
def embedding_scaled(p: Tree, batch: Tree) -> Array:
    # The whole table is moved and multiplied by a number that is learned, before it is looked up.
    h = jnp.tanh((-p["scale"] * p["table"].T)[batch["x"]])
    return mse(jnp.mean(h, axis=1) @ p["out"], batch["y"])


@case({"table": param(11, 4), "out": param(4, 3)}, TAGS)
def embedding_one_hot(p: Tree, batch: Tree) -> Array:
    # The same as a product, one factor of which has no gradient.
    one_hot = jax.nn.one_hot(batch["x"], 11, dtype=p["table"].dtype)
    h = jnp.tanh(jnp.einsum("btv,vd->btd", one_hot, p["table"]))
    return mse(jnp.mean(h, axis=1) @ p["out"], batch["y"])


@case({"table": param(4, 7)}, {"x": ids(7, 4, 3), "y": data(4, 3)})
def embedding_take_along_axis(p: Tree, batch: Tree) -> Array:
    # take_along_axis on a parameter: pairs of indices, single entries.
    table = jnp.broadcast_to(p["table"][None], (len(batch["x"]), 4, 7))
    return mse(jnp.tanh(jnp.take_along_axis(table, batch["x"], axis=2)), batch["y"])


@case({"table": param(11, 3)}, {"x": ids(11, 6), "z": ids(11, 6), "y": data(3)})
def embedding_twice(p: Tree, batch: Tree) -> Array:
    # Two lookups in one table, in sum: duplicates across the two scatters.
    h = p["table"][batch["x"]] + jnp.tanh(p["table"][batch["z"]])
    return mse(jnp.mean(jnp.tanh(h), axis=1), batch["y"])


@case({"table": param(11, 3)}, {"x": ids(11, 6), "y": ids(11)})
def embedding_log_sum_exp(p: Tree, batch: Tree) -> Array:
    # Bag of words against the same table: a scatter-add and a product for one parameter.
    logits = jnp.mean(p["table"][batch["x"]], axis=1) @ p["table"].T
    chosen = jnp.take_along_axis(logits, batch["y"][:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


@case({"w": param(7, 3)}, {"i": ids(4), "y": data(4, 3)})
def dynamic_slice(p: Tree, batch: Tree) -> Array:
    # A window of the parameter at a position that comes from the data, sliced one by one.
    windows = [lax.dynamic_slice_in_dim(p["w"], i, 4) for i in batch["i"]]
    return mse(jnp.tanh(jnp.stack(windows)), batch["y"])


@case({"w": param(7, 3)}, {"i": ids(4), "y": data(4, 3)})
def dynamic_slice_mapped(p: Tree, batch: Tree) -> Array:
    # The same under vmap: a gather of windows, whose scatter-adds overlap.
    windows = jax.vmap(lambda i: lax.dynamic_slice_in_dim(p["w"], i, 4))(batch["i"])
    return mse(jnp.tanh(windows), batch["y"])


@case({"w": param(3, 2)}, {"x": ids(7, 3), "y": data(2)})
def integer_inputs(p: Tree, batch: Tree) -> Array:
    # Integers that are cast, not looked up: no gradient flows to the batch.
    x = (1 + batch["x"]).astype(p["w"].dtype) / 7
    return mse(jnp.tanh(x @ p["w"]), batch["y"])


# What a loss may do besides.


@case({"w": param(3, 2), "b": param(2), "only": param(4)}, XY)
def regularised(p: Tree, batch: Tree) -> Array:
    # A term that depends on no example; for "only" it is all there is, and the variance is zero.
    penalty = 0.5 * jnp.sum(jnp.square(p["w"])) + jnp.sum(jnp.cosh(p["only"]))
    return mse(dense(p, batch["x"]), batch["y"]) + penalty


@case({"w": param(3, 4), "v": param(4, 2)}, XY)
def stopped(p: Tree, batch: Tree) -> Array:
    # stop_gradient: a term without a gradient, and straight-through rounding.
    v = p["v"] + lax.stop_gradient(jnp.round(4 * p["v"]) / 4 - p["v"])
    y = jnp.tanh(batch["x"] @ p["w"]) @ v
    return mse(y, batch["y"]) + jnp.sum(jnp.square(lax.stop_gradient(p["w"])))


@case([layer(3, 7), layer(7, 2)], XY | {"mask": given(1, 0, 1, 1, 0)})
def masked_examples(p: Tree, batch: Tree) -> Array:
    # Examples whose gradient is exactly zero still count: sign(0) = 0, norm 0.
    y = dense(p[1], jnp.tanh(dense(p[0], batch["x"])))
    return jnp.mean(batch["mask"] * jnp.mean(jnp.square(y - batch["y"]), axis=1))


@case({"table": param(11, 3), "out": layer(3, 11)}, TEXT | {"length": given(4, 1, 3, 2, 4)})
def padded_sequences(p: Tree, batch: Tree) -> Array:
    # Positions that count for nothing, each example divided by its own length.
    logp = jax.nn.log_softmax(dense(p["out"], jnp.tanh(p["table"][batch["x"]])))
    nll = -jnp.take_along_axis(logp, batch["y"][..., None], -1)[..., 0]
    mask = jnp.arange(4)[None] < batch["length"][:, None]
    return jnp.mean(jnp.sum(nll * mask, axis=1) / batch["length"])


@case([layer(3, 7), layer(7, 2)], XY, has_aux=True)
def with_aux(p: Tree, batch: Tree) -> tuple[Array, Tree]:
    # aux: a tree with floats, integers, arrays and scalars.
    y = dense(p[1], jax.nn.gelu(dense(p[0], batch["x"])))
    loss = mse(y, batch["y"])
    return loss, {"y": y, "best": jnp.argmax(y, axis=1), "more": (loss, p[0]["b"])}


@case({"w": param(3, 7)}, XY, layer(7, 2), argnums=(0, -1))
def two_argnums(p: Tree, batch: Tree, q: Tree) -> Array:
    # Parameters in two arguments, one counted from the end, with the batch between them.
    return mse(dense(q, jnp.tanh(batch["x"] @ p["w"])), batch["y"])


@case(data(3), data(2), layer(3, 2), argnums=-1, batch_argnums=(0, -2))
def two_batch_arguments(x: Array, y: Array, p: Tree) -> Array:
    # The batch in two arguments, the parameters last, some positions counted from the end.
    return mse(jnp.tanh(dense(p, x)), y)


@case([layer(3, 7), layer(7, 2)], XY, typed_key, rng_argnums=2)
def dropout_typed_key(p: Tree, batch: Tree, key: Array) -> Array:
    # A typed key: every example its own.
    return mse(dense(p[1], dropout(key, jnp.tanh(dense(p[0], batch["x"])))), batch["y"])


@case(raw_key, {"w": param(3, 7), "v": param(7, 2)}, XY, argnums=1, batch_argnums=2, rng_argnums=0)
def dropout_raw_key(key: Array, p: Tree, batch: Tree) -> Array:
    # A raw key, whose leading axis is no batch, in front of the parameters.
    return mse(dropout(key, jnp.tanh(batch["x"] @ p["w"])) @ p["v"], batch["y"])


@case([layer(3, 7), layer(7, 2)], XY, [typed_key, raw_key], rng_argnums=(-1,))
def dropout_two_keys(p: Tree, batch: Tree, keys: Tree) -> Array:
    # A tree of keys of both kinds.
    x = dropout(keys[0], batch["x"])
    return mse(dense(p[1], dropout(keys[1], jnp.tanh(dense(p[0], x)))), batch["y"])


@case({"w": param(3, 7), "v": param(3, 2)}, SEQ)
def sort_and_pool(p: Tree, batch: Tree) -> Array:
    # Sort, max and where: the factors hold exact zeros, the order depends on the data.
    h = jnp.sort(batch["x"] @ p["w"], axis=-1)[..., 2:5]
    h = jnp.where(h > 0.1, h, 0.3 * jnp.square(h))
    return mse(jnp.max(h, axis=1) @ p["v"], jnp.max(batch["y"], axis=1))


# Calls: the gradient program is not flat.


@jax.custom_vjp
def product(x: Array, w: Array) -> Array:
    return x @ w


def product_bwd(saved: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
    x, w = saved
    return ct @ w.T, 2.0 * (x.T @ ct)


product.defvjp(lambda x, w: (x @ w, (x, w)), product_bwd)


@case({"w": param(3, 7), "v": param(7, 2)}, XY)
def custom_vjp(p: Tree, batch: Tree) -> Array:
    # A product with a rule of its own, twice the true one: it must be the user's that is used.
    return mse(product(jnp.tanh(product(batch["x"], p["w"])), p["v"]), batch["y"])


@jax.custom_vjp
def clipped_backward(x: Array) -> Array:
    return x


clipped_backward.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.05, 0.05),))


@case([layer(3, 7), layer(7, 2)], XY)
def clipped_cotangent(p: Tree, batch: Tree) -> Array:
    # A backward pass that is not linear in the cotangent of the loss, which must stay 1.
    h = clipped_backward(jnp.tanh(dense(p[0], batch["x"])))
    return mse(dense(p[1], h), batch["y"])


@jax.custom_vjp
def own_backward(x: Array) -> Array:
    return x


own_backward.defvjp(lambda x: (x, x), lambda x, _: (jnp.sin(x),))


@case([layer(3, 7), layer(7, 2)], XY)
def ignored_cotangent(p: Tree, batch: Tree) -> Array:
    # A backward pass that takes no notice of the cotangent, so that a weight would be lost in it.
    h = own_backward(jnp.tanh(dense(p[0], batch["x"])))
    return mse(dense(p[1], h), batch["y"])


@jax.custom_jvp
def soft_clip(x: Array) -> Array:
    return jnp.clip(x, -1, 1)


@soft_clip.defjvp
def soft_clip_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return soft_clip(primals[0]), (1 - jnp.square(jnp.tanh(primals[0]))) * tangents[0]


@case([layer(3, 7), layer(7, 4), layer(4, 2)], XY)
def custom_jvp(p: Tree, batch: Tree) -> Array:
    # An own custom_jvp, on activations and on a parameter.
    h = soft_clip(dense(p[1], soft_clip(dense(p[0], batch["x"]))))
    return mse(h @ soft_clip(2 * p[2]["w"]) + over(p[2]["b"], h), batch["y"])


@case([layer(3, 7), layer(7, 6), layer(6, 4), layer(4, 2)], XY)
def library_activations(p: Tree, batch: Tree) -> Array:
    # JAX's own functions with custom_jvp and jit inside.
    x = jax.nn.relu(dense(p[0], batch["x"]))
    x = jax.nn.softplus(dense(p[1], jax.nn.silu(x)))
    x = jax.nn.relu6(jax.nn.elu(dense(p[2], x)))
    return mse(dense(p[3], x), batch["y"])


@jax.jit
def jitted_layer(p: Tree, x: Array) -> Array:
    return jnp.tanh(jax.jit(dense)(p, x))


@case([layer(3, 3), layer(3, 3), layer(3, 2)], XY)
def nested_jit(p: Tree, batch: Tree) -> Array:
    # jit in jit, called twice: the two calls share one program and its variables.
    return mse(dense(p[2], jitted_layer(p[1], jitted_layer(p[0], batch["x"]))), batch["y"])


@case([layer(3, 7), layer(7, 6), layer(6, 2)], SEQ)
def remat(p: Tree, batch: Tree) -> Array:
    # jax.checkpoint around each layer; the layers' tails stand inside.
    block = jax.checkpoint(lambda q, x: jnp.tanh(dense(q, x)))
    return mse(dense(p[2], block(p[1], block(p[0], batch["x"]))), batch["y"])


@case([layer(3, 7), layer(7, 6), layer(6, 2)], SEQ)
def remat_policy(p: Tree, batch: Tree) -> Array:
    # A policy that saves products, jit inside, remat inside remat.
    inner = jax.checkpoint(jitted_layer)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def model(p: Tree, x: Array) -> Array:
        return dense(p[2], inner(p[1], inner(p[0], x)))

    return mse(model(p, batch["x"]), batch["y"])


# Recurrence.


@case({"x": param(3, 18), "h": param(6, 18), "b": param(18), "out": param(6, 2)}, SEQ)
def gru_unrolled(p: Tree, batch: Tree) -> Array:
    # Weights shared over time, unrolled: a term for each step.
    h = jnp.zeros((len(batch["x"]), 6), batch["x"].dtype)
    for t in range(3):
        xr, xz, xn = jnp.split(batch["x"][:, t] @ p["x"] + p["b"][None], 3, axis=1)
        hr, hz, hn = jnp.split(h @ p["h"], 3, axis=1)
        z = jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h
    return mse(h @ p["out"], batch["y"][:, 3])


@case({"x": layer(3, 6), "h": param(6, 6), "start": param(6), "out": param(6, 2)}, SEQ)
def scan_over_time(p: Tree, batch: Tree) -> Array:
    # Weights that are constants of a loop: their gradients are accumulators.
    def cell(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(dense(p["x"], x) + h @ p["h"])
        return h, h @ p["out"]

    start = jnp.broadcast_to(p["start"][None], (len(batch["x"]), 6))
    _, y = lax.scan(cell, start, jnp.swapaxes(batch["x"], 0, 1))
    return mse(jnp.swapaxes(y, 0, 1), batch["y"])


@case([param(3, 6), {"w": param(2, 6, 6), "b": param(2, 6)}, param(6, 2)], SEQ)
def scan_over_layers(p: Tree, batch: Tree) -> Array:
    # Stacked layers that are inputs of a loop, with remat: their gradients leave it stacked.
    @jax.checkpoint
    def block(x: Array, q: Tree) -> tuple[Array, None]:
        return x + jnp.tanh(dense(q, x)), None

    x, _ = lax.scan(block, batch["x"] @ p[0], p[1])
    return mse(x @ p[2], batch["y"])


@case({"in": param(3, 6), "w": param(6, 6), "stack": param(3, 6), "out": param(6, 2)}, SEQ)
def fori_loop(p: Tree, batch: Tree) -> Array:
    # One weight for all turns of a loop, and a parameter indexed by the loop's counter.
    def turn(i: Array, x: Array) -> Array:
        return x + jnp.tanh(x @ p["w"]) * over(p["stack"][i], x)

    return mse(lax.fori_loop(0, 3, turn, batch["x"] @ p["in"]) @ p["out"], batch["y"])


@case({"a": layer(3, 2), "b": layer(3, 2)}, XY, step(3))
def cond_on_step(p: Tree, batch: Tree, i: Array) -> Array:
    # Branches with different parameters, chosen by an argument without examples; one is not run.
    def yes(x: Array) -> Array:
        return jnp.tanh(dense(p["a"], x))

    def no(x: Array) -> Array:
        return dense(p["b"], x)

    return mse(lax.cond(i > 2, yes, no, batch["x"]), batch["y"])


# Convolutions.

conv = functools.partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))


@case({"w": param(3, 2, 4), "b": param(4), "out": param(4, 3)}, {"x": data(6, 2), "y": data(3)})
def conv_1d(p: Tree, batch: Tree) -> Array:
    # A convolution with padding and stride.
    h = lax.conv_general_dilated(
        batch["x"], p["w"], (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return mse(jnp.mean(jnp.tanh(h + over(p["b"], h)), axis=1) @ p["out"], batch["y"])


@case({"a": param(2, 3, 1, 4), "b": param(3, 1, 2, 4), "out": param(4, 3)}, IMAGE)
def conv_2d(p: Tree, batch: Tree) -> Array:
    # Groups, dilation and max pooling.
    h = jnp.tanh(conv(batch["x"], p["a"], (1, 1), "SAME", feature_group_count=2))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 1, 1), (1, 2, 1, 1), "VALID")
    h = conv(h, p["b"], (1, 1), "VALID", rhs_dilation=(1, 2), feature_group_count=2)
    return mse(jnp.mean(h, axis=(1, 2)) @ p["out"], batch["y"])


@case({"w": param(2, 3, 1, 2, 4), "out": param(4, 3)}, {"x": data(4, 3, 5, 2), "y": data(3)})
def conv_3d(p: Tree, batch: Tree) -> Array:
    # Three spatial axes, each with its own size, stride, dilation and padding.
    dims = ("NDHWC", "DHWIO", "NDHWC")
    pads = ((1, 0), (2, 1), (0, 2))
    h = lax.conv_general_dilated(batch["x"], p["w"], (1, 2, 3), pads, None, (2, 1, 1), dims)
    return mse(jnp.mean(jnp.tanh(h), axis=(1, 2, 3)) @ p["out"], batch["y"])


@case({"a": param(2, 3, 2, 4), "b": param(2, 2, 4, 3), "out": param(3, 3)}, IMAGE)
def conv_padding(p: Tree, batch: Tree) -> Array:
    # Negative padding, and strides that leave rows at the end of the input unread.
    h = jnp.tanh(conv(batch["x"], p["a"], (2, 1), ((1, -1), (-1, 3))))
    h = jnp.tanh(conv(h, p["b"], (1, 3), "VALID"))
    return mse(jnp.mean(h, axis=(1, 2)) @ p["out"], batch["y"])


@case({"a": param(3, 2, 2, 4), "b": param(3, 3, 4, 2), "out": param(2, 3)}, IMAGE)
def conv_transposed(p: Tree, batch: Tree) -> Array:
    # The input has holes: a transposed convolution, and one with cropped edges between the holes.
    h = jnp.tanh(lax.conv_transpose(batch["x"], p["a"], (2, 3), "SAME"))
    h = jnp.tanh(conv(h, p["b"], (3, 1), ((0, 1), (-2, 2)), lhs_dilation=(2, 2), rhs_dilation=(1, 3)))
    return mse(jnp.mean(h, axis=(1, 2)) @ p["out"], batch["y"])


@case({"a": param(2, 3, 1, 6), "b": param(3, 1, 2, 3), "out": param(3, 3)}, IMAGE)
def conv_depthwise(p: Tree, batch: Tree) -> Array:
    # Groups of one feature in and several out, of several in and one out, with strides and dilation.
    h = jnp.tanh(conv(batch["x"], p["a"], (1, 1), "SAME", rhs_dilation=(2, 1), feature_group_count=2))
    h = jnp.tanh(conv(h, p["b"], (2, 2), "SAME", feature_group_count=3))
    return mse(jnp.mean(h, axis=(1, 2)) @ p["out"], batch["y"])


@case({"a": param(4, 2, 2, 3), "b": param(2, 3, 3, 4), "out": param(3, 3)}, IMAGE)
def conv_layouts(p: Tree, batch: Tree) -> Array:
    # Features first, and axes in an order that is not its own inverse.
    x = jnp.transpose(batch["x"], (0, 3, 1, 2))
    h = lax.conv_general_dilated(x, p["a"], (1, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "WNCH"))
    dims = ("WNCH", "HWOI", "CHNW")
    h = lax.conv_general_dilated(jnp.tanh(h), p["b"], (1, 1), "VALID", dimension_numbers=dims)
    return mse(jnp.mean(jnp.tanh(h), axis=(1, 3)).T @ p["out"], batch["y"])


@case({"w": param(3, 3, 2, 2), "gain": param(2, around=1.0), "out": param(2, 3)}, IMAGE)
def conv_standardised(p: Tree, batch: Tree) -> Array:
    # One kernel in two layers, with zero mean and unit variance: two terms, then steps that mix them.
    w = p["w"] - jnp.mean(p["w"], axis=(0, 1, 2), keepdims=True)
    w = w * lax.rsqrt(jnp.mean(jnp.square(w), axis=(0, 1, 2), keepdims=True) + 1e-3)
    h = jnp.tanh(conv(batch["x"], w * over(p["gain"], w), (1, 1), "SAME"))
    return mse(jnp.mean(jnp.tanh(conv(h, w, (2, 2), "VALID")), axis=(1, 2)) @ p["out"], batch["y"])


@case(
    {"a": param(2, 3, 1, 2), "b": param(3, 2, 2, 2, 4), "out": param(4, 2)},
    {"x": data(3, 4, 5), "y": data(2)},
)
def conv_mapped(p: Tree, batch: Tree) -> Array:
    # Three frames in an example, which all have one kernel, and then each its own.
    h = jax.vmap(lambda x: conv(x[..., None], p["a"], (1, 1), "SAME"), in_axes=1)(batch["x"])
    h = jax.vmap(lambda x, w: conv(x, w, (1, 2), "VALID"))(jnp.tanh(h), p["b"])
    return mse(jnp.mean(jnp.tanh(h), axis=(0, 2, 3)) @ p["out"], batch["y"])


@case({"a": param(130, 1, 2), "b": param(2, 2, 4), "c": param(3, 4)}, {"x": ids(7, 6, 2), "y": ids(3)})
def conv_without_rule(p: Tree, batch: Tree) -> Array:
    # A kernel with more positions than are sliced, and groups of the batch axis; then no spatial axis.
    conv = functools.partial(lax.conv_general_dilated, dimension_numbers=("NWC", "WIO", "NWC"))

    def halves(x: Array) -> Array:
        # The two halves of an example's positions, as a batch of two, meet two halves of the kernel.
        h = conv(x.reshape(2, 3, 2), p["b"], (1,), "VALID", batch_group_count=2)
        return jnp.mean(jnp.tanh(h[0]), axis=0)

    x = batch["x"].astype(p["a"].dtype) / 7
    h = jnp.tanh(conv(x, p["a"], (1,), ((64, 65),), feature_group_count=2))
    logits = lax.conv_general_dilated(jax.vmap(halves)(h), p["c"], (), ())
    return cross_entropy(logits, batch["y"])


# Transformers: embeddings, positions, norms, causal attention with [D, H, K] weights, MLP, head.


def transformer_spec(norm: Tree, blocks: int = 1) -> Tree:
    block = {"attention_norm": norm, "mlp_norm": norm, "in": layer(6, 7), "out": layer(7, 6)}
    block |= {"q": param(6, 2, 3), "k": param(6, 2, 3), "v": param(6, 2, 3), "o": param(2, 3, 6)}
    embeddings = {"embed": param(11, 6), "positions": param(4, 6)}
    return embeddings | {"blocks": [block] * blocks, "norm": norm}


def attention(p: Tree, x: Array) -> Array:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * 3**-0.5
    causal = jnp.tril(jnp.ones((4, 4), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, v), p["o"])


def block(p: Tree, x: Array, normalise: Callable[[Tree, Array], Array]) -> Array:
    x = x + attention(p, normalise(p["attention_norm"], x))
    h = jax.nn.gelu(dense(p["in"], normalise(p["mlp_norm"], x)))
    return x + dense(p["out"], h)


def features(p: Tree, tokens: Array, normalise: Callable[[Tree, Array], Array]) -> Array:
    x = p["embed"][tokens] + p["positions"][None]
    for q in p["blocks"]:
        x = block(q, x, normalise)
    return normalise(p["norm"], x)


@case(transformer_spec(norm(6), blocks=2) | {"head": param(6, 11)}, TEXT)
def transformer(p: Tree, batch: Tree) -> Array:
    # Everything at once.
    return cross_entropy(features(p, batch["x"], layer_norm) @ p["head"], batch["y"])


@case(transformer_spec(norm(6)), TEXT)
def transformer_tied(p: Tree, batch: Tree) -> Array:
    # The head is the embedding: a scatter-add and a product are one gradient.
    return cross_entropy(features(p, batch["x"], layer_norm) @ p["embed"].T, batch["y"])


@case(transformer_spec({"scale": param(6, around=1.0)}), TEXT)
def transformer_tied_rms(p: Tree, batch: Tree) -> Array:
    # RMSNorm, with the tied head written as an einsum.
    h = features(p, batch["x"], rms_norm)
    return cross_entropy(jnp.einsum("btd,vd->btv", h, p["embed"]), batch["y"])
