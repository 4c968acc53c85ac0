"""The walk back from the gradients, which finds the equations of their tails.

An equation belongs to a tail if nothing but tails needs its result and it is either a *term* (a sum over
positions of something that varies) or a linear *step*. A term ends the walk. A step may be left in the
backbone: its operands may be larger than its result (the positions before their sum), and then the tail
begins after it. So each variable on the way has a size that must be carried per example,

    carry(result of a term) = 0       the term's factors are in the backbone anyway
    carry(result of a step) = min(size of the result, sum of carry over its operands that vary)
    carry(any other variable) = its size

and the tail begins where the minimum is taken. If no rule knows an equation, its result is such an
"other" variable: it stays in the backbone, where it is formed for every example, and the answer is the
same.

This file names no primitive: `terms` says what is a term, `steps` what is a step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from pergrad import _compat
from pergrad._compat import Atom, Jaxpr, JaxprEqn, Literal, Var
from pergrad._cut.steps import STEPS, adds, with_transpose
from pergrad._cut.tail import Level, Tail
from pergrad._cut.terms import SPLIT_TERMS, TERMS, Term, Total
from pergrad._ir import (
    ONE_TO_ONE,
    Loop,
    dependents,
    distinct,
    is_in,
    programs,
    readers_of,
    rounds,
    size,
    variables,
)
from pergrad._trace import Program


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is asked of the gradients, as far as the cut depends on it.

    `in_parts` are the places of the gradients that all their statistics take in by parts. `split` says
    whether the single contributions to sums are asked for, and `together` whether several examples run
    at a time.
    """

    in_parts: tuple[int, ...]
    split: bool
    together: bool


@dataclasses.dataclass(frozen=True)
class Opened:
    """A gradient that leaves a loop as an output, and whose entries are only moved after the loop.

    `place` is the place of the gradient among all gradients. `v` is the variable that leaves the loop
    and `result` its place among the loop's results. The equations `moves` make the gradient from `v`.
    """

    place: int
    result: int
    v: Var
    moves: tuple[JaxprEqn, ...]


class Walk:
    """A walk through a program that finds the terms and the steps of its tails.

    A pass forward finds the variables that vary from example to example, a pass backward the equations
    that only tails need, and another pass forward the sizes to carry, which decide where tails begin.

    `inputs` are the inputs that vary from example to example, `grads` are the gradients and `others` the
    other results of the program. The gradients at the places `in_parts` are asked for only by statistics
    that take them in by parts. `split` says whether the single contributions to sums are asked for, and
    `hoisted` whether terms have left the loops already. Equations are named by their place in `eqns`.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        inputs: Iterable[Var],
        grads: Sequence[Atom],
        others: Iterable[Atom],
        in_parts: Collection[int] = (),
        split: bool = False,
        hoisted: bool = True,
    ) -> None:
        self.eqns, self.grads, self.others = eqns, grads, tuple(others)
        self.split, self._split_sums = split, set[int]()
        self.made_by: dict[Var, JaxprEqn] = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.varies = dependents(eqns, inputs)
        self.place_of = {v: place for place, eqn in enumerate(eqns) for v in eqn.outvars}
        self.terms: dict[Var, Term] = {}
        self.steps: set[int] = set()
        self.leaving: dict[int, list[int]] = {}  # the results of each equation that only tails need
        self._find_tails()
        if split:
            self._split_sums = self._sums_of_no_term(hoisted)
            self.terms, self.steps = {}, set()
            self._find_tails()
        self._choose_cut()
        self.opened = self._open_loops(in_parts)

    @staticmethod
    def through(program: Program, wanted: Wanted, hoisted: bool = True) -> Walk:
        """A walk through a whole gradient program."""
        others = [program.value, *program.aux]
        eqns, inputs, grads = program.jaxpr.eqns, program.example, program.grads
        return Walk(eqns, inputs, grads, others, wanted.in_parts, wanted.split, hoisted)

    @staticmethod
    def inside(
        jaxpr: Jaxpr,
        inputs: Iterable[Var],
        leaving: Sequence[int],
        in_parts: Collection[int] = (),
        *,
        split: bool,
        hoisted: bool = True,
    ) -> Walk:
        """A walk through the body of a loop, or a branch. Its results number `leaving` are gradients."""
        grads = [jaxpr.outvars[k] for k in leaving]
        others = [v for k, v in enumerate(jaxpr.outvars) if k not in leaving]
        return Walk(jaxpr.eqns, inputs, grads, others, in_parts, split, hoisted)

    def varying_operands(self, eqn: JaxprEqn) -> list[int]:
        """The places of the operands of an equation that vary from example to example."""
        return [i for i, v in enumerate(eqn.invars) if is_in(v, self.varies)]

    def _find_tails(self) -> None:
        wanted_by_tails, wanted_by_backbone = variables(self.grads), variables(self.others)
        for place in reversed(range(len(self.eqns))):
            eqn = self.eqns[place]
            self.leaving[place] = leaving = [
                i
                for i, v in enumerate(eqn.outvars)
                if v in self.varies and v in wanted_by_tails and v not in wanted_by_backbone
            ]
            in_tail = leaving and not any(v in wanted_by_backbone for v in eqn.outvars)
            operands = self.varying_operands(eqn)
            if in_tail and eqn.primitive in ONE_TO_ONE and len(eqn.invars) > 1:
                # A barrier on several gradients. `hoist` turns it into one barrier for each gradient.
                pairs = zip(eqn.invars, eqn.outvars, strict=True)
                wanted_by_tails |= variables(v for v, out in pairs if out in wanted_by_tails)
            elif in_tail and self._is_term(place, operands):
                wanted_by_backbone |= variables(eqn.invars)
            elif in_tail and self._is_step(eqn, operands):
                self.steps.add(place)
                wanted_by_tails |= variables(eqn.invars)
            else:
                wanted_by_backbone |= variables(eqn.invars)

    def _is_term(self, place: int, operands: Collection[int]) -> bool:
        eqn = self.eqns[place]
        match = (SPLIT_TERMS if place in self._split_sums else TERMS).get(eqn.primitive)
        term = match(eqn, operands, self.made_by) if match else None
        if term is not None:
            self.terms[term.out] = term
        return term is not None

    def _is_step(self, eqn: JaxprEqn, operands: Collection[int]) -> bool:
        step = STEPS.get(eqn.primitive)
        return step is not None and step.is_linear(eqn, operands)

    def _sums_of_no_term(self, hoisted: bool) -> set[int]:
        """The places of the steps that are plain sums of something that is not made by a term.

        If terms have not left the loops yet, the results of a loop or a conditional count as made by a
        term, because there may be one inside.
        """
        made: set[Var] = set(self.terms)
        found: set[int] = set()
        for place, eqn in enumerate(self.eqns):
            if place in self.steps and variables(eqn.invars) & made:
                made |= set(eqn.outvars)
            elif place in self.steps and eqn.primitive in SPLIT_TERMS:
                found.add(place)
            elif not hoisted and programs(eqn):
                made |= {eqn.outvars[k] for k in self.leaving[place]}
        return found

    def _choose_cut(self) -> None:
        carry: dict[Var, int] = dict.fromkeys(self.terms, 0)
        for place, eqn in enumerate(self.eqns):
            if place not in self.steps:
                continue
            result = sum(size(v) for v in eqn.outvars)
            before = variables(eqn.invars) & self.varies
            through = sum(carry.get(v, size(v)) for v in before)
            if through >= result:
                self.steps.discard(place)
            carry.update(dict.fromkeys(eqn.outvars, min(result, through)))

    def _open_loops(self, in_parts: Collection[int]) -> dict[int, list[Opened]]:
        """For the place of each loop, the gradients that leave it as outputs and are only moved then.

        Only the gradients at the places `in_parts` are looked at.
        """
        readers = readers_of(self.eqns)
        results = [v for v in (*self.grads, *self.others) if not isinstance(v, Literal)]
        uses = Counter({v: len(own) for v, own in readers.items()}) + Counter(results)
        opened: dict[int, list[Opened]] = {}
        for place in in_parts:
            v, moves = self.grads[place], []
            while not isinstance(v, Literal) and uses[v] == 1 and v in self.varies:
                eqn = self.made_by.get(v)
                loop = Loop.of(eqn)
                if eqn is None or (loop is None and not self._is_rearrangement(eqn)):
                    break
                if loop is not None:
                    result = eqn.outvars.index(v)
                    if result >= loop.num_carry:
                        found = Opened(place, result, v, tuple(reversed(moves)))
                        opened.setdefault(self.place_of[v], []).append(found)
                    break
                moves.append(eqn)
                v = eqn.invars[0]
        return opened

    def _is_rearrangement(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is a move that neither drops nor repeats entries."""
        return self._is_move(eqn) and size(eqn.invars[0]) == size(eqn.outvars[0])

    def _is_move(self, eqn: JaxprEqn) -> bool:
        is_move = eqn.primitive in STEPS and STEPS[eqn.primitive].family == "move"
        alone = all(isinstance(v, Literal) for v in eqn.invars[1:])
        return is_move and alone and self._is_step(eqn, [0]) and not rounds(eqn)

    def tails(
        self, places: Sequence[int], params: Sequence[int], levels: tuple[Level, ...] = ()
    ) -> list[Tail]:
        """The tails of the gradients at these places.

        `params[place]` is the index of the parameter of the gradient at `place`. `levels` are the loops
        that the program stands in.
        """
        groups = _connected({place: self._collect(self.grads[place]) for place in places})
        return [self._tail(own, steps, params, levels) for own, steps in groups]

    def _collect(self, grad: Atom) -> set[int]:
        """The places of the steps between `grad` and its terms."""
        found: set[int] = set()
        ahead = [grad]
        while ahead:
            place = None if isinstance(v := ahead.pop(), Literal) else self.place_of.get(v)
            if place is None or place not in self.steps or place in found:
                continue
            found.add(place)
            ahead.extend(self.eqns[place].invars)
        return found

    def _tail(
        self,
        places: Sequence[int],
        steps_at: Sequence[int],
        params: Sequence[int],
        levels: tuple[Level, ...],
    ) -> Tail:
        steps = tuple(with_transpose(self.eqns[i]) for i in steps_at)
        grads = tuple(self.grads[i] for i in places)
        made_here = {v for eqn in steps for v in eqn.outvars}
        read_here = dict.fromkeys(
            v
            for v in (*(v for eqn in steps for v in eqn.invars), *grads)
            if not isinstance(v, Literal) and v not in made_here
        )
        terms = tuple(
            self.terms.get(v) or Total.of(v, self.made_by.get(v), self._origin(v))
            for v in read_here
            if v in self.varies
        )
        factors = dict.fromkeys(v for term in terms for v in term.factors)
        of_terms = [v for t in terms if t.eqn for v in t.eqn.invars if not isinstance(v, Literal)]
        constants = dict.fromkeys(v for v in (*read_here, *of_terms) if v not in self.varies)
        return Tail(
            params=tuple(params[i] for i in places),
            grads=grads,
            terms=terms,
            steps=steps,
            factors=tuple(factors),
            constants=tuple(constants),
            adds=any(adds(eqn, self.varying_operands(eqn), self.made_by) for eqn in steps),
            levels=levels,
        )

    def _origin(self, v: Var) -> str:
        """A phrase that names the primitive that made the entries of `v` and the user's line.

        Moves are passed over. If no line is known for the equation, the line of one before it is named.
        """
        eqn = self.made_by.get(v)
        while eqn is not None and self._is_move(eqn) and (before := self._before(eqn)) is not None:
            eqn = before
        near = eqn
        while near is not None and not _compat.has_user_line(near):
            near = self._before(near)
        if eqn is None:
            return "given as it is"
        line = _compat.user_line(near or eqn)
        return f"made by {eqn.primitive} {'at' if near is eqn else 'after'} {line}"

    def _before(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """The equation that makes the first operand of `eqn` that varies, or None."""
        operands = [v for v in distinct(eqn.invars) if v in self.varies]
        return self.made_by.get(operands[0]) if operands else None


def _connected(steps: dict[int, set[int]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Groups the gradients that share steps.

    `steps` has the places of the steps for the place of each gradient. For each group the result has the
    places of its gradients and those of all their steps, in order.
    """
    groups: list[tuple[list[int], set[int]]] = []
    for place, own in steps.items():
        shared = [g for g in groups if g[1] & own]
        groups = [g for g in groups if not g[1] & own]
        places = [p for g in shared for p in g[0]]
        groups.append(([*places, place], own.union(*(g[1] for g in shared))))
    return [(tuple(places), sorted(own)) for places, own in groups]


def leave_loops(program: Program, places: Collection[int]) -> bool:
    """Whether any of the gradients at these places leaves a loop as a stack, as those of layers do."""
    return bool(Walk.through(program, Wanted(tuple(places), split=False, together=True)).opened)
