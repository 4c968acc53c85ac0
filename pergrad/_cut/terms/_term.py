"""What all kinds of terms have in common."""

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
    """A sum over the positions of one example, at which the gradient program is cut.

    `eqn` is the equation that takes the sum (None if the backbone makes the sum) and `out` its result.
    `factors` are the variables that the sum is made of, as far as they differ from example to example.
    """

    eqn: JaxprEqn | None
    out: Var
    factors: tuple[Var, ...]

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """The name that the plan has for this kind of term."""

    @property
    def size(self) -> int:
        """How many numbers one example's term has."""
        return math.prod(aval(self.out).shape)

    @property
    def contributions(self) -> int:
        """How many contributions the term of one example adds up; 1 for an outer product."""
        return 1

    @property
    def is_value(self) -> bool:
        """Whether the backbone makes the term itself, so that nothing is left to be formed."""
        return False

    @property
    def is_lookup(self) -> bool:
        """Whether the term is zero outside of the rows that an example looked up."""
        return False

    @property
    def convolves(self) -> bool:
        """Whether the sum of the term over all examples is a convolution."""
        return False

    @property
    def why_formed(self) -> str | None:
        """Why the term has to be formed for every example, if no rule takes it apart; else None."""
        return None

    @property
    def why_no_derivative(self) -> str | None:
        """Why the sum over examples cannot be differentiated by their weights; None if it can."""
        return None

    @property
    def why_no_positions(self) -> str | None:
        """Why the contributions are not in the order of the example's positions; None if they are."""
        return None

    @property
    def scratch(self) -> int:
        """How many bytes it takes to form one example's term, beside the term itself."""
        return 0

    def form(self, env: Env) -> None:
        """Adds the value of one example's term to `env`, which has the values of the factors."""
        if self.eqn is not None:
            evaluate([self.eqn], env)

    @abc.abstractmethod
    def sum(self, env: Env, w: Weights) -> jax.Array:
        """The weighted sum of the term over examples, in float32 at least.

        In `env` the factors are arrays [B, ...].
        """

    @abc.abstractmethod
    def split(self, env: Env) -> list[jax.Array]:
        """The arrays [B, contributions, ...] that each single contribution is made of.

        In `env` the factors are arrays [B, ...].
        """

    @abc.abstractmethod
    def contribution(self, parts: Sequence[jax.Array]) -> jax.Array:
        """One contribution, shaped like the term, in float32 at least.

        `parts` are the arrays of `split`, for one example and one contribution.
        """
