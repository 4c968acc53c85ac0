"""Rebuilding a `cond` equation, which takes one of several branches: by an index or by the platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import JaxprEqn

Branches = Sequence[Callable[..., Any]]


def take_branch(eqn: JaxprEqn, index: Any, branches: Branches, operands: Sequence[Any]) -> Any:
    """The results of the branch number `index`, where `branches` replace the branches of `eqn`.

    The equation that `lax.platform_dependent` makes says which platforms each of its branches is for
    (None means all other platforms). Such a branch must not be compiled for any other platform, so the
    equation is rebuilt with `lax.platform_dependent`.
    """
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches, *operands)
    named = {name: b for b, own in zip(branches, platforms, strict=True) for name in own or ()}
    default = next((b for b, own in zip(branches, platforms, strict=True) if own is None), None)
    return lax.platform_dependent(*operands, default=default, **named)


def take_by_example(index: Any, branches: Branches, operands: Sequence[Any]) -> Any:
    """As `take_branch`, for several examples that run together and may take different branches.

    All branches run and the results of one are selected, as `vmap` does with a `cond`, but without a
    copy of the weights for every example. If a branch that is not taken gives NaN, the NaN is dropped.

    The derivative of this selection would be NaN: the selection passes zeros back into the branch that
    is not taken, zero times an infinite slope is NaN, and the NaN reaches the operands. So another
    function is differentiated, which has the same value, but in which a branch that is not taken does
    not depend on its operands. That function has a copy of the weights for every example. It only runs
    if somebody differentiates the statistics.
    """

    def selected(index: Any, operands_of: Callable[[int], Sequence[Any]]) -> Any:
        each = [branch(*operands_of(number)) for number, branch in enumerate(branches)]
        return jax.tree.map(lambda *xs: lax.select_n(index, *xs), *each)

    @jax.custom_jvp
    def taken(index: Any, operands: Sequence[Any]) -> Any:
        return selected(index, lambda _: operands)

    @taken.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        index, operands = primals

        def masked(*operands: Any) -> Any:
            def of(number: int) -> Sequence[Any]:
                return [jnp.where(index == number, x, lax.stop_gradient(x)) for x in operands]

            return selected(index, of)

        return jax.jvp(masked, operands, tangents[1])

    return taken(index, tuple(operands))
