"""The models that are timed, written as a user would write them: no tricks, and one layer library.

Each model is a frozen dataclass with the same three methods:

- `init(key)`: the parameters, a tree of float32 arrays;
- `sample(key)`: a random batch with the example axis in front;
- `loss(params, batch)`: a scalar, the mean over the examples.

Activations and products have the type `compute`, to which parameters are cast where they are used; None
stands for the parameters' own. Norms, softmax and the loss itself are computed in float32 at least.

Shapes are named by their axes: B examples, T positions, D features, H heads, K features of a head,
V tokens of the vocabulary; E experts, N experts of a token, C places in an expert, F features in it.
`image_models` has those of images.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp

Params = dict[str, Any]
Compute = Literal["bfloat16"] | None

HEAD_WIDTH = 64
EXPERTS_PER_TOKEN = 2
CAPACITY = 1.25  # places in an expert, as a multiple of its share of an example's tokens


class Model(Protocol):
    """What every model here has."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def init(self, key: jax.Array) -> Any: ...

    def sample(self, key: jax.Array) -> Any: ...

    def loss(self, params: Any, batch: Any, /) -> jax.Array: ...


def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Gaussian weights whose products with unit inputs have about unit size."""
    return jax.random.normal(key, shape) / jnp.sqrt(shape[0])


def init_norm(width: int) -> Params:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def cast(x: jax.Array, compute: Compute) -> jax.Array:
    return x if compute is None else x.astype(compute)


def widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def dense(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A product in the type of `x`."""
    return x @ weight.astype(x.dtype)


def affine(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return dense(x, weight) + bias.astype(x.dtype)


def _layer_norm(params: Params, x: jax.Array) -> jax.Array:
    wide = widen(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]
    return y.astype(x.dtype)


def _attention(params: Params, x_BTD: jax.Array) -> jax.Array:
    B, T, D = x_BTD.shape
    q, k, v = (
        y_BTD.reshape(B, T, D // HEAD_WIDTH, HEAD_WIDTH)
        for y_BTD in jnp.split(dense(x_BTD, params["qkv"]), 3, axis=-1)
    )
    scores_BHTT = jnp.einsum("bqhk,bshk->bhqs", q, k) / HEAD_WIDTH**0.5
    causal = jnp.tril(jnp.ones((T, T), dtype=bool))
    seen_BHTT = jnp.where(causal, widen(scores_BHTT), -1e9)
    weights_BHTT = jax.nn.softmax(seen_BHTT, axis=-1).astype(v.dtype)
    y_BTHK = jnp.einsum("bhqs,bshk->bqhk", weights_BHTT, v)
    return dense(y_BTHK.reshape(B, T, D), params["out"])


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(widen(logits), axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))


@dataclass(frozen=True)
class Transformer:
    """A pre-norm decoder with learned positions.

    Its layers are unrolled or, with `scanned`, stacked and run by `lax.scan`, each recomputed in the
    backward pass.

    A batch is `tokens`, int32 `[B, T + 1]`: every position predicts the next token.
    """

    batch: int
    length: int
    width: int
    layers: int
    vocab: int
    tied: bool = False
    scanned: bool = False
    compute: Compute = None

    def init(self, key: jax.Array) -> Params:
        D, V = self.width, self.vocab
        embed_key, position_key, head_key, *block_keys = jax.random.split(key, 3 + self.layers)
        blocks = [self._init_block(block_key) for block_key in block_keys]
        if self.scanned:
            blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        params = {
            "embed": 0.02 * jax.random.normal(embed_key, (V, D)),
            "position": 0.02 * jax.random.normal(position_key, (self.length, D)),
            "blocks": blocks,
            "norm": init_norm(D),
        }
        if not self.tied:
            params["head"] = normal(head_key, D, V)
        return params

    def _init_block(self, key: jax.Array) -> Params:
        D = self.width
        qkv_key, out_key, *mlp_keys = jax.random.split(key, 4)
        return {
            "attention_norm": init_norm(D),
            "attention": {"qkv": normal(qkv_key, D, 3 * D), "out": normal(out_key, D, D)},
            "mlp_norm": init_norm(D),
            "mlp": self._init_mlp(*mlp_keys),
        }

    def _init_mlp(self, up_key: jax.Array, down_key: jax.Array) -> Params:
        D = self.width
        return {
            "up": normal(up_key, D, 4 * D),
            "up_bias": jnp.zeros(4 * D),
            "down": normal(down_key, 4 * D, D),
            "down_bias": jnp.zeros(D),
        }

    def sample(self, key: jax.Array) -> jax.Array:
        return _tokens(key, self.batch, self.length, self.vocab)

    def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x_BTD = cast(params["embed"][inputs] + params["position"], self.compute)
        if self.scanned:
            block_fn = jax.checkpoint(self._block, prevent_cse=False)  # scan already prevents it
            x_BTD, _ = jax.lax.scan(lambda x, block: (block_fn(block, x), None), x_BTD, params["blocks"])
        else:
            for block in params["blocks"]:
                x_BTD = self._block(block, x_BTD)
        head_DV = params["embed"].T if self.tied else params["head"]
        logits_BTV = dense(_layer_norm(params["norm"], x_BTD), head_DV)
        return cross_entropy(logits_BTV, targets)

    def _block(self, params: Params, x_BTD: jax.Array) -> jax.Array:
        x_BTD += _attention(params["attention"], _layer_norm(params["attention_norm"], x_BTD))
        return x_BTD + self._mlp(params["mlp"], _layer_norm(params["mlp_norm"], x_BTD))

    def _mlp(self, params: Params, x_BTD: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(affine(x_BTD, params["up"], params["up_bias"]))
        return affine(hidden, params["down"], params["down_bias"])


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(Transformer):
    """A `Transformer` in which every token goes through the MLPs of the experts it scores highest.

    How the tokens get to their experts:

    - `"einsum"`: products with one-hot arrays. An expert has `CAPACITY` times its share of places for
      the tokens of an example, and turns away those that come when they are taken.
    - `"ragged"`: all tokens sorted by expert, then `lax.ragged_dot`. None is turned away. No case has
      it: up to 0.10.2, JAX cannot `vmap` a `ragged_dot` whose weights the examples share.

    Either way the tokens of one example do not depend on those of another.
    """

    experts: int
    hidden: int
    dispatch: Literal["einsum", "ragged"]

    def _init_mlp(self, up_key: jax.Array, down_key: jax.Array) -> Params:
        D, E, F = self.width, self.experts, self.hidden
        router_key, *up_keys = jax.random.split(up_key, 1 + E)
        down_keys = jax.random.split(down_key, E)
        return {
            "router": normal(router_key, D, E),
            "up": jnp.stack([normal(expert_key, D, F) for expert_key in up_keys]),
            "down": jnp.stack([normal(expert_key, F, D) for expert_key in down_keys]),
        }

    def _mlp(self, params: Params, x_BTD: jax.Array) -> jax.Array:
        scores_BTN, experts_BTN = jax.lax.top_k(dense(x_BTD, params["router"]), EXPERTS_PER_TOKEN)
        gates_BTN = jax.nn.softmax(widen(scores_BTN), axis=-1).astype(x_BTD.dtype)
        dispatch_fn = {"einsum": _experts_einsum, "ragged": _experts_ragged}[self.dispatch]
        return dispatch_fn(params, x_BTD, gates_BTN, experts_BTN)


def _experts_einsum(
    params: Params, x_BTD: jax.Array, gates_BTN: jax.Array, experts_BTN: jax.Array
) -> jax.Array:
    B, T, N = experts_BTN.shape
    up_EDF, down_EFD = (params[name].astype(x_BTD.dtype) for name in ("up", "down"))
    E = up_EDF.shape[0]
    C = int(CAPACITY * T * N / E)
    chosen_BTNE = jax.nn.one_hot(experts_BTN, E, dtype=jnp.int32)
    rank_BTNE = jnp.cumsum(chosen_BTNE.reshape(B, T * N, E), axis=1).reshape(B, T, N, E) - 1
    # Zero for an expert that was not chosen, and for one that has no place left.
    place_BTNEC = chosen_BTNE[..., None] * jax.nn.one_hot(rank_BTNE, C, dtype=x_BTD.dtype)
    tokens_BECD = jnp.einsum("btnec,btd->becd", place_BTNEC, x_BTD)
    hidden_BECF = jax.nn.gelu(jnp.einsum("becd,edf->becf", tokens_BECD, up_EDF))
    y_BECD = jnp.einsum("becf,efd->becd", hidden_BECF, down_EFD)
    return jnp.einsum("btn,btnec,becd->btd", gates_BTN, place_BTNEC, y_BECD)


def _experts_ragged(
    params: Params, x_BTD: jax.Array, gates_BTN: jax.Array, experts_BTN: jax.Array
) -> jax.Array:
    B, T, N = experts_BTN.shape
    up_EDF, down_EFD = (params[name].astype(x_BTD.dtype) for name in ("up", "down"))
    E, D, _ = up_EDF.shape
    order = jnp.argsort(experts_BTN.reshape(-1))
    counts_E = jnp.bincount(experts_BTN.reshape(-1), length=E)
    tokens = x_BTD.reshape(B * T, D)[order // N]
    hidden = jax.nn.gelu(jax.lax.ragged_dot(tokens, up_EDF, counts_E))
    y = jax.lax.ragged_dot(hidden, down_EFD, counts_E)
    y_BTND = y[jnp.argsort(order)].reshape(B, T, N, D)
    return jnp.einsum("btn,btnd->btd", gates_BTN, y_BTND)


@dataclass(frozen=True)
class LSTM:
    """One layer, run by `lax.scan` over the positions; its inputs are as wide as its state.

    A batch is `tokens`, int32 `[B, T + 1]`: every position predicts the next token.
    """

    batch: int
    length: int
    width: int
    vocab: int
    compute: Compute = None

    def init(self, key: jax.Array) -> Params:
        D, V = self.width, self.vocab
        embed_key, input_key, state_key, head_key = jax.random.split(key, 4)
        return {
            "embed": jax.random.normal(embed_key, (V, D)),
            "input": normal(input_key, D, 4 * D),
            "state": normal(state_key, D, 4 * D),
            "bias": jnp.zeros(4 * D),
            "head": normal(head_key, D, V),
        }

    def sample(self, key: jax.Array) -> jax.Array:
        return _tokens(key, self.batch, self.length, self.vocab)

    def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array], x_BD: jax.Array):
            state_BD, cell_BD = carry
            gates = dense(x_BD, params["input"]) + dense(state_BD, params["state"])
            gates += params["bias"].astype(gates.dtype)
            take, keep, new, show = jnp.split(gates, 4, axis=-1)
            cell_BD = jax.nn.sigmoid(keep) * cell_BD + jax.nn.sigmoid(take) * jnp.tanh(new)
            state_BD = jax.nn.sigmoid(show) * jnp.tanh(cell_BD)
            return (state_BD, cell_BD), state_BD

        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x_TBD = cast(params["embed"][inputs.T], self.compute)
        zeros_BD = jnp.zeros_like(x_TBD[0])
        _, states_TBD = jax.lax.scan(step, (zeros_BD, zeros_BD), x_TBD)
        return cross_entropy(dense(states_TBD, params["head"]), targets.T)


@dataclass(frozen=True)
class MLP:
    """Square layers with biases, relu between them, and a squared error.

    A batch is `(inputs, targets)`, both float32 `[B, D]`.
    """

    batch: int
    width: int
    layers: int
    compute: Compute = None

    def init(self, key: jax.Array) -> list[Params]:
        D = self.width
        keys = jax.random.split(key, self.layers)
        return [{"weight": normal(layer_key, D, D), "bias": jnp.zeros(D)} for layer_key in keys]

    def sample(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, targets = jax.random.normal(key, (2, self.batch, self.width))
        return inputs, targets

    def loss(self, params: list[Params], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        inputs_BD, targets_BD = batch
        x_BD = cast(inputs_BD, self.compute)
        for layer in params[:-1]:
            x_BD = jax.nn.relu(affine(x_BD, layer["weight"], layer["bias"]))
        predictions_BD = affine(x_BD, params[-1]["weight"], params[-1]["bias"])
        return jnp.mean((widen(predictions_BD) - targets_BD) ** 2)


def _tokens(key: jax.Array, batch: int, length: int, vocab: int) -> jax.Array:
    return jax.random.randint(key, (batch, length + 1), 0, vocab, jnp.int32)


@dataclass(frozen=True)
class FlaxTransformer:
    """The model that `pergrad train` trains, in Flax NNX, with heads of 64.

    A batch is `windows`, int32 `[B, T + 1]`: every position predicts the next token.
    """

    batch: int
    length: int
    width: int
    layers: int
    vocab: int
    compute: Compute = None

    def init(self, key: jax.Array) -> Any:
        return self._graph_and_params(key)[1]

    def sample(self, key: jax.Array) -> jax.Array:
        return _tokens(key, self.batch, self.length, self.vocab)

    def loss(self, params: Any, windows: jax.Array) -> jax.Array:
        from pergrad.lab.run import model

        return model.text_loss(self._graph, params, windows)

    @functools.cached_property
    def _graph(self) -> Any:
        return self._graph_and_params(jax.random.key(0))[0]

    def _graph_and_params(self, key: jax.Array) -> tuple[Any, Any]:
        from flax import nnx  # which the other models can do without

        from pergrad.lab import config
        from pergrad.lab.run import model

        sizes = config.Model(
            layers=self.layers,
            width=self.width,
            heads=self.width // HEAD_WIDTH,
            context=self.length,
            dtype=self.compute or "float32",
        )
        return nnx.split(model.Transformer(sizes, self.vocab, nnx.Rngs(key)), nnx.Param)
