"""A `cond` equation, rebuilt: one branch of several, by an index or by the platform it runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import JaxprEqn

Branches = Sequence[Callable[..., Any]]


def take_branch(eqn: JaxprEqn, index: Any, branches: Branches, operands: Sequence[Any]) -> Any:
    """What the branch number `index` gives, for branches in the place of the equation's own.

    The equation of `lax.platform_dependent` says for which platforms each branch is (None: for all
    others). A branch may be compiled for its own platforms alone, so the equation is rebuilt as such.
    """
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches, *operands)
    named = {name: b for b, own in zip(branches, platforms, strict=True) for name in own or ()}
    default = next((b for b, own in zip(branches, platforms, strict=True) if own is None), None)
    return lax.platform_dependent(*operands, default=default, **named)


def take_by_example(index: Any, branches: Branches, operands: Sequence[Any]) -> Any:
    """As `take_branch`, where several examples run together and the index differs among them.

    All branches run and one of their results is selected, as `vmap` does with a `cond`, but without a
    copy of the weights for every example. A branch that is not taken may give NaN, which is dropped.

    The derivative of that would be NaN: the selection passes zeros back into the branch, and zero times
    an infinite slope is NaN, which then reaches the operands. So the derivative is that of another
    function of the same value, in which a branch that is not taken does not depend on its operands.
    There the weights have a copy for every example, but only if somebody differentiates the statistics.
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
