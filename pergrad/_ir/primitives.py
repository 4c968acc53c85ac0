"""What a primitive is, for those who follow values through equations."""

from __future__ import annotations

from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import Primitive

ADDITIONS: frozenset[Primitive] = frozenset({p.add_p, p.add_jaxvals_p})


# Each result depends on the operand in the same place, and on no other.
ONE_TO_ONE: frozenset[Primitive] = frozenset({_compat.optimization_barrier_p})
