"""Estimators of the squared mean gradient mu^2, as preconditioners: which is stable by itself?

    python -m pergrad.lab.bench.mean_square

Adam divides by the root of EMA[gbar^2], whose mean is mu^2 + sigma^2 / B. Without the noise it would be
mu^2, but every unbiased estimate of mu^2 is negative now and then. These estimators are compared, with
gradients of known mu and sigma:

    pairs      the mean of g_i g_j over all pairs i != j (`micro_adam_msq`)
    halves     the product of the means of two halves of the batch
    shrunk     pairs, pulled by a tenth towards gbar^2: the point (1, 0.1 / B) of the plane
    magnitude  the size of the average of pairs, whatever its sign
    floor z    pairs, but at least z standard errors of their average
    capped     pairs, and no update larger than 1
    Adam       gbar^2, for comparison

The first comparison has fixed mu and sigma: how many averages are not positive, how far the root is from
|mu| where the signal is clear, and how large updates become. The second minimises a quadratic, each
estimator with the best of its learning rates.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B1, B2, EPS = 0.9, 0.99, 1e-8
BATCH, SIZE = 16, 2000
ESTIMATORS = (
    "pairs",
    "halves",
    "shrunk",
    "magnitude",
    "floor 0.5",
    "floor 1",
    "floor 2",
    "capped",
    "Adam",
)
RATES = [10.0**k for k in np.arange(-4, 0.26, 0.25)]


def update(name: str, state: Any, g: jax.Array, t: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """One step with the gradients `g` [B, n]. It returns the state, nu and the update."""
    m, v, error = state
    n = g.shape[0]
    gbar, sigma2 = g.mean(0), g.var(0, ddof=1)
    mu2 = jnp.square(gbar) - sigma2 / n
    match name:
        case "halves":
            now = g[: n // 2].mean(0) * g[n // 2 :].mean(0)
        case "shrunk":
            now = 0.9 * mu2 + 0.1 * jnp.square(gbar)
        case "Adam":
            now = jnp.square(gbar)
        case _:
            now = mu2
    m, v = B1 * m + (1 - B1) * gbar, B2 * v + (1 - B2) * now
    error = B2 * error + (1 - B2) * sigma2 * np.sqrt(2 / (n * (n - 1)))
    nu = v / (1 - B2**t)
    if name == "magnitude":
        nu = jnp.abs(nu)
    if name.startswith("floor"):
        effective = (1 + B2) / (1 - B2) * (1 - B2**t) / (1 + B2**t)
        nu = jnp.maximum(nu, float(name.split()[1]) * error / (1 - B2**t) / jnp.sqrt(effective))
    out = m / (1 - B1**t) / (jnp.sqrt(jnp.maximum(nu, 0)) + EPS)
    return (m, v, error), nu, jnp.clip(out, -1, 1) if name == "capped" else out


def start() -> Any:
    zeros = jnp.zeros(SIZE)
    return zeros, zeros, zeros


def fixed(name: str, steps: int = 500) -> dict[str, float]:
    """Ratios mu / sigma from 0.001 to 1, and an eighth of the coordinates without any signal."""
    rho = jnp.where(jnp.arange(SIZE) % 8 == 0, 0, jnp.geomspace(1e-3, 1, SIZE))

    def step(state: Any, xs: Any) -> Any:
        key, t = xs
        state, nu, out = update(name, state, rho + jax.random.normal(key, (BATCH, SIZE)), t)
        return state, (nu, out)

    keys = jax.random.split(jax.random.key(0), steps)
    _, (nu, out) = jax.jit(lambda s: jax.lax.scan(step, s, (keys, jnp.arange(1.0, steps + 1))))(start())
    nu, out, mu = np.asarray(nu[-1]), np.abs(np.asarray(out[100:])), np.asarray(rho)
    clear = mu > 0.3
    found = {
        "not positive %": 100 * np.mean(nu <= 0),
        "sqrt(nu) / |mu| at mu > 0.3 sigma": np.median(np.sqrt(np.maximum(nu, 0))[clear] / mu[clear]),
        "update, median": np.median(out),
        "update, largest": out.max(),
    }
    return {title: float(x) for title, x in found.items()}


def quadratic(name: str, steps: int = 2000, seeds: int = 3) -> dict[str, float]:
    """0.5 sum h p^2 with h from 0.01 to 1 and noise of one unit in every example's gradient."""
    h = jnp.geomspace(1e-2, 1, SIZE)

    def final(rate: Any, key: Any) -> jax.Array:
        def step(carry: Any, xs: Any) -> Any:
            p, state = carry
            key, t = xs
            state, _, out = update(name, state, h * p + jax.random.normal(key, (BATCH, SIZE)), t)
            now = rate * 0.5 * (1 + jnp.cos(jnp.pi * t / steps))
            return (p - now * out, state), None

        keys = jax.random.split(key, steps)
        p = jax.lax.scan(step, (jnp.ones(SIZE), start()), (keys, jnp.arange(1.0, steps + 1)))[0][0]
        return 0.5 * jnp.mean(h * p**2)

    run = jax.jit(final)
    keys = jax.random.split(jax.random.key(1), seeds)
    losses = {rate: [float(run(rate, key)) for key in keys] for rate in RATES}
    finite = {rate: float(np.mean(own)) for rate, own in losses.items() if np.all(np.isfinite(own))}
    best = min(finite, key=lambda rate: finite[rate])
    spread = float(np.std(losses[best], ddof=1))
    return {"best rate": best, "final loss": finite[best], "+-": spread}


def main() -> None:
    print(f"B = {BATCH}, b1 = {B1}, b2 = {B2}\n")
    for number, name in enumerate(ESTIMATORS):
        row = fixed(name) | quadratic(name)
        if number == 0:
            print(f"{'':10}", *row, sep="  ")
        print(f"{name:10}", *(f"{x:{len(title)}.3g}" for title, x in row.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
