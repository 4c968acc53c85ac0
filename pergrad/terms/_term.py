"""What every kind of term has."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._eval import Env, evaluate
from pergrad._statistics import Weights


@dataclasses.dataclass(frozen=True)
class Term(abc.ABC):
    """A sum over the positions of one example: where the gradient program is cut.

    `out` is the sum, `factors` is what it is made of, as far as that differs from example to example.
    """

    eqn: JaxprEqn | None
    out: Var
    factors: tuple[Var, ...]

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """What the plan calls it."""

    @property
    def size(self) -> int:
        """How many numbers one example's term has."""
        return math.prod(aval(self.out).shape)

    @property
    def contributions(self) -> int:
        """How many contributions are added up in one example; 1 for an outer product."""
        return 1

    @property
    def scratch(self) -> int:
        """Bytes that forming one example's term takes beside the term itself."""
        return 0

    def form(self, env: Env) -> None:
        """Adds one example's term to `env`, which holds the factors."""
        if self.eqn is not None:
            evaluate([self.eqn], env)

    @abc.abstractmethod
    def sum(self, env: Env, w: Weights) -> jax.Array:
        """The term's weighted sum over examples, from factors [B, ...]; float32 at least."""

    @abc.abstractmethod
    def split(self, env: Env) -> list[jax.Array]:
        """What each single contribution is made of, [B, contributions, ...], from factors [B, ...]."""

    @abc.abstractmethod
    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        """One contribution, shaped like the term, from its parts; float32 at least."""


def product(x: Any, d: Any, numbers: Any, dtype: Any, precision: Any = None) -> jax.Array:
    """A `dot_general` whose result has this dtype (None: that of its operands), maybe a wider one.

    Accelerators sum half-precision products up in float32, if asked to. XLA's CPU backend widens the
    operands, but not for all layouts: others it compiles and then does not run ("Unsupported element
    type for DotThunk: BF16 x BF16 = F32"). There the operands are widened here, which takes as long.

    The choice is made for the device that the plan is for, not by `lax.platform_dependent`: the products
    of a loop's steps and of single tokens stand in programs that are cut again, and there a conditional
    would hide them.
    """
    is_wider = dtype is not None and dtype != jnp.promote_types(x.dtype, d.dtype)
    if is_wider and jax.default_backend() == "cpu":
        x, d = x.astype(dtype), d.astype(dtype)
    return lax.dot_general(x, d, numbers, precision=precision, preferred_element_type=dtype)
