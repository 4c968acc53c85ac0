"""Learning-rate rules: their formulas, what a move of a whole configuration does, and what Adam does."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pergrad as pg
from pergrad import scaling


def test_rules():
    assert scaling.sqrt(0.1, 9) == pytest.approx(0.3)
    assert scaling.linear(0.1, 9) == pytest.approx(0.9)
    assert scaling.decay(0.9, 4) == pytest.approx(0.6)
    assert scaling.decay(0.99, 100) == 0  # exactly one step, also after rounding


def test_peak():
    sizes = [2.0**k for k in range(4, 17)]
    rates = [scaling.peak(1e-3, 1024, size, noise_scale=1024) for size in sizes]
    assert rates[sizes.index(1024)] == pytest.approx(1e-3) == max(rates)
    # As much below as above, the square-root rule far below, its inverse far above.
    assert scaling.peak(1.0, 512, 2048, noise_scale=1024) == pytest.approx(1)
    assert scaling.peak(1.0, 1, 4, noise_scale=1e8) == pytest.approx(2)
    assert scaling.peak(1.0, 1e8, 4e8, noise_scale=1) == pytest.approx(0.5)
    # eta_max / ((sqrt(Bn / B) + sqrt(B / Bn)) / 2)
    expected = 1e-3 / ((math.sqrt(1024 / 64) + math.sqrt(64 / 1024)) / 2)
    assert scaling.peak(1e-3, 1024, 64, noise_scale=1024) == pytest.approx(expected)


def test_gain():
    """AdaScale's gain by its definition, from the noise of the old batch and the signal."""
    trace, signal = 12.0, 0.5
    for size, new in ((8, 32), (8, 9), (64, 16)):
        sigma2, r = trace / size, new / size
        expected = (sigma2 + signal) / (sigma2 / r + signal)
        assert scaling.gain(size, new, noise_scale=trace / signal) == pytest.approx(expected)
    assert scaling.gain(8, 32, noise_scale=1e9) == pytest.approx(4)
    assert scaling.gain(8, 32, noise_scale=1e-9) == pytest.approx(1)
    assert scaling.gain(8, 32, noise_scale=math.inf) == 4
    assert scaling.peak(1.0, 8, 32, noise_scale=math.inf) == 2


def test_gain_is_the_ratio_of_mean_squares():
    """It is E|gbar|^2 of the old batch over that of the new one, for gradients that are drawn."""
    mu, sigma = np.array([0.5, 0.2]), np.array([1.0, 2.0])
    g = mu + sigma * np.random.default_rng(0).normal(size=(40_000, 16, 2))
    small, large = (np.mean(np.sum(g[:, :size].mean(axis=1) ** 2, axis=-1)) for size in (4, 16))
    noise_scale = np.sum(sigma**2) / np.sum(mu**2)
    assert scaling.gain(4, 16, noise_scale) == pytest.approx(small / large, rel=0.03)


CONFIG = {
    "learning_rate": 1e-3,
    "b1": 0.9,
    "b2": 0.99,
    "eps": 1e-8,
    "eps_root": 1e-12,
    "weight_decay": 0.1,
    "steps": 1000,
    "warmup_steps": 100,
    "nesterov": True,
}

# What each rule has a reason to change.
ALWAYS = {"learning_rate", "weight_decay", "steps", "warmup_steps"}
MOVED = {
    "sqrt": ALWAYS,
    "linear": ALWAYS,
    "peak": ALWAYS,
    "adascale": ALWAYS,
    "sde": ALWAYS | {"b1", "b2", "eps", "eps_root"},
}


@pytest.mark.parametrize(
    "rule, expected",
    [
        ("sqrt", {"learning_rate": 2e-3, "weight_decay": 0.2}),
        ("linear", {"learning_rate": 4e-3, "weight_decay": 0.1}),
        (
            "sde",
            {
                "learning_rate": 2e-3,
                "weight_decay": 0.2,
                "b1": 0.6,
                "b2": 0.96,
                "eps": 5e-9,
                "eps_root": 2.5e-13,
            },
        ),
        ("peak", {"learning_rate": 1e-3, "weight_decay": 0.4}),
        # The gain is (128 / 64 + 1) / (128 / 256 + 1) = 2.
        ("adascale", {"learning_rate": 2e-3, "steps": 500, "warmup_steps": 50}),
    ],
)
def test_move(rule, expected):
    noise_scale = 128 if rule in ("peak", "adascale") else None
    out = scaling.move(CONFIG, 64, 256, rule, noise_scale=noise_scale)
    assert out.config == pytest.approx(CONFIG | {"steps": 250, "warmup_steps": 25} | expected)
    assert out.batch_size == 256
    back = scaling.move(out.config, 256, 64, rule, noise_scale=noise_scale)
    assert back.config == pytest.approx(CONFIG)
    for change in out.changes:
        assert change.reason and change.name in str(out)
        assert (change.reason == "left as it is") == (change.name not in MOVED[rule])
    # What comes out goes into an optimizer.
    kwargs = {k: v for k, v in out.config.items() if "steps" not in k}
    pg.optim.preconditioned_adam(**kwargs)


def test_batch_sizes_follow_the_noise_scale():
    follow = scaling.batch_size({"learning_rate": 1e-3, "b2": 0.99}, 16, [256, 16, 64], fraction=0.5)
    sizes, now = [], None
    for noise_scale in (None, 3.0, 40.0, 127.9, 128.0, 20.0, math.inf, math.nan, 1e6):
        step = follow(noise_scale, now)
        now = step.batch_size
        sizes.append(now)
        expected = scaling.move({"learning_rate": 1e-3, "b2": 0.99}, 16, now)
        assert step == expected
    assert sizes == [16, 16, 16, 16, 64, 64, 64, 64, 256]
    assert follow(40.0).batch_size == 16  # without `now` it may shrink


@pytest.mark.parametrize("rule", scaling.RULES)
def test_batch_sizes_with_every_rule(rule):
    follow = scaling.batch_size({"learning_rate": 1e-3}, 16, [16, 64], rule)
    out = follow(100.0, 16)
    assert out == scaling.move({"learning_rate": 1e-3}, 16, 64, rule, noise_scale=100.0)
    # Nothing is known about the noise: the size stays, and the rate is that far below the noise scale.
    unknown = follow(None, 64).config["learning_rate"]
    assert unknown == pytest.approx({"linear": 4e-3, "adascale": 4e-3}.get(rule, 2e-3))


def test_schedules_run_over_examples():
    schedule = optax.linear_schedule(1e-3, 0.0, 1000)
    out = scaling.move({"learning_rate": schedule}, 64, 256)
    for step in (0, 100, 250):
        assert out.config["learning_rate"](step) == pytest.approx(2 * schedule(4 * step))
    assert "schedule" in str(out)
    out = scaling.move({"learning_rate": 1e-3, "weight_decay": schedule}, 64, 256)
    assert out.config["weight_decay"](100) == pytest.approx(2 * schedule(400))


def test_what_is_not_there_is_left():
    config = {"learning_rate": 1e-3, "weight_decay": None, "warmup_steps": None, "eps": None}
    assert scaling.move(config, 64, 256, "sde").config == config | {"learning_rate": 2e-3}


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: scaling.decay(0.9, 11), "less than one"),
        (lambda: scaling.move(CONFIG, 64, 64 * 11, "sde"), "less than one"),
        (lambda: scaling.move(CONFIG, 64, 128, "cubic"), "'linear'"),
        (lambda: scaling.move({"lr": 1.0}, 64, 128), "learning_rate"),
        (lambda: scaling.move(CONFIG, 64, 128, "peak"), "noise_scale"),
        (lambda: scaling.move(CONFIG, 64, 128, "peak", noise_scale=0), "noise_scale"),
        (lambda: scaling.move(CONFIG, 64, 128, "adascale"), "noise_scale.*'linear'"),
        (lambda: scaling.gain(64, 128, -1.0), "noise_scale"),
        (lambda: scaling.batch_size(CONFIG, 64, []), "sizes"),
        (lambda: scaling.batch_size(CONFIG, 64, [0, 64]), "sizes"),
        (lambda: scaling.batch_size(CONFIG, 64, [64], fraction=0), "fraction"),
        (lambda: scaling.batch_size(CONFIG, 64, [64], "cubic"), "'linear'"),
        (lambda: scaling.batch_size({"learning_rate": lambda t: 1.0}, 64, [64]), "over examples"),
        (lambda: scaling.move(CONFIG | {"b1": lambda step: 0.9}, 64, 128, "sde"), "b1"),
        (lambda: scaling.move(CONFIG, 0, 128), "batch_size"),
        (lambda: scaling.sqrt(1.0, -1), "kappa"),
    ],
)
def test_errors(make, text):
    with pytest.raises(pg.ArgumentError, match=text):
        make()


@pytest.mark.parametrize("rule", ["sqrt", "sde", "linear"])
def test_what_the_rules_keep(rule):
    """Noise alone, no signal: how far parameters drift over the same examples is kept by the right rule.

    Adam's steps add up like a random walk of sqrt(steps) steps of the learning rate, so the square-root
    rule keeps it; MicroAdam's have the length of the noise, sigma / sqrt(B), so the linear rule does.
    """
    config = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.99, "steps": 4000}
    kappa = 4

    def drift(make, config, batch_size) -> float:
        steps = config["steps"]
        tx = make(**{k: v for k, v in config.items() if k != "steps"})

        def step(carry, key):
            p, state = carry
            g = jax.random.normal(key, (batch_size, 400))
            stats = {"mean": g.mean(0), "second_moment": jnp.square(g).mean(0)}
            updates, state = tx.update(stats["mean"], state, p, stats=stats)
            return (p + updates, state), None

        start = jnp.zeros(400)
        keys = jax.random.split(jax.random.key(0), steps)
        (p, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, keys))((start, tx.init(start)))
        return float(np.std(p))

    make = pg.optim.micro_adam if rule == "linear" else pg.optim.preconditioned_adam
    moved = scaling.move(config, 2, 2 * kappa, rule).config
    ratio = drift(make, moved, 2 * kappa) / drift(make, config, 2)
    # Standard deviations of 400 numbers: each is good to 1 / sqrt(800).
    assert abs(ratio - 1) < 4 * math.sqrt(2 / 800)
    unmoved = config | {"steps": config["steps"] // kappa}
    assert drift(make, unmoved, 2 * kappa) / drift(make, config, 2) < 0.75
