"""Examples that fail: with `nonfinite="drop"` they count as if their weight were 0."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pergrad as pg
from pergrad._statistics import Accumulator
from tests.support import oracle
from tests.support.cases import BATCH
from tests.support.claims import close, refused
from tests.support.small_model import batch, ensemble, loss, member, normal, params

STRATEGIES = ["auto", "gram", "materialise", "streamed", "summed", "sparse", "factored", "centred"]
OTHERS = [(strategy, (None, 2)[i % 2]) for i, strategy in enumerate(STRATEGIES)]
WAYS = [("auto", 1), ("auto", 3), *OTHERS]
BAD = 1
KEPT = np.array([0, 2, 3, 4])
WEIGHTS = np.array([1, 2, 2.5, 3, 0.5])


def soft(norm):
    return 3 / (3 + norm)


REDUCED = {
    "count": pg.Count(),
    "mean": pg.Mean(),
    "moments": [pg.Mean(jnp.square), pg.Mean(jnp.sign), pg.Mean(jnp.cos)],
    "variance": pg.Variance(),
    "fold": pg.Fold(jnp.zeros_like, lambda s, g: jnp.maximum(s, jnp.abs(g))),
    "tokens": (pg.Mean(per="token"), pg.Mean(jnp.square, per="token"), pg.Variance(per="token")),
    "clipped": (pg.ClippedMean(3.0), pg.ClippedMean(2.0, by="leaf", phi=jnp.square)),
    "weighted": pg.WeightedMean(soft),
}
OWN = {"loss": pg.Loss(), "norm": pg.Norm(), "gram": pg.Gram(), "individual": pg.Individual()}


def failing(p, b):
    """The loss, with a factor for each example that may be infinite or NaN."""
    return jnp.mean(b["factor"]) * loss(p, b)


def guarded(p, b):
    """The loss is finite, but the gradient at 0 is that of a root that is not taken: NaN."""
    s = jnp.sum(p["b"]) * (b["factor"] - 1)
    return loss(p, b) + jnp.mean(jnp.where(s != 0, jnp.sqrt(jnp.abs(s)), 0.0))


def shifted(p, b):
    """The loss may be infinite, and the gradient is finite."""
    return loss(p, b) + jnp.mean(b["factor"])


def cases():
    fine = batch() | {"factor": 2 + jnp.arange(float(BATCH))}
    return {
        "NaN": (failing, fine | {"factor": fine["factor"].at[BAD].set(jnp.nan)}),
        "infinite": (failing, fine | {"factor": fine["factor"].at[BAD].set(jnp.inf)}),
        "input": (failing, fine | {"x": fine["x"].at[BAD, 0].set(jnp.nan)}),
        "gradient": (guarded, fine | {"factor": fine["factor"].at[BAD].set(1.0)}),
        "loss": (shifted, fine | {"factor": fine["factor"].at[BAD].set(jnp.inf)}),
    }


@functools.cache
def by_weights(name):
    """The same with a weight of 0 for the bad example, which other tests compare with the oracle."""
    fun, b = cases()[name]
    weights = jnp.where(jnp.arange(BATCH) == BAD, 0.0, WEIGHTS)
    stats_fn = pg.value_and_stats(fun, REDUCED, strategy="materialise")
    return jax.jit(stats_fn)(params(), b, example_weights=weights)


@pytest.mark.parametrize(("strategy", "size"), WAYS)
@pytest.mark.parametrize("name", ["NaN", "infinite", "input", "gradient", "loss"])
def test_dropped(name, strategy, size):
    fun, b = cases()[name]
    options = {"strategy": strategy, "microbatch_size": size, "nonfinite": "drop"}
    stats_fn = jax.jit(pg.value_and_stats(fun, REDUCED, **options))
    close(stats_fn(params(), b, example_weights=WEIGHTS), by_weights(name))


@pytest.mark.parametrize("name", ["NaN", "gradient", "loss"])
@pytest.mark.parametrize("size", [None, 1, 2])
def test_against_the_oracle(name, size):
    fun, b = cases()[name]
    losses, _, g = oracle.per_example(fun, (params(), b))
    finite = [np.isfinite(x).reshape(BATCH, -1).all(axis=1) for x in jax.tree.leaves((losses, g))]
    w = np.all(finite, axis=0).astype(float)
    assert list(w) == [1, 0, 1, 1, 1]
    stats = {"mean": pg.Mean(), "variance": pg.Variance(), "clipped": pg.ClippedMean(3.0)}
    stats_fn = pg.value_and_stats(
        fun, stats | {"count": pg.Count()}, microbatch_size=size, nonfinite="drop"
    )
    truth = {"mean": oracle.mean(g, w), "variance": oracle.variance(g, w), "count": np.float64(4)}
    truth |= {"clipped": oracle.clipped_mean(g, 3.0, w)}
    close(jax.jit(stats_fn)(params(), b), (oracle.mean(losses, w), truth))


@pytest.mark.parametrize("size", [None, 2])
def test_examples_have_their_own_results(size):
    fun, b = cases()["NaN"]
    options = {"microbatch_size": size}
    dropped, kept = (
        jax.jit(pg.grad_stats(fun, OWN, nonfinite=nonfinite, **options))(params(), b)
        for nonfinite in ("drop", "keep")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), dropped, kept)
    assert np.isnan(dropped["loss"][BAD]) and np.isnan(dropped["norm"][BAD])
    assert np.all(np.isfinite(np.asarray(dropped["norm"])[KEPT]))


@pytest.mark.parametrize(("strategy", "size"), [("auto", None), ("auto", 2), ("materialise", 1)])
def test_nothing_to_drop(strategy, size):
    options = {"strategy": strategy, "microbatch_size": size}
    dropped, kept = (
        jax.jit(pg.value_and_stats(loss, REDUCED | OWN, nonfinite=nonfinite, **options))(
            params(), batch()
        )
        for nonfinite in ("drop", "keep")
    )
    close(dropped, kept)


@pytest.mark.parametrize("size", [None, 2])
def test_all_are_dropped(size):
    b = batch() | {"factor": jnp.full(BATCH, jnp.nan)}
    stats = {"mean": pg.Mean(), "variance": pg.Variance(), "count": pg.Count()}
    value, result = pg.value_and_stats(failing, stats, microbatch_size=size, nonfinite="drop")(
        params(), b
    )
    assert result["count"] == 0 and np.isnan(value)
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves((result["mean"], result["variance"])))
    one = pg.grad_stats(failing, stats)(params(), b | {"factor": jnp.ones(BATCH)})
    close(pg.combine(stats, result, one)["mean"], one["mean"])  # as a batch of count 0


def test_one_is_left():
    b = batch() | {"factor": jnp.full(BATCH, jnp.nan).at[3].set(1.0)}
    stats = {"mean": pg.Mean(), "variance": pg.Variance(), "count": pg.Count()}
    result = pg.grad_stats(failing, stats, nonfinite="drop")(params(), b)
    assert result["count"] == 1 and np.all(np.isnan(result["variance"]["w"]))
    close(result["mean"], jax.tree.map(lambda x: x[3], oracle.per_example(loss, (params(), batch()))[2]))


@pytest.mark.parametrize("size", [None, 2])
def test_members_of_groups(size):
    # Of the first group one member is left, and of the second none.
    b = batch(6) | {"factor": jnp.array([1.0, jnp.nan, jnp.inf, jnp.nan, 1.0, 2.0])}
    stats = [pg.Mean(jnp.square, per=2), pg.Variance(per=2), pg.Count()]
    stats_fn = pg.grad_stats(failing, stats, nonfinite="drop", microbatch_size=size)
    square, variance, count = jax.jit(stats_fn)(params(), b)
    w = np.array([1, 0, 0, 0, 1, 1.0])
    g = oracle.per_example(failing, (params(), b | {"factor": jnp.array([1.0, 1, 1, 1, 1, 2])}))[2]
    groups, counts = oracle.groups(g, 2, w)
    close(square, oracle.mean_of(np.square, groups, counts))
    close(variance, oracle.variance(groups, counts))
    assert count == 3


# It is the gradient that decides, and not its norm.


def mixed(p, b):
    """A product over positions, an outer product, a lookup and a bias, times each example's scale."""
    y = jnp.tanh(b["x"]) @ p["w"] + p["table"][b["i"]] + p["b"][None, None]
    return jnp.mean(b["scale"]) * (jnp.mean(y * b["y"]) + jnp.mean(jnp.tanh(b["z"]) @ p["outer"]))


def large(dtype, scale, size=4):
    r = np.random.default_rng(0)
    shapes = {"w": (3, 2), "table": (7, 2), "b": (2,), "outer": (3, 2)}
    p = {k: jnp.asarray(r.normal(size=s), dtype) for k, s in shapes.items()}
    b = {k: jnp.asarray(r.normal(size=(size, *s)), dtype) for k, s in (("x", (5, 3)), ("z", (3,)))}
    b["y"] = jnp.asarray(r.normal(size=(size, 5, 2)), dtype)
    return p, b | {"i": jnp.asarray(r.integers(7, size=(size, 5))), "scale": jnp.asarray(scale, dtype)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_large_gradient_is_not_dropped(strategy, size):
    # In float32 the squares of the second example are infinite, and so is the third's gradient.
    p, b = large(jnp.float32, [1.0, 1e25, jnp.inf, 2.0])
    stats = {"mean": pg.Mean(), "norm": pg.Norm(), "count": pg.Count()}
    stats_fn = pg.grad_stats(mixed, stats, nonfinite="drop", strategy=strategy, microbatch_size=size)
    result = jax.jit(stats_fn)(p, b)
    assert result["count"] == 3
    assert list(np.isfinite(result["norm"])) == [True, False, False, True]
    g = oracle.per_example(mixed, (p, b))[2]
    close(result["mean"], oracle.mean(g, np.array([1, 1, 0, 1])), rtol=1e-5)


@pytest.mark.parametrize("name", ["w", "table", "b", "outer"])
def test_an_overflow_in_the_last_product_is_dropped(name):
    # All factors are finite, and the gradient of this parameter is not.
    def fun(p, b):
        own = jax.tree.map(lambda x: lax.stop_gradient(x), p) | {name: 1e20 * p[name]}
        return jnp.mean(b["more"]) * mixed(own, b)

    p, b = large(jnp.float32, [1.0, 1e10, 1.0, 1.0])
    b["more"] = jnp.array([1.0, 1e10, 1.0, 1.0], jnp.float32)
    g = oracle.per_example(fun, (p, b))[2]
    assert list(np.isfinite(g[name]).reshape(4, -1).all(axis=1)) == [True, False, True, True]
    mean, count = pg.grad_stats(fun, [pg.Mean(), pg.Count()], nonfinite="drop")(p, b)
    assert count == 3
    close(mean[name], oracle.mean(g[name], np.array([1, 0, 1, 1])), rtol=1e-5)


def test_half_precision():
    # Entries above 65504 are infinite in float16, where the norm, in float32, is not.
    p, b = large(jnp.float16, [1.0, 6e4, 1.0, 1.0])
    p["table"] = p["table"].astype(jnp.float32)

    def fun(p, b):
        return 30 * mixed(p | {"table": p["table"].astype(jnp.float16)}, b)

    g = oracle.per_example(fun, (p, b))[2]
    finite = np.all([np.isfinite(x).reshape(4, -1).all(axis=1) for x in jax.tree.leaves(g)], axis=0)
    assert list(finite) == [True, False, True, True]
    for strategy in ("auto", "gram", "streamed"):
        stats_fn = pg.grad_stats(fun, [pg.Mean(), pg.Count()], nonfinite="drop", strategy=strategy)
        mean, count = jax.jit(stats_fn)(p, b)
        assert count == 3
        truth = oracle.mean(g, finite.astype(float))
        close(jax.tree.map(lambda x: x.astype(jnp.float32), mean), truth, rtol=1e-2, atol=1e-3)


# Loops, branches, programs around it.


def layers(p, b):
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), b["x"], p["layers"])
    return jnp.mean(b["factor"]) * jnp.mean(jnp.square(h @ p["head"] - b["y"][:, None]))


@pytest.mark.parametrize("size", [None, 1, 2, "auto"])
def test_layers_in_a_loop(size):
    p = {"layers": normal(0, 3, 4, 4), "head": normal(1, 4, 2)}
    b = {
        "x": normal(2, BATCH, 3, 4),
        "y": normal(3, BATCH, 2),
        "factor": jnp.ones(BATCH).at[BAD].set(jnp.nan),
    }
    stats = {"mean": pg.Mean(), "square": pg.Mean(jnp.square), "variance": pg.Variance(), "n": pg.Norm()}
    stats_fn = jax.jit(pg.grad_stats(layers, stats, microbatch_size=size, nonfinite="drop"))
    result = stats_fn(p, b)
    g = oracle.per_example(layers, (p, b | {"factor": jnp.ones(BATCH)}))[2]
    w = np.where(np.arange(BATCH) == BAD, 0.0, 1.0)
    truth = {"mean": oracle.mean(g, w), "square": oracle.mean_of(np.square, g, w)}
    close({k: result[k] for k in truth}, truth)
    close(result["variance"], oracle.variance(g, w))
    close(np.asarray(result["n"])[KEPT], oracle.norm(g)[KEPT])


def test_a_branch_that_is_not_taken():
    # Under vmap both branches of the cond run, and its gradient at 0 is NaN in one of them.
    def fun(p, b):
        x = b["x"][0]
        branch = lax.cond(x[0] > 0, lambda w: jnp.sum(jnp.sqrt(jnp.abs(w * x[0]))), jnp.sum, p)
        return branch + jnp.sum(jnp.square(x @ p))

    p, x = (
        jnp.zeros(3).at[0].set(1.0),
        normal(0, BATCH, 3).at[:, 0].set(jnp.array([-1.0, 1, -1, -1, -1])),
    )
    g = oracle.per_example(fun, (p, {"x": x}))[2]
    assert [bool(np.all(np.isfinite(x))) for x in g] == [True, False, True, True, True]
    mean, count = pg.grad_stats(fun, [pg.Mean(), pg.Count()], nonfinite="drop")(p, {"x": x})
    assert count == 4
    close(mean, oracle.mean(g, np.array([1, 0, 1, 1, 1.0])))


def test_ensemble():
    # What one member drops, the others keep.
    many = ensemble() | {"factor": jnp.array([[1.0], [jnp.nan], [1.0]])}

    def fun(p, b):
        return jnp.mean(jnp.where(b["bad"][:, None] > 0, p["factor"], 1.0)) * loss(p, b)

    b = batch() | {"bad": jnp.zeros(BATCH).at[BAD].set(1.0)}
    stats_fn = pg.grad_stats(fun, {"mean": pg.Mean(), "count": pg.Count()}, nonfinite="drop")
    result = jax.jit(jax.vmap(lambda p: stats_fn(p, b)))(many)
    assert list(result["count"]) == [5, 4, 5]
    for k in range(3):
        w = np.where((np.arange(BATCH) == BAD) & (k == 1), 0.0, 1.0)
        own = {name: x for name, x in member(many, k).items() if name != "factor"}
        g = oracle.per_example(loss, (own, batch()))[2]
        close({name: member(result["mean"], k)[name] for name in g}, oracle.mean(g, w))


def test_derivative():
    def number(p, nonfinite):
        stats = [pg.Mean(jnp.square), pg.Variance(), pg.ClippedMean(3.0)]
        result = pg.grad_stats(loss, stats, nonfinite=nonfinite, microbatch_size=2)(p, batch())
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(result))

    dropped, kept = (jax.jit(jax.grad(number), static_argnums=1)(params(), n) for n in ("drop", "keep"))
    close(dropped, kept)


def test_optimizer():
    tx = pg.optim.micro_adam(0.1)
    p, (fun, b) = params(), cases()["NaN"]
    steps = []
    for nonfinite, weights in (("drop", None), ("keep", jnp.ones(BATCH).at[BAD].set(0))):
        stats_fn = pg.value_and_stats(fun, tx.stats | {"count": pg.Count()}, nonfinite=nonfinite)
        _, stats = stats_fn(p, b, example_weights=weights)
        steps.append(tx.update(stats["mean"], tx.init(p), p, stats=stats)[0])
    close(*steps)
    assert np.all(np.isfinite(optax.apply_updates(p, steps[0])["w"]))


def test_aux_and_weights_of_zero():
    def fun(p, b):
        return failing(p, b), {"factor": b["factor"]}

    b = batch() | {"factor": jnp.array([1.0, jnp.nan, 2.0, jnp.nan, 1.0])}
    stats_fn = pg.value_and_stats(fun, [pg.Mean(), pg.Count()], has_aux=True, nonfinite="drop")
    (value, aux), (_, count) = jax.jit(stats_fn)(
        params(), b, example_weights=jnp.array([1.0, 0.0, 2.0, 1.0, 0.0])
    )
    assert count == 3 and aux["factor"].shape == (BATCH, 1)
    losses = oracle.per_example(failing, (params(), b))[0]
    close(value, (losses[0] + 2 * losses[2]) / 3)


# What it says.


def test_plan():
    p, b = params(), batch()
    plan = pg.explain(loss, [pg.Mean(), pg.Mean(jnp.square)], nonfinite="drop")(p, b)
    assert "those that are not finite dropped" in str(plan)
    usual = pg.explain(loss, [pg.Mean(), pg.Mean(jnp.square), pg.Norm()])(p, b)
    assert "dropped" not in str(usual) and not plan.weighed
    assert plan.operations >= usual.operations


def test_refused():
    with refused(pg.ArgumentError, "nonfinite", "'keep' or 'drop'", "'skip'"):
        pg.value_and_stats(loss, pg.Mean(), nonfinite="skip")

    @dataclasses.dataclass(frozen=True)
    class Sum(Accumulator):
        def init(self, like):
            return jnp.zeros(like.shape, like.dtype)

        def add(self, state, g, w):
            return state + g

        def add_all(self, state, gs, w):
            return state + jnp.sum(gs, axis=0)

        def part_of_all(self, state, devices):
            return state

        def finish(self, state, count, like):
            return state

    with refused(pg.ArgumentError, "Sum()", "nonfinite='drop'", "reweighed"):
        pg.grad_stats(loss, Sum(), nonfinite="drop")(params(), batch())
