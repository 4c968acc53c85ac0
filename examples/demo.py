"""A small language model that knows how noisy its gradient is, and what that costs.

    python -m examples.demo

Trains a byte-level transformer on the sources of Python's standard library, asking for the second
moment of the per-example gradients beside their mean, and shows three things: the plan, the noise
in each layer's gradient, and time and memory beside the alternatives.
"""

import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pergrad as pg
from benchmarks.models import Transformer
from benchmarks.side_by_side import (
    STATISTICS,
    candidates,
    cost_table,
    largest_difference,
    with_best_micro_grad,
)
from benchmarks.timing import compile_all, table, time_all

MODEL = Transformer(batch=32, length=64, width=128, layers=2, vocab=256)
STEPS = 80
WINDOW = 20  # steps over which signal and noise are averaged before they are divided

# Modules that have long been there and are written in Python.
MODULES = (
    *("argparse", "ast", "calendar", "cmd", "configparser", "csv", "dataclasses", "difflib"),
    *("fractions", "heapq", "inspect", "mailbox", "shutil", "statistics", "tarfile", "typing"),
)

Noise = dict[str, tuple[jax.Array, jax.Array]]


def read_text() -> np.ndarray:
    """The bytes of the modules, one after the other, as int32 tokens."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / f"{name}.py").read_bytes() for name in MODULES)
    return np.frombuffer(text, np.uint8).astype(np.int32)


def draw_batch(text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Windows of the text from random places, `[B, T + 1]`."""
    starts = rng.integers(0, len(text) - MODEL.length, size=MODEL.batch)
    return text[starts[:, None] + np.arange(MODEL.length + 1)]


def signal_and_noise(statistics: dict[str, Any]) -> Noise:
    """For each layer the squares of signal and noise in the mean gradient, summed over parameters.

    The mean gbar over B examples has E[gbar^2] = mu^2 + sigma^2 / B. With q the mean of g_i^2, both
    terms have an unbiased estimate, and they add up to gbar^2:

        mu^2        = (B gbar^2 - q) / (B - 1)
        sigma^2 / B = (q - gbar^2) / (B - 1)
    """
    B = MODEL.batch
    gbar_leaves = jax.tree.leaves_with_path(statistics["mean"])
    q_leaves = jax.tree.leaves(statistics["second_moment"])
    layers: Noise = {}
    for (path, gbar), q in zip(gbar_leaves, q_leaves, strict=True):
        layer = jax.tree_util.keystr(path[:-1] or path, simple=True, separator=".")
        signal, noise = layers.get(layer, (jnp.zeros(()), jnp.zeros(())))
        layers[layer] = (
            signal + jnp.sum(B * gbar**2 - q) / (B - 1),
            noise + jnp.sum(q - gbar**2) / (B - 1),
        )
    return layers


def train(text: np.ndarray) -> list[Noise]:
    """Train with Adam on the mean gradient; returns the signal and noise of every step."""
    stats_fn = pg.value_and_stats(MODEL.loss, STATISTICS)
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params, state, tokens):
        loss, statistics = stats_fn(params, tokens)
        updates, state = optimizer.update(statistics["mean"], state, params)
        return optax.apply_updates(params, updates), state, loss, signal_and_noise(statistics)

    params = MODEL.init(jax.random.key(0))
    state = optimizer.init(params)
    rng = np.random.default_rng(0)
    history = []
    for index in range(STEPS):
        params, state, loss, noise = step(params, state, draw_batch(text, rng))
        history.append(noise)
        if index % 10 == 0 or index == STEPS - 1:
            print(f"  step {index:3d}   loss {loss:.3f}", flush=True)
    return history


def noise_table(history: list[Noise]) -> str:
    """Signal-to-noise ratio and share of noise, early and late in training."""
    rows = []
    for layer in history[0]:
        early, late = (_ratio_and_share(part, layer) for part in (history[:WINDOW], history[-WINDOW:]))
        rows.append([layer, f"{early[0]:.2f}", f"{late[0]:.2f}", f"{early[1]:.0%}", f"{late[1]:.0%}"])
    return table(["layer", "SNR early", "SNR late", "noise early", "noise late"], rows)


def _ratio_and_share(history: list[Noise], layer: str) -> tuple[float, float]:
    """`sqrt(B) mu / sigma` and the noise's part of `E[gbar^2]`; averaged first, then divided."""
    signal, noise = np.mean([noise[layer] for noise in history], axis=0)
    signal = max(signal, 0.0)  # the estimate can be negative where there is nearly no signal
    return (signal / noise) ** 0.5, noise / (signal + noise)


def compare_costs(params: Any, tokens: np.ndarray) -> str:
    """Time and memory of every way to the same statistics."""
    programs = compile_all(
        candidates(MODEL.loss, micro_grad_sizes=(1, 4), pergrad_sizes=("auto",)), params, tokens
    )
    largest_difference(programs, params, tokens)
    results = time_all(programs, params, tokens, rounds=10, budget=5.0)
    return cost_table(with_best_micro_grad(results))


def main() -> None:
    text = read_text()
    params = MODEL.init(jax.random.key(0))
    tokens = draw_batch(text, np.random.default_rng(0))

    print(f"The text: {len(text):,} bytes of Python's standard library.")
    print(f"The model: {MODEL}")
    print("\nHow pergrad will get the mean and the second moment of the per-example gradients:\n")
    print(pg.explain(MODEL.loss, STATISTICS)(params, tokens))

    print(f"\nTraining for {STEPS} steps with Adam on the mean:\n")
    history = train(text)

    print(
        f"\nFrom the second moment: how much of a gradient over {MODEL.batch} examples is signal?\n"
        f"(early: the first {WINDOW} steps, late: the last {WINDOW}; "
        "SNR: signal-to-noise ratio of the mean,\n"
        "noise: its part of the mean gradient's squared norm)\n"
    )
    print(noise_table(history))

    print("\nWhat it costs, as multiples of the mean gradient alone:\n", flush=True)
    print(compare_costs(params, tokens))
    print("\nAll but the first return the same statistics (checked). `make bench` has larger models.")


if __name__ == "__main__":
    main()
