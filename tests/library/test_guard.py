"""What statistics may cost beside `jax.grad`, as XLA counts it: a guard that needs no clock.

Programs are compiled as users compile them and never run. XLA counts the operations of a loop's step
once, so loops are unrolled for counting operations; temporary memory is that of the program as it is.
A limit stands a few percent above what was counted when it was written. Who makes something cheaper
lowers it.
"""

import contextlib
import functools
import os
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import pergrad as pg
from pergrad._cut import units
from pergrad._strategies import projected, streamed
from pergrad.lab.bench.image_models import CNN
from pergrad.lab.bench.models import LSTM, MLP, Transformer, affine, cross_entropy

MOMENTS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)}
NORMS = {"norm": pg.Norm()}
TOKENS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square, per="token")}
PROJECTED = {"projected": pg.Project(512, 0)}
CLIPPED = {"clipped": pg.ClippedMean(1.0)}
WEIGHTED = {"weighted": pg.WeightedMean(lambda norm: 1 / (norm + 0.01))}
# What strict.py does without, since it takes longer to compile. The newest XLA always has it.
HAS_OTHER_EMITTERS = "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]
AS_USERS_COMPILE = {"xla_cpu_use_fusion_emitters": True} if HAS_OTHER_EMITTERS else None

# In JAX 0.12 `jax.grad` of the scanned layers takes 9% less than in 0.10, and the statistics 2% less.
NEWER_XLA = jax.__version_info__ >= (0, 11)


class Head(NamedTuple):
    """The head of a language model alone: logits with a bias, and their cross-entropy."""

    batch: int
    length: int
    width: int
    vocab: int

    def init(self, key: Any) -> Any:
        return {"weight": jnp.zeros((self.width, self.vocab)), "bias": jnp.zeros(self.vocab)}

    def sample(self, key: Any) -> Any:
        inputs = jnp.zeros((self.batch, self.length, self.width))
        return inputs, jnp.zeros((self.batch, self.length), jnp.int32)

    def loss(self, params: Any, batch: Any) -> Any:
        inputs, targets = batch
        return cross_entropy(affine(inputs, params["weight"], params["bias"]), targets)


HEAD = Head(batch=12, length=96, width=192, vocab=12000)
LONG = Transformer(batch=8, length=256, width=256, layers=1, vocab=1024)
TIED = Transformer(batch=8, length=128, width=256, layers=1, vocab=4096, tied=True)
SCANNED = Transformer(batch=8, length=128, width=256, layers=4, vocab=1024, scanned=True)
RECURRENT = LSTM(batch=32, length=64, width=256, vocab=256)
CONVOLUTIONAL = CNN(batch=64, size=32, widths=(32, 64, 64), strides=(1, 2, 2), classes=10)
PERCEPTRON = MLP(batch=128, width=1024, layers=2)


class Limit(NamedTuple):
    """At most so many operations and temporary bytes, as multiples of those of `jax.grad`."""

    model: Any
    stats: Any
    microbatch_size: int | None
    operations: float | None  # None where loops cannot be unrolled
    bytes: float
    nonfinite: str = "keep"


LIMITS = {
    "head: moments": Limit(HEAD, MOMENTS, None, None, 1.05),
    "long: moments": Limit(LONG, MOMENTS, None, 1.02, 0.9),
    "long: moments, one example at a time": Limit(LONG, MOMENTS, 1, None, 0.13),
    "long: clipped": Limit(LONG, CLIPPED, None, 1.32, 0.96),
    "long: weighted": Limit(LONG, WEIGHTED, None, 1.32, 0.96),
    "long: mean, failures dropped": Limit(LONG, {"mean": pg.Mean()}, None, 1.36, 0.96, "drop"),
    "long: projected": Limit(LONG, PROJECTED, None, 1.0, 1.0),
    "tied: moments": Limit(TIED, MOMENTS, None, 1.02, 0.74),
    "scanned: moments": Limit(SCANNED, MOMENTS, None, None, 1.10 if NEWER_XLA else 1.06),
    "lstm: moments": Limit(RECURRENT, MOMENTS, None, None, 1.3),
    "lstm: tokens": Limit(RECURRENT, TOKENS, None, None, 1.45),
    "cnn: moments": Limit(CONVOLUTIONAL, MOMENTS, None, None, 0.98),
    "mlp: moments": Limit(PERCEPTRON, MOMENTS, None, 1.42, 1.7),
    "mlp: norms": Limit(PERCEPTRON, NORMS, None, 0.62, 1.7),
}


def unrolled_scan(step: Any, carry: Any, xs: Any, length: int | None = None, **_: Any) -> Any:
    return lax.scan(step, carry, xs, length=length, unroll=True)


def unrolled_map(f: Any, xs: Any) -> Any:
    return unrolled_scan(lambda _, x: (None, f(x)), None, xs)[1]


@contextlib.contextmanager
def as_users_compile() -> Iterator[None]:
    """Without what strict.py asks for."""
    asked = ("jax_disable_most_optimizations", "jax_enable_x64")
    for name in asked:
        jax.config.update(name, False)
    try:
        with jax.numpy_rank_promotion("allow"):
            yield
    finally:
        for name in asked:
            jax.config.update(name, True)


def lowered(fun: Any, model: Any) -> Any:
    args = jax.eval_shape(lambda: (model.init(jax.random.key(0)), model.sample(jax.random.key(1))))
    return jax.jit(fun).lower(*args)


def temporary_bytes(fun: Any, model: Any) -> float:
    compiled = lowered(fun, model).compile(compiler_options=AS_USERS_COMPILE)
    return compiled.memory_analysis().temp_size_in_bytes


def operations(fun: Any, model: Any) -> float:
    return lowered(fun, model).cost_analysis()["flops"]


@functools.cache
def plain_bytes(model: Any) -> float:
    return temporary_bytes(jax.value_and_grad(model.loss), model)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="limits are those of a newer XLA")
@pytest.mark.parametrize("name", LIMITS)
def test_cost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stats, microbatch_size, most_operations, most_bytes, nonfinite = LIMITS[name]
    options: Any = {"microbatch_size": microbatch_size, "nonfinite": nonfinite}

    def stats_fn() -> Any:  # a new one for each count, which JAX has not traced yet
        return pg.value_and_stats(model.loss, stats, **options)

    with as_users_compile():
        assert temporary_bytes(stats_fn(), model) <= most_bytes * plain_bytes(model)
        if most_operations is not None:
            monkeypatch.setattr(streamed, "lax", types.SimpleNamespace(scan=unrolled_scan))
            for module in (projected, units):
                monkeypatch.setattr(module, "lax", types.SimpleNamespace(map=unrolled_map))
            plain = operations(jax.value_and_grad(model.loss), model)
            assert operations(stats_fn(), model) <= most_operations * plain


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="limits are those of a newer XLA")
@pytest.mark.parametrize("model", [LONG, TIED], ids=["long", "tied"])
def test_noise_scale_of_norm_layers_is_nearly_free(model: Any) -> None:
    """A whole step with the monitor takes less than 1% more operations than one without."""
    adam, monitor = optax.adam(1e-3), pg.noise.Monitor(where=pg.noise.norm_layers)

    def plain(params: Any, state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(model.loss)(params, batch)
        return value, adam.update(gradient, state, params)

    def monitored(params: Any, state: Any, batch: Any, noise: Any) -> Any:
        value, stats = pg.value_and_stats(model.loss, monitor.stats)(params, batch)
        return value, adam.update(stats["mean"], state, params), monitor.update(stats, noise)

    with as_users_compile():
        params, batch = jax.eval_shape(
            lambda: (model.init(jax.random.key(0)), model.sample(jax.random.key(1)))
        )
        state, noise = jax.eval_shape(adam.init, params), jax.eval_shape(monitor.init, params)
        without, more = (
            jax.jit(step).lower(*args)
            for step, args in (
                (plain, (params, state, batch)),
                (monitored, (params, state, batch, noise)),
            )
        )
    assert "stablehlo.while" not in more.as_text()  # of which one step would be counted
    assert more.cost_analysis()["flops"] <= 1.01 * without.cost_analysis()["flops"]
