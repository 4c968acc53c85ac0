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
from pergrad.lab import price
from pergrad.lab.timing import table

STATISTICS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)}
MODEL = Transformer(batch=32, length=64, width=128, layers=2, vocab=256)
STEPS = 80
WINDOW = 20  # steps over which signal and noise are averaged before they are divided
MONITOR = pg.noise.Monitor(
    decay=1 - 1 / WINDOW, where=lambda path: "norm" not in path and "bias" not in path
)

# Modules that have long been there and are written in Python.
MODULES = (
    *("argparse", "ast", "calendar", "cmd", "configparser", "csv", "dataclasses", "difflib"),
    *("fractions", "heapq", "inspect", "mailbox", "shutil", "statistics", "tarfile", "typing"),
)


def read_text() -> np.ndarray:
    """The bytes of the modules, one after the other, as int32 tokens."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / f"{name}.py").read_bytes() for name in MODULES)
    return np.frombuffer(text, np.uint8).astype(np.int32)


def draw_batch(text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Windows of the text from random places, `[B, T + 1]`."""
    starts = rng.integers(0, len(text) - MODEL.length, size=MODEL.batch)
    return text[starts[:, None] + np.arange(MODEL.length + 1)]


def train(text: np.ndarray) -> list[dict[str, float]]:
    """Train with Adam on the mean gradient; the noise in it after `WINDOW` steps, and at the end."""
    stats_fn = pg.value_and_stats(MODEL.loss, STATISTICS | {"count": pg.Count()})
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params, state, noise, tokens):
        loss, statistics = stats_fn(params, tokens)
        updates, state = optimizer.update(statistics["mean"], state, params)
        return optax.apply_updates(params, updates), state, MONITOR.update(statistics, noise), loss

    params = MODEL.init(jax.random.key(0))
    state, noise = optimizer.init(params), MONITOR.init(params)
    rng = np.random.default_rng(0)
    summaries = []
    for index in range(STEPS):
        params, state, noise, loss = step(params, state, noise, draw_batch(text, rng))
        if index + 1 in (WINDOW, STEPS):
            summaries.append(MONITOR.summary(noise))
        if index % 10 == 0 or index == STEPS - 1:
            print(f"  step {index:3d}   loss {loss:.3f}", flush=True)
    return summaries


def noise_table(summaries: list[dict[str, float]]) -> str:
    """Signal-to-noise ratio of the mean gradient and share of noise, early and late in training."""
    rows = []
    for name in summaries[0]:
        if name.startswith("noise_share"):
            shares = [summary[name] for summary in summaries]
            ratios = [f"{share**-0.5:.2f}" for share in shares]
            parts = [f"{1 - 1 / (1 + share):.0%}" for share in shares]
            rows.append([name.removeprefix("noise_share") or "all", *ratios, *parts])
    return table(["parameter", "SNR early", "SNR late", "noise early", "noise late"], rows)


def compare_costs(params: Any, tokens: np.ndarray) -> str:
    """Time and memory of every way to the same statistics."""
    candidates = price.candidates(MODEL.loss, micro_grad_sizes=(1, 4))
    results = price.measure(candidates, params, tokens, rounds=10, budget=5.0)
    return table(price.HEADER, price.cells(price.best_of_each(results)))


def main() -> None:
    text = read_text()
    params = MODEL.init(jax.random.key(0))
    tokens = draw_batch(text, np.random.default_rng(0))

    print(f"The text: {len(text):,} bytes of Python's standard library.")
    print(f"The model: {MODEL}")
    print("\nHow pergrad will get the mean and the second moment of the per-example gradients:\n")
    print(pg.explain(MODEL.loss, STATISTICS)(params, tokens))

    print(f"\nTraining for {STEPS} steps with Adam on the mean:\n")
    summaries = train(text)

    print(
        f"\nFrom the second moment: how much of a gradient over {MODEL.batch} examples is signal?\n"
        f"(early: step {WINDOW}, late: step {STEPS}, each an average over about {WINDOW} steps;\n"
        "SNR: signal-to-noise ratio of the mean, noise: its part of the mean gradient's squared norm)\n"
    )
    print(noise_table(summaries))
    late = summaries[-1]
    print(
        f"\nAll together have the noise scale {late['noise_scale']:.0f}: in batches of so many examples "
        "noise and signal are equal.\n"
        f"Adam's second moment is {late['noise_share']:.1f} parts noise to 1 part signal."
    )

    print("\nWhat it costs, as multiples of the mean gradient alone:\n", flush=True)
    print(compare_costs(params, tokens))
    print("\nAll but the first return the same statistics (checked). `make bench` has larger models.")


if __name__ == "__main__":
    main()
