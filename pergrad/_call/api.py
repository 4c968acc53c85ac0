"""The public functions. Each checks its options, and returns a function that makes the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pergrad._call import spmd
from pergrad._call.request import ArgNums, MicrobatchSize, Nonfinite, Request, StrategyName
from pergrad._call.wrap import returning_plan, returning_stats, taken_from
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
    param_specs: Any = None,
    strategy: StrategyName = "auto",
    nonfinite: Nonfinite = "keep",
) -> Callable[..., Any]:
    """Turns a loss into a function that returns its value and statistics of per-example gradients.

    It is like `jax.value_and_grad`, and also tells how the gradient differs from example to example. The
    function that it returns is pure and can be jitted, scanned over and differentiated.

    Args:
      fun: the unmodified training loss: a function that returns a scalar, which is the mean over the
        examples of its batch. `pg.check` tells whether it is such a mean.
      stats: statistics (`pg.Mean`, `pg.Variance`, ...) in any pytree; the result has the same tree.
      argnums: the argument or arguments to differentiate, as in `jax.grad`. A statistic's result is a
        tree like that argument, or a tuple of trees.
      batch_argnums: the arguments whose leaves carry the example axis in front: `(1, 2)` for
        `loss(params, x, y)`.
      has_aux: whether `fun` returns `(loss, aux)`.
      keep_batch_dim: if True, `fun` is applied to batches of one example. If False, `fun` is applied to
        one example, whose leaves have no example axis.
      rng_argnums: arguments whose leaves are PRNG keys, typed or raw. Example i of B gets
        `jax.random.split(key, B)[i]`, and its random numbers depend on that key alone. `jax.vmap` does
        not ensure that for `rbg` and `unsafe_rbg` keys, so their numbers are drawn in a loop over
        examples.
      shared_argnums: arguments that are the same for all examples, although their leading axis is as
        long as the batch or they hold PRNG keys. Such an argument is refused unless `batch_argnums`,
        `rng_argnums` or `shared_argnums` names it. All other arguments are the same for all examples as
        well, and need not be named.
      microbatch_size: how many examples go through the model at a time, on each device: None for all, a
        number, or `"auto"` for the size that is estimated to be fastest. Any size gives the same result.
        None means `"auto"` if sums of the gradients of layers in a `scan` have to wait for their norms,
        as for a `ClippedMean` or with `nonfinite="drop"`, because the saved inputs and residuals of all
        layers of all examples would take much memory at once.
      spmd_axis_name: the axis or axes of the mesh (`jax.set_mesh`) over which the batch is sharded. Each
        device then works on its own examples, and only finished statistics travel. The numbers are the
        same as without it. Per-example results are sharded along the example axis, and results shaped
        like the parameters are sharded like the parameters. The number of examples must be a multiple
        of the number of devices: pad the batch with examples whose weight is 0. A `Fold` needs a
        `merge`. For a `Gram` the devices exchange the saved inputs and residuals of all layers.
      param_specs: how the parameters are sharded: a `jax.sharding.PartitionSpec` for each, in a tree
        like the argument that argnums names (or a tuple of trees), where one spec may stand for a whole
        subtree. Parameters that are sharded over the axes of `spmd_axis_name` (FSDP) are then gathered
        where they are used, layer by layer, and each device keeps its shard of their statistics. It is
        needed under `jit` with automatic mesh axes, where JAX does not know the shardings while it
        traces; otherwise the parameters' own shardings are used. Results do not depend on it.
      strategy: `"auto"` chooses the cheapest strategy for every parameter. The name of a strategy, such
        as `"materialise"` (the plain reference) or `"streamed:8"` (eight examples at a time), uses that
        strategy wherever it applies, for comparison.
      nonfinite: what becomes of an example whose loss or gradient has an entry that is infinite or NaN.
        With `"keep"` it counts as any other, so that sums with it are not finite. With `"drop"` it
        counts as if its weight were 0, in the value and in all statistics, and `pg.Count` says how many
        examples are left. Entries of its own (`Norm`, `Loss`, `Dot`, `Gram`, `Individual`, aux) still
        show what it has. If no example is left, means are NaN. It is the gradient that decides, in all
        parameters: one that is finite and so large that its norm is infinite is not dropped. All sums
        wait for the norms, which costs as much as a `ClippedMean`.

    Returns:
      A function with `fun`'s signature plus the keyword `example_weights=None`. The weights are [B], at
      least 0, and are read as counts. An example with weight 2 counts as if it were in the batch twice.
      An example with weight 0 is padding, which counts for nothing even if its gradient is NaN. Weights
      that are all 0 are refused; under `jit`, where their values are not known, they give NaN. With a
      `pg.Dot` among the statistics the function takes one more keyword, `direction`, and with a
      `pg.ClippedMean()` without a norm one more, `max_norm`.

      The function returns `(value, stats)`, or `((value, aux), stats)` with `has_aux`. `value` is the
      weighted mean loss. `aux` is what `fun` returns for one example, with an example axis in front.

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
        param_specs=param_specs,
        strategy=strategy,
        nonfinite=nonfinite,
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
    param_specs: Any = None,
    strategy: StrategyName = "auto",
    nonfinite: Nonfinite = "keep",
) -> Callable[..., Any]:
    """The same as `value_and_stats`, with the same options, but without the value.

    The function that it returns gives `stats`, or `(stats, aux)` with `has_aux`, as `jax.grad` does.

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
        param_specs=param_specs,
        strategy=strategy,
        nonfinite=nonfinite,
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
    param_specs: Any = None,
    strategy: StrategyName = "auto",
    nonfinite: Nonfinite = "keep",
) -> Callable[..., Plan]:
    """Turns a loss into a function that returns the plan of `value_and_stats` with the same options.

    The function takes the same arguments, or `jax.ShapeDtypeStruct`s in their place. It does not run the
    loss. Print the `pg.Plan` that it returns.

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
        param_specs=param_specs,
        strategy=strategy,
        nonfinite=nonfinite,
    )

    @returning_plan(request)
    def plan_of(*args: Any, example_weights: Any = None, **kwargs: Any) -> Plan:
        own = taken_from(kwargs, request)
        return spmd.plan(request, args, kwargs, own.get("direction"))

    return plan_of


def _run(request: Request, args: Any, kwargs: dict[str, Any], example_weights: Any) -> Any:
    own = taken_from(kwargs, request)
    return spmd.run(request, args, kwargs, example_weights, **own)
