"""The saved inputs and the residuals, whose products are the gradients."""

import functools
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from tests.support import oracle
from tests.support.bounds import ERROR, assert_within
from tests.support.cases import BATCH
from tests.support.claims import close, refused
from tests.support.every_case import CASE
from tests.support.small_model import batch, loss, normal, params
from tests.support.truth import options, truth_of

# For each case, the parameters whose gradient is known to be a sum of products; no other one has a pair.
PAIRS = {
    "linear_regression": ["args[0]"],
    "mlp": ["[0]['w']", "[1]['w']", "[2]['w']"],
    "mlp_transposed": ["[0]", "[1]"],
    "layer_norm_mlp": ["[0]['w']", "[2]['w']"],
    "elementwise": ["['out']"],
    # An axis of the parameter belongs to both factors.
    "reshaped": [],
    "permuted": ["['v']", "['w']"],
    "fused_qkv": ["['out']", "['qkv']"],
    "heads": ["['v']", "['w']"],
    "mixer": ["['v']", "['w']"],
    "mixture_of_experts": ["['gate']['w']", "['v']", "['w']"],
    "embedding_indexed": ["['out']"],
    "unused_parameter": ["['w']"],
    "attention_rotary": ["['k']", "['out']", "['q']", "['v']"],
    "two_argnums": ["args[0]['w']", "args[2]['w']"],
    "scan_over_layers": ["[0]", "[1]['w']", "[2]"],
    # The scale of a layer is no matrix, and the shared layer is used at both levels.
    "scan_blocks_of_layers": ["['in']", "['out']", "['w']"],
    # A layer that is there twice has the sum of two products.
    "shared_layer": ["['out']", "['w']"],
    # The product is mixed afterwards, by a Jacobian or by another parameter.
    "weight_norm": [],
    "lora_merged": [],
    "conv_1d": ["['out']", "['w']"],
    # Convolutions in groups are several products.
    "conv_2d": ["['out']"],
    "lstm": ["['out']", "['w']"],
    # Which rows a ragged product takes together depends on the example.
    "experts_ragged": ["['gate']"],
    # The embedding is a product in the last layer and a lookup in the first.
    "transformer_tied": [
        "['blocks'][0]['in']['w']",
        "['blocks'][0]['k']",
        "['blocks'][0]['o']",
        "['blocks'][0]['out']['w']",
        "['blocks'][0]['q']",
        "['blocks'][0]['v']",
    ],
    # The penalty is added to the product.
    "regularised": [],
}


def product(pair, shape):
    """Every example's gradient for a parameter of this shape, by what the names of the axes say."""
    names = list(dict.fromkeys([*pair.input_axes, *pair.residual_axes]))
    letter = dict(zip(names, string.ascii_letters, strict=False))
    kept = [name for name in names if name not in ("example", "position")]
    spell = lambda axes: "".join(letter[name] for name in axes)  # noqa: E731
    equation = f"{spell(pair.input_axes)},{spell(pair.residual_axes)}->{spell(['example', *kept])}"
    g = np.einsum(equation, *(np.asarray(x, np.float64) for x in (pair.inputs, pair.residuals)))
    # A tuple names several axes of the parameter that are merged.
    axes = [axis for name in kept for axis in (name if isinstance(name, tuple) else (name,))]
    assert sorted(axes) == list(range(len(shape)))
    g = g.reshape(len(g), *(shape[axis] for axis in axes))
    return np.transpose(g, (0, *(1 + np.argsort(axes))))


@functools.cache
def factors(case, scale=1.0, **more):
    """For each parameter of the case its pair, or None."""

    def scaled(*args):
        out = case.loss(*args)
        return (scale * out[0], out[1]) if case.has_aux else scale * out

    args = case.make_args(jnp.float64)
    result = jax.jit(pg.grad_stats(scaled, pg.Factors(), **options(case), **more))(*args)
    tree = jax.tree.structure(truth_of(case, "float64").grads)
    return tree.flatten_up_to(result[0] if case.has_aux else result)


@pytest.mark.parametrize("name", PAIRS)
def test_product_is_the_gradient(name):
    case = CASE[name]
    result = factors(case)
    grads = jax.tree.leaves(truth_of(case, "float64").grads)
    plan = pg.explain(case.loss, pg.Mean(), **options(case))(*case.make_args(jnp.float64))
    paths = [row.path for row in plan.rows]
    assert len(result) == len(paths)
    assert [path for path, pair in zip(paths, result, strict=True) if pair is not None] == PAIRS[name]
    for path, pair, g in zip(paths, result, grads, strict=True):
        if pair is not None:
            for axes in (pair.input_axes, pair.residual_axes):
                assert axes[:2] == ("example", "position")
            assert pair.inputs.ndim == len(pair.input_axes)
            assert pair.residuals.ndim == len(pair.residual_axes)
            assert pair.inputs.shape[:2] == pair.residuals.shape[:2]
            bound = 10 * ERROR["float64"] * max(np.max(np.abs(g), initial=0), 1e-3)
            assert_within(product(pair, g.shape[1:]), g, bound, path)


@pytest.mark.parametrize("name", [name for name, products in PAIRS.items() if products])
def test_only_residuals_depend_on_the_cotangent(name):
    once, twice = factors(CASE[name]), factors(CASE[name], scale=2.0)
    assert [pair is None for pair in once] == [pair is None for pair in twice]
    for one, two in zip(once, twice, strict=True):
        if one is not None:
            close([two.inputs, two.residuals], [one.inputs, 2 * one.residuals])


@pytest.mark.parametrize("name", ["mlp", "heads", "attention_rotary", "scan_over_layers", "conv_1d"])
def test_any_microbatch(name):
    case = CASE[name]
    whole = factors(case)
    for size in (1, 2, "auto"):
        close(factors(case, microbatch_size=size), whole)


# What exactly is in a pair.


def test_dense_layers_over_positions():
    def fun(p, batch):
        return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ p["w"]) @ p["v"].T - batch["y"]))

    p = {"w": normal(0, 3, 7), "v": normal(1, 2, 7)}
    b = {"x": normal(2, BATCH, 4, 3), "y": normal(3, BATCH, 4, 2)}
    result = jax.jit(pg.grad_stats(fun, pg.Factors()))(p, b)
    h = np.tanh(np.asarray(b["x"] @ p["w"]))
    error = 2 * (h @ np.asarray(p["v"]).T - b["y"]) / 8
    close(result["w"].inputs, b["x"])
    close(result["w"].residuals, (error @ p["v"]) * (1 - h**2))
    assert result["w"].input_axes == ("example", "position", 0)
    assert result["w"].residual_axes == ("example", "position", 1)
    close(result["v"].inputs, h)
    close(result["v"].residuals, error)
    assert result["v"].input_axes == ("example", "position", 1)
    assert result["v"].residual_axes == ("example", "position", 0)


def test_dense_layer_without_positions():
    result = jax.jit(pg.grad_stats(loss, pg.Factors()))(params(), batch())
    assert result["b"] is None and result["table"] is None
    b, p = batch(), params()
    x = b["x"] + jnp.mean(p["table"][b["i"]], axis=1)
    close(result["w"].inputs, x[:, None])
    assert result["w"].residuals.shape == (BATCH, 1, 4)


def test_shared_axis():
    # Heads that have a matrix each: their axis is in both, and is not summed over.
    _, w = factors(CASE["heads"])
    assert 0 in w.input_axes and 0 in w.residual_axes
    assert w.inputs.shape[w.input_axes.index(0)] == w.residuals.shape[w.residual_axes.index(0)] == 2


def test_where():
    p, b = params(), batch()
    stats = [pg.Factors(where=lambda path: path == "['w']"), pg.Factors(), pg.Mean()]
    some, both, mean = jax.jit(pg.grad_stats(loss, stats))(p, b)
    assert [name for name in p if some[name] is not None] == ["w"]
    close(some["w"], both["w"])
    assert both["v"] is not None
    close(mean, jax.grad(loss)(p, b))


def test_where_selects_nothing():
    with refused(pg.ArgumentError, "Factors", "where"):
        pg.grad_stats(loss, pg.Factors(where=lambda path: False))(params(), batch())


def test_pair_is_a_tree():
    pair = jax.jit(pg.grad_stats(loss, pg.Factors()))(params(), batch())["w"]
    assert len(jax.tree.leaves(pair)) == 2
    doubled = jax.tree.map(lambda x: 2 * x, pair)
    assert isinstance(doubled, pg.FactorPair)
    assert (doubled.input_axes, doubled.residual_axes) == (pair.input_axes, pair.residual_axes)
    close(doubled.inputs, 2 * pair.inputs)
    close(jax.jit(lambda x: x)(pair), pair)


def test_weights_do_not_matter():
    p, b = params(), batch()
    stats_fn = jax.jit(pg.grad_stats(loss, pg.Factors()))
    weights = jnp.array([1.0, 0.0, 2.5, 3.0, 0.5])
    close(stats_fn(p, b, example_weights=weights), stats_fn(p, b))


def test_in_an_ensemble():
    p, b = params(), batch()
    many = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), p)
    result = jax.jit(jax.vmap(pg.grad_stats(loss, pg.Factors()), (0, None)))(many, b)
    for k in range(2):
        one = jax.tree.map(lambda w, k=k: w[k], many)
        g = oracle.per_example(loss, (one, b))[2]
        for name in ("v", "w"):
            pair = jax.tree.map(lambda x, k=k: x[k], result[name])
            close(product(pair, p[name].shape), g[name])


def test_combined():
    p, b = params(), batch(8)
    stats_fn = jax.jit(pg.grad_stats(loss, pg.Factors()))
    first, second = (jax.tree.map(lambda x, part=part: x[part], b) for part in (slice(3), slice(3, 8)))
    close(pg.combine(pg.Factors(), stats_fn(p, first), stats_fn(p, second)), stats_fn(p, b))
