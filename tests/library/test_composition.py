"""The statistics inside of the user's own program: jit, scan, vmap, grad, remat, trees and keywords."""

import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pergrad as pg
from tests.support import oracle
from tests.support.cases import BATCH
from tests.support.claims import close
from tests.support.every_case import CASES
from tests.support.small_model import (
    batch,
    ensemble,
    loss,
    member,
    normal,
    params,
    regularised,
    some_number,
)

STRATEGIES = ["auto", "materialise", "streamed", "factored", "sparse"]
ALL = {"mean": pg.Mean(), "square": pg.Mean(jnp.square), "variance": pg.Variance()}


def expected(p, batch, fun=loss):
    _, _, g = oracle.per_example(fun, (p, batch))
    return {
        "mean": oracle.mean(g),
        "square": oracle.mean_of(np.square, g),
        "variance": oracle.variance(g),
    }


# jit, scan.


@pytest.mark.parametrize("size", [None, 2, "auto"])
def test_eager_and_jit(size):
    p, b = params(), batch()
    stats_fn = pg.value_and_stats(loss, ALL, microbatch_size=size)
    value, stats = stats_fn(p, b)
    close(stats, expected(p, b))
    close(value, loss(p, b))
    close(jax.jit(stats_fn)(p, b), (value, stats))
    close(jax.jit(jax.jit(lambda *args: stats_fn(*args)))(p, b), (value, stats))


def test_donated_arguments():
    stats_fn = pg.value_and_stats(loss, ALL)

    def step(p, square, b):
        value, stats = stats_fn(p, b)
        square = jax.tree.map(lambda s, new: 0.5 * s + new, square, stats["square"])
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, stats["mean"]), square, value

    p, b = params(), batch()
    zeros = jax.tree.map(jnp.zeros_like, p)
    plain = step(p, zeros, b)
    donated = jax.tree.map(jnp.copy, (p, zeros))
    close(jax.jit(step, donate_argnums=(0, 1))(*donated, b), plain)
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))


@pytest.mark.parametrize("size", [None, 3])
def test_training_in_a_scan(size):
    tx = optax.adam(1e-2)
    batches = jax.tree.map(lambda *x: jnp.stack(x), *[batch(4) for _ in range(3)])
    batches["x"] = normal(7, 3, 4, 3)
    stats_fn = pg.value_and_stats(loss, {"mean": pg.Mean(), "v": pg.Variance()}, microbatch_size=size)

    def step(carry, b):
        p, state = carry
        value, stats = stats_fn(p, b)
        updates, state = tx.update(stats["mean"], state, p)
        return (optax.apply_updates(p, updates), state), value

    @jax.jit
    def plain_step(p, state, b):
        value, grads = jax.value_and_grad(loss)(p, b)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    p = params()
    (trained, _), values = jax.jit(lambda p: lax.scan(step, (p, tx.init(p)), batches))(p)
    state, plain_values = tx.init(p), []
    for i in range(3):
        p, state, value = plain_step(p, state, jax.tree.map(lambda x, i=i: x[i], batches))
        plain_values.append(value)
    close(trained, p, rtol=1e-8)
    close(values, np.stack(plain_values))


def test_twice_in_one_program():
    p, b = params(), batch()

    @jax.jit
    def both(p, b):
        first = pg.grad_stats(loss, pg.Mean())(p, b)
        moved = jax.tree.map(lambda w, g: w - 0.1 * g, p, first)
        return first, pg.grad_stats(loss, {"v": pg.Variance(), "n": pg.Count()})(moved, b)

    first, second = both(p, b)
    close(first, expected(p, b)["mean"])
    moved = jax.tree.map(lambda w, g: w - 0.1 * g, p, first)
    close(second, {"v": expected(moved, b)["variance"], "n": np.float64(BATCH)})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_closed_over_tracers(strategy):
    p, b = params(), batch()

    def stats_of(scale, offset):
        def scaled(p, b):
            return scale * loss(jax.tree.map(lambda w: w * offset, p), b) + jnp.sum(p["b"]) * offset

        return pg.grad_stats(scaled, ALL, strategy=strategy)(p, b)

    def plain(p, b):
        return 2.0 * loss(jax.tree.map(lambda w: w * 0.7, p), b) + jnp.sum(p["b"]) * 0.7

    close(jax.jit(stats_of)(2.0, 0.7), expected(p, b, plain))


def test_phi_and_fold_that_close_over_tracers():
    p, b = params(), batch()

    @jax.jit
    def stats_of(t):
        shrunk = pg.Mean(lambda g: jnp.sign(g) * jnp.maximum(jnp.abs(g) - t, 0))
        largest = pg.Fold(jnp.zeros_like, lambda s, g: jnp.maximum(s, jnp.abs(g) / t))
        return pg.grad_stats(loss, [shrunk, largest])(p, b)

    shrunk, largest = stats_of(0.01)
    _, _, g = oracle.per_example(loss, (p, b))
    close(shrunk, oracle.mean_of(lambda g: np.sign(g) * np.maximum(np.abs(g) - 0.01, 0), g))
    close(largest, jax.tree.map(lambda x: np.max(np.abs(x), axis=0) / 0.01, g))


def test_no_tracer_leaks():
    p, b = params(), batch()
    with jax.checking_leaks():
        value, stats = jax.jit(pg.value_and_stats(loss, ALL, microbatch_size=2))(p, b)
    close(stats, expected(p, b))
    close(value, loss(p, b))


# An ensemble: the user's own vmap.


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vmap_over_an_ensemble(strategy, size):
    many, b = ensemble(), batch()
    many |= {"only": normal(8, 3, 2), "none": normal(9, 3, 2)}
    stats_fn = pg.value_and_stats(regularised, ALL, strategy=strategy, microbatch_size=size)
    values, stats = jax.jit(jax.vmap(stats_fn, (0, None)))(many, b)
    for k in range(3):
        close(member(stats, k), expected(member(many, k), b, regularised))
        close(values[k], regularised(member(many, k), b))


@pytest.mark.parametrize("strategy", ["auto", "streamed"])
def test_vmap_over_parameters_batches_and_weights(strategy):
    many = ensemble()
    batches = jax.tree.map(lambda *x: jnp.stack(x), *[batch() for _ in range(3)])
    batches["x"] = normal(10, 3, BATCH, 3)
    weights = jnp.asarray(np.random.default_rng(0).integers(1, 4, size=(3, BATCH)), float)
    stats_fn = pg.grad_stats(loss, ALL, strategy=strategy)

    @jax.jit
    def weighted(p, b, w):
        return stats_fn(p, b, example_weights=w)

    stats = jax.vmap(weighted)(many, batches, weights)
    for k in range(3):
        close(member(stats, k), weighted(member(many, k), member(batches, k), weights[k]))


def test_vmap_over_something_that_no_gradient_needs():
    # The rule of a tail must reduce over the examples, whatever else is mapped.
    p, b = params(), batch()
    shifts = jnp.arange(3.0)

    def stats_of(shift):
        return pg.value_and_stats(lambda p, b: loss(p, b) + shift, ALL)(p, b)

    values, stats = jax.jit(jax.vmap(stats_of))(shifts)
    close(values, loss(p, b) + shifts)
    for k in range(3):
        close(member(stats, k), expected(p, b))


# Differentiated through.


@jax.custom_jvp
def safe_norm(x):
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1))


@safe_norm.defjvp
def safe_norm_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    norm = safe_norm(x)
    return norm, jnp.sum(x * dx, axis=-1) / jnp.where(norm > 0, norm, 1)


def norm_loss(p, batch):
    h = batch["x"] + jnp.mean(p["table"][batch["i"]], axis=1)
    h = jnp.tanh(h @ p["w"] + p["b"][None])
    return jnp.mean(jnp.square(safe_norm(h @ p["v"]) - batch["y"][:, 0]))


def plain_stats(fun, p, batch):
    def gradient(example):
        return jax.grad(fun)(p, jax.tree.map(lambda x: x[None], example))

    g = jax.vmap(gradient)(batch)
    return {
        "mean": jax.tree.map(lambda x: jnp.mean(x, axis=0), g),
        "square": jax.tree.map(lambda x: jnp.mean(jnp.square(x), axis=0), g),
        "variance": jax.tree.map(lambda x: jnp.var(x, axis=0, ddof=1), g),
    }


def through(stats_fn, p, batch):
    """The derivative of a function of the statistics for parameters and data."""

    def number(p, x, y):
        return some_number(stats_fn(p, batch | {"x": x, "y": y}))

    return jax.jit(jax.value_and_grad(number, (0, 1, 2)))(p, batch["x"], batch["y"])


@functools.cache
def plain_derivative(fun):
    return through(functools.partial(plain_stats, fun), params(), batch())


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fun", [loss, norm_loss])
def test_derivative_of_statistics(fun, strategy, size):
    p, b = params(), batch()
    stats_fn = pg.grad_stats(fun, ALL, strategy=strategy, microbatch_size=size)
    close(through(stats_fn, p, b), plain_derivative(fun), rtol=1e-8)


def test_derivative_by_finite_differences():
    p, b = params(), batch()
    stats_fn = jax.jit(pg.grad_stats(loss, ALL))
    direction = jax.tree.map(lambda w: normal(11, *w.shape), p)

    def along(t):
        return some_number(stats_fn(jax.tree.map(lambda w, d: w + t * d, p, direction), b))

    numeric = (along(1e-5) - along(-1e-5)) / 2e-5
    np.testing.assert_allclose(jax.jit(jax.grad(along))(0.0), numeric, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(along))(0.0), numeric, rtol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_own_rules_are_used_in_second_derivatives(strategy):
    # At the origin the derivative of the square root itself is infinite.
    p, b = params(), batch()
    p = p | {"b": jnp.zeros(4), "table": jnp.zeros((7, 3))}
    b = b | {"x": b["x"].at[1].set(0)}
    stats_fn = pg.grad_stats(norm_loss, ALL, strategy=strategy)
    result = through(stats_fn, p, b)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))
    close(result, through(functools.partial(plain_stats, norm_loss), p, b), rtol=1e-8)


def guarded_loss(p, batch):
    """Each example takes its own branch; the other would have an infinite slope at the origin."""

    def one(example):
        x = example["x"]
        unit = lambda: jnp.tanh((x / jnp.sqrt(jnp.sum(jnp.square(x)))) @ p["w"] / jnp.sum(x))  # noqa: E731
        h = jax.lax.cond(jnp.any(x != 0), unit, lambda: jnp.sin(x @ p["w"] + p["b"]))
        return jnp.mean(jnp.square(h @ p["v"] - example["y"]))

    examples = [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(len(batch["x"]))]
    return jnp.mean(jnp.stack([one(example) for example in examples]))


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("strategy", ["auto", "materialise"])
def test_derivative_of_guarded_branches(strategy, size):
    p, b = params(), batch()
    b = b | {"x": b["x"].at[1].set(0)}
    stats_fn = pg.grad_stats(guarded_loss, ALL, strategy=strategy, microbatch_size=size)
    result = through(stats_fn, p, b)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))
    close(result, through(functools.partial(plain_stats, guarded_loss), p, b), rtol=1e-8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_derivative_for_weights(strategy):
    p, b = params(), batch()
    _, _, g = oracle.per_example(loss, (p, b))
    weights = jnp.array([1.0, 2.0, 0.5, 3.0, 1.5])
    stats_fn = pg.grad_stats(loss, {"mean": pg.Mean(), "v": pg.Variance()}, strategy=strategy)

    def weighted(w):
        mean = jax.tree.map(lambda x: jnp.tensordot(w, x, 1) / jnp.sum(w), g)
        v = jax.tree.map(
            lambda x, m: jnp.tensordot(w, jnp.square(x - m[None]), 1) / (jnp.sum(w) - 1), g, mean
        )
        return some_number({"mean": mean, "v": v})

    result = jax.jit(jax.grad(lambda w: some_number(stats_fn(p, b, example_weights=w))))(weights)
    close(result, jax.jit(jax.grad(weighted))(weights), rtol=1e-8)


# Trees.


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    "stats",
    [
        pg.Mean(),
        [pg.Mean(), pg.Mean()],
        (pg.Mean(), (pg.Mean(jnp.square), [pg.Mean()])),
        {"a": {"b": pg.Mean(), "none": None}, "c": ()},
        Pair(pg.Mean(jnp.square), Pair(pg.Mean(), pg.Mean(jnp.square))),
    ],
    ids=["one", "twice", "nested", "empty places", "namedtuple"],
)
def test_result_has_the_tree_of_the_statistics(stats):
    p, b = params(), batch()
    both = expected(p, b)
    result = jax.jit(pg.grad_stats(loss, stats))(p, b)
    close(result, jax.tree.map(lambda s: both["mean" if s == pg.Mean() else "square"], stats))


def test_statistics_of_the_batch_beside_those_of_parameters():
    p, b = params(), batch()
    values, _, g = oracle.per_example(loss, (p, b))
    stats = Pair([pg.Loss(), pg.Count()], pg.Individual())
    for size in (None, 2):
        result = jax.jit(pg.grad_stats(loss, stats, microbatch_size=size))(p, b)
        close(result, Pair([values, np.float64(BATCH)], g))


def test_statistics_of_the_batch_alone():
    p, b = params(), batch()
    values, _, _ = oracle.per_example(loss, (p, b))
    close(pg.grad_stats(loss, pg.Loss())(p, b), values)
    weights = jnp.array([1.0, 0.0, 2.0, 1.0, 1.0])
    close(pg.grad_stats(loss, pg.Count())(p, b, example_weights=weights), np.float64(5))


def test_parameters_with_none_and_tuples():
    p = ({"w": normal(1, 3, 2), "b": None}, [normal(2, 2), ()], None)

    def fun(p, x):
        assert p[0]["b"] is None and p[2] is None
        return jnp.mean(jnp.square(jnp.tanh(x @ p[0]["w"] + p[1][0][None])))

    x = normal(3, BATCH, 3)
    close(jax.jit(pg.grad_stats(fun, ALL))(p, x), expected(p, x, fun))


def test_tuple_of_argnums():
    def fun(w, x, v):
        return jnp.mean(jnp.square(jnp.tanh(x @ w) @ v["v"]))

    args = normal(1, 3, 4), normal(2, BATCH, 3), {"v": normal(3, 4, 2)}
    for argnums in [(0, 2), (2, 0), (-1,), 2]:
        _, _, g = oracle.per_example(fun, args, argnums=argnums)
        close(jax.jit(pg.grad_stats(fun, pg.Variance(), argnums))(*args), oracle.variance(g))


def test_numpy_and_python_numbers():
    p = {"w": np.asarray(normal(1, 3, 2)), "scale": 2.0}
    b = {"x": np.asarray(normal(2, BATCH, 3)), "label": np.array([0, 1, 1, 0, 1])}

    def fun(p, b):
        y = p["scale"] * jnp.tanh(b["x"] @ p["w"])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(y), b["label"][:, None], axis=1))

    value, stats = pg.value_and_stats(fun, ALL)(p, b)
    close(value, fun(p, jax.tree.map(jnp.asarray, b)))
    close(stats, expected(jax.tree.map(jnp.asarray, p), jax.tree.map(jnp.asarray, b), fun))


@pytest.mark.parametrize("x", [jnp.full((4, 3), 0.7), np.float32(0.7) * np.ones((4, 3), np.float32)])
@pytest.mark.parametrize("kind", [float, np.float64, np.float32, jnp.asarray], ids=lambda k: k.__name__)
def test_numbers_are_as_precise_as_in_jax_grad(kind, x):
    # A Python number, and an array that was made of one (jnp.full), is computed with in the precision of
    # what it meets.
    def fun(p, x):
        return jnp.mean(jnp.square(jnp.sin(p["a"] * x) + p["b"]))

    p = {"a": kind(0.3), "b": kind(0.6)}
    value, mean = pg.value_and_stats(fun, pg.Mean())(p, x)
    expected_value, gradient = jax.value_and_grad(fun)(p, x)
    rtol = 1e-14 if value.dtype == jnp.float64 else 1e-6
    assert value.dtype == expected_value.dtype
    close(value, expected_value, rtol)
    assert jax.tree.map(lambda g: g.dtype, mean) == jax.tree.map(lambda g: g.dtype, gradient)
    close(mean, gradient, rtol)


@pytest.mark.parametrize("constant", [1.5, np.float64(1.5), np.float32(1.5), np.array(1.5)])
def test_constant_loss(constant):
    stats = {"mean": pg.Mean(), "variance": pg.Variance(), "norm": pg.Norm(), "loss": pg.Loss()}
    value, result = pg.value_and_stats(lambda p, b: constant, stats)(params(), batch())
    close(value, 1.5)
    zeros = jax.tree.map(jnp.zeros_like, params())
    close(result["mean"], zeros)
    close(result["variance"], zeros)
    close(result["norm"], np.zeros(BATCH))
    close(result["loss"], np.full(BATCH, 1.5))


def test_keywords_stay_what_they_are():
    seen = []

    def fun(p, batch, how, *, train, name=None, scale):
        seen.append((how, train, name, isinstance(scale, jax.Array)))
        assert how == "tanh" and train is True and name is None
        return scale * loss(p, batch)

    p, b = params(), batch()
    result = pg.grad_stats(fun, ALL)(p, b, "tanh", train=True, scale=jnp.array(1.0))
    close(result, expected(p, b))
    assert seen == [("tanh", True, None, True)]


def test_other_arguments_may_be_anything():
    config = namedtuple("Config", ["activation"])(jnp.tanh)

    def fun(config, p, x):
        return jnp.mean(jnp.square(config.activation(x @ p)))

    args = config, normal(1, 3, 2), normal(2, BATCH, 3)
    close(
        pg.grad_stats(fun, pg.Mean(), 1, batch_argnums=2)(*args),
        jax.grad(fun, 1)(*args),
    )


# Randomness.


@pytest.mark.parametrize("name", ["dropout_typed_key", "dropout_raw_key", "dropout_two_keys"])
def test_keys_do_not_depend_on_the_microbatch(name):
    (case,) = [case for case in CASES if case.name == name]
    args = case.make_args(jnp.float64)
    options = {
        "argnums": case.argnums,
        "batch_argnums": case.batch_argnums,
        "rng_argnums": case.rng_argnums,
    }
    values, _, g = oracle.per_example(case.loss, args, **options)
    for size in (None, 1, 2, 3, BATCH, 100):
        stats_fn = pg.grad_stats(case.loss, [pg.Variance(), pg.Loss()], microbatch_size=size, **options)
        close(jax.jit(stats_fn)(*args), [oracle.variance(g), values])


@pytest.mark.parametrize("draw", ["bits", "gamma", "fold_in", "split", "generator", "layers"])
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_that_are_unsafe_to_map_do_not_depend_on_the_microbatch(impl, draw):
    def fun(p, x, key):
        if draw == "fold_in":
            key = jax.random.fold_in(key, 3)
        if draw == "split":
            key = jax.random.split(key)[1]
        if draw == "generator":
            noise = lax.rng_bit_generator(jax.random.key_data(key), x.shape)[1] / 2.0**32
        elif draw == "layers":
            keys = jax.random.split(key, 3)
            noise = lax.scan(lambda c, key: (c + jax.random.normal(key, x.shape), None), 0 * x, keys)[0]
        elif draw == "gamma":
            noise = jax.random.gamma(key, 2.0, x.shape)
        else:
            noise = jax.random.normal(key, x.shape)
        return jnp.mean(jnp.square(jnp.tanh((x * noise) @ p)))

    args = normal(0, 3, 2), normal(1, BATCH, 3), jax.random.key(1, impl=impl)
    values, _, g = oracle.per_example(fun, args, rng_argnums=2)
    for size in (None, 1, 2):
        stats = [pg.Variance(), pg.Loss()]
        stats_fn = pg.grad_stats(fun, stats, rng_argnums=2, microbatch_size=size)
        close(jax.jit(stats_fn)(*args), [oracle.variance(g), values])


# remat.


def deep(p, x, checkpoint):
    def block(p, x):
        for w in p:
            x = jnp.tanh(x @ w)
        return x

    block = jax.checkpoint(block) if checkpoint else block
    for q in p:
        x = block(q, x)
    return jnp.mean(jnp.square(x))


def test_remat_still_recomputes():
    p = [[normal(3 * i + j, 64, 64) / 8 for j in range(3)] for i in range(2)]
    x = normal(9, 16, 4, 64)
    forward = 6 * 2 * 16 * 4 * 64 * 64  # all layers
    flops = {}
    for checkpoint in (True, False):
        fun = functools.partial(deep, checkpoint=checkpoint)
        ours = jax.jit(pg.grad_stats(fun, pg.Mean())).lower(p, x)
        plain = jax.jit(jax.grad(fun)).lower(p, x)
        # One barrier stands between the loss and the backward pass.
        assert (ours.as_text().count("optimization_barrier") > 1) == checkpoint
        flops[checkpoint] = ours.cost_analysis()["flops"]
        assert flops[checkpoint] == pytest.approx(plain.cost_analysis()["flops"], rel=0.01)
        # The CPU's compiler merges some of the recomputation away, of ours as of that of jax.grad.
        compiled = ours.compile().cost_analysis()["flops"]
        assert compiled == pytest.approx(plain.compile().cost_analysis()["flops"], rel=0.01)
    assert flops[True] - flops[False] == pytest.approx(forward, rel=0.01)


def test_remat_gives_the_same_numbers():
    p = [[normal(3 * i + j, 4, 4) for j in range(3)] for i in range(2)]
    x = normal(9, BATCH, 4)
    with_it = pg.grad_stats(functools.partial(deep, checkpoint=True), ALL)
    close(jax.jit(with_it)(p, x), expected(p, x, functools.partial(deep, checkpoint=False)))
