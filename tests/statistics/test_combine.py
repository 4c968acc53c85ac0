"""Results of several batches, merged as if the batches had been one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pergrad as pg
from tests.support import oracle
from tests.support.claims import close, refused
from tests.support.small_model import batch, loss, member, normal, params

C, C_LEAF = 6.0, 2.5  # some examples are clipped and some are not


def is_matrix(path):
    return path in ("['v']", "['w']")


STATS = {
    "count": pg.Count(),
    "mean": pg.Mean(),
    "moments": [pg.Mean(jnp.square), pg.Mean(jnp.sign), pg.Mean(jnp.cos)],
    "variance": pg.Variance(),
    "clipped": (pg.ClippedMean(C), pg.ClippedMean(C_LEAF, by="leaf")),
    "norm": (pg.Norm(), pg.Norm(by="leaf"), pg.Norm(by="leaf", where=is_matrix)),
    "loss": pg.Loss(),
    "dot": pg.Dot(),
    "g": pg.Individual(),
}
# What has no example axis.
REDUCED = {name: STATS[name] for name in ("count", "mean", "moments", "variance", "clipped")}
SIZE = 8
WEIGHTS = np.array([1, 0.5, 2.5, 3, 0, 1.5, 2, 0])  # of each two, some that count more than 1


def part(tree, *bounds):
    return jax.tree.map(lambda x: np.asarray(x)[slice(*bounds)], tree)


def direction():
    return jax.tree.map(lambda w: normal(7, *w.shape), params())


def results(stats, sizes, weights=None, **options):
    """The results for parts of these sizes of one batch, and for the whole of it."""
    more = {"direction": direction()} if pg.Dot() in jax.tree.leaves(stats) else {}
    ends = np.cumsum([0, *sizes])
    stats_fn = jax.jit(pg.grad_stats(loss, stats, **options))
    b = batch(int(ends[-1]))

    def run(*bounds):
        w = None if weights is None else weights[slice(*bounds)]
        return stats_fn(params(), part(b, *bounds), example_weights=w, **more)

    parts = [run(*bounds) for bounds in itertools.pairwise(ends)]
    return parts, run(0, ends[-1])


# Two batches.


@pytest.mark.parametrize(("sizes", "weights"), [((4, 4), None), ((3, 5), WEIGHTS)])
def test_two_batches_are_one(sizes, weights):
    (a, b), whole = results(STATS, sizes, weights)
    close(pg.combine(STATS, a, b), whole)
    close(jax.jit(functools.partial(pg.combine, STATS))(a, b), whole)


def test_against_the_oracle():
    (a, b), _ = results(REDUCED, (3, 5), WEIGHTS)
    result = pg.combine(REDUCED, a, b)
    g = oracle.per_example(loss, (params(), batch(SIZE)))[2]
    close(result["count"], WEIGHTS.sum())
    close(result["mean"], oracle.mean(g, WEIGHTS))
    close(result["moments"][0], oracle.mean_of(np.square, g, WEIGHTS))
    close(result["variance"], oracle.variance(g, WEIGHTS))
    close(result["clipped"][0], oracle.clipped_mean(g, C, WEIGHTS))


def test_many_batches_in_any_order():
    (a, b, c, d), whole = results(REDUCED, (2, 3, 2, 2))
    combine = functools.partial(pg.combine, REDUCED)
    for result in (combine(combine(combine(a, b), c), d), combine(combine(d, b), combine(c, a))):
        close(result, whole)


def test_order_of_examples():
    (a, b), whole = results(STATS, (3, 5))
    result = pg.combine(STATS, b, a)
    for name in ("norm", "loss", "dot", "g"):
        close(result[name], jax.tree.map(lambda x: jnp.roll(x, 5, axis=0), whole[name]))
    for name in REDUCED:
        close(result[name], whole[name])


@pytest.mark.parametrize("per", [2, 3])
def test_groups(per):
    stats = [pg.Count(), pg.Mean(per=per), pg.Variance(per=per), pg.Mean(jnp.square, per=per)]
    weights = np.array([1, 0, 2.5, 3, 0.5, 1, 2, 0, 1, 1, 3, 2])
    for w in (None, weights):
        (a, b), whole = results(stats, (6, 6), w)
        close(pg.combine(stats, a, b), whole)


def test_units_side_by_side():
    stats = [[pg.Mean(per=per), pg.Variance(per=per)] for per in ("example", 2)] + [pg.Count()]
    (a, b), whole = results(stats, (4, 8))
    close(pg.combine(stats, a, b), whole)


def test_means_of_tokens():
    stats = [pg.Count(), pg.Mean(per="token"), pg.Mean(jnp.square, per="token")]
    (a, b), whole = results(stats, (3, 5), WEIGHTS)
    close(pg.combine(stats, a, b), whole)


@pytest.mark.parametrize(
    "stats", [pg.Norm(), [pg.Loss(), {"g": pg.Individual()}], (pg.Dot(),), pg.Count()]
)
def test_what_needs_no_count(stats):
    (a, b), whole = results(stats, (3, 5))
    close(pg.combine(stats, a, b), whole)


def test_bare_array_and_two_arguments():
    def fun(w, x, v):
        return jnp.mean(jnp.square(jnp.tanh(x @ w) @ v["v"]))

    w, x, v = normal(1, 3, 4), normal(2, SIZE, 3), {"v": normal(3, 4, 2)}
    stats = [pg.Mean(), pg.Variance(), pg.Count(), pg.Norm(by="leaf"), pg.ClippedMean(0.1)]
    for argnums in (0, (2, 0)):
        stats_fn = jax.jit(pg.grad_stats(fun, stats, argnums))
        a, b, whole = (stats_fn(w, rows, v) for rows in (x[:3], x[3:], x))
        close(pg.combine(stats, a, b), whole)


# Batches that count for nothing.


def test_batch_of_padding():
    weights = np.array([0, 0, 0, 1, 0.5, 1, 2, 0])
    (a, b), _ = results(STATS, (3, 5), weights)
    assert a["count"] == 0 and all(np.all(np.isnan(x)) for x in jax.tree.leaves(a["mean"]))
    combine = functools.partial(pg.combine, STATS)
    for fun, pair in itertools.product((combine, jax.jit(combine)), ((a, b), (b, a))):
        result = fun(*pair)
        close({name: result[name] for name in REDUCED}, {name: b[name] for name in REDUCED})
        assert result["norm"][0].shape == (SIZE,)


def test_two_batches_of_padding():
    (a, b), _ = results(REDUCED, (3, 5), np.zeros(SIZE))
    result = pg.combine(REDUCED, a, b)
    assert result["count"] == 0


# Accuracy.


def test_variance_far_from_zero():
    # The mean is 10^4 times the deviation; a difference of squares would have no digit left.
    stats = [pg.Count(), pg.Mean(), pg.Variance()]
    x = jnp.asarray(1e4 + np.random.default_rng(0).normal(size=(64, 3)), jnp.float32)
    stats_fn = jax.jit(pg.grad_stats(lambda w, x: jnp.mean(x @ w), stats))
    parts = [stats_fn(jnp.zeros(3, jnp.float32), x[n : n + 16]) for n in range(0, 64, 16)]
    count, _, variance = functools.reduce(functools.partial(pg.combine, stats), parts)
    assert count == 64
    np.testing.assert_allclose(variance, np.var(np.asarray(x, np.float64), axis=0, ddof=1), rtol=1e-3)


def test_dtypes_stay():
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params())
    b = batch(SIZE)
    b = b | {name: b[name].astype(jnp.bfloat16) for name in "xy"}
    stats_fn = jax.jit(pg.grad_stats(loss, STATS))
    more = {"direction": jax.tree.map(lambda w: w.astype(jnp.bfloat16), direction())}
    a, b, whole = (stats_fn(p, part(b, *bounds), **more) for bounds in ((0, 3), (3, 8), (0, 8)))
    result = pg.combine(STATS, a, b)
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (result, whole)]
    assert kinds[0] == kinds[1]


def test_sums_of_half_precision_means_are_kept_in_float32():
    # Two means that are far apart in size: the sum of weights times means is rounded once.
    stats = [pg.Count(), pg.Mean()]
    a, b = [jnp.array(255.0), jnp.bfloat16(1)], [jnp.array(1.0), jnp.bfloat16(129)]
    count, mean = pg.combine(stats, a, b)
    assert count == 256 and mean == 1.5 and mean.dtype == jnp.bfloat16


# Gradient accumulation.


def test_accumulation_in_a_scan():
    stats_fn = pg.grad_stats(loss, REDUCED)
    b = batch(SIZE)
    batches = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), b)

    @jax.jit
    def accumulate(p):
        kinds = jax.eval_shape(stats_fn, p, member(batches, 0))
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kinds)

        def step(so_far, b):
            return pg.combine(REDUCED, so_far, stats_fn(p, b)), None

        return lax.scan(step, empty, batches)[0]

    close(accumulate(params()), jax.jit(stats_fn)(params(), b))


def test_derivative_of_a_combination():
    stats = [pg.Count(), pg.Mean(), pg.Variance()]
    stats_fn = pg.grad_stats(loss, stats)
    b = batch(SIZE)

    def number(p, ends):
        parts = [stats_fn(p, part(b, *bounds)) for bounds in itertools.pairwise(ends)]
        _, mean, variance = functools.reduce(functools.partial(pg.combine, stats), parts)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves([mean, variance]))

    one, two = (
        jax.jit(jax.grad(functools.partial(number, ends=e)))(params()) for e in ((0, 8), (0, 3, 8))
    )
    close(two, one)


# Over a mapped axis.


def over_axis(stats, weights=None, parts=4):
    """Every member's result for its part of the batch, combined with the others', and the whole."""
    more = {"direction": direction()} if pg.Dot() in jax.tree.leaves(stats) else {}
    stats_fn = pg.grad_stats(loss, stats)
    b = batch(SIZE)
    w = np.ones(SIZE) if weights is None else weights

    def one(b, w):
        return pg.all_combine(stats, stats_fn(params(), b, example_weights=w, **more), "data")

    split = jax.tree.map(lambda x: np.reshape(x, (parts, SIZE // parts, *x.shape[1:])), (b, w))
    whole = jax.jit(stats_fn)(params(), b, example_weights=w, **more)
    return jax.jit(jax.vmap(one, axis_name="data"))(*split), whole


@pytest.mark.parametrize(("parts", "weights"), [(1, None), (4, WEIGHTS)])
def test_members_of_an_axis_are_one_batch(weights, parts):
    result, whole = over_axis(STATS, weights, parts)
    for k in range(parts):
        close(member(result, k), whole)


def test_member_without_examples():
    weights = np.array([1, 2, 0, 0, 2.5, 1, 0.5, 3])
    result, whole = over_axis(REDUCED, weights)
    for k in range(4):
        close(member(result, k), whole)


def test_groups_over_an_axis():
    stats = [pg.Count(), pg.Mean(per=2), pg.Variance(per=2), pg.Mean(jnp.square, per="token")]
    result, whole = over_axis(stats, parts=2)
    for k in range(2):
        close(member(result, k), whole)


def test_two_axes():
    stats = [pg.Count(), pg.Mean(), pg.Variance()]
    b = batch(SIZE)
    split = jax.tree.map(lambda x: x.reshape(2, 2, 2, *x.shape[1:]), b)
    stats_fn = pg.grad_stats(loss, stats)

    def one(b):
        inner = pg.all_combine(stats, stats_fn(params(), b), "inner")
        return pg.all_combine(stats, inner, "outer")

    mapped = jax.vmap(jax.vmap(one, axis_name="inner"), axis_name="outer")
    result, whole = jax.jit(mapped)(split), jax.jit(stats_fn)(params(), b)
    for k in np.ndindex(2, 2):
        close(member(result, k), whole)


# What cannot be combined.


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        ([pg.Mean()], ["pg.Count()"]),
        ({"m": pg.Mean(jnp.square), "n": pg.Norm()}, ["pg.Count()"]),
        ([pg.ClippedMean(1.0)], ["pg.Count()"]),
        ([pg.Count(), pg.Variance()], ["Variance", "pg.Mean()"]),
        ([pg.Count(), pg.Variance(), pg.Mean(jnp.square)], ["Variance", "pg.Mean()"]),
        ([pg.Count(), pg.Variance(per=2), pg.Mean()], ["Variance", "per=2"]),
        ([pg.Count(), pg.Variance(), pg.Mean(per=2)], ["Variance", "pg.Mean()"]),
        ([pg.Count(), pg.Mean(per="token"), pg.Variance(per="token")], ["Variance", "token"]),
        ([pg.Count(), pg.Gram()], ["Gram"]),
        ([pg.Count(), pg.Fold(jnp.zeros_like, jnp.maximum)], ["Fold"]),
    ],
    ids=str,
)
def test_refused(stats, words):
    kinds = jax.eval_shape(pg.grad_stats(loss, stats), params(), batch(4))
    a = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kinds)
    with refused(pg.ArgumentError, *words):
        pg.combine(stats, a, a)
    with refused(pg.ArgumentError, *words):
        jax.vmap(lambda _: pg.all_combine(stats, a, "data"), axis_name="data")(jnp.arange(2))
