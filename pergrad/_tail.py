"""What a tail is: the end of the gradient program of one example, from its sums to its gradients.

    factors --(terms: products, scatters, sums)--> --(linear steps)--> gradients

A tail belongs to one parameter, or to several whose gradients share equations (`A` and `B` of a
low-rank `A @ B`). Evaluated as it stands it gives one example's gradients; the strategies reduce it
over many examples without doing that for all of them at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pergrad._compat import Atom, JaxprEqn, Var
from pergrad._eval import Env, evaluate, evaluate_wide, read, widen
from pergrad.terms import Term


@dataclasses.dataclass(frozen=True)
class Tail:
    """One end of the program.

    `params` are the indices of its parameters and `grads` their gradients. `factors` are the inputs
    that differ from example to example, `constants` those that do not. Without factors the gradient
    is the same for every example.
    """

    params: tuple[int, ...]
    grads: tuple[Atom, ...]
    terms: tuple[Term, ...]
    steps: tuple[JaxprEqn, ...]
    factors: tuple[Var, ...]
    constants: tuple[Var, ...]

    def gradients(self, factors: Sequence[Any], constants: Sequence[Any]) -> list[jax.Array]:
        """One example's gradients, from its factors and the constants."""
        env = self.env(factors, constants)
        for term in self.terms:
            term.form(env)
        evaluate(self.steps, env)
        return [read(env, g) for g in self.grads]

    def env(self, factors: Sequence[Any], constants: Sequence[Any]) -> Env:
        inputs = zip((*self.factors, *self.constants), (*factors, *constants), strict=True)
        return dict(inputs)

    def mean_gradients(self, env: Env, w: jax.Array | None, count: jax.Array) -> list[jax.Array]:
        """The mean gradients, from all examples' factors [B, ...] and the constants.

        Every step commutes with the mean. float32 at least.
        """
        env = {**env, **{term.out: term.mean(env, w, count) for term in self.terms}}
        evaluate_wide(self.steps, env)
        return [widen(read(env, g)) for g in self.grads]
