"""Stage 2: the gradient program is cut into a backbone and tails.

`find` says where the tails begin. Layers that a loop runs have their tails inside the loop. If the
gradient of a stack of layers leaves a loop as an output, and all statistics of this gradient take it in
layer by layer, the body of the loop is cut like a program of its own. Its tails are reduced in every
round, and statistics leave the loop, not gradients.

This file names no primitive.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from pergrad._compat import JaxprEqn, Var
from pergrad._cut.find import Walk, Wanted
from pergrad._cut.tail import Level, Tail
from pergrad._ir import Loop, dependent_inputs, is_in, needed_places, variables
from pergrad._trace import Program


@dataclasses.dataclass(frozen=True)
class CutLoop:
    """A loop with tails in its body.

    `taken` are the numbers of the loop's results that are gradients. The loop does not make them any
    more, since the tails are reduced in every round. `body` is the loop's body, cut.
    """

    loop: Loop
    taken: frozenset[int]
    body: Part


@dataclasses.dataclass(frozen=True)
class Part:
    """A program, or the body of a loop in it, after the cut: the `backbone` runs, then come the `tails`.

    A loop with tails in its body stands in the backbone as a `CutLoop`, all other equations stand there
    as they are. `varies` has the variables that depend on the example.
    """

    backbone: tuple[JaxprEqn | CutLoop, ...]
    tails: tuple[Tail, ...]
    varies: frozenset[Var]

    @property
    def loops(self) -> list[CutLoop]:
        """The loops that have tails inside."""
        return [x for x in self.backbone if isinstance(x, CutLoop)]

    def all_tails(self) -> Iterator[Tail]:
        """The tails of this part, and those in its loops and the loops inside of these."""
        yield from self.tails
        for cut_loop in self.loops:
            yield from cut_loop.body.all_tails()


@dataclasses.dataclass(frozen=True)
class Cut(Part):
    """The whole gradient program `program`, after the cut."""

    program: Program


def make_cut(program: Program, wanted: Wanted) -> Cut:
    """Cuts the gradient program of one example; `wanted` says what the cut depends on."""
    part = _cut(Walk.through(program, wanted), range(len(program.grads)), (), itertools.count())
    return Cut(part.backbone, part.tails, part.varies, program)


def _cut(walk: Walk, params: Sequence[int], levels: tuple[Level, ...], numbers: Iterator[int]) -> Part:
    """Cuts the program that `walk` went through.

    `params` has the index of the parameter for each gradient of this program, `levels` has the loops
    that the program is the body of, and `numbers` gives the tails their numbers.
    """
    in_loops = {o.place for opened in walk.opened.values() for o in opened}
    places = [i for i in range(len(walk.grads)) if i not in in_loops]
    tails = [
        dataclasses.replace(tail, number=next(numbers)) for tail in walk.tails(places, params, levels)
    ]
    needed = {v for t in tails for v in (*t.factors, *t.constants)} | variables(walk.others)
    cut_loops = {}
    for place, opened in sorted(walk.opened.items()):
        loop = Loop.of(walk.eqns[place])
        assert loop is not None
        taken = [o.result for o in opened]
        inputs = dependent_inputs(loop, [is_in(v, walk.varies) for v in loop.eqn.invars])
        inside = Walk.inside(loop.body.jaxpr, inputs, taken, range(len(taken)), split=walk.split)
        ways = {params[o.place]: (o.v, o.moves, walk.grads[o.place]) for o in opened}
        around = (Level(loop.length, ways), *levels)
        body = _cut(inside, [params[o.place] for o in opened], around, numbers)
        cut_loops[place] = CutLoop(loop, frozenset(taken), body)
    backbone = (
        cut_loops.get(place) or walk.eqns[place]
        for place in needed_places(walk.eqns, needed, always=cut_loops)
    )
    return Part(tuple(backbone), tuple(tails), frozenset(walk.varies))
