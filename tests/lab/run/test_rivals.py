"""The optimizers that the study `rivals` compares with, by hand, and training examples of no use."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pergrad.lab.config import Model, Train
from pergrad.lab.errors import LabError
from pergrad.lab.run import data, optimizers, rivals, train
from tests.support import labs

B1, B2 = 0.9, 0.95
G = np.array([[1.0, 2.0, -0.5], [3.0, -1.0, -0.5], [2.0, 0.5, 1.0], [0.0, 0.5, -2.0]] * 4)  # 16 examples


def first_update(tx, groups: int = 16) -> np.ndarray:
    """The first update, from the statistics of `G`, whose groups are neighbours."""
    means = G.reshape(groups, -1, G.shape[1]).mean(1)
    every = {
        "mean": G.mean(0),
        "variance": G.var(0, ddof=1),
        "second_moment": (means**2).mean(0),
        "fourth_moment": (means**4).mean(0),
        "count": len(G),
    }
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


def test_the_inverse_root_is_corrected():
    squares = G.reshape(8, 2, 3).mean(1) ** 2
    nu, variance = squares.mean(0), squares.var(0, ddof=1) / 8
    kept = 1 - 3 / 8 * (1 - B2) / (1 + B2) * variance / nu**2
    out = first_update(rivals.corrected_adam(B1, B2, 0.0, batch_size=16), groups=8)
    np.testing.assert_allclose(out, -kept * G.mean(0) / np.sqrt(nu), rtol=1e-5)
    with pytest.raises(LabError, match="cuts a batch into 8 groups, and 12 examples cannot be"):
        rivals.corrected_adam(B1, B2, 0.0, batch_size=12)


def test_options_that_rivals_do_not_have():
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
