"""Norm layers: which parameters they are, their noise scale, and the step to that of all parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from tests.support import oracle
from tests.support.claims import refused

noise = pg.noise

Tree = Any


@pytest.mark.parametrize(
    "path",
    [
        "['params']['LayerNorm_0']['scale']",
        "['params']['Block_1']['RMSNorm_0']['scale']",
        "['attention_norm']['bias'].value",
        "['layers'][3]['mlp_norm']['scale'].value",
        ".blocks[0].norm1.weight",
        ".norms[2].bias",
        "['net/~/layer_norm_2']['offset']",
        "['h']['ln_1']['g']",
        "['ln_f']['b']",
        "['resnet']['bn2']['gamma']",
        "['model']['input_layernorm']['weight']",
        "['attention_norm_weight']",
        "['BatchNormalization_0']['beta']",
        "['norm'][0]",
        "['norm']",
    ],
)
def test_named_like_a_norm_layer(path):
    assert noise.norm_layers(path)


@pytest.mark.parametrize(
    "path",
    [
        "['params']['PreNorm_0']['Dense_0']['kernel']",
        "['normal']['w']",
        "['enormous']['w']",
        "['params']['WeightNorm_0']['scale']",
        "['spectral_norm']['u']",
        "['weightnorm']['g']",
        "['column']['bias']",
        "['alnair']['bias']",
        "['norm_block']['attention']['query']['kernel'].value",
        ".layers[1].weight",
        "['value']",
        "",
    ],
)
def test_not_named_like_a_norm_layer(path):
    assert not noise.norm_layers(path)


def chosen(params: Tree) -> set[str]:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return {path for path in paths if noise.norm_layers(path)}


def test_in_linen():
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            return nn.GroupNorm(num_groups=2)(nn.Dense(4)(nn.RMSNorm(name="final")(x)))

    params = Block().init(jax.random.key(0), jnp.ones((1, 3, 4)))["params"]
    # A norm that was given another name is not found.
    assert chosen(params) == {
        f"['{layer}']['{name}']"
        for layer in ("LayerNorm_0", "GroupNorm_0")
        for name in ("scale", "bias")
    }


def test_in_nnx():
    from flax import nnx

    from pergrad.lab.config import Model
    from pergrad.lab.run import model

    config = Model(layers=2, width=8, heads=2, context=4)
    transformer = model.Transformer(config, 16, nnx.Rngs(0))
    norms = [m for _, m in nnx.iter_graph(transformer) if isinstance(m, nnx.LayerNorm)]
    found = chosen(nnx.state(transformer, nnx.Param))
    assert len(norms) == 5 and len(found) == 2 * len(norms)
    assert all(".value" in path and "norm" in path for path in found)


def test_in_equinox():
    import equinox as eqx

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention

    block = Block(eqx.nn.LayerNorm(4), eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0)))
    params, _ = eqx.partition(block, eqx.is_inexact_array)
    assert chosen(params) == {".norm.weight", ".norm.bias"}


def test_in_haiku():
    import haiku as hk

    def forward(x: Any) -> Any:
        return hk.nets.MLP([4, 4])(hk.LayerNorm(-1, create_scale=True, create_offset=True)(x))

    params = hk.transform(forward).init(jax.random.key(0), jnp.ones((1, 4)))
    assert chosen(params) == {"['layer_norm']['offset']", "['layer_norm']['scale']"}


def test_in_the_benchmarks():
    from pergrad.lab.bench.models import Transformer

    model = Transformer(batch=2, length=4, width=8, layers=3, vocab=16)
    found = chosen(jax.eval_shape(model.init, jax.random.key(0)))
    assert len(found) == 2 * (2 * 3 + 1) and all("norm" in path for path in found)


# What the monitor measures.


def network(params: Tree, x: Any) -> Any:
    h = jnp.tanh(jnp.einsum("btd,de->bte", x, params["dense"]))
    centred = h - jnp.mean(h, axis=-1, keepdims=True)
    h = centred / jnp.sqrt(jnp.var(h, axis=-1, keepdims=True) + 1e-3)
    h = h * params["norm"]["scale"][None, None] + params["norm"]["bias"][None, None]
    return jnp.mean(jnp.square(jnp.sum(jnp.sin(h), axis=-1)))


def test_monitor_of_norm_layers_by_brute_force():
    r = np.random.default_rng(0)
    params = {
        "dense": jnp.asarray(r.normal(size=(3, 4))),
        "norm": {"scale": jnp.asarray(r.normal(size=4)), "bias": jnp.asarray(r.normal(size=4))},
    }
    x = jnp.asarray(r.normal(size=(6, 5, 3)))
    g = oracle.per_example(network, (params, x))[2]
    rows = np.concatenate([g["norm"]["scale"], g["norm"]["bias"]], axis=1)
    tr = np.sum(np.var(rows, axis=0, ddof=1))
    signal = np.sum(np.mean(rows, axis=0) ** 2) - tr / 6

    monitor = noise.Monitor(where=noise.norm_layers)
    stats = jax.jit(pg.grad_stats(network, monitor.stats))(params, x)
    out = monitor.summary(monitor.update(stats, monitor.init(params)))
    assert out["noise"] == pytest.approx(tr, rel=1e-5)  # the state is in float32
    assert out["signal"] == pytest.approx(signal, rel=1e-4)
    assert out["noise_scale"] == pytest.approx(tr / signal, rel=1e-4)

    # From the norms of all parameters, which are measured for a calibration, it finds the same.
    both = jax.jit(pg.grad_stats(network, noise.Monitor().stats))(params, x)
    again = monitor.summary(monitor.update(both, monitor.init(params)))
    del out["outliers"], again["outliers"]  # those of the examples' norms over what was asked for
    assert again == pytest.approx(out, rel=1e-5)


# The calibration.


def test_calibration_is_a_line_in_logarithms():
    r = np.random.default_rng(0)
    part = np.exp(r.uniform(0, 5, size=40))
    whole = 3 * part**0.8 * np.exp(0.1 * r.normal(size=40))
    x, y = np.log(part), np.log(whole)

    fit = noise.calibrate(part.tolist(), whole.tolist(), exponent=None)
    slope, intercept = np.polyfit(x, y, 1)
    assert fit.exponent == pytest.approx(slope) and fit.factor == pytest.approx(np.exp(intercept))
    residuals = y - intercept - slope * x
    assert fit.spread == pytest.approx(np.exp(np.sqrt(np.sum(residuals**2) / 38))) and fit.steps == 40
    assert fit(7.0) == pytest.approx(np.exp(np.polyval((slope, intercept), np.log(7))))

    fixed = noise.calibrate(part.tolist(), whole.tolist())
    assert fixed.exponent == 1 and fixed.factor == pytest.approx(np.exp(np.mean(y - x)))
    assert fixed.spread == pytest.approx(np.exp(np.std(y - x, ddof=1)))
    assert fixed(10.0) == pytest.approx(10 * fixed.factor)


def test_calibration_leaves_out_what_is_not_known():
    part = [None, 2.0, 5.0, 8.0, np.inf, -1.0, 4.0]
    whole = [3.0, 4.0, None, 16.0, 2.0, 3.0, np.nan]
    fit = noise.calibrate(part, whole)
    assert fit.steps == 2 and fit.factor == pytest.approx(2) and fit.spread == pytest.approx(1)
    assert fit(None) is None and fit(np.inf) is None and fit(np.nan) is None


def test_calibration_of_two_monitors():
    """The noise of "norm" is 4 times its signal, that of both together 4/5 of 4 and 1/5 of 30 more."""
    sigma = {"norm": np.full(50, 2.0), "dense": np.full(100, 3.0)}
    mu = {"norm": np.ones(50), "dense": np.full(100, 0.5)}
    params = {k: jnp.zeros(len(v)) for k, v in mu.items()}
    part, whole = noise.Monitor(0.9, where=noise.norm_layers), noise.Monitor(0.9)
    stats_fn = pg.grad_stats(lambda p, x: sum(jnp.mean(x[k] @ p[k]) for k in p), whole.stats)

    def step(states: Any, key: Any) -> Any:
        keys = dict(zip(mu, jax.random.split(key), strict=True))
        x = {k: mu[k][None] + sigma[k][None] * jax.random.normal(keys[k], (8, len(mu[k]))) for k in mu}
        stats = stats_fn(params, x)
        states = part.update(stats, states[0]), whole.update(stats, states[1])
        return states, [noise.total(s.layers).noise_scale for s in states]

    keys = jax.random.split(jax.random.key(0), 300)
    start = part.init(params), whole.init(params)
    _, (of_part, of_whole) = jax.jit(lambda s: jax.lax.scan(step, s, keys))(start)
    fit = noise.calibrate(of_part[30::30].tolist(), of_whole[30::30].tolist())
    truth = (50 * 4 + 100 * 9) / (50 + 25)
    assert abs(fit(4.0) / truth - 1) < 0.1


@pytest.mark.parametrize(
    "part, whole, options, text",
    [
        ([1.0], [2.0], {}, "takes 2"),
        ([1.0, None], [2.0, 3.0], {}, "1 steps have both"),
        ([1.0, 2.0], [2.0, 3.0], {"exponent": None}, "takes 3"),
        ([1.0, 2.0], [2.0], {}, "2 steps, but whole has 1"),
        ([2.0, 2.0, 2.0], [2.0, 3.0, 4.0], {"exponent": None}, "the same in all steps"),
    ],
)
def test_calibration_refuses(part, whole, options, text):
    with refused(pg.ArgumentError, text):
        noise.calibrate(part, whole, **options)
