"""The linear steps that a gradient may take after the sum that makes it.

An equation is a step of a tail if it is linear in those of its operands that differ from example to
example, while the others depend on parameters alone. There are three families, by whether an elementwise
`phi` may be applied before the step:

- *move*: every entry of the result is an entry of the operand, so `phi` may come before or after.
- *scale*: every entry is multiplied by a number `c`, so a factorable `phi` may come before, if it is
  applied to the number too: phi(c x) = phi(c) phi(x).
- *mix*: the step is linear, and nothing more is known of it, so `phi` comes after.

All steps commute with sums over the examples. A mix may also add something that is the same for all
examples (the gradient of a regulariser, or the number that a gather reads out of range). Such a step is
linear up to that constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import Atom, JaxprEqn, Literal, Primitive, Var, aval
from pergrad._ir import Is, those_that_are


@dataclasses.dataclass(frozen=True)
class Step:
    """The rule for a primitive that is linear in some of its operands.

    `family` is "move", "scale" or "mix". `operands` are the operands in which the primitive is linear
    (None means all of them): in all of them together, or, if `one_of` is true, in each of them while the
    others are fixed, as a product is. `condition` says whether an equation of the primitive is linear at
    all. `number` gives the number c of a scale, from the operand that does not vary, or from None if
    there is no such operand. `constant` says whether an equation adds something that is none of its
    operands. `selects` are the operands of a mix of which an entry of the result takes in at most one
    entry, unchanged (None if there are no such operands).
    """

    family: str
    operands: slice | None = None
    one_of: bool = False
    condition: Callable[[JaxprEqn], bool] = lambda eqn: True
    number: Callable[[Any], Any] | None = None
    constant: Callable[[JaxprEqn], bool] = lambda eqn: False
    selects: slice | None = None

    def linear_operands(self, eqn: JaxprEqn) -> range:
        """The places of the operands in which `eqn` may be linear."""
        return range(len(eqn.invars))[self.operands or slice(None)]

    def is_linear(self, eqn: JaxprEqn, varying: Collection[int]) -> bool:
        """Whether `eqn` is linear in the operands at the places `varying`, if the rest is fixed."""
        return (
            set(varying) <= set(self.linear_operands(eqn))
            and (len(varying) == 1 or not self.one_of)
            and self.condition(eqn)
        )

    def takes_single_entries(self, eqn: JaxprEqn, operand: int) -> bool:
        """Whether an entry of the result takes in at most one entry of operand number `operand`."""
        selected = range(len(eqn.invars))[self.selects] if self.selects else ()
        return self.family != "mix" or operand in selected


def _between_floats(eqn: JaxprEqn) -> bool:
    """Whether a cast is between floats of 16 bits or more, so that it only rounds.

    A loss casts to 8 bits in order to quantise, and numbers of 8 bits overflow soon.
    """
    dtypes = [aval(v).dtype for v in (*eqn.invars, *eqn.outvars)]
    return all(jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).bits >= 16 for d in dtypes)


def _fills(eqn: JaxprEqn) -> bool:
    """Whether a gather gives a number other than 0 for an index out of range."""
    return eqn.params["mode"] == _Mode.FILL_OR_DROP and eqn.params["fill_value"] != 0


_first = slice(0, 1)


_all = slice(None)


_Mode = lax.GatherScatterMode


STEPS: dict[Primitive, Step] = {
    # Every entry of the result is an entry of the operand.
    p.broadcast_in_dim_p: Step("move", _first),
    p.convert_element_type_p: Step("move", _first, condition=_between_floats),
    p.copy_p: Step("move", _first),
    p.dynamic_slice_p: Step("move", _first),
    _compat.name_p: Step("move", _first),
    _compat.optimization_barrier_p: Step("move", _first, condition=lambda eqn: len(eqn.invars) == 1),
    p.reshape_p: Step("move", _first),
    p.rev_p: Step("move", _first),
    _compat.sharding_constraint_p: Step("move", _first),
    p.slice_p: Step("move", _first),
    p.squeeze_p: Step("move", _first),
    p.transpose_p: Step("move", _first),
    # Every entry of the result is an entry of the operand, multiplied by a number.
    p.div_p: Step("scale", _first, number=lambda c: 1 / c),
    p.mul_p: Step("scale", one_of=True, number=lambda c: c),
    p.neg_p: Step("scale", _first, number=lambda c: -1.0),
    # The result is linear in one operand.
    p.conv_general_dilated_p: Step("mix", one_of=True),
    p.cumsum_p: Step("mix", _first),
    p.dot_general_p: Step("mix", one_of=True),
    p.gather_p: Step("mix", _first, constant=_fills),
    p.reduce_sum_p: Step("mix", _first),
    p.reduce_window_sum_p: Step("mix", _first),
    _compat.split_p: Step("mix", _first, selects=_first),
    # The result is linear in all operands together.
    p.add_p: Step("mix", selects=_all),
    p.add_jaxvals_p: Step("mix", selects=_all),
    p.concatenate_p: Step("mix"),
    p.pad_p: Step("mix", selects=_first),
    p.sub_p: Step("mix"),
    # The result is linear in the operands that hold values, but not in the indices or the predicate.
    p.dynamic_update_slice_p: Step("mix", slice(0, 2)),
    p.scatter_add_p: Step("mix", slice(0, 3, 2)),
    p.scatter_p: Step("mix", slice(0, 3, 2), selects=_first),
    p.select_n_p: Step("mix", slice(1, None), selects=slice(1, None)),
}


REPLACING, STAYING = those_that_are(Is.REPLACING), those_that_are(Is.STAYING)


def is_zero(atom: Atom, made_by: Mapping[Var, JaxprEqn]) -> bool:
    """Whether an operand is known to consist of zeros; `made_by` has the equation of each variable."""
    if isinstance(atom, Literal):
        return bool(np.all(np.asarray(atom.val) == 0))
    eqn = made_by.get(atom)
    laid_out = (p.broadcast_in_dim_p, p.reshape_p)
    return eqn is not None and eqn.primitive in laid_out and is_zero(eqn.invars[0], made_by)


def adds(eqn: JaxprEqn, varying: Collection[int], made_by: Mapping[Var, JaxprEqn]) -> bool:
    """Whether a step that is linear in its operands `varying` adds something else to the result.

    Something that is known to be zeros does not count. `made_by` has the equation of each variable.
    """
    step = STEPS[eqn.primitive]
    added = set() if step.one_of else set(step.linear_operands(eqn)) - set(varying)
    return step.constant(eqn) or not all(is_zero(eqn.invars[i], made_by) for i in added)


def with_transpose(eqn: JaxprEqn) -> JaxprEqn:
    """The same step, in a form that JAX transposes correctly.

    If the mode of a gather or a scatter-add promises that all indices are in range, and one of them is
    not, the gather reads the nearest entry and the scatter-add drops its update. JAX takes each for the
    transpose of the other, which is wrong for such an index. So the mode is replaced by the one that
    says what happens: clip for a gather, drop for a scatter-add.
    """
    said = {p.gather_p: _Mode.CLIP, p.scatter_add_p: _Mode.FILL_OR_DROP}
    if eqn.primitive not in said or eqn.params["mode"] != _Mode.PROMISE_IN_BOUNDS:
        return eqn
    return eqn.replace(params=eqn.params | {"mode": said[eqn.primitive]})
