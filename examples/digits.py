"""What the examples share: scikit-learn's digits, and a small network that reads them.

1797 images of 8 x 8 pixels, which come with the package, so nothing is downloaded.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

HELD_OUT = 297  # so that 1500 are left for training
CLASSES = 10

Batch = tuple[np.ndarray, np.ndarray]
Params = dict[str, dict[str, jax.Array]]


class Digits(NamedTuple):
    """Images [B, 64] with pixels from 0 to 1, and labels [B]; those to train on and those held out."""

    train: Batch
    held_out: Batch


def load(rng: np.random.Generator) -> Digits:
    """The digits, in a random order, split in two."""
    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return Digits((images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT]))


def init(key: jax.Array, width: int = 64) -> Params:
    hidden, out = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(hidden, (64, width)) / 8, "b": jnp.zeros(width)},
        "out": {"w": jax.random.normal(out, (width, CLASSES)) / width**0.5, "b": jnp.zeros(CLASSES)},
    }


def logits(params: Params, images: Any) -> jax.Array:
    hidden = jnp.tanh(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss(params: Params, batch: Any) -> jax.Array:
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


@jax.jit
def accuracy(params: Params, batch: Any) -> jax.Array:
    images, labels = batch
    return jnp.mean(jnp.argmax(logits(params, images), axis=-1) == labels)
