"""One call on several devices: every device works on its own examples, and only statistics travel.

The whole call runs under `jax.shard_map`, which is manual over the axes of the batch. So trace, cut,
plan and run know the device's own examples alone. Per-example results stay on the devices of their
examples.

A parameter that is sharded over the axes of the batch (FSDP) enters as this device's shard. It is
gathered where it is used (`_trace/gathers`), and its statistics leave as shards (`_run/shards`).

Of any other parameter, an accumulator's result leaves each device as that device's part
(`Accumulator.part_of_all`). The parts are added up outside the `shard_map`, where XLA may choose how: a
device that keeps a shard of the sum need not hold all of it. Some parts need a sum over devices
themselves. If that sum is the result of another statistic, it leaves each device whole
(`Accumulator.holds`): the mean that a variance is centred on.

The other axes of the mesh stay automatic: XLA divides the work along them, following the shardings of
the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pergrad import _compat
from pergrad._call.arguments import roles_of
from pergrad._call.arrays import Arguments
from pergrad._call.call import Call
from pergrad._call.mesh import devices_of, explicit_axes, find_mesh, shards_of, spec_of_shard
from pergrad._call.request import Request
from pergrad._call.varying import run_varying, varying_axes
from pergrad._errors import ArgumentError
from pergrad._ir import without_axes
from pergrad._plan import Plan
from pergrad._run import Given
from pergrad._statistics import Accumulator, Layout, Statistic, holders


def run(
    request: Request,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    example_weights: Any = None,
    direction: Any = None,
    max_norm: Any = None,
) -> Any:
    """The value and the results of one call, on the devices that the request names."""
    call = Call(request, args, kwargs)
    weights, given = call.checked(example_weights, direction, max_norm)
    with _compat.newer_jax_explained():
        axes = varying_axes(call, weights, given)
        if request.axes and axes:
            # The results of a `shard_map` inside would vary along these axes, and JAX would not know it.
            raise ArgumentError(
                f"spmd_axis_name={request.axes!r} is inside of a shard_map that checks along which axes "
                f"arrays vary, and the arguments vary along {', '.join(map(repr, sorted(axes)))}. Pass "
                "check_vma=False to this shard_map, or leave it out and name all axes of the batch in "
                "spmd_axis_name."
            )
        if request.axes:
            return _Spread(call).run(weights, given)
        return run_varying(call, weights, given, axes) if axes else call.run(weights, given)


def plan(
    request: Request, args: Sequence[Any], kwargs: Mapping[str, Any], direction: Any = None
) -> Plan:
    """The plan of one call. On several devices it is the plan of each device.

    Any argument may be a `jax.ShapeDtypeStruct`, or have leaves that are. Parameters and examples are
    inputs of the program, so their shapes are enough. All other arguments are constants of the program.
    If one of them is a shape, a tracer takes its place, which is a constant as under `jit`.
    """
    roles = roles_of(request, args, kwargs)
    others = {n: x for n, x in enumerate(args) if n not in (*roles.argnums, *roles.batch_argnums)}
    leaves, tree = jax.tree.flatten((others, dict(kwargs)))
    is_shape = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    plans = []

    def with_constants(constants: Sequence[Any]) -> None:
        tracers = iter(constants)
        pairs = zip(leaves, is_shape, strict=True)
        others, kwargs = tree.unflatten([next(tracers) if s else x for x, s in pairs])
        call = Call(request, [others.get(n, x) for n, x in enumerate(args)], kwargs)
        plans.append((_Spread(call).local_call() if request.axes else call).plan(direction))

    with _compat.newer_jax_explained():
        jax.eval_shape(with_constants, [x for x, s in zip(leaves, is_shape, strict=True) if s])
    return plans[0]


def with_automatic_axes(request: Request, fun: Callable[..., Any], *args: Any) -> Any:
    """Calls `fun` with all axes of the mesh automatic. Every device then has its whole results."""
    mesh = find_mesh(request.axes, jax.tree.leaves(args)) if request.axes else None
    explicit = explicit_axes(mesh) if mesh else ()
    if mesh is None or not explicit:
        return fun(*args)
    everywhere = NamedSharding(mesh, P())
    return jax.sharding.auto_axes(fun, axes=explicit, out_sharding=everywhere)(*args)


class _Spread:
    """A call of the whole batch, spread over several devices."""

    def __init__(self, call: Call) -> None:
        self.call, self.axes, self.arguments = call, call.request.axes, Arguments.of(call)
        self.mesh = find_mesh(self.axes, self.arguments.leaves)
        self.devices = devices_of(self.mesh, self.axes, call.size)
        self.explicit = explicit_axes(self.mesh)
        self.shards = shards_of(call, self.mesh, self.devices)

    def local_call(self) -> Call:
        """The call of one device, with shapes in place of arrays."""
        call, size = self.call, self.call.size // self.devices.number
        batch = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in call.batch]
        params = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.params]
        return Call(call.request, call.arguments(params, batch, call.keys), call.kwargs, self.devices)

    def run(self, weights: jax.Array | None, given: Given) -> Any:
        """The value and the results of all statistics, as `Call.run` returns them on one device."""
        request = self.call.request

        def on_each(arrays: Sequence[Any], weights: Any, given: Given) -> Any:
            call = self.arguments.call_with(arrays, self.devices, self.shards)
            value, results = call.run(weights, given)
            return value, jax.tree.map(self._with_axis_of_parts, request.stats, results)

        def on_all(arrays: Sequence[Any], weights: Any, given: Given) -> Any:
            of_arrays = self.arguments.arrays_among(self._specs_of_leaves())
            mapped = jax.shard_map(
                on_each,
                mesh=None if self.explicit else self.mesh,
                in_specs=(of_arrays, P(self.axes), self._specs_of_given(given)),
                out_specs=self._out_specs(),
                axis_names=set(self.axes),
                check_vma=False,
            )
            value, results = mapped(arrays, weights, given)
            return value, self._added_up(self.arguments.call_with(arrays).params, results)

        everywhere: Callable[..., Any] = jax.jit(on_all)
        if self.explicit:
            out_sharding = self._out_sharding()
            everywhere = jax.sharding.auto_axes(
                everywhere, axes=self.explicit, out_sharding=out_sharding
            )
        return everywhere(self.arguments.arrays, weights, given)

    def _specs_of_params(self) -> list[P]:
        """The spec of each parameter along the axes of the batch."""
        pairs = zip(self.call.params, self.shards, strict=True)
        return [spec_of_shard(shard, len(x.shape)) for x, shard in pairs]

    def _specs_of_given(self, given: Given) -> Any:
        """The specs of what the caller passes for each parameter: directions are divided like it.

        Several directions have one more axis in front.
        """
        if given.directions is None:
            return P()
        own = zip(given.directions, self.call.params, self._specs_of_params(), strict=True)
        specs = [spec if v.ndim == len(x.shape) else P(None, *spec) for v, x, spec in own]
        everywhere: Any = P()
        return Given(specs, everywhere)

    def _specs_of_leaves(self) -> list[P]:
        """The spec of each leaf of the arguments: parameters and batch may be divided among devices."""
        roles, is_spec = self.call.roles, lambda x: isinstance(x, P)
        params = self.call.params_tree.unflatten(self._specs_of_params())
        own = dict(zip(roles.argnums, params, strict=True))
        args = [
            own.get(n, jax.tree.map(lambda _, n=n: P(self.axes) if n in roles.batch_argnums else P(), x))
            for n, x in enumerate(self.call.args)
        ]
        kwargs = jax.tree.map(lambda _: P(), self.call.kwargs)
        return jax.tree.leaves((args, kwargs), is_leaf=is_spec)

    def _out_specs(self) -> Any:
        """The specs of a device's results.

        The parts of sums, and per-example results, have an axis in front: that of the parts, or that of
        the examples.
        """
        many, request, own = P(self.axes), self.call.request, self._specs_of_params()

        def of(statistic: Statistic) -> Any:
            if isinstance(statistic, Accumulator):
                # The spec of a parameter that is not divided names no axis.
                return self._each(
                    statistic, lambda k, x: many if self._is_part(statistic, k, x) else own[k]
                )
            return P() if statistic.layout is Layout.NUMBER else many

        return (P(), many) if request.has_aux else P(), jax.tree.map(of, request.stats)

    def _each(self, statistic: Accumulator, of: Callable[..., Any], *results: Any) -> Any:
        """A tree like the result of an accumulator, with what the function `of` returns for each array.

        `of` gets the number of the parameter, the shape and dtype of the array in the result for the
        whole batch, and the array in each of the `results`. The tree has None for parameters that the
        accumulator does not select.
        """
        tree = jax.tree.structure(self.call.like_params(self.call.params))
        params = zip(self.call.params, *map(tree.flatten_up_to, results), strict=True)
        return tree.unflatten(
            [
                jax.tree.map(functools.partial(of, k), _shapes(statistic, param), *own)
                if statistic.selects(self.call.paths[k])
                else None
                for k, (param, *own) in enumerate(params)
            ]
        )

    def _is_part(self, statistic: Accumulator, k: int, like: Any) -> bool:
        """Whether devices have parts of an array of a result for parameter number `k`, to be added up.

        Otherwise they have shards of it or, if another accumulator holds it, all of it.
        """
        if self.shards[k].is_whole:
            return statistic not in holders(self.call.wanted[k])
        return like.shape != self.call.params[k].shape

    def _with_axis_of_parts(self, statistic: Statistic, result: Any) -> Any:
        """A device's result, in which an axis of length 1 is in front of its parts of sums."""
        if not isinstance(statistic, Accumulator):
            return result
        return self._each(
            statistic,
            lambda k, like, x: x[None] if self._is_part(statistic, k, like) else x,
            result,
        )

    def _added_up(self, params: Sequence[jax.Array], results: Any) -> Any:
        """The results, from the parts and shards of all devices.

        A result shaped like a parameter gets the parameter's sharding. Under `jit` an automatic sharding
        is not known yet, so XLA is told that both are the same.
        """

        def of(statistic: Statistic, result: Any) -> Any:
            if not isinstance(statistic, Accumulator):
                return result
            return self._each(statistic, functools.partial(whole, statistic), result)

        def whole(statistic: Accumulator, k: int, like: Any, x: jax.Array) -> jax.Array:
            x = jnp.sum(x, axis=0) if self._is_part(statistic, k, like) else x
            x = x.astype(like.dtype)
            if self.explicit or x.shape != params[k].shape:
                return x
            return _sharded_like(lax.stop_gradient(params[k]), x)

        return jax.tree.map(of, self.call.request.stats, results)

    def _out_sharding(self) -> Any:
        """The shardings of the results if the mesh has explicit axes."""
        call, everywhere, per_example = self.call, self._explicit(P()), self._explicit(P(self.axes))
        specs = [jax.typeof(x).sharding.spec for x in call.params]

        def of(statistic: Statistic) -> Any:
            if isinstance(statistic, Accumulator):
                return self._each(statistic, like)
            if statistic.layout is Layout.PER_EXAMPLE_LIKE_PARAMETERS:
                own = [P(self.axes, *without_axes(spec, self.axes)) for spec in specs]
                return call.like_params([self._explicit(spec) for spec in own])
            return everywhere if statistic.layout is Layout.NUMBER else per_example

        def like(k: int, x: Any) -> Any:
            return self._explicit(specs[k]) if x.shape == call.params[k].shape else everywhere

        value = (everywhere, per_example) if call.request.has_aux else everywhere
        return value, jax.tree.map(of, call.request.stats)

    def _explicit(self, spec: P) -> NamedSharding:
        """The sharding of this spec along the explicit axes alone."""
        others = [n for n in self.mesh.axis_names if n not in self.explicit]
        return NamedSharding(self.mesh, P(*without_axes(spec, others)))


def _sharded_like(param: jax.Array, x: jax.Array) -> jax.Array:
    """The array `x`, for which XLA chooses the sharding of `param`, an array of the same shape.

    XLA gives both operands of a selection, and its result, the same sharding. Here the selection always
    takes `x`. The barrier keeps XLA from knowing that before it has chosen the shardings. In the
    compiled program the loop that makes `x` then has one more operand.
    """
    never = lax.optimization_barrier(jnp.zeros((), bool))
    return lax.select(jnp.broadcast_to(never, x.shape), param.astype(x.dtype), x)


def _shapes(statistic: Accumulator, param: Any) -> Any:
    """The shapes and dtypes of the statistic's result for a parameter."""
    like, count = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (param, jnp.zeros(())))
    return jax.eval_shape(lambda n: statistic.finish(statistic.init(like), n, like), count)
