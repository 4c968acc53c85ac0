"""A loss of one's own, as `pergrad bench MODULE:FUNCTION` takes it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ARGS = np.full((3, 2), 0.3, np.float32), np.arange(12, dtype=np.float32).reshape(4, 3) / 12


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """A mean over the examples of x."""
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def example() -> Any:
    """What the command asks for: the loss and its arguments."""
    return loss, *ARGS
