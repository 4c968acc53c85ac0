"""The models, each with a loss of parameters and a batch.

    text     a pre-norm decoder-only transformer, or an LSTM: every token is predicted
    photos   a convolutional network that reads row by row: every pixel is predicted
    digits   a small convolutional network that names the digit

Shapes are named by their axes: B examples, T positions, D features, H heads, K features of a head, V
tokens, R rows, C columns. Weights start with the variance 1 / (number of inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pergrad.lab.config import KindName, Model

Init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


def _linear(inputs: int, outputs: int, config: Model, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, use_bias=False, kernel_init=Init, dtype=jnp.dtype(config.dtype), rngs=rngs
    )


def _convolution(
    inputs: int, outputs: int, kernel: tuple[int, int], padding: Any, config: Model, rngs: nnx.Rngs
) -> nnx.Conv:
    dtype = jnp.dtype(config.dtype)
    return nnx.Conv(inputs, outputs, kernel, padding=padding, kernel_init=Init, dtype=dtype, rngs=rngs)


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


class Recurrent(nnx.Module):
    """One layer of an LSTM; it adds to what it was given.

    With the gates i, f, o and the candidate c of a step, all of them linear in the layer's input and in
    its last output h: the memory m becomes sigmoid(f) m + sigmoid(i) tanh(c), and the output
    sigmoid(o) tanh(m). What the input adds to the gates is one product for all positions.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs) -> None:
        D, dtype = config.width, jnp.dtype(config.dtype)
        self.norm = _norm(config, rngs)
        self.input = nnx.Linear(D, 4 * D, kernel_init=Init, dtype=dtype, rngs=rngs)
        self.recurrent = _linear(D, 4 * D, config, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gates_TBG = jnp.swapaxes(self.input(self.norm(x_BTD)), 0, 1)

        def step(carry: tuple[jax.Array, jax.Array], gates_BG: jax.Array) -> tuple[Any, jax.Array]:
            h_BD, m_BD = carry
            i, f, o, c = jnp.split(gates_BG + self.recurrent(h_BD), 4, axis=-1)
            m_BD = jax.nn.sigmoid(f) * m_BD + jax.nn.sigmoid(i) * jnp.tanh(c)
            h_BD = jax.nn.sigmoid(o) * jnp.tanh(m_BD)
            return (h_BD, m_BD), h_BD

        zeros_BD = jnp.zeros_like(x_BTD[:, 0])
        _, h_TBD = jax.lax.scan(step, (zeros_BD, zeros_BD), gates_TBG)
        return x_BTD + jnp.swapaxes(h_TBD, 0, 1)


class Language(nnx.Module):
    """Tokens [B, T] to logits [B, T, V]. The kinds differ in their blocks."""

    Block: Callable[[Model, nnx.Rngs], Any]
    has_positions: bool

    def __init__(self, config: Model, vocabulary: int, rngs: nnx.Rngs) -> None:
        self.config = config
        D, dtype = config.width, jnp.dtype(config.dtype)
        self.embed = nnx.Embed(vocabulary, D, dtype=dtype, rngs=rngs)
        if self.has_positions:
            self.position = nnx.Embed(config.context, D, dtype=dtype, rngs=rngs)
        if config.scanned:
            make = nnx.vmap(lambda rngs: self.Block(config, rngs), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=config.layers)(make)(rngs)
        else:
            for i in range(config.layers):
                setattr(self, f"block_{i}", self.Block(config, rngs))
        self.norm = _norm(config, rngs)
        self.head = None if config.tied else _linear(D, vocabulary, config, rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.embed(tokens_BT)
        if self.has_positions:
            x_BTD += self.position(jnp.arange(tokens_BT.shape[1]))[None]
        if self.config.scanned:
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x_BTD = run(x_BTD, self.blocks)
        else:
            for i in range(self.config.layers):
                x_BTD = getattr(self, f"block_{i}")(x_BTD)
        x_BTD = self.norm(x_BTD)
        return self.embed.attend(x_BTD) if self.head is None else self.head(x_BTD)


class Transformer(Language):
    Block, has_positions = Block, True


class LSTM(Language):
    Block, has_positions = Recurrent, False  # what a recurrence knows of positions is their order


LANGUAGES: dict[KindName, type[Language]] = {"transformer": Transformer, "lstm": LSTM}


class Rows(nnx.Module):
    """Two convolutions, which add to what they were given: `above` has seen earlier rows alone.

    The convolutions never look at a later row, nor at a later column of the same row: they are padded on
    the side of what comes before.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs) -> None:
        D = config.width
        self.above = _convolution(D, D, (2, 3), ((1, 0), (1, 1)), config, rngs)
        self.row = _convolution(D, D, (1, 2), ((0, 0), (1, 0)), config, rngs)
        self.link = _convolution(D, D, (1, 1), "VALID", config, rngs)

    def __call__(self, above_BRCD: jax.Array, row_BRCD: jax.Array) -> tuple[jax.Array, jax.Array]:
        above_BRCD += self.above(jax.nn.gelu(above_BRCD))
        return above_BRCD, row_BRCD + self.row(jax.nn.gelu(row_BRCD)) + self.link(
            jax.nn.gelu(above_BRCD)
        )


class Pixels(nnx.Module):
    """Pieces of photographs, int32 [B, R, C] from 0 to 255, to logits [B, R, C, 256] of the same pixels.

    A pixel is predicted from pixels of its piece: from those in the rows above it, at most three columns
    away for the first layer and one more for each other, and from those to the left of it. The first
    layer sees the three rows above and the three pixels to the left; each other layer one more.
    """

    REACH = 3

    def __init__(self, config: Model, rngs: nnx.Rngs) -> None:
        self.config = config
        D, k = config.width, self.REACH
        self.above = _convolution(1, D, (k, 2 * k + 1), ((k, 0), (k, k)), config, rngs)
        self.row = _convolution(1, D, (1, k), ((0, 0), (k, 0)), config, rngs)
        for i in range(config.layers):
            setattr(self, f"rows_{i}", Rows(config, rngs))
        self.head = _linear(D, 256, config, rngs)

    def __call__(self, pixels_BRC: jax.Array) -> jax.Array:
        x_BRC1 = (pixels_BRC / 128 - 1)[..., None]
        above_BRCD = self.above(x_BRC1)[:, :-1]  # an output for the row after the last is too much
        row_BRCD = self.row(x_BRC1)[:, :, :-1] + above_BRCD
        for i in range(self.config.layers):
            above_BRCD, row_BRCD = getattr(self, f"rows_{i}")(above_BRCD, row_BRCD)
        return self.head(jax.nn.gelu(row_BRCD))


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


def photo_loss(graph: Any, params: Any, pieces: jax.Array) -> jax.Array:
    """The loss of pieces of photographs [B, R, C], in which every pixel is predicted."""
    return cross_entropy(nnx.merge(graph, params)(pieces), pieces)


def digit_loss(graph: Any, params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    images, labels = batch
    return cross_entropy(nnx.merge(graph, params)(images), labels)
