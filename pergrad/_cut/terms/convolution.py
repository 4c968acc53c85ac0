"""A convolution of two saved arrays: the gradient of a kernel.

With strides s, dilation d, and x already padded (and dilated itself),

    g[n, o, p] = sum over i, k of x[n, i, s p + d k] y[o, i, k].

The gradient of a kernel has few positions p, those of the kernel, and many k, those of the layer's
output; n are the layer's input features, o its output features, and i was its batch. Every p takes in
one strided slice of x. With these slices, the patches X_p, which have a row for each (i, k), the
convolution is the matrix product

    g_p = X_p^T Y

of a dense layer. The product is fast for one example, and for many examples it is still a product, while
the convolution would become one with as many groups as examples. The sum over examples is one ordinary
convolution, with the examples as a part of i, which is what `jax.grad` runs.

With G groups (a grouped or depthwise layer) n and o are split into G parts each, and part j of n meets
only part j of o. So the groups are a batch axis of the product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._cut.terms._term import Term
from pergrad._ir import Env, Weights, accumulation_dtype, distinct, product, read, weigh, weigh_factors

MOST_POSITIONS = 128  # for each position p the patches have a copy of x


@dataclasses.dataclass(frozen=True)
class Convolution(Term):
    """A `conv_general_dilated` of two arrays x and y that both differ from example to example."""

    eqn: JaxprEqn

    @property
    def kind(self) -> str:
        return "convolution"

    @property
    def convolves(self) -> bool:
        return True

    @staticmethod
    def match(
        eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]
    ) -> Convolution | None:
        """The term, if both operands vary and there are not too many positions p."""
        if len(varying) < 2 or eqn.params["feature_group_count"] > 1:
            return None
        term = Convolution(eqn, eqn.outvars[0], distinct(eqn.invars))
        return term if 0 < math.prod(term.positions) <= MOST_POSITIONS else None

    @property
    def contributions(self) -> int:
        _, *summed = self.eqn.params["dimension_numbers"].rhs_spec
        return math.prod(aval(self.eqn.invars[1]).shape[a] for a in summed)

    @property
    def positions(self) -> tuple[int, ...]:
        """How many p there are, along each spatial axis."""
        _, _, *spatial = self.eqn.params["dimension_numbers"].out_spec
        return tuple(aval(self.out).shape[a] for a in spatial)

    @property
    def scratch(self) -> int:
        """How many bytes the patches of one example take."""
        x = aval(self.eqn.invars[0])
        features = x.shape[self.eqn.params["dimension_numbers"].lhs_spec[0]]
        return math.prod(self.positions) * self.contributions * features * x.dtype.itemsize

    def form(self, env: Env) -> None:
        patches, y = self._as_product(*(read(env, v) for v in self.eqn.invars))
        dtype, precision = (self.eqn.params[k] for k in ("preferred_element_type", "precision"))
        g = product(patches, y, (((1,), (0,)), ((2,), (1,))), dtype, precision)
        env[self.out] = self._from_product(g)

    def _as_product(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The patches X [p, (i, k), G, n] and Y [(i, k), G, o] of one example."""
        dims, groups = self.eqn.params["dimension_numbers"], self.eqn.params["batch_group_count"]
        (n, *x_summed), (o, *y_summed) = dims.lhs_spec, dims.rhs_spec
        x, y = jnp.transpose(x, (*x_summed, n)), jnp.transpose(y, (*y_summed, o))
        patches = self._patches(x, y.shape[1:-1])
        patches = patches.reshape(len(patches), self.contributions, groups, -1)
        return patches, y.reshape(self.contributions, groups, -1)

    def _from_product(self, g: jax.Array) -> jax.Array:
        g = g.transpose(2, 1, 0, 3)  # [G, p, n, o] to [n, p, G, o]
        return self._in_layout(g.reshape(len(g), *self.positions, -1))

    def split(self, env: Env) -> list[jax.Array]:
        patches, y = jax.vmap(self._as_product)(*(read(env, v) for v in self.eqn.invars))
        return [jnp.moveaxis(patches, 2, 1), y]

    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        patch, y = parts
        dtype = accumulation_dtype(aval(self.out).dtype)
        g = product(patch, y, (((), ()), ((1,), (0,))), dtype)
        return self._from_product(g)

    def _patches(self, x: jax.Array, sizes: Sequence[int]) -> jax.Array:
        """The patches X [p, i, k..., n], from x [i, spatial..., n].

        `sizes` says how many k there are along each spatial axis.
        """
        params = self.eqn.params
        strides, dilations = params["window_strides"], params["rhs_dilation"]
        holes = [d - 1 for d in params["lhs_dilation"]]
        edges = [(lo, hi, hole) for (lo, hi), hole in zip(params["padding"], holes, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
        # The slices are taken along one axis after the other, the last axis first, which puts the
        # positions p in order. So there are as many slices as the kernel's height and width together,
        # and not their product. Every slice has to be compiled.
        for axis in reversed(range(len(sizes))):
            length, at = dilations[axis] * (sizes[axis] - 1) + 1, axis - len(sizes) - 1
            starts = [strides[axis] * p for p in range(self.positions[axis])]
            x = jnp.stack([lax.slice_in_dim(x, a, a + length, dilations[axis], at) for a in starts])
        return x.reshape(-1, *x.shape[len(sizes) :])

    def sum(self, env: Env, w: Weights) -> jax.Array:
        # JAX 0.7 cannot differentiate a convolution whose result is wider than its operands.
        dtype = accumulation_dtype(aval(self.out).dtype)
        x, y = (read(env, v).astype(dtype) for v in self.eqn.invars)
        if not isinstance(w, jax.Array):
            return weigh(self._convolution(x, y), w)
        return self._convolution(*weigh_factors(x, y, w))

    def _convolution(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The sum over examples as one convolution, from factors [B, ...].

        The convolution is in the layout that XLA prefers. In a loop on the CPU it would be 10 times
        slower in any other layout, since XLA changes the layout of convolutions only outside of loops.
        """
        params = self.eqn.params
        n, i, *x_spatial = (a + 1 for a in params["dimension_numbers"].lhs_spec)
        o, j, *y_spatial = (a + 1 for a in params["dimension_numbers"].rhs_spec)
        x, y = x.transpose(n, *x_spatial, 0, i), y.transpose(*y_spatial, 0, j, o)
        spatial = "".join(str(a) for a in range(len(x_spatial)))
        g = lax.conv_general_dilated(
            x.reshape(*x.shape[:-2], -1),
            y.reshape(*y.shape[:-3], -1, y.shape[-1]),
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
            batch_group_count=params["batch_group_count"],
            precision=params["precision"],
        )
        return self._in_layout(g)

    def _in_layout(self, g: jax.Array) -> jax.Array:
        """`g` [n, p..., o] with its axes in the order of the equation's result."""
        n, o, *spatial = self.eqn.params["dimension_numbers"].out_spec
        return g.transpose(np.argsort([n, *spatial, o]))
