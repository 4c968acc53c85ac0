"""Training scripts of the field, small: their losses meet the oracle, and their habits are understood.

A habit that would give wrong numbers is refused with the line to write.
"""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pergrad as pg
from tests.support import integrations, oracle
from tests.support.bounds import ERROR, STATISTICS, assert_agrees
from tests.support.cases import in_float64
from tests.support.integrations import INTEGRATIONS, Integration
from tests.support.truth import Truth
from tests.support.whole import Questions

ELEMENTWISE = {name: STATISTICS[name] for name in ("mean", "square", "variance")}
WHOLE = ("norm", "clipped")
STATS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)}


@pytest.fixture(autouse=True)
def frameworks_promote_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def refused(error, *words):
    """The block must raise `error`, with all these words in its message."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))


# The right way.


@functools.cache
def case_of(make) -> Integration:
    case = make(jnp.float64)
    return dataclasses.replace(case, args=in_float64(case.args))


@functools.cache
def truth_of(make) -> Truth:
    case = case_of(make)
    return Truth(*oracle.per_example(case.loss, case.args, **case.roles))


def assert_statistics(case, truth, error):
    """Asks for everything in one program, with the weights that the loss of the whole batch has."""
    with_path = jax.tree_util.tree_leaves_with_path(truth.grads)
    questions = Questions(truth, [jax.tree_util.keystr(path) for path, _ in with_path])
    stats = ELEMENTWISE | {name: questions.statistics[name] for name in WHOLE}
    stats_fn = jax.jit(pg.value_and_stats(case.loss, stats, **case.roles))
    value, results = stats_fn(*case.args, example_weights=case.weights)
    assert jax.tree.structure(results["mean"]) == jax.tree.structure(case.args[0])
    elementwise = {name: results[name] for name in ELEMENTWISE}
    assert_agrees((value, elementwise), truth, case.weights, error)
    questions.assert_agrees({name: results[name] for name in WHOLE}, {}, case.weights, error)
    return results


def assert_close(tree, truth, rtol=1e-9):
    compare = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=rtol)
    jax.tree.map(compare, tree, truth)


@pytest.mark.parametrize("make", INTEGRATIONS, ids=lambda make: make.__name__)
def test_statistics(make):
    case, truth = case_of(make), truth_of(make)
    results = assert_statistics(case, truth, ERROR["float64"])
    if not case.is_random:
        # With these weights the mean is the gradient that the script trains with.
        has_aux = case.roles.get("has_aux", False)
        grads = jax.jit(jax.grad(case.loss, has_aux=has_aux))(*case.args)
        assert_close(results["mean"], grads[0] if has_aux else grads)


@pytest.mark.parametrize(
    "make", [integrations.nanodo, integrations.flax_lm1b], ids=lambda make: make.__name__
)
def test_half_precision(make):
    assert_statistics(make(jnp.bfloat16), truth_of(make), ERROR["bfloat16"])


# `check`: a mean over examples passes, a mean over all tokens is called by its name.

nanolm_without_dropout = functools.partial(integrations.optax_nanolm, deterministic=True)
lm1b_without_dropout = functools.partial(integrations.flax_lm1b, deterministic=True)


@pytest.mark.parametrize(
    "make",
    [
        integrations.flax_mnist,
        integrations.equinox_rnn,
        nanolm_without_dropout,
        integrations.optax_adversarial,
    ],
    ids=["flax_mnist", "equinox_rnn", "optax_nanolm", "optax_adversarial"],
)
def test_check_accepts(make):
    case = make(jnp.float32)
    pg.check(case.loss, **case.roles)(*case.args)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(integrations.nanodo, jnp.float32), (lm1b_without_dropout, jnp.bfloat16)],
    ids=["nanodo", "flax_lm1b"],
)
def test_check_of_a_mean_over_all_tokens(make, dtype):
    case = make(dtype)
    params, batch, *keys = case.args
    with refused(pg.NotPerExampleError, "weighted mean", "tokens", "example_weights"):
        pg.check(case.loss, **case.roles)(*case.args)
    # Without padding every sequence has as many tokens as any other, and it is a mean over examples.
    full = jax.tree.map(lambda x: np.maximum(x, 1), batch)
    pg.check(case.loss, **case.roles)(params, full, *keys)


# A batch, or a part of it, or a key, that the loss takes from the scope around it.


def closed_over_by_nanodo():
    case = integrations.nanodo(jnp.float32)
    params, in_BT = case.args
    model = integrations.nanodo_model(integrations.DoConfig(jnp.float32))
    return pg.value_and_stats, integrations.nanodo_loss_factory(in_BT, model.apply), params


def closed_over_by_lm1b():
    params, *rest = (case := integrations.flax_lm1b(jnp.float32)).args
    return pg.value_and_stats, lambda params: case.loss(params, *rest), params


def closed_over_by_gemma():
    module, batch = integrations.gemma_module(), integrations.gemma_batch()
    importlib.import_module("pergrad.nnx")
    return pg.nnx.value_and_stats, lambda model: integrations.gemma_loss(model, batch), module


@pytest.mark.parametrize("make", [closed_over_by_nanodo, closed_over_by_lm1b, closed_over_by_gemma])
def test_closed_over_batch(make):
    value_and_stats, loss, params = make()
    stats_fn = value_and_stats(loss, STATS, has_aux=True)
    with refused(pg.ArgumentError, "batch_argnums=1", "def loss_fn(params, batch)", "scope around it"):
        stats_fn(params)


def test_weights_that_are_computed_outside_of_the_loss():
    # The batch is an argument, as it must be, and the weights of all its tokens are still closed over.
    params, in_BT = integrations.nanodo(jnp.float32).args
    model = integrations.nanodo_model(integrations.DoConfig(jnp.float32))
    weights_BT = (in_BT > 0).astype(np.float32)

    def loss(params, in_BT):
        logits = model.apply({"params": params}, in_BT)
        losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits, in_BT)
        return jnp.sum(losses_BT * weights_BT) / weights_BT.sum()

    for make in (pg.check, lambda loss: pg.value_and_stats(loss, STATS)):
        with refused(pg.ArgumentError, "shape (6, 8)", "scope around it", "batch_argnums"):
            make(loss)(params, in_BT)


def test_key_of_the_scope_around_the_loss():
    case = integrations.flax_lm1b(jnp.float32)
    params, batch, key = case.args

    def loss(params, batch):
        return case.loss(params, batch, key)

    for make in (pg.check, lambda loss, **options: pg.value_and_stats(loss, STATS, **options)):
        with refused(pg.ArgumentError, "PRNG key", "scope around it", "same numbers", "rng_argnums"):
            make(loss, has_aux=True)(params, batch)


# Arguments whose roles are forgotten.


@pytest.mark.parametrize(
    "make",
    [integrations.flax_mnist, integrations.equinox_rnn, nanolm_without_dropout],
    ids=["flax_mnist", "equinox_rnn", "optax_nanolm"],
)
def test_labels_without_a_role(make):
    case = make(jnp.float32)
    roles = {name: role for name, role in case.roles.items() if name != "batch_argnums"}
    with refused(pg.ArgumentError, "args[2]", "batch_argnums=(1, 2)"):
        pg.value_and_stats(case.loss, STATS, **roles)(*case.args)


@pytest.mark.parametrize("make", [integrations.flax_lm1b, integrations.optax_nanolm])
def test_dropout_key_without_a_role(make):
    case = make(jnp.float32)
    roles = {name: role for name, role in case.roles.items() if name != "rng_argnums"}
    with refused(pg.ArgumentError, "PRNG key", f"rng_argnums={len(case.args) - 1}"):
        pg.value_and_stats(case.loss, STATS, **roles)(*case.args)


def test_dropout_key_by_keyword():
    case = integrations.flax_lm1b(jnp.float32)
    params, batch, key = case.args

    def loss(params, batch, *, rngs):
        return case.loss(params, batch, rngs["dropout"])

    with refused(pg.ArgumentError, "rngs['dropout']", "by position", "rng_argnums=2"):
        pg.value_and_stats(loss, STATS, has_aux=True)(params, batch, rngs={"dropout": key})


def test_one_key_for_each_example():
    # Equinox's examples split the key before the loss: the keys then belong to the examples.
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(integrations.vit_module(), eqx.is_inexact_array)
    images, labels = integrations.images()
    keys = jax.random.split(integrations.KEY, len(images))

    def loss(params, images, labels, keys):
        logits = jax.vmap(eqx.combine(params, static))(images, keys)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    args = params, images, labels, keys
    with refused(pg.ArgumentError, "args[3]", "batch_argnums=(1, 2, 3)"):
        pg.value_and_stats(loss, STATS, batch_argnums=(1, 2))(*args)
    pg.value_and_stats(loss, pg.Mean(), batch_argnums=(1, 2, 3))(*args)


# More than the parameters in the place of the parameters.


def test_equinox_module_that_is_not_partitioned():
    model = integrations.rnn_module()
    with refused(pg.ArgumentError, ".hidden_size", "eqx.partition(model, eqx.is_inexact_array)"):
        pg.value_and_stats(integrations.rnn_loss, STATS, batch_argnums=(1, 2))(
            model, *integrations.spirals()
        )


def test_train_state_in_the_place_of_its_parameters():
    case, state = integrations.flax_mnist(jnp.float32), integrations.mnist_state(jnp.float32)

    def loss(state, images, labels):
        return case.loss(state.params, images, labels)

    with refused(pg.ArgumentError, ".step", "args[0].params"):
        pg.value_and_stats(loss, STATS, **case.roles)(state, *integrations.images())


# Steps of training: the mean of the statistics takes the place of the gradient.


def test_step_of_a_train_state():
    case, state = integrations.flax_mnist(jnp.float32), integrations.mnist_state(jnp.float32)

    @jax.jit
    def step(state, images, labels):
        stats_fn = pg.value_and_stats(case.loss, STATS, **case.roles)
        (loss, logits), stats = stats_fn(state.params, images, labels)
        accuracy = jnp.mean(jnp.argmax(logits[:, 0], -1) == labels)
        return state.apply_gradients(grads=stats["mean"]), loss, accuracy

    images, labels = integrations.images()
    after, loss, accuracy = step(state, images, labels)
    (truth, logits), grads = jax.value_and_grad(case.loss, has_aux=True)(state.params, images, labels)
    assert_close((loss, accuracy), (truth, np.mean(np.argmax(logits, -1) == labels)), 1e-5)
    assert_close(after.params, state.apply_gradients(grads=grads).params, 1e-5)


def test_step_of_gemma():
    nnx = pytest.importorskip("flax.nnx")
    importlib.import_module("pergrad.nnx")
    modules, counts = [], np.sum(integrations.tokens() > 0, axis=1)
    stats_fn = pg.nnx.value_and_stats(integrations.gemma_loss, STATS, has_aux=True)

    def mean(model, batch):
        return stats_fn(model, batch, example_weights=counts)[1]["mean"]

    for grad in (mean, lambda *args: nnx.grad(integrations.gemma_loss, has_aux=True)(*args)[0]):
        module = integrations.gemma_module()
        optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
        nnx.jit(lambda m, o, batch, grad=grad: o.update(m, grad(m, batch)))(
            module, optimizer, integrations.gemma_batch()
        )
        modules.append(nnx.state(module))
    assert_close(*modules, 1e-5)


def test_step_of_lookahead():
    case = integrations.optax_adversarial(jnp.float32)
    params, data = case.args
    tx = optax.lookahead(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 2, 0.5)
    both, stats_fn = optax.LookaheadParams.init_synced(params), pg.grad_stats(case.loss, STATS)

    @functools.partial(jax.jit, static_argnums=0)
    def step(grad_fn, both, state):
        updates, state = tx.update(grad_fn(both.fast, data), state, both)
        return optax.apply_updates(both, updates), state

    ends = []
    for grad_fn in (lambda *args: stats_fn(*args)["mean"], jax.grad(case.loss)):
        now, state = both, tx.init(both)
        for _ in range(2):
            now, state = step(grad_fn, now, state)
        ends.append(now)
    assert_close(*ends, 1e-4)


def test_boxes_that_constrain_the_sharding_of_weights():
    # Within a mesh, Flax constrains every weight that it takes out of its box.
    case = case_of(integrations.nanodo)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    stats_fn = pg.value_and_stats(case.loss, ELEMENTWISE, **case.roles)
    with jax.set_mesh(mesh):
        assert "sharding_constraint" in str(jax.make_jaxpr(case.loss)(*case.args))
        out = jax.jit(stats_fn)(*case.args, example_weights=case.weights)
    assert_agrees(out, truth_of(integrations.nanodo), case.weights, ERROR["float64"])
