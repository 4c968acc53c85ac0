"""Norms and inner products of what each position contributes: `per="token"` of `Norm` and `Dot`.

The truth comes from models in which every position has its own copy of each parameter, as in
`test_units`. Copies that are used at the same position are added up.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import pergrad as pg
from tests.cut.test_units import (
    MODELS,
    TOKEN_WEIGHTS,
    B,
    Model,
    T,
    contributions,
    data,
    ids,
    mse,
    shaped,
)
from tests.support.claims import close, refused
from tests.support.small_model import batch as some_batch
from tests.support.small_model import normal, regularised
from tests.support.small_model import params as some_params

STRATEGIES = ["auto", "gram", "streamed", "materialise", "summed", "factored", "sparse"]
Tree = Any

# The parameters that have no positions, and a word of the reason.
REFUSED = {
    "used_twice": ("w", "one of its sums is over 1 position and another over 4 positions"),
    "ragged_experts": ("w", "sorted"),
    "low_rank_product_and_a_factor": ("b", "3 positions and another over 4 positions"),
}


def attention(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], jnp.einsum("bqd,bsd->bqs", q, k), -1e9)
    return jnp.einsum("bqs,bsd->bqd", jax.nn.softmax(scores), v)


def norm(x: Array) -> Array:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)


def transformer() -> Model:
    """Everything that a transformer has, but position embeddings."""

    def run(dense: Any, p: Tree, h: Array, y: Array) -> Array:
        n = norm(h) * p["scale"] + p["shift"]
        heads = (dense(n, p[name]) + p["bias " + name] for name in ("q", "k", "v"))
        h = h + dense(attention(*heads), p["o"])
        h = h + dense(jnp.tanh(dense(h, p["in"])), p["out"])
        logp = jax.nn.log_softmax(dense(h, p["head"]) + p["bias head"])
        return -jnp.mean(jnp.take_along_axis(logp, y[..., None], 2))

    def loss(p: Tree, batch: Tree) -> Array:
        vectors = {k: x[None, None] if x.ndim == 1 else x for k, x in p.items()}
        return run(jnp.matmul, vectors, p["table"][batch["i"]], batch["j"])

    def spread(q: Tree, e: Tree) -> Array:
        vectors = {k: x[None] if x.ndim == 2 else x for k, x in q.items()}
        h = q["table"][jnp.arange(T), e["i"]][None]
        return run(functools.partial(jnp.einsum, "bti,tij->btj"), vectors, h, e["j"][None])

    biases = {"bias q": (3,), "bias k": (3,), "bias v": (3,), "bias head": (6,)}
    layers = {"q": (3, 3), "k": (3, 3), "v": (3, 3), "o": (3, 3), "in": (3, 5), "out": (5, 3)}
    p = shaped(table=(6, 3), scale=(3,), shift=(3,), head=(3, 6), **biases, **layers)
    return Model(loss, spread, p, {"i": ids(T), "j": ids(T)[::-1]}, dict.fromkeys(p, T))


ALL = MODELS | {"transformer": transformer}


def parts(m: Model) -> Tree:
    """What each position contributes to each example's gradients, [B, T, ...], times T."""
    found = contributions(m)
    if "table" in found and found["table"].shape[1] == 2 * T:  # a tied table, used twice by a position
        found["table"] = found["table"][:, :T] + found["table"][:, T:]
    return {name: g.shape[1] * g for name, g in found.items()}


def length(g: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(np.square(g), axis=tuple(range(2, g.ndim))))


def direction(m: Model, *several: int) -> Tree:
    return {name: normal(20 + i, *several, *x.shape) for i, (name, x) in enumerate(m.params.items())}


def only(name: str) -> Any:
    return lambda path: path == f"['{name}']"


def questions(m: Model, names: Any) -> dict[str, Any]:
    return {
        "norm": pg.Norm(by="leaf", where=lambda path: path[2:-2] in names, per="token"),
        "dot": {name: pg.Dot(where=only(name), per="token") for name in names},
    }


def truth(m: Model, names: Any, v: Tree) -> dict[str, Any]:
    g = parts(m)
    several = v[next(iter(v))].ndim - m.params[next(iter(v))].ndim
    dot = {
        name: np.tensordot(g[name], np.moveaxis(np.asarray(v[name]), 0, -1), g[name].ndim - 2)
        if several
        else np.tensordot(g[name], np.asarray(v[name]), g[name].ndim - 2)
        for name in names
    }
    return {"norm": {k: length(g[k]) if k in names else None for k in g}, "dot": dot}


def compare(result: Tree, expected: Tree) -> None:
    close(result, expected, atol=1e-11)


@pytest.mark.parametrize("name", ALL)
def test_positions(name):
    m, number = ALL[name](), list(ALL).index(name)
    without = REFUSED.get(name, ("", ""))[0]
    names = [k for k in m.params if k != without]
    if not names:
        return
    forced = STRATEGIES[1 + number % 6]
    for strategy, size, weights in (("auto", None, None), (forced, (1, 2)[number % 2], TOKEN_WEIGHTS)):
        v = direction(m) if weights is None else direction(m, 3)
        stats_fn = pg.grad_stats(m.loss, questions(m, names), strategy=strategy, microbatch_size=size)
        result = jax.jit(stats_fn)(m.params, m.batch, direction=v, example_weights=weights)
        compare(result, truth(m, names, v))  # weights change nothing, also those of 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["tied_embedding", "layers_in_a_scan", "low_rank_product"])
def test_any_strategy(name, strategy):
    m, names = ALL[name](), list(ALL[name]().params)
    v = direction(m)
    stats_fn = pg.grad_stats(m.loss, questions(m, names), strategy=strategy)
    compare(jax.jit(stats_fn)(m.params, m.batch, direction=v), truth(m, names, v))


WHOLE = ["dense_bias_and_scale", "tied_embedding", "layers_in_a_scan", "recurrence", "transformer"]


@pytest.mark.parametrize("name", WHOLE)
def test_all_parameters_together(name):
    m = ALL[name]()
    g, v = parts(m), direction(m)
    stats = {"norm": pg.Norm(per="token"), "dot": pg.Dot(per="token"), "of examples": pg.Dot()}
    result = jax.jit(pg.grad_stats(m.loss, stats))(m.params, m.batch, direction=v)
    expected = {
        "norm": np.sqrt(sum(np.square(length(x)) for x in g.values())),
        "dot": sum(truth(m, list(g), v)["dot"].values()),
    }
    of_examples = result.pop("of examples")
    compare(result, expected)
    assert result["norm"].shape == result["dot"].shape == (B, T)
    close(np.mean(result["dot"], axis=1), of_examples)


@pytest.mark.parametrize("name", REFUSED)
def test_parameters_without_positions(name):
    m, (param, reason) = ALL[name](), REFUSED[name]
    for statistic in (pg.Norm(by="leaf", per="token"), pg.Norm(per="token"), pg.Dot(per="token")):
        with refused(pg.ArgumentError, repr(statistic), f"['{param}']", reason, "where=lambda path"):
            pg.explain(m.loss, statistic)(m.params, m.batch)


def test_parameters_with_other_positions():
    m = ALL["sums_over_features"]()
    words = "['one'] is a sum over 12 positions", "['row'] is one over 3 positions", "where", "by='leaf'"
    with refused(pg.ArgumentError, *words):
        pg.grad_stats(m.loss, pg.Norm(per="token"))(m.params, m.batch)
    with refused(pg.ArgumentError, *words[:3]) as error:
        pg.grad_stats(m.loss, pg.Dot(per="token"))(m.params, m.batch, direction=m.params)
    assert "by=" not in str(error.value)
    result = pg.grad_stats(m.loss, pg.Norm(by="leaf", per="token"))(m.params, m.batch)
    assert jax.tree.map(jnp.shape, result) == {"row": (B, 3), "one": (B, 12)}


def test_position_embeddings_are_named():
    def loss(p: Tree, batch: Tree) -> Array:
        return mse(jnp.tanh(batch["x"] + p["places"][None]) @ p["w"], batch["y"])

    p, b = shaped(places=(T, 3), w=(3, 2)), data(x=(T, 3), y=(T, 2))
    with refused(pg.ArgumentError, "['places'] is a sum over 1 position,", "['w'] is one over 4"):
        pg.grad_stats(loss, pg.Norm(per="token"))(p, b)
    assert pg.grad_stats(loss, pg.Norm(per="token", where=only("w")))(p, b).shape == (B, T)


def test_without_positions():
    m = ALL["no_positions"]()
    stats = {"token": pg.Norm(per="token"), "example": pg.Norm()}
    result = pg.grad_stats(m.loss, stats)(m.params, m.batch)
    close(result["token"], result["example"][:, None])


def test_what_is_the_same_for_all_examples_belongs_to_every_position():
    # Products, a bias and a lookup of one position, a regulariser, and gradients that are constants.
    p = some_params() | {"only": normal(8, 3), "none": normal(9, 2)}
    where = lambda path: path not in ("['table']", "['v']")  # noqa: E731
    stats = {"token": pg.Norm(per="token", where=where), "example": pg.Norm(where=where)}
    result = pg.grad_stats(regularised, stats)(p, some_batch())
    close(result["token"], result["example"][:, None])

    def loss(p: Tree, batch: Tree) -> Array:
        return mse(batch["x"] @ p["w"], batch["y"]) + jnp.sum(jnp.square(p["w"])) + jnp.sum(p["only"])

    p, b = shaped(w=(3, 2), only=(4,)), data(x=(T, 3), y=(T, 2))
    found = pg.grad_stats(loss, pg.Norm(per="token"))(p, b)
    error = 2 * (np.einsum("bti,ij->btj", b["x"], p["w"]) - np.asarray(b["y"])) / (T * 2)
    each = T * np.einsum("bti,btj->btij", b["x"], error) + 2 * np.asarray(p["w"])
    close(found, np.sqrt(np.square(length(each)) + 4))


def test_beside_clipping_and_other_units():
    # Norms of positions do not stand in for those of examples.
    m = ALL["dense_bias_and_scale"]()
    stats = {
        "clipped": pg.ClippedMean(0.3),
        "norm": pg.Norm(),
        "square": pg.Mean(jnp.square, per="token"),
    }
    for size in (None, 1, 2):
        stats_fn = jax.jit(pg.grad_stats(m.loss, stats, microbatch_size=size))
        both_fn = pg.grad_stats(m.loss, stats | {"token": pg.Norm(per="token")}, microbatch_size=size)
        both = jax.jit(both_fn)(m.params, m.batch)
        token = both.pop("token")
        close(both, stats_fn(m.params, m.batch))
        squares = sum(jnp.sum(x) for x in both["square"].values())
        close(np.mean(np.square(token)), squares)


@pytest.mark.parametrize("name", ["dense_bias_and_scale", "convolution_1d"])
def test_padding_may_be_anything(name):
    m = ALL[name]()
    bad = {key: x.at[TOKEN_WEIGHTS == 0].set(jnp.nan) for key, x in m.batch.items()}
    result = pg.grad_stats(m.loss, pg.Norm(per="token"))(m.params, bad, example_weights=TOKEN_WEIGHTS)
    expected = pg.grad_stats(m.loss, pg.Norm(per="token"))(m.params, m.batch)
    close(result[TOKEN_WEIGHTS > 0], expected[TOKEN_WEIGHTS > 0])


def test_in_an_ensemble_and_differentiated():
    m = ALL["recurrence"]()
    many = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), m.params)
    stats_fn = pg.grad_stats(m.loss, pg.Norm(per="token"))
    result = jax.jit(jax.vmap(stats_fn, (0, None)))(many, m.batch)
    for k in range(2):
        own = jax.tree.map(lambda x, k=k: x[k], many)
        close(result[k], stats_fn(own, m.batch))
    slope = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(stats_fn(p, m.batch)))))(m.params)
    step = 1e-6
    for name, x in m.params.items():
        moved = [m.params | {name: x.at[(0,) * x.ndim].add(s)} for s in (step, -step)]
        up, down = (jnp.sum(jnp.square(stats_fn(p, m.batch))) for p in moved)
        np.testing.assert_allclose(slope[name][(0,) * x.ndim], (up - down) / (2 * step), rtol=1e-5)


def test_results_of_two_batches_are_joined():
    m = ALL["dense_bias_and_scale"]()
    stats = {"norm": pg.Norm(per="token"), "dot": pg.Dot(per="token")}
    stats_fn = pg.grad_stats(m.loss, stats)
    of = lambda part: stats_fn(m.params, jax.tree.map(lambda x: x[part], m.batch), direction=m.params)  # noqa: E731
    both = pg.combine(stats, of(slice(0, 2)), of(slice(2, None)))
    close(both, stats_fn(m.params, m.batch, direction=m.params))


def test_explained():
    m = ALL["dense_bias_and_scale"]()
    plan = pg.explain(m.loss, pg.Norm(per="token"))(m.params, m.batch)
    rows = {row.path: row for row in plan.rows}
    assert rows["['w']"].strategy == "gram" and rows["['w']"].operations > 0


def test_options():
    assert pg.Norm(per="token") != pg.Norm() and hash(pg.Norm(per="token")) == hash(pg.Norm(per="token"))
    assert repr(pg.Norm(per="token")) == "Norm(per='token')" and repr(pg.Dot()) == "Dot()"
    for make in (pg.Norm, pg.Dot):
        with refused(pg.ArgumentError, make.__name__, "per must be 'example' or 'token'", "2"):
            make(per=2)
    with refused(pg.ArgumentError, "Dot: where must be a function"):
        pg.Dot(where="w")
