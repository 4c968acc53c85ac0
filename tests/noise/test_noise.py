"""Noise diagnostics against distributions of which all is known, and brute force on a real model.

A random estimate is compared with the truth in units of its own standard error, measured from many
independent ones: four of them are allowed.
"""

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

import pergrad as pg
from tests.support import oracle
from tests.support.claims import refused

noise = pg.noise

Tree = Any


def assert_unbiased(samples: Any, truth: float, name: str = "") -> None:
    samples = np.asarray(samples, np.float64)
    error = samples.std(ddof=1) / np.sqrt(len(samples))
    assert abs(samples.mean() - truth) < 4 * error, f"{name}: {samples.mean()} ± {error}, not {truth}"
    assert error < 0.1 * abs(truth) + 1e-12, f"{name}: too few samples to say anything"


def linear(p: Tree, x: Tree) -> Any:
    """The gradient of an example is the example itself."""
    return sum(jnp.mean(x[k] @ p[k]) for k in p)


MU = {"a": np.array([2.0, -1.0, 0.5]), "b": np.array([1.0, 0.0])}
SIGMA = {"a": np.array([1.0, 2.0, 0.5]), "b": np.array([1.5, 0.1])}
SIGNAL = {k: float(np.sum(MU[k] ** 2)) for k in MU}
NOISE = {k: float(np.sum(SIGMA[k] ** 2)) for k in MU}
PARAMS = {k: jnp.zeros(len(v)) for k, v in MU.items()}


def draw(key: Any, size: int, mu: Tree = MU, sigma: Tree = SIGMA) -> Tree:
    keys = dict(zip(mu, jax.random.split(key, len(mu)), strict=True))
    return {k: mu[k][None] + sigma[k][None] * jax.random.normal(keys[k], (size, len(mu[k]))) for k in mu}


FORMS = {
    "norm": {"norm": pg.Norm(by="leaf")},
    "variance": {"variance": pg.Variance()},
    "second_moment": {"second_moment": pg.Mean(jnp.square)},
}
BASE = {"mean": pg.Mean(), "count": pg.Count()}


def layers_of(batch: Tree, form: str = "second_moment", **kwargs: Any) -> Any:
    return noise.by_layer(pg.grad_stats(linear, BASE | FORMS[form])(PARAMS, batch), **kwargs)


@pytest.mark.parametrize("size", [2, 3, 16])
@pytest.mark.parametrize("form", FORMS)
def test_signal_and_noise_are_unbiased(form, size):
    keys = jax.random.split(jax.random.key(0), 4000)
    layers = jax.jit(jax.vmap(lambda key: layers_of(draw(key, size), form)))(keys)
    for k in MU:
        assert_unbiased(layers[f"['{k}']"].signal, SIGNAL[k], f"signal of {k}")
        assert_unbiased(layers[f"['{k}']"].noise, NOISE[k], f"noise of {k}")


def test_all_forms_agree():
    batch = draw(jax.random.key(1), 7)
    first, *others = (layers_of(batch, form) for form in FORMS)
    for other in others:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), first, other)
    stats = pg.grad_stats(linear, BASE | {"norm": pg.Norm()})(PARAMS, batch)
    (whole,) = noise.by_layer(stats).values()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), whole, noise.total(first))


def test_chosen_parameters():
    where = lambda path: "a" in path  # noqa: E731
    batch = draw(jax.random.key(1), 7)
    every = layers_of(batch, "variance")
    for form in FORMS:
        chosen = layers_of(batch, form, where=where)
        assert list(chosen) == ["['a']"]
        np.testing.assert_allclose(chosen["['a']"].noise, every["['a']"].noise, rtol=1e-9)
    stats = pg.grad_stats(linear, BASE | {"norm": pg.Norm(where=where)})(PARAMS, batch)
    (whole,) = noise.by_layer(stats, where).values()
    np.testing.assert_allclose(whole.signal, every["['a']"].signal, rtol=1e-9)


def test_weights_are_counts():
    batch = draw(jax.random.key(2), 4)
    w = jnp.array([2.0, 1.0, 0.0, 3.0])
    repeated = jax.tree.map(lambda x: x[jnp.array([0, 0, 1, 3, 3, 3])], batch)
    for form in FORMS:
        stats = pg.grad_stats(linear, BASE | FORMS[form])(PARAMS, batch, example_weights=w)
        out = noise.by_layer(stats, example_weights=w)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-9), out, layers_of(repeated, form)
        )


@pytest.mark.parametrize("padding", [0.0, 1e6, np.nan])
def test_padding_is_not_there(padding):
    batch, w = draw(jax.random.key(2), 8), jnp.array([1.0] * 6 + [0.0] * 2)
    padded = jax.tree.map(lambda x: x.at[6:].set(padding), batch)
    monitor = noise.Monitor()
    stats_fn = pg.grad_stats(linear, monitor.stats)
    expected = monitor.update(
        stats_fn(PARAMS, jax.tree.map(lambda x: x[:6], batch)), monitor.init(PARAMS)
    )
    out = monitor.update(
        stats_fn(PARAMS, padded, example_weights=w), monitor.init(PARAMS), example_weights=w
    )
    assert monitor.summary(out) == pytest.approx(monitor.summary(expected))


def test_noise_is_not_negative():
    """Gradients that are all the same, in float32, where squares and means are rounded."""
    p = jnp.zeros(5, jnp.float32)
    for value in (0.1, 1.7, 3.3):
        g = jnp.full((7, 5), value, jnp.float32)
        for form in FORMS:
            stats = pg.grad_stats(lambda w, x: jnp.mean(x @ w), BASE | FORMS[form])(p, g)
            (layer,) = noise.by_layer(stats).values()
            assert layer.noise >= 0 and layer.snr > 1e3, form


def test_coordinates():
    batch = draw(jax.random.key(3), 6)
    g = oracle.per_example(linear, (PARAMS, batch))[2]
    for form in ("variance", "second_moment"):
        stats = pg.grad_stats(linear, BASE | FORMS[form])(PARAMS, batch)
        snr, share = noise.snr(stats), noise.share(stats)
        for k in g:
            sigma2 = g[k].var(axis=0, ddof=1)
            mu2 = np.square(g[k].mean(axis=0)) - sigma2 / 6
            with np.errstate(divide="ignore"):
                expected = np.where(mu2 > 0, sigma2 / 6 / mu2, np.inf)
            np.testing.assert_allclose(snr[k], np.sqrt(np.maximum(mu2, 0) / sigma2), rtol=1e-9)
            np.testing.assert_allclose(share[k], expected, rtol=1e-9)


def test_diversity_and_outliers():
    equal, apart = (
        {"a": jnp.ones((4, 3)), "b": jnp.ones((4, 2))},
        {"a": jnp.eye(3), "b": jnp.zeros((3, 2))},
    )
    np.testing.assert_allclose(noise.diversity(layers_of(equal), 4), 1 / 4)
    np.testing.assert_allclose(noise.diversity(layers_of(apart), 3), 1)
    norms = jnp.concatenate(
        [jax.random.uniform(jax.random.key(0), (31,), minval=1.0, maxval=2.0), jnp.array([80.0])]
    )
    assert np.flatnonzero(noise.outliers(norms)).tolist() == [31]
    assert noise.outliers(jnp.array([1.0, 1.1, np.nan, 0.9, np.inf])).tolist() == [False] * 4 + [True]
    assert not np.any(noise.outliers(jnp.ones(8))) and not np.any(noise.outliers(jnp.zeros(8)))


# What a sign keeps.

DISTRIBUTIONS = {
    "Gaussian": (lambda key, shape: jax.random.normal(key, shape), math.sqrt(2 / math.pi)),
    "uniform": (
        lambda key, shape: jax.random.uniform(key, shape, minval=-math.sqrt(3), maxval=math.sqrt(3)),
        1 / math.sqrt(3),
    ),
    "Laplace": (lambda key, shape: jax.random.laplace(key, shape) / math.sqrt(2), math.sqrt(2)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_sign_factor(name):
    draw, truth = DISTRIBUTIONS[name]
    sigma = jnp.geomspace(0.01, 100, 20_000)
    g = sigma[None] * draw(jax.random.key(0), (64, len(sigma)))
    out = pg.grad_stats(lambda w, x: jnp.mean(x @ w), noise.SIGN_FACTOR)(jnp.zeros(len(sigma)), g)
    # The deviation of the examples before is too small by a few percent, more so for heavy tails.
    assert abs(np.nanmean(out) / truth - 1) < 0.05

    # It is what a sign does to the signal: E[sign(g)] = factor * mu / sigma.
    many, rho = 400_000, 0.05
    kept = np.mean(np.sign(rho + np.asarray(draw(jax.random.key(1), (many,))))) / rho
    assert abs(kept - truth) < 4 / (rho * math.sqrt(many)) + 0.03


def test_sign_factor_of_sparse_gradients():
    """Exact zeros are no density: a sign keeps them."""
    g = jax.random.normal(jax.random.key(0), (64, 5000))
    sparse = jnp.where(jax.random.bernoulli(jax.random.key(1), 0.25, g.shape), g, 0)
    fn = pg.grad_stats(lambda w, x: jnp.mean(x @ w), noise.SIGN_FACTOR)
    # sigma^2 is a quarter, and so is the density: 2 f(0) sigma = 0.8 / 4 * 1/2.
    expected = math.sqrt(2 / math.pi) / 8
    assert abs(np.nanmean(fn(jnp.zeros(5000), sparse)) / expected - 1) < 0.1
    assert np.all(np.isnan(fn(jnp.zeros(5000), g[:8])))
    assert np.all(np.isnan(fn(jnp.zeros(5), jnp.zeros((20, 5)))))


def test_sign_of_mean_and_median():
    """Skewed gradients: most are a little below zero, few are far above."""
    key = jax.random.key(0)
    skewed = jnp.where(jax.random.bernoulli(key, 0.1, (2000, 50)), 20.0, -1.0)
    plain = 0.5 + jax.random.normal(key, (2000, 50))
    flat = jax.random.normal(key, (2000, 50))
    stats_fn = pg.grad_stats(
        lambda w, x: jnp.mean(x @ w),
        BASE | {"sign": pg.Mean(jnp.sign), "second_moment": pg.Mean(jnp.square)},
    )
    for g, expected in ((skewed, (50, 50)), (plain, (0, 50))):
        (out,) = noise.sign_disagreement(stats_fn(jnp.zeros(50), g)).values()
        assert tuple(map(int, out)) == expected
    ((_, sure),) = noise.sign_disagreement(stats_fn(jnp.zeros(50), flat)).values()
    assert sure < 10


# Curvature: a quadratic with known Hessian and noise.


def test_curvature_of_a_quadratic():
    r = np.random.default_rng(0)
    root = r.normal(size=(3, 3))
    H = root @ root.T + np.eye(3)
    p, centre, spread = np.array([2.0, -1.0, 0.5]), np.zeros(3), np.array([1.0, 0.5, 2.0])

    def loss(p: Tree, x: Any) -> Any:
        d = jnp.concatenate([p["u"], p["v"]])[None] - x
        return jnp.mean(0.5 * jnp.einsum("bi,ij,bj->b", d, H, d))

    mu, Sigma = H @ (p - centre), H @ np.diag(spread**2) @ H
    params = {"u": jnp.asarray(p[:2]), "v": jnp.asarray(p[2:])}

    def estimate(key: Any) -> Any:
        for_batch, for_probe = jax.random.split(key)
        x = centre[None] + spread[None] * jax.random.normal(for_batch, (5, 3))
        return noise.curvature(loss, probes=2)(for_probe, params, x)

    out = jax.jit(jax.vmap(estimate))(jax.random.split(jax.random.key(0), 4000))
    assert_unbiased(out.signal, mu @ H @ mu, "signal")
    assert_unbiased(out.noise, np.trace(H @ Sigma), "noise")

    # The critical batch size is where the best step does half of what is possible.
    critical = np.trace(H @ Sigma) / (mu @ H @ mu)
    progress = [(mu @ mu) ** 2 / (2 * (mu @ H @ mu + np.trace(H @ Sigma) / B)) for B in (critical, 1e12)]
    np.testing.assert_allclose(progress[0], progress[1] / 2, rtol=1e-9)


def test_curvature_refuses_labels_that_are_not_split():
    def loss(params, x, y):
        return jnp.mean(jnp.square(x @ params - y))

    key, args = jax.random.key(0), (jnp.ones(2), jnp.ones((4, 2)), jnp.arange(4.0))
    with pytest.raises(pg.ArgumentError, match=r"args\[2\].*batch_argnums=\(1, 2\).*shared_argnums=2"):
        noise.curvature(loss)(key, *args)
    both = noise.curvature(loss, batch_argnums=(1, 2))(key, *args)
    assert np.all(np.isfinite(both))


def test_curvature_of_one_example_at_a_time():
    x = jnp.arange(6.0).reshape(3, 2)
    batches = noise.curvature(lambda p, x: jnp.mean(jnp.square(x @ p)))
    singles = noise.curvature(lambda p, x: jnp.square(x @ p), keep_batch_dim=False)
    from_the_end = noise.curvature(lambda p, x: jnp.mean(jnp.square(x @ p)), batch_argnums=-1)
    two_at_a_time = noise.curvature(lambda p, x: jnp.mean(jnp.square(x @ p)), microbatch_size=2)
    key, p = jax.random.key(0), jnp.ones(2)
    for other in (singles, from_the_end, two_at_a_time):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-9),
            batches(key, p, x),
            other(key, p, x),
        )
    halves = batches(key, p.astype(jnp.bfloat16), x.astype(jnp.bfloat16))
    assert halves.signal.dtype != jnp.bfloat16


# The monitor.


def monitored(monitor: Any, sizes: Any, steps: int = 3000, mu: Tree = MU) -> Any:
    """The state after batches of these sizes, in turn."""
    stats_fn = pg.grad_stats(linear, monitor.stats)

    def step(state: Any, key: Any) -> Any:
        for size, own in zip(sizes, jax.random.split(key, len(sizes)), strict=True):
            state = monitor.update(stats_fn(PARAMS, draw(own, size, mu)), state)
        return state, None

    keys = jax.random.split(jax.random.key(0), steps)
    return jax.jit(lambda s: jax.lax.scan(step, s, keys))(monitor.init(PARAMS))[0]


@pytest.mark.parametrize("sizes", [(2,), (16,), (1, 2), (1, 4, 9)])
def test_monitor_finds_the_noise_scale(sizes):
    monitor = noise.Monitor(decay=0.9995)
    out = monitor.summary(monitored(monitor, sizes), layers=True)
    truth = sum(NOISE.values()) / sum(SIGNAL.values())
    assert abs(out["noise_scale"] / truth - 1) < 0.15
    assert abs(out["noise"] / sum(NOISE.values()) - 1) < 0.1
    assert abs(out["signal"] / sum(SIGNAL.values()) - 1) < 0.15
    assert abs(out["noise_scale/a"] / (NOISE["a"] / SIGNAL["a"]) - 1) < 0.15
    np.testing.assert_allclose(out["snr"], out["noise_scale"] ** -0.5, rtol=1e-5)
    np.testing.assert_allclose(out["noise_share"], out["noise_scale"] / sizes[-1], rtol=1e-5)


@pytest.mark.parametrize("sizes", [(1,), (2,), (8,), (1, 16)])
def test_across_steps(sizes):
    monitor = noise.Monitor(decay=0.9995, across_steps=True)
    assert set(monitor.stats) == {"mean", "count"}
    out = monitor.summary(monitored(monitor, sizes, 6000))
    truth = sum(NOISE.values()) / sum(SIGNAL.values())
    assert abs(out["noise_scale"] / truth - 1) < 0.2


def test_batches_of_one_say_nothing():
    monitor = noise.Monitor()
    out = monitor.summary(monitored(monitor, (1,), 5))
    assert all(out[name] is None for name in ("signal", "noise", "snr", "noise_scale", "diversity"))
    both = monitor.summary(monitored(monitor, (1, 4), 5))
    assert all(math.isfinite(both[name]) for name in ("signal", "noise", "diversity"))
    fresh = monitor.summary(monitor.init(PARAMS))
    assert fresh["noise_scale"] is None and fresh["outliers"] is None
    json.dumps(fresh, allow_nan=False)


def test_state_may_be_donated():
    monitor = noise.Monitor(signs=True)
    stats = pg.grad_stats(linear, monitor.stats)(PARAMS, draw(jax.random.key(0), 16))
    step = jax.jit(lambda state: monitor.update(stats, state), donate_argnums=0)
    state = step(step(monitor.init(PARAMS)))
    assert math.isfinite(monitor.summary(state)["noise"])


def test_first_step_by_hand():
    # Gradients 1 and 3: G = 4, s = 5, tr Sigma = 2, |mu|^2 = 3.
    monitor = noise.Monitor()
    stats = pg.grad_stats(lambda w, x: jnp.mean(w * x), monitor.stats)(
        jnp.ones(()), jnp.array([1.0, 3.0])
    )
    out = monitor.summary(monitor.update(stats, monitor.init(jnp.ones(()))))
    expected = {
        "signal": 3,
        "noise": 2,
        "snr": math.sqrt(1.5),
        "noise_scale": 2 / 3,
        "noise_share": 1 / 3,
        "diversity": 10 / 16,
        "outliers": 0,
    }
    assert out == pytest.approx(expected)


def test_summary_is_plain_numbers():
    monitor = noise.Monitor(signs=True, where=lambda path: "a" in path)
    out = monitor.summary(monitored(monitor, (16,), 3))
    assert all(type(x) is float for x in out.values())
    assert json.loads(json.dumps(out, allow_nan=False)) == pytest.approx(out)
    assert {"sign_factor", "sign_disagreement", "outliers", "diversity"} <= set(out)


def test_layers_on_request_with_names_that_dashboards_group():
    """Totals first, and of all parameters only those that `where` selects."""
    monitor = noise.Monitor(signs=True, where=lambda path: "c" not in path)
    params = {"params": {"Dense_0": [jnp.zeros(3)], "b": jnp.zeros(2)}, "c": jnp.zeros(1)}

    def loss(p: Tree, x: Tree) -> Any:
        return jnp.mean(x["a"] @ p["params"]["Dense_0"][0] + x["b"] @ p["params"]["b"] + p["c"][0])

    stats = pg.grad_stats(loss, monitor.stats)(params, draw(jax.random.key(0), 16))
    state = monitor.update(stats, monitor.init(params))
    totals, out = monitor.summary(state), monitor.summary(state, layers=True)
    assert not any("/" in name for name in totals)
    assert list(out)[: len(totals)] == list(totals) and totals.items() <= out.items()
    numbers = [
        "signal",
        "noise",
        "snr",
        "noise_scale",
        "noise_share",
        "sign_factor",
        "sign_disagreement",
    ]
    names = ["params/Dense_0/0", "params/b"]
    assert list(out)[len(totals) :] == [f"{number}/{name}" for name in names for number in numbers]
    json.dumps(out, allow_nan=False)


def test_two_layers_never_have_one_name():
    params = {"a/b": jnp.zeros(2), "a": {"b": jnp.zeros(2)}}
    monitor = noise.Monitor()
    assert len(monitor.summary(monitor.init(params), layers=True)) == 5 * 3 + 2


def test_no_signal_is_none():
    """Two opposite gradients: the signal is below 0 and the noise scale would be infinite."""
    monitor = noise.Monitor()
    loss = lambda w, x: jnp.mean(w * x)  # noqa: E731
    stats = pg.grad_stats(loss, monitor.stats)(jnp.ones(()), jnp.array([-1.0, 1.0]))
    out = monitor.summary(monitor.update(stats, monitor.init(jnp.ones(()))), layers=True)
    assert out["noise_scale"] is None and out["noise_share"] is None and out["snr"] == 0
    json.dumps(out, allow_nan=False)


def test_weights_that_are_forgotten_are_noticed():
    batch, w = draw(jax.random.key(2), 8), jnp.array([1.0] * 5 + [0.0] * 3)
    monitor = noise.Monitor()
    stats = pg.grad_stats(linear, monitor.stats)(PARAMS, batch, example_weights=w)
    line = "monitor.update(stats, state, example_weights=w)"
    for wrong in (None, jnp.ones(8)):
        with refused(pg.ArgumentError, "count 5 examples", line):
            monitor.update(stats, monitor.init(PARAMS), example_weights=wrong)
    state = jax.jit(monitor.update)(stats, monitor.init(PARAMS))
    assert monitor.summary(state)["noise"] is None
    state = jax.jit(monitor.update)(stats, monitor.init(PARAMS), example_weights=w)
    assert monitor.summary(state)["noise"] > 0


@pytest.mark.parametrize("across_steps", [True, False])
def test_statistics_of_other_parameters_are_refused(across_steps):
    monitor = noise.Monitor(across_steps=across_steps)
    stats = pg.grad_stats(linear, monitor.stats)(PARAMS, draw(jax.random.key(0), 4))
    state = monitor.init({"a": jnp.zeros(3), "c": jnp.zeros(2)})
    with refused(pg.ArgumentError, "['b']", "['c']", "monitor.init(params)"):
        monitor.update(stats, state)


def test_signs_over_steps():
    monitor = noise.Monitor(signs=True, decay=0.99)
    weak = {k: 0.05 * v for k, v in MU.items()}
    out = monitor.summary(monitored(monitor, (64,), 300, weak), layers=True)
    assert abs(out["sign_factor"] - math.sqrt(2 / math.pi)) < 0.15
    assert out["sign_disagreement"] < 0.01
    assert {"sign_factor/a", "sign_disagreement/b"} <= set(out)


def test_from_the_statistics_of_an_optimizer():
    monitor, tx = noise.Monitor(), pg.optim.micro_adam_var(1e-3)
    stats = pg.grad_stats(linear, tx.stats)(PARAMS, draw(jax.random.key(0), 8))
    out = monitor.summary(monitor.update(stats, monitor.init(PARAMS)))
    own = pg.grad_stats(linear, monitor.stats)(PARAMS, draw(jax.random.key(0), 8))
    expected = monitor.summary(monitor.update(own, monitor.init(PARAMS)))
    del out["outliers"], expected["outliers"]  # only norms tell
    assert out == pytest.approx(expected)


def test_curvature_in_the_monitor():
    monitor = noise.Monitor()
    stats = pg.grad_stats(linear, monitor.stats)(PARAMS, draw(jax.random.key(0), 8))
    state = monitor.init(PARAMS)
    assert "critical_batch_size" not in monitor.summary(monitor.update(stats, state))
    for signal, tr in ((1.0, 6.0), (3.0, 2.0)):
        state = monitor.update(stats, state, curvature=noise.SignalNoise(signal, tr))
    expected = (0.95 * 6 + 2) / (0.95 * 1 + 3)
    assert monitor.summary(state)["critical_batch_size"] == pytest.approx(expected, rel=1e-5)


def test_errors():
    stats = pg.grad_stats(linear, BASE)(PARAMS, draw(jax.random.key(0), 4))
    with pytest.raises(pg.ArgumentError, match=r'"second_moment": pg\.Mean\(jnp\.square\)'):
        noise.by_layer(stats)
    with pytest.raises(pg.ArgumentError, match="'count'"):
        noise.snr({"mean": jnp.ones(2), "variance": jnp.ones(2)})
    across = noise.Monitor(across_steps=True)
    with pytest.raises(pg.ArgumentError, match=r'"mean": pg\.Mean\(\)'):
        across.update({"count": jnp.asarray(4)}, across.init({"w": jnp.zeros(2)}))
    with pytest.raises(pg.ArgumentError, match="decay"):
        noise.Monitor(decay=1.0)
    with pytest.raises(pg.ArgumentError, match="no parameter"):
        noise.Monitor(where=lambda path: False).init(PARAMS)
    with pytest.raises(pg.ArgumentError, match="no parameter"):
        noise.by_layer(stats, lambda path: False)
    monitor = noise.Monitor()
    with pytest.raises(pg.ArgumentError, match="by='leaf'"):
        monitor.update(stats | {"norm": jnp.ones(4)}, monitor.init(PARAMS))


# A real model.


def test_brute_force_on_a_real_model():
    """Signal, noise and curvature of a network on digits, from every gradient and the Hessian."""
    digits = load_digits()
    images, labels = jnp.asarray(digits.data[:300]) / 16, jnp.asarray(digits.target[:300])
    r = np.random.default_rng(0)
    params = {
        "w1": jnp.asarray(r.normal(size=(64, 4)) / 8),
        "b1": jnp.zeros(4),
        "w2": jnp.asarray(r.normal(size=(4, 10)) / 2),
    }

    def loss(p: Tree, batch: Any) -> Any:
        x, y = batch
        logits = jnp.tanh(x @ p["w1"] + p["b1"][None]) @ p["w2"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))

    g = oracle.per_example(loss, (params, (images, labels)))[2]
    rows = np.concatenate([x.reshape(300, -1) for x in jax.tree.leaves(g)], axis=1)
    mu, noise_of = rows.mean(axis=0), {k: float(np.sum(x.var(axis=0))) for k, x in g.items()}

    monitor = noise.Monitor(decay=0.999)
    stats_fn = pg.grad_stats(loss, monitor.stats)

    def step(state: Any, key: Any) -> Any:
        which = jax.random.randint(key, (16,), 0, 300)
        layers = noise.by_layer(stats := stats_fn(params, (images[which], labels[which])))
        return monitor.update(stats, state), (layers, noise.total(layers))

    keys = jax.random.split(jax.random.key(0), 1500)
    state, (layers, all_layers) = jax.jit(lambda s: jax.lax.scan(step, s, keys))(monitor.init(params))
    assert_unbiased(all_layers.signal, float(mu @ mu), "signal")
    assert_unbiased(all_layers.noise, sum(noise_of.values()), "noise")
    for k in params:
        assert_unbiased(layers[f"['{k}']"].noise, noise_of[k], f"noise of {k}")
    truth = sum(noise_of.values()) / float(mu @ mu)
    assert abs(monitor.summary(state)["noise_scale"] / truth - 1) < 0.1

    # All examples as one batch: the Hessian is the same for every probe, so the answer is exact.
    flat, unflatten = jax.flatten_util.ravel_pytree(params)
    H = np.asarray(jax.hessian(lambda v: loss(unflatten(v), (images, labels)))(flat))
    centred = rows - mu
    tr = np.sum((centred @ H) * centred) / 299
    probe = jax.jit(lambda key: noise.curvature(loss)(key, params, (images, labels)))
    out = jax.lax.map(probe, jax.random.split(jax.random.key(1), 2000))
    assert_unbiased(out.noise, tr, "tr(H Sigma)")
    assert_unbiased(out.signal, mu @ H @ mu - tr / 300, "mu' H mu")
