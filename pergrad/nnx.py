"""For Flax NNX: losses that take the module itself, `loss(model, batch)`, as `nnx.value_and_grad` does.

The modules among the arguments are split, as one graph, into the variables to differentiate and all
other state. The loss of one example merges them again. The loss runs for each example on its own, so the
state that it leaves in the modules has to be the same for all examples.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_batching import custom_vmap
from jax.extend.core import jaxpr_as_fun

import pergrad as pg
from pergrad._call import ArgNums, MicrobatchSize, Nonfinite, StrategyName, keywords_of, places
from pergrad._compat import drop_dead_code


def value_and_stats(
    fun: Callable[..., Any],
    stats: Any,
    argnums: ArgNums = 0,
    *,
    wrt: Any = nnx.Param,
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
    """As `pergrad.value_and_stats`, for a loss that takes NNX modules.

    A result is an `nnx.State` like that of `nnx.grad`. The modules are left in the state in which
    `nnx.grad` leaves them: their RNG streams have moved on. Example i has streams of its own (dropout),
    whose keys are `jax.random.fold_in(key, i)` of the next key of each stream.

    Args:
      fun: the loss. Any positional argument may be a module or an `nnx.Rngs`.
      stats: as for `pergrad.value_and_stats`.
      argnums: the module or modules to differentiate.
      wrt: a filter of the variables to differentiate, as in `nnx.Optimizer`.

    All other options are those of `pergrad.value_and_stats`.

    The function raises `NotPerExampleError` if the loss writes to a module what it computed from the
    examples, as batch norm does in training mode.

    >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    >>> loss = lambda model, x: jnp.mean(model(x))
    >>> stats_fn = pg.nnx.value_and_stats(loss, {"mean": pg.Mean(), "variance": pg.Variance()})
    >>> value, stats = stats_fn(model, jnp.array([[1.0, 2.0], [1.0, 4.0]]))
    >>> stats["mean"]["kernel"][...].ravel(), stats["variance"]["kernel"][...].ravel()
    (Array([1., 3.], dtype=float32), Array([0., 2.], dtype=float32))
    """
    options: dict[str, Any] = {
        "batch_argnums": batch_argnums,
        "has_aux": has_aux,
        "keep_batch_dim": keep_batch_dim,
        "rng_argnums": rng_argnums,
        "shared_argnums": shared_argnums,
        "microbatch_size": microbatch_size,
        "spmd_axis_name": spmd_axis_name,
        "param_specs": param_specs,
        "strategy": strategy,
        "nonfinite": nonfinite,
    }

    @_documented_as(pg.value_and_stats(fun, stats, argnums, **options))
    def stats_fn(*args: Any, **kwargs: Any) -> Any:
        own = _pop_own(kwargs, stats)
        call = _Call(fun, argnums, options, args, kwargs, wrt)
        result = pg.value_and_stats(call.loss, stats, argnums, **options)(*call.args, **kwargs, **own)
        nnx.update(call.modules, call.state_after())
        return result

    return stats_fn


def explain(
    fun: Callable[..., Any],
    stats: Any,
    argnums: ArgNums = 0,
    *,
    wrt: Any = nnx.Param,
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
) -> Callable[..., pg.Plan]:
    """As `pergrad.explain`, for a loss that takes NNX modules."""
    options: dict[str, Any] = {
        "batch_argnums": batch_argnums,
        "has_aux": has_aux,
        "keep_batch_dim": keep_batch_dim,
        "rng_argnums": rng_argnums,
        "shared_argnums": shared_argnums,
        "microbatch_size": microbatch_size,
        "spmd_axis_name": spmd_axis_name,
        "param_specs": param_specs,
        "strategy": strategy,
        "nonfinite": nonfinite,
    }

    @_documented_as(pg.explain(fun, stats, argnums, **options))
    def plan_of(*args: Any, **kwargs: Any) -> pg.Plan:
        own = _pop_own(kwargs, stats)
        call = _Call(fun, argnums, options, args, kwargs, wrt)
        return pg.explain(call.loss, stats, argnums, **options)(*call.args, **kwargs, **own)

    return plan_of


def check(
    fun: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    wrt: Any = nnx.Param,
    rtol: float | None = None,
    batch_argnums: ArgNums = 1,
    has_aux: bool = False,
    keep_batch_dim: bool = True,
    rng_argnums: ArgNums = (),
    shared_argnums: ArgNums = (),
    microbatch_size: MicrobatchSize = None,
    spmd_axis_name: str | Sequence[str] | None = None,
    param_specs: Any = None,
    strategy: StrategyName = "auto",
) -> Callable[..., None]:
    """As `pergrad.check`, for a loss that takes NNX modules. It leaves them as they are."""
    options: dict[str, Any] = {
        "batch_argnums": batch_argnums,
        "has_aux": has_aux,
        "keep_batch_dim": keep_batch_dim,
        "rng_argnums": rng_argnums,
        "shared_argnums": shared_argnums,
        "microbatch_size": microbatch_size,
        "spmd_axis_name": spmd_axis_name,
        "param_specs": param_specs,
        "strategy": strategy,
    }

    @_documented_as(pg.check(fun, argnums, rtol=rtol, **options))
    def check_loss(*args: Any, **kwargs: Any) -> None:
        call = _Call(fun, argnums, options, args, kwargs, wrt)
        try:
            pg.check(call.loss, argnums, rtol=rtol, **options)(*call.args, **kwargs)
        except pg.NotPerExampleError:
            before, after = _state(call.modules), call.state_after()
            counts = (jax.tree.leaves(nnx.filter_state(s, nnx.RngCount)) for s in (before, after))
            if any(jnp.any(a != b) for a, b in zip(*counts, strict=True)):
                raise pg.ArgumentError(
                    "check cannot compare a loss that draws random numbers: the whole batch and single "
                    "examples draw different ones. Switch the randomness off: model.eval()."
                ) from None
            raise
        call.state_after()

    return check_loss


def _documented_as(plain: Any) -> Callable[[Any], Any]:
    """Decorates a function of modules with the names and the docstring of the function without them.

    It keeps its own signature, in which `example_weights` is not shown: `nnx.vmap` and `nnx.scan` refuse
    functions that have defaults for keywords.
    """

    def decorate(function: Any) -> Any:
        function.__signature__ = inspect.signature(function)
        names = ("__module__", "__name__", "__qualname__", "__doc__")
        functools.update_wrapper(function, plain, assigned=names, updated=())
        function.__wrapped__ = plain.__wrapped__  # the loss
        return function

    return decorate


def _pop_own(kwargs: dict[str, Any], stats: Any) -> dict[str, Any]:
    """Takes out the keywords that the loss is not given, such as `example_weights`."""
    return {name: kwargs.pop(name) for name in keywords_of(stats) if name in kwargs}


class _Call:
    """One call, as the functions for losses without modules take it.

    `loss` and `args` are what these functions get. In `args` each module is replaced by its parameters,
    and the first batch is paired with the numbers of its examples, from which every example gets random
    streams of its own.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: ArgNums,
        options: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        wrt: Any,
    ) -> None:
        self.fun, self.kwargs = fun, kwargs
        self.keep_batch_dim = options["keep_batch_dim"]
        differentiated = places("argnums", argnums, args, kwargs)
        self.batch, self.rng = (
            places(name, options[name], args, kwargs) for name in ("batch_argnums", "rng_argnums")
        )
        for name, x in kwargs.items():
            if isinstance(x, nnx.Pytree):
                raise pg.ArgumentError(
                    f"the keyword argument {name} is of the type {type(x).__name__}. Give modules and "
                    "nnx.Rngs by position: each example then gets random streams of its own."
                )
        self.modules = {str(n): x for n, x in enumerate(args) if isinstance(x, nnx.Pytree)}
        is_wrt, names = nnx.filterlib.to_predicate(wrt), {str(n) for n in differentiated}
        self.graphdef, params, self.rest = nnx.split(
            self.modules, lambda path, x: path[0] in names and is_wrt(path[1:], x), ...
        )
        self.args = list(args)
        for n in self.modules:
            self.args[int(n)] = params.get(n, nnx.State({}))
        leaves = jax.tree.leaves(args[self.batch[0]])
        self.size = next((jnp.shape(x)[0] for x in leaves if jnp.ndim(x)), 1)
        self.args[self.batch[0]] = args[self.batch[0]], jnp.arange(self.size)

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """The user's loss, of arguments like `args`."""
        return self._run(args, kwargs)[0]

    def _run(self, args: Iterable[Any], kwargs: Any) -> tuple[Any, Any]:
        """The loss, and the modules' state after it."""
        args = list(args)
        args[self.batch[0]], numbers = args[self.batch[0]]
        params = nnx.State({n: args[int(n)].raw_mapping for n in self.modules})
        # Trees that are built again have variables of their own, and the loss may write to them.
        modules = nnx.merge(self.graphdef, *jax.tree.map(lambda x: x, (params, self.rest)))
        for _, node in nnx.iter_graph(modules):
            if isinstance(node, nnx.RngStream):
                node.key[...] = _own_key(node.key[...], node.count[...], jnp.ravel(numbers)[0])
        for n, module in modules.items():
            args[int(n)] = module
        return self.fun(*args, **kwargs), _state(modules)

    def state_after(self) -> Any:
        """The modules' state after the loss, if it does not depend on the examples."""

        def of_one(examples: Any) -> Any:
            args = list(self.args)
            for n, x in examples.items():
                keep = n in self.batch and self.keep_batch_dim
                args[n] = jax.tree.map(lambda leaf: leaf[None], x) if keep else x
            number = examples[self.batch[0]][1]
            return _the_same_for_all(number, self._run(args, self.kwargs)[1])

        examples = {n: self.args[n] for n in self.batch}
        for n in self.rng:
            examples[n] = jax.tree.map(lambda key: jax.random.split(key, self.size), self.args[n])
        after = jax.make_jaxpr(lambda: jax.vmap(of_one, out_axes=None)(examples), return_shape=True)
        program, state = after()
        # Without dead code the program holds only what the new state depends on, such as counters of
        # random streams. The model itself is not run.
        leaves = jaxpr_as_fun(program.replace(jaxpr=drop_dead_code(program.jaxpr)))()
        return jax.tree.unflatten(jax.tree.structure(state), leaves)


@custom_vmap
def _the_same_for_all(number: Any, state: Any) -> Any:
    return state


# `number` differs from example to example, so the `vmap` over examples calls this rule. A `vmap` that a
# user puts around the call does not.
@_the_same_for_all.def_vmap
def _rule(size: int, differs: Any, number: Any, state: Any) -> Any:
    for (argument, *path), by_example in jax.tree_util.tree_leaves_with_path(differs[1]):
        if by_example:
            name = jax.tree_util.keystr(tuple(path))
            raise pg.NotPerExampleError(
                f"the loss writes to {name} of argument {argument.key} what it computed from the "
                "examples. They do not see each other, so this has another value for each. Running "
                "statistics of batch norm: freeze them with model.eval() or use_running_average=True. "
                "Something to look at: return it as aux (has_aux=True)."
            )
    return state, differs[1]


def _own_key(key: jax.Array, count: jax.Array, number: jax.Array) -> jax.Array:
    """A key for one example, from the next key of a stream (or of each stream of a stack of them)."""

    def fold(key: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, count), number)

    return jax.vmap(fold)(key.ravel(), count.ravel()).reshape(key.shape)


def _state(modules: Any) -> Any:
    return nnx.state(modules, nnx.Not(nnx.RngKey))
