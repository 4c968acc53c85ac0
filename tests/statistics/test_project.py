"""Random projections of the examples' gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from pergrad._statistics import Signs, SketchLayout
from tests.support import oracle
from tests.support.cases import array
from tests.support.claims import close, refused
from tests.support.projection import matrix
from tests.support.small_model import batch, ensemble, loss, member, normal, params

STRATEGIES = ["auto", "projected", "sparse", "streamed", "materialise", "gram", "summed"]


def projected(g, dim, seed, where=None):
    """The truth: each gradient times the matrix of its parameter, added up."""
    found = 0
    for path, x in jax.tree_util.tree_leaves_with_path(g):
        path = jax.tree_util.keystr(path)
        if where is None or where(path):
            rows = np.asarray(x, np.float64).reshape(len(x), -1)
            found = found + rows @ matrix(path, x.shape[1:], dim, seed).T
    return found


def grads(fun, *args, **options):
    return oracle.per_example(fun, args, **options)[2]


# Everything that a projection has a rule for: products over positions with two sides of several axes,
# stacked layers, lookups, convolutions, and parameters with one axis or none.
SHAPES = {
    "table": (11, 8), "heads": (8, 2, 3), "joined": (2, 3, 8), "stack": (2, 8, 9), "one": (),
    "row": (1, 8), "kernel": (3, 8, 7), "out": (7, 13), "bias": (13,), "tall": (40, 2),
}  # fmt: skip


def many_params():
    return {name: normal(i, *shape) / 2 for i, (name, shape) in enumerate(SHAPES.items())}


def many_batch(size=5):
    i = np.random.default_rng(20).integers(11, size=(size, 6))
    return {"i": array(i), "y": normal(21, size, 6, 13), "z": normal(22, size, 40)}


def many_loss(p, b):
    h = p["table"][b["i"]] + p["row"][None]
    heads = jnp.tanh(jnp.einsum("bti,ihk->bthk", h, p["heads"]))
    h = jnp.tanh(jnp.einsum("bthk,hki->bti", heads, p["joined"]) * p["one"])
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w)[..., :8], None), h, p["stack"])
    dims = ("NWC", "WIO", "NWC")
    h = jnp.tanh(jax.lax.conv_general_dilated(h, p["kernel"], (1,), "SAME", dimension_numbers=dims))
    h = h @ p["out"] + p["bias"][None, None]
    return jnp.mean(jnp.square(h - b["y"])) + jnp.mean(jnp.square(b["z"] @ p["tall"]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [None, 2])
def test_any_strategy_and_microbatch(strategy, size):
    p, b = many_params(), many_batch()
    stats = [pg.Project(5, 3), pg.Project(40, 3), pg.Project(5, 4, where=lambda path: "e" in path)]
    stats_fn = pg.grad_stats(many_loss, stats, strategy=strategy, microbatch_size=size)
    g = grads(many_loss, p, b)
    truth = [projected(g, 5, 3), projected(g, 40, 3), projected(g, 5, 4, lambda path: "e" in path)]
    close(jax.jit(stats_fn)(p, b), truth, atol=1e-11)


def test_structure_is_used():
    plan = pg.explain(many_loss, pg.Project(2, 3))(many_params(), many_batch())
    strategies = {row.path[2:-2]: row.strategy for row in plan.rows}
    for name in ("heads", "joined", "out", "kernel"):
        forced = pg.explain(many_loss, pg.Project(2, 3), strategy="projected")(
            many_params(), many_batch()
        )
        own = next(row for row in forced.rows if row.path == f"['{name}']")
        assert own.strategy == "projected" and own.operations > 0, (name, own.reason)
    assert "sparse" in strategies["table"] or strategies["table"] == "materialise"
    large = {"w": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 256, 1024), jnp.float32)
    plan = pg.explain(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"])), pg.Project(512, 0))(large, x)
    (row,) = plan.rows
    assert row.strategy == "projected" and row.reason == "products of projected factors"
    assert row.operations < 0.2 * row.plain_operations
    table = jax.ShapeDtypeStruct((50000, 512), jnp.float32)
    i = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    plan = pg.explain(lambda w, i: jnp.mean(jnp.tanh(w[i])), pg.Project(512, 0))(table, i)
    assert plan.rows[0].strategy == "sparse"


def test_beside_other_statistics():
    p, b = params(), batch()
    stats = {"p": pg.Project(4, 0), "mean": pg.Mean(), "square": pg.Mean(jnp.square), "norm": pg.Norm()}
    result = jax.jit(pg.grad_stats(loss, stats))(p, b)
    g = grads(loss, p, b)
    close(result["p"], projected(g, 4, 0))
    close(result["norm"], oracle.norm(g))
    close(result["mean"], oracle.mean(g))


def test_weights_change_nothing():
    p, b = params(), batch()
    w = np.array([1, 0, 2.5, 3, 0.5])
    bad = b | {"x": b["x"].at[1].set(jnp.nan)}
    for strategy in ("auto", "materialise"):
        found = pg.grad_stats(loss, pg.Project(4, 0), strategy=strategy)(p, bad, example_weights=w)
        close(found[w > 0], projected(grads(loss, p, b), 4, 0)[w > 0])


@pytest.mark.parametrize("strategy", ["projected", "auto"])
def test_an_example_of_weight_0_has_its_own_projection(strategy):
    p, b = many_params(), many_batch()
    stats = {"p": pg.Project(5, 3), "mean": pg.Mean(), "token": pg.Mean(jnp.square, per="token")}
    stats_fn = jax.jit(pg.grad_stats(many_loss, stats, strategy=strategy))
    found = stats_fn(p, b, example_weights=np.array([1, 0, 2.5, 3, 0]))["p"]
    close(found, projected(grads(many_loss, p, b), 5, 3), atol=1e-11)


def test_several_arguments_have_their_own_paths():
    def two(a, b, batch):
        return loss({**a, **b}, batch)

    p, b = params(), batch()
    args = {k: p[k] for k in ("table", "w")}, {k: p[k] for k in ("b", "v")}
    found = pg.grad_stats(two, pg.Project(4, 0), argnums=(0, 1), batch_argnums=2)(*args, b)
    truth = 0
    for n, g in enumerate(grads(two, *args, b, argnums=(0, 1), batch_argnums=2)):
        truth = truth + sum(
            x.reshape(len(x), -1) @ matrix(f"args[{n}]['{name}']", x.shape[1:], 4, 0).T
            for name, x in g.items()
        )
    close(found, truth)


# Batches belong together.


def test_batches_are_comparable():
    p, b = params(), batch(7)
    stats = pg.Project(6, 9)
    of = jax.jit(pg.grad_stats(loss, stats))
    whole = of(p, b)
    parts = [of(p, jax.tree.map(lambda x, part=part: x[part], b)) for part in (slice(0, 3), slice(3, 7))]
    close(np.concatenate(parts), whole)
    close(pg.combine(stats, *parts), whole)
    one = pg.grad_stats(loss, stats, microbatch_size=1)(p, b)
    close(one, whole)
    # In float32 it is the same matrix.
    low = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x, (p, b))
    result = of(*low)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, whole, rtol=1e-3, atol=1e-4 * np.max(np.abs(whole)))


def test_in_an_ensemble():
    many, b = ensemble(), batch()
    result = jax.jit(jax.vmap(pg.grad_stats(loss, pg.Project(6, 9)), (0, None)))(many, b)
    for k in range(3):
        close(member(result, k), projected(grads(loss, member(many, k), b), 6, 9))


# Inner products.


def inner_products(dim, number, *pairs):
    """<S g, S h> for so many keys; S g is the sum over the pairs (g, h) of parameters."""
    layouts = [SketchLayout.of(g.shape, dim) for g, _ in pairs]

    def of(key):
        found = []
        for layout, own, (g, h) in zip(layouts, jax.random.split(key, len(pairs)), pairs, strict=True):
            signs = Signs.of(layout, dim, own, jnp.float64)
            found.append([signs.spread(signs.compressed(layout, x)) for x in (g, h)])
        return jnp.vdot(sum(g for g, _ in found), sum(h for _, h in found))

    return np.asarray(jax.jit(jax.vmap(of))(jax.random.split(jax.random.key(0), number)))


def test_the_matrix_of_the_tests_is_the_one_of_the_library():
    for shape in [(3,), (6, 7), (20, 3), (2, 5, 6), (1, 9), ()]:
        size = math.prod(shape)
        basis = jnp.eye(size).reshape(size, *shape)
        found = pg.grad_stats(lambda p, x: jnp.sum(p["w"] * x[0]), pg.Project(4, 77))
        close(found({"w": jnp.ones(shape)}, basis), matrix("['w']", shape, 4, 77).T)


def first_variance(G, H, layout):
    """The variance of <P^T G Q, P^T H Q>, by the formula of the docstring."""
    a = layout.a if layout.a < layout.m else math.inf
    b = layout.b if layout.b < layout.n else math.inf

    def v(M):
        return np.sum(M**2) + np.trace(M @ M) - 2 * np.sum(np.diag(M) ** 2)

    rows = np.sum(G**2, 1) @ np.sum(H**2, 1) + np.sum(np.sum(G * H, 1) ** 2)
    columns = np.sum(G**2, 0) @ np.sum(H**2, 0) + np.sum(np.sum(G * H, 0) ** 2)
    w = (
        np.sum(G**2) * np.sum(H**2)
        + np.sum(G * H) ** 2
        + np.sum((G @ H.T) ** 2)
        + np.sum((G.T @ H) ** 2)
    )
    w += 4 * np.sum(G**2 * H**2) - 2 * rows - 2 * columns
    return v(G @ H.T) / a + v(G.T @ H) / b + w / (a * b)


@pytest.mark.parametrize("rank", [1, 6])
@pytest.mark.parametrize("shape", [(30, 40), (60, 4)])
def test_inner_products_have_no_bias_and_the_right_variance(rank, shape):
    r = np.random.default_rng(rank)
    left, right = r.normal(size=(shape[0], rank)), r.normal(size=(rank, shape[1]))
    g = left @ right
    h = g + 0.5 * left @ r.normal(size=right.shape)
    dim, number = 16, 1500
    found = inner_products(dim, number, (g, h))
    truth, size = np.sum(g * h), np.linalg.norm(g) * np.linalg.norm(h)
    layout = SketchLayout.of(shape, dim)
    # Two entries of U meet with probability 1/dim, unless they are in the same row.
    rounds = math.ceil(layout.a * layout.b / dim)
    last = (size**2 + truth**2) / dim * (1 - 1 / rounds)
    variance = first_variance(g, h, layout) + last
    assert abs(np.mean(found) - truth) < 4 * math.sqrt(variance / number)
    # The deviation of an estimated variance is about its own size times sqrt(kurtosis / number).
    assert 0.75 < np.var(found) / variance < 1.35
    a = layout.a if layout.a < layout.m else math.inf
    b = layout.b if layout.b < layout.n else math.inf
    assert variance < ((1 + 2 / a) * (1 + 2 / b) * (1 + 2 / dim) - 1) * size**2


def test_variance_of_the_compression_alone():
    # With as many rows and columns as numbers there is no second step.
    r = np.random.default_rng(0)
    G, H = r.normal(size=(5, 6)), r.normal(size=(5, 6))
    layout = SketchLayout((5, 6), (0, 1), 1, 3, 2)
    P, Q = (r.choice([-1.0, 1.0], size=(200000, n, k)) / math.sqrt(k) for n, k in ((5, 3), (6, 2)))
    U, V = (np.einsum("sia,ij,sjb->sab", P, x, Q, optimize=True) for x in (G, H))
    found = np.einsum("sab,sab->s", U, V)
    assert abs(np.var(found) / first_variance(G, H, layout) - 1) < 0.02
    assert abs(np.mean(found) - np.sum(G * H)) < 5 * np.std(found) / math.sqrt(len(found))


def test_vectors():
    r = np.random.default_rng(5)
    g, h = r.normal(size=100), r.normal(size=100)
    found = inner_products(20, 2000, (g, h))
    size, truth = np.linalg.norm(g) * np.linalg.norm(h), g @ h
    variance = (size**2 + truth**2) / 20 * (1 - 1 / 5)
    assert abs(np.mean(found) - truth) < 4 * math.sqrt(variance / 2000)
    assert 0.85 < np.var(found) / variance < 1.15


def test_small_gradients_keep_their_inner_products():
    x = normal(0, 4, 3, 5)
    found = pg.grad_stats(lambda w, x: jnp.sum(w * x[0]), pg.Project(15, 2))(jnp.ones((3, 5)), x)
    rows = x.reshape(4, 15)
    close(found @ found.T, rows @ rows.T)


def test_several_parameters_are_independent():
    # Equal gradients of two parameters of the same shape: their projections differ.
    r = np.random.default_rng(6)
    g, h = r.normal(size=(2, 12)), r.normal(size=(2, 12))
    dim, number = 12, 3000
    found = inner_products(dim, number, *zip(g, h, strict=True))
    squares = [np.sum(x**2, axis=1) for x in (g, h)]
    dots = np.sum(g * h, axis=1)
    variance = (
        squares[0][0] * squares[1][1] + squares[0][1] * squares[1][0] + 2 * dots[0] * dots[1]
    ) / dim
    assert abs(np.mean(found) - np.sum(g * h)) < 4 * math.sqrt(variance / number)
    assert 0.85 < np.var(found) / variance < 1.15


# What it is made of.


def test_keys():
    assert pg.Project(8, 7) == pg.Project(8, jax.random.key(7)) == pg.Project(8, jax.random.PRNGKey(7))
    assert hash(pg.Project(8, 7)) == hash(pg.Project(8, np.int64(7)))
    assert pg.Project(8, 7) != pg.Project(8, 8) and pg.Project(8, 7) != pg.Project(9, 7)
    first, second = jax.random.split(jax.random.key(0))
    assert pg.Project(8, first) != pg.Project(8, second)
    assert isinstance(pg.Project(8, jax.random.key(1, impl="rbg")).key, int)
    assert repr(pg.Project(8, 7)) == "Project(dim=8, key=7)"
    assert pg.Project(8, 2**64 - 1).key == 2**64 - 1


@pytest.mark.parametrize("key", ["a", 1.0, -1, 2**64, True, None, jnp.ones(3)])
def test_bad_keys(key):
    with refused(pg.ArgumentError, "Project: key must be an int from 0 to 2^64 - 1 or one PRNG key"):
        pg.Project(8, key)


def test_traced_key():
    with refused(pg.ArgumentError, "outside of jit"):
        jax.jit(lambda key: pg.grad_stats(loss, pg.Project(8, key))(params(), batch()))(
            jax.random.key(0)
        )


@pytest.mark.parametrize("dim", [0, -1, 1.5, True, "8"])
def test_bad_dimensions(dim):
    with refused(pg.ArgumentError, "Project: dim must be a number of at least 1"):
        pg.Project(dim, 0)


def test_where():
    with refused(pg.ArgumentError, "where must be a function"):
        pg.Project(8, 0, where="w")
    with refused(pg.ArgumentError, "selects no parameter"):
        pg.grad_stats(loss, pg.Project(8, 0, where=lambda path: False))(params(), batch())
