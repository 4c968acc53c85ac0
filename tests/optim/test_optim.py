"""Optimizers: one suite that all of them pass, their first steps by hand, and the plane by brute force.

The truth is numpy's, from the gradients of every single example. What optax has too is compared with it.
"""

import copy
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import pergrad as pg
from tests.support import oracle
from tests.support.claims import refused

optim = pg.optim

Tree = Any

# Each with a learning rate that suits the problems below.
OPTIMIZERS: dict[str, Callable[..., optim.StatsTransformation]] = {
    "preconditioned_adam": functools.partial(
        optim.preconditioned_adam, 0.1, mean_square=1.0, variance=0.5
    ),
    "adam": functools.partial(optim.preconditioned_adam, 0.1),
    "micro_adam": functools.partial(optim.micro_adam, 0.1),
    "micro_adam_groups": functools.partial(optim.micro_adam, 0.1, per=2),
    "micro_adam_nesterov": functools.partial(optim.micro_adam, 0.1, nesterov=True),
    "micro_adam_warm": functools.partial(optim.micro_adam, 0.1, initial_second_moment=1.0),
    "adam_from_batch": functools.partial(optim.preconditioned_adam, 0.1, initial_second_moment="batch"),
    "micro_adam_var": functools.partial(optim.micro_adam_var, 0.1, max_update=1.0),
    "micro_adam_msq": functools.partial(optim.micro_adam_msq, 0.05, max_update=1.0),
    "micro_adam_msq_floor": functools.partial(optim.micro_adam_msq, 0.05, floor=1.0),
    "ada_momentum": functools.partial(optim.ada_momentum, 0.01),
    "micro_sign_sgd": functools.partial(optim.micro_sign_sgd, 0.02),
    "sign_sgd": functools.partial(optim.sign_sgd, 0.02),
    "sign_ema": functools.partial(optim.sign_ema, 0.02),
    "clipped": lambda **kwargs: optim.clipped(optim.micro_adam(0.1, **kwargs), 1.0),
    "clip_examples": lambda **kwargs: optim.clip_examples(OPTIMIZERS["micro_adam_var"](**kwargs), 1.0),
    "sign_clip_examples": lambda **kwargs: optim.clip_examples(optim.sign_ema(0.02, **kwargs), 1.0),
    "multi_steps": lambda **kwargs: optim.multi_steps(OPTIMIZERS["micro_adam_var"](**kwargs), 1),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)

B = 10
r = np.random.default_rng(0)
# Examples whose mean and median are exactly 0: they make noise, and no signal.
HALF = r.normal(size=(4, 2))
BATCH = jnp.asarray(np.concatenate([HALF, -HALF, np.zeros((2, 2))]))


def quadratic(p: Tree, x: Any) -> Any:
    """Smallest at (1, -2)."""
    pull = x @ p["w"]
    return jnp.mean(
        0.5 * jnp.sum(jnp.square(p["w"] - jnp.array([1.0, -2.0]).astype(p["w"].dtype))) + pull
    )


def rosenbrock(p: Tree, x: Any) -> Any:
    """Smallest at (1, 1), along a narrow bent valley."""
    a, b = p["w"]
    return jnp.mean(jnp.square(1 - a) + 100 * jnp.square(b - a**2) + x @ p["w"])


def train(tx: Any, loss: Any, params: Tree, steps: int, batch: Any = BATCH, decay: bool = False) -> Tree:
    """The parameters after so many steps; with `decay` steps become smaller."""
    stats_fn = pg.value_and_stats(loss, tx.stats)

    def step(carry: Any, t: Any) -> Any:
        params, state = carry
        _, stats = stats_fn(params, batch)
        updates, state = tx.update(stats["mean"], state, params, stats=stats)
        factor = 1 - t / steps if decay else 1
        updates = jax.tree.map(lambda u: (factor * u).astype(u.dtype), updates)
        return (optax.apply_updates(params, updates), state), None

    start = (params, tx.init(params))
    return jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(steps)))(start)[0][0]


# One suite for all.


@every_optimizer
def test_minimises_a_quadratic(name):
    end = train(OPTIMIZERS[name](), quadratic, {"w": jnp.zeros(2)}, 1000, decay=True)
    np.testing.assert_allclose(end["w"], [1, -2], atol=0.02)


@every_optimizer
def test_minimises_rosenbrock(name):
    start = {"w": jnp.array([-1.0, 1.0])}
    end = train(OPTIMIZERS[name](), rosenbrock, start, 5000, 0.1 * BATCH, decay=True)
    assert rosenbrock(end, BATCH) < 0.02 < rosenbrock(start, BATCH)


PARAMS = {"a": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": {"c": jnp.array([0.5, -0.25])}}


def two_layers(p: Tree, x: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x @ p["a"]).sum(-1) * p["b"]["c"][0] - p["b"]["c"][1]))


@functools.cache
def statistics_of(loss: Any, stats: Any) -> Any:
    """Compiled once for all optimizers that ask for the same."""
    return jax.jit(pg.grad_stats(loss, dict(stats)))


def statistics(tx: Any, params: Tree = PARAMS, batch: Any = BATCH, loss: Any = two_layers) -> Any:
    return statistics_of(loss, tuple(tx.stats.items()))(params, batch)


def one_step(tx: Any, state: Any, params: Tree = PARAMS, **kwargs: Any) -> Any:
    stats = statistics(tx, params, **kwargs)
    return tx.update(stats["mean"], state, params, stats=stats)


@every_optimizer
def test_asks_for_the_mean_and_ignores_what_is_not_its_own(name):
    tx = OPTIMIZERS[name]()
    assert "mean" in tx.stats
    stats = statistics(tx)
    alone, _ = tx.update(stats["mean"], tx.init(PARAMS), PARAMS, stats=stats)
    stats["another"] = jnp.ones(3)
    with_more, _ = tx.update(
        stats["mean"], tx.init(PARAMS), PARAMS, stats=stats, value=jnp.ones(()), loss_fn=two_layers
    )
    jax.tree.map(np.testing.assert_array_equal, alone, with_more)


@every_optimizer
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_keeps_dtypes(name, dtype):
    tx = OPTIMIZERS[name]()
    params, batch = jax.tree.map(lambda x: x.astype(dtype), (PARAMS, BATCH))
    state = tx.init(params)
    updates, new = one_step(tx, state, params, batch=batch)
    assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, params)
    assert jax.tree.map(jnp.result_type, new) == jax.tree.map(jnp.result_type, state)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(updates))


@every_optimizer
def test_momentum_in_its_own_dtype(name):
    tx = OPTIMIZERS[name](mu_dtype=jnp.bfloat16)
    state = tx.init(PARAMS)
    _, new = one_step(tx, state)
    for s in (state, new):
        assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(optax.tree.get(s, "mu")))


@every_optimizer
def test_no_nan_from_zero_gradients(name):
    def loss(p: Tree, x: Any) -> Any:
        return jnp.mean(0 * x) + 0 * jnp.sum(p["a"]) + 0 * jnp.sum(p["b"]["c"])

    tx = OPTIMIZERS[name]()
    state = tx.init(PARAMS)
    for _ in range(3):
        updates, state = one_step(tx, state, loss=loss)
        jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), updates)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))


@every_optimizer
def test_serialises(name):
    tx = OPTIMIZERS[name]()
    _, state = one_step(tx, tx.init(PARAMS))
    pickled = pickle.loads(pickle.dumps(state))
    as_bytes = serialization.from_bytes(tx.init(PARAMS), serialization.to_bytes(state))
    next_update, _ = one_step(tx, state)
    for restored in (pickled, as_bytes):
        update, _ = one_step(tx, restored)
        jax.tree.map(np.testing.assert_array_equal, update, next_update)


@every_optimizer
def test_the_same_under_jit(name):
    tx = OPTIMIZERS[name]()
    stats, state = statistics(tx), tx.init(PARAMS)
    eager = tx.update(stats["mean"], state, PARAMS, stats=stats)
    jitted = jax.jit(lambda stats, state: tx.update(stats["mean"], state, PARAMS, stats=stats))(
        stats, state
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), eager, jitted)


@every_optimizer
def test_chains(name):
    tx = OPTIMIZERS[name]()
    halved = optax.chain(tx, optax.scale(0.5))
    untouched = optax.chain(optax.clip_by_global_norm(1e9), tx)
    stats = statistics(tx)
    expected, _ = tx.update(stats["mean"], tx.init(PARAMS), PARAMS, stats=stats)
    for chained, factor in ((halved, 0.5), (untouched, 1), (optim.chain(halved, optax.identity()), 0.5)):
        out, _ = chained.update(stats["mean"], chained.init(PARAMS), PARAMS, stats=stats)
        jax.tree.map(
            lambda a, b, f=factor: np.testing.assert_allclose(a, f * b, rtol=1e-12), out, expected
        )
    assert optim.chain(optax.identity(), tx, optax.scale(0.5)).stats == tx.stats


def test_chain_refuses_two_meanings():
    with pytest.raises(pg.ArgumentError, match="'second_moment'"):
        optim.chain(optim.micro_adam(0.1), optim.micro_adam(0.1, per=2))


@every_optimizer
def test_masked_and_partitioned(name):
    if name == "clipped":
        pytest.skip("the norm is that of the parameters that it sees")
    tx = OPTIMIZERS[name]()
    stats = statistics(tx)
    expected, _ = tx.update(stats["mean"], tx.init(PARAMS), PARAMS, stats=stats)
    mask = {"a": True, "b": {"c": False}}
    labels = {"a": "ours", "b": {"c": "frozen"}}
    masked = optax.masked(tx, mask)
    partitioned = optax.partition({"ours": tx, "frozen": optax.set_to_zero()}, labels)
    for wrapped, other in ((masked, stats["mean"]["b"]["c"]), (partitioned, jnp.zeros(2))):
        out, _ = wrapped.update(stats["mean"], wrapped.init(PARAMS), PARAMS, stats=stats)
        np.testing.assert_allclose(out["a"], expected["a"], rtol=1e-12)
        np.testing.assert_array_equal(out["b"]["c"], other)


@every_optimizer
def test_parameters_may_be_python_numbers(name):
    tx = OPTIMIZERS[name]()
    params = {"w": 0.5}
    updates, _ = one_step(tx, tx.init(params), params, loss=lambda p, x: jnp.mean(x[:, 0] * p["w"]))
    assert np.isfinite(updates["w"])


@every_optimizer
def test_state_is_where_the_parameters_are(name):
    mesh = jax.make_mesh((1,), ("devices",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    state = OPTIMIZERS[name]().init(jax.device_put(PARAMS, spread))
    like_params = [x for x in jax.tree.leaves(state) if x.ndim]
    assert like_params and all(x.sharding.spec[0] == "devices" for x in like_params)


@every_optimizer
def test_shows_its_statistics(name):
    tx = OPTIMIZERS[name]()
    assert repr(tx) == f"StatsTransformation(stats={tx.stats!r})"
    assert repr(tx) in repr({"tx": (tx,)})


def test_copies_keep_the_statistics():
    tx = OPTIMIZERS["micro_adam"]()
    for copied in (copy.copy(tx), copy.deepcopy(tx), jax.tree.map(lambda x: x, {"tx": tx})["tx"]):
        assert copied == tx and copied.stats == tx.stats
        assert copied.stats["second_moment"].is_factorable


def test_statistics_are_a_part_of_what_it_is():
    tx = OPTIMIZERS["micro_adam"]()
    loose, tight = (optim.clip_examples(tx, c) for c in (1.0, 0.01))
    assert tx != loose != tight and loose == optim.clip_examples(tx, 1.0)

    @functools.partial(jax.jit, static_argnums=0)
    def mean(tx: Any) -> Tree:
        return pg.grad_stats(two_layers, tx.stats)(PARAMS, BATCH)["mean"]

    for clipped in (loose, tight):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-12),
            mean(clipped),
            statistics(clipped)["mean"],
        )


@every_optimizer
def test_state_follows_the_parameters(name):
    tx = OPTIMIZERS[name]()
    doubled = optax.tree.map_params(tx, lambda x: 2 * x, one_step(tx, tx.init(PARAMS))[1])
    assert jax.tree.structure(doubled) == jax.tree.structure(tx.init(PARAMS))


ALIASES = {
    optim.preconditioned_adam: {"variance": 0.5},
    optim.micro_adam: {},
    optim.micro_adam_var: {},
    optim.micro_adam_msq: {"max_update": 1.0, "floor": 1.0},
    optim.ada_momentum: {},
    optim.micro_sign_sgd: {},
    optim.sign_sgd: {},
    optim.sign_ema: {},
}
every_alias = pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.__name__)


@every_alias
def test_hyperparameters_are_injected(alias):
    plain = alias(0.1, **ALIASES[alias])
    injected = optax.inject_hyperparams(alias)(0.1, **ALIASES[alias])
    stats = statistics(plain)
    state = injected.init(PARAMS)
    expected, _ = plain.update(stats["mean"], plain.init(PARAMS), PARAMS, stats=stats)
    out, state = jax.jit(injected.update)(stats["mean"], state, PARAMS, stats=stats)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), out, expected)
    state.hyperparams["learning_rate"] = jnp.zeros(())
    out, _ = jax.jit(injected.update)(stats["mean"], state, PARAMS, stats=stats)
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), out)


@every_alias
def test_schedule(alias):
    schedule = optax.piecewise_constant_schedule(0.1, {1: 0.0})
    tx = alias(schedule, **ALIASES[alias])
    updates, state = one_step(tx, tx.init(PARAMS))
    assert any(jnp.any(u != 0) for u in jax.tree.leaves(updates))
    updates, state = one_step(tx, state)
    updates, _ = one_step(tx, state)
    assert all(jnp.all(u == 0) for u in jax.tree.leaves(updates))


@every_alias
def test_weight_decay_with_mask(alias):
    plain, decayed, masked = (
        alias(0.1, **ALIASES[alias], **extra)
        for extra in (
            {},
            {"weight_decay": 0.01},
            {"weight_decay": 0.01, "mask": {"a": True, "b": {"c": False}}},
        )
    )
    (u, _), (d, _), (m, _) = (one_step(tx, tx.init(PARAMS)) for tx in (plain, decayed, masked))
    expected = jax.tree.map(lambda u, p: u - 0.1 * 0.01 * p, u, PARAMS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), d, expected)
    np.testing.assert_allclose(m["a"], expected["a"], rtol=1e-10)
    np.testing.assert_array_equal(m["b"]["c"], u["b"]["c"])


# What optax has too.


def assert_steps_agree(ours: Any, theirs: Any, dtype: Any = jnp.float64) -> None:
    """The same updates for ten steps of training."""
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    a, b = ours.init(params), theirs.init(params)
    for seed in range(10):
        batch = jnp.asarray(np.random.default_rng(seed).normal(size=(B, 2)), dtype)
        stats = statistics(ours, params, batch)
        u, a = ours.update(stats["mean"], a, params, stats=stats)
        v, b = theirs.update(stats["mean"], b, params)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-12 if dtype == jnp.float64 else 1e-5),
            u,
            v,
        )
        params = optax.apply_updates(params, u)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize(
    "ours, theirs",
    [
        (optim.preconditioned_adam(0.1), optax.adam(0.1)),
        (
            optim.preconditioned_adam(0.1, 0.8, 0.95, 1e-4, 1e-6),
            optax.adam(0.1, 0.8, 0.95, 1e-4, 1e-6),
        ),
        (optim.preconditioned_adam(0.1, nesterov=True), optax.nadam(0.1)),
        (optim.preconditioned_adam(0.1, weight_decay=0.01), optax.adamw(0.1, weight_decay=0.01)),
        (optim.preconditioned_adam(0.1, mu_dtype="bfloat16"), optax.adam(0.1, mu_dtype="bfloat16")),
        (
            optim.clipped(optim.preconditioned_adam(0.1), 0.05),
            optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.1)),
        ),
        (
            optim.chain(optax.clip_by_global_norm(0.05), optim.preconditioned_adam(0.1)),
            optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.1)),
        ),
        (optim.sign_ema(0.1, 0.8), optax.signum(0.1, 0.8)),
        (optim.sign_sgd(0.1, 0.0), optax.sign_sgd(0.1)),
    ],
)
def test_agrees_with_optax(ours, theirs, dtype):
    assert_steps_agree(ours, theirs, dtype)


@pytest.mark.parametrize("variance_from", ["second_moment", "variance"])
def test_adam_is_the_point_one_over_b_of_the_general_formula(variance_from):
    # An array is not looked at, so nothing is left out.
    general = optim.scale_by_preconditioner(mean_square=jnp.ones(()), variance="1/B")
    assert set(general.stats) == {"mean", "second_moment", "count"}
    statistic = {"variance": pg.Variance(), "second_moment": pg.Mean(jnp.square)}[variance_from]
    stats_fn = pg.grad_stats(
        two_layers, {"mean": pg.Mean(), "count": pg.Count(), variance_from: statistic}
    )
    adam = optax.scale_by_adam()
    a, b = general.init(PARAMS), adam.init(PARAMS)
    for seed in range(5):
        stats = stats_fn(PARAMS, jnp.asarray(np.random.default_rng(seed).normal(size=(B, 2))))
        u, a = general.update(stats["mean"], a, PARAMS, stats=stats)
        v, b = adam.update(stats["mean"], b, PARAMS)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-8), u, v)


# The plane, by brute force.


def gradients(batch: Any, params: Tree = PARAMS) -> Tree:
    """Every example's gradient, from the loop of `jax.grad`."""
    return oracle.per_example(two_layers, (params, batch))[2]


def first_steps(
    a: float, b: float | str, batches: Any, b1: float, b2: float, eps: float, groups: int = 1
) -> list[np.ndarray]:
    """Updates of leaf "a" on the plane, from the definition of variance and squared mean."""
    m = v = 0.0
    out = []
    for t, batch in enumerate(batches, start=1):
        g = gradients(batch)["a"]
        units = g.reshape(-1, groups, *g.shape[1:]).mean(axis=1)
        n = len(units)
        sigma2 = units.var(axis=0, ddof=1)
        mu2 = (np.square(units.sum(axis=0)) - np.square(units).sum(axis=0)) / (n * (n - 1))  # i != j
        m = b1 * m + (1 - b1) * g.mean(axis=0)
        v = b2 * v + (1 - b2) * (a * mu2 + (1 / n if b == "1/B" else b) * sigma2)
        out.append((m / (1 - b1**t)) / (np.sqrt(np.maximum(v / (1 - b2**t), 0)) + eps))
    return out


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "a, b", [(1, "1/B"), (1, 1), (0, 1), (1, 0), (0.5, 2.0), (2, "1/B"), (0, "1/B")]
)
def test_plane(a, b, groups):
    b1, b2, eps = 0.8, 0.7, 1e-3
    tx = optim.scale_by_preconditioner(b1, b2, eps, mean_square=a, variance=b, per=groups)
    batches = [jnp.asarray(r.normal(size=(B, 2))) for _ in range(4)]
    state = tx.init(PARAMS)
    for batch, expected in zip(batches, first_steps(a, b, batches, b1, b2, eps, groups), strict=True):
        updates, state = one_step(tx, state, batch=batch)
        np.testing.assert_allclose(updates["a"], expected, rtol=1e-9)


@pytest.mark.parametrize(
    "named, a, b",
    [(optim.micro_adam, 1, 1), (optim.micro_adam_var, 0, 1), (optim.micro_adam_msq, 1, 0)],
)
def test_named_points(named, a, b):
    ours, plane = named(0.1), optim.preconditioned_adam(0.1, mean_square=float(a), variance=float(b))
    assert ours.stats == plane.stats
    jax.tree.map(
        np.testing.assert_array_equal,
        one_step(ours, ours.init(PARAMS)),
        one_step(plane, plane.init(PARAMS)),
    )


def test_mean_square_is_clipped_after_the_average():
    # Three examples: -1, 1, 0 have gbar = 0, q = 2/3, mu2 = -1/3. Then 3, 3, 3 has mu2 = 9.
    tx = optim.scale_by_preconditioner(0.0, 0.5, 0.0, 1e-12, mean_square=1.0, variance=0.0)
    loss = lambda w, x: jnp.mean(w * x)  # noqa: E731
    w = jnp.ones(())
    _, state = one_step(tx, tx.init(w), w, loss=loss, batch=jnp.array([-1.0, 1.0, 0.0]))
    np.testing.assert_allclose(state.nu, -1 / 6)
    updates, state = one_step(tx, state, w, loss=loss, batch=jnp.array([3.0, 3.0, 3.0]))
    np.testing.assert_allclose(state.nu, (-1 / 6 + 9) / 2)
    np.testing.assert_allclose(updates, 3 / np.sqrt((-1 / 6 + 9) / 2 / 0.75))


# First steps by hand: examples with the gradients 1 and 3, so gbar = 2, q = 5, sigma2 = 2, mu2 = 3.

LOSS = lambda w, x: jnp.mean(w * x)  # noqa: E731
W, X = jnp.ones(()), jnp.array([1.0, 3.0])
NO_EPS = {"eps": 0.0}


@pytest.mark.parametrize(
    "tx, step",
    [
        (optim.preconditioned_adam(0.1, **NO_EPS), 1),
        (optim.preconditioned_adam(0.1, mean_square=2.0, variance=3.0, **NO_EPS), 2 / np.sqrt(12)),
        (optim.micro_adam(0.1, **NO_EPS), 2 / np.sqrt(5)),
        (optim.micro_adam(0.1, **NO_EPS, max_update=0.25), 0.25),
        (optim.micro_adam(0.1, b2=0.9, initial_second_moment=4.0, **NO_EPS), 2 / np.sqrt(0.9 * 4 + 0.5)),
        (
            optim.preconditioned_adam(0.1, b2=0.9, initial_second_moment="batch", **NO_EPS),
            2 / np.sqrt(0.9 * 5 + 0.1 * 4),
        ),
        (optim.micro_adam(0.1, initial_second_moment="batch", **NO_EPS), 2 / np.sqrt(5)),
        (optim.micro_adam(0.1, nesterov=True, **NO_EPS), (0.9 * 0.2 / 0.19 + 0.2 / 0.1) / np.sqrt(5)),
        (optim.micro_adam(0.1, per=2, **NO_EPS), 1),  # one group: Adam
        (optim.micro_adam_var(0.1, **NO_EPS), 2 / np.sqrt(2)),
        (optim.micro_adam_msq(0.1, **NO_EPS), 2 / np.sqrt(3)),
        # The standard error of mu2 is sigma2 sqrt(2 / (B (B - 1))) = 2.
        (optim.micro_adam_msq(0.1, floor=2.0, **NO_EPS), 2 / np.sqrt(4)),
        (optim.micro_adam_msq(0.1, floor=1.0, **NO_EPS), 2 / np.sqrt(3)),
        (optim.ada_momentum(0.1, eps=0.0), 10),
        (optim.micro_sign_sgd(0.1), 0.1),
        (optim.sign_sgd(0.1), 0.1),
        (optim.sign_ema(0.1), 1),
        # c = 1/4: gbar = 1/2, q = 5/16.
        (optim.clipped(optim.micro_adam(0.1, eps=1.0), 0.5), 0.5 / (np.sqrt(5 / 16) + 1)),
        # The second example is clipped to 2: gbar = 3/2, q = 5/2.
        (optim.clip_examples(optim.micro_adam(0.1, **NO_EPS), 2.0), 1.5 / np.sqrt(2.5)),
        (optim.clip_examples(optim.micro_adam_var(0.1, **NO_EPS), 2.0), 1.5 / np.sqrt(0.5)),
    ],
)
def test_first_step_by_hand(tx, step):
    updates, _ = one_step(tx, tx.init(W), W, loss=LOSS, batch=X)
    np.testing.assert_allclose(updates, -0.1 * step, rtol=1e-9)


def test_signs_by_hand():
    # Two of three examples point up, their mean down.
    x = jnp.array([1.0, 1.0, -5.0])
    expected = {optim.micro_sign_sgd: -1 / 3, optim.sign_sgd: 1, optim.sign_ema: 1}
    for alias, step in expected.items():
        tx = alias(1.0, b1=0.0)
        updates, _ = one_step(tx, tx.init(W), W, loss=LOSS, batch=x)
        np.testing.assert_allclose(updates, step)


# The floor.


def test_standard_error_of_the_mean_square():
    """Without signal mu2 has the variance 2 sigma^4 / (B (B - 1)), whatever the distribution."""
    n, many = 6, 200_000
    r = np.random.default_rng(1)
    for g in (
        r.normal(size=(many, n)),
        r.exponential(size=(many, n)) - 1,
        2.0 * r.integers(2, size=(many, n)) - 1,
    ):
        mu2 = (np.square(g.sum(axis=1)) - np.square(g).sum(axis=1)) / (n * (n - 1))
        fourth = np.mean(np.square(np.square(mu2 - mu2.mean())))
        error = np.sqrt((fourth - mu2.var() ** 2) / many)
        assert abs(mu2.var() - 2 / (n * (n - 1))) < 4 * error


@pytest.mark.parametrize("b2", [0.9, 0.99])
def test_floor_keeps_updates_small_without_signal(b2):
    """Noise alone: the raw estimate makes updates that explode, the floor keeps them of order one."""
    n, size, steps = 8, 500, 100

    def largest(floor: float | None) -> np.ndarray:
        tx = optim.scale_by_preconditioner(0.9, b2, mean_square=1.0, variance=0.0, floor=floor)

        def step(state: Any, key: Any) -> Any:
            g = jax.random.normal(key, (n, size))
            stats = {"mean": g.mean(0), "second_moment": jnp.square(g).mean(0), "count": jnp.asarray(n)}
            out, state = tx.update(stats["mean"], state, stats=stats)
            return state, out

        keys = jax.random.split(jax.random.key(0), steps)
        return np.abs(jax.lax.scan(step, tx.init(jnp.zeros(size)), keys)[1][-1])

    # With E[m^2] = sigma^2 / B (1 - b1) / (1 + b1) over a floor of sigma^2 / B sqrt(2 (1 - b2) / (1 +
    # b2)).
    deviation = np.sqrt(0.1 / 1.9 / np.sqrt(2 * (1 - b2) / (1 + b2)))
    assert largest(1.0).max() < 5 * deviation
    assert np.mean(largest(None) > 1e3) > 0.3


def test_floor_is_counted_from_the_number_of_steps():
    """The standard error of the average of t steps, with and without a first guess."""
    n, b2, steps = 8, 0.8, 3
    errors = jnp.array([1.0, 2.0, 4.0])  # sigma2 of each step; mu2 is 0
    w = (1 - b2) * b2 ** np.arange(steps)[::-1]
    for start in (None, 0.0):
        tx = optim.scale_by_preconditioner(
            0.0, b2, 0.0, mean_square=1.0, variance=0.0, floor=1.0, initial_second_moment=start
        )
        state = tx.init(jnp.zeros(()))
        for sigma2 in errors:
            mean = jnp.sqrt(sigma2 / n)
            stats = {"mean": mean, "variance": sigma2, "count": jnp.asarray(n)}
            out, state = tx.update(mean, state, stats=stats)
        average = np.sum(w * errors) / np.sum(w)
        floor = np.sqrt(np.sum(np.square(w))) * average * np.sqrt(2 / (n * (n - 1)))
        floor = floor / np.sum(w) if start is None else floor
        np.testing.assert_allclose(out, mean / np.sqrt(floor), rtol=1e-9)


# Clipping.


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "clip" not in name])
@pytest.mark.parametrize("max_norm", [0.05, 1e3])
def test_clipped_is_as_if_every_gradient_had_been_scaled(name, max_norm):
    tx = OPTIMIZERS[name]()
    clipped = optim.clipped(tx, max_norm)
    assert clipped.stats == tx.stats
    norm = optax.tree.norm(statistics(tx)["mean"])
    c = min(1.0, max_norm / float(norm))

    def scaled(p: Tree, x: Any) -> Any:
        return c * two_layers(p, x)

    # Twice, so that momentum counts; with the state of the first.
    state = tx.init(PARAMS)
    for _ in range(2):
        expected = one_step(tx, state, loss=scaled)
        out = one_step(clipped, state)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), out, expected)
        _, state = out


def test_clipped_scales_a_variance_too():
    tx = optim.clipped(optim.scale_by_preconditioner(mean_square=0.0, variance=1.0, eps=0.5), 1.0)
    stats = {"mean": jnp.array([2.0]), "variance": jnp.array([4.0]), "count": jnp.asarray(4)}
    updates, _ = tx.update(stats["mean"], tx.init(jnp.zeros(1)), stats=stats)
    np.testing.assert_allclose(updates, 1 / (0.5 * 2 + 0.5))


@pytest.mark.parametrize("by", ["all", "leaf"])
def test_clip_examples_by_brute_force(by):
    c = 0.3
    tx = optim.clip_examples(optim.scale_by_preconditioner(mean_square=0.5, variance=2.0), c, by)
    updates, _ = one_step(tx, tx.init(PARAMS))
    g = gradients(BATCH)
    norms = oracle.norm(g if by == "all" else g["a"])
    assert 0 < np.sum(norms > c) < B
    g = g["a"] * np.minimum(1, c / np.maximum(norms, 1e-9))[:, None, None]
    mean, sigma2 = g.mean(0), g.var(0, ddof=1)
    nu = 0.5 * (np.square(mean) - sigma2 / B) + 2 * sigma2
    np.testing.assert_allclose(updates["a"], mean / (np.sqrt(nu) + 1e-8), rtol=1e-9)


@pytest.mark.parametrize(
    "inner, text",
    [
        (optim.micro_adam(0.1, per=2), "per=2"),
        (optim.clip_examples(optim.sign_ema(0.1), 0.5), r"ClippedMean\(0.5\)"),
        (optim.StatsTransformation(*optax.sgd(0.1), {"norm": pg.Norm()}), r"Norm\(\)"),
        (optim.StatsTransformation(*optax.sgd(0.1), {"sign": pg.Mean(jnp.sign, per=2)}), "per=2"),
    ],
)
def test_clip_examples_refuses_what_it_does_not_know(inner, text):
    with pytest.raises(pg.ArgumentError, match=text):
        optim.clip_examples(inner, 1.0)


def test_clips_in_front_of_an_optimizer_of_optax():
    clipped, by_examples = (clip(optax.sgd(1.0), 2.0) for clip in (optim.clipped, optim.clip_examples))
    assert clipped.stats == {"mean": pg.Mean()}
    for tx, step in ((clipped, 2.0), (by_examples, 1.5)):
        updates, _ = one_step(tx, tx.init(W), W, loss=LOSS, batch=jnp.array([1.0, 5.0]))
        np.testing.assert_allclose(updates, -step)


def test_clips_half_precision_by_a_norm_that_does_not_overflow():
    tx, g = optim.clipped(optax.sgd(1.0), 1.0), jnp.full(4, 300.0, jnp.float16)
    updates, _ = tx.update(g, tx.init(g), g)
    np.testing.assert_allclose(updates, -0.5, rtol=1e-3)


# A second moment that starts at the first batch.


@pytest.mark.parametrize("a, b", [(1, "1/B"), (1, 1), (0, 1), (1, 0.5)])
def test_second_moment_from_the_first_batch(a, b):
    """Each coordinate starts at the mean square of the first batch in which it has a gradient."""
    b1, b2, eps = 0.8, 0.7, 1e-3
    tx = optim.scale_by_preconditioner(
        b1, b2, eps, mean_square=a, variance=b, initial_second_moment="batch"
    )
    assert "second_moment" in tx.stats
    loss = lambda w, x: jnp.mean(x @ w)  # noqa: E731 (an example's gradient is the example)
    batches = r.normal(size=(4, B, 3))
    batches[0, :, 1] = batches[1, :, 1] = batches[0, :, 2] = 0
    state = tx.init(jnp.zeros(3))
    m, v, started = np.zeros(3), np.zeros(3), np.zeros(3, bool)
    for t, g in enumerate(batches, start=1):
        stats = pg.grad_stats(loss, tx.stats)(jnp.zeros(3), jnp.asarray(g))
        updates, state = tx.update(stats["mean"], state, stats=stats)
        sigma2 = g.var(axis=0, ddof=1)
        mu2 = (np.square(g.sum(axis=0)) - np.square(g).sum(axis=0)) / (B * (B - 1))
        m = b1 * m + (1 - b1) * g.mean(axis=0)
        now = a * mu2 + (1 / B if b == "1/B" else b) * sigma2
        v = b2 * np.where(started, v, np.square(g).mean(axis=0)) + (1 - b2) * now
        started |= np.any(g != 0, axis=0)
        np.testing.assert_allclose(
            updates, m / (1 - b1**t) / (np.sqrt(np.maximum(v, 0)) + eps), rtol=1e-9
        )
    assert started.all()


def test_first_batch_under_a_clip_and_over_several_calls():
    """The start is that of the gradients that the optimizer sees: scaled, or of all the examples."""
    adam = functools.partial(optim.scale_by_preconditioner, 0.0, 0.5, 0.0, initial_second_moment="batch")
    g = np.array([1.0, 5.0, 3.0, 7.0])
    halves = jnp.asarray(g).reshape(2, 2)

    def update(tx: Any, state: Any, x: Any) -> Any:
        stats = pg.grad_stats(LOSS, tx.stats)(W, x)
        return tx.update(stats["mean"], state, W, stats=stats)

    expected = g.mean() / np.sqrt(0.5 * np.mean(g**2) + 0.5 * g.mean() ** 2)
    clipped, many = optim.clipped(adam(), 0.1), optim.multi_steps(adam(), 2)
    np.testing.assert_allclose(update(clipped, clipped.init(W), jnp.asarray(g))[0], expected)
    _, state = update(many, many.init(W), halves[0])
    np.testing.assert_allclose(update(many, state, halves[1])[0], expected)


# Loops that hand on nothing but a gradient.


@every_optimizer
def test_statistics_in_the_place_of_the_gradient(name):
    tx = OPTIMIZERS[name]()
    wrapped = optim.from_stats(tx)
    assert wrapped.stats == tx.stats
    stats, state = statistics(tx), tx.init(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, wrapped.init(PARAMS), state)
    for _ in range(2):
        expected = tx.update(stats["mean"], state, PARAMS, stats=stats)
        out = wrapped.update(stats, state, PARAMS)
        jax.tree.map(np.testing.assert_array_equal, out, expected)
        _, state = out


def test_from_stats_of_an_optimizer_of_optax():
    tx = optim.from_stats(optax.adam(0.1))
    assert tx.stats == {"mean": pg.Mean()}
    stats = statistics(tx)
    expected, _ = optax.adam(0.1).update(stats["mean"], tx.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, tx.update(stats, tx.init(PARAMS), PARAMS)[0], expected)


@pytest.mark.parametrize("name", ["micro_adam", "micro_adam_var", "multi_steps"])
def test_train_state(name):
    """Flax's `apply_gradients` calls `tx.update` with a gradient and nothing else."""
    from flax.training.train_state import TrainState

    tx = OPTIMIZERS[name]()
    train_state = TrainState.create(apply_fn=two_layers, params=PARAMS, tx=optim.from_stats(tx))

    @jax.jit
    def step(train_state: Any) -> Any:
        stats = pg.grad_stats(train_state.apply_fn, train_state.tx.stats)(train_state.params, BATCH)
        return train_state.apply_gradients(grads=stats)

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        train_state = step(train_state)
        stats = statistics(tx, params)
        updates, state = tx.update(stats["mean"], state, params, stats=stats)
        params = optax.apply_updates(params, updates)
    assert train_state.step == 3
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9),
        (train_state.params, train_state.opt_state),
        (params, state),
    )


def test_from_stats_refuses_a_gradient():
    tx = optim.from_stats(OPTIMIZERS["micro_adam"]())
    for wrong in (PARAMS, jnp.ones(2)):
        with refused(pg.ArgumentError, "from_stats", "tx.update(stats, state, params)"):
            tx.update(wrong, tx.init(PARAMS), PARAMS)


# Batch-size-invariant Adam.


def test_groups_make_adam_invariant_to_the_batch_size():
    """With per=k a step over B examples has the second moment of Adam on batches of k."""
    k = 4
    tx = optim.scale_by_preconditioner(0.9, 0.5, mean_square=1.0, variance=1.0, per=k)
    big = jnp.asarray(r.normal(size=(16, 2)))
    _, state = one_step(tx, tx.init(PARAMS), batch=big)
    squares = [np.square(gradients(part)["a"].mean(axis=0)) for part in jnp.split(big, 16 // k)]
    np.testing.assert_allclose(state.nu["a"], 0.5 * np.mean(squares, axis=0), rtol=1e-9)
    adam = optax.scale_by_adam(b2=0.5)
    nus = []
    for part in jnp.split(big, 16 // k):
        mean = pg.grad_stats(two_layers, pg.Mean())(PARAMS, part)
        nus.append(adam.update(mean, adam.init(PARAMS), PARAMS)[1].nu["a"])
    np.testing.assert_allclose(state.nu["a"], np.mean(nus, axis=0), rtol=1e-9)


def test_tokens():
    tx = optim.micro_adam(0.1, per="token")
    assert tx.stats["second_moment"] == pg.Mean(jnp.square, per="token")
    updates, _ = one_step(tx, tx.init(PARAMS))
    assert all(jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates))


# Errors.


@pytest.mark.parametrize("name", ["micro_adam", "micro_adam_var", "micro_adam_msq", "micro_sign_sgd"])
@pytest.mark.parametrize("has_stats", [True, False])
def test_missing_statistic_is_named(name, has_stats):
    tx = OPTIMIZERS[name]()
    stats = statistics(tx)
    assert set(tx.stats) > {"mean"}
    for missing in set(tx.stats) - {"mean"}:
        given = {k: v for k, v in stats.items() if k != missing} if has_stats else None
        with pytest.raises(pg.ArgumentError) as error:
            tx.update(stats["mean"], tx.init(PARAMS), PARAMS, stats=given)
        text = str(error.value)
        assert has_stats is False or f"'{missing}'" in text
        assert (
            "pg.value_and_stats(loss, {...," in text
            and 'stats["mean"], state, params, stats=stats' in text
        )


def test_the_line_that_an_error_shows_is_the_right_one():
    tx = optim.micro_sign_sgd(0.1)
    mean = statistics(tx)["mean"]
    with pytest.raises(pg.ArgumentError, match=r'"sign": pg\.Mean\(jnp\.sign\)'):
        tx.update(mean, tx.init(PARAMS), PARAMS, stats={"mean": mean})


def test_the_line_that_an_error_shows_has_groups():
    tx = optim.micro_adam(0.1, per=2)
    mean = statistics(tx)["mean"]
    with pytest.raises(pg.ArgumentError, match=r'"second_moment": pg\.Mean\(jnp\.square, per=2\)'):
        tx.update(mean, tx.init(PARAMS), PARAMS, stats={"mean": mean})


def test_errors_about_a_single_array():
    tx, p = optim.micro_adam(0.1), jnp.ones(3)
    with pytest.raises(pg.ArgumentError, match=r"shape \(4,\), but the gradient has \(3,\)"):
        tx.update(p, tx.init(p), p, stats={"second_moment": jnp.ones(4)})
    with pytest.raises(pg.ArgumentError, match="a parameter is complex"):
        tx.init(p.astype(complex))


def test_wrong_shapes_and_trees_are_named():
    tx = optim.micro_adam(0.1)
    stats = statistics(tx)
    for wrong, text in (
        ({"a": jnp.ones(3), "b": {"c": jnp.ones(2)}}, r"\['a'\]"),
        ({"a": jnp.ones((2, 3))}, "not a tree like"),
        (jnp.ones(3), "not a tree like"),
    ):
        with pytest.raises(pg.ArgumentError, match=text):
            tx.update(stats["mean"], tx.init(PARAMS), PARAMS, stats=stats | {"second_moment": wrong})


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: optim.preconditioned_adam(0.1, variance="B"), '"1/B"'),
        (lambda: optim.preconditioned_adam(0.1, variance=-1.0), "variance"),
        (lambda: optim.preconditioned_adam(0.1, mean_square=-1.0), "mean_square"),
        (lambda: optim.preconditioned_adam(0.1, per="token"), "per='token'"),
        (lambda: optim.preconditioned_adam(0.1, per="word", variance=1.0), "per must be"),
        (lambda: optim.preconditioned_adam(0.1, per="word"), "per must be"),
        (
            lambda: optim.scale_by_preconditioner(mean_square=1.0, variance=1.0, floor=1.0, per="token"),
            "no floor",
        ),
        (lambda: optim.micro_adam(0.1, initial_second_moment="first"), '"batch"'),
        (lambda: optim.scale_by_sign(of="all"), "'momentum'"),
        (lambda: optax.inject_hyperparams(optim.micro_adam)(0.1, per=2).init(PARAMS), "static_args"),
        (lambda: optim.micro_adam(0.1).init(jnp.ones(2, complex)), "complex"),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises(pg.ArgumentError, match=text):
        make()


def test_batches_of_one():
    one = BATCH[:1]
    for name in ("adam", "micro_adam", "micro_sign_sgd", "sign_sgd", "sign_ema", "ada_momentum"):
        tx = OPTIMIZERS[name]()
        updates, _ = one_step(tx, tx.init(PARAMS), batch=one)
        assert all(jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates))
    for name in ("micro_adam_var", "micro_adam_msq", "preconditioned_adam"):
        tx = OPTIMIZERS[name]()
        stats = statistics(tx, batch=one)
        with pytest.raises(pg.ArgumentError, match="no variance"):
            tx.update(stats["mean"], tx.init(PARAMS), PARAMS, stats=stats)
        updates, _ = jax.jit(tx.update)(stats["mean"], tx.init(PARAMS), PARAMS, stats=stats)
        assert all(jnp.all(jnp.isnan(u)) for u in jax.tree.leaves(updates))


# What changes the gradient before the optimizer sees it, and not its statistics.

# Those that look at more than the mean; clipping hands on what it is given.
LOOK_AT_MORE = [name for name in OPTIMIZERS if set(OPTIMIZERS[name]().stats) - {"mean"}]
# And those that do not, as an optimizer of optax or, where it has none, by themselves.
FROM_THE_MEAN = {
    "adam": optax.adam(0.1),
    "sign_ema": optax.signum(0.02),
    "sign_sgd": optim.sign_sgd(0.02),
    "ada_momentum": optim.ada_momentum(0.01),
}


def two_steps(tx: Any, stats: Any) -> Tree:
    """The updates of the second step; a wrapper of optax that is an object is taken as it is."""
    _, state = tx.update(stats["mean"], tx.init(PARAMS), PARAMS, stats=stats)
    return tx.update(stats["mean"], state, PARAMS, stats=stats)[0]


CHANGES = {
    "clip_by_global_norm": lambda tx: optax.chain(optax.clip_by_global_norm(0.01), tx),
    "clip": lambda tx: optax.chain(optax.clip(0.01), tx),
    "add_decayed_weights": lambda tx: optax.chain(optax.add_decayed_weights(0.1), tx),
    "scale": lambda tx: optim.chain(optax.scale(0.9), tx),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 2),
    "clip_in_multi_steps": lambda tx: optax.MultiSteps(optax.chain(optax.clip(0.01), tx), 2),
    "masked": lambda tx: optax.masked(optax.chain(optax.scale(0.9), tx), {"a": True, "b": {"c": False}}),
    "clipped": lambda tx: optim.chain(optax.scale(0.9), optim.clipped(tx, 1e-3)),
}


@pytest.mark.parametrize("is_jitted", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["micro_adam", "micro_adam_var", "micro_sign_sgd"])
def test_a_changed_gradient_is_refused(name, change, is_jitted):
    inner = OPTIMIZERS[name]()
    run = functools.partial(two_steps, CHANGES[change](inner))
    with refused(
        pg.ArgumentError,
        'stats["mean"]',
        "pg.optim.clipped(tx, max_norm)",
        "pg.optim.multi_steps(tx, k)",
        "pg.all_combine(tx.stats, stats, axis_name)",
    ):
        (jax.jit(run) if is_jitted else run)(statistics(inner))


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "clipped"])
@pytest.mark.parametrize("name", FROM_THE_MEAN)
def test_a_changed_gradient_is_fine_for_those_of_the_mean_alone(name, change):
    stats = statistics(inner := OPTIMIZERS[name]())
    out = jax.jit(functools.partial(two_steps, CHANGES[change](inner)))(stats | {"another": 1.0})
    wrapped = CHANGES[change](FROM_THE_MEAN[name])
    _, state = wrapped.update(stats["mean"], wrapped.init(PARAMS), PARAMS)
    expected, _ = wrapped.update(stats["mean"], state, PARAMS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), out, expected)


@pytest.mark.parametrize("name", LOOK_AT_MORE)
def test_a_gradient_handed_to_jit_beside_its_statistics(name):
    """Two arguments of a program cannot be told apart before it runs: NaN if they differ."""
    tx = OPTIMIZERS[name]()
    stats, state = statistics(tx), tx.init(PARAMS)
    expected, _ = tx.update(stats["mean"], state, PARAMS, stats=stats)
    out, _ = jax.jit(tx.update)(stats["mean"], state, PARAMS, stats=stats)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), out, expected)
    less = jax.tree.map(lambda g: 0.99 * g, stats["mean"])
    out, _ = jax.jit(tx.update)(less, state, PARAMS, stats=stats)
    assert all(jnp.all(jnp.isnan(u)) for u in jax.tree.leaves(out))


@pytest.mark.parametrize("name", [name for name in LOOK_AT_MORE if name != "clip_examples"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_gradient_computed_apart_is_fine(name, dtype):
    """From `jax.grad`, where the numbers can be seen; also where there is nothing but rounding."""
    tx = OPTIMIZERS[name]()
    params, batch = jax.tree.map(lambda x: x.astype(dtype), (PARAMS, BATCH))

    def loss(p: Tree, x: Any) -> Any:
        logits = jnp.tanh(x @ p["a"]) + p["b"]["c"][0]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])  # which does not depend on "c"

    stats = pg.grad_stats(loss, tx.stats)(params, batch)
    updates, _ = tx.update(jax.grad(loss)(params, batch), tx.init(params), params, stats=stats)
    assert all(jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates))


def test_gradients_that_are_not_finite_are_not_taken_for_changed_ones():
    tx = OPTIMIZERS["micro_adam"]()
    for bad in (jnp.nan, jnp.inf):
        stats = jax.tree.map(lambda x, bad=bad: x.at[0].set(bad), statistics(tx))
        copied = jax.tree.map(jnp.copy, stats["mean"])
        updates, _ = tx.update(copied, tx.init(PARAMS), PARAMS, stats=stats)
        assert jnp.isfinite(updates["b"]["c"][1])


def test_statistics_of_another_step_are_refused():
    tx = OPTIMIZERS["micro_adam"]()
    old, new = (statistics(tx, batch=BATCH + shift) for shift in (0, 1))
    with refused(pg.ArgumentError, "stats=stats"):
        tx.update(new["mean"], tx.init(PARAMS), PARAMS, stats=old)


def test_a_mean_that_is_missing_is_named():
    tx = OPTIMIZERS["micro_adam"]()
    stats = statistics(tx)
    with refused(pg.ArgumentError, "'mean'", "pg.Mean()"):
        tx.update(stats["mean"], tx.init(PARAMS), PARAMS, stats={k: stats[k] for k in ["second_moment"]})


# One step for several batches.

SIZES = (4, 2, 4)
WEIGHTS = jnp.asarray([1.0, 0.5, 2.5, 3.0, 0.0, 1.5, 2.0, 1.0, 1.0, 0.5])


def in_parts(tx: Any, batch: Any, weights: Any, sizes: Any = SIZES, params: Tree = PARAMS) -> Any:
    """The statistics of parts of a batch, and of the whole of it."""
    stats_fn = jax.jit(pg.grad_stats(two_layers, tx.stats))
    ends = [0, *np.cumsum(sizes)]
    bounds = [*itertools.pairwise(ends), (0, ends[-1])]
    *parts, whole = (
        stats_fn(params, batch[a:b], example_weights=None if weights is None else weights[a:b])
        for a, b in bounds
    )
    return parts, whole


@every_optimizer
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
def test_several_batches_are_one_step(name, weights):
    inner = OPTIMIZERS[name]()
    tx = optim.multi_steps(inner, len(SIZES))
    assert tx.stats == inner.stats | {"count": pg.Count()}
    update = jax.jit(lambda stats, state: tx.update(stats["mean"], state, PARAMS, stats=stats))
    state, expected_state = tx.init(PARAMS), inner.init(PARAMS)
    for shift in (0.0, 0.5):  # two steps, so that momentum counts
        parts, whole = in_parts(tx, BATCH + shift, weights)
        expected, expected_state = inner.update(whole["mean"], expected_state, PARAMS, stats=whole)
        for stats in parts[:-1]:
            updates, state = update(stats, state)
            jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), updates)
        updates, state = update(parts[-1], state)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-14)
        jax.tree.map(close, updates, expected)
        jax.tree.map(close, state.inner, expected_state)
    assert state.mini_step == 0 and state.gradient_step == 2


@pytest.mark.parametrize("name", ["micro_adam_var", "micro_adam_msq", "preconditioned_adam"])
def test_batches_of_one_are_one_step(name):
    """One example has no variance, ten of them have."""
    inner = OPTIMIZERS[name]()
    tx = optim.multi_steps(inner, B)
    parts, whole = in_parts(tx, BATCH, None, (1,) * B)
    expected, _ = inner.update(whole["mean"], inner.init(PARAMS), PARAMS, stats=whole)
    state = tx.init(PARAMS)
    for stats in parts:
        updates, state = tx.update(stats["mean"], state, PARAMS, stats=stats)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), updates, expected)


def test_padding_adds_nothing_to_several_batches():
    tx = optim.multi_steps(inner := OPTIMIZERS["micro_adam_var"](), 3)
    weights = jnp.array([0.0] * 4 + [1.0] * 2 + [1.0, 1.0, 0.0, 0.0])
    parts, whole = in_parts(tx, BATCH, weights)
    state = tx.init(PARAMS)
    for stats in parts:
        updates, state = tx.update(stats["mean"], state, PARAMS, stats=stats)
    expected, _ = inner.update(whole["mean"], inner.init(PARAMS), PARAMS, stats=whole)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), updates, expected)


def test_several_batches_in_a_scan_with_half_precision_parameters():
    """Gradients 129 and 255 times 1: their mean is 1.5, of which sums in bfloat16 would know nothing."""
    w, batches = jnp.bfloat16(0), jnp.ones((256, 1), jnp.bfloat16).at[0].set(129)
    tx = optim.multi_steps(optim.StatsTransformation(*optax.sgd(1.0), {"mean": pg.Mean()}), 256)
    stats_fn = pg.grad_stats(lambda w, x: jnp.mean(w * x), tx.stats)

    def step(state: Any, x: Any) -> Any:
        stats = stats_fn(w, x)
        updates, state = tx.update(stats["mean"], state, w, stats=stats)
        return state, updates

    _, updates = jax.jit(lambda s: jax.lax.scan(step, s, batches))(tx.init(w))
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_array_equal(updates.astype(float), [0] * 255 + [-1.5])


def test_several_batches_with_an_optimizer_of_optax():
    tx = optim.multi_steps(optax.adam(0.1), 3)
    assert tx.stats == {"mean": pg.Mean(), "count": pg.Count()}
    parts, whole = in_parts(tx, BATCH, None)
    state = tx.init(PARAMS)
    for stats in parts:
        updates, state = tx.update(stats["mean"], state, PARAMS, stats=stats)
    expected, _ = optax.adam(0.1).update(whole["mean"], optax.adam(0.1).init(PARAMS), PARAMS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), updates, expected)


def test_a_variance_of_several_batches():
    inner = optim.StatsTransformation(
        *optim.scale_by_preconditioner(mean_square=0.0, variance=1.0),
        {"mean": pg.Mean(), "variance": pg.Variance(), "count": pg.Count()},
    )
    tx = optim.multi_steps(inner, 3)
    parts, whole = in_parts(tx, BATCH, None)
    state = tx.init(PARAMS)
    for stats in parts:
        updates, state = tx.update(stats["mean"], state, PARAMS, stats=stats)
    expected, _ = inner.update(whole["mean"], inner.init(PARAMS), PARAMS, stats=whole)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), updates, expected)


def test_clips_and_masks_around_several_batches():
    clipped = optim.multi_steps(optim.clipped(optim.micro_adam(0.1), 0.01), 3)
    by_example = optim.clip_examples(optim.multi_steps(optim.micro_adam(0.1), 3), 0.3)
    assert by_example.stats["second_moment"] == pg.ClippedMean(0.3, phi=jnp.square)
    for tx, inner in (
        (clipped, optim.clipped(optim.micro_adam(0.1), 0.01)),
        (by_example, optim.clip_examples(optim.micro_adam(0.1), 0.3)),
    ):
        parts, whole = in_parts(tx, BATCH, None)
        expected, _ = inner.update(whole["mean"], inner.init(PARAMS), PARAMS, stats=whole)
        for wrapped in (tx, optax.masked(tx, True)):
            state = wrapped.init(PARAMS)
            for stats in parts:
                updates, state = wrapped.update(stats["mean"], state, PARAMS, stats=stats)
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), updates, expected)


@pytest.mark.parametrize(
    "inner, every_k, words",
    [
        (optim.micro_adam(0.1), 0, ["every_k", "0"]),
        (optim.micro_adam(0.1), 2.0, ["every_k", "2.0"]),
        (
            optim.StatsTransformation(*optax.sgd(0.1), {"norm": pg.Norm()}),
            2,
            ["Norm()", "microbatch_size"],
        ),
        (optim.StatsTransformation(*optax.sgd(0.1), {"gram": pg.Gram()}), 2, ["Gram()"]),
    ],
)
def test_what_cannot_be_gathered(inner, every_k, words):
    with refused(pg.ArgumentError, *words):
        optim.multi_steps(inner, every_k)


def test_several_batches_need_their_counts_and_the_gradient_of_their_statistics():
    tx = optim.multi_steps(optim.micro_adam(0.1), 2)
    stats, state = statistics(tx), tx.init(PARAMS)
    for missing in ("count", "second_moment"):
        with refused(pg.ArgumentError, "multi_steps", repr(missing), "pg.value_and_stats(loss"):
            left = {name: x for name, x in stats.items() if name != missing}
            tx.update(stats["mean"], state, PARAMS, stats=left)
    with refused(pg.ArgumentError, "pg.optim.clipped(tx, max_norm)"):
        optax.chain(optax.scale(0.5), tx).update(stats["mean"], (optax.ScaleState(), state), stats=stats)


@pytest.mark.parametrize(
    "statistic",
    [
        *(pg.Mean(jnp.square), pg.Mean(jnp.sign, per=2), pg.Variance(), pg.Variance(per=4)),
        *(pg.ClippedMean(0.5), pg.ClippedMean(0.5, by="leaf", phi=jnp.square)),
    ],
    ids=repr,
)
def test_the_line_to_write_makes_the_statistic_that_is_missing(statistic):
    tx = optim.multi_steps(optim.StatsTransformation(*optax.sgd(0.1), {"wanted": statistic}), 2)
    with pytest.raises(pg.ArgumentError) as error:
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, stats={"mean": PARAMS, "count": 8})
    (line,) = (line for line in str(error.value).split("\n") if "value_and_stats" in line)
    text = line.partition('"wanted": ')[2].removesuffix("})")
    assert eval(text, {"pg": pg, "jnp": jnp}) == statistic


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_clip_below_zero_is_refused(max_norm):
    """It would turn every step around."""
    with refused(pg.ArgumentError, "clipped: max_norm", repr(max_norm)):
        optim.clipped(optim.micro_adam(0.1), max_norm)
