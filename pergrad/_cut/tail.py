"""What a tail is: the end of the gradient program of one example, from its sums to its gradients.

    factors --(terms: products, scatters, sums)--> --(linear steps)--> gradients

A tail belongs to one parameter, or to several whose gradients share equations (`A` and `B` of a
low-rank `A @ B`). If a tail is evaluated as it stands, it gives one example's gradients. The strategies
reduce it over many examples without holding the gradients of all of them at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pergrad._compat import Atom, JaxprEqn, Var
from pergrad._cut.steps import REPLACING, STEPS
from pergrad._cut.terms import Term
from pergrad._ir import Env, Weights, distinct, evaluate, evaluate_wide, nbytes, read, size, widen


@dataclasses.dataclass(frozen=True)
class Level:
    """A loop around a tail.

    `length` is the number of its rounds. `ways` has, for each parameter of the tail, the way from the
    loop to the gradient: the variable that leaves the loop, the equations that move its entries, and the
    gradient.
    """

    length: int
    ways: dict[int, tuple[Var, tuple[JaxprEqn, ...], Atom]]


@dataclasses.dataclass(frozen=True)
class Tail:
    """The end of a gradient program, from the factors of its terms to the gradients.

    `params` are the indices of its parameters and `grads` are their gradients, in the same order. The
    `terms` come first and the linear `steps` follow, in the order in which they run. `factors` are the
    inputs of the tail that differ from example to example, and `constants` are the inputs that do not.
    If there are no factors, the gradient is the same for every example. `adds` says whether a step adds
    something that is the same for every example. `levels` are the loops that the tail stands in, the
    innermost first. `number` tells the tails of a cut apart. `units` is a cache of the units that the
    file `units` has made of this tail, by what one unit is.
    """

    params: tuple[int, ...]
    grads: tuple[Atom, ...]
    terms: tuple[Term, ...]
    steps: tuple[JaxprEqn, ...]
    factors: tuple[Var, ...]
    constants: tuple[Var, ...]
    adds: bool
    levels: tuple[Level, ...] = ()
    number: int = -1
    units: dict[Any, list[Any]] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the loops that the tail stands in, the outermost first."""
        return tuple(level.length for level in reversed(self.levels))

    def inward(self, param: int, v: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The transpose of `outward`: <outward(x), v> = <x, inward(v)>.

        `shape` is that of a gradient of this tail, or of a device's shard of it if `v` is a shard.
        """
        x = jax.ShapeDtypeStruct((*self.lengths, *shape), v.dtype)
        return jax.linear_transpose(lambda x: self.outward(param, x), x)(v)[0]

    def outward(self, param: int, x: jax.Array) -> jax.Array:
        """An array [*lengths, ...], a gradient of this tail for all rounds, laid out like `param`."""
        dtype = x.dtype
        for depth, level in enumerate(self.levels):
            start, moves, end = level.ways[param]

            def move(x: jax.Array, start=start, moves=moves, end=end) -> Any:
                env = {start: x}
                evaluate_wide(moves, env)
                return read(env, end)

            for _ in self.levels[depth + 1 :]:
                move = jax.vmap(move)
            x = move(x)
        return x.astype(dtype)

    @property
    def looks_up(self) -> bool:
        """Whether the gradients are made of lookups alone."""
        return bool(self.terms) and all(term.is_lookup for term in self.terms)

    def terms_of(self, place: int) -> list[Term]:
        """The terms that the gradient at `place` (in `grads`) is made of."""
        needed = set(distinct([self.grads[place]]))
        for step in reversed(self.steps):
            if needed & set(step.outvars):
                needed |= set(distinct(step.invars))
        return [term for term in self.terms if term.out in needed]

    def steps_that(self, family: str) -> list[JaxprEqn]:
        """The steps of one family: "move", "scale" or "mix"."""
        return [step for step in self.steps if STEPS[step.primitive].family == family]

    @property
    def replaces(self) -> bool:
        """Whether a step replaces some entries by others, or by 0."""
        return any(step.primitive in REPLACING for step in self.steps)

    def operand(self, step: JaxprEqn) -> Var:
        """The operand of a move or a scale that depends on the terms."""
        return next(v for v in distinct(step.invars) if v in self.on_the_way)

    @functools.cached_property
    def on_the_way(self) -> frozenset[Var]:
        """The terms, and the variables that depend on them."""
        return frozenset({v for s in self.steps for v in s.outvars} | {term.out for term in self.terms})

    def number_of(self, step: JaxprEqn, env: Env, dtype: Any) -> jax.Array:
        """What a scaling step multiplies by: one number, or an array with a number for each entry.

        `env` has the values of the constants.
        """
        operand, number = self.operand(step), STEPS[step.primitive].number
        assert number is not None
        others = [read(env, v) for v in step.invars if v is not operand]
        return jnp.asarray(number(jnp.asarray(others[0], dtype) if others else None), dtype)

    def why_not_similar(self) -> str | None:
        """Why the gradient is not a single term, with its entries moved and multiplied by one number.

        None if the gradient is that.
        """
        if len(self.terms) != 1 or len(self.grads) != 1:
            return "not a single term"
        for step in self.steps:
            family = STEPS[step.primitive].family
            if family == "mix":
                return "mixes entries after the sum"
            if family == "move" and size(step.outvars[0]) != size(self.operand(step)):
                return "drops or repeats entries after the sum"
        return self.why_not_one_number()

    def why_not_one_number(self) -> str | None:
        """Why the steps do not multiply all entries by one and the same number; None if they do."""
        numbers = [
            v for step in self.steps_that("scale") for v in step.invars if v is not self.operand(step)
        ]
        return "scales entries one by one" if any(size(v) != 1 for v in numbers) else None

    def similarity(self, env: Env, dtype: Any) -> jax.Array:
        """The one number by which the steps multiply all entries, if `why_not_one_number` is None."""
        numbers = (self.number_of(step, env, dtype).reshape(()) for step in self.steps_that("scale"))
        return math.prod(numbers, start=jnp.ones((), dtype))

    def moved_and_scaled(
        self, env: Env, scaled: Callable[[JaxprEqn, jax.Array], jax.Array]
    ) -> jax.Array:
        """The tail's only gradient, from the value that `env` has for its term. No step may be a mix.

        `scaled` gives the result of a scaling step, from the step and the value of its operand.
        """
        for step in self.steps:
            if STEPS[step.primitive].family == "scale":
                env[step.outvars[0]] = scaled(step, env[self.operand(step)])
            else:
                evaluate_wide([step], env)
        return read(env, self.grads[0])

    @property
    def bytes_to_form(self) -> float:
        """How many temporary bytes it takes to form one example's gradients, beside the gradients.

        These are the scratch memory of the terms and, if a step mixes entries, the terms themselves.
        """
        mixed = [t for t in self.terms if t.eqn is not None] if self.steps_that("mix") else []
        return sum(t.scratch for t in self.terms) + sum(nbytes(t.out) for t in mixed)

    def gradients(self, factors: Sequence[Any], constants: Sequence[Any]) -> list[jax.Array]:
        """One example's gradients, from the values of its factors and of the constants."""
        env = self.env(factors, constants)
        for term in self.terms:
            term.form(env)
        evaluate(self.steps, env)
        return [read(env, g) for g in self.grads]

    def env(self, factors: Sequence[Any], constants: Sequence[Any]) -> Env:
        """The values that the tail starts from."""
        inputs = zip((*self.factors, *self.constants), (*factors, *constants), strict=True)
        return dict(inputs)

    def summed_gradients(
        self, factors: Sequence[Any], constants: Sequence[Any], w: Weights, total: Any
    ) -> list[jax.Array]:
        """The weighted sum over examples of their gradients, from factors [B, ...].

        The steps commute with sums, up to what they add: steps(x) = A x + c, so that

            sum_i w_i steps(x_i) = A sum_i w_i x_i + c sum_i w_i = steps(sum_i w_i x_i) + (total - 1) c

        with `total` the sum of the weights and c = steps(0). The sums are kept in float32 at least.
        """
        env = self.env(factors, constants)
        return self.from_sums(env, {term.out: term.sum(env, w) for term in self.terms}, total)

    def from_sums(self, env: Env, sums: Env, total: Any) -> list[jax.Array]:
        """As `summed_gradients`, from the weighted sum of each term in `sums`.

        `env` has the values of the constants.
        """
        grads = self._wide_steps(env | sums)
        if not self.adds:
            return grads
        zeros = {v: jnp.zeros(x.shape, x.dtype) for v, x in sums.items()}
        offsets = self._wide_steps(env | zeros)
        return [g + jnp.asarray(total - 1, c.dtype) * c for g, c in zip(grads, offsets, strict=True)]

    def _wide_steps(self, env: Env) -> list[jax.Array]:
        evaluate_wide(self.steps, env)
        return [widen(read(env, g)) for g in self.grads]
