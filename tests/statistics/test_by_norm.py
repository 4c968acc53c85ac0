"""Means whose weights depend on norms: any weight, norms of groups, and a largest norm at the call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from tests.support import oracle
from tests.support.cases import BATCH
from tests.support.claims import close, refused
from tests.support.small_model import batch, ensemble, loss, member, normal, params

STRATEGIES = ["auto", "gram", "materialise", "streamed", "summed", "sparse", "factored"]
WAYS = [("auto", None), ("auto", 1), *zip(STRATEGIES[1:], (None, 2, 2, None, 2, 1), strict=True)]
WEIGHTS = jnp.array([1.0, 0.0, 2.5, 3.0, 0.5])
# The norms of all, of "w" and "b", and of "table" and "v": some examples are above each and some below.
C, C_OF = 6.0, {"middle": 3.5, "ends": 4.5}


def group(path):
    return "middle" if path in ("['w']", "['b']") else "ends"


def is_matrix(path):
    return path in ("['w']", "['v']")


def automatic(norm):
    return 1 / (norm + 0.01)


def crossing(norm):
    """Positive for short gradients, and negative for long ones."""
    return 1 - norm / C


def grads(p=None, b=None):
    return oracle.per_example(loss, (params() if p is None else p, batch() if b is None else b))[2]


def by_group(g, of):
    """A function of a tree and a name, for each group of the gradients."""
    found = {}
    for name in C_OF:
        found |= of({k: x for k, x in g.items() if group(f"['{k}']") == name}, name)
    return found


def clipped_by_group(g, w=None, c_of=C_OF):
    return by_group(g, lambda own, name: oracle.clipped_mean(own, c_of[name], w))


def test_some_norms_are_above_and_some_below():
    g = grads()
    norms = by_group(g, lambda own, name: {name: oracle.norm(own)}) | {"all": oracle.norm(g)}
    for name, c in (C_OF | {"all": C}).items():
        assert min(norms[name]) < c < max(norms[name])


# Any weight.


STATS = {
    "automatic": pg.WeightedMean(automatic),
    "crossing": pg.WeightedMean(crossing),
    "square": pg.WeightedMean(crossing, jnp.square),
    "sign": pg.WeightedMean(crossing, jnp.sign),
    "leaf": pg.WeightedMean(automatic, by="leaf"),
    "group": pg.WeightedMean(automatic, by=group),
    "where": pg.WeightedMean(crossing, where=is_matrix),
    "norm": pg.Norm(by=group),
}


def expected(g, w=None):
    some = {k: g[k] for k in ("w", "v")}
    return {
        "automatic": oracle.weighted_mean(g, automatic, w),
        "crossing": oracle.weighted_mean(g, crossing, w),
        "square": oracle.weighted_mean(g, crossing, w, np.square),
        "sign": oracle.weighted_mean(g, crossing, w, np.sign),
        "leaf": jax.tree.map(lambda x: oracle.weighted_mean(x, automatic, w), g),
        "group": by_group(g, lambda own, _: oracle.weighted_mean(own, automatic, w)),
        "where": {"b": None, "table": None} | oracle.weighted_mean(some, crossing, w),
        "norm": by_group(g, lambda own, name: {name: oracle.norm(own)}),
    }


@pytest.mark.parametrize(("strategy", "size"), WAYS)
def test_any_weight(strategy, size):
    stats_fn = jax.jit(pg.grad_stats(loss, STATS, strategy=strategy, microbatch_size=size))
    close(stats_fn(params(), batch()), expected(grads()))
    bad = batch() | {"x": batch()["x"].at[1].set(jnp.nan)}
    result, truth = stats_fn(params(), bad, example_weights=WEIGHTS), expected(grads(), WEIGHTS)
    kept = np.array([0, 2, 3, 4])
    for stats in (result, truth):
        stats["norm"] = jax.tree.map(lambda x: x[kept], stats["norm"])
    close(result, truth)


@pytest.mark.parametrize("name", STATS)
def test_alone(name):
    for size in (None, 2):
        result = jax.jit(pg.grad_stats(loss, STATS[name], microbatch_size=size))(params(), batch())
        close(result, expected(grads())[name])


def test_a_clipped_mean_is_one_of_these():
    def clip(norm):
        return jnp.minimum(1, C / norm)

    stats = [pg.ClippedMean(C), pg.WeightedMean(clip), pg.ClippedMean(C, phi=jnp.square)]
    stats.append(pg.WeightedMean(clip, jnp.square))
    clipped, weighted, square, weighted_square = jax.jit(pg.grad_stats(loss, stats))(params(), batch())
    close(weighted, clipped)
    close(weighted_square, square)


def test_a_norm_that_is_not_finite_is_not_hidden():
    def none_of_the_large(norm):
        return jnp.where(norm < 1e3, 1.0, 0.0)

    bad = batch() | {"x": batch()["x"].at[1].set(jnp.inf)}
    result = pg.grad_stats(loss, pg.WeightedMean(none_of_the_large))(params(), bad)
    assert all(np.any(np.isnan(x)) for x in jax.tree.leaves(result))


def test_combined():
    stats = {"weighted": STATS["where"], "count": pg.Count()}
    stats_fn = pg.grad_stats(loss, stats)
    b, w = batch(), np.asarray(WEIGHTS)
    halves = [jax.tree.map(lambda x, i=i: x[i], b) for i in (slice(0, 2), slice(2, 5))]
    pairs = zip(halves, (w[:2], w[2:]), strict=True)
    results = [stats_fn(params(), own, example_weights=weights) for own, weights in pairs]
    close(pg.combine(stats, *results)["weighted"], expected(grads(), w)["where"])


def test_ensemble_and_derivative():
    many = ensemble()
    stats_fn = pg.grad_stats(loss, [STATS["automatic"], STATS["group"]], microbatch_size=2)
    result = jax.jit(jax.vmap(lambda p: stats_fn(p, batch())))(many)
    for k in range(3):
        g = grads(member(many, k))
        own = [oracle.weighted_mean(g, automatic)]
        close(member(result, k), [*own, by_group(g, lambda x, _: oracle.weighted_mean(x, automatic))])

    def plain(p):
        def one(e):
            return jax.grad(loss)(p, jax.tree.map(lambda x: x[None], e))

        g = jax.vmap(one)(batch())
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(x.reshape(BATCH, -1)), 1) for x in jax.tree.leaves(g)))
        return jax.tree.map(lambda x: jnp.tensordot(automatic(norm), x, 1) / BATCH, g)

    def number(stats):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(stats))

    weighted = pg.grad_stats(loss, pg.WeightedMean(automatic))
    close(
        jax.jit(jax.grad(lambda p: number(weighted(p, batch()))))(params()),
        jax.grad(lambda p: number(plain(p)))(params()),
        rtol=1e-8,
    )


def test_derivative_beside_padding_of_nan():
    # The weight of a NaN has a derivative of NaN, and the padding has neither.
    def fun(p, b):
        return jnp.mean(b["scale"]) * loss(p, b)

    p, b = params(), batch() | {"scale": jnp.ones(BATCH)}
    bad = b | {"scale": b["scale"].at[1].set(jnp.nan)}
    stats_fn = pg.grad_stats(fun, [pg.WeightedMean(automatic), pg.ClippedMean(C)])

    def number(b, scale):
        stats = stats_fn(p, b | {"scale": scale * b["scale"]}, example_weights=WEIGHTS)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(stats))

    good, beside = (jax.grad(number, 1)(x, jnp.ones(BATCH)) for x in (b, bad))
    kept = np.array([0, 2, 3, 4])
    close(beside[kept], good[kept])


# The largest norm at the call.


AT_CALL = {"all": pg.ClippedMean(), "leaf": pg.ClippedMean(by="leaf"), "group": pg.ClippedMean(by=group)}


@pytest.mark.parametrize(("strategy", "size"), WAYS[::2])
def test_max_norm_at_the_call(strategy, size):
    g = grads()
    options = {"strategy": strategy, "microbatch_size": size}
    make = lambda stats: jax.jit(pg.grad_stats(loss, stats, **options))  # noqa: E731
    truth = {
        "all": oracle.clipped_mean(g, C, WEIGHTS),
        "leaf": jax.tree.map(lambda x: oracle.clipped_mean(x, C, WEIGHTS), g),
        "group": clipped_by_group(g, WEIGHTS, dict.fromkeys(C_OF, C)),
    }
    close(make(AT_CALL)(params(), batch(), max_norm=C, example_weights=WEIGHTS), truth)
    of_leaves = {"table": 1.0, "w": 2, "b": jnp.float32(0.5), "v": np.float64(3.0)}
    by_leaf = {k: oracle.clipped_mean(g[k], float(c)) for k, c in of_leaves.items()}
    close(make(AT_CALL["leaf"])(params(), batch(), max_norm=of_leaves), by_leaf)
    close(make(AT_CALL["group"])(params(), batch(), max_norm=C_OF), clipped_by_group(g))


def test_a_prefix_of_the_tree_is_enough():
    def fun(p, b):
        return loss(p["a"] | p["b"], b)

    p = params()
    nested = {"a": {k: p[k] for k in ("w", "b")}, "b": {k: p[k] for k in ("table", "v")}}
    result = pg.grad_stats(fun, pg.ClippedMean(by="leaf"))(
        nested, batch(), max_norm={"a": 0.5, "b": 2.0}
    )
    g = grads()
    truth = {
        k: {n: oracle.clipped_mean(g[n], c) for n in nested[k]} for k, c in (("a", 0.5), ("b", 2.0))
    }
    close(result, truth)
    w, x, v = normal(1, 3, 4), normal(2, BATCH, 3), normal(3, 4, 2)

    def two(w, x, v):
        return jnp.mean(jnp.square(jnp.tanh(x @ w) @ v))

    both = pg.grad_stats(two, pg.ClippedMean(by="leaf"), (0, 2))(w, x, v, max_norm=(0.1, 0.2))
    g_w, g_v = oracle.per_example(two, (w, x, v), argnums=(0, 2))[2]
    close(both, (oracle.clipped_mean(g_w, 0.1), oracle.clipped_mean(g_v, 0.2)))


def test_another_max_norm_does_not_compile_anew():
    traced = []

    def fun(p, b):
        traced.append(None)
        return loss(p, b)

    stats_fn = jax.jit(pg.grad_stats(fun, {"clipped": pg.ClippedMean(), "norm": pg.Norm()}))
    p, c = params(), 100.0
    for step in range(3):  # adaptive clipping, to the median of the norms before
        stats = stats_fn(p, batch(), max_norm=c)
        g = grads(p)
        close(stats, {"clipped": oracle.clipped_mean(g, float(c)), "norm": oracle.norm(g)})
        c = jnp.quantile(stats["norm"], 0.5)
        p = jax.tree.map(lambda w, g: w - 0.1 * g, p, stats["clipped"])
        if step == 0:
            first = len(traced)
    assert len(traced) - first <= 1  # a Python number and an array differ in their weak type


def test_max_norm_is_traced():
    stats_fn, p, b = pg.grad_stats(loss, pg.ClippedMean()), params(), batch()
    many = jax.vmap(lambda c: stats_fn(p, b, max_norm=c))(jnp.array([1.0, 0.0, 5.0, jnp.inf]))
    for k, c in enumerate((1.0, 0.0, 5.0, np.inf)):
        close(member(many, k), oracle.clipped_mean(grads(), c))
    for c in (-1.0, jnp.nan):
        assert np.all(np.isnan(jax.jit(lambda c: stats_fn(p, b, max_norm=c))(c)["w"]))
    # d/dc of the mean of min(1, c / n_i) g_i, for those that are clipped.
    slope = jax.jacfwd(lambda c: stats_fn(p, b, max_norm=c)["w"])(2.0)
    g, n = grads(), oracle.norm(grads())
    close(slope, np.mean([g["w"][i] / n[i] * (n[i] > 2) for i in range(BATCH)], axis=0))


def test_explain_and_signature():
    stats_fn = pg.value_and_stats(loss, AT_CALL)
    assert "max_norm: the largest norm" in stats_fn.__doc__
    assert str(stats_fn.__signature__) == "(p, batch, *, example_weights=None, max_norm=None)"
    plan = pg.explain(loss, AT_CALL)(params(), batch(), max_norm=1.0)
    assert str(plan) == str(pg.explain(loss, AT_CALL)(params(), batch()))


def test_max_norm_may_be_the_losses_own():
    def fun(p, b, *, max_norm):
        return max_norm * loss(p, b)

    result = pg.grad_stats(fun, pg.Mean())(params(), batch(), max_norm=2.0)
    close(result, jax.tree.map(lambda x: 2 * x, oracle.mean(grads())))


# What one example can do.


@pytest.mark.parametrize(
    ("statistic", "most"),
    [
        (pg.ClippedMean(1.0), 1.0),
        (pg.ClippedMean(1.0, by="leaf"), 2.0),  # four parameters
        (pg.ClippedMean(1.0, by=group), np.sqrt(2)),
        (pg.ClippedMean(0.5, phi=jnp.square), 0.25),
        (pg.ClippedMean(0.5, phi=jnp.abs), 0.5),
        (pg.ClippedMean(0.5, phi=pg.power(3)), 0.125),
        (pg.WeightedMean(automatic), 1.0),
        (pg.WeightedMean(automatic, by="leaf"), 2.0),
    ],
)
def test_sensitivity(statistic, most):
    b = batch() | {"x": 50 * batch()["x"]}
    stats_fn = jax.jit(pg.grad_stats(loss, {"mean": statistic, "count": pg.Count()}))

    def mean_and_sum(w):
        stats = stats_fn(params(), b, example_weights=w)
        return [
            np.concatenate([np.ravel(k * x) for x in jax.tree.leaves(stats["mean"])])
            for k in (1, stats["count"])
        ]

    mean, total = mean_and_sum(jnp.ones(BATCH))
    moved = []
    for i in range(BATCH):
        other_mean, other_total = mean_and_sum(jnp.ones(BATCH).at[i].set(0))
        moved.append(np.linalg.norm(other_total - total))
        assert np.linalg.norm(other_mean - mean) <= 2 * most / BATCH
    assert max(moved) <= most * (1 + 1e-9)
    assert max(moved) > most / 20  # the bound is not an idle one


# What is refused.


def test_refused_when_made():
    for make in (lambda by: pg.WeightedMean(automatic, by=by), pg.Norm):
        with refused(pg.ArgumentError, "by must be", "'all'", "'leaf'", "'layer'"):
            make(by="layer")
    with refused(pg.ArgumentError, "WeightedMean", "weight must be a function", "1.0"):
        pg.WeightedMean(1.0)
    with refused(pg.ArgumentError, "WeightedMean", "phi must be", "jnp.square"):
        pg.WeightedMean(automatic, jnp.cos)
    with refused(pg.ArgumentError, "WeightedMean", "where must be"):
        pg.WeightedMean(automatic, where="w")


def test_refused_when_called():
    def call(statistic, **more):
        return pg.grad_stats(loss, statistic)(params(), batch(), **more)

    with refused(pg.ArgumentError, "weight must be elementwise", "(5,)", "()"):
        call(pg.WeightedMean(jnp.sum))
    with refused(pg.ArgumentError, "WeightedMean", "where", "selects no parameter"):
        call(pg.WeightedMean(automatic, where=lambda path: False))
    for statistic in (pg.Norm(by=len), pg.ClippedMean(1.0, by=len)):
        with refused(pg.ArgumentError, "the name of a group, a string", "['b']", "5"):
            call(statistic)
    for more in ({}, {"max_norm": None}):
        with refused(pg.ArgumentError, "ClippedMean()", "max_norm", "pg.ClippedMean(1.0)"):
            call([pg.Mean(), pg.ClippedMean()], **more)
    with refused(pg.ArgumentError, "max_norm was given", "no statistic takes one", "pg.ClippedMean()"):
        call(pg.ClippedMean(1.0), max_norm=1.0)
    with refused(pg.ArgumentError, "max_norm was given"):
        pg.explain(loss, pg.Mean())(params(), batch(), max_norm=1.0)
    with refused(pg.ArgumentError, "different norms", "one number for both"):
        call(AT_CALL, max_norm=C_OF)


@pytest.mark.parametrize("bad", [-1.0, np.nan, jnp.float32(-2), True, 1j, jnp.ones(2), "1"])
def test_bad_max_norm(bad):
    for by, max_norm in (
        ("all", bad),
        ("leaf", dict.fromkeys(params(), 1.0) | {"w": bad}),
        (group, C_OF | {"ends": bad}),
    ):
        with refused(pg.ArgumentError, "max_norm", "must be a number"):
            pg.grad_stats(loss, pg.ClippedMean(by=by))(params(), batch(), max_norm=max_norm)


def test_max_norm_of_another_tree():
    def call(by, max_norm):
        pg.grad_stats(loss, pg.ClippedMean(by=by))(params(), batch(), max_norm=max_norm)

    with refused(pg.ArgumentError, "a prefix of the parameters' tree", "'table'", "'other'"):
        call("leaf", {"w": 1.0, "other": 2.0})
    with refused(pg.ArgumentError, "a number for each group", "ends, middle", "middle, start"):
        call(group, {"middle": 1.0, "start": 2.0})
    with refused(pg.ArgumentError, "one norm for all parameters", "one number"):
        call("all", {"w": 1.0})
    with refused(pg.ArgumentError, "must be a number"):
        call("all", [1.0, 2.0])


def test_selected_parameters_need_a_max_norm_and_others_do_not():
    statistic = pg.ClippedMean(by="leaf", where=is_matrix)
    max_norm = {"table": None, "w": 2.0, "b": None, "v": 1.0}
    result = pg.grad_stats(loss, statistic)(params(), batch(), max_norm=max_norm)
    g = grads()
    truth = {k: c and oracle.clipped_mean(g[k], c) for k, c in max_norm.items()}
    close(result, truth)
    with refused(pg.ArgumentError, "max_norm of ['w'] must be a number"):
        pg.grad_stats(loss, statistic)(params(), batch(), max_norm=max_norm | {"w": None})


def test_repr():
    assert repr(pg.WeightedMean(automatic)) == "WeightedMean(automatic)"
    assert repr(pg.WeightedMean(automatic, jnp.square, by="leaf", where=is_matrix)) == (
        "WeightedMean(automatic, by='leaf', phi=square, where=is_matrix)"
    )
    assert repr(pg.ClippedMean()) == "ClippedMean()"
    assert repr(pg.ClippedMean(2, by=group)) == "ClippedMean(2.0, by=group)"
    assert (
        pg.ClippedMean(2) == pg.ClippedMean(2.0) != pg.ClippedMean() and pg.ClippedMean(2).max_norm == 2
    )
    assert pg.WeightedMean(automatic) == pg.WeightedMean(automatic) != pg.WeightedMean(crossing)
