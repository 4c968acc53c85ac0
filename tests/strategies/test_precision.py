"""Rounding: variances without cancellation, half precision summed in float32, weights as counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pergrad as pg
from pergrad._ir import backend
from pergrad._strategies import centred
from tests.support import oracle
from tests.support.cases import array

STRATEGIES = ["auto", "materialise", "streamed", "factored", "centred", "sparse"]
HALVES = [jnp.float16, jnp.bfloat16]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


# Variance. The gradients of these losses are given: g = d x^T, d, and d at the rows looked up.


def product_loss(w, batch):
    return jnp.mean(jnp.sum((batch["x"] @ w) * batch["d"], axis=1))


def positions_loss(w, batch):
    return jnp.mean(jnp.sum((batch["x"][:, None] @ w) * batch["d"][:, None], axis=(1, 2)))


def bias_loss(b, batch):
    return jnp.mean(jnp.sum((batch["d"] + b[None]) * batch["d"], axis=1))


def embedding_loss(table, batch):
    return jnp.mean(jnp.sum(table[batch["i"]] * batch["d"][:, None], axis=(1, 2)))


LOSSES = {
    "product": (product_loss, (3, 4)),
    "positions": (positions_loss, (3, 4)),
    "bias": (bias_loss, (4,)),
    "embedding": (embedding_loss, (5, 4)),
}


def make(name, *, ratio, size=60, dtype=jnp.float32):
    """Parameters and a batch whose gradients have a mean of `ratio` times their deviation."""
    _, shape = LOSSES[name]
    d = 1 + normal(0, size, 4) / ratio
    i = np.random.default_rng(1).integers(0, 2, size=(size, 3))
    i[:, 0], i[:, 2] = 2, 3  # rows that all examples look up, besides one that some do
    batch = {"x": array(np.ones((size, 3)), dtype), "d": array(d, dtype), "i": array(i)}
    return array(np.zeros(shape), dtype), batch


@functools.cache
def individual(fun):
    return jax.jit(pg.grad_stats(fun, pg.Individual()))


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_variance_is_accurate_when_the_mean_is_large(name, strategy, size):
    fun, _ = LOSSES[name]
    w, batch = make(name, ratio=1e4)
    stats_fn = pg.grad_stats(fun, pg.Variance(), strategy=strategy, microbatch_size=size)
    result = np.asarray(jax.jit(stats_fn)(w, batch))
    assert result.dtype == np.float32
    assert np.all(result >= 0)
    each = np.asarray(individual(fun)(w, batch), np.float64)
    np.testing.assert_allclose(result, np.var(each, axis=0, ddof=1), rtol=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_variance_with_weights_is_accurate_when_the_mean_is_large(name, strategy):
    fun, _ = LOSSES[name]
    w, batch = make(name, ratio=1e4)
    weights = np.random.default_rng(3).integers(0, 4, size=60)
    stats_fn = jax.jit(pg.grad_stats(fun, pg.Variance(), strategy=strategy, microbatch_size=7))
    result = np.asarray(stats_fn(w, batch, example_weights=weights))
    each = np.asarray(individual(fun)(w, batch))
    assert np.all(result >= 0)
    np.testing.assert_allclose(result, oracle.variance(each, weights), rtol=1e-3)


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_equal_examples_have_no_variance(name, strategy, size):
    fun, _ = LOSSES[name]
    w, batch = make(name, ratio=np.inf, size=30)
    batch = jax.tree.map(
        lambda x: array(np.broadcast_to(0.3 * np.asarray(x)[:1], x.shape), x.dtype), batch
    )
    stats_fn = pg.grad_stats(fun, pg.Variance(), strategy=strategy, microbatch_size=size)
    result = np.asarray(jax.jit(stats_fn)(w, batch))
    assert np.all(result >= 0)
    # Rounding of the mean by a few units, squared.
    assert np.all(result <= 1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, *HALVES], ids=lambda d: d.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_variance_is_never_negative(strategy, dtype):
    for name, (fun, _) in LOSSES.items():
        stats_fn = jax.jit(pg.grad_stats(fun, pg.Variance(), strategy=strategy))
        for ratio in (1e1, 1e6):
            result = stats_fn(*make(name, ratio=ratio, size=11, dtype=dtype))
            assert np.all(np.asarray(result) >= 0), (name, ratio)


# Range: a statistic exists in float32 if its gradients' values do, whatever the factors are.

POWERS = {
    pg.Mean(jnp.square): np.square,
    pg.Mean(pg.power(3)): lambda g: g**3,
    pg.Mean(pg.power(1.5)): lambda g: np.abs(g) ** 1.5,
    pg.Mean(lambda g: g * jnp.abs(g), factorable=True): lambda g: g * np.abs(g),
    pg.Mean(jnp.abs): np.abs,
    pg.Mean(jnp.sign): np.sign,
}


def heads_loss(w, batch):
    x, d = (batch[k].reshape(len(batch[k]), 2, -1) for k in "xd")
    return jnp.mean(jnp.sum(jnp.einsum("bha,hac->bhc", x, w) * d, axis=(1, 2)))


@pytest.mark.parametrize("strategy", ["auto", "factored", "streamed"])
@pytest.mark.parametrize("fun, shape", [(product_loss, (6, 4)), (heads_loss, (2, 3, 2))])
def test_powers_of_gradients_whose_factors_have_none(fun, shape, strategy):
    # Factors from 1e-30 to 1e30, other ones in every example and in both heads; gradients of 1e-10 to 1.
    scale = 10.0 ** np.array([22, -22, 3, 30, -30, 0, 10])[:, None]
    x, d = normal(0, 7, 6) * scale, normal(1, 7, 4) / scale
    if fun is heads_loss:
        x[1, 3:], d[1, 2:] = x[1, 3:] * 1e30, d[1, 2:] / 1e30
    d[2] *= 1e-10
    x[5], d[6] = 0, 0
    batch = {"x": array(x, "float32"), "d": array(d, "float32")}
    w = jnp.zeros(shape, jnp.float32)
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), batch)
    _, _, g = oracle.per_example(fun, (w.astype(jnp.float64), wide))
    for weights in (None, np.array([1.0, 2, 1, 0.5, 3, 1, 1])):
        stats_fn = jax.jit(pg.grad_stats(fun, list(POWERS), strategy=strategy))
        result = stats_fn(w, batch, example_weights=weights)
        for own, (statistic, phi) in zip(result, POWERS.items(), strict=True):
            truth = oracle.mean_of(phi, g, weights)
            np.testing.assert_allclose(own, truth, rtol=1e-5, err_msg=repr(statistic))


@pytest.mark.parametrize("power, size", [(2, 1e-17), (2, 1e17), (4, 1e-8), (4, 1e8)])
def test_powers_as_small_and_large_as_float32_has(power, size):
    x, d = normal(0, 5, 3) * 1e-15, normal(1, 5, 4) * 1e15 * size
    batch = {"x": array(x, "float32"), "d": array(d, "float32")}
    g = np.einsum("ba,bc->bac", *(np.asarray(batch[k], np.float64) for k in "xd"))
    stats_fn = pg.grad_stats(product_loss, pg.Mean(pg.power(power)), strategy="factored")
    result = jax.jit(stats_fn)(jnp.zeros((3, 4), jnp.float32), batch)
    np.testing.assert_allclose(result, np.mean(g**power, axis=0), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["auto", "gram", "streamed"])
@pytest.mark.parametrize("positions", [1, 3])
def test_norms_of_gradients_whose_factors_have_none(positions, strategy):
    def fun(w, batch):
        return jnp.mean(jnp.sum((batch["x"] @ w) * batch["d"], axis=(1, 2)))

    scale = 10.0 ** np.array([22, -22, 3, 30, -30, 0])[:, None, None]
    x, d = normal(0, 6, positions, 3) * scale, normal(1, 6, positions, 4) / scale
    x[0, -1], d[0, -1] = x[0, -1] / 1e40, d[0, -1] * 1e40
    x[5], d[5] = 0, 1e30
    d[2] *= 1e-14
    batch = {"x": array(x, "float32"), "d": array(d, "float32")}
    w = jnp.zeros((3, 4), jnp.float32)
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), batch)
    _, _, g = oracle.per_example(fun, (w.astype(jnp.float64), wide))
    stats = [pg.Norm(), pg.ClippedMean(1.0), pg.Gram()]
    norm, clipped, gram = jax.jit(pg.grad_stats(fun, stats, strategy=strategy))(w, batch)
    np.testing.assert_allclose(norm, oracle.norm(g), rtol=1e-5)
    np.testing.assert_allclose(clipped, oracle.clipped_mean(g, 1.0), rtol=1e-4, atol=1e-6)
    size = oracle.norm(g)
    np.testing.assert_allclose(gram, oracle.gram(g), rtol=0, atol=1e-5 * np.max(size) ** 2)
    np.testing.assert_allclose(np.diagonal(gram), size**2, rtol=1e-5)


@pytest.mark.parametrize(
    "x, d", [(0, np.inf), (np.inf, 0), (np.inf, 1), (-2, np.inf), (np.nan, 0), (3, np.nan)]
)
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_what_is_not_finite_in_a_factor(x, d, weight):
    # The first entry of each factor of the first example; all others are finite, and none is 0.
    batch = {"x": normal(0, 5, 3), "d": normal(1, 5, 4)}
    batch["x"][0, 0], batch["d"][0, 0] = x, d
    weights = np.array([weight, 1, 1, 1, 1])
    batch = {k: array(a, "float32") for k, a in batch.items()}
    w = jnp.zeros((3, 4), jnp.float32)
    every = functools.partial(pg.grad_stats, product_loss, list(POWERS))
    for given in (None, weights) if weight else (weights,):
        formed = jax.jit(every(strategy="streamed"))(w, batch, example_weights=given)
        factored = jax.jit(every(strategy="factored"))(w, batch, example_weights=given)
        for own, truth, statistic in zip(factored, formed, POWERS, strict=True):
            if statistic == pg.Mean(jnp.sign) and np.any(np.isnan(truth)):
                # A zero times an infinity is NaN, and so is the whole row or column of that infinity.
                assert np.all(np.isnan(own) >= np.isnan(truth))
                rows, columns = (np.any(np.isnan(truth), axis=k) for k in (1, 0))
                own, truth = (np.asarray(a)[~rows][:, ~columns] for a in (own, truth))
            np.testing.assert_allclose(own, truth, rtol=1e-5, err_msg=repr(statistic))


# Batched streams, which accelerators have: the examples that do not fill a group come one by one.


@pytest.mark.parametrize("at_a_time", [2, 3, 4, 9])
@pytest.mark.parametrize("name", ["positions", "embedding"])
def test_the_last_examples_of_a_batched_stream_count(name, at_a_time, monkeypatch):
    monkeypatch.setattr(backend, "backend", lambda: backend.BACKENDS["gpu:h100"])
    fun, _ = LOSSES[name]
    w, batch = make(name, ratio=1, size=11, dtype=jnp.float64)
    _, _, g = oracle.per_example(fun, (w, batch))
    v = array(normal(5, *np.shape(w)))
    truth = {
        pg.Mean(): oracle.mean,
        pg.Mean(jnp.square): lambda g, c: oracle.mean_of(np.square, g, c),
        pg.Mean(jnp.sign): lambda g, c: oracle.mean_of(np.sign, g, c),
        pg.Variance(): oracle.variance,
        pg.Fold(jnp.zeros_like, lambda s, g: jnp.maximum(s, jnp.abs(g))): lambda g, c: np.max(
            np.abs(g[c > 0]), axis=0
        ),
        pg.Norm(): lambda g, c: oracle.norm(g),
        pg.Dot(): lambda g, c: oracle.dot(g, v),
        pg.Individual(): lambda g, c: g,
        pg.ClippedMean(2.0): lambda g, c: oracle.clipped_mean(g, 2.0, c),
    }
    stats, strategy = list(truth), f"streamed:{at_a_time}"
    for weights in (None, np.array([1, 2, 0, 1, 1, 3, 1, 1, 0, 2, 1.5])):
        stats_fn = jax.jit(pg.grad_stats(fun, stats, strategy=strategy))
        result = stats_fn(w, batch, example_weights=weights, direction=v)
        counts = np.ones(11) if weights is None else weights
        for statistic, own in zip(stats, result, strict=True):
            np.testing.assert_allclose(
                own, truth[statistic](g, counts), rtol=1e-10, atol=1e-12, err_msg=repr(statistic)
            )
    (row,) = {row.strategy for row in pg.explain(fun, pg.Variance(), strategy=strategy)(w, batch).rows}
    assert row == strategy


# Half precision.


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_long_sums_do_not_stagnate(name, strategy, dtype):
    fun, _ = LOSSES[name]
    w, batch = make(name, ratio=10, size=4096, dtype=dtype)
    each = np.asarray(individual(fun)(w, batch), np.float64)
    stats = {"mean": pg.Mean(), "square": pg.Mean(jnp.square), "variance": pg.Variance()}
    for size in (None, 64):
        stats_fn = jax.jit(pg.grad_stats(fun, stats, strategy=strategy, microbatch_size=size))
        result = {k: np.asarray(x, np.float64) for k, x in stats_fn(w, batch).items()}
        # The mean is rounded to the parameter's dtype once.
        rounding = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(result["mean"], each.mean(axis=0), rtol=rounding, atol=1e-7)
        # The factors are not rounded to half precision before their squares are taken.
        np.testing.assert_allclose(
            result["square"], np.mean(np.square(each), axis=0), rtol=1e-2, atol=1e-7
        )
        np.testing.assert_allclose(
            result["variance"], np.var(each, axis=0, ddof=1), rtol=1e-2, atol=1e-7
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_squares_of_small_half_precision_gradients_do_not_vanish(name, strategy):
    fun, _ = LOSSES[name]
    w, batch = make(name, ratio=10, size=32, dtype=jnp.float16)
    batch["d"] = array(np.asarray(batch["d"]) * np.float16(1e-4))
    each = np.asarray(individual(fun)(w, batch), np.float64)
    assert np.max(np.abs(each)) < 1e-3  # The squares are below float16's smallest number.
    result = jax.jit(pg.grad_stats(fun, pg.Mean(jnp.square), strategy=strategy))(w, batch)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, np.mean(np.square(each), axis=0), rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("small", ["x", "d"])
def test_shares_of_small_half_precision_factors_do_not_vanish(small, strategy):
    # With a matrix larger than its factors, an example's share is multiplied into a factor.
    size, width = 128, 200
    batch = {"x": normal(0, size, width), "d": normal(1, size, width)}
    batch = {k: array(x * (2e-6 if k == small else 1), jnp.float16) for k, x in batch.items()}
    w = jnp.zeros((width, width), jnp.float16)
    stats_fn = pg.grad_stats(product_loss, pg.Mean(), strategy=strategy)
    x, d = (np.asarray(batch[k], np.float64) for k in "xd")
    truth = x.T @ d / size
    # Rounded to float16, where the step is 6e-8: for each example at worst, and in the end.
    np.testing.assert_allclose(jax.jit(stats_fn)(w, batch), truth, atol=6e-8)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, *HALVES], ids=lambda d: d.__name__)
def test_result_dtypes(dtype):
    wide = jnp.promote_types(dtype, jnp.float32)
    stats = {
        "mean": pg.Mean(),
        "square": pg.Mean(jnp.square),
        "cos": pg.Mean(jnp.cos),
        "variance": pg.Variance(),
        "each": pg.Individual(),
        "fold": pg.Fold(jnp.zeros_like, jnp.maximum),
        "loss": pg.Loss(),
    }
    own = {"mean", "each", "fold", "loss"}
    for name, (fun, _) in LOSSES.items():
        w, batch = make(name, ratio=10, size=5, dtype=dtype)
        for strategy in STRATEGIES:
            stats_fn = pg.value_and_stats(fun, stats, strategy=strategy)
            value, result = jax.eval_shape(stats_fn, w, batch)
            assert value.dtype == dtype
            expected = {k: jnp.dtype(dtype if k in own else wide) for k in stats}
            assert {k: x.dtype for k, x in result.items()} == expected
            assert result["mean"].shape == w.shape


def test_mixed_dtypes_of_parameters():
    p = {"w": jnp.asarray(normal(0, 3, 4), jnp.bfloat16), "v": jnp.asarray(normal(1, 4, 2), jnp.float32)}

    def fun(p, x):
        h = jnp.tanh(x.astype(jnp.bfloat16) @ p["w"])
        return jnp.mean(jnp.square(h.astype(jnp.float32) @ p["v"]))

    stats = {"mean": pg.Mean(), "variance": pg.Variance()}
    result = jax.jit(pg.grad_stats(fun, stats))(p, jnp.asarray(normal(2, 5, 3), jnp.float32))
    assert {k: x.dtype.name for k, x in result["mean"].items()} == {"w": "bfloat16", "v": "float32"}
    assert {x.dtype.name for x in result["variance"].values()} == {"float32"}


# Mixed precision: parameters of one type, a model that computes in another, in loops and convolutions.


def cast_in_layers(p, x, dtype):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(dtype)), None), x[:, 0], p)[0]


def cast_in_time(p, x, dtype):
    def cell(h, x):
        h = jnp.tanh(x + h @ p[0].astype(dtype) + p[1, 0].astype(dtype)[None])
        return h, h

    return lax.scan(cell, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[1]


def cast_before_the_loop(p, x, dtype):
    return cast_in_time(p.astype(dtype), x, dtype)


def cast_in_convolution(p, x, dtype):
    numbers = ("NWC", "WIO", "NWC")
    return jnp.tanh(
        lax.conv_general_dilated(x, p.astype(dtype), (1,), "SAME", dimension_numbers=numbers)
    )


MIXED = [cast_in_layers, cast_in_time, cast_before_the_loop, cast_in_convolution]
TYPES = [
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float32"),
    ("float16", "float32"),
]


@pytest.mark.parametrize("strategy, size", [("auto", None), ("streamed", 5)])
@pytest.mark.parametrize("own, inside", TYPES)
@pytest.mark.parametrize("model", MIXED, ids=lambda model: model.__name__)
def test_mixed_precision(model, own, inside, strategy, size):
    # With half-precision parameters gradients are about 1e-3, and their squares would vanish.
    scale = 1.0 if own == "float32" else 2.0**-8
    p = array(0.5 * normal(0, 3, 4, 4), own)
    x = array(normal(1, 12, 6, 4), inside)

    def fun(p, x):
        return scale * jnp.mean(jnp.square(model(p, x, inside).astype(jnp.float32) - 0.3))

    stats = {"mean": pg.Mean(), "square": pg.Mean(jnp.square), "variance": pg.Variance()}
    stats_fn = pg.grad_stats(fun, stats, strategy=strategy, microbatch_size=size)
    result = jax.jit(stats_fn)(p, x)
    assert [result[name].dtype.name for name in stats] == [own, "float32", "float32"]
    g = np.asarray(oracle.per_example(fun, (p, x))[2], np.float64)
    # A few roundings of the coarser type, in what is about as large as the largest gradient.
    G, error = np.max(np.abs(g)), 6 * max(float(jnp.finfo(t).eps) for t in (own, inside))
    np.testing.assert_allclose(result["mean"].astype(float), oracle.mean(g), rtol=0, atol=error * G)
    square = oracle.mean_of(np.square, g)
    np.testing.assert_allclose(result["square"], square, rtol=0, atol=2 * error * G**2)
    np.testing.assert_allclose(result["variance"], oracle.variance(g), rtol=0, atol=8 * error * G**2)


# Layouts of the products that make up a gradient: where XLA's CPU backend has no product of bfloat16
# matrices with a float32 result, it refuses to run it. Which ones depends on the axes around it.


def into_heads(w, x):  # [d, h, k]
    return lax.dot_general(x, w, (((2,), (0,)), ((), ())))


def out_of_heads(w, x):  # [h, k, d]
    return lax.dot_general(x.reshape(*x.shape[:2], 2, 4), w, (((2, 3), (0, 1)), ((), ())))


def transposed(w, x):  # [k, d]
    return lax.dot_general(w, x, (((1,), (2,)), ((), ())))


def heads_apart(w, x):  # [h, d, e, f]
    return lax.dot_general(w, x.reshape(*x.shape[:2], 2, 4), (((1,), (3,)), ((0,), (2,))))


LAYOUTS = {into_heads: (8, 2, 5), out_of_heads: (2, 4, 3), transposed: (5, 8), heads_apart: (2, 4, 3, 5)}


@pytest.mark.parametrize("half", HALVES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("model", LAYOUTS, ids=lambda model: model.__name__)
def test_products_of_any_layout_in_mixed_precision(model, half):
    p, x = array(0.5 * normal(0, *LAYOUTS[model]), "float32"), array(normal(1, 7, 6, 8), half)

    def fun(p, x):
        return jnp.mean(jnp.tanh(model(p.astype(half), x)).astype(jnp.float32))

    g = np.asarray(oracle.per_example(fun, (p, x))[2], np.float64)
    # A few roundings of the half-precision model.
    close = dict(rtol=0, atol=6 * float(jnp.finfo(half).eps) * np.max(np.abs(g)))
    for statistic in (pg.Mean(), pg.Mean(per="token"), pg.Mean(per=2)):
        for strategy in ("auto", "streamed", "materialise"):
            result = jax.jit(pg.grad_stats(fun, statistic, strategy=strategy))(p, x[:6])
            np.testing.assert_allclose(result, oracle.mean(g[:6]), **close)
    result = jax.jit(pg.grad_stats(fun, pg.Dot()))(p, x, direction=p)
    np.testing.assert_allclose(result, oracle.dot(g, p), rtol=0, atol=np.sum(np.abs(p)) * close["atol"])


# Weights.


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_weights_are_counts(name, strategy, size):
    fun, _ = LOSSES[name]
    w, batch = make(name, ratio=3, size=5, dtype=jnp.float64)
    counts = np.array([2, 0, 1, 3, 1])
    stats = {
        "mean": pg.Mean(),
        "square": pg.Mean(jnp.square),
        "variance": pg.Variance(),
        "count": pg.Count(),
    }
    stats_fn = jax.jit(pg.value_and_stats(fun, stats, strategy=strategy, microbatch_size=size))
    repeated = jax.tree.map(lambda x: array(np.repeat(x, counts, axis=0)), batch)
    weighted = stats_fn(w, batch, example_weights=counts)
    assert weighted[1]["count"] == 7
    close = dict(rtol=1e-12, atol=1e-14)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), weighted, stats_fn(w, repeated))


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_example_of_weight_zero_may_be_anything(name, strategy, size):
    fun, _ = LOSSES[name]
    w, batch = make(name, ratio=3, size=5, dtype=jnp.float64)
    weights = jnp.array([1.0, 0.0, 2.0, 1.0, 0.0])
    stats = {
        "mean": pg.Mean(),
        "cos": pg.Mean(jnp.cos),
        "square": pg.Mean(jnp.square),
        "variance": pg.Variance(),
        "fold": pg.Fold(jnp.zeros_like, jnp.maximum),
    }
    stats_fn = jax.jit(pg.value_and_stats(fun, stats, strategy=strategy, microbatch_size=size))
    clean = stats_fn(w, batch, example_weights=weights)
    for bad in (np.nan, np.inf):
        broken = batch | {k: batch[k].at[1].set(bad) for k in "xd"}
        result = stats_fn(w, broken, example_weights=weights)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), result, clean)


def convolved(x, kernel, groups):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


@pytest.mark.parametrize("shape, groups", [((128, 4, 3), 1), ((3, 2, 6), 2), ((3, 1, 4), 4)])
def test_padding_of_convolutions_may_be_anything(shape, groups):
    # Without a rule, as one convolution for all examples, XLA would let the NaN into the others.
    kernel, x = array(normal(0, *shape)), normal(1, 4, 150, 4)
    weights = np.array([1.0, 0, 2, 1])

    def fun(kernel, x):
        return jnp.mean(jnp.tanh(convolved(x, kernel, groups)))

    stats = {"mean": pg.Mean(), "square": pg.Mean(jnp.square), "variance": pg.Variance()}
    stats_fn = jax.jit(pg.grad_stats(fun, stats))
    clean = stats_fn(kernel, x, example_weights=weights)
    x[1] = np.nan
    padded = stats_fn(kernel, x, example_weights=weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14), padded, clean)


@pytest.mark.parametrize("size", [16, 37])
def test_centred_takes_sixteen_at_a_time(size):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(size, 4)), rng.integers(0, 3, size=size)
    p = rng.normal(size=(4, 3))
    x[w == 0] = np.nan
    stats_fn = pg.grad_stats(lambda p, x: jnp.mean(jnp.sum(jnp.tanh(x @ p), axis=1)), pg.Variance())
    (row,) = pg.explain(lambda p, x: jnp.mean(jnp.tanh(x @ p)), pg.Variance())(p, x).rows
    assert row.strategy == "centred"
    with np.errstate(invalid="ignore"):
        g = x[:, :, None] * (1 / np.cosh(x @ p) ** 2)[:, None, :]
    expected = np.cov(np.nan_to_num(g.reshape(size, -1)).T, fweights=w).diagonal().reshape(4, 3)
    np.testing.assert_allclose(stats_fn(p, x, example_weights=w), expected, rtol=1e-10)


@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype, rtol", [(jnp.float64, 1e-12), (jnp.float32, 1e-4)])
def test_variance_from_products(dtype, rtol, weighted, size, monkeypatch):
    """Where no digits are lost, the loop over deviations, which is broken here, does not run."""
    w, batch = make("product", ratio=2, dtype=dtype)
    counts = np.random.default_rng(3).integers(0, 4, size=60) if weighted else np.ones(60, int)
    batch["d"] = batch["d"].at[np.flatnonzero(counts == 0)].set(jnp.nan)
    given = {"example_weights": counts} if weighted else {}

    def variance(batch, **given):  # traced anew
        stats_fn = pg.grad_stats(product_loss, pg.Variance(), strategy="centred", microbatch_size=size)
        return jax.jit(stats_fn)(w, batch, **given)

    each = np.nan_to_num(np.asarray(individual(product_loss)(w, batch), np.float64))
    expected = np.cov(each.reshape(60, -1).T, fweights=counts).diagonal().reshape(w.shape)
    np.testing.assert_allclose(variance(batch, **given), expected, rtol=rtol)
    broken = lambda mean, *_: jnp.full_like(mean, jnp.nan)  # noqa: E731
    monkeypatch.setattr(centred, "_squares_around", broken)
    np.testing.assert_allclose(variance(batch, **given), expected, rtol=rtol)
    _, others = make("product", ratio=100, dtype=dtype)
    assert np.all(np.isnan(variance(others)))


@pytest.mark.parametrize("size", [None, 1])
def test_weights_are_no_wider_than_what_a_regulariser_adds(size):
    # With 64 bits enabled, weights are float64, which is wider than these gradients.
    def fun(w, x):
        return jnp.mean(jnp.square(x @ w)) + jnp.sum(jnp.square(w))

    w, x = array(normal(0, 3, 2), jnp.float32), array(normal(1, 2, 3), jnp.float32)
    weights = np.array([1, 0.5])
    result = pg.grad_stats(fun, pg.Mean(), microbatch_size=size)(w, x, example_weights=weights)
    assert result.dtype == jnp.float32
    truth = oracle.mean(oracle.per_example(fun, (w, x))[2], weights)
    np.testing.assert_allclose(result, truth, rtol=1e-5)
