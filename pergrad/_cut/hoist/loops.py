"""How the factors of tails leave one loop. The docstring of `hoist` says why they do."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import Atom, JaxprEqn, Var, aval
from pergrad._cut.find import Walk
from pergrad._cut.hoist.leaving import can_leave
from pergrad._cut.tail import Tail
from pergrad._cut.terms import Product, Term
from pergrad._ir import (
    ADDITIONS,
    Env,
    Loop,
    dependents,
    distinct,
    evaluate,
    evaluate_independent,
    is_in,
    read,
    readers_of,
)

# Primitives whose result has the entries of their only operand, each once.
REARRANGING = {p.reshape_p, p.rev_p, p.squeeze_p, p.transpose_p}


def leave_loop(
    loop: Loop,
    leaving: Sequence[int],
    varies: Sequence[bool],
    from_zero: Sequence[bool],
    ins: Sequence[Any],
    *,
    split: bool,
) -> list[Any]:
    """The results of a loop for the operands `ins`, with tails that are evaluated after the loop.

    The results number `leaving` are needed only by tails. As far as such a result is made by tails of
    the loop's body, the loop hands out the factors of these tails, and the result is made of them after
    the loop. With `split` all tails leave the loop, otherwise those whose factors are smaller than their
    gradients. `varies` says which operands of the loop differ from example to example, and `from_zero`
    which arrays of the carry start at zero.
    """
    return _Leaver(loop, leaving, varies, split).run(ins, from_zero)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """What one round contributes to the loop's result number `result`.

    `value` is a variable of the body: it is added to the carry in every round, or it is the output.
    """

    result: int
    value: Atom


class _Leaver:
    """A loop, and the pieces of its results that are made outside of it.

    The walk through the body takes all that changes from round to round for varying. So the constants of
    a tail do not change from round to round.
    """

    def __init__(self, loop: Loop, leaving: Sequence[int], varies: Sequence[bool], split: bool) -> None:
        self.loop, self.body = loop, loop.body.jaxpr
        self.results = range(len(self.body.outvars))
        consts, carry, xs = loop.operands(self.body.invars)
        self.xs = set(xs)
        self.moving = dependents(self.body.eqns, [*carry, *xs])
        self.rearranged = _rearranged(self.body.eqns, xs)

        self.pieces: list[_Piece] = []
        in_sums: set[Var] = set()
        for k in leaving:
            if k >= loop.num_carry:
                self.pieces.append(_Piece(k, self.body.outvars[k]))
            elif (found := _as_sum(loop, k)) is not None:
                addends, additions = found
                self.pieces += [_Piece(k, v) for v in addends]
                in_sums |= {v for eqn in additions for v in eqn.outvars}

        taken_apart = {piece.result for piece in self.pieces}
        walk = Walk(
            [eqn for eqn in self.body.eqns if in_sums.isdisjoint(eqn.outvars)],
            [*itertools.compress(consts, varies), *carry, *xs],
            [piece.value for piece in self.pieces],
            [v for k, v in enumerate(self.body.outvars) if k not in taken_apart],
            split=split,
        )
        places = range(len(self.pieces))
        self.tails = [tail for tail in walk.tails(places, places) if can_leave(tail, split)]
        self.gone = {place for tail in self.tails for place in tail.params}

    def _pieces_of(self, result: int, *, gone: bool) -> list[int]:
        """The places of the pieces of a result: those that are made outside (`gone`), or the others."""
        places = [i for i, piece in enumerate(self.pieces) if piece.result == result]
        return [i for i in places if (i in self.gone) == gone]

    def _is_made_outside(self, result: int) -> bool:
        """Whether all pieces of a result are made outside, so that the loop does not return it."""
        return bool(self._pieces_of(result, gone=True)) and not self._pieces_of(result, gone=False)

    def run(self, ins: Sequence[Any], from_zero: Sequence[bool]) -> list[Any]:
        """The results of the loop; the arguments are those of `leave_loop`."""
        loop = self.loop
        consts, init, xs = loop.operands(ins)
        kept = [k for k in self.results if not self._is_made_outside(k)]
        kept_carry = [k for k in kept if k < loop.num_carry]
        factors = dict.fromkeys(v for tail in self.tails for v in tail.factors)
        inputs = [v for v in factors if v in self.rearranged]
        handed_out = [v for v in factors if v in self.moving - self.xs - self.rearranged.keys()]

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], Any]:
            before = dict(zip(kept_carry, carry, strict=True))
            start = [before.get(k, jnp.zeros_like(init[k])) for k in range(loop.num_carry)]
            env = loop.env(consts, start, x)
            evaluate(self.body.eqns, env)
            after = [self._after(k, env, before) for k in kept]
            last = len(kept_carry)
            return after[:last], (after[last:], [env[v] for v in handed_out])

        ends, (outputs, stacked) = loop.run(body, [init[k] for k in kept_carry], xs)

        # Variables that do not change from round to round are computed once, outside of the loop.
        env = loop.env(consts, init, xs)
        evaluate_independent(self.body.eqns, env, self.moving)
        env |= dict(zip(handed_out, stacked, strict=True))
        env |= {v: self._rearrange(v, env) for v in inputs}
        with _compat.at_line_of(loop.eqn):
            made = {place: g for tail in self.tails for place, g in self._make(tail, env)}
            out: dict[int, Any] = dict(zip(kept, [*ends, *outputs], strict=True))
            for k in self.results:
                parts = [made[place] for place in self._pieces_of(k, gone=True)]
                if k in out:
                    parts.append(out[k])
                elif k < loop.num_carry and not from_zero[k]:
                    parts.append(init[k])
                out[k] = sum(parts[1:], parts[0])
        return [out[k] for k in self.results]

    def _rearrange(self, v: Var, env: Env) -> jax.Array:
        """A loop input in all rounds, [length, ...], rearranged as the body does to make `v` of it."""
        if v in self.xs:
            return env[v]
        eqn = self.rearranged[v]
        (operand,) = distinct(eqn.invars)
        return jax.vmap(lambda x: _compat.bind(eqn, [x])[0])(self._rearrange(operand, env))

    def _after(self, result: int, env: Env, before: dict[int, Any]) -> Any:
        """A result of one round, without the pieces that are made outside of the loop.

        `before` has the carry before this round.
        """
        if not self._pieces_of(result, gone=True):
            return read(env, self.body.outvars[result])
        rest = [read(env, self.pieces[i].value) for i in self._pieces_of(result, gone=False)]
        return sum(rest, before[result])

    def _make(self, tail: Tail, env: Env) -> list[tuple[int, jax.Array]]:
        """The pieces that a tail makes for the whole loop, each with its place in `pieces`.

        In `env` the variables that change from round to round are arrays [length, ...].
        """
        is_sum = [self.pieces[i].result < self.loop.num_carry for i in tail.params]
        sums = self._sum(tail, env) if any(is_sum) else []
        stack = self._stack(tail, env) if not all(is_sum) else []
        return [
            (i, (sums if is_sum[n] else stack)[n].astype(aval(self.pieces[i].value).dtype))
            for n, i in enumerate(tail.params)
        ]

    def _sum(self, tail: Tail, env: Env) -> list[jax.Array]:
        """The sums over all rounds of a tail's gradients."""
        sums = {term.out: self._sum_of_term(term, env) for term in tail.terms}
        return tail.from_sums(env, sums, self.loop.length)

    def _sum_of_term(self, term: Term, env: Env) -> jax.Array:
        """The sum of a term over all rounds. The factors `still` do not change from round to round."""
        length = self.loop.length
        still = [v for v in term.factors if v not in self.moving]
        if not still:
            return term.sum(env, 1)
        if len(still) == len(term.factors):  # the same term is added in every round
            return term.sum(env | {v: env[v][None] for v in still}, length)
        if isinstance(term, Product):  # sum_l x^T d_l = x^T sum_l d_l
            once = {v: env[v] if v in still else jnp.sum(env[v], axis=0) for v in term.factors}
            return term.sum(env | {v: x[None] for v, x in once.items()}, 1)
        return term.sum(env | {v: jnp.broadcast_to(env[v], (length, *env[v].shape)) for v in still}, 1)

    def _stack(self, tail: Tail, env: Env) -> list[jax.Array]:
        """A tail's gradients in all rounds, each [length, ...]."""
        axes = [0 if v in self.moving else None for v in tail.factors]
        factors, constants = ([env[v] for v in vs] for vs in (tail.factors, tail.constants))
        if axes == [None] * len(axes):  # the gradients are the same in every round
            same = tail.gradients(factors, constants)
            return [jnp.broadcast_to(g, (self.loop.length, *g.shape)) for g in same]
        return jax.vmap(lambda *factors: tail.gradients(factors, constants), in_axes=axes)(*factors)


def _rearranged(eqns: Sequence[JaxprEqn], xs: Sequence[Var]) -> dict[Var, JaxprEqn]:
    """Loop inputs with the same entries in another shape or order, and the equations that make them.

    Such a factor is made outside of the loop. If the loop handed it out, it would be in memory twice.
    """
    found: dict[Var, JaxprEqn] = {}
    for eqn in eqns:
        if eqn.primitive in REARRANGING and is_in(eqn.invars[0], {*xs, *found}):
            found[eqn.outvars[0]] = eqn
    return found


def _as_sum(loop: Loop, carry: int) -> tuple[list[Atom], list[JaxprEqn]] | None:
    """What is added to array number `carry` of the carry in one round, and the equations that add it.

    None if the body does anything else with it: it must be read once, by an addition, whose result must
    be read once, by an addition, and so on, until a result is the carry after the round.
    """
    body = loop.body.jaxpr
    readers = readers_of(body.eqns)
    v, end = loop.operands(body.invars)[1][carry], body.outvars[carry]
    addends: list[Atom] = []
    additions: list[JaxprEqn] = []
    while v is not end:
        if len(readers.get(v, ())) != 1 or v in body.outvars:
            return None
        (eqn,) = readers[v]
        if eqn.primitive not in ADDITIONS:
            return None
        addends.append(eqn.invars[1] if eqn.invars[0] is v else eqn.invars[0])
        additions.append(eqn)
        v = eqn.outvars[0]
    used_again = readers.get(v) or sum(v is out for out in body.outvars) > 1
    return None if used_again or not additions else (addends, additions)
