"""A model with a little of everything, for tests that are not about models."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.cases import BATCH, array


def normal(seed, *shape):
    return array(np.random.default_rng(seed).normal(size=shape))


def params():
    return {"table": normal(0, 7, 3), "w": normal(1, 3, 4), "b": normal(2, 4), "v": normal(3, 4, 2)}


def batch(size=BATCH):
    i = np.random.default_rng(4).integers(7, size=(size, 3))
    i[:, 2] = i[:, 0]
    return {"i": array(i), "x": normal(5, size, 3), "y": normal(6, size, 2)}


def loss(p, batch):
    """A lookup, two products and a bias."""
    h = batch["x"] + jnp.mean(p["table"][batch["i"]], axis=1)
    h = jnp.tanh(h @ p["w"] + p["b"][None])
    return jnp.mean(jnp.square(h @ p["v"] - batch["y"]))


def ensemble(n=3):
    members = [jax.tree.map(lambda w, k=k: np.asarray(w) + 0.3 * k, params()) for k in range(n)]
    return jax.tree.map(lambda *leaves: array(np.stack(leaves)), *members)


def member(tree, k):
    return jax.tree.map(lambda x: np.asarray(x)[k], tree)


def regularised(p, batch):
    """The gradients of "only" and "none" do not depend on the batch."""
    more = jnp.sum(jnp.cosh(p["only"])) + jnp.sum(jnp.square(p["w"]))
    return loss(p, batch) + more + jnp.sum(p["none"])


def some_number(stats):
    """A function of the statistics."""
    terms = [jnp.sum(jnp.square(x) + jnp.sin(3 * x)) for x in jax.tree.leaves(stats)]
    return sum(terms)
