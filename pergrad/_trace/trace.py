"""Stage 1: a loss becomes the gradient program of one example.

The program is flat. Calls are inlined by tracing them again: their equations cannot simply be pasted,
because equal sub-programs share their variables. Equations that no output needs are dropped. What is
left is a list of equations that the next stage can walk through. Axes of length 1, of which a batch of
one has many, are dropped on the way (`unit_axes`).

`remat` must keep its recomputation. JAX lowers it to a barrier on the arguments, followed by the body,
and it is inlined here in the same way. The `optimization_barrier` ties the recomputation to the
cotangents, so that XLA neither merges it with the forward pass nor runs it early.

Mutable references that the loss makes become arrays, before anything else is done.

When the loss is differentiated, JAX replaces the `custom_jvp` and `custom_vjp` functions that a
parameter goes through by their rules. The others, which no parameter goes through, stay calls, so that
their rules apply when somebody differentiates the statistics.

Some random numbers would depend on the size of the batch that they are drawn in. These are drawn one
example after the other (`_inline_random`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.extend.core import primitives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pergrad import _compat
from pergrad._compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var
from pergrad._errors import ArgumentError
from pergrad._ir import Env, Loop, distinct, programs, read, starting_env, take_branch, without_axes
from pergrad._trace.lookups import with_early_lookups
from pergrad._trace.ragged import with_batching
from pergrad._trace.unit_axes import as_known, evaluate_squeezed

# How a primitive is inlined: the results of an equation, from its operands, and the table for the
# equations of the programs that it runs.
Inline = Callable[[JaxprEqn, Sequence[Any], "InlineTable"], list[Any]]


InlineTable = dict[Primitive, Inline]


@dataclasses.dataclass(frozen=True)
class Program:
    """The gradient program of one example.

    The inputs of `jaxpr` are the parameters `params`, then the arrays `example` of the example, then the
    `cotangent` of the loss. What depends on the cotangent belongs to the backward pass. Arrays that the
    loss closes over are constants, whose values are `consts`. The outputs are the loss `value`, the
    leaves `aux` of the auxiliary output, which has the structure `aux_tree`, and the gradients `grads`.
    """

    jaxpr: Jaxpr
    consts: list[Any]
    params: tuple[Var, ...]
    example: tuple[Var, ...]
    cotangent: Var
    value: Atom
    aux: tuple[Atom, ...]
    grads: tuple[Atom, ...]
    aux_tree: Any

    @staticmethod
    def of(program: ClosedJaxpr, num_params: int, aux_tree: Any) -> Program:
        """Names the inputs and outputs of a program, whose first `num_params` inputs are parameters."""
        jaxpr = _compat.drop_dead_code(program.jaxpr)
        end_of_aux = 1 + aux_tree.num_leaves
        return Program(
            jaxpr=jaxpr,
            consts=program.consts,
            params=tuple(jaxpr.invars[:num_params]),
            example=tuple(jaxpr.invars[num_params:-1]),
            cotangent=jaxpr.invars[-1],
            value=jaxpr.outvars[0],
            aux=tuple(jaxpr.outvars[1:end_of_aux]),
            grads=tuple(jaxpr.outvars[end_of_aux:]),
            aux_tree=aux_tree,
        )

    def starting_env(
        self, params: Sequence[Any], example: Sequence[Any] | None = None, cotangent: float = 1
    ) -> Env:
        """The values of the program's constants and inputs, from which it starts.

        Without `example`, only the values that all examples share.
        """
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env |= zip(self.params, params, strict=True)
        env[self.cotangent] = jnp.full((), cotangent, _compat.aval(self.cotangent).dtype)
        return env if example is None else env | dict(zip(self.example, example, strict=True))

    def replaced_by(self, program: ClosedJaxpr) -> Program:
        """`program`, which has the same inputs and outputs as this one, in the place of this one."""
        return Program.of(program, len(self.params), self.aux_tree)


def trace(
    fun: Callable[..., Any], params: Sequence[Any], example: Sequence[Any], has_aux: bool
) -> Program:
    """The program of `fun(params, example)` and of its gradient with respect to `params`.

    `params` and `example` are flat lists. With `has_aux`, `fun` returns a pair of the loss and an
    auxiliary output, else the loss.
    """

    def value_aux_grads(
        params: Sequence[Any], example: Sequence[Any], cotangent: jax.Array
    ) -> tuple[Any, Any, Any]:
        value, pull, *aux = jax.vjp(lambda params: fun(params, example), params, has_aux=has_aux)
        (grads,) = pull(cotangent.astype(value.dtype))
        return value, aux[0] if has_aux else None, grads

    args = params, example, jax.ShapeDtypeStruct((), jnp.result_type(float))
    nested, (_, aux_shape, _) = jax.make_jaxpr(value_aux_grads, return_shape=True)(*args)
    pure = _without_references(nested)
    leaves = jax.tree.leaves(args)
    flat = jax.make_jaxpr(lambda *args: _inline(pure, args, CALLS))(*leaves)
    flat = with_early_lookups(flat, leaves)
    return Program.of(flat, len(params), jax.tree.structure(aux_shape))


def inlined(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """The program of `fun(*args)`, with all calls inlined but those of custom derivatives."""
    nested = jax.make_jaxpr(fun)(*args)
    return jax.make_jaxpr(lambda *leaves: _inline(nested, leaves, CALLS))(*jax.tree.leaves(args))


def flat_jaxpr(fun: Callable[..., Any], *args: Any) -> Jaxpr:
    """The program of `fun(*args)` with all its calls inlined. It is there to be read, not to be run."""
    nested = _without_references(jax.make_jaxpr(fun)(*args))
    inlined = jax.make_jaxpr(lambda *leaves: _inline(nested, leaves, CALLS | CUSTOM_CALLS))
    return inlined(*jax.tree.leaves(args)).jaxpr


def _without_references(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, with arrays in the place of mutable references (`jax.new_ref`).

    An equation that writes into a reference has no result that depends on what it writes. So whoever
    follows the results of equations would not see the dependence.
    """
    if not _has_references(program.jaxpr):
        return program
    outside = {v for v in (*program.jaxpr.constvars, *program.jaxpr.invars) if _compat.is_reference(v)}
    for eqn in program.jaxpr.eqns:
        if not outside.isdisjoint(distinct(eqn.invars)):
            raise ArgumentError(
                "the loss uses a mutable reference that was made outside of it, at "
                f"{_compat.user_line(eqn)}. Examples run together, so there is no order in which they "
                "could change it. Make the reference in the loss, with jax.new_ref, or return its value "
                "with has_aux=True."
            )
    return _compat.without_references(program)


def _has_references(jaxpr: Jaxpr) -> bool:
    variables = (v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars))
    inner = (program for eqn in jaxpr.eqns for program in programs(eqn))
    return any(map(_compat.is_reference, variables)) or any(map(_has_references, inner))


def _inline(program: ClosedJaxpr, args: Sequence[Any], table: InlineTable) -> list[Any]:
    """The results of a program for the arguments `args`, with the calls in `table` inlined."""
    return as_known(_inline_squeezed(program, args, table), program.jaxpr.outvars)


def _inline_squeezed(program: ClosedJaxpr, args: Sequence[Any], table: InlineTable) -> list[Any]:
    """As `_inline`, but the arguments and the results may lack axes of length 1."""
    env = starting_env(program, args)
    for eqn in program.jaxpr.eqns:
        inline = table.get(eqn.primitive)
        ins = [read(env, v) for v in eqn.invars]
        outs = inline(eqn, ins, table) if inline else evaluate_squeezed(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, v) for v in program.jaxpr.outvars]


def _inline_call(body: str) -> Inline:
    """How to inline a call that does what the program in its parameter `body` does."""

    def inline(eqn: JaxprEqn, args: Sequence[Any], table: InlineTable) -> list[Any]:
        return _inline_squeezed(_compat.as_closed(eqn.params[body]), args, table)

    return inline


def _inline_remat(eqn: JaxprEqn, args: Sequence[Any], table: InlineTable) -> list[Any]:
    """The results of a `remat`: its body behind a barrier on those arguments that JAX guards."""
    guarded = _compat.remat_barriers(eqn)
    behind = iter(lax.optimization_barrier([a for a, g in zip(args, guarded, strict=True) if g]))
    args = [next(behind) if g else a for a, g in zip(args, guarded, strict=True)]
    return _inline_squeezed(_compat.as_closed(eqn.params["jaxpr"]), args, table)


def _inline_in_loop(eqn: JaxprEqn, args: Sequence[Any], table: InlineTable) -> list[Any]:
    """The results of a loop that stays a loop, with the calls in its body inlined."""
    loop = Loop(eqn, eqn.params["jaxpr"])
    return loop.rebuilt(as_known(args, eqn.invars), lambda body, own: _inline(body, own, table))


def _inline_in_branches(eqn: JaxprEqn, args: Sequence[Any], table: InlineTable) -> list[Any]:
    """The results of a conditional that stays one, with the calls in its branches inlined."""
    branches = [lambda *args, b=b: _inline(b, args, table) for b in eqn.params["branches"]]
    with _compat.at_line_of(eqn):
        index, *operands = as_known(args, eqn.invars)
        return take_branch(eqn, index, branches, operands)


def _inline_ragged_product(eqn: JaxprEqn, args: Sequence[Any], table: InlineTable) -> list[Any]:
    """The result of a ragged product, which is replaced if JAX cannot map it over examples."""
    args = as_known(args, eqn.invars)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    _, (x_batch, _) = numbers.dot_dimension_numbers
    shares_weights = not x_batch and len(numbers.rhs_group_dimensions) == 1 and len(args) == 3
    if not shares_weights:
        return _compat.bind(eqn, args)
    with _compat.at_line_of(eqn):
        return [with_batching(eqn)(*args)]


def _inline_constraint(eqn: JaxprEqn, args: Sequence[Any], table: InlineTable) -> list[Any]:
    """The result of a sharding constraint, without the mesh axes that are manual here.

    Along a manual axis every device has its own examples already.
    """
    (x,) = as_known(args, eqn.invars)
    mesh, sharding = jax.sharding.get_abstract_mesh(), eqn.params["sharding"]
    if not mesh.manual_axes or not isinstance(sharding, NamedSharding):
        return _compat.bind(eqn, [x])
    if set(mesh.manual_axes) == set(mesh.axis_names):
        return [x]
    kept = P(*without_axes(sharding.spec, mesh.manual_axes))
    params = eqn.params | {"sharding": NamedSharding(mesh, kept)}
    return _compat.bind(eqn.replace(params=params), [x])


def _inline_random(*unsafe: str) -> Inline:
    """How to inline an equation that draws numbers from a key, or makes keys of a key.

    If it is mapped over keys, the hardware's generator draws all numbers from the first key. Then
    `jax.vmap` of `jax.random.bits` does not give what a loop over the keys gives, and the numbers of an
    example depend on how many other examples there are. For the key implementations `unsafe`, and for
    raw keys, this one equation runs for one example after the other.
    """

    def inline(eqn: JaxprEqn, args: Sequence[Any], table: InlineTable) -> list[Any]:
        args = as_known(args, eqn.invars)
        is_typed = jnp.issubdtype(args[0].dtype, jax.dtypes.prng_key)
        if is_typed and jax.random.key_impl(args[0]) not in unsafe:
            return _compat.bind(eqn, args)
        with _compat.at_line_of(eqn):
            return sequential_vmap(lambda *args: _compat.bind(eqn, args))(*args)

    return inline


CALLS: InlineTable = {
    _compat.ragged_dot_general_p: _inline_ragged_product,
    primitives.jit_p: _inline_call("jaxpr"),
    primitives.closed_call_p: _inline_call("call_jaxpr"),
    primitives.cond_p: _inline_in_branches,
    primitives.scan_p: _inline_in_loop,
    _compat.remat_p: _inline_remat,
    _compat.sharding_constraint_p: _inline_constraint,
    primitives.random_bits_p: _inline_random("rbg", "unsafe_rbg"),
    primitives.random_gamma_p: _inline_random("rbg", "unsafe_rbg"),
    primitives.random_split_p: _inline_random("unsafe_rbg"),
    primitives.random_fold_in_p: _inline_random("unsafe_rbg"),
    primitives.rng_bit_generator_p: _inline_random(),
}


CUSTOM_CALLS: InlineTable = {
    primitives.custom_jvp_call_p: _inline_call("call_jaxpr"),
    primitives.custom_vjp_call_p: _inline_call("call_jaxpr"),
}
