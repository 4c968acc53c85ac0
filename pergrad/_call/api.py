"""What users call. `_call` checks and flattens, and takes the four steps trace, cut, plan, run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pergrad._call import spmd
from pergrad._call.request import ArgNums, MicrobatchSize, Request, StrategyName, takes_direction
from pergrad._call.wrap import returning_plan, returning_stats
from pergrad._plan import Plan


def value_and_stats(
    fun: Callable[..., Any],
    stats: Any,
    argnums: ArgNums = 0,
    *,
    batch_argnums: ArgNums = 1,
    has_aux: bool = False,
    keep_batch_dim: bool = True,
    rng_argnums: ArgNums = (),
    shared_argnums: ArgNums = (),
    microbatch_size: MicrobatchSize = None,
    spmd_axis_name: str | Sequence[str] | None = None,
    strategy: StrategyName = "auto",
) -> Callable[..., Any]:
    """Turns a loss into a function that returns its value and statistics of per-example gradients.

    It is like `jax.value_and_grad`, and also tells how the gradient differs from example to example. The
    function it returns is pure and can be jitted, scanned over and differentiated.

    Args:
      fun: the training loss, as it is: a function that returns a scalar, the mean over the examples that
        it is given. `pg.check` tells whether it is such a mean.
      stats: statistics (`pg.Mean`, `pg.Variance`, ...) in any pytree; the result has the same tree.
      argnums: the argument or arguments to differentiate, as in `jax.grad`. A statistic's result is a
        tree like that argument, or a tuple of trees.
      batch_argnums: the arguments whose leaves carry the example axis in front: `(1, 2)` for
        `loss(params, x, y)`.
      has_aux: whether `fun` returns `(loss, aux)`.
      keep_batch_dim: True: `fun` is applied to batches of one. False: to one example, whose leaves
        have no example axis.
      rng_argnums: arguments whose leaves are PRNG keys, typed or raw. Example i of B gets
        `jax.random.split(key, B)[i]`. What it draws depends on that key alone: numbers of `rbg` and
        `unsafe_rbg` keys, for which `jax.vmap` does not hold to that, are drawn in a loop over examples.
      shared_argnums: arguments that are the same for all examples although they do not look like it:
        their leading axis is as long as the batch, or they hold PRNG keys. Such an argument is refused
        unless `batch_argnums`, `rng_argnums` or `shared_argnums` names it. All other arguments are the
        same for all examples, too, and need not be named.
      microbatch_size: how many examples go through the model at a time, on each device: None for all, a
        number, or `"auto"`. Any size gives the same result.
      spmd_axis_name: the axis or axes of the mesh (`jax.set_mesh`) over which the batch is sharded. Each
        device then works on its own examples, and only finished statistics travel. The numbers are the
        same as without it. Results with an example axis are sharded along that axis, and results shaped
        like the parameters are sharded like the parameters. The number of examples must be a multiple
        of the number of devices: pad the batch with examples whose weight is 0. A `Fold` needs a
        `merge`. For a `Gram` the devices exchange the saved inputs and residuals of all layers.
      strategy: `"auto"` takes the cheapest strategy for every parameter. The name of a strategy, such as
        `"materialise"` (the plain reference) or `"streamed:8"` (eight examples at a time), is used
        wherever that strategy applies, for comparison.

    Returns:
      A function with `fun`'s signature plus `example_weights=None`: weights [B], at least 0, read as
      counts. An example with weight 2 counts as if it were there twice; weight 0 is for padding, which
      counts for nothing even if its gradient is NaN. Weights that are all 0 are refused; under `jit`,
      where their values are not known, they give NaN. With a `pg.Dot` among the statistics the function
      takes one more keyword, `direction`.

      The function returns `(value, stats)`, or `((value, aux), stats)` with `has_aux`. `value` is the
      weighted mean loss, and `aux` has an example axis in front of what `fun` returns for one example.

    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> stats_fn = pg.value_and_stats(loss, {"mean": pg.Mean(), "variance": pg.Variance()})
    >>> value, stats = stats_fn(jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]]))
    >>> stats["mean"]
    Array([1., 4.], dtype=float32)
    >>> stats["variance"]
    Array([ 2., 32.], dtype=float32)
    """
    request = Request(
        fun,
        stats,
        argnums,
        batch_argnums=batch_argnums,
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        rng_argnums=rng_argnums,
        shared_argnums=shared_argnums,
        microbatch_size=microbatch_size,
        spmd_axis_name=spmd_axis_name,
        strategy=strategy,
    )

    @returning_stats(request)
    def stats_fn(*args: Any, example_weights: Any = None, **kwargs: Any) -> Any:
        return _run(request, args, kwargs, example_weights)

    return stats_fn


def grad_stats(
    fun: Callable[..., Any],
    stats: Any,
    argnums: ArgNums = 0,
    *,
    batch_argnums: ArgNums = 1,
    has_aux: bool = False,
    keep_batch_dim: bool = True,
    rng_argnums: ArgNums = (),
    shared_argnums: ArgNums = (),
    microbatch_size: MicrobatchSize = None,
    spmd_axis_name: str | Sequence[str] | None = None,
    strategy: StrategyName = "auto",
) -> Callable[..., Any]:
    """As `value_and_stats`, with the same options, without the value.

    The function returns `stats`, or `(stats, aux)` with `has_aux`, as `jax.grad` does.

    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> pg.grad_stats(loss, [pg.Mean(jnp.sign), pg.Count()])(jnp.float32(1), jnp.array([3.0, -1.0]))
    [Array(0., dtype=float32), Array(2., dtype=float32)]
    """
    request = Request(
        fun,
        stats,
        argnums,
        batch_argnums=batch_argnums,
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        rng_argnums=rng_argnums,
        shared_argnums=shared_argnums,
        microbatch_size=microbatch_size,
        spmd_axis_name=spmd_axis_name,
        strategy=strategy,
    )

    @returning_stats(request, with_value=False)
    def stats_fn(*args: Any, example_weights: Any = None, **kwargs: Any) -> Any:
        value, result = _run(request, args, kwargs, example_weights)
        return (result, value[1]) if has_aux else result

    return stats_fn


def explain(
    fun: Callable[..., Any],
    stats: Any,
    argnums: ArgNums = 0,
    *,
    batch_argnums: ArgNums = 1,
    has_aux: bool = False,
    keep_batch_dim: bool = True,
    rng_argnums: ArgNums = (),
    shared_argnums: ArgNums = (),
    microbatch_size: MicrobatchSize = None,
    spmd_axis_name: str | Sequence[str] | None = None,
    strategy: StrategyName = "auto",
) -> Callable[..., Plan]:
    """The plan that `value_and_stats` with the same options would follow. Print it.

    The function takes the same arguments, or `jax.ShapeDtypeStruct`s in their place, and runs nothing.

    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> plan = pg.explain(loss, pg.Mean(jnp.square))(jnp.ones((3, 2)), jnp.ones((8, 3)))
    >>> plan.rows[0].kind, plan.rows[0].strategy
    ('product', 'factored')
    """
    request = Request(
        fun,
        stats,
        argnums,
        batch_argnums=batch_argnums,
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        rng_argnums=rng_argnums,
        shared_argnums=shared_argnums,
        microbatch_size=microbatch_size,
        spmd_axis_name=spmd_axis_name,
        strategy=strategy,
    )

    @returning_plan(request)
    def plan_of(*args: Any, example_weights: Any = None, **kwargs: Any) -> Plan:
        if takes_direction(stats):
            kwargs.pop("direction", None)
        return spmd.plan(request, args, kwargs)

    return plan_of


def _run(request: Request, args: Any, kwargs: dict[str, Any], example_weights: Any) -> Any:
    direction = kwargs.pop("direction", None) if takes_direction(request.stats) else None
    return spmd.run(request, args, kwargs, example_weights, direction)
