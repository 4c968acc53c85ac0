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
    ],
)
def test_move(rule, expected):
    out = scaling.move(CONFIG, 64, 256, rule, noise_scale=128 if rule == "peak" else None)
    assert out.config == pytest.approx(CONFIG | {"steps": 250, "warmup_steps": 25} | expected)
    back = scaling.move(out.config, 256, 64, rule, noise_scale=128 if rule == "peak" else None)
    assert back.config == pytest.approx(CONFIG)
    for change in out.changes:
        assert change.reason and change.name in str(out)
        assert (change.reason == "left as it is") == (change.name not in MOVED[rule])
    # What comes out goes into an optimizer.
    kwargs = {k: v for k, v in out.config.items() if "steps" not in k}
    pg.optim.preconditioned_adam(**kwargs)


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
