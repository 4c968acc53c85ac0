"""The optimizers that the study `rivals` compares with, by hand, and training examples of no use."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from pergrad.lab.config import Model, Train
from pergrad.lab.errors import LabError
from pergrad.lab.run import data, optimizers, rivals, train
from tests.support import labs

B1, B2 = 0.9, 0.95
G = np.array([[1.0, 2.0, -0.5], [3.0, -1.0, -0.5], [2.0, 0.5, 1.0], [0.0, 0.5, -2.0]] * 4)  # 16 examples


def first_update(tx) -> np.ndarray:
    """The first update, from the statistics of `G`."""
    every = {"mean": G.mean(0), "variance": G.var(0, ddof=1), "count": len(G)}
    stats = {name: jnp.asarray(every[name]) for name in tx.stats}
    out, state = tx.update(stats["mean"], tx.init(stats["mean"]), stats=stats)
    assert state.count == 1
    return np.asarray(out)


def test_the_weight_of_the_noise_follows_the_layer():
    gbar, sigma2, B = G.mean(0), G.var(0, ddof=1), len(G)
    s = sigma2.sum() / B / (gbar**2).sum()
    assert 0 < s < 1
    nu = gbar**2 - (1 - s) * sigma2 / B
    expected = -np.clip(gbar / np.sqrt(np.maximum(nu, 0) + 1e-300), -1, 1)
    np.testing.assert_allclose(first_update(rivals.share_adam(B1, B2, 0.0)), expected, rtol=1e-5)


def test_the_momentum_is_shrunk_by_its_noise():
    gbar, sigma2, B = G.mean(0), G.var(0, ddof=1), len(G)
    kept = gbar**2 / (gbar**2 + (1 - B1) / (1 + B1) * sigma2 / B)
    np.testing.assert_allclose(
        first_update(rivals.shrunk_adam(B1, B2, 0.0)), -kept * np.sign(gbar), rtol=1e-5
    )


def averaged(values: list[np.ndarray], decay: float) -> np.ndarray:
    """The moving average without the bias of its start: a mean with the weights decay^0, decay^1, ..."""
    return np.average(values, axis=0, weights=decay ** np.arange(len(values))[::-1])


def by_hand(name: str, layer: list[np.ndarray]) -> np.ndarray:
    """A layer's update after some steps, from the examples' gradients [B, ...] of every step."""
    B = len(layer[0])
    means = [g.mean(0) for g in layer]
    variances = [g.var(0, ddof=1) for g in layer]
    m, eps = averaged(means, B1), 1e-8
    if name == "share_adam":
        noise = [min(1.0, v.sum() / B / (g**2).sum()) for g, v in zip(means, variances, strict=True)]
        nows = [
            g**2 - v / B + s * v / B for g, v, s in zip(means, variances, noise, strict=True)
        ]  # mu2 + s sigma2 / B
        return -np.clip(m / (np.sqrt(np.maximum(averaged(nows, B2), 0)) + eps), -1, 1)
    if name == "shrunk_adam":
        of_momentum = (1 - B1) / (1 + B1) * averaged(variances, B2) / B
        nu = averaged([g**2 for g in means], B2)
        return -(m**3) / (m**2 + of_momentum) / (np.sqrt(nu) + eps)
    groups = np.split(np.arange(B), 8)
    m_r = [averaged([*means[:-1], layer[-1][own].mean(0)], B1) for own in groups]
    others = [np.delete(layer[-1], own, 0).mean(0) for own in groups]
    squares = [g**2 for g in means[:-1]]
    p = [np.sqrt(averaged([*squares, g**2], B2)) + eps for g in others]
    variance = 7 / 8 * sum((one - np.mean(p, 0)) ** 2 for one in p)
    each = [a / b * np.maximum(1 - variance / b**2, 0) for a, b in zip(m_r, p, strict=True)]
    return -np.clip(np.mean(each, 0), -1, 1)


@pytest.mark.parametrize("name", ["share_adam", "shrunk_adam", "corrected_adam"])
def test_thirty_steps_of_two_layers(name):
    """The statistics are pergrad's, of a loss whose gradients are the examples themselves."""
    random = np.random.default_rng(5)
    signal = {"a": random.normal(size=(3, 2)), "b": 0.05 * random.normal(size=4)}
    config = Train(optimizer=name, batch_size=16, b1=B1, b2=B2)
    tx = optimizers.make(config)
    params = {layer: jnp.zeros(mu.shape) for layer, mu in signal.items()}

    def loss(params, batch):
        return jnp.mean(sum(jnp.tensordot(batch[k], w, w.ndim) for k, w in params.items()))

    stats_fn = jax.jit(pg.grad_stats(loss, tx.stats))
    seen: dict[str, list[np.ndarray]] = {layer: [] for layer in signal}
    state = tx.init(params)
    for _ in range(30):
        batch = {k: mu + random.normal(size=(16, *mu.shape)) for k, mu in signal.items()}
        stats = stats_fn(params, batch)
        updates, state = tx.update(stats["mean"], state, params, stats=stats)
        for layer, own in seen.items():
            own.append(batch[layer])
            np.testing.assert_allclose(updates[layer], by_hand(name, own), rtol=1e-9, atol=1e-9)
    for own in updates.values():
        assert (abs(own) < 0.99).any() and (abs(own) > 1e-3).all(), "not all are capped, or 0"


def test_options_that_rivals_do_not_have():
    with pytest.raises(LabError, match="cuts a batch into 8 groups, and 12 examples cannot be"):
        optimizers.make(Train(optimizer="corrected_adam", batch_size=12))
    with pytest.raises(LabError, match="shrunk_adam has no weight_decay: leave it out"):
        optimizers.make(Train(optimizer="shrunk_adam", weight_decay=0.1))


def test_outliers():
    examples = np.arange(4000, dtype=np.int32).reshape(1000, 4) % 7
    mixed = data.with_outliers(examples, 0.25, 256, seed=3)
    replaced = (mixed != examples).any(1)
    assert 200 < replaced.sum() < 300 and mixed[replaced].max() > 240 and mixed.min() >= 0
    assert (examples == np.arange(4000).reshape(1000, 4) % 7).all(), "the examples are left as they were"
    assert data.with_outliers(examples, 0.0, 256, seed=3) is examples
    assert (mixed == data.with_outliers(examples, 0.25, 256, seed=3)).all()
    assert (mixed != data.with_outliers(examples, 0.25, 256, seed=4)).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_by": "quantile"}, "needs --clip between 0 and 1, not None"),
        ({"clip_by": "quantile", "clip": 1.5}, "needs --clip between 0 and 1, not 1.5"),
        ({"outliers": 1.0}, "from 0 to below 1, not 1.0"),
        ({"outliers": 0.1, "domain": "images", "data": "digits"}, "the digits have none"),
    ],
)
def test_options_that_do_not_work(options, words):
    with pytest.raises(LabError, match=words):
        Train(**options)


def test_the_quantile_is_followed(tmp_path):
    """The first batch is not clipped. The norm is then an average of the quantiles of all batches."""
    text = labs.write_text(tmp_path / "text", files=4)
    config = Train(
        data=str(text), model=Model(layers=1, width=8, heads=2, context=8), batch_size=8, steps=3
    )
    config = replace(config, clip=0.5, clip_by="quantile", outliers=0.2)
    norms = [jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([1.0, 3.0, 5.0, 8.0])]
    first = train._followed(jnp.float32(jnp.inf), norms[0], 0.5)
    assert first == 3.0 and train._followed(first, norms[1], 0.5) == pytest.approx(0.9 * 3 + 0.1 * 4)
    result = train.train(config, tmp_path / "run")
    assert not result["diverged"] and result["steps"] == 3


def test_a_rate_that_stays():
    config = Train(steps=100, learning_rate=0.5, schedule="constant")
    assert optimizers.learning_rate(config, 0) == 0.05
    assert {optimizers.learning_rate(config, step) for step in range(9, 100)} == {0.5}
