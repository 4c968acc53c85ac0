"""The models: a pre-norm decoder-only transformer, and a small convolutional network for images.

Shapes are named by their axes: B examples, T positions, D features, H heads, K features of a head, V
tokens. Weights start with the variance 1 / (number of inputs).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pergrad.lab.config import Model

Init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


def _linear(inputs: int, outputs: int, config: Model, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, use_bias=False, kernel_init=Init, dtype=jnp.dtype(config.dtype), rngs=rngs
    )


def _norm(config: Model, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)


class Block(nnx.Module):
    """Attention over earlier positions, then a feed-forward layer; each adds to what it was given."""

    def __init__(self, config: Model, rngs: nnx.Rngs) -> None:
        D = config.width
        self.heads = config.heads
        self.attention_norm, self.mlp_norm = _norm(config, rngs), _norm(config, rngs)
        self.qkv, self.out = _linear(D, 3 * D, config, rngs), _linear(D, D, config, rngs)
        self.up, self.down = _linear(D, 4 * D, config, rngs), _linear(4 * D, D, config, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.out(self._attend(self.attention_norm(x_BTD)))
        return x_BTD + self.down(jax.nn.gelu(self.up(self.mlp_norm(x_BTD))))

    def _attend(self, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        K = D // self.heads
        q, k, v = (y.reshape(B, T, self.heads, K) for y in jnp.split(self.qkv(x_BTD), 3, axis=-1))
        scores_BHTT = jnp.einsum("bqhk,bshk->bhqs", q, k) / K**0.5
        is_earlier = jnp.tril(jnp.ones((T, T), bool))[None, None]
        weights_BHTT = jax.nn.softmax(jnp.where(is_earlier, scores_BHTT, -1e9), axis=-1)
        return jnp.einsum("bhqs,bshk->bqhk", weights_BHTT, v).reshape(B, T, D)


class Transformer(nnx.Module):
    """Tokens [B, T] to logits [B, T, V]."""

    def __init__(self, config: Model, vocabulary: int, rngs: nnx.Rngs) -> None:
        self.config = config
        D, dtype = config.width, jnp.dtype(config.dtype)
        self.embed = nnx.Embed(vocabulary, D, dtype=dtype, rngs=rngs)
        self.position = nnx.Embed(config.context, D, dtype=dtype, rngs=rngs)
        if config.scanned:
            make = nnx.vmap(lambda rngs: Block(config, rngs), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=config.layers)(make)(rngs)
        else:
            for i in range(config.layers):
                setattr(self, f"block_{i}", Block(config, rngs))
        self.norm = _norm(config, rngs)
        self.head = None if config.tied else _linear(D, vocabulary, config, rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        T = tokens_BT.shape[1]
        x_BTD = self.embed(tokens_BT) + self.position(jnp.arange(T))[None]
        if self.config.scanned:
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x_BTD = run(x_BTD, self.blocks)
        else:
            for i in range(self.config.layers):
                x_BTD = getattr(self, f"block_{i}")(x_BTD)
        x_BTD = self.norm(x_BTD)
        return self.embed.attend(x_BTD) if self.head is None else self.head(x_BTD)


class Convolutional(nnx.Module):
    """Images [B, H, W, 1] to logits [B, classes]."""

    def __init__(self, config: Model, classes: int, rngs: nnx.Rngs) -> None:
        D, dtype = config.width, jnp.dtype(config.dtype)
        self.first = nnx.Conv(1, D // 2, (3, 3), dtype=dtype, kernel_init=Init, rngs=rngs)
        self.second = nnx.Conv(D // 2, D, (3, 3), strides=2, dtype=dtype, kernel_init=Init, rngs=rngs)
        self.head = nnx.Linear(D, classes, dtype=dtype, kernel_init=Init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.second(jax.nn.relu(self.first(x))))
        return self.head(jnp.mean(x, axis=(1, 2)))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all targets, in float32."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))


def text_loss(graph: Any, params: Any, windows: jax.Array) -> jax.Array:
    """The loss of windows [B, T + 1], in which every position predicts the next token."""
    return cross_entropy(nnx.merge(graph, params)(windows[:, :-1]), windows[:, 1:])


def image_loss(graph: Any, params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    images, labels = batch
    return cross_entropy(nnx.merge(graph, params)(images), labels)
