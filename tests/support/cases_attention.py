"""Cases with attention in its many forms; how to read and add them is said in `cases`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tests.support.cases import SEQ, Tree, case, mse, param

QKV = {"q": param(3, 2, 6), "k": param(3, 2, 6), "v": param(3, 2, 6), "out": param(2, 6, 2)}


def project(p: Tree, x: Array) -> tuple[Array, Array, Array]:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    return q, k, v


def attend(q: Array, k: Array, v: Array, bias: Array, mask: Array) -> Array:
    """Attention of [B, T, H, K] with a bias and a mask, each [1, H or 1, T, S]."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * 6**-0.5 + bias
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def output(p: Tree, x: Array, batch: Tree) -> Array:
    return mse(jnp.einsum("bthk,hkd->btd", x, p["out"]), batch["y"])


@case(QKV, SEQ)
def attention_of_jax(p: Tree, batch: Tree) -> Array:
    # JAX's own function, causal.
    y = jax.nn.dot_product_attention(*project(p, batch["x"]), is_causal=True)
    return output(p, y, batch)


@case({"q": param(3, 4, 6), "k": param(3, 2, 6), "v": param(3, 2, 6), "out": param(4, 6, 2)}, SEQ)
def attention_grouped(p: Tree, batch: Tree) -> Array:
    # Two heads of keys for four of queries, and a window.
    window = {"is_causal": True, "local_window_size": 2}
    y = jax.nn.dot_product_attention(*project(p, batch["x"]), **window)
    return output(p, y, batch)


def rotate(x: Array) -> Array:
    angle = np.arange(4)[:, None] * 10.0 ** -np.arange(3)[None]
    sin, cos = (jnp.asarray(f(angle), x.dtype)[None, :, None] for f in (np.sin, np.cos))
    a, b = jnp.split(x, 2, axis=3)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=3)


@case(QKV, SEQ)
def attention_rotary(p: Tree, batch: Tree) -> Array:
    # Rotary positions, and a mask that lets each position see two before it.
    q, k, v = project(p, batch["x"])
    distance = np.arange(4)[:, None] - np.arange(4)[None]
    mask = jnp.asarray((distance >= 0) & (distance < 3))[None, None]
    return output(p, attend(rotate(q), rotate(k), v, jnp.zeros((1, 1, 1, 1), q.dtype), mask), batch)


@case(QKV | {"table": param(7, 2), "slope": param(2)}, SEQ)
def attention_relative(p: Tree, batch: Tree) -> Array:
    # A table looked up by distance, the same rows for every example, and slopes for the distance.
    distance = jnp.arange(4)[:, None] - jnp.arange(4)[None]
    bias = jnp.moveaxis(p["table"][distance + 3], 2, 0)
    bias = bias - jnp.exp(p["slope"])[:, None, None] * jnp.abs(distance)[None].astype(bias.dtype)
    q, k, v = project(p, batch["x"])
    return output(p, attend(q, k, v, bias[None], (distance >= 0)[None, None]), batch)


@case(QKV, SEQ)
def attention_local(p: Tree, batch: Tree) -> Array:
    # A loop over positions, each with a slice of keys and values that starts where it stands.
    q, k, v = project(p, batch["x"])
    k, v = (jnp.pad(a, ((0, 0), (2, 0), (0, 0), (0, 0))) for a in (k, v))

    def one(i: Array) -> Array:
        near = [lax.dynamic_slice_in_dim(a, i, 3, axis=1) for a in (k, v)]
        mask = (i - 2 + jnp.arange(3) >= 0)[None, None, None]
        bias = jnp.zeros((1, 1, 1, 1), q.dtype)
        return attend(lax.dynamic_slice_in_dim(q, i, 1, axis=1), *near, bias, mask)[:, 0]

    return output(p, jnp.moveaxis(lax.map(one, jnp.arange(4)), 0, 1), batch)


# Attention of one head, [T, K], in blocks of two keys: a running maximum, sum and result.


@jax.custom_vjp
def flash(q: Array, k: Array, v: Array) -> Array:
    return flash_fwd(q, k, v)[0]


def flash_fwd(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    def body(carry: tuple[Array, ...], block: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        top, total, out = carry
        k, v = block
        scores = q @ k.T
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        e, shrink = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
        return (new, total * shrink + jnp.sum(e, axis=1), out * shrink[:, None] + e @ v), None

    start = jnp.full(len(q), -1e4, q.dtype), jnp.zeros(len(q), q.dtype), jnp.zeros_like(q)
    (top, total, out), _ = lax.scan(body, start, (k.reshape(2, 2, -1), v.reshape(2, 2, -1)))
    out = out / total[:, None]
    return out, (q, k, v, out, top + jnp.log(total))


def flash_bwd(saved: tuple[Array, ...], ct: Array) -> tuple[Array, ...]:
    q, k, v, out, log_total = saved
    own = jnp.sum(ct * out, axis=1, keepdims=True)

    def body(dq: Array, block: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        k, v = block
        weights = jnp.exp(q @ k.T - log_total[:, None])
        ds = weights * (ct @ v.T - own)
        return dq + ds @ k, (ds.T @ q, weights.T @ ct)

    blocks = k.reshape(2, 2, -1), v.reshape(2, 2, -1)
    dq, (dk, dv) = lax.scan(body, jnp.zeros_like(q), blocks)
    return dq, dk.reshape(k.shape), dv.reshape(v.shape)


flash.defvjp(flash_fwd, flash_bwd)


@case(QKV, SEQ)
def attention_flash(p: Tree, batch: Tree) -> Array:
    # A rule of the user's with loops in both passes, mapped over heads and examples.
    of_heads = jax.vmap(flash, in_axes=1, out_axes=1)
    return output(p, jax.vmap(of_heads)(*project(p, batch["x"])), batch)


@case({"memory": param(4, 6), "q": param(3, 6), "out": param(6, 2)}, SEQ)
def attention_to_memory(p: Tree, batch: Tree) -> Array:
    # Keys and values are a parameter, so it goes into the loops of the rule.
    y = jax.vmap(lambda x: flash(x @ p["q"], p["memory"], jnp.tanh(p["memory"])))(batch["x"])
    return mse(y @ p["out"], batch["y"])


HEADS = {"q": param(3, 2, 4), "k": param(3, 2, 4), "v": param(3, 2, 4), "out": param(2, 4, 2)}


@case(HEADS, SEQ)
def attention_of_joined_weights(p: Tree, batch: Tree) -> Array:
    # Behind barriers queries, keys and values have one product with their weights side by side.
    p = lax.optimization_barrier(p)
    joined = lax.optimization_barrier(jnp.concatenate([p["q"], p["k"], p["v"]], axis=1))
    q, k, v = jnp.split(jnp.einsum("btd,dhk->bthk", batch["x"], joined), 3, axis=2)
    weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
    return mse(jnp.einsum("bhst,bthk,hkd->bsd", weights, v, p["out"]), batch["y"])
