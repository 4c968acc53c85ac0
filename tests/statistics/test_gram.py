"""Inner products of the gradients of all examples of two sets: `pg.gram`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from pergrad._call import pairs
from tests.support import oracle
from tests.support.cases import Case
from tests.support.claims import close, refused
from tests.support.every_case import CASE, CASES
from tests.support.small_model import batch, ensemble, loss, member, normal, params, regularised
from tests.support.truth import options, truth_of

STRATEGIES = ["auto", "gram", "materialise", "sparse"]


def rows(g):
    return np.concatenate([np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(g)], axis=1)


def grads(p, b, fun=loss, **more):
    return rows(oracle.per_example(fun, (p, b), **more)[2])


def two_sets(a=7, b=4):
    whole = batch(a + b)
    return (jax.tree.map(lambda x: x[:a], whole), jax.tree.map(lambda x: x[a:], whole))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [None, 1, 2, 3, 4, 100, "auto"])
def test_any_block_and_strategy(size, strategy):
    p, (a, b) = params(), two_sets()
    gram_fn = jax.jit(pg.gram(loss, microbatch_size=size, strategy=strategy))
    g, h = grads(p, a), grads(p, b)
    close(gram_fn(p, a, b), g @ h.T)
    close(gram_fn(p, b, a), h @ g.T)
    close(gram_fn(p, a), g @ g.T)


@pytest.mark.parametrize("examples", range(1, 9))
def test_any_number_of_blocks(examples):
    p, a = params(), batch(examples)
    g = grads(p, a)
    close(jax.jit(pg.gram(loss, microbatch_size=1))(p, a), g @ g.T)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_every_case(name):
    case: Case = CASE[name]
    number = CASES.index(case)
    args, truth = case.make_args(jnp.float64), rows(truth_of(case, "float64").grads)
    gram_fn = pg.gram(
        case.loss,
        microbatch_size=(None, 2, 1, "auto")[number % 4],
        strategy=STRATEGIES[number // 4 % 4],
        **options(case),
    )
    places = case.batch_argnums if isinstance(case.batch_argnums, tuple) else (case.batch_argnums,)
    bound = max(1e-5 if "attention_of" in name or "grouped" in name else 1e-11, 1e-300)
    scale = np.max(np.sum(np.square(truth), axis=1))
    if number % 2:
        b = tuple(args[n] for n in places) if len(places) > 1 else args[places[0]]
        found = jax.jit(lambda *args: gram_fn(*args, b=b))(*args)
    else:
        found = jax.jit(gram_fn)(*args)
    assert found.shape == (len(truth), len(truth))
    np.testing.assert_allclose(found, truth @ truth.T, rtol=0, atol=bound * (scale + 1e-3))


def test_where():
    p, (a, b) = params(), two_sets()
    where = lambda path: path in ("['w']", "['table']")  # noqa: E731
    names = ("w", "table")

    def of(x):
        g = oracle.per_example(loss, (p, x))[2]
        return rows({name: g[name] for name in names})

    close(pg.gram(loss, where=where, microbatch_size=3)(p, a, b), of(a) @ of(b).T)
    with refused(pg.ArgumentError, "selects no parameter"):
        pg.gram(loss, where=lambda path: False)(p, a)


def test_centred():
    p, (a, b) = params(), two_sets()
    g, h = (x - x.mean(axis=0) for x in (grads(p, a), grads(p, b)))
    for size in (None, 3):
        gram_fn = jax.jit(pg.gram(loss, centre=True, microbatch_size=size))
        close(gram_fn(p, a, b), g @ h.T)
        close(gram_fn(p, a), g @ g.T)


def test_gradients_that_are_the_same_for_all_examples():
    p, (a, b) = params() | {"only": normal(8, 3), "none": normal(9, 2)}, two_sets()
    g, h = (grads(p, x, regularised) for x in (a, b))
    for size in (None, 3):
        close(pg.gram(regularised, microbatch_size=size)(p, a, b), g @ h.T)


def test_several_arguments_and_one_example_without_a_batch_axis():
    def one(p, i, e):
        return loss(p, {"i": i[None], "x": e["x"][None], "y": e["y"][None]})

    p, (a, b) = params(), two_sets()
    split = [(x["i"], {k: x[k] for k in "xy"}) for x in (a, b)]
    gram_fn = pg.gram(one, batch_argnums=(1, 2), keep_batch_dim=False, microbatch_size=2)
    expected = grads(p, a) @ grads(p, b).T
    close(gram_fn(p, *split[0], split[1]), expected)
    close(gram_fn(p, *split[0], b=split[1]), expected)
    with refused(pg.ArgumentError, "b must be a tuple", "batch_argnums=(1, 2)"):
        gram_fn(p, *split[0], b=b)


def test_keys_and_aux():
    def noisy(p, b, key):
        x = b["x"] + jax.random.normal(key, b["x"].shape)
        return loss(p, b | {"x": x}), x

    p, (a, b), key = params(), two_sets(), jax.random.key(3)
    more = {"rng_argnums": 2, "has_aux": True}

    def of(x):
        return rows(oracle.per_example(noisy, (p, x, key), **more)[2])

    gram_fn = pg.gram(noisy, microbatch_size=3, **more)
    close(gram_fn(p, a, key), of(a) @ of(a).T)
    close(gram_fn(p, a, key, b), of(a) @ of(b).T)


def test_two_argnums():
    def two(p, b, q):
        return loss({**p, **q}, b)

    p, (a, b) = params(), two_sets()
    q, p = {k: p.pop(k) for k in ("b", "v")}, p
    gram_fn = pg.gram(two, argnums=(0, 2), microbatch_size=3)
    close(gram_fn(p, a, q, b=b), grads({**p, **q}, a) @ grads({**p, **q}, b).T)


def test_a_loss_that_takes_any_arguments_needs_the_keyword():
    p, (a, b) = params(), two_sets()
    close(pg.gram(lambda *args: loss(*args))(p, a, b=b), grads(p, a) @ grads(p, b).T)
    assert "b=None" in str(pg.gram(loss).__signature__)
    assert "array [A, B]" in pg.gram(loss).__doc__


def test_bad_arguments():
    p, (a, b) = params(), two_sets()
    with refused(pg.ArgumentError, "the examples of b must be like those of a"):
        pg.gram(loss)(p, a, b | {"x": b["x"][:, :2]})
    with refused(pg.ArgumentError, "the examples of b must be like those of a"):
        pg.gram(loss)(p, a, b | {"more": b["x"]})
    with refused(pg.ArgumentError, "microbatch_size"):
        pg.gram(loss, microbatch_size=0)


def test_dtypes():
    p, b = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float64 else x, (params(), batch())
    )
    found = pg.gram(loss)(p, b)
    assert found.dtype == jnp.float32
    expected = grads(params(), batch()) @ grads(params(), batch()).T
    np.testing.assert_allclose(found, expected, atol=0.1 * np.max(expected))


def test_in_an_ensemble_and_differentiated():
    many, (a, b) = ensemble(), two_sets()
    gram_fn = pg.gram(loss, microbatch_size=3)
    found = jax.jit(jax.vmap(gram_fn, (0, None, None)))(many, a, b)
    for k in range(3):
        p = member(many, k)
        close(found[k], grads(p, a) @ grads(p, b).T)

    def plain(p):
        def of(x):
            g = jax.vmap(lambda e: jax.grad(loss)(p, jax.tree.map(lambda x: x[None], e)))(x)
            return jnp.concatenate([x.reshape(len(x), -1) for x in jax.tree.leaves(g)], axis=1)

        return jnp.sum(jnp.sin(of(a) @ of(b).T))

    ours = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(gram_fn(p, a, b)))))(params())
    close(ours, jax.jit(jax.grad(plain))(params()), rtol=1e-8)


def test_blocks_fit_into_memory(monkeypatch):
    p, (a, b) = params(), two_sets(13, 11)
    sizes = []
    of_two = pairs.bytes_of_two
    monkeypatch.setattr(pairs, "bytes_of_two", lambda s, c: sizes.append(s.batch_size) or of_two(s, c))
    monkeypatch.setattr(pairs, "BLOCKS_SHARE", 0.0)
    close(pg.gram(loss)(p, a, b), grads(p, a) @ grads(p, b).T)
    assert sizes == [13, 7, 4, 2]  # and then 1, which needs no room


# What it costs.


def mlp(width, layers):
    r = np.random.default_rng(0)
    p = [r.normal(size=(width, width)).astype(np.float32) / width**0.5 for _ in range(layers)]

    def loss(p, batch):
        x, y = batch
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x - y))

    return loss, [jnp.asarray(w) for w in p]


def plain(loss, p, a):
    g = jax.vmap(lambda e: jax.grad(loss)(p, jax.tree.map(lambda x: x[None], e)))(a)
    g = jnp.concatenate([x.reshape(len(x), -1) for x in jax.tree.leaves(g)], axis=1)
    return g @ g.T


def test_512_examples_of_an_mlp():
    """Compiled, not run: at most a tenth of the operations and of the memory of `vmap(grad)`."""
    loss, p = mlp(width=256, layers=3)
    a = jax.ShapeDtypeStruct((512, 256), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32)
    compiled = [
        jax.jit(f).lower(p, a).compile() for f in (pg.gram(loss), functools.partial(plain, loss))
    ]
    ours, theirs = (c.cost_analysis()["flops"] for c in compiled)
    assert ours < 0.05 * theirs
    ours, theirs = (c.memory_analysis().temp_size_in_bytes for c in compiled)
    assert ours < 0.1 * theirs


def test_memory_is_that_of_two_blocks():
    loss, p = mlp(width=128, layers=2)

    def bytes_of(examples, size):
        a = [jax.ShapeDtypeStruct((examples, 128), jnp.float32)] * 2
        compiled = jax.jit(pg.gram(loss, microbatch_size=size)).lower(p, a, a).compile()
        return compiled.memory_analysis().temp_size_in_bytes - 3 * 4 * examples**2

    assert bytes_of(512, 16) < 0.35 * bytes_of(512, None)
