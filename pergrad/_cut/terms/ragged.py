"""A ragged product: each group of positions has its own matrix, as the tokens of each expert do.

The positions of one example are sorted by group, and s_e of them belong to group e:

    y_t = x_t W_e      with e the group of t,     so that     g_e = sum over t in group e of x_t d_t^T,

a `ragged_dot_general` whose ragged axis is contracted. The sum over examples is the same product, with
the positions of all examples one behind the other and sorted by group again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._cut.terms._term import Term
from pergrad._ir import (
    Env,
    Weights,
    accumulation_dtype,
    distinct,
    read,
    weigh,
    weigh_factors,
    with_example_axis,
)


@dataclasses.dataclass(frozen=True)
class Ragged(Term):
    """A `ragged_dot_general` of two arrays x and d that both differ from example to example."""

    eqn: JaxprEqn

    @property
    def kind(self) -> str:
        return "ragged product"

    @property
    def why_no_derivative(self) -> str | None:
        return "JAX cannot differentiate the sum of a ragged product"

    @property
    def why_no_positions(self) -> str | None:
        return "its tokens are sorted by their groups, such as experts"

    @staticmethod
    def match(eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]) -> Ragged | None:
        """The term, if x and d vary and the product has no axes but positions and features."""
        x, d, sizes = eqn.invars[:3]
        plain = all(len(aval(v).shape) == n for v, n in ((x, 2), (d, 2), (sizes, 1)))
        if not plain or not sums_over_groups(eqn) or not {0, 1} <= set(varying):
            return None
        return Ragged(eqn, eqn.outvars[0], distinct(eqn.invars[i] for i in varying))

    @property
    def contributions(self) -> int:
        return aval(self.eqn.invars[0]).shape[self._positions[0]]

    @property
    def _positions(self) -> tuple[int, int]:
        """The numbers of the ragged axis in x and in d."""
        ((x_axis,), (d_axis,)), _ = self.eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return x_axis, d_axis

    def form(self, env: Env) -> None:
        x, d, sizes = (read(env, v) for v in self.eqn.invars[:3])
        x, d = (jnp.moveaxis(a, axis, 0) for a, axis in zip((x, d), self._positions, strict=True))
        env[self.out] = self._product(x, d, sizes, self.eqn.params["preferred_element_type"])

    def sum(self, env: Env, w: Weights) -> jax.Array:
        x, d, sizes = self._read(env)
        dtype = accumulation_dtype(aval(self.out).dtype)
        x, d = x.astype(dtype), d.astype(dtype)
        x, d = weigh_factors(x, d, w) if isinstance(w, jax.Array) else (weigh(x, w), d)
        order = jnp.argsort(_groups(sizes, x.shape[1]).reshape(-1), stable=True)
        x, d = (a.reshape(-1, a.shape[2])[order] for a in (x, d))
        return self._product(x, d, jnp.sum(sizes, axis=0), dtype)

    def split(self, env: Env) -> list[jax.Array]:
        x, d, sizes = self._read(env)
        groups = _groups(sizes, x.shape[1])
        return [x, d, jax.nn.one_hot(groups, sizes.shape[1], dtype=sizes.dtype)]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        x, d, sizes = parts
        return self._product(x[None], d[None], sizes, accumulation_dtype(aval(self.out).dtype))

    def _read(self, env: Env) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, a], d [B, T, b] and the sizes of the groups [B, groups]."""
        size = env[self.factors[0]].shape[0]
        x, d, sizes = (
            with_example_axis(read(env, v), v in self.factors, size) for v in self.eqn.invars[:3]
        )
        x, d = (jnp.moveaxis(a, axis + 1, 1) for a, axis in zip((x, d), self._positions, strict=True))
        return x, d, sizes

    def _product(self, x: Any, d: Any, sizes: Any, dtype: Any) -> jax.Array:
        """The gradient [groups, a, b], from x [T, a] and d [T, b]."""
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        product = functools.partial(
            lax.ragged_dot_general,
            ragged_dot_dimension_numbers=numbers,
            precision=self.eqn.params["precision"],
            preferred_element_type=dtype,
        )
        return _mappable(product)(x, d, sizes)


def _mappable(product: Callable[..., Any]) -> Callable[..., Any]:
    """`product` as a function that can be mapped over some of its operands. JAX maps over all or none.

    For example, the sizes of the groups are the same for all examples if every expert takes as many
    tokens as it has places.
    """
    mapped = custom_vmap(product)

    @mapped.def_vmap
    def rule(size: int, batched: Sequence[bool], *operands: Any) -> Any:
        pairs = zip(operands, batched, strict=True)
        in_front = [with_example_axis(a, has_axis, size) for a, has_axis in pairs]
        return jax.vmap(product)(*in_front), True

    return mapped


def _groups(sizes: jax.Array, positions: int) -> jax.Array:
    """The group of every position, as an array [B, positions], from sizes [B, groups].

    Positions behind the last group belong to none, and have the number of groups.
    """
    ends = jnp.cumsum(sizes, axis=1)
    return jax.vmap(lambda e: jnp.searchsorted(e, jnp.arange(positions), "right"))(ends)


def sums_over_groups(eqn: JaxprEqn) -> bool:
    """Whether the ragged axis alone is contracted, so that the result has a matrix for every group.

    There must be no batch axes and no group offset.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (x_contracted, _), (x_batch, _) = numbers.dot_dimension_numbers
    alone = tuple(x_contracted) == tuple(numbers.lhs_ragged_dimensions) and not x_batch
    return alone and eqn.params["group_offset"] is None
