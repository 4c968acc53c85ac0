"""What one unit is: an example, a group of examples, or a part of a sum over positions.

The strategies know only examples, each with its own gradient. So for other units a tail becomes another
tail, whose examples are these units.

Groups of k examples: with w_j a member's share of its group, the gradient of the group is a weighted sum
over k examples,

    sum_j w_j g_j,

which every tail can compute. This computation is a program of its own, and it is cut like any other. Its
products have the members as one more axis of positions.

Tokens: a gradient g that adds up M contributions in all has M units u_n, whose mean is g. A contribution
c_n to one of the terms goes through the tail's steps, which are x -> A x + b, with the other terms left
out:

    u_n = A (M c_n) + b,      sum_n u_n / M = A sum_n c_n + b = g.

The contributions to each term are a kind of units of their own, and a statistic takes in one kind after
the other.

Positions: if all terms of a gradient add up the same number T of contributions, one for each position,
the T units are made of the contributions c_tn of all terms at one position together:

    u_t = A (T sum_n c_tn) + b,      sum_t u_t / T = g.

Formed gradients: these units are the examples again, but their gradients take the place of their
factors. If a gradient is needed several times, it is formed once in this way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pergrad._compat import ClosedJaxpr, JaxprEqn, Var, aval, drop_dead_code
from pergrad._cut.examples import Examples
from pergrad._cut.find import Walk
from pergrad._cut.steps import STEPS
from pergrad._cut.tail import Tail
from pergrad._cut.terms import Term, Total
from pergrad._ir import (
    ADDITIONS,
    Env,
    Weights,
    backend,
    counts,
    distinct,
    evaluate,
    evaluate_wide,
    is_in,
    needed_equations,
    read,
    starting_env,
    weigh,
    widen,
)
from pergrad._statistics import Unit
from pergrad._trace import inlined


@dataclasses.dataclass(frozen=True, eq=False)
class Units:
    """One kind of units: the tail whose examples they are, and how many of them an example has.

    `per_example` is less than 1 for groups of examples. `depend_on_weights` says whether the factors of
    the units depend on the weights of the examples.
    """

    tail: Tail
    per_example: float
    depend_on_weights: ClassVar[bool] = False

    @property
    def operations_of_making(self) -> float:
        """How many floating-point operations it takes to make the units of one example."""
        return 0

    @property
    def bytes_of_making(self) -> float:
        """How many temporary bytes it takes to make the units of one example, beside the units."""
        return 0

    def of(self, examples: Examples) -> Examples:
        """The units of these examples, in the form of examples for the tail of the units."""
        return examples


def units_of(tail: Tail, per: Unit) -> list[Units]:
    """The kinds of units that a tail has for `per`; a statistic takes in all of them.

    They are made once for each tail and kept there.
    """
    if per not in tail.units:
        tail.units[per] = _make_units(tail, per)
    return tail.units[per]


def _make_units(tail: Tail, per: Unit) -> list[Units]:
    if per == "example" or not tail.terms:
        return [Units(tail, 1 / per if isinstance(per, int) else 1)]
    places = range(len(tail.grads))
    if per == "position":
        # A parameter with sums over different positions has no such units, and nobody asks for them.
        return [_positions(tail, place) for place in places if len(_numbers(tail, place)) == 1]
    if per == "token":
        return [_contributions(tail, place, term) for place in places for term in tail.terms_of(place)]
    return _groups(tail, int(per))


def units_per_example(tail: Tail, place: int, per: Unit) -> float:
    """How many units, of all kinds together, an example has in the gradient at `place` of the tail."""
    own = [units for units in units_of(tail, per) if tail.params[place] in units.tail.params]
    return sum(units.per_example for units in own) or 1


def contributions(tail: Tail, place: int) -> int:
    """M: how many contributions the gradient at `place` of the tail adds up in one example."""
    return sum(term.contributions for term in tail.terms_of(place)) or 1


def positions_of(tail: Tail, place: int) -> int:
    """T: how many positions the gradient at `place` of the tail is a sum over.

    All its terms must have the same number of contributions.
    """
    return tail.terms_of(place)[0].contributions if tail.terms else 1


def _numbers(tail: Tail, place: int) -> set[int]:
    """The numbers of contributions of the terms of the gradient at `place`."""
    return {term.contributions for term in tail.terms_of(place)}


def formed_gradients(tail: Tail) -> Units:
    """The examples as units whose factors are their gradients.

    These units are made once for each tail and kept there.
    """
    if "formed" not in tail.units:
        variables = distinct(tail.grads)
        terms = tuple(Total.of(v, None, "formed already") for v in variables)
        formed = dataclasses.replace(
            tail, terms=terms, steps=(), factors=variables, constants=(), adds=False, units={}
        )
        tail.units["formed"] = [_Formed(formed, 1, tail)]
    return tail.units["formed"][0]


@dataclasses.dataclass(frozen=True, eq=False)
class _Formed(Units):
    """Examples whose gradients have been formed; `whole` is the tail that forms them."""

    whole: Tail

    @property
    def operations_of_making(self) -> float:
        terms = (term.eqn for term in self.whole.terms if term.eqn is not None)
        return counts.operations((*terms, *self.whole.steps))

    @property
    def bytes_of_making(self) -> float:
        return self.whole.bytes_to_form

    def of(self, examples: Examples) -> Examples:
        def factors(own: Sequence[Any]) -> list[jax.Array]:
            gs = self.whole.gradients(own, examples.constants)
            values = {v: g for v, g in zip(self.whole.grads, gs, strict=True) if isinstance(v, Var)}
            return [values[v] for v in self.tail.factors]

        if examples.size > 1 and examples.factors and not backend.backend().batches_products:
            formed = lax.map(factors, examples.factors)
        else:
            formed = jax.vmap(factors, axis_size=examples.size)(examples.factors)
        return dataclasses.replace(examples, factors=formed, constants=[])


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The program of one unit's gradients, after the cut.

    The inputs of `program` are first the arrays that every unit has of its own, then the constants of
    the tail that the units are made from. The equations `backbone` make the factors and constants of
    the units' tail.
    """

    program: ClosedJaxpr
    backbone: tuple[JaxprEqn, ...]

    @staticmethod
    def tails(program: ClosedJaxpr, num_own: int, params: Sequence[int]) -> list[tuple[Tail, _Cut]]:
        """Cuts a program, of whose inputs the first `num_own` differ from unit to unit.

        The program's outputs are the gradients of `params`. Each tail comes with its own backbone.
        """
        jaxpr = program.jaxpr
        walk = Walk(jaxpr.eqns, jaxpr.invars[:num_own], jaxpr.outvars, ())
        cuts = []
        for tail in walk.tails(range(len(params)), params):
            backbone = needed_equations(jaxpr.eqns, (*tail.factors, *tail.constants))
            cuts.append((tail, _Cut(program, backbone)))
        return cuts

    def run(self, tail: Tail, own: Sequence[Any], constants: Sequence[Any]) -> Any:
        """The factors [size, ...] and the constants of the units' tail.

        `own` are the units' own arrays [size, ...] and `constants` those of the tail that the units are
        made from.
        """

        def one(own: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            env = starting_env(self.program, [*own, *constants])
            evaluate(self.backbone, env)
            return [env[v] for v in tail.factors], [env[v] for v in tail.constants]

        return jax.vmap(one, out_axes=(0, None))(own)


@dataclasses.dataclass(frozen=True, eq=False)
class _Groups(Units):
    """Groups of `members` examples each; `cut` is the program of one group's gradients."""

    cut: _Cut
    members: int
    depend_on_weights = True

    def of(self, examples: Examples) -> Examples:
        k, size = self.members, examples.size // self.members
        w = examples.weights
        if isinstance(w, jax.Array):
            w = w.reshape(size, k)
            weights: Weights = jnp.sum(w, axis=1)
            shares = w / jnp.where(weights > 0, weights, 1)[:, None]
        else:
            weights, shares = w * k, jnp.full((size, k), 1 / k)
        factors = [x.reshape(size, k, *x.shape[1:]) for x in examples.factors]
        factors, constants = self.cut.run(self.tail, [shares, *factors], examples.constants)
        return Examples(size, weights, factors, constants, devices=examples.devices)


def _groups(tail: Tail, k: int) -> list[Units]:
    num_factors = len(tail.factors)

    def gradients(shares: jax.Array, *inputs: Any) -> list[jax.Array]:
        return tail.summed_gradients(inputs[:num_factors], inputs[num_factors:], shares, 1)

    shares = jax.ShapeDtypeStruct((k,), jnp.result_type(float))
    factors = [jax.ShapeDtypeStruct((k, *aval(v).shape), aval(v).dtype) for v in tail.factors]
    program = inlined(gradients, shares, *factors, *_shapes(tail.constants))
    cuts = _Cut.tails(program, 1 + num_factors, tail.params)
    return [_Groups(unit, 1 / k, cut, k) for unit, cut in cuts]


@dataclasses.dataclass(frozen=True, eq=False)
class _Contributions(Units):
    """Contributions to `terms` of the tail `whole`, which have the same number of contributions each.

    A unit has one contribution to each of these terms. `cut` is the program of one unit's gradient, and
    `total` is the number of units, of all kinds, that a gradient is the mean of.
    """

    cut: _Cut
    whole: Tail
    terms: Sequence[Term]
    total: int
    depend_on_weights = True

    def of(self, examples: Examples) -> Examples:
        n, w = self.terms[0].contributions, examples.weights
        factors = examples.factors
        if isinstance(w, jax.Array):  # an example of weight 0 may be NaN, and convolutions spread NaN
            factors = [weigh(x, jnp.not_equal(w, 0)) for x in factors]
            w = jnp.repeat(w, n)
        env = self.whole.env(factors, examples.constants)
        parts = [x for term in self.terms for x in term.split(env)]
        parts = [x.reshape(examples.size * n, *x.shape[2:]) for x in parts]
        factors, constants = self.cut.run(self.tail, parts, examples.constants)
        size, devices = examples.size * n, examples.devices
        return Examples(size, w / (self.total or 1), factors, constants, devices=devices)


def _contributions(tail: Tail, place: int, term: Term) -> Units:
    """The contributions to one term, as units of the gradient at `place`."""
    return _made_of(tail, place, [term], contributions(tail, place))


def _positions(tail: Tail, place: int) -> Units:
    """The positions of the gradient at `place`, as units with a contribution to each of its terms."""
    return _made_of(tail, place, tail.terms_of(place), positions_of(tail, place))


def _made_of(tail: Tail, place: int, terms: Sequence[Term], total: int) -> Units:
    """Units with one contribution to each of these terms. A gradient is the mean of `total` units."""

    def parts(*inputs: Any) -> list[list[jax.Array]]:
        env = tail.env(inputs[: len(tail.factors)], inputs[len(tail.factors) :])
        return [term.split(env) for term in terms]

    batch = [jax.ShapeDtypeStruct((1, *aval(v).shape), aval(v).dtype) for v in tail.factors]
    shapes = jax.eval_shape(parts, *batch, *_shapes(tail.constants))
    own, tree = jax.tree.flatten(shapes)
    own = [jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for x in own]

    def gradients(*inputs: Any) -> list[jax.Array]:
        env = dict(zip(tail.constants, inputs[len(own) :], strict=True))
        for term, its_parts in zip(terms, jax.tree.unflatten(tree, inputs[: len(own)]), strict=True):
            contribution = term.contribution(its_parts)
            env[term.out] = contribution if total == 1 else contribution * total
        return [_steps_of_some(tail, terms, env)[place]]

    program = inlined(gradients, *own, *_shapes(tail.constants))
    program = ClosedJaxpr(drop_dead_code(program.jaxpr), program.consts)
    ((unit, cut),) = _Cut.tails(program, len(own), [tail.params[place]])
    return _Contributions(unit, terms[0].contributions, cut, tail, terms, total)


def _steps_of_some(tail: Tail, terms: Sequence[Term], env: Env) -> list[jax.Array]:
    """The tail's gradients if only these `terms`, whose values are in `env`, are not 0.

    The set `zero` has the variables that are known to be zeros, and these are not added to anything.
    """
    zero: set[Var] = {other.out for other in tail.terms if other not in terms}
    env |= {v: jnp.zeros(aval(v).shape, aval(v).dtype) for v in zero}
    for step in tail.steps:
        others = [v for v in step.invars if not is_in(v, zero)]
        if step.primitive in ADDITIONS and len(others) == 1:
            env[step.outvars[0]] = widen(read(env, others[0]))
            continue
        evaluate_wide([step], env)
        if STEPS[step.primitive].family != "mix" and is_in(tail.operand(step), zero):
            zero |= set(step.outvars)
    return [widen(read(env, g)) for g in tail.grads]


def _shapes(variables: Sequence[Var]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in variables]
