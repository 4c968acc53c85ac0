"""A convolution of two saved arrays: the gradient of a kernel.

With n for the lhs's batch axis, i for the summed features, o for the rhs's output features, strides s,
rhs dilation d, and the lhs x already dilated and padded,

    g[n, o, p] = sum over i, k of x[n, i, p s + k d] y[o, i, k].

As the gradient of a kernel it has few positions p, those of the kernel, and many k, those of the
layer's output; n are the layer's input features, and i is what was its batch. Every p sees one strided
slice of x. These patches X_p[(i, k), n], one under the other, make it a matrix product

    g_p = X_p^T Y

like that of a dense layer. The convolution itself is slow for one example, and a convolution for each
of many examples is slower. But the sum over examples is one ordinary convolution, with the examples as
part of i, and that is what `jax.grad` runs.

With G groups (`batch_group_count`; a grouped or depthwise layer) n and o are split into groups that
only meet each other, which is one batch axis of the product.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._eval import Env, distinct, read
from pergrad._statistics import Weights, accumulation_dtype, weigh
from pergrad.terms._term import Term

# Each position of the kernel is a slice in the program. A larger kernel's gradient is formed by XLA.
MOST_POSITIONS = 128


@dataclasses.dataclass(frozen=True)
class Convolution(Term):
    eqn: JaxprEqn

    @property
    def kind(self) -> str:
        return "convolution"

    @staticmethod
    def match(
        eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]
    ) -> Convolution | None:
        if len(varying) < 2 or eqn.params["feature_group_count"] > 1:
            return None
        term = Convolution(eqn, eqn.outvars[0], distinct(eqn.invars))
        return term if 0 < math.prod(term._positions) <= MOST_POSITIONS else None

    @property
    def contributions(self) -> int:
        _, i, *k = self.eqn.params["dimension_numbers"].rhs_spec
        return math.prod(aval(self.eqn.invars[1]).shape[a] for a in (i, *k))

    @property
    def _positions(self) -> tuple[int, ...]:
        """How many p there are along each spatial axis."""
        _, _, *p = self.eqn.params["dimension_numbers"].out_spec
        return tuple(aval(self.out).shape[a] for a in p)

    def form(self, env: Env) -> None:
        x, y = (read(env, v) for v in self.eqn.invars)
        dims, groups = self.eqn.params["dimension_numbers"], self.eqn.params["batch_group_count"]
        x, y = (_features_last(a, spec) for a, spec in ((x, dims.lhs_spec), (y, dims.rhs_spec)))
        patches = jnp.stack(self._patches(x, y.shape[1:-1]))
        product = lax.dot_general(
            patches.reshape(len(patches), self.contributions, groups, -1),
            y.reshape(self.contributions, groups, -1),
            (((1,), (0,)), ((2,), (1,))),
            precision=self.eqn.params["precision"],
            preferred_element_type=self.eqn.params["preferred_element_type"],
        )
        # [G, P, n, o] to [p..., n, G o], and from there to the layout of the result.
        g = product.transpose(1, 2, 0, 3)
        g = g.reshape(*self._positions, g.shape[1], -1)
        spec = (*dims.out_spec[2:], *dims.out_spec[:2])
        env[self.out] = g.transpose(np.argsort(spec))

    def _patches(self, x: jax.Array, size: tuple[int, ...]) -> list[jax.Array]:
        """What each position p sees of `x` [i, spatial..., n]: [i, k..., n], `size` many k."""
        params = self.eqn.params
        dilations = params["rhs_dilation"]
        edges = [
            (lo, hi, d - 1)
            for (lo, hi), d in zip(params["padding"], params["lhs_dilation"], strict=True)
        ]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
        patches = []
        for p in itertools.product(*map(range, self._positions)):
            start = [a * s for a, s in zip(p, params["window_strides"], strict=True)]
            stop = [a + (k - 1) * d + 1 for a, k, d in zip(start, size, dilations, strict=True)]
            ends = (x.shape[0], *stop, x.shape[-1])
            patches.append(lax.slice(x, (0, *start, 0), ends, (1, *dilations, 1)))
        return patches

    def sum(self, env: Env, w: Weights) -> jax.Array:
        x, y = (read(env, v) for v in self.eqn.invars)
        dtype = accumulation_dtype(aval(self.out).dtype)
        if isinstance(w, jax.Array):
            present = jnp.not_equal(w, 0).astype(dtype)
            x, y = weigh(x.astype(dtype), w), weigh(y.astype(dtype), present)
            return self._convolution(x, y, dtype)
        return weigh(self._convolution(x, y, dtype), w)

    def _convolution(self, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
        """The convolution of factors [B, ...], with the examples in the summed axis."""
        params = self.eqn.params
        dims = params["dimension_numbers"]
        return lax.conv_general_dilated(
            _merge_examples(x, dims.lhs_spec[1]),
            _merge_examples(y, dims.rhs_spec[1]),
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            dims,
            batch_group_count=params["batch_group_count"],
            precision=params["precision"],
            preferred_element_type=dtype,
        )


def _features_last(x: Any, spec: Collection[int]) -> jax.Array:
    """An operand with the axes (first, second, spatial...) as (second, spatial..., first)."""
    first, *others = spec
    return jnp.transpose(x, (*others, first))


def _merge_examples(x: jax.Array, axis: int) -> jax.Array:
    """`x` [B, ...] with its example axis as part of another one."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
