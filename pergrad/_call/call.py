"""One call: checks and flattens its arguments, runs the four stages, and makes the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from pergrad._call.arguments import (
    check_others,
    is_array_like,
    is_number_like,
    is_one_key,
    kind,
    named_leaves,
    parameters_of,
    refuse_key_in_batch,
    refuse_modules,
    roles_of,
    saying_what_was_given,
)
from pergrad._call.max_norms import max_norms_of
from pergrad._call.named_axes import constraints_explained, refuse_collectives, refuse_varying
from pergrad._call.positions import check_positions
from pergrad._call.request import Request, takes_direction
from pergrad._call.results import Results
from pergrad._call.scope import refuse_batch, refuse_key
from pergrad._cut import Cut, Wanted, hoist, leave_loops, make_cut
from pergrad._errors import ArgumentError
from pergrad._ir import Devices, Shard, Weights, accumulation_dtype, backend, weighted_sum
from pergrad._plan import Asked, Plan, Schedule, activations, describe, make_schedule
from pergrad._run import Given, Shards, part_of_all, run, run_last, runs_alone, with_shares_of_kept
from pergrad._statistics import Phase, Quantity
from pergrad._trace import Program, trace, with_common_rounds, with_gathers

# How much memory clipping of layers in a loop may take, as a multiple of that of `jax.grad`. Both are
# estimated. It is less than the 1.25 that the benchmark holds clipping to, because estimates are rough.
WAITING_SHARE = 1.2


class Call:
    """One call, with its arguments checked and flattened.

    If several `devices` share a batch, each of them has a call of its own. Its batch has the examples of
    that device, and all devices have equally many. A parameter may be divided among the devices, too:
    `shards` says how, and the call has this device's shard of it. Everything else is the same for all
    devices.
    """

    def __init__(
        self,
        request: Request,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        devices: Devices | None = None,
        shards: Sequence[Shard] | None = None,
    ) -> None:
        self.request, self.args, self.kwargs = request, args, kwargs
        self.devices = devices or Devices()
        self.roles = roles_of(request, args, kwargs)
        self.params, self.params_tree, self.paths = self._flatten_params()
        self.shards = shards or [Shard()] * len(self.params)
        self.batch, self.batch_tree = self._flatten_batch()
        self.keys, self.keys_tree = self._flatten_keys()
        self.size: int = self.batch[0].shape[0]
        if not self.devices.axes:  # otherwise the call of the whole batch has checked these arguments
            check_others(request, self.roles, args, kwargs, self.size)
        self.whole_size = self.devices.number * self.size
        self.wanted = [request.wanted(path) for path in self.paths]
        self._check_statistics()

    def _check_statistics(self) -> None:
        for statistic in jax.tree.leaves(self.request.stats):
            if not any(statistic.selects(path) for path in self.paths):
                raise ArgumentError(
                    f"{statistic!r}: `where` selects no parameter. Their paths are "
                    f"{', '.join(self.paths)}."
                )
            unit = statistic.unit
            if isinstance(unit, int) and self.size % unit:
                where = " that each device has" if self.devices.axes else ""
                raise ArgumentError(
                    f"{statistic!r} needs whole groups of {unit} examples, and {self.size} examples"
                    f"{where} cannot be divided into these. Use another batch size, or another `per`."
                )
            statistic.check_count(self.whole_size)

    def _flatten_params(self) -> tuple[list[Any], Any, list[str]]:
        for number in self.roles.argnums:
            refuse_modules(self.args[number], number)
        trees = tuple(self.args[n] for n in self.roles.argnums)
        with_path, tree = jax.tree_util.tree_flatten_with_path(trees)
        several = len(trees) > 1
        paths, leaves = [], []
        for (first, *rest), leaf in with_path:
            path = jax.tree_util.keystr(tuple(rest))
            number = self.roles.argnums[first.idx]
            path = f"args[{number}]{path}" if several or not path else path
            if not is_number_like(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ArgumentError(
                    f"the parameter {path} of argument {number} cannot be differentiated: it is "
                    f"{kind(leaf)}, not a floating-point array. Keep it in an argument that argnums "
                    f"does not name.{parameters_of(self.args[number], number)}"
                )
            paths.append(path)
            leaves.append(_as_array(leaf))
        if not leaves:
            raise ArgumentError(
                f"argnums={self.request.argnums} names nothing that has parameters to differentiate."
            )
        return leaves, tree, paths

    def _flatten_batch(self) -> tuple[list[Any], Any]:
        leaves, tree = jax.tree.flatten(tuple(self.args[n] for n in self.roles.batch_argnums))
        sizes = {}
        for path, _, leaf in named_leaves(self.args, self.roles.batch_argnums):
            refuse_key_in_batch(path, leaf)
            if not is_number_like(leaf) or jnp.ndim(leaf) == 0:
                raise ArgumentError(
                    f"the batch leaf {path} is {kind(leaf)}: it has no example axis. Give it to the "
                    "loss in an argument that batch_argnums does not name."
                )
            sizes[path] = jnp.shape(leaf)[0]
        if not sizes:
            raise ArgumentError(
                f"the batch, which batch_argnums={self.request.batch_argnums} names, has no arrays."
            )
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
            raise ArgumentError(
                "all batch leaves must have the same number of examples in front, but they have "
                f"{listed}."
            )
        if not next(iter(sizes.values())):
            raise ArgumentError("the batch is empty: its example axis has length 0.")
        return [_as_array(leaf) for leaf in leaves], tree

    def _flatten_keys(self) -> tuple[list[Any], Any]:
        leaves, tree = jax.tree.flatten(tuple(self.args[n] for n in self.roles.rng_argnums))
        for path, _, leaf in named_leaves(self.args, self.roles.rng_argnums):
            if not is_one_key(leaf):
                raise ArgumentError(
                    f"{path}, named by rng_argnums, must be one PRNG key (jax.random.key or "
                    f"jax.random.PRNGKey); it is {kind(leaf)}."
                )
        return leaves, tree

    def checked(
        self, example_weights: Any, direction: Any, max_norm: Any
    ) -> tuple[jax.Array | None, Given]:
        """The example weights, and what was passed for each parameter, checked, as arrays."""
        weights, stats = self._check_weights(example_weights), self.request.stats
        directions = self._check_direction(direction) if takes_direction(stats) else None
        params = self.like_params(range(len(self.params)))
        return weights, Given(directions, max_norms_of(stats, max_norm, params, self.paths))

    def run(self, weights: jax.Array | None, given: Given) -> Any:
        """Runs the four stages, and returns the value and the results of all statistics.

        The arguments are those that `checked` returned. On one of several devices, the result of an
        accumulator is this device's part, and the parts of all devices add up to the result. If it is
        laid out like a parameter that is divided among the devices, it is this device's shard of the
        result.
        """
        cut, schedule = self._schedule(self._number_of(given.directions))
        shares = self._shares(weights)
        count = self._count(weights)
        shards = Shards.of(self.shards, cut, self.devices)
        outcome = run(cut, schedule, self.params, self.examples(), shares, given, shards)
        if outcome.finite is not None:
            kept = jnp.where(outcome.finite, 1.0 if weights is None else weights, 0)
            outcome = with_shares_of_kept(outcome, self._count(kept) / count)
            shares, count = self._shares(kept), self._count(kept)
        outcome = part_of_all(outcome, self.devices, shards)
        last, pairs = run_last(cut, schedule, self.params, outcome, self.devices)

        dtype = outcome.losses.dtype
        losses = outcome.losses.astype(accumulation_dtype(dtype))
        value = self.devices.add(weighted_sum(losses, shares)).astype(dtype)
        if self.request.has_aux:
            value = value, jax.tree.unflatten(cut.program.aux_tree, outcome.aux)
        results = Results(
            losses=outcome.losses,
            count=count,
            states=outcome.states | last,
            pairs=pairs,
            tails={param: tail for tail in cut.all_tails() for param in tail.params},
            grads=cut.program.grads,
            paths=self.paths,
            like_params=self.like_params,
            devices=self.devices,
            shards=shards,
        )
        return value, jax.tree.map(lambda statistic: statistic.result(results), self.request.stats)

    def plan(self, direction: Any = None) -> Plan:
        """The plan that `run` would follow.

        Without a direction there is one, and shapes may stand in the place of its arrays.
        """
        directions = None if direction is None else self._check_direction(direction)
        cut, schedule = self._schedule(self._number_of(directions))
        return describe(schedule, cut, self.devices.number)

    def _schedule(self, directions: int) -> tuple[Cut, Schedule]:
        """Runs stages 1 to 3: trace, cut and plan, for so many directions of inner products."""
        program, size, microbatch_size = self.traced(), self.size, self.request.microbatch_size
        room = math.inf
        if microbatch_size is None and self._layers_wait(program):
            microbatch_size, room = "auto", WAITING_SHARE * self._bytes_of_grad(program)
        cut, schedule = self.scheduled(program, size, microbatch_size, directions, room)
        if microbatch_size == "auto" and schedule.microbatch_size == 1:
            return self.scheduled(program, size, 1, directions)
        return cut, schedule

    def traced(self) -> Program:
        """Runs stage 1: the gradient program of one example."""
        example = [_one_of(x) for x in self.batch]
        params = self._whole_params()
        program = trace(self._one_example, params, [*example, *self.keys], self.request.has_aux)
        refuse_collectives(program.jaxpr, self.devices)
        shared = self._same_for_all()
        refuse_key(program, shared)
        if self.request.keep_batch_dim:
            refuse_batch(program, shared, self.whole_size, self._traced_for)
        return with_common_rounds(program, self.devices)

    def _same_for_all(self) -> list[Any]:
        """The arrays among the arguments that all examples share."""
        own = (*self.roles.argnums, *self.roles.batch_argnums, *self.roles.rng_argnums)
        others = [x for n, x in enumerate(self.args) if n not in own]
        return [x for x in jax.tree.leaves((others, self.kwargs)) if is_array_like(x)]

    def _traced_for(self, size: int) -> Any:
        """The shapes of what the loss returns for a batch of so many examples."""
        batch = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in self.batch]

        def loss(params: Sequence[Any], batch: Sequence[Any], keys: Sequence[Any]) -> Any:
            return self.request.fun(*self.arguments(params, batch, keys), **self.kwargs)

        return jax.eval_shape(loss, self._whole_params(), batch, self.keys)

    def _whole_params(self) -> list[Any]:
        return [_whole(x, shard) for x, shard in zip(self.params, self.shards, strict=True)]

    def scheduled(
        self,
        program: Program,
        size: int,
        microbatch_size: int | str | None = None,
        directions: int = 1,
        room: float = math.inf,
    ) -> tuple[Cut, Schedule]:
        """Runs stages 2 and 3 for `size` examples: cut and plan.

        With `microbatch_size="auto"`, activations and tails of a microbatch take at most `room` bytes.
        """
        in_parts = [i for i, own in enumerate(self.wanted) if all(s.in_parts for s in own)]
        in_parts = [] if self.request.drops else in_parts  # all sums wait for norms
        split = any(
            s.unit in ("token", "position") or s.quantity is Quantity.FACTORS
            for own in self.wanted
            for s in own
        )
        alone = 1 in (microbatch_size, size) and runs_alone(program, self.devices)
        wanted = Wanted(tuple(in_parts), split, together=not alone)
        cut = self._cut(program, wanted)
        check_positions(self.request.stats, cut, self.paths)
        asked = Asked(self.request.forced, self.request.drops, directions)
        return cut, make_schedule(cut, self.paths, self.wanted, size, microbatch_size, asked, room=room)

    def _layers_wait(self, program: Program) -> bool:
        """Whether sums of gradients of layers in a loop wait for norms, as clipping does.

        They need the factors of all layers after the loop. Those of all examples at once would take
        several times the memory of `jax.grad`, which the loop keeps low. So as many examples run at a
        time as take about that memory (`WAITING_SHARE`), or fewer if that is faster.
        """
        drops = self.request.drops
        waiting = [
            i for i, own in enumerate(self.wanted) if drops or any(s.phase is Phase.BY_NORM for s in own)
        ]
        return bool(waiting) and leave_loops(program, waiting)

    def _bytes_of_grad(self, program: Program) -> float:
        """The temporary memory of `jax.grad` of the whole batch."""
        sums = Wanted(tuple(range(len(self.paths))), split=False, together=True)
        return activations(self._cut(program, sums), self.size, backend.backend())

    def _cut(self, program: Program, wanted: Wanted) -> Cut:
        """Runs stage 2. Parameters that devices divide are gathered where they are used."""
        return make_cut(with_gathers(hoist(program, wanted), self.shards), wanted)

    def _check_direction(self, direction: Any) -> list[Any]:
        """The direction as one array for each parameter. Several directions have an axis in front."""
        if direction is None:
            raise ArgumentError(
                "Dot needs a direction, a tree like the parameters: stats_fn(..., direction=v)."
            )
        one = isinstance(self.request.argnums, int)
        if not one and not isinstance(direction, (tuple, list)):
            raise ArgumentError(
                "the direction must be a tuple of trees, one for each of "
                f"argnums={self.request.argnums}."
            )
        leaves, tree = jax.tree.flatten((direction,) if one else tuple(direction))
        if tree != self.params_tree:
            raise ArgumentError(
                f"the direction must be a tree like the parameters, {self.params_tree}; it is {tree}."
            )
        first: tuple[int, ...] = jnp.shape(leaves[0]) if is_number_like(leaves[0]) else ()
        is_several = len(first) == self.params[0].ndim + 1 and 0 not in first[:1]
        several = first[:1] if is_several else ()
        for path, leaf, param in zip(self.paths, leaves, self.params, strict=True):
            if not is_number_like(leaf) or jnp.shape(leaf) != (*several, *jnp.shape(param)):
                what = kind(_as_array(leaf) if is_number_like(leaf) else leaf)
                raise ArgumentError(
                    f"the direction's {path} must have the parameter's shape {jnp.shape(param)}, or one "
                    f"more axis in front, which several directions have in all leaves; it is {what}."
                )
        dtypes = [accumulation_dtype(param.dtype) for param in self.params]
        pairs = zip(map(_as_array, leaves), dtypes, strict=True)
        return [jax.ShapeDtypeStruct(x.shape, d) if _is_shape(x) else x.astype(d) for x, d in pairs]

    def _number_of(self, directions: Sequence[Any] | None) -> int:
        """How many directions these are, which are those of each parameter."""
        is_several = directions is not None and directions[0].ndim > self.params[0].ndim
        return directions[0].shape[0] if directions is not None and is_several else 1

    def _check_weights(self, weights: Any) -> jax.Array | None:
        """The example weights as an array, or None if the caller passed none."""
        if weights is None:
            return None
        weights = jnp.asarray(weights)
        if weights.shape != (self.size,):
            raise ArgumentError(
                f"example_weights must have the shape ({self.size},), one weight for each example, not "
                f"{weights.shape}."
            )
        weights = weights.astype(jnp.result_type(float))
        if _is_concrete(weights):
            values = np.asarray(weights)
            if not np.all(np.isfinite(values) & (values >= 0)):
                raise ArgumentError("example_weights must be finite and at least 0.")
            if not values.sum() > 0:
                raise ArgumentError("example_weights are all 0: there is no example to speak of.")
            for statistic in jax.tree.leaves(self.request.stats):
                statistic.check_count(float(values.sum()))
        return weights

    def _count(self, weights: jax.Array | None) -> jax.Array:
        """The number of examples, counted with their weights."""
        if weights is None:
            return jnp.asarray(self.whole_size, jnp.result_type(float))
        return self.devices.add(jnp.sum(weights))

    def _shares(self, weights: jax.Array | None) -> Weights:
        """Each example's share of the batch."""
        return 1 / self.whole_size if weights is None else weights / self._count(weights)

    def examples(self) -> list[jax.Array]:
        """The leaves that differ from example to example, [B, ...]: those of the batch, and the keys."""
        keys = [jax.random.split(key, self.whole_size) for key in self.keys]
        if self.devices.axes:
            start = self.devices.first(self.size)
            keys = [lax.dynamic_slice_in_dim(own, start, self.size) for own in keys]
        return [*self.batch, *keys]

    def arguments(
        self, params: Sequence[Any], batch: Sequence[Any], keys: Sequence[Any] = ()
    ) -> list[Any]:
        """The user's arguments, with other leaves for the parameters, the batch and the keys."""
        args = list(self.args)
        for numbers, tree, leaves in (
            (self.roles.argnums, self.params_tree, params),
            (self.roles.batch_argnums, self.batch_tree, batch),
            (self.roles.rng_argnums, self.keys_tree, keys),
        ):
            for number, arg in zip(numbers, jax.tree.unflatten(tree, leaves), strict=True):
                args[number] = arg
        return args

    def _one_example(self, params: Sequence[Any], example: Sequence[Any]) -> Any:
        batch, keys = example[: len(self.batch)], example[len(self.batch) :]
        if self.request.keep_batch_dim:
            batch = [x[None] for x in batch]
        with saying_what_was_given(batch, self.request), constraints_explained(self.devices):
            out = self.request.fun(*self.arguments(params, batch, keys), **self.kwargs)
        if self.request.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise ArgumentError(f"with has_aux the loss must return (loss, aux), not {kind(out)}.")
        value = out[0] if self.request.has_aux else out
        self._check_value(value)
        value = jnp.asarray(value)  # A constant loss may be a Python number.
        return (value, out[1]) if self.request.has_aux else value

    def _check_value(self, value: Any) -> None:
        if not is_number_like(value):
            if isinstance(value, tuple) and len(value) == 2:
                raise ArgumentError("the loss returned a pair. If its second is aux, say has_aux=True.")
            raise ArgumentError(f"the loss must return a scalar, not {kind(value)}.")
        if jnp.shape(value) != ():
            example = "a batch of one" if self.request.keep_batch_dim else "one example"
            raise ArgumentError(
                f"the loss must return a scalar, but for {example} it returned an array of the shape "
                f"{jnp.shape(value)}. Take its mean."
            )
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            hint = f" Return {float(value)}." if isinstance(value, int) else ""
            raise ArgumentError(f"the loss must be a real number; it is {kind(value)}.{hint}")
        refuse_varying([value])

    def like_params(self, leaves: Sequence[Any]) -> Any:
        """A tree like the parameters with these leaves, or a tuple of trees if argnums is a tuple."""
        trees = jax.tree.unflatten(self.params_tree, leaves)
        return trees[0] if isinstance(self.request.argnums, int) else trees


def _as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) or _is_shape(x) else jnp.asarray(x)


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _one_of(batch: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one example, which keeps the weak type of Python numbers."""
    weak = getattr(batch, "weak_type", False)
    return jax.ShapeDtypeStruct(batch.shape[1:], batch.dtype, weak_type=weak)


def _whole(param: Any, shard: Shard) -> Any:
    """The shape and dtype of the whole parameter, of which `param` is a shard.

    It is on the same mesh. If it were not, JAX would move its gradient, in one more equation.
    """
    if shard.is_whole:
        return param
    whole, sharding = shard.whole_shape(param.shape), jax.typeof(param).sharding
    weak = getattr(param, "weak_type", False)
    return jax.ShapeDtypeStruct(whole, param.dtype, weak_type=weak, sharding=sharding)


def _is_concrete(x: jax.Array) -> bool:
    """Whether this process knows all values: not under `jit`, nor if other processes hold some."""
    return not isinstance(x, Tracer) and x.is_fully_addressable
