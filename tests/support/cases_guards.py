"""Cases with conditionals that guard, and rules that look away; how to read them is said in `cases`.

The branch that is not taken would give NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tests.support.cases import BATCH, Maker, Tree, array, case, data, mse, param, step
from tests.support.cases_loops import each


def with_zeros(*shape: int) -> Maker:
    """Data whose second and fourth example are zeros."""

    def make(r: np.random.Generator, dtype: Any) -> Array:
        x = r.normal(size=(BATCH, *shape))
        x[1::2] = 0
        return array(x, dtype)

    return make


LOW_RANK = {"a": param(3, 7), "c": param(7, 2)}


@case(LOW_RANK, {"x": data(3), "y": data(2)}, step(0))
def guard_for_all(p: Tree, batch: Tree, scale: Array) -> Array:
    # The branch that nobody takes recomputes c / 0, by which its gradient would be multiplied.
    scaled = jax.checkpoint(lambda: p["a"] @ (p["c"] / scale.astype(p["c"].dtype)))
    w = lax.cond(scale > 0, scaled, lambda: p["a"] @ p["c"])
    return mse(jnp.tanh(batch["x"] @ w), batch["y"])


@case({"w": param(3, 6), "b": param(6), "out": param(6, 2)}, {"x": with_zeros(3), "y": data(2)})
def guard_by_example(p: Tree, batch: Tree) -> Array:
    # Some examples have no direction: sqrt has no slope at 0, log no value, 0 / 0 neither.
    def one(example: Tree) -> Array:
        x = example["x"]
        size = jnp.sum(jnp.square(x))
        which = jnp.where(size == 0, 0, jnp.where(x[0] > 0, 1, 2))

        def direction() -> Array:
            h = x @ p["w"]
            return jnp.tanh(h / jnp.sqrt(jnp.sum(jnp.square(h))))

        branches = [
            lambda: x @ p["w"] + p["b"],
            direction,
            lambda: p["b"] * jnp.log(size) + (x / size) @ p["w"],
        ]
        h = lax.switch(which, branches)
        return mse(h @ p["out"], example["y"])

    return each(one, batch)


@case({"x": param(3, 6), "h": param(6, 6), "out": param(6, 2)}, {"x": with_zeros(4, 3), "y": data(2)})
def guard_in_scan(p: Tree, batch: Tree) -> Array:
    # A state that starts from zero, and for some examples stays there, is normalised from then on.
    def one(example: Tree) -> Array:
        def unit(h: Array) -> Array:
            is_long = jnp.any(h > 0.5)
            along = lambda: h / jnp.sqrt(jnp.sum(jnp.square(h)))  # noqa: E731
            scaled = lambda: lax.cond(is_long, along, lambda: jnp.sin(along()))  # noqa: E731
            return lax.cond(jnp.any(h != 0), scaled, lambda: h)

        def cell(h: Array, x: Array) -> tuple[Array, None]:
            return jnp.tanh(unit(h) @ p["h"] + x @ p["x"]), None

        h, _ = lax.scan(cell, jnp.zeros(6, example["x"].dtype), example["x"])
        return mse(h @ p["out"], example["y"])

    return each(one, batch)


@case({"w": param(4, 3, 3), "out": param(3, 2)}, {"x": data(3), "y": data(2)})
def scan_rule_without_cotangent(p: Tree, batch: Tree) -> Array:
    # By a rule of its own each layer's weight has the same gradient, from what the loop does not change.
    z = jnp.tanh(batch["x"])

    @jax.custom_vjp
    def layer(x: Array, w: Array, z: Array) -> Array:
        return x @ w

    def backward(z: Array, g: Array) -> tuple[Array, Array, Array]:
        return g, z.T @ z / len(z), jnp.zeros_like(z)

    layer.defvjp(lambda x, w, z: (x @ w, z), backward)
    x, _ = lax.scan(lambda x, w: (jnp.tanh(layer(x, w, z)), None), batch["x"], p["w"])
    return mse(x @ p["out"], batch["y"])
