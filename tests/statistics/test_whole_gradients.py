"""Norms, inner products and clipping: statistics of an example's whole gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pergrad as pg
from tests.support import oracle
from tests.support.bounds import ERROR
from tests.support.cases import BATCH
from tests.support.claims import close
from tests.support.every_case import CASE
from tests.support.runner import PLAIN, WEIGHTED, Runner
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
from tests.support.whole import Questions

STRATEGIES = ["auto", "gram", "materialise", "streamed", "summed", "sparse"]
# Every strategy, and both with and without microbatches.
WAYS = [("auto", None), ("auto", 2), *zip(STRATEGIES[1:], (None, 2, 2, None, 2), strict=True)]
C, C_LEAF = 6.0, 2.5  # some examples are clipped and some are not
WEIGHTS = jnp.array([1.0, 0.0, 2.5, 3.0, 0.5])
ALL = {
    "norm": pg.Norm(),
    "norms": pg.Norm(by="leaf"),
    "gram": pg.Gram(),
    "dot": pg.Dot(),
    "clipped": pg.ClippedMean(C),
    "clipped_by_leaf": pg.ClippedMean(C_LEAF, by="leaf"),
}


def direction():
    return jax.tree.map(lambda w: normal(7, *w.shape), params())


def grads(p=None, b=None, fun=loss):
    p, b = params() if p is None else p, batch() if b is None else b
    return oracle.per_example(fun, (p, b))[2]


def expected(g, v, w=None):
    return {
        "norm": oracle.norm(g),
        "norms": jax.tree.map(oracle.norm, g),
        "gram": oracle.gram(g),
        "dot": oracle.dot(g, v),
        "clipped": oracle.clipped_mean(g, C, w),
        "clipped_by_leaf": jax.tree.map(lambda x: oracle.clipped_mean(x, C_LEAF, w), g),
    }


def test_some_are_clipped_and_some_are_not():
    g = grads()
    for norms, c in ((oracle.norm(g), C), *((oracle.norm(x), C_LEAF) for x in jax.tree.leaves(g))):
        assert min(norms) < c < max(norms)


# How it is run.


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        *((size, s) for size in (None, 2) for s in STRATEGIES),
        *((n, "auto") for n in (1, 3, "auto", 100)),
    ],
)
def test_any_microbatch_and_strategy(strategy, size):
    p, b, v = params(), batch(), direction()
    stats_fn = pg.grad_stats(loss, ALL, microbatch_size=size, strategy=strategy)
    close(jax.jit(stats_fn)(p, b, direction=v), expected(grads(), v))


def test_eager():
    p, b, v = params(), batch(), direction()
    value, stats = pg.value_and_stats(loss, ALL)(p, b, direction=v)
    close(value, loss(p, b))
    close(stats, expected(grads(), v))


@pytest.mark.parametrize("name", ALL)
def test_alone(name):
    # Each may take another way when nothing else is asked for.
    p, b, v = params(), batch(), direction()
    more = {"direction": v} if name == "dot" else {}
    for size in (None, 2):
        result = jax.jit(pg.grad_stats(loss, ALL[name], microbatch_size=size))(p, b, **more)
        close(result, expected(grads(), v)[name])


def test_batch_of_one():
    p, b, v = params(), batch(1), direction()
    result = jax.jit(pg.grad_stats(loss, ALL))(p, b, direction=v)
    close(result, expected(grads(b=b), v))
    assert result["norm"].shape == result["dot"].shape == (1,)
    assert result["gram"].shape == (1, 1)


def test_beside_other_statistics():
    p, b, v = params(), batch(), direction()
    g = grads()
    stats = [ALL, pg.Variance(), (pg.Individual(), pg.ClippedMean(0.1), pg.ClippedMean(0.1)), pg.Count()]
    result = jax.jit(pg.grad_stats(loss, stats))(p, b, direction=v)
    tenth = oracle.clipped_mean(g, 0.1)
    close(result, [expected(g, v), oracle.variance(g), (g, tenth, tenth), np.float64(BATCH)])


def test_aux():
    p, b = params(), batch()

    def fun(p, b):
        return loss(p, b), {"y": b["y"]}

    (value, aux), norm = pg.value_and_stats(fun, pg.Norm(), has_aux=True, microbatch_size=2)(p, b)
    close((value, norm), (loss(p, b), oracle.norm(grads())))
    close(aux, {"y": b["y"][:, None]})


# Weights.


@pytest.mark.parametrize(("strategy", "size"), WAYS)
def test_norms_and_products_do_not_depend_on_weights(strategy, size):
    p, b, v = params(), batch(), direction()
    stats_fn = pg.grad_stats(loss, ALL, microbatch_size=size, strategy=strategy)
    result = jax.jit(stats_fn)(p, b, direction=v, example_weights=WEIGHTS)
    close(result, expected(grads(), v, WEIGHTS))


@pytest.mark.parametrize(("strategy", "size"), WAYS)
def test_nan_of_weight_zero_spoils_nothing_else(strategy, size):
    p, b, v = params(), batch(), direction()
    bad = b | {"x": b["x"].at[1].set(jnp.nan)}
    stats_fn = pg.grad_stats(loss, ALL, microbatch_size=size, strategy=strategy)
    result = jax.jit(stats_fn)(p, bad, direction=v, example_weights=WEIGHTS)
    kept = np.array([0, 2, 3, 4])
    truth = expected(grads(), v, WEIGHTS)
    for stats in (result, truth):
        for name in ("norm", "dot", "norms"):
            stats[name] = jax.tree.map(lambda x: x[kept], stats[name])
        stats["gram"] = stats["gram"][kept][:, kept]
    close(result, truth)


def test_weights_are_counts():
    p, b = params(), batch()
    weights = jnp.array([2.0, 0.0, 1.0, 3.0, 1.0])
    repeated = jax.tree.map(lambda x: jnp.repeat(x, weights.astype(int), axis=0), b)
    stats = [pg.ClippedMean(C), pg.ClippedMean(C_LEAF, by="leaf")]
    result = jax.jit(pg.grad_stats(loss, stats))(p, b, example_weights=weights)
    close(result, jax.jit(pg.grad_stats(loss, stats))(p, repeated))


# Which parameters.


@pytest.mark.parametrize(("strategy", "size"), WAYS)
def test_where(strategy, size):
    p, b, g = params(), batch(), grads()

    def where(path):
        return path in ("['w']", "['table']")

    stats = [pg.Norm(where=where), pg.Norm(by="leaf", where=where), pg.Gram(where=where), pg.Norm()]
    result = jax.jit(pg.grad_stats(loss, stats, strategy=strategy, microbatch_size=size))(p, b)
    some = {name: g[name] for name in ("w", "table")}
    norms = {name: oracle.norm(x) if name in some else None for name, x in g.items()}
    close(result, [oracle.norm(some), norms, oracle.gram(some), oracle.norm(g)])


def test_where_is_given_the_paths_of_explain():
    def fun(p, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ p["block"]["w"] + p["block"]["b"][0][None])))

    p = {"block": {"w": normal(0, 3, 2), "b": [normal(1, 2)], "none": None}}
    x = normal(2, BATCH, 3)
    for statistic in (lambda f: pg.Norm(where=f), lambda f: pg.Gram(where=f)):
        seen = []
        pg.grad_stats(fun, statistic(lambda path, seen=seen: seen.append(path) or True))(p, x)
        rows = [row.path for row in pg.explain(fun, pg.Norm())(p, x).rows]
        assert list(dict.fromkeys(seen)) == rows == ["['block']['b'][0]", "['block']['w']"]


def test_two_arguments():
    def fun(w, x, v):
        return jnp.mean(jnp.square(jnp.tanh(x @ w) @ v["v"]))

    args = normal(1, 3, 4), normal(2, BATCH, 3), {"v": normal(3, 4, 2)}
    for argnums, first in [((0, 2), "args[0]"), ((2, 0), "args[2]['v']"), ((-1,), "['v']")]:
        g = oracle.per_example(fun, args, argnums=argnums)[2]
        v = jax.tree.map(lambda x: normal(4, *x.shape[1:]), g)

        def where(path, first=first):
            return path == first

        stats = [pg.Norm(), pg.Norm(by="leaf"), pg.Norm(where=where), pg.Gram(), pg.Dot()]
        stats += [pg.ClippedMean(0.5), pg.ClippedMean(0.2, by="leaf")]
        result = jax.jit(pg.grad_stats(fun, stats, argnums))(*args, direction=v)
        truth = [oracle.norm(g), jax.tree.map(oracle.norm, g), oracle.norm(g[0]), oracle.gram(g)]
        truth += [oracle.dot(g, v), oracle.clipped_mean(g, 0.5)]
        truth += [jax.tree.map(lambda x: oracle.clipped_mean(x, 0.2), g)]
        close(result, truth)


def test_bare_array():
    def fun(w, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ w)))

    w, x = normal(1, 3), normal(2, BATCH, 3)
    g = oracle.per_example(fun, (w, x))[2]
    stats = [pg.Norm(), pg.Norm(by="leaf"), pg.Norm(where=lambda path: path == "args[0]"), pg.Dot()]
    result = jax.jit(pg.grad_stats(fun, stats))(w, x, direction=w)
    close(result, [oracle.norm(g)] * 3 + [oracle.dot(g, w)])


def test_stacked_layers_are_one_parameter():
    def fun(p, x):
        return jnp.mean(jnp.square(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0]))

    p, x = normal(1, 4, 3, 3), normal(2, BATCH, 2, 3)
    g = oracle.per_example(fun, (p, x))[2]
    c = float(np.median(oracle.norm(g)))
    stats = [pg.Norm(by="leaf"), pg.Norm(), pg.ClippedMean(c), pg.ClippedMean(c, by="leaf"), pg.Gram()]
    clipped = oracle.clipped_mean(g, c)
    truth = [oracle.norm(g), oracle.norm(g), clipped, clipped, oracle.gram(g)]
    for strategy in STRATEGIES:
        close(jax.jit(pg.grad_stats(fun, stats, strategy=strategy))(p, x), truth)


# Zero.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_of_zero(strategy):
    p, b, v = params(), batch(), direction()
    mask = jnp.array([1.0, 0.0, 1.0, 0.0, 1.0])

    def fun(p, b):
        return jnp.mean(b["mask"]) * loss(p, b)

    stats = ALL | {"zero": pg.ClippedMean(0), "zero_by_leaf": pg.ClippedMean(0.0, by="leaf")}
    result = jax.jit(pg.grad_stats(fun, stats, strategy=strategy))(p, b | {"mask": mask}, direction=v)
    zeros = jax.tree.map(np.zeros_like, p)
    truth = expected(grads(b=b | {"mask": mask}, fun=fun), v) | {"zero": zeros, "zero_by_leaf": zeros}
    close(result, truth)
    for x in jax.tree.leaves([result[name] for name in ("norm", "norms", "dot", "gram")]):
        assert np.all(np.asarray(x)[mask == 0] == 0)
    assert all(np.all(x == 0) for x in jax.tree.leaves([result["zero"], result["zero_by_leaf"]]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_gradients_are_zero(strategy):
    def fun(p, b):
        return 0.0 * loss(p, b) + jnp.sum(lax.stop_gradient(p["w"]))

    p, b, v = params(), batch(), direction()
    result = jax.jit(pg.grad_stats(fun, ALL, strategy=strategy))(p, b, direction=v)
    assert all(np.all(x == 0) for x in jax.tree.leaves(result))


def test_unused_parameter():
    p, b = params() | {"unused": normal(8, 2)}, batch()
    stats = [pg.Norm(by="leaf"), pg.ClippedMean(0.2, by="leaf"), pg.Norm()]
    norms, clipped, norm = jax.jit(pg.grad_stats(loss, stats))(p, b)
    close(norms["unused"], np.zeros(BATCH))
    close(clipped["unused"], np.zeros(2))
    close(norm, oracle.norm(grads()))


def test_gradient_that_depends_on_no_example():
    # Its norm counts for every example, and it is clipped with each example's scale.
    p, b = params() | {"only": normal(8, 2), "none": normal(9, 2)}, batch()
    g, v = grads(p, b, regularised), jax.tree.map(lambda w: normal(7, *w.shape), p)
    stats = {"norm": pg.Norm(), "norms": pg.Norm(by="leaf"), "gram": pg.Gram(), "dot": pg.Dot()}
    stats |= {"clipped": pg.ClippedMean(7.0), "by_leaf": pg.ClippedMean(3.0, by="leaf")}
    truth = {"norm": oracle.norm(g), "norms": jax.tree.map(oracle.norm, g), "gram": oracle.gram(g)}
    truth |= {"dot": oracle.dot(g, v), "clipped": oracle.clipped_mean(g, 7.0, WEIGHTS)}
    truth |= {"by_leaf": jax.tree.map(lambda x: oracle.clipped_mean(x, 3.0, WEIGHTS), g)}
    for strategy, size in WAYS:
        fun = pg.grad_stats(regularised, stats, strategy=strategy, microbatch_size=size)
        close(jax.jit(fun)(p, b, direction=v, example_weights=WEIGHTS), truth)


# Clipping.


@pytest.mark.parametrize("by", ["all", "leaf"])
def test_bounds_that_clip_nothing(by):
    p, b = params(), batch()
    for max_norm in (float("inf"), 1e6, np.inf, 10**6):
        result = jax.jit(pg.grad_stats(loss, pg.ClippedMean(max_norm, by=by)))(
            p, b, example_weights=WEIGHTS
        )
        close(result, oracle.mean(grads(), WEIGHTS))


@pytest.mark.parametrize("by", ["all", "leaf"])
def test_clipped_gradient_of_one_example_has_that_norm(by):
    p, b = params(), batch(1)
    clipped = jax.jit(pg.grad_stats(loss, pg.ClippedMean(1e-3, by=by)))(p, b)
    g = jax.tree.map(lambda x: np.asarray(x)[None], clipped)
    norms = [oracle.norm(g)] if by == "all" else [oracle.norm(x) for x in jax.tree.leaves(g)]
    close(norms, [np.array([1e-3])] * len(norms))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("strategy", "size"), WAYS)
def test_gradient_that_is_not_finite_is_not_dropped(strategy, size, value):
    # x enters the gradients of both; that of b is finite, and yet its scale is not known.
    def fun(p, x):
        return jnp.mean(x @ p["w"]) + jnp.sum(jnp.square(p["b"])) * jnp.mean(jnp.square(jnp.tanh(x)))

    p, x = {"w": normal(0, 3), "b": normal(1, 2)}, normal(2, BATCH, 3).at[2, 1].set(value)
    stats = {by: pg.ClippedMean(c, by=by) for by, c in (("all", 0.5), ("leaf", 0.5))}
    stats_fn = jax.jit(pg.grad_stats(fun, stats, strategy=strategy, microbatch_size=size))
    result = stats_fn(p, x)
    assert np.all(np.isnan(result["all"]["w"])) and np.all(np.isnan(result["all"]["b"]))
    assert np.all(np.isnan(result["leaf"]["w"]))
    assert np.all(np.isnan(result["leaf"]["b"])) == np.isnan(value)
    # With weight 0 it is dropped.
    weights = jnp.array([1.0, 2.0, 0.0, 1.0, 0.5])
    g = oracle.per_example(fun, (p, x.at[2].set(1.0)))[2]
    truth = {
        "all": oracle.clipped_mean(g, 0.5, weights),
        "leaf": jax.tree.map(lambda x: oracle.clipped_mean(x, 0.5, weights), g),
    }
    close(stats_fn(p, x, example_weights=weights), truth)


# Directions.


def test_direction_of_the_mean_gradient():
    p, b = params(), batch()
    mean = jax.grad(loss)(p, b)
    dot, gram = jax.jit(pg.grad_stats(loss, [pg.Dot(), pg.Gram()]))(p, b, direction=mean)
    close(dot, np.mean(gram, axis=1))


@pytest.mark.parametrize("size", [None, 1, 2])
def test_direction_meets_what_a_regulariser_adds(size):
    # Inner products are a derivative by the weights, also where these add up to 1: one example.
    def fun(w, x):
        return jnp.mean(jnp.square(x @ w)) + jnp.sum(jnp.cosh(w))

    w, x, v = normal(0, 4, 2), normal(1, 3, 4), normal(2, 4, 2)
    result = pg.grad_stats(fun, pg.Dot(), microbatch_size=size)(w, x, direction=v)
    close(result, oracle.dot(oracle.per_example(fun, (w, x))[2], v))


def test_direction_of_zero():
    p, b = params(), batch()
    dot = jax.jit(pg.grad_stats(loss, pg.Dot()))(p, b, direction=jax.tree.map(jnp.zeros_like, p))
    assert dot.shape == (BATCH,) and np.all(dot == 0)


def test_direction_without_a_dot_is_the_losses_own():
    def fun(p, b, *, direction):
        return direction * loss(p, b)

    p, b = params(), batch()
    close(pg.grad_stats(fun, pg.Norm())(p, b, direction=3.0), 3 * oracle.norm(grads()))


def test_direction_of_numpy_arrays_and_none():
    p = params() | {"none": None}
    v = jax.tree.map(np.asarray, direction()) | {"none": None}
    close(pg.grad_stats(loss, pg.Dot())(p, batch(), direction=v), oracle.dot(grads(), direction()))


def test_explain_takes_a_direction():
    p, b, v = params(), batch(), direction()
    plan = pg.explain(loss, ALL)(p, b, direction=v)
    assert [row.path for row in plan.rows] == ["['b']", "['table']", "['v']", "['w']"]
    assert str(plan)


# Inside of the user's own program.


@pytest.mark.parametrize(("strategy", "size"), WAYS)
def test_vmap_over_an_ensemble(strategy, size):
    many, b = ensemble(), batch()
    many |= {"only": normal(8, 3, 2), "none": normal(9, 3, 2)}
    v = jax.tree.map(lambda w: normal(7, *w.shape[1:]), many)
    stats_fn = pg.grad_stats(regularised, ALL, strategy=strategy, microbatch_size=size)
    stats = jax.jit(jax.vmap(lambda p: stats_fn(p, b, direction=v)))(many)
    for k in range(3):
        close(member(stats, k), expected(grads(member(many, k), b, regularised), v))


def test_vmap_over_directions():
    p, b, g = params(), batch(), grads()
    many = jax.tree.map(lambda w: normal(7, 3, *w.shape), p)
    for size in (None, 2):
        stats_fn = pg.grad_stats(loss, [pg.Dot(), pg.Norm()], microbatch_size=size)
        dots, norms = jax.vmap(lambda v, f=stats_fn: f(p, b, direction=v))(many)
        close(dots, np.stack([oracle.dot(g, member(many, k)) for k in range(3)]))
        close(norms, np.stack([oracle.norm(g)] * 3))


def test_vmap_over_batches_and_weights():
    p, v = params(), direction()
    batches = jax.tree.map(lambda *x: jnp.stack(x), *[batch() for _ in range(3)])
    batches["x"] = normal(10, 3, BATCH, 3)
    weights = jnp.asarray(np.random.default_rng(0).integers(1, 4, size=(3, BATCH)), float)
    stats_fn = pg.grad_stats(loss, ALL)
    one = functools.partial(stats_fn, direction=v)
    stats = jax.jit(jax.vmap(lambda b, w: one(p, b, example_weights=w)))(batches, weights)
    for k in range(3):
        close(member(stats, k), expected(grads(p, member(batches, k)), v, weights[k]))


@pytest.mark.parametrize("size", [None, 3])
def test_private_training_in_a_scan(size):
    batches = jax.tree.map(lambda *x: jnp.stack(x), *[batch(4) for _ in range(3)])
    batches["x"] = normal(7, 3, 4, 3)
    stats_fn = pg.grad_stats(loss, {"g": pg.ClippedMean(3.0), "n": pg.Norm()}, microbatch_size=size)

    def step(p, b):
        stats = stats_fn(p, b)
        return jax.tree.map(lambda w, g: w - 0.5 * g, p, stats["g"]), stats["n"]

    trained, norms = jax.jit(lambda p: lax.scan(step, p, batches))(params())
    p = params()
    for i in range(3):
        g = grads(p, member(batches, i))
        close(norms[i], oracle.norm(g))
        p = jax.tree.map(lambda w, g: w - 0.5 * jnp.asarray(g), p, oracle.clipped_mean(g, 3.0))
    close(trained, p)


def test_no_tracer_leaks():
    p, b, v = params(), batch(), direction()
    with jax.checking_leaks():
        result = jax.jit(pg.grad_stats(loss, ALL, microbatch_size=2))(p, b, direction=v)
    close(result, expected(grads(), v))


def plain(p, b, v, w):
    """The same in the plain way, which JAX can differentiate."""

    def rows(tree):
        return jnp.concatenate([x.reshape(BATCH, -1) for x in jax.tree.leaves(tree)], axis=1)

    def norm(tree):
        return jnp.sqrt(jnp.sum(jnp.square(rows(tree)), axis=1))

    def clipped(tree, c):
        s = w * jnp.minimum(1, c / norm(tree)) / jnp.sum(w)
        return jax.tree.map(lambda x: jnp.tensordot(s, x, 1), tree)

    g = jax.vmap(lambda e: jax.grad(loss)(p, jax.tree.map(lambda x: x[None], e)))(b)
    (row,) = rows(jax.tree.map(lambda x: jnp.broadcast_to(x[None], (BATCH, *x.shape)), v))[:1]
    return {
        "norm": norm(g),
        "norms": jax.tree.map(norm, g),
        "gram": rows(g) @ rows(g).T,
        "dot": rows(g) @ row,
        "clipped": clipped(g, C),
        "clipped_by_leaf": jax.tree.map(lambda x: clipped(x, C_LEAF), g),
    }


@pytest.mark.parametrize(("strategy", "size"), WAYS[::2])
def test_derivative(strategy, size):
    p, b, v, w = params(), batch(), direction(), jnp.array([1.0, 2.0, 0.5, 3.0, 1.5])
    stats_fn = pg.grad_stats(loss, ALL, strategy=strategy, microbatch_size=size)

    def through(fun):
        def number(p, x, v, w):
            return some_number(fun(p, b | {"x": x}, v, w))

        return jax.jit(jax.value_and_grad(number, (0, 1, 2, 3)))(p, b["x"], v, w)

    ours = through(lambda p, b, v, w: stats_fn(p, b, direction=v, example_weights=w))
    close(ours, through(plain), rtol=1e-8)


# Lower precision.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["embedding_twice", "scan_over_layers"])
def test_low_precision(name, dtype):
    for strategy, variant in (("auto", PLAIN), ("gram", WEIGHTED)):
        runner = Runner(CASE[name], variant, dtype)
        plan = pg.explain(runner.loss, pg.Mean(), **runner.options)(*runner.args)
        questions = Questions(runner.truth, [row.path for row in plan.rows])
        p = runner.args[0]
        keywords = questions.keywords(questions.statistics, p)
        stats_fn = pg.grad_stats(runner.loss, questions.statistics, strategy=strategy, **runner.options)
        stats = jax.jit(stats_fn)(*runner.args, example_weights=runner.weights, **keywords)
        questions.assert_agrees(stats, keywords, runner.weights, ERROR[dtype])
        clipped = {"clipped", "clipped_by_leaf", "clipped_by_group", "weighted"}
        for result in jax.tree.leaves([x for key, x in stats.items() if key not in clipped]):
            assert result.dtype == jnp.float32
        for key in clipped:
            assert {x.dtype for x in jax.tree.leaves(stats[key])} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_of_many_small_numbers_are_kept_in_float32(strategy):
    # The gradients are the inputs, without any rounding. In bfloat16 a sum of 4096 equal numbers would
    # stop at the 256th.
    def fun(w, x):
        return jnp.sum(x @ w).astype(jnp.float32)

    w, x = jnp.zeros(4096, jnp.bfloat16), jnp.full((2, 4096), 0.5, jnp.bfloat16)
    stats = [pg.Norm(), pg.Gram(), pg.Dot(), pg.ClippedMean(1.0)]
    v = jnp.full(4096, 0.25, jnp.bfloat16)
    norm, gram, dot, clipped = jax.jit(pg.grad_stats(fun, stats, strategy=strategy))(w, x, direction=v)
    close(norm, np.full(2, 32.0))
    close(gram, np.full((2, 2), 1024.0))
    close(dot, np.full(2, 512.0))
    close(clipped.astype(jnp.float32), np.full(4096, 0.5 / 32))
    assert clipped.dtype == jnp.bfloat16


def test_precision_of_each_parameter():
    p = {"half": normal(0, 3, 2).astype(jnp.bfloat16), "single": normal(1, 2).astype(jnp.float32)}

    def fun(p, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ p["half"].astype(x.dtype) + p["single"][None])))

    x = normal(2, BATCH, 3).astype(jnp.float32)
    stats = [pg.ClippedMean(0.1), pg.Norm(by="leaf"), pg.Norm(), pg.Gram()]
    clipped, norms, norm, gram = jax.jit(pg.grad_stats(fun, stats))(p, x)
    assert clipped["half"].dtype == jnp.bfloat16 and clipped["single"].dtype == jnp.float32
    assert {y.dtype for y in jax.tree.leaves([norms, norm, gram])} == {np.dtype("float32")}


# What it costs.


@pytest.mark.parametrize("statistic", [pg.Norm(), pg.Gram(), pg.ClippedMean(1.0), pg.Dot()])
def test_whole_gradients_are_not_built(statistic):
    def fun(p, x):
        return jnp.mean(jnp.square(jnp.tanh(jnp.tanh(x @ p[0]) @ p[1])))

    p = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((960, 1280), (1280, 640))]
    x = jax.ShapeDtypeStruct((8, 3, 960), jnp.float32)
    more = {"direction": p} if isinstance(statistic, pg.Dot) else {}
    text = jax.jit(pg.grad_stats(fun, statistic)).lower(p, x, **more).as_text()
    assert "tensor<960x1280x" in text
    assert "x960x1280x" not in text and "x1280x640x" not in text


# What others give.


def test_same_as_optax():
    microbatching = pytest.importorskip("optax.microbatching")
    p, b = params(), batch()

    def norm(g):
        return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(g)))

    def clip(g):
        return jax.tree.map(lambda x: x * jnp.minimum(1, C / norm(g)), g)

    mean, aux = microbatching.micro_grad(
        loss,
        accumulator=microbatching.AccumulationType.MEAN,
        transform_fn=clip,
        metrics_fn=norm,
    )(p, b)
    close(jax.jit(pg.grad_stats(loss, [pg.ClippedMean(C), pg.Norm()]))(p, b), [mean, aux.metrics])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_same_as_jax_privacy():
    clipping = pytest.importorskip("jax_privacy").clipping
    p, b = params(), batch()
    clipped_grad = clipping.clipped_grad(loss, l2_clip_norm=C, return_grad_norms=True)
    total, aux = clipped_grad(p, b)
    mean, norm = jax.jit(pg.grad_stats(loss, [pg.ClippedMean(C), pg.Norm()]))(p, b)
    close([jax.tree.map(lambda x: BATCH * x, mean), norm], [total, aux.grad_norms])
