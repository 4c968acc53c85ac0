"""Bad input gets an error that names the culprit, the reason and the way out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from tests.support.claims import refused

W = jnp.array([1.0, 2.0])
X = jnp.array([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
KEY = jax.random.key(0)


def loss(w, x):
    return jnp.mean(jnp.square(x @ w))


def call(fun=loss, args=(W, X), stats=None, weights=None, **options):
    stats = pg.Mean() if stats is None else stats
    return pg.value_and_stats(fun, stats, **options)(*args, example_weights=weights)


# The loss.


@pytest.mark.parametrize(
    ("fun", "options", "words"),
    [
        (lambda w, x: x @ w, {}, ["must return a scalar", "a batch of one", "shape (1,)", "mean"]),
        (lambda w, x: x * w, {"keep_batch_dim": False}, ["scalar", "one example", "shape (2,)"]),
        (lambda w, x: (loss(w, x), x), {}, ["returned a pair", "has_aux=True"]),
        (lambda w, x: loss(w, x), {"has_aux": True}, ["has_aux", "(loss, aux)"]),
        (lambda w, x: (loss(w, x), x, x), {"has_aux": True}, ["has_aux", "(loss, aux)"]),
        (lambda w, x: (x @ w, x), {"has_aux": True}, ["must return a scalar", "shape (1,)"]),
        (lambda w, x: None, {}, ["must return a scalar", "None"]),
        (lambda w, x: {"loss": loss(w, x)}, {}, ["must return a scalar", "dict"]),
        (lambda w, x: jnp.sum(x @ w).astype(int), {}, ["must be a real number", "int"]),
        (lambda w, x: loss(w, x) + 0j, {}, ["must be a real number", "complex"]),
        (lambda w, x: 3, {}, ["must be a real number", "3, a int", "3.0"]),
        (lambda w, x: True, {}, ["must be a real number", "bool"]),
    ],
)
def test_loss(fun, options, words):
    with refused(pg.ArgumentError, *words):
        call(fun, **options)


def test_loss_is_not_a_function():
    for make in (pg.value_and_stats, pg.grad_stats, pg.explain):
        with refused(pg.ArgumentError, "fun must be a function", "3"):
            make(3, pg.Mean())
    with refused(pg.ArgumentError, "fun must be a function", "3"):
        pg.check(3)


def test_error_of_the_loss_itself_is_not_hidden():
    def broken(w, x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        call(broken)


@pytest.mark.parametrize(
    ("fun", "keep_batch_dim", "words"),
    [
        (lambda w, x: jnp.dot(w, x), True, ["a batch of one", "(1, 2)", "write keep_batch_dim=False"]),
        (
            lambda w, x: jnp.mean(x[:, 0]),
            False,
            ["one example", "(2,)", "leave out keep_batch_dim=False"],
        ),
    ],
)
def test_error_of_the_loss_has_a_note_of_what_it_was_given(fun, keep_batch_dim, words):
    with pytest.raises((TypeError, IndexError)) as caught:
        call(fun, keep_batch_dim=keep_batch_dim)
    (note,) = (note for note in caught.value.__notes__ if note.startswith("pergrad"))
    assert all(word in note for word in words)


# Parameters.


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (jnp.arange(3), "int"),
        (np.array([True]), "bool"),
        (7, "7, a int"),
        (jnp.ones(2, complex), "complex"),
        (1j, "complex"),
        ("adam", "'adam', a str"),
        (jnp.tanh, "tanh"),
        (KEY, "key<fry>"),
    ],
)
def test_parameter_that_cannot_be_differentiated(leaf, kind):
    params = {"w": W, "more": [W, leaf]}
    with refused(pg.ArgumentError, "['more'][1]", "argument 0", "floating-point", kind, "argnums"):
        call(lambda p, x: loss(p["w"], x), (params, X))


def test_parameter_of_the_second_argument_is_named():
    with refused(pg.ArgumentError, "args[2]['steps']", "argument 2"):
        call(lambda w, x, q: loss(w, x), (W, X, {"steps": 3}), argnums=(0, 2))
    with refused(pg.ArgumentError, "args[0]"):
        call(args=(jnp.arange(2), X))


def test_module_of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    for place in (model, {"model": model}):
        with refused(pg.ArgumentError, "args[0]", "argnums", "running statistics", "import pergrad.nnx"):
            call(lambda model, x: jnp.mean(x), (place, X))


@pytest.mark.parametrize("params", [{}, None, [], {"a": None}])
def test_no_parameters(params):
    with refused(pg.ArgumentError, "argnums=0", "parameters to differentiate"):
        call(args=(params, X))


# The batch.


def test_batch_of_different_lengths():
    batch = {"x": X, "y": {"labels": jnp.ones(4)}}
    with refused(pg.ArgumentError, "args[1]['x']: 3", "args[1]['y']['labels']: 4", "same number"):
        call(lambda w, b: loss(w, b["x"]), (W, batch))
    with refused(pg.ArgumentError, "args[1]: 3", "args[2]: 2"):
        call(lambda w, x, y: loss(w, x), (W, X, jnp.ones(2)), batch_argnums=(1, 2))


@pytest.mark.parametrize("leaf", [jnp.array(1.0), 0.1, np.float64(2), "train", jnp.tanh])
def test_batch_leaf_without_an_example_axis(leaf):
    with refused(pg.ArgumentError, "args[1]['rate']", "no example axis", "batch_argnums"):
        call(lambda w, b: loss(w, b["x"]), (W, {"x": X, "rate": leaf}))


def test_empty_batch():
    with refused(pg.ArgumentError, "batch is empty", "length 0"):
        call(args=(W, X[:0]))
    for nothing in ({}, None, []):
        with refused(pg.ArgumentError, "the batch, which batch_argnums=1 names", "no arrays"):
            call(args=(W, nothing))


# Places of arguments.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"argnums": 2}, ["argnums=2", "2 positional arguments"]),
        ({"argnums": (0, -3)}, ["argnums=(0, -3)"]),
        ({"batch_argnums": 5}, ["batch_argnums=5"]),
        ({"rng_argnums": 2}, ["rng_argnums=2"]),
        ({"argnums": 1}, ["argument 1", "argnums", "batch_argnums", "one role"]),
        ({"argnums": (0, 1)}, ["argument 1", "one role"]),
        ({"argnums": (0, -2)}, ["argument 0", "argnums"]),
        ({"batch_argnums": (1, -1)}, ["argument 1", "batch_argnums"]),
        ({"rng_argnums": 1}, ["argument 1", "batch_argnums", "rng_argnums"]),
        ({"argnums": "w"}, ["argnums", "int", "'w'"]),
        ({"argnums": 0.0}, ["argnums", "int"]),
        ({"argnums": True}, ["argnums", "int"]),
        ({"batch_argnums": None}, ["batch_argnums", "int"]),
        ({"shared_argnums": 5}, ["shared_argnums=5"]),
        ({"shared_argnums": 1}, ["argument 1", "batch_argnums", "shared_argnums", "one role"]),
        ({"shared_argnums": (-2,)}, ["argument 0", "argnums", "shared_argnums", "one role"]),
        ({"shared_argnums": "y"}, ["shared_argnums", "int", "'y'"]),
        ({"argnums": ()}, ["argnums is empty"]),
        ({"batch_argnums": ()}, ["batch_argnums is empty"]),
    ],
)
def test_argnums(options, words):
    with refused(pg.ArgumentError, *words):
        call(**options)


def test_batch_given_by_keyword():
    with refused(pg.ArgumentError, "batch_argnums=1", "keyword"):
        pg.grad_stats(loss, pg.Mean())(W, x=X)


@pytest.mark.parametrize(
    "key", [3, 0.5, jnp.ones(2), jnp.arange(2), jax.random.split(KEY, 3), "seed"], ids=repr
)
def test_not_a_key(key):
    with refused(pg.ArgumentError, "args[2]['dropout']", "rng_argnums", "one PRNG key"):
        call(lambda w, x, k: loss(w, x), (W, X, {"dropout": key}), rng_argnums=2)


# Arguments that no role names.


def with_labels(w, x, y):
    return jnp.mean(jnp.square(x @ w - y))


LABELS = jnp.array([1.0, 2.0, 3.0])
FUNCTIONS = {
    "value_and_stats": lambda fun, **options: pg.value_and_stats(fun, pg.Mean(), **options),
    "grad_stats": lambda fun, **options: pg.grad_stats(fun, pg.Mean(), **options),
    "explain": lambda fun, **options: pg.explain(fun, pg.Mean(), **options),
    "check": pg.check,
}


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_argument_as_long_as_the_batch(make):
    words = ["args[2]", "(3,)", "batch_argnums=(1, 2)", "shared_argnums=2"]
    with refused(pg.ArgumentError, *words):
        make(with_labels)(W, X, LABELS)
    make(with_labels, batch_argnums=(1, 2))(W, X, LABELS)
    make(lambda w, x, y: loss(w, x) + y[0] * w[0], shared_argnums=2)(W, X, LABELS)


@pytest.mark.parametrize(
    "leaf",
    [
        np.ones((3, 4)),
        jnp.ones((3, 4), int),
        jax.ShapeDtypeStruct((3, 4), jnp.bool_),
        jax.random.split(KEY, 3),
        jax.random.split(jax.random.PRNGKey(0), 3),
    ],
    ids=["numpy", "int", "shape", "keys", "raw keys"],
)
def test_leaf_as_long_as_the_batch(leaf):
    def fun(rate, w, other, x):
        return loss(w, x)

    args = 0.5, W, {"rate": 1.0, "deep": [np.ones(4), leaf]}, X
    options = {"argnums": 1, "batch_argnums": -1}
    words = ["args[2]['deep'][1]", str(leaf.shape), "that batch_argnums names", "shared_argnums=2"]
    with refused(pg.ArgumentError, *words):
        call(fun, args, **options)
    with refused(pg.ArgumentError, *words):
        pg.explain(fun, pg.Mean(), **options)(*args)
    call(fun, args, shared_argnums=-2, **options)


def test_several_arguments_as_long_as_the_batch():
    def fun(w, x, y, rate, z, shared):
        return with_labels(w, x, y) * z[0] * rate

    args = W, X, LABELS, 0.5, {"z": LABELS}, LABELS
    with refused(
        pg.ArgumentError,
        "args[2]",
        "args[4]['z']",
        "batch_argnums=(1, 2, 4)",
        "shared_argnums=(2, 4, 5)",
    ):
        call(fun, args, shared_argnums=5)


def test_keyword_argument_as_long_as_the_batch():
    def fun(w, x, *, more):
        return loss(w, x)

    words = [
        "more['mask']",
        "(3, 5)",
        "by position",
        "batch_argnums",
        "functools.partial(fun, more=more)",
    ]
    with refused(pg.ArgumentError, *words):
        pg.grad_stats(fun, pg.Mean())(W, X, more={"mask": np.ones((3, 5))})
    pg.grad_stats(fun, pg.Mean())(W, X, more={"mask": np.ones((4, 3))})


def test_batch_of_one_has_no_other_arguments_to_confuse():
    call(lambda w, x, y: loss(w, x) * y[0], (W, X[:1], LABELS[:1]))


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0)], ids=["typed", "raw"])
@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_key_that_is_not_named(make, key):
    def fun(w, x, k):
        return loss(w, x)

    words = ["args[2]", "PRNG key", "same numbers", "rng_argnums=2", "shared_argnums=2"]
    with refused(pg.ArgumentError, *words):
        make(fun)(W, X, key)
    with refused(pg.ArgumentError, "args[2]['dropout']", *words[1:]):
        make(fun)(W, X, {"dropout": key})
    with refused(pg.ArgumentError, "args[2]['dropout']", "argument of its own", "shared_argnums=2"):
        make(fun)(W, X, {"dropout": key, "rate": 0.5})
    make(fun, shared_argnums=2)(W, X, key)


def test_keys_that_are_not_named():
    keys = {"layers": jax.random.split(KEY, 4)}
    with refused(pg.ArgumentError, "args[2]['layers']", "one key", "split", "shared_argnums=2"):
        call(lambda w, x, k: loss(w, x), (W, X, keys))
    with refused(pg.ArgumentError, "args[3]", "rng_argnums=(2, 3)", "shared_argnums=3"):
        call(lambda w, x, k, m: loss(w, x), (W, X, KEY, KEY), rng_argnums=2)


def test_raw_key_beside_two_examples():
    # Two numbers of uint32 are rather a key than the labels of two examples.
    with refused(pg.ArgumentError, "args[2]", "raw PRNG key", "rng_argnums=2"):
        call(lambda w, x, k: loss(w, x), (W, X[:2], jax.random.PRNGKey(0)))


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_key_given_by_keyword(key):
    def fun(w, x, *, rngs):
        return loss(w, x)

    words = ["rngs['dropout']", "PRNG key", "by position", "rng_argnums=2", "shared_argnums=2"]
    with refused(pg.ArgumentError, *words):
        pg.grad_stats(fun, pg.Mean())(W, X, rngs={"dropout": key})


def test_key_in_the_batch():
    with refused(pg.ArgumentError, "args[1]['key']", "two arguments", "rng_argnums=2"):
        call(lambda w, b: loss(w, b["x"]), (W, {"x": X, "key": KEY}))
    # With one for every example all is well.
    keys = jax.random.split(KEY, 3)
    _, grads = call(lambda w, b: loss(w, b["x"]), (W, {"x": X, "key": keys}))
    np.testing.assert_array_equal(grads, call()[1])


def test_batch_of_the_enclosing_scope():
    words = ["batch_argnums=1", "1 positional argument", "make the batch an argument"]
    for make in FUNCTIONS.values():
        with refused(pg.ArgumentError, *words, "def loss_fn(params, batch)", "stats_fn(params, batch)"):
            make(lambda w: loss(w, X))(W)


# What the loss takes from the scope around it.


def from_outside(labels):
    def fun(w, x):
        return jnp.mean(jnp.square(x @ w - labels))

    return fun


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_part_of_the_batch_from_outside(make):
    words = ["int32", "(3,)", "scope around it", "test_errors.py", "batch_argnums", "shared_argnums"]
    with refused(pg.ArgumentError, *words):
        make(from_outside(jnp.asarray(LABELS, jnp.int32)))(W, X)


def test_part_of_the_batch_from_outside_under_jit():
    def step(w, x, y):
        return pg.grad_stats(from_outside(y), pg.Norm())(w, x)

    with refused(pg.ArgumentError, "scope around it", "test_errors.py", "batch_argnums"):
        jax.jit(step)(W, X, jnp.asarray(LABELS))


def test_arrays_from_outside_that_are_as_long_as_the_batch():
    """They are right if the loss takes any number of examples, or one alone, or if they are named."""
    square, x = jnp.ones((2, 2)), X[:2]
    call(lambda w, x: loss(square @ w, x), (W, x))
    call(lambda w, x: jnp.sum(square @ w * x.reshape(2)), (W, x))
    call(lambda w, x, y: from_outside(y)(w, x), (W, X, LABELS * 1.0), shared_argnums=2)


def drawn(key, w, x):
    return loss(w, x * jax.random.normal(key, x.shape))


def drawn_in_a_loop(key, w, x):
    def step(x, key):
        return x + jax.random.normal(key, x.shape), None

    return loss(w, jax.lax.scan(step, x, jax.random.split(key, 2))[0])


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0)], ids=["typed", "raw"])
@pytest.mark.parametrize("fun", [drawn, drawn_in_a_loop])
def test_key_from_outside(fun, key):
    words = ["PRNG key", "scope around it", "test_errors.py", "rng_argnums=2", "shared_argnums=2"]
    with refused(pg.ArgumentError, *words):
        call(lambda w, x: fun(key, w, x))
    with refused(pg.ArgumentError, *words):
        jax.jit(lambda key: call(lambda w, x: fun(key, w, x)))(key)
    call(lambda w, x, key: fun(key, w, x), (W, X, key), shared_argnums=2)


def test_key_from_outside_into_which_a_number_of_the_example_is_folded():
    def fun(w, x, number):
        return drawn(jax.random.fold_in(KEY, number[0]), w, x)

    call(fun, (W, X, jnp.arange(3)), batch_argnums=(1, 2))
    call(
        lambda w, x, number: drawn_in_a_loop(jax.random.fold_in(KEY, number[0]), w, x),
        (W, X, jnp.arange(3)),
        batch_argnums=(1, 2),
    )


# Options.


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "big", (2,)])
def test_microbatch_size(size):
    with refused(pg.ArgumentError, "microbatch_size", "at least 1", "'auto'", repr(size)):
        call(microbatch_size=size)


@pytest.mark.parametrize("name", ["fastest", "streamed:0", "streamed:", "streamed:many", "summed:2"])
def test_unknown_strategy(name):
    with refused(pg.ArgumentError, "strategy", "auto", "materialise", "'streamed:4'", f"{name!r}"):
        call(strategy=name)


@pytest.mark.parametrize("name", [3, (), ("data", 2), True])
def test_axis_name(name):
    with refused(pg.ArgumentError, "spmd_axis_name", "mesh axis", repr(name)):
        call(spmd_axis_name=name)


def test_axis_named_twice():
    with refused(pg.ArgumentError, "spmd_axis_name", "twice"):
        call(spmd_axis_name=("data", "data"))


def test_no_mesh():
    with refused(pg.ArgumentError, "spmd_axis_name='data'", "jax.set_mesh"):
        call(spmd_axis_name="data")


@pytest.mark.parametrize("make", [pg.value_and_stats, pg.grad_stats, pg.explain])
def test_unknown_option(make):
    with pytest.raises(TypeError, match="bath_argnums"):
        make(loss, pg.Mean(), bath_argnums=1)


def test_unknown_option_of_check():
    with pytest.raises(TypeError, match="bath_argnums"):
        pg.check(loss, bath_argnums=1)


# Statistics.


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        (pg.Mean, ["stats", "pg.Mean()", "parentheses"]),
        ({"a": pg.Mean(), "b": [pg.Count(), pg.Variance]}, ["stats['b'][1]", "pg.Variance()"]),
        (jnp.square, ["stats must be a statistic", "square"]),
        ({"m": {"v": "variance"}}, ["stats['m']['v']", "'variance'"]),
        ((pg.Mean(), 1.0), ["stats[1]", "1.0"]),
    ],
)
def test_not_a_statistic(stats, words):
    with refused(pg.ArgumentError, *words):
        call(stats=stats)


@pytest.mark.parametrize("stats", [{}, [], (), {"a": {}}])
def test_no_statistics(stats):
    with refused(pg.ArgumentError, "stats is empty", "pg.Mean()"):
        pg.value_and_stats(loss, stats)
    with refused(pg.ArgumentError, "stats is empty"):
        pg.value_and_stats(loss, None)


@pytest.mark.parametrize("per", [0, -2, 1.5, True, None, "batch", "Token", (2,)])
@pytest.mark.parametrize("make", [pg.Mean, pg.Variance])
def test_unit(make, per):
    with refused(pg.ArgumentError, "per", repr(per), "'example'", "'token'"):
        make(per=per)


@pytest.mark.parametrize("make", [pg.Mean, pg.Variance])
def test_groups_that_do_not_divide_the_batch(make):
    for per in (2, 4):
        with refused(pg.ArgumentError, f"per={per}", "3"):
            call(stats=[pg.Mean(), make(per=per)])
        with refused(pg.ArgumentError, f"per={per}", "3"):
            jax.jit(lambda x, per=per: call(args=(W, x), stats=make(per=per)))(X)


def test_variance_of_one_group():
    words = ["Variance", "more than one group of 3"]
    with refused(pg.ArgumentError, *words):
        call(stats=pg.Variance(per=3))
    with refused(pg.ArgumentError, *words):
        jax.jit(lambda x: call(args=(W, x), stats=pg.Variance(per=3)))(X)
    two = jnp.concatenate([X, X + 1])
    with refused(pg.ArgumentError, *words):
        call(args=(W, two), stats=pg.Variance(per=3), weights=np.array([1, 1, 1, 0, 0, 0]))
    call(args=(W, two), stats=pg.Variance(per=3))
    call(stats=pg.Mean(jnp.square, per=3))  # A mean of one group is fine.


@pytest.mark.parametrize("by", ["layer", "All", None, 0, ("all",)])
def test_by(by):
    for make in (pg.Norm, lambda by: pg.ClippedMean(1.0, by=by)):
        with refused(pg.ArgumentError, "by", "'all'", "'leaf'", repr(by)):
            make(by=by)


@pytest.mark.parametrize("max_norm", [-1, -1e-9, float("-inf"), float("nan"), "1", True, 1j, (1.0,)])
def test_max_norm(max_norm):
    for by in ("all", "leaf"):
        with refused(pg.ArgumentError, "max_norm", repr(max_norm)):
            pg.ClippedMean(max_norm, by=by)


@pytest.mark.parametrize("make", [pg.Norm, lambda where: pg.Norm(by="leaf", where=where), pg.Gram])
def test_where_selects_nothing(make):
    name = "Gram" if make is pg.Gram else "Norm"
    params = {"w": W, "b": jnp.ones(1)}
    with refused(pg.ArgumentError, name, "where", "['w']"):
        call(lambda p, x: loss(p["w"], x), (params, X), make(where=lambda path: "table" in path))


@pytest.mark.parametrize("make", [pg.Norm, pg.Gram])
def test_where_is_not_a_function(make):
    with refused(pg.ArgumentError, "where must be a function", "'w'"):
        make(where="w")


# Directions.


def dots(direction, params=W, argnums=0, **more):
    stats_fn = pg.grad_stats(lambda p, x: loss(jax.tree.leaves(p)[0], x), pg.Dot(), argnums)
    return stats_fn(params, X, direction=direction, **more)


def test_no_direction():
    for more in ({}, {"direction": None}):
        with refused(pg.ArgumentError, "Dot", "direction"):
            pg.grad_stats(loss, [pg.Mean(), pg.Dot()])(W, X, **more)


@pytest.mark.parametrize(
    ("direction", "params"),
    [
        (W, {"w": W}),
        ({"w": W}, W),
        ({"w": W}, {"w": W, "b": W}),
        ({"w": W, "b": W}, {"w": W}),
        ((W,), W),
        ([W], (W,)),
    ],
)
def test_direction_of_another_tree(direction, params):
    with refused(pg.ArgumentError, "direction"):
        dots(direction, params)


def test_direction_of_the_wrong_shape():
    for wrong in (jnp.ones(3), jnp.ones((2, 1)), jnp.ones((0, 2)), jnp.ones((3, 1, 2))):
        with refused(pg.ArgumentError, "direction", str(wrong.shape), "(2,)"):
            dots(wrong)
    with refused(pg.ArgumentError, "direction", "(2,)"):
        dots(1.0)
    with refused(pg.ArgumentError, "direction", "['b']", "(3,)", "(2,)"):
        dots({"a": W, "b": jnp.ones(3)}, {"a": W, "b": W})
    for several in (
        {"a": W[None], "b": W},
        {"a": W, "b": W[None]},
        {"a": W[None], "b": jnp.ones((2, 2))},
    ):
        with refused(pg.ArgumentError, "direction", "['b']", "one more axis in front"):
            dots(several, {"a": W, "b": W})


def test_direction_for_two_arguments():
    def fun(w, x, v):
        return loss(w, x) + loss(v, x)

    stats_fn = pg.grad_stats(fun, pg.Dot(), (0, 2))
    for wrong in (W, (W,), (W, W, W), (W, jnp.ones(3))):
        with refused(pg.ArgumentError, "direction"):
            stats_fn(W, X, W, direction=wrong)
    stats_fn(W, X, W, direction=(W, W))


def test_direction_that_nothing_takes_goes_to_the_loss():
    with pytest.raises(TypeError, match="direction"):
        pg.grad_stats(loss, pg.Norm())(W, X, direction=W)


# Functions of gradients.


def test_phi():
    with refused(pg.ArgumentError, "phi must be an elementwise function", "jnp.square", "2"):
        pg.Mean(2)
    with refused(pg.ArgumentError, "elementwise", "(2,)", "()", "pg.Fold"):
        call(stats=pg.Mean(jnp.sum), strategy="streamed")


@pytest.mark.parametrize("strategy", ["auto", "materialise", "streamed", "factored", "sparse"])
@pytest.mark.parametrize(
    "phi", [jnp.sum, lambda g: g[..., :1], lambda g: g[None], lambda g: 1.0, jnp.linalg.norm]
)
def test_phi_that_is_not_elementwise(phi, strategy):
    with refused(pg.ArgumentError, "phi must be elementwise", "pg.Fold"):
        call(stats=pg.Mean(phi), strategy=strategy)


@pytest.mark.parametrize("p", [0, -1, -0.5, "x", True, None, 1j, float("inf"), float("nan")])
def test_power(p):
    with refused(pg.ArgumentError, "power", "positive", repr(p)):
        pg.power(p)


@pytest.mark.parametrize("strategy", ["auto", "materialise", "streamed"])
@pytest.mark.parametrize(
    "update",
    [
        lambda s, g: g[None],
        lambda s, g: jnp.sum(g),
        lambda s, g: (s, g),
        lambda s, g: (s + g).astype(jnp.float16),
        lambda s, g: None,
    ],
    ids=["axis", "scalar", "tree", "dtype", "none"],
)
def test_fold_that_changes_its_state(update, strategy):
    with refused(pg.ArgumentError, "Fold", "update", "init", "shapes"):
        call(stats=pg.Fold(jnp.zeros_like, update), strategy=strategy)


def test_fold_needs_functions():
    with refused(pg.ArgumentError, "Fold", "init must be a function"):
        pg.Fold(0.0, jnp.add)
    with refused(pg.ArgumentError, "Fold", "update must be a function"):
        pg.Fold(jnp.zeros_like, None)
    with refused(pg.ArgumentError, "Fold", "finish must be a function"):
        pg.Fold(jnp.zeros_like, jnp.add, 1)


# Weights.


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (jnp.ones(2), ["shape (3,)", "(2,)"]),
        (jnp.ones((3, 1)), ["shape (3,)", "(3, 1)"]),
        (1.0, ["shape (3,)", "()"]),
        ([1.0, -1.0, 1.0], ["at least 0"]),
        ([1.0, np.nan, 1.0], ["finite"]),
        ([1.0, np.inf, 1.0], ["finite"]),
        ([0, 0, 0], ["all 0"]),
    ],
)
def test_weights(weights, words):
    with refused(pg.ArgumentError, "example_weights", *words):
        call(weights=weights if isinstance(weights, float) else np.asarray(weights))


def test_weights_of_the_wrong_shape_under_jit():
    with refused(pg.ArgumentError, "example_weights", "shape (3,)"):
        jax.jit(lambda w: call(weights=w))(jnp.ones(4))


def test_variance_of_one_example():
    words = ["Variance", "more than one example", "larger batch"]
    with refused(pg.ArgumentError, *words):
        call(args=(W, X[:1]), stats={"v": pg.Variance()})
    with refused(pg.ArgumentError, *words):
        jax.jit(lambda x: call(args=(W, x), stats={"v": pg.Variance()}))(X[:1])
    for weights in ([0, 1, 0], [0.5, 0.25, 0.25]):
        with refused(pg.ArgumentError, *words, "counts 1"):
            call(stats=[pg.Mean(), pg.Variance()], weights=np.array(weights))
    call(weights=np.array([0, 1, 0]))  # A mean of one is fine.


@pytest.mark.parametrize("strategy", ["materialise", "streamed"])
def test_variance_of_one_example_under_jit_is_nan(strategy):
    stats_fn = jax.jit(pg.grad_stats(loss, [pg.Variance(), pg.Mean()], strategy=strategy))
    variance, mean = stats_fn(W, X, example_weights=jnp.array([0.0, 1.0, 0.0]))
    assert np.all(np.isnan(variance))
    assert np.all(np.isfinite(mean))


def test_all_weights_zero_under_jit_is_nan():
    value, stats = jax.jit(pg.value_and_stats(loss, [pg.Mean(), pg.Mean(jnp.square)]))(
        W, X, example_weights=jnp.zeros(3)
    )
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves([value, stats]))
