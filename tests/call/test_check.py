"""`pg.check` accepts means over examples, and says why another loss is none."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from tests.support import oracle
from tests.support.cases import array
from tests.support.every_case import CASES
from tests.support.truth import in_mixed_precision

DTYPES = [jnp.float64, jnp.float32, jnp.bfloat16]
MIXED = "mixed"  # float32 parameters of a model that computes in bfloat16


def name_of(dtype):
    return dtype if dtype == MIXED else dtype.__name__


def in_precision(fun, params, batch, dtype):
    """A loss and its arguments in one of the dtypes above, or mixed."""
    own, inside = (jnp.float32, jnp.bfloat16) if dtype == MIXED else (dtype, dtype)
    params, batch = (
        jax.tree.map(lambda x, t=t: x.astype(t), tree) for tree, t in ((params, own), (batch, inside))
    )
    if dtype != MIXED:
        return fun, params, batch

    def mixed(p, b):
        return fun(jax.tree.map(lambda x: x.astype(inside), p), b).astype(jnp.float32)

    return mixed, params, batch


def rejected(*words):
    pattern = "(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words)
    return pytest.raises(pg.NotPerExampleError, match=pattern)


def line_of(fun, text):
    """`file.py:12`: where `fun` has the line with this text."""
    lines, start = inspect.getsourcelines(fun)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_check.py:{start + offset}"


@pytest.fixture
def params():
    r = np.random.default_rng(0)
    return {"w": array(r.normal(size=(3, 4))), "v": array(r.normal(size=(4, 2)))}


@pytest.fixture
def batch():
    r = np.random.default_rng(1)
    return {"x": array(r.normal(size=(6, 3))), "y": array(r.normal(size=(6, 2)))}


def predict(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


def squared_error(p, batch):
    return jnp.mean(jnp.square(predict(p, batch["x"]) - batch["y"]))


# Accepted.


@pytest.mark.parametrize("dtype", [*DTYPES, MIXED], ids=name_of)
@pytest.mark.parametrize(
    "name", ["mlp", "transformer", "transformer_scanned", "with_aux", "two_argnums", "regularised"]
)
def test_good_loss(name, dtype):
    (case,) = [case for case in CASES if case.name == name]
    loss, args = case.loss, case.make_args(jnp.bfloat16 if dtype == MIXED else dtype)
    if dtype == MIXED:
        loss, args = in_mixed_precision(case, loss, args)
    check = pg.check(loss, case.argnums, batch_argnums=case.batch_argnums, has_aux=case.has_aux)
    assert check(*args) is None


def test_a_layer_that_casts_its_parameters(params, batch):
    # As Flax does with `dtype=jnp.bfloat16`; here in the step of a loop, which has all of bfloat16.
    def fun(p, b):
        def step(h, w):
            return jnp.tanh(h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32), None

        h, _ = jax.lax.scan(step, b["x"], p)
        return jnp.mean(jnp.square(h - b["y"]))

    r = np.random.default_rng(0)
    p = array(r.normal(size=(3, 5, 5)), jnp.float32)
    x, y = (array(r.normal(size=(16, 5)), jnp.float32) for _ in range(2))
    pg.check(fun)(p, {"x": x, "y": y})
    with rejected():
        pg.check(lambda p, b: 1.2 ** (b["x"].shape[0] - 1) * fun(p, b))(p, {"x": x, "y": y})


def test_half_precision_data_do_not_make_a_float32_model_coarse(params, batch):
    def almost(p, b):
        b = jax.tree.map(lambda x: x.astype(jnp.float32), b)
        return squared_error(p, b) * (1 + 1e-2 * (b["x"].shape[0] - 1))

    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    with rejected():
        pg.check(almost)(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch))


def test_batch_in_two_arguments_and_a_list_of_argnums():
    def fun(x, p, y, *, scale):
        return scale * jnp.mean(jnp.square(predict(p, x) - y))

    r = np.random.default_rng(0)
    p = {"w": array(r.normal(size=(3, 4))), "v": array(r.normal(size=(4, 2)))}
    x, y = array(r.normal(size=(5, 3))), array(r.normal(size=(5, 2)))
    pg.check(fun, 1, batch_argnums=(0, 2))(x, p, y, scale=2.0)
    pg.check(fun, (1,), batch_argnums=(0, -1))(x, p, y, scale=2.0)


def test_loss_of_one_example_cannot_mix_any(params, batch):
    def fun(p, example):
        return jnp.sum(jnp.square(predict(p, example["x"]) - example["y"]))

    pg.check(fun, keep_batch_dim=False)(params, batch)


def test_zero_gradient(params, batch):
    pg.check(lambda p, b: jnp.mean(b["x"]))(params, batch)


def test_tolerance(params, batch):
    def almost(p, b):
        n = b["x"].shape[0]
        return squared_error(p, b) * (1 + 1e-3 * (n - 1))

    with rejected():
        pg.check(almost)(params, batch)
    pg.check(almost, rtol=0.1)(params, batch)


# Rejected.


@pytest.mark.parametrize("dtype", [*DTYPES, MIXED], ids=name_of)
def test_sum_in_place_of_a_mean(params, batch, dtype):
    def summed(p, b):
        return jnp.sum(jnp.square(predict(p, b["x"]) - b["y"]))

    summed, params, batch = in_precision(summed, params, batch, dtype)
    with rejected("batch of 6", "['w']", "6 times as large", "sum over the examples", "jnp.mean"):
        pg.check(summed)(params, batch)


def batch_norm_loss(p, batch):
    h = batch["x"] @ p["w"]
    centre = jnp.mean(h, axis=0, keepdims=True)
    h = h - centre
    return jnp.mean(jnp.square(jnp.tanh(h) @ p["v"] - batch["y"]))


def variance_norm_loss(p, batch):
    h = batch["x"] @ p["w"]
    h = h / jnp.sqrt(1 + jnp.mean(jnp.square(h), axis=0, keepdims=True))
    return jnp.mean(jnp.square(h @ p["v"] - batch["y"]))


def contrastive_loss(p, batch):
    h = predict(p, batch["x"])
    similarity = h @ batch["y"].T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(similarity)))


def balancing_loss(p, batch):
    probabilities = jax.nn.softmax(predict(p, batch["x"]))
    fraction = jnp.mean(jax.nn.sigmoid(batch["y"]), axis=0)
    return squared_error(p, batch) + jnp.sum(fraction * jnp.mean(probabilities, axis=0))


def total_norm_loss(p, batch):
    return jnp.sqrt(squared_error(p, batch))


@pytest.mark.parametrize("dtype", [*DTYPES, MIXED], ids=name_of)
@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (batch_norm_loss, "jnp.mean(h,"),
        (variance_norm_loss, "jnp.mean(jnp.square(h),"),
        (contrastive_loss, "h @ batch"),
    ],
)
def test_examples_that_meet(params, batch, fun, text, dtype):
    words = ["influence each other", line_of(fun, text), "batch norm", "contrastive", "layer norm"]
    fun, params, batch = in_precision(fun, params, batch, dtype)
    with rejected(*words):
        pg.check(fun)(params, batch)


@pytest.mark.parametrize("fun", [balancing_loss, total_norm_loss])
def test_functions_of_batch_means(params, batch, fun):
    # The means over the batch are not used by examples again, so no line is the culprit.
    with rejected("influence each other", "balancing"):
        pg.check(fun)(params, batch)


def ragged(p, batch):
    error = jnp.mean(jnp.square(predict(p, batch["x"]) - batch["y"]), axis=-1)
    return jnp.sum(error * batch["mask"]) / jnp.sum(batch["mask"])


@pytest.fixture
def sequences():
    r = np.random.default_rng(2)
    mask = np.arange(7)[None] < np.array([7, 1, 3, 5])[:, None]
    x, y = r.normal(size=(4, 7, 3)), r.normal(size=(4, 7, 2))
    return {"x": array(x), "y": array(y), "mask": array(mask, float)}


@pytest.mark.parametrize("dtype", [*DTYPES, MIXED], ids=name_of)
def test_mean_over_all_tokens(params, sequences, dtype):
    fun, params, sequences = in_precision(ragged, params, sequences, dtype)
    counts = "between 0.2" if dtype in (jnp.bfloat16, MIXED) else "between 0.25 and 1.75"
    with rejected("weighted mean", counts, "tokens", "example_weights"):
        pg.check(fun)(params, sequences)


def test_token_counts_as_weights_give_the_gradient_of_the_mean_over_all_tokens(params, sequences):
    tokens = jnp.sum(sequences["mask"], axis=1)
    value, stats = pg.value_and_stats(ragged, {"mean": pg.Mean(), "square": pg.Mean(jnp.square)})(
        params, sequences, example_weights=tokens
    )
    whole, gradient = jax.value_and_grad(ragged)(params, sequences)
    _, _, each = oracle.per_example(ragged, (params, sequences))
    np.testing.assert_allclose(value, whole, rtol=1e-12)
    square = oracle.mean_of(np.square, each, tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), stats["mean"], gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), stats["square"], square)


def test_losses_that_differ_where_gradients_do_not(params, batch):
    def fun(p, b):
        return squared_error(p, b) + jnp.sum(b["y"])

    with rejected("the losses differ"):
        pg.check(fun)(params, batch)


def test_batch_size_in_the_loss(params, batch):
    def fun(p, b):
        return squared_error(p, b) / b["x"].shape[0]

    with rejected("the mean of the per-example gradients is not the gradient"):
        pg.check(fun)(params, batch)


def test_loss_that_insists_on_its_batch_size(params, batch):
    # The line cannot be found, since the loss cannot be traced for another batch.
    def fun(p, b):
        h = b["x"] @ p["w"]
        if h.shape[0] not in (1, 6):
            raise ValueError("one or six")
        return jnp.mean(jnp.square(jnp.tanh(h - jnp.mean(h, axis=0)[None]) @ p["v"] - b["y"]))

    with rejected("influence each other"):
        pg.check(fun)(params, batch)


def test_arrays_of_the_batch_that_are_not_split(params, batch):
    def shared(p, x, y):
        return jnp.mean(jnp.square(predict(p, x) - y))

    with rejected("(6, 2)", "as long as the batch", "make it an argument", "batch_argnums") as error:
        pg.check(shared, shared_argnums=2)(params, batch["x"], batch["y"])
    assert "norm" not in str(error.value)


def test_with_aux(params, batch):
    with rejected("influence each other"):
        pg.check(lambda p, b: (batch_norm_loss(p, b), b), has_aux=True)(params, batch)


# Refused.


def test_batch_of_one(params, batch):
    with pytest.raises(pg.ArgumentError, match="at least two examples"):
        pg.check(squared_error)(params, jax.tree.map(lambda x: x[:1], batch))


def test_randomness():
    with pytest.raises(pg.ArgumentError, match=r"(?s)random.*deterministic.*rng_argnums"):
        pg.check(lambda p, b, key: squared_error(p, b), rng_argnums=2)


def test_bad_arguments_are_named(params, batch):
    with pytest.raises(pg.ArgumentError, match="scalar"):
        pg.check(lambda p, b: predict(p, b["x"]))(params, batch)
    with pytest.raises(pg.ArgumentError, match=r"\['y'\]: 3"):
        pg.check(squared_error)(params, batch | {"y": batch["y"][:3]})


def test_a_gradient_that_is_zero_but_for_rounding():
    # Softmax does not change if all logits do: what is left of the bias's gradient is rounding.
    def loss(p, x):
        return jnp.mean(jnp.sum(jax.nn.softmax(x @ p["w"] + p["b"][None]) * jnp.arange(8.0)[None], -1))

    p = {
        "w": jax.random.normal(jax.random.key(0), (5, 8), jnp.float32),
        "b": jnp.full(1, 0.3, jnp.float32),
    }
    pg.check(loss)(p, jax.random.normal(jax.random.key(1), (6, 5), jnp.float32))


@pytest.mark.parametrize(
    "function, p, message",
    [
        (jnp.log, -1.0, "the loss of these examples is NaN"),
        (jnp.sqrt, 0.0, "the gradient of args\\[0\\] is NaN or infinite"),
    ],
)
def test_nothing_to_compare(function, p, message):
    with pytest.raises(pg.ArgumentError, match=message):
        pg.check(lambda p, x: jnp.mean(function(x @ p)))(jnp.full(30, p), jnp.ones((6, 30)))
