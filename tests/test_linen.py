"""`pergrad.linen.TrainState`, with models of Flax linen."""

import doctest
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pergrad as pg
from tests.support import pages

linen = pytest.importorskip("flax.linen")
train_state = pytest.importorskip("flax.training.train_state")
state_module = pytest.importorskip("pergrad.linen")

OPTIMIZERS = {
    "micro_adam": lambda: pg.optim.micro_adam(1e-2),
    "micro_adam_var": lambda: pg.optim.micro_adam_var(1e-2, weight_decay=0.1),
    "multi_steps": lambda: pg.optim.multi_steps(pg.optim.micro_adam(1e-2), 2),
    "clipped": lambda: pg.optim.clipped(pg.optim.micro_sign_sgd(1e-2), 0.1),
    "optax": lambda: optax.adam(1e-2),
}


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm()(linen.Dense(8)(x))
        return linen.Dense(2)(linen.tanh(x))


@pytest.fixture(autouse=True)
def as_for_users():
    with pages.jax_as_for_users():
        yield


def begun(tx: Any, kind: Any = state_module.TrainState, **more: Any) -> tuple[Any, Any, Any]:
    """A state, the loss of its model, and a batch."""
    model = Net()
    x = jax.random.normal(jax.random.key(0), (6, 3))
    params = model.init(jax.random.key(1), x)["params"]

    def loss(params, batch):
        x, y = batch
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    state = kind.create(apply_fn=model.apply, params=params, tx=tx, **more)
    return state, loss, (x, jnp.sin(x[:, :2]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_goes_the_way_of_its_optimizer(name):
    tx = OPTIMIZERS[name]()
    state, loss, batch = begun(tx)
    stats_fn = pg.value_and_stats(loss, getattr(tx, "stats", {"mean": pg.Mean()}))

    @jax.jit
    def step(state, batch):
        value, stats = stats_fn(state.params, batch)
        return state.apply_gradients(grads=stats["mean"], stats=stats), value

    params, opt_state = state.params, state.opt_state
    tx = optax.with_extra_args_support(tx)
    for _ in range(3):
        state, _ = step(state, batch)
        _, stats = stats_fn(params, batch)
        updates, opt_state = tx.update(stats["mean"], opt_state, params, stats=stats)
        params = optax.apply_updates(params, updates)
    assert state.step == 3 and isinstance(state, state_module.TrainState)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (state.params, state.opt_state), (params, opt_state))


def test_without_statistics_it_is_the_state_of_flax():
    ours, loss, batch = begun(optax.adam(1e-2))
    theirs, _, _ = begun(optax.adam(1e-2), train_state.TrainState)
    gradient = jax.grad(loss)(ours.params, batch)
    ours, theirs = (state.apply_gradients(grads=gradient) for state in (ours, theirs))
    jax.tree.map(np.testing.assert_array_equal, (ours.step, ours.params), (theirs.step, theirs.params))


def test_a_statistic_that_is_missing_is_named():
    state, loss, batch = begun(pg.optim.micro_adam(1e-2))
    mean = pg.grad_stats(loss, {"mean": pg.Mean()})(state.params, batch)
    for given in (None, mean):
        with pytest.raises(pg.ArgumentError, match="second_moment"):
            state.apply_gradients(grads=mean["mean"], stats=given)


def test_a_subclass_has_fields_of_its_own():
    class WithKey(state_module.TrainState):
        key: Any

    tx = pg.optim.micro_adam(1e-2)
    state, loss, batch = begun(tx, WithKey, key=jnp.uint32(0))
    stats = pg.grad_stats(loss, tx.stats)(state.params, batch)
    state = state.apply_gradients(grads=stats["mean"], stats=stats, key=jnp.uint32(1))
    assert isinstance(state, WithKey) and state.key == 1 and state.step == 1


def test_docstring():
    finder = doctest.DocTestFinder(exclude_empty=True)
    globs = {"pg": pg, "jnp": jnp, "TrainState": state_module.TrainState}
    (test,) = (t for t in finder.find(state_module.TrainState, globs=globs) if t.examples)
    assert not doctest.DocTestRunner().run(test).failed
