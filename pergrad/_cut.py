"""Step 2: the gradient program is cut into a backbone and tails.

Walking back from the gradients, an equation belongs to a tail if nothing but tails needs its result
and it is either a *term* (a sum over positions of something that varies) or a linear *step*. A term
ends the walk. A step need not be taken: what lies before it may be larger than its result (the
positions before their sum), and then the cut is made after it. So each variable on the way is given a
size to carry, per example,

    carry(term) = 0                   its factors are in the backbone anyway
    carry(step) = min(size of its result, sum of carry over its operands that vary)
    carry(any other) = size

and the cut falls where the minimum is taken. What no rule knows is such an "other": it stays in the
backbone, formed for every example, and the answer is the same.

This file names no primitive: what is a term is said in `terms`, what is a step in `_steps`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from pergrad._compat import Atom, JaxprEqn, Literal, Var
from pergrad._cost import size
from pergrad._steps import ONE_TO_ONE, STEPS
from pergrad._tail import Tail
from pergrad._trace import Program
from pergrad.terms import TERMS, Term, Total, is_zero


@dataclasses.dataclass(frozen=True)
class Cut:
    """The program in two parts: the `backbone` runs for all examples, then every tail is reduced.

    `varies` has the variables that depend on the example.
    """

    program: Program
    backbone: tuple[JaxprEqn, ...]
    tails: tuple[Tail, ...]
    varies: frozenset[Var]


def make_cut(program: Program) -> Cut:
    """Cuts the gradient program of one example."""
    walk = _Walk(program)
    groups = _connected([walk.collect(grad) for grad in program.grads])
    tails = tuple(_make_tail(program, walk, params, eqns) for params, eqns in groups)
    needed = {v for t in tails for v in (*t.factors, *t.constants)}
    needed |= _variables([program.value, *program.aux])
    backbone = _needed_equations(program.jaxpr.eqns, needed)
    return Cut(program, backbone, tails, frozenset(walk.varies))


class _Walk:
    """One pass forward to see what varies, one back to find what only tails need, one forward for
    the sizes."""

    def __init__(self, program: Program) -> None:
        eqns = program.jaxpr.eqns
        self.made_by: dict[Var, JaxprEqn] = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.varies = _varying(eqns, program.example)
        self.order = {id(eqn): i for i, eqn in enumerate(eqns)}
        self.terms: dict[Var, Term] = {}
        self.steps: set[int] = set()
        self._find_tails(program)
        self._choose_cut(eqns)

    def varying_operands(self, eqn: JaxprEqn) -> list[int]:
        return [i for i, v in enumerate(eqn.invars) if _is_in(v, self.varies)]

    def _find_tails(self, program: Program) -> None:
        wanted_by_tails = _variables(program.grads)
        wanted_by_backbone = _variables([program.value, *program.aux])
        for eqn in reversed(program.jaxpr.eqns):
            outs = [v for v in eqn.outvars if v in self.varies]
            in_tail = any(v in wanted_by_tails for v in outs) and not any(
                v in wanted_by_backbone for v in outs
            )
            varying = self.varying_operands(eqn)
            if in_tail and self._is_term(eqn, varying):
                wanted_by_backbone |= _variables(eqn.invars)
            elif in_tail and self._is_step(eqn, varying):
                self.steps.add(id(eqn))
                wanted_by_tails |= _variables(eqn.invars)
            else:
                wanted_by_backbone |= _variables(eqn.invars)

    def _is_term(self, eqn: JaxprEqn, varying: Collection[int]) -> bool:
        match = TERMS.get(eqn.primitive)
        term = match(eqn, varying, self.made_by) if match else None
        if term is not None:
            self.terms[term.out] = term
        return term is not None

    def _is_step(self, eqn: JaxprEqn, varying: Collection[int]) -> bool:
        step = STEPS.get(eqn.primitive)
        return step is not None and step.is_linear(eqn, varying)

    def adds(self, eqn: JaxprEqn) -> bool:
        """Whether a step adds something that does not vary, other than zeros."""
        step = STEPS[eqn.primitive]
        added = set(step.linear_operands(eqn)) - set(self.varying_operands(eqn))
        return not step.one_of and not all(is_zero(eqn.invars[i], self.made_by) for i in added)

    def _choose_cut(self, eqns: Iterable[JaxprEqn]) -> None:
        carry: dict[Var, int] = dict.fromkeys(self.terms, 0)
        for eqn in eqns:
            if id(eqn) not in self.steps:
                continue
            result = sum(size(v) for v in eqn.outvars)
            before = _variables(eqn.invars) & self.varies
            through = sum(carry.get(v, size(v)) for v in before)
            if through >= result:
                self.steps.discard(id(eqn))
            carry.update(dict.fromkeys(eqn.outvars, min(result, through)))

    def collect(self, grad: Atom) -> set[int]:
        """The steps between `grad` and its terms, by their place in the program."""
        found: set[int] = set()
        ahead = [grad]
        while ahead:
            eqn = None if isinstance(v := ahead.pop(), Literal) else self.made_by.get(v)
            if eqn is None or id(eqn) not in self.steps or self.order[id(eqn)] in found:
                continue
            found.add(self.order[id(eqn)])
            ahead.extend(eqn.invars)
        return found

    def term_of(self, v: Var) -> Term:
        return self.terms.get(v) or Total.of(v, self.made_by.get(v))


def _varying(eqns: Iterable[JaxprEqn], example: Iterable[Var]) -> set[Var]:
    """The variables that depend on the example."""
    varies = set(example)
    for eqn in eqns:
        if eqn.primitive in ONE_TO_ONE:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            varies |= {out for v, out in pairs if _is_in(v, varies)}
        elif _variables(eqn.invars) & varies:
            varies |= set(eqn.outvars)
    return varies


def _connected(steps: list[set[int]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Groups the parameters whose gradients share steps: (parameters, their steps in order)."""
    groups: list[tuple[list[int], set[int]]] = []
    for param, own in enumerate(steps):
        shared = [g for g in groups if g[1] & own]
        groups = [g for g in groups if not g[1] & own]
        params = [p for g in shared for p in g[0]]
        groups.append(([*params, param], own.union(*(g[1] for g in shared))))
    return [(tuple(params), sorted(own)) for params, own in groups]


def _make_tail(program: Program, walk: _Walk, params: tuple[int, ...], places: list[int]) -> Tail:
    steps = tuple(program.jaxpr.eqns[i] for i in places)
    grads = tuple(program.grads[i] for i in params)
    made_here = {v for eqn in steps for v in eqn.outvars}
    read_here = dict.fromkeys(
        v
        for v in (*(v for eqn in steps for v in eqn.invars), *grads)
        if not isinstance(v, Literal) and v not in made_here
    )
    terms = tuple(walk.term_of(v) for v in read_here if v in walk.varies)
    factors = dict.fromkeys(v for term in terms for v in term.factors)
    of_terms = [v for t in terms if t.eqn for v in t.eqn.invars if not isinstance(v, Literal)]
    constants = dict.fromkeys(v for v in (*read_here, *of_terms) if v not in walk.varies)
    adds = any(walk.adds(eqn) for eqn in steps)
    return Tail(params, grads, terms, steps, tuple(factors), tuple(constants), adds)


def _needed_equations(eqns: Iterable[JaxprEqn], needed: set[Var]) -> tuple[JaxprEqn, ...]:
    needed = set(needed)
    kept = []
    for eqn in reversed(list(eqns)):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            needed |= _variables(eqn.invars)
            kept.append(eqn)
    return tuple(reversed(kept))


def _variables(atoms: Iterable[Atom]) -> set[Var]:
    return {v for v in atoms if not isinstance(v, Literal)}


def _is_in(atom: Atom, variables: Collection[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in variables
