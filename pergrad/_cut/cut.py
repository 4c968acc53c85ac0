"""Step 2: the gradient program is cut into a backbone and tails.

Where the tails begin is said in `_walk`. Layers that are run by a loop have their tails inside of it:
where the gradient of a stack of layers leaves a loop as an output, and all that is wanted of it are
statistics that take it in layer by layer, the loop's step is cut like a program of its own. Its tails
are reduced in every step, and statistics leave the loop, not gradients.

This file names no primitive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from pergrad._compat import JaxprEqn, Var
from pergrad._cut.find import Walk, Wanted
from pergrad._cut.tail import Level, Tail
from pergrad._ir import Loop, is_in, needed_equations, variables
from pergrad._trace import Program


@dataclasses.dataclass(frozen=True)
class CutLoop:
    """A loop whose results `taken` are replaced by the states of the tails in its step."""

    loop: Loop
    taken: frozenset[int]
    step: Part


@dataclasses.dataclass(frozen=True)
class Part:
    """A program, or a step of a loop in it, in two: the `backbone`, then every tail is reduced.

    `loops` are the equations of the backbone, by identity, that have tails inside. `varies` has the
    variables that depend on the example.
    """

    backbone: tuple[JaxprEqn, ...]
    tails: tuple[Tail, ...]
    loops: dict[int, CutLoop]
    varies: frozenset[Var]

    def all_tails(self) -> Iterator[Tail]:
        """The tails in here and in all loops."""
        yield from self.tails
        for cut_loop in self.loops.values():
            yield from cut_loop.step.all_tails()


@dataclasses.dataclass(frozen=True)
class Cut(Part):
    """The whole program, cut."""

    program: Program


def make_cut(program: Program, wanted: Wanted) -> Cut:
    """Cuts the gradient program of one example."""
    part = _cut(Walk.through(program, wanted), range(len(program.grads)), ())
    return Cut(part.backbone, part.tails, part.loops, part.varies, program)


def _cut(walk: Walk, params: Sequence[int], levels: tuple[Level, ...]) -> Part:
    loops = {}
    in_loops = set()
    for eqn in walk.eqns:
        loop, opened = Loop.of(eqn), walk.opened.get(id(eqn))
        if loop is None or opened is None:
            continue
        in_loops |= {o.place for o in opened}
        taken = [o.result for o in opened]
        given = loop.varying_inputs([is_in(v, walk.varies) for v in eqn.invars])
        inside = Walk.inside(loop.step.jaxpr, given, taken, range(len(taken)), split=walk.split)
        ways = {params[o.place]: (o.v, o.moves, walk.grads[o.place]) for o in opened}
        step = _cut(inside, [params[o.place] for o in opened], (Level(loop.length, ways), *levels))
        loops[id(eqn)] = CutLoop(loop, frozenset(taken), step)

    tails = walk.tails([i for i in range(len(walk.grads)) if i not in in_loops], params, levels)
    needed = {v for t in tails for v in (*t.factors, *t.constants)} | variables(walk.others)
    backbone = needed_equations(walk.eqns, needed, always=loops)
    return Part(backbone, tuple(tails), loops, frozenset(walk.varies))
