"""What every kind of term has."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence

import jax

from pergrad._compat import JaxprEqn, Var, aval
from pergrad._ir import Env, Weights, evaluate


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
    def is_value(self) -> bool:
        """Whether the backbone makes the term itself, so that nothing is left to be formed."""
        return False

    @property
    def is_lookup(self) -> bool:
        """Whether it is zero outside of the rows that an example looked up."""
        return False

    @property
    def convolves(self) -> bool:
        """Whether its sum over all examples is a convolution."""
        return False

    @property
    def why_formed(self) -> str | None:
        """Why it has to be formed for every example, if no rule takes it apart."""
        return None

    @property
    def why_no_derivative(self) -> str | None:
        """Why its sum over examples cannot be differentiated by their weights; None if it can."""
        return None

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
