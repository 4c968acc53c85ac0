"""The linear steps that a gradient may take after the sum that makes it.

An equation is a step of a tail if it is linear in those of its operands that differ from example to
example, while the others depend on parameters alone. Three families, by what an elementwise `phi` may
do to them:

- *move*: every entry of the result is an entry of the operand, so `phi` may come before or after.
- *scale*: every entry is multiplied by a number `c`, so a factorable `phi` may come before, if it is
  applied to the number too: phi(c x) = phi(c) phi(x).
- *mix*: linear, and no more than that, so `phi` comes after.

All of them commute with sums over the examples. A mix may also add something that is the same for all
examples (a regulariser's gradient); then a step is linear up to that constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import Atom, JaxprEqn, Literal, Primitive, Var, aval


@dataclasses.dataclass(frozen=True)
class Step:
    """A primitive that is linear in some of its operands.

    It is linear in all of `operands` together (None: in all it has) or, as a product, in `one_of` them.
    `number` is a scale's c, from the operand that does not vary (None if there is none).
    """

    family: str
    operands: slice | None = None
    one_of: bool = False
    condition: Callable[[JaxprEqn], bool] = lambda eqn: True
    number: Callable[[Any], Any] | None = None

    def linear_operands(self, eqn: JaxprEqn) -> range:
        return range(len(eqn.invars))[self.operands or slice(None)]

    def is_linear(self, eqn: JaxprEqn, varying: Collection[int]) -> bool:
        """Whether `eqn` is linear in its operands `varying`, given all the others."""
        return (
            set(varying) <= set(self.linear_operands(eqn))
            and (len(varying) == 1 or not self.one_of)
            and self.condition(eqn)
        )


def _between_floats(eqn: JaxprEqn) -> bool:
    return all(jnp.issubdtype(aval(v).dtype, jnp.floating) for v in (*eqn.invars, *eqn.outvars))


_first = slice(0, 1)

STEPS: dict[Primitive, Step] = {
    # entries of the operand, elsewhere
    p.broadcast_in_dim_p: Step("move", _first),
    p.convert_element_type_p: Step("move", _first, condition=_between_floats),
    p.copy_p: Step("move", _first),
    p.dynamic_slice_p: Step("move", _first),
    _compat.name_p: Step("move", _first),
    p.reshape_p: Step("move", _first),
    p.rev_p: Step("move", _first),
    p.slice_p: Step("move", _first),
    p.squeeze_p: Step("move", _first),
    p.transpose_p: Step("move", _first),
    # entries of the operand, times a number
    p.div_p: Step("scale", _first, number=lambda c: 1 / c),
    p.mul_p: Step("scale", one_of=True, number=lambda c: c),
    p.neg_p: Step("scale", _first, number=lambda c: -1.0),
    # linear in one operand
    p.conv_general_dilated_p: Step("mix", one_of=True),
    p.cumsum_p: Step("mix", _first),
    p.dot_general_p: Step("mix", one_of=True),
    p.gather_p: Step("mix", _first),
    p.reduce_sum_p: Step("mix", _first),
    p.reduce_window_sum_p: Step("mix", _first),
    # linear in all of them together
    p.add_p: Step("mix"),
    p.add_jaxvals_p: Step("mix"),
    p.concatenate_p: Step("mix"),
    p.pad_p: Step("mix"),
    p.sub_p: Step("mix"),
    # linear in the values, but not in the places or the choice
    p.dynamic_update_slice_p: Step("mix", slice(0, 2)),
    p.scatter_add_p: Step("mix", slice(0, 3, 2)),
    p.scatter_p: Step("mix", slice(0, 3, 2)),
    p.select_n_p: Step("mix", slice(1, None)),
}

ADDITIONS: frozenset[Primitive] = frozenset({p.add_p, p.add_jaxvals_p})

# Each result depends on the operand in the same place, and on no other.
ONE_TO_ONE: frozenset[Primitive] = frozenset({_compat.optimization_barrier_p})


def is_zero(atom: Atom, made_by: Mapping[Var, JaxprEqn]) -> bool:
    """Whether an operand is known to be zeros."""
    if isinstance(atom, Literal):
        return bool(np.all(np.asarray(atom.val) == 0))
    eqn = made_by.get(atom)
    laid_out = (p.broadcast_in_dim_p, p.reshape_p)
    return eqn is not None and eqn.primitive in laid_out and is_zero(eqn.invars[0], made_by)


def adds(eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]) -> bool:
    """Whether a step, linear in its operands `varying`, adds another that is not known to be zeros."""
    step = STEPS[eqn.primitive]
    added = set(step.linear_operands(eqn)) - set(varying)
    return not step.one_of and not all(is_zero(eqn.invars[i], made_by) for i in added)
