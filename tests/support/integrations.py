"""Eight losses as the training scripts of nanodo, Flax, Equinox and optax write them, but tiny.

Each function takes the dtype in which the model computes, and returns the loss in the form that pergrad
takes, its arguments, and what to say of them. Parameters are given in float32, as the scripts have them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

B, T, D, H, V = 6, 8, 16, 2, 14
KEY = jax.random.key(7)


@dataclasses.dataclass(frozen=True)
class Integration:
    """A loss, its arguments, and the roles of these.

    `weights` are the numbers by which the loss of the whole batch weighs its examples, if it does.
    `is_random` says that the loss draws random numbers.
    """

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    roles: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: Any = None
    is_random: bool = False


def tokens() -> np.ndarray:
    """Sequences of different length; 0 is the padding behind them."""
    text = np.random.default_rng(0).integers(1, V, size=(B, T))
    lengths = np.array([8, 3, 5, 8, 2, 6])
    return np.where(np.arange(T) < lengths[:, None], text, 0).astype(np.int32)


def images() -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(1)
    return r.uniform(size=(B, 8, 8, 1)).astype(np.float32), r.integers(0, 10, size=B)


# nanodo: a factory of losses that close over the batch; weights in boxes that say how they are sharded;
# layers in a scan, each of them under remat; a class of its own for what comes back beside the loss.


@dataclasses.dataclass(frozen=True)
class DoConfig:
    dtype: Any
    layers: int = 2


def nanodo_model(config: DoConfig) -> Any:
    nn = pytest.importorskip("flax.linen")

    def boxed(*names: str | None) -> Any:
        return nn.with_partitioning(nn.initializers.lecun_normal(), names)

    class Block(nn.Module):
        config: DoConfig

        @nn.compact
        def __call__(self, x_BTD, _):
            dtype = self.config.dtype
            norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=dtype)
            heads = functools.partial(nn.DenseGeneral, use_bias=False, dtype=dtype)
            dense = functools.partial(nn.Dense, use_bias=False, dtype=dtype)
            h_BTD = norm(name="attention_norm")(x_BTD)
            q_BTHK, k_BTHK, v_BTHK = (
                heads((H, D // H), name=name)(h_BTD) for name in ("query", "key", "value")
            )
            scores = jnp.einsum("bqhk,bthk->bhqt", q_BTHK / (D // H) ** 0.5, k_BTHK)
            causal = jnp.tri(T, dtype=bool)
            scores = jnp.where(causal, scores.astype(wide(dtype)), jnp.finfo(dtype).min)
            weights = jax.nn.softmax(scores).astype(dtype)
            h_BTHK = jnp.einsum("bhqt,bthk->bqhk", weights, v_BTHK)
            x_BTD += heads(D, axis=(-2, -1), name="output")(h_BTHK)
            h_BTF = dense(2 * D, kernel_init=boxed("data", None), name="up")(norm(name="norm")(x_BTD))
            h_BTD = dense(D, kernel_init=boxed(None, "data"), name="down")(jax.nn.gelu(h_BTF))
            return x_BTD + h_BTD, None

    class Decoder(nn.Module):
        config: DoConfig

        @nn.compact
        def __call__(self, x_BT):
            embed = nn.Embed(V, D, embedding_init=boxed("data", None), name="embed")
            positions = nn.Embed(T, D, embedding_init=boxed("data", None), name="positions")
            h_BTD = (embed(x_BT) + positions(jnp.arange(T)[None])).astype(self.config.dtype)
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.config.layers,
                metadata_params={nn.PARTITION_NAME: None},
            )
            h_BTD, _ = layers(self.config, name="layers")(h_BTD, None)
            h_BTD = nn.LayerNorm(use_bias=False, dtype=self.config.dtype)(h_BTD)
            return embed.attend(h_BTD.astype(wide(self.config.dtype)))

    return Decoder(config)


@functools.cache
def nanodo_aux() -> Any:
    from flax import struct

    @struct.dataclass
    class Aux:
        tokens: Any
        log_perplexity: Any

    return Aux


def nanodo_loss_factory(in_BT: Any, apply_fn: Callable[..., Any]) -> Callable[..., Any]:
    def loss_fn(params):
        x_BT = jnp.pad(in_BT[:, :-1], ((0, 0), (1, 0)))
        losses_BT = optax.softmax_cross_entropy_with_integer_labels(
            apply_fn({"params": params}, x_BT), in_BT
        )
        weights_BT = (in_BT > 0).astype(losses_BT.dtype)
        mean_loss = jnp.sum(losses_BT * weights_BT) / weights_BT.sum()
        return mean_loss, nanodo_aux()(weights_BT.sum(), mean_loss)

    return loss_fn


def nanodo(dtype: Any) -> Integration:
    model = nanodo_model(DoConfig(dtype))
    params = jax.jit(model.init)(jax.random.key(0), tokens())["params"]

    def loss(params, in_BT):
        return nanodo_loss_factory(in_BT, model.apply)(params)

    return Integration(loss, (params, tokens()), {"has_aux": True}, np.sum(tokens() > 0, axis=1))


def wide(dtype: Any) -> Any:
    """The dtype of what is not computed in half precision."""
    return jnp.promote_types(dtype, jnp.float32)


# Flax's mnist: a TrainState that holds the function to apply; images and labels are two arguments.


def mnist_state(dtype: Any) -> Any:
    nn = pytest.importorskip("flax.linen")
    from flax.training import train_state

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):
            for features in (4, 6):
                x = nn.relu(nn.Conv(features, (3, 3), dtype=dtype)(x))
                x = nn.avg_pool(x, (2, 2), (2, 2))
            x = nn.relu(nn.Dense(D, dtype=dtype)(x.reshape(x.shape[0], -1)))
            return nn.Dense(10, dtype=dtype)(x)

    params = jax.jit(CNN().init)(jax.random.key(0), images()[0])["params"]
    return train_state.TrainState.create(
        apply_fn=CNN().apply, params=params, tx=optax.sgd(0.1, momentum=0.9)
    )


def flax_mnist(dtype: Any) -> Integration:
    state = mnist_state(dtype)

    def loss(params, images, labels):
        logits = state.apply_fn({"params": params}, images)
        one_hot = jax.nn.one_hot(labels, 10, dtype=logits.dtype)
        return jnp.mean(optax.softmax_cross_entropy(logits, one_hot)), logits

    return Integration(loss, (state.params, *images()), {"batch_argnums": (1, 2), "has_aux": True})


# Flax's lm1b: packed sequences, weights by token, smoothed labels, two dropouts, half precision.


def lm1b_model(dtype: Any, deterministic: bool) -> Any:
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            drop = nn.Dropout(0.2, deterministic=deterministic)
            h = nn.MultiHeadDotProductAttention(
                H, dtype=dtype, use_bias=False, dropout_rate=0.2, deterministic=deterministic
            )(nn.LayerNorm(dtype=dtype)(x), mask=mask)
            x = x + drop(h)
            h = nn.relu(nn.Dense(2 * D, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)))
            return x + drop(nn.Dense(D, dtype=dtype)(drop(h)))

    class TransformerLM(nn.Module):
        @nn.compact
        def __call__(self, inputs, positions=None, segments=None):
            mask = nn.combine_masks(
                nn.make_attention_mask(inputs > 0, inputs > 0, dtype=dtype), nn.make_causal_mask(inputs)
            )
            if segments is not None:
                mask = nn.combine_masks(mask, nn.make_attention_mask(segments, segments, jnp.equal))
            shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
            embed = nn.Embed(V, D, embedding_init=nn.initializers.normal(1.0))
            waves = jnp.arange(T)[:, None] / 10 ** jnp.linspace(0, 3, D // 2)
            table = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=1)
            x = embed(shifted) + (table[None] if positions is None else table[positions])
            x = nn.Dropout(0.2, deterministic=deterministic)(x).astype(dtype)
            for _ in range(2):
                x = Layer()(x, mask)
            x = nn.LayerNorm(dtype=dtype)(x)
            return embed.attend(x.astype(wide(dtype))) / D**0.5

    return TransformerLM()


def smoothed_cross_entropy(logits: Any, targets: Any, weights: Any) -> tuple[Any, Any]:
    """The sum of the weighted losses, and the sum of the weights."""
    soft_targets = optax.smooth_labels(jax.nn.one_hot(targets, V, dtype=logits.dtype), 0.1)
    return jnp.sum(optax.softmax_cross_entropy(logits, soft_targets) * weights), weights.sum()


def flax_lm1b(dtype: Any, deterministic: bool = False) -> Integration:
    model = lm1b_model(dtype, deterministic)
    # Several sequences share a row: one begins wherever the first word of the row comes again.
    segments = np.cumsum(tokens() == tokens()[:, :1], axis=1)
    batch = {"inputs": tokens(), "segments": segments, "positions": np.tile(np.arange(T), (B, 1))}
    params = jax.jit(lm1b_model(dtype, True).init)(jax.random.key(0), tokens())["params"]

    def loss(params, batch, dropout_rng):
        weights = jnp.where(batch["inputs"] > 0, 1, 0).astype(jnp.float32)
        logits = model.apply(
            {"params": params},
            batch["inputs"],
            positions=batch["positions"],
            segments=batch["segments"],
            rngs={"dropout": dropout_rng},
        )
        total, weight_sum = smoothed_cross_entropy(logits, batch["inputs"], weights)
        return total / weight_sum, logits

    return Integration(
        loss,
        (params, batch, KEY),
        {"has_aux": True} | ({"shared_argnums": 2} if deterministic else {"rng_argnums": 2}),
        np.sum(tokens() > 0, axis=1),
        is_random=not deterministic,
    )


# Flax's gemma: NNX. Grouped heads, rotated positions, gates, capped logits, every second layer local.


def gemma_module() -> Any:
    nnx = pytest.importorskip("flax.nnx")

    class Einsum(nnx.Module):
        def __init__(self, shape, rngs):
            init = nnx.initializers.lecun_normal(batch_axis=0)
            self.w = nnx.Param(init(rngs.params(), shape))

        def __call__(self, equation, x):
            return jnp.einsum(equation, x, self.w[...])

    class Norm(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.zeros(D))

        def __call__(self, x):
            variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
            return x * jax.lax.rsqrt(variance + 1e-6) * (1 + self.scale[...])

    class Block(nnx.Module):
        def __init__(self, window, rngs):
            self.window = window
            self.q, self.kv = Einsum((H, D, D // H), rngs), Einsum((2, 1, D, D // H), rngs)
            self.out = Einsum((H, D // H, D), rngs)
            self.gate, self.down = Einsum((2, D, 2 * D), rngs), nnx.Linear(2 * D, D, rngs=rngs)
            self.norms = nnx.List([Norm(rngs) for _ in range(3)])

        def __call__(self, x, positions, mask):
            h = self.norms[0](x)
            q = rotated(self.q("btd,hdk->bthk", h), positions).reshape(*x.shape[:2], 1, H, D // H)
            k, v = self.kv("bsd,cgdk->cbsgk", h)
            scores = jnp.einsum("btghk,bsgk->bghts", q, rotated(k, positions)) / (D // H) ** 0.5
            scores = 5 * jnp.tanh(scores / 5)
            if self.window:
                mask = mask & jnp.triu(jnp.ones((T, T), bool), 1 - self.window)
            scores = jnp.where(mask[:, None, None], scores, -2e38)
            h = jnp.einsum("bghts,bsgk->btghk", jax.nn.softmax(scores), v)
            x = x + self.norms[1](self.out("bthk,hkd->btd", h.reshape(*x.shape[:2], H, D // H)))
            gate, up = self.gate("btd,cdf->cbtf", self.norms[2](x))
            return x + self.down(nnx.gelu(gate) * up)

    class Gemma(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Param(nnx.initializers.normal(0.5)(rngs.params(), (V, D)))
            self.layers = nnx.List([Block(window, rngs) for window in (3, None)])
            self.norm = Norm(rngs)

        def __call__(self, tokens, positions, mask):
            x = self.embedding[tokens] * D**0.5
            for layer in self.layers:
                x = layer(x, positions, mask)
            return 10 * jnp.tanh(self.norm(x) @ self.embedding[...].T / 10)

    return Gemma(nnx.Rngs(0))


def rotated(x: Any, positions: Any) -> Any:
    """Rotates pairs of numbers [B, T, heads, K] by angles that grow with the position."""
    angles = positions[..., None, None] / 100 ** jnp.linspace(0, 1, x.shape[-1] // 2)
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def gemma_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    inputs, targets = batch["inputs"], batch["targets"]
    valid = inputs > 0
    positions = jnp.maximum(jnp.cumsum(valid, axis=-1) - 1, 0)
    logits = model(inputs, positions, valid[:, None] & jnp.tri(T, dtype=bool))
    total, weight_sum = smoothed_cross_entropy(logits, targets, valid.astype(logits.dtype))
    return total / weight_sum, logits


def gemma_batch() -> dict[str, np.ndarray]:
    return {"inputs": tokens(), "targets": np.roll(tokens(), -1, axis=1)}


def flax_gemma(dtype: Any) -> Integration:
    nnx = pytest.importorskip("flax.nnx")
    graphdef, params = nnx.split(gemma_module())

    def loss(params, batch):
        return gemma_loss(nnx.merge(graphdef, params), batch)

    counts = np.sum(tokens() > 0, axis=1)
    return Integration(loss, (params, gemma_batch()), {"has_aux": True}, counts)


# Equinox's RNN: a model for one sequence that holds a number which is no parameter; loss(model, x, y).


def rnn_module() -> Any:
    eqx = pytest.importorskip("equinox")

    class RNN(eqx.Module):
        hidden_size: int
        cell: eqx.nn.GRUCell
        linear: eqx.nn.Linear

        def __init__(self, hidden_size, key):
            cell_key, linear_key = jax.random.split(key)
            self.hidden_size = hidden_size
            self.cell = eqx.nn.GRUCell(2, hidden_size, key=cell_key)
            self.linear = eqx.nn.Linear(hidden_size, 1, key=linear_key)

        def __call__(self, xs):
            def step(hidden, x):
                return self.cell(x, hidden), None

            hidden, _ = jax.lax.scan(step, jnp.zeros(self.hidden_size, self.linear.weight.dtype), xs)
            return jax.nn.sigmoid(self.linear(hidden))

    return RNN(D, jax.random.key(0))


def rnn_loss(model: Any, x: Any, y: Any) -> Any:
    chance = jax.vmap(model)(x)
    return -jnp.mean(y * jnp.log(chance) + (1 - y) * jnp.log(1 - chance))


def spirals() -> tuple[np.ndarray, np.ndarray]:
    angles = np.linspace(0, 6, T) + np.arange(B)[:, None]
    x = np.stack([np.sin(angles), np.cos(angles)], axis=-1) / (1 + np.linspace(0, 6, T)[:, None])
    y = np.arange(B)[:, None] % 2
    return (x * (1 - 2 * y[..., None] * [1, 0])).astype(np.float32), y


def equinox_rnn(dtype: Any) -> Integration:
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(rnn_module(), eqx.is_inexact_array)

    def loss(params, x, y):
        return rnn_loss(eqx.combine(params, static), x, y)

    return Integration(loss, (params, *spirals()), {"batch_argnums": (1, 2)})


# Equinox's vision transformer: vmap over the examples inside the loss, with one dropout key for each.


def vit_module() -> Any:
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        norms: list[eqx.nn.LayerNorm]
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __init__(self, key):
            k1, k2 = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)]
            self.attention = eqx.nn.MultiheadAttention(H, D, key=k1)
            self.mlp = eqx.nn.MLP(D, D, 2 * D, 1, jax.nn.gelu, key=k2)
            self.dropout = eqx.nn.Dropout(0.2)

        def __call__(self, x, key):
            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h)
            return x + self.dropout(jax.vmap(lambda h: self.mlp(self.norms[1](h)))(x), key=key)

    class ViT(eqx.Module):
        patches: eqx.nn.Linear
        positions: jax.Array
        token: jax.Array
        blocks: list[Block]
        head: eqx.nn.Sequential

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.patches = eqx.nn.Linear(16, D, key=keys[0])
            self.positions = jax.random.normal(keys[1], (5, D))
            self.token = jnp.ones((1, D))
            self.blocks = [Block(key) for key in keys[2:4]]
            self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(D), eqx.nn.Linear(D, 10, key=keys[4])])

        def __call__(self, image, key):
            x = image.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3).reshape(4, 16)
            x = jnp.concatenate([self.token, jax.vmap(self.patches)(x)]) + self.positions
            for block, own in zip(self.blocks, jax.random.split(key, 2), strict=True):
                x = block(x, own)
            return self.head(x[0])

    return ViT(jax.random.key(0))


def equinox_vit(dtype: Any) -> Integration:
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(vit_module(), eqx.is_inexact_array)

    def loss(params, images, labels, key):
        keys = jax.random.split(key, images.shape[0])
        logits = jax.vmap(eqx.combine(params, static))(images, keys)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    roles = {"batch_argnums": (1, 2), "rng_argnums": 3}
    return Integration(loss, (params, *images(), KEY), roles, is_random=True)


def equinox_vit_of_one_example(dtype: Any) -> Integration:
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(vit_module(), eqx.is_inexact_array)

    def loss(params, image, label, key):
        logits = eqx.combine(params, static)(image, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    roles = {"batch_argnums": (1, 2), "rng_argnums": 3, "keep_batch_dim": False}
    return Integration(loss, (params, *images(), KEY), roles, is_random=True)


# optax's nanolm: x and y are windows of one text; -100 marks what is not to be learned.


def nanolm_model(deterministic: bool) -> Any:
    nn = pytest.importorskip("flax.linen")

    class NanoLM(nn.Module):
        @nn.compact
        def __call__(self, x, training):
            drop = nn.Dropout(0.2, deterministic=not training)
            h = nn.Embed(V, D)(x) + nn.Embed(T, D)(jnp.arange(T))
            for _ in range(2):
                attention = nn.MultiHeadAttention(H, dropout_rate=0.2, deterministic=not training)
                h = h + attention(nn.LayerNorm()(h), mask=jnp.tri(T, dtype=bool)[None, None])
                wide = nn.relu(nn.Dense(2 * D)(nn.LayerNorm()(h)))
                h = h + drop(nn.Dense(D)(wide))
            return nn.Dense(V)(nn.LayerNorm()(h))

    return NanoLM()


def optax_nanolm(dtype: Any, deterministic: bool = False) -> Integration:
    model = nanolm_model(deterministic)
    r = np.random.default_rng(3)
    x = r.integers(0, V, size=(B, T))
    y = np.where(np.arange(T) < 2, -100, np.roll(x, -1, axis=1))
    params = jax.jit(model.init, static_argnums=2)(jax.random.key(0), x, False)["params"]

    def loss(params, x, y, dropout_key):
        out = model.apply({"params": params}, x, not deterministic, rngs={"dropout": dropout_key})
        labels = jnp.where(y == -100, 0, y)
        losses = optax.softmax_cross_entropy_with_integer_labels(out, labels)
        return jnp.mean(losses, where=y != -100)

    roles = {"batch_argnums": (1, 2)}
    roles |= {"shared_argnums": 3} if deterministic else {"rng_argnums": 3}
    return Integration(loss, (params, x, y, KEY), roles, is_random=not deterministic)


# optax's adversarial training and lookahead: images are attacked inside the loss, which has a penalty.


def optax_adversarial(dtype: Any) -> Integration:
    keys = jax.random.split(jax.random.key(0))
    sizes = zip((64, D), (D, 10), keys, strict=True)
    params = [{"w": jax.random.normal(key, (m, n)) / m**0.5, "b": jnp.zeros(n)} for m, n, key in sizes]

    def cross_entropy(params, images, labels):
        x = images.reshape(images.shape[0], -1)
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def loss(params, data):
        images, labels = data
        attacked = images + 0.1 * jnp.sign(jax.grad(cross_entropy, 1)(params, images, labels))
        penalty = 0.05 * optax.tree.norm(params, squared=True)
        return cross_entropy(params, jax.lax.stop_gradient(attacked), labels) + penalty

    return Integration(loss, (params, images()))


INTEGRATIONS = [
    nanodo,
    flax_mnist,
    flax_lm1b,
    flax_gemma,
    equinox_rnn,
    equinox_vit,
    equinox_vit_of_one_example,
    optax_nanolm,
    optax_adversarial,
]
