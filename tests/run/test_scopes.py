"""What a profile calls the parts of a program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pergrad as pg

MOMENTS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)}


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(params, batch):
    with jax.named_scope("my_layer"):
        h = jnp.tanh(batch @ params["first"]["w"])
    return jnp.mean(jnp.square(h @ params["second"]["w"]))


MLP = {"first": {"w": floats(4, 8)}, "second": {"w": floats(8, 3)}}


def layers(params, batch):
    def layer(h, w):
        with jax.named_scope("my_layer"):
            return jnp.tanh(h @ w), None

    return jnp.mean(jnp.square(lax.scan(layer, batch, params["layers"])[0]))


LAYERS = {"layers": floats(3, 4, 4)}


def names(loss, stats, *args, **options):
    """The names of all operations that the compiled program has."""
    text = jax.jit(pg.value_and_stats(loss, stats, **options)).lower(*args).compile().as_text()
    return {re.sub(r"\\(.)", r"\1", name) for name in re.findall(r'op_name="((?:[^"\\]|\\.)*)"', text)}


def some(pattern, found):
    return [name for name in found if re.search(pattern, name)]


def test_backbone_and_tails():
    found = names(mlp, MOMENTS, MLP, floats(16, 4), strategy="streamed:2")
    assert some(r"^jit\(mlp\)/pergrad/backbone/.*dot_general", found)
    for layer in ("first", "second"):
        assert some(rf"^jit\(mlp\)/pergrad/tail\[{layer}/w\]/streamed:2/.*dot_general", found)
    assert not some(r"backbone.*tail|tail.*backbone", found)


@pytest.mark.parametrize("strategy", ["summed", "factored", "materialise", "gram"])
def test_every_strategy(strategy):
    found = names(
        mlp, [pg.Mean(), pg.Mean(jnp.square), pg.Norm()], MLP, floats(16, 4), strategy=strategy
    )
    assert some(rf"/pergrad/tail\[second/w\]/{strategy}/", found)


def test_scopes_of_the_loss_are_kept():
    found = names(mlp, MOMENTS, MLP, floats(16, 4))
    assert some(r"/pergrad/backbone/.*my_layer.*/tanh", found)


def test_tails_in_a_loop():
    found = names(layers, MOMENTS, LAYERS, floats(16, 5, 4), strategy="streamed")
    assert some(r"/pergrad/backbone/.*while/body/.*tail\[layers\]/streamed/", found)
    assert some(r"/pergrad/backbone/.*my_layer.*/tanh", found)


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_microbatches(microbatch_size):
    found = names(mlp, MOMENTS, MLP, floats(16, 4), microbatch_size=microbatch_size)
    assert some(r"/pergrad/.*while/body/.*backbone/", found)
    assert some(r"/pergrad/.*while/body/.*tail\[second/w\]/", found)


def test_clipped_and_last():
    found = names(mlp, [pg.ClippedMean(1.0)], MLP, floats(16, 4))
    assert some(r"/pergrad/tail\[second/w\]/gram/", found)
    assert some(r"/pergrad/tail\[second/w\]/summed/", found)
    found = names(mlp, [pg.Gram()], MLP, floats(16, 4), strategy="gram")
    assert some(r"/pergrad/tail\[second/w\]/gram/", found)


def test_parameters_that_share_a_tail_are_all_named():
    def low_rank(params, batch):
        return jnp.mean(jnp.square(batch @ (params["a"] @ params["b"])))

    found = names(low_rank, pg.Mean(), {"a": floats(6, 2), "b": floats(2, 5)}, floats(8, 3, 6))
    assert some(r"/pergrad/tail\[a, b\]/summed/", found)


def test_several_arguments_and_single_arrays():
    def loss(w, v, x):
        return jnp.mean(jnp.tanh(x @ w["w"]) @ v)

    args = {"w": floats(4, 8)}, floats(8), floats(16, 4)
    found = names(loss, MOMENTS, *args, argnums=(0, 1), batch_argnums=2, strategy="materialise")
    assert some(r"/tail\[args/0/w\]/materialise/", found)
    assert some(r"/tail\[args/1\]/materialise/", found)


def test_many_parameters_in_a_tail_are_counted():
    def product(params, batch):
        return jnp.mean(jnp.square(batch @ functools.reduce(jnp.matmul, params)))

    found = names(product, pg.Mean(), [floats(6, 6)] * 5, floats(8, 3, 6))
    assert some(r"/pergrad/tail\[0, 1, 2 and 2 more\]/summed/", found)


def test_results_outside_of_jit_are_the_same():
    key = jax.random.key(0)
    params = jax.tree.map(lambda x: jax.random.normal(key, x.shape), MLP)
    batch = np.ones((3, 4), np.float32)
    with jax.named_scope("outer"):
        value, stats = pg.value_and_stats(mlp, MOMENTS)(params, batch)
    assert jnp.allclose(value, mlp(params, batch))
    assert jax.tree.all(jax.tree.map(jnp.allclose, stats["mean"], jax.grad(mlp)(params, batch)))
