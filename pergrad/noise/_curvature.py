"""Signal and noise in the metric of the Hessian, whose ratio is the critical batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pergrad._call import explain
from pergrad._ir import widen
from pergrad._statistics import Mean
from pergrad.noise._estimates import SignalNoise

Tree = Any


def curvature(
    fun: Callable[..., Any],
    *,
    batch_argnums: int | Sequence[int] = 1,
    shared_argnums: int | Sequence[int] = (),
    keep_batch_dim: bool = True,
    probes: int = 1,
    microbatch_size: int | None = None,
) -> Callable[..., SignalNoise]:
    """Makes a function `(key, params, ...) -> (mu' H mu, tr(H Sigma))`, which estimates both.

    The second divided by the first is the critical batch size Bc. `fun(params, ...)` is the loss as for
    `pg.value_and_stats`. With random signs e_i,

        u = sum_i (e_i - ebar) g_i / sqrt(B - 1)  has  E[u u'] = Sigma,  so  E[u' H u] = tr(H Sigma).

    Each of the `probes` takes one gradient and one product with the Hessian. The mean of gbar' H gbar is
    mu' H mu + tr(H Sigma) / B, and the second term is subtracted. Where the Hessian is not positive
    definite, both estimates may be negative, and then their ratio says nothing. Arguments that look like
    examples and have no role are refused, as `pg.value_and_stats` refuses them. With a
    `microbatch_size` that many examples go through the model at a time: this needs the memory of that
    many examples, and every forward pass runs once more.
    """
    check_arguments = explain(
        fun,
        Mean(),
        batch_argnums=batch_argnums,
        shared_argnums=shared_argnums,
        keep_batch_dim=keep_batch_dim,
    )

    def at(key: jax.Array, params: Tree, *rest: Any) -> SignalNoise:
        args = (params, *rest)
        check_arguments(*args)
        numbers = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums
        batch = {number % len(args) for number in numbers}
        losses = _losses(fun, args, batch, keep_batch_dim, microbatch_size)
        n = jax.tree.leaves([args[i] for i in batch])[0].shape[0]
        equal = jnp.full(n, 1 / n)
        gradient = jax.grad(lambda params, w: jnp.sum(w * losses(params)))

        def curved(v: Tree) -> jax.Array:
            """v' H v"""
            _, product = jax.jvp(lambda p: gradient(p, equal), (params,), (v,))
            pairs = zip(jax.tree.leaves(v), jax.tree.leaves(product), strict=True)
            return jnp.asarray(sum(jnp.vdot(widen(a), widen(b)) for a, b in pairs))

        def probe(key: jax.Array) -> jax.Array:
            e = jax.random.rademacher(key, (n,), equal.dtype)
            return curved(gradient(params, (e - jnp.mean(e)) / jnp.sqrt(n - 1)))

        noise = jnp.mean(jax.lax.map(probe, jax.random.split(key, probes)))
        return SignalNoise(curved(gradient(params, equal)) - noise / n, noise)

    return at


def _losses(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: set[int],
    keep_batch_dim: bool,
    microbatch_size: int | None,
) -> Callable[[Tree], jax.Array]:
    """The losses [B] of all examples, as a function of the parameters.

    The arguments `batch` hold the examples, all others are the same for each.
    """

    def of_one(params: Tree, example: dict[int, Any]) -> jax.Array:
        if keep_batch_dim:
            example = jax.tree.map(lambda x: x[None], example)
        return fun(*(example.get(i, x) for i, x in enumerate((params, *args[1:]))))

    examples = {i: args[i] for i in batch}

    def of_all(params: Tree) -> jax.Array:
        if microbatch_size is None:
            return jax.vmap(of_one, in_axes=(None, 0))(params, examples)
        one = jax.checkpoint(lambda example: of_one(params, example))
        return jax.lax.map(one, examples, batch_size=microbatch_size)

    return of_all
