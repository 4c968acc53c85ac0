"""Ragged products that can be mapped over examples which share their matrices. JAX cannot map its own.

The examples become one more axis of x, in front of the ragged axis, and each has its own group sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap

from pergrad._compat import JaxprEqn
from pergrad._ir import with_example_axis


def with_batching(eqn: JaxprEqn) -> Callable[..., Any]:
    """The equation's ragged product as a function that can be mapped over examples."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]

    def plain(numbers: Any) -> Callable[..., Any]:
        def call(x: Any, weights: Any, sizes: Any) -> Any:
            options = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
            return lax.ragged_dot_general(x, weights, sizes, numbers, **options)

        return call

    def mappable(numbers: Any) -> Callable[..., Any]:
        product = custom_vmap(plain(numbers))

        @product.def_vmap
        def rule(size: int, batched: Sequence[bool], x: Any, weights: Any, sizes: Any) -> Any:
            in_front = [
                with_example_axis(a, has_axis, size)
                for a, has_axis in zip((x, weights, sizes), batched, strict=True)
            ]
            if batched[1]:
                return jax.vmap(plain(numbers))(*in_front), True
            (x_contracted, w_contracted), _ = numbers.dot_dimension_numbers
            shifted = lax.RaggedDotDimensionNumbers(
                (([a + 1 for a in x_contracted], w_contracted), ((), ())),
                [a + 1 for a in numbers.lhs_ragged_dimensions],
                numbers.rhs_group_dimensions,
            )
            return mappable(shifted)(in_front[0], weights, in_front[2]), True

        return product

    return mappable(numbers)
