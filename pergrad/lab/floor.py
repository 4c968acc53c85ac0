"""What statistics are compared with: the ways to the mean gradient alone that a user has.

`jax.value_and_grad` of the whole batch is one. The other divides the batch into microbatches and adds up
their gradients, which may be faster, since the activations of few examples fit into the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def accumulated(
    loss: Callable[[Tree, Any], jax.Array], size: int
) -> Callable[[Tree, Any], tuple[jax.Array, Tree]]:
    """The loss and the mean gradient of a batch, from `size` examples at a time in a loop."""
    value_and_grad = jax.value_and_grad(loss)

    def run(params: Tree, batch: Any) -> tuple[jax.Array, Tree]:
        microbatches = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
        rounds = len(jax.tree.leaves(microbatches)[0])

        def add(total: Tree, microbatch: Any) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, total, value_and_grad(params, microbatch)), None

        one = jax.tree.map(lambda x: x[0], microbatches)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(value_and_grad, params, one)
        )
        total, _ = jax.lax.scan(add, zeros, microbatches)
        return jax.tree.map(lambda x: x / rounds, total)

    return run


def sizes(batch: Any) -> list[int]:
    """The microbatch sizes 1, 2, 4, ... that divide the batch."""
    whole = examples(batch)
    powers = (2**k for k in range(whole.bit_length()))
    return [size for size in powers if whole % size == 0]


def examples(batch: Any) -> int:
    """How many examples a batch has."""
    return len(jax.tree.leaves(batch)[0])
