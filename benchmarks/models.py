"""The models that are timed, written as a user would write them: no layer library, no tricks.

Each model is a frozen dataclass with the same three methods:

- `init(key)`: the parameters, a tree of float32 arrays;
- `sample(key)`: a random batch with the example axis in front;
- `loss(params, batch)`: a scalar, the mean over the examples.

Shapes are named by their axes: B examples, T positions, D features, H heads, K features of a head,
V tokens of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]

HEAD_WIDTH = 64


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    """Gaussian weights whose products with unit inputs have about unit size."""
    return jax.random.normal(key, shape) / jnp.sqrt(shape[0])


def _init_norm(width: int) -> Params:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _layer_norm(params: Params, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]


def _attention(params: Params, x_BTD: jax.Array) -> jax.Array:
    B, T, D = x_BTD.shape
    q, k, v = (
        y_BTD.reshape(B, T, D // HEAD_WIDTH, HEAD_WIDTH)
        for y_BTD in jnp.split(x_BTD @ params["qkv"], 3, axis=-1)
    )
    scores_BHTT = jnp.einsum("bqhk,bshk->bhqs", q, k) / HEAD_WIDTH**0.5
    causal = jnp.tril(jnp.ones((T, T), dtype=bool))
    weights_BHTT = jax.nn.softmax(jnp.where(causal, scores_BHTT, -1e9), axis=-1)
    y_BTHK = jnp.einsum("bhqs,bshk->bqhk", weights_BHTT, v)
    return y_BTHK.reshape(B, T, D) @ params["out"]


def _feed_forward(params: Params, x_BTD: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x_BTD @ params["up"] + params["up_bias"])
    return hidden @ params["down"] + params["down_bias"]


@dataclass(frozen=True)
class Transformer:
    """A pre-norm decoder with unrolled layers and learned positions.

    A batch is `tokens`, int32 `[B, T + 1]`: every position predicts the next token.
    """

    batch: int
    length: int
    width: int
    layers: int
    vocab: int
    tied: bool = False

    def init(self, key: jax.Array) -> Params:
        D, V = self.width, self.vocab
        embed_key, position_key, head_key, *block_keys = jax.random.split(key, 3 + self.layers)
        params = {
            "embed": 0.02 * jax.random.normal(embed_key, (V, D)),
            "position": 0.02 * jax.random.normal(position_key, (self.length, D)),
            "blocks": [self._init_block(block_key) for block_key in block_keys],
            "norm": _init_norm(D),
        }
        if not self.tied:
            params["head"] = _normal(head_key, D, V)
        return params

    def _init_block(self, key: jax.Array) -> Params:
        D = self.width
        qkv_key, out_key, up_key, down_key = jax.random.split(key, 4)
        return {
            "attention_norm": _init_norm(D),
            "attention": {"qkv": _normal(qkv_key, D, 3 * D), "out": _normal(out_key, D, D)},
            "mlp_norm": _init_norm(D),
            "mlp": {
                "up": _normal(up_key, D, 4 * D),
                "up_bias": jnp.zeros(4 * D),
                "down": _normal(down_key, 4 * D, D),
                "down_bias": jnp.zeros(D),
            },
        }

    def sample(self, key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (self.batch, self.length + 1), 0, self.vocab, jnp.int32)

    def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x_BTD = params["embed"][inputs] + params["position"]
        for block in params["blocks"]:
            x_BTD += _attention(block["attention"], _layer_norm(block["attention_norm"], x_BTD))
            x_BTD += _feed_forward(block["mlp"], _layer_norm(block["mlp_norm"], x_BTD))
        head_DV = params["embed"].T if self.tied else params["head"]
        logits_BTV = _layer_norm(params["norm"], x_BTD) @ head_DV
        log_probs_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
        return -jnp.mean(jnp.take_along_axis(log_probs_BTV, targets[..., None], axis=-1))


@dataclass(frozen=True)
class MLP:
    """Square layers with biases, relu between them, and a squared error.

    A batch is `(inputs, targets)`, both float32 `[B, D]`.
    """

    batch: int
    width: int
    layers: int

    def init(self, key: jax.Array) -> list[Params]:
        D = self.width
        keys = jax.random.split(key, self.layers)
        return [{"weight": _normal(layer_key, D, D), "bias": jnp.zeros(D)} for layer_key in keys]

    def sample(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, targets = jax.random.normal(key, (2, self.batch, self.width))
        return inputs, targets

    def loss(self, params: list[Params], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_BD, targets_BD = batch
        for layer in params[:-1]:
            x_BD = jax.nn.relu(x_BD @ layer["weight"] + layer["bias"])
        predictions_BD = x_BD @ params[-1]["weight"] + params[-1]["bias"]
        return jnp.mean((predictions_BD - targets_BD) ** 2)


CASES: dict[str, Transformer | MLP] = {
    "transformer_long": Transformer(batch=8, length=256, width=256, layers=4, vocab=1024),
    "transformer_vocab": Transformer(batch=16, length=128, width=256, layers=4, vocab=8192),
    "transformer_wide": Transformer(batch=32, length=64, width=512, layers=2, vocab=1024),
    "transformer_tied": Transformer(batch=16, length=128, width=256, layers=4, vocab=4096, tied=True),
    "mlp": MLP(batch=128, width=1024, layers=4),
}
