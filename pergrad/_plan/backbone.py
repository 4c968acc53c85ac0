"""The operations and the temporary memory of the backbone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from pergrad._compat import JaxprEqn, Var
from pergrad._cut import CutLoop, Part
from pergrad._ir import Is, Loop, counts, dependent_inputs, dependents, is_in, those_that_are, variables

PRODUCTS = those_that_are(Is.PRODUCT)


def bytes_of(part: Part, eqns: list[JaxprEqn], size: int, stores_less: bool) -> float:
    """Temporary memory of the equations for `size` examples, without the variables that tails make.

    For the equations of the whole program that is the temporary memory of `jax.grad`, because the tails
    make its results, which are not temporary. `stores_less` is a fact about the device (see `counts`).
    """
    made_by_tails = {
        v
        for tail in part.tails
        for eqn in (*(t.eqn for t in tail.terms if t.eqn), *tail.steps)
        for v in eqn.outvars
    }
    # The first result of a loop with tails inside identifies the loop.
    loops = {cut_loop.loop.eqn.outvars[0]: cut_loop for cut_loop in part.loops}
    for cut_loop in part.loops:
        made_by_tails |= {cut_loop.loop.eqn.outvars[k] for k in cut_loop.taken}

    def nbytes_of(v: Var) -> float:
        return counts.nbytes(v) * (size if v in part.varies else 1)

    def inside(eqn: JaxprEqn) -> float:
        cut_loop = loops.get(eqn.outvars[0]) if eqn.outvars else None
        if cut_loop is not None:
            return bytes_of(cut_loop.body, cut_loop.loop.body.jaxpr.eqns, size, stores_less)
        copies = 1 if part.varies.isdisjoint(eqn.outvars) else size
        return copies * counts.peak_bytes_inside(eqn, stores_less)

    return counts.peak_bytes(eqns, nbytes_of, lambda v: v not in made_by_tails, inside, stores_less)


def operations_of(part: Part, size: int) -> tuple[float, float]:
    """The operations of the backbone, in two numbers.

    The first counts the equations that depend on the example, for `size` examples. The second counts
    the equations that are the same for all examples.
    """
    varying = fixed = 0.0
    for x in part.backbone:
        if isinstance(x, CutLoop):
            inside = operations_of(x.body, size)
            varying += x.loop.length * inside[0]
            fixed += x.loop.length * inside[1]
        elif part.varies.isdisjoint(x.outvars):
            fixed += counts.operations([x])
        else:
            varying += size * counts.operations([x])
    return varying, fixed


def equations_of(part: Part) -> list[JaxprEqn]:
    """The equations of the backbone, including the loops that have tails inside."""
    return [x.loop.eqn if isinstance(x, CutLoop) else x for x in part.backbone]


def results_of(part: Part, times: int = 1) -> Iterator[tuple[int, int]]:
    """The bytes of each equation's results for one example, and how often the equation runs.

    Only equations that depend on the example count. `times` is how often the part itself runs.
    """
    for x in part.backbone:
        if isinstance(x, CutLoop):
            yield from results_of(x.body, times * x.loop.length)
        elif not part.varies.isdisjoint(x.outvars):
            yield from counts.results(x, times)


def parameters_read_in_loops(
    eqns: Iterable[JaxprEqn], varies: Collection[Var]
) -> Iterator[tuple[int, int]]:
    """What products in loops read again in every round: operands that no example and no round changes.

    For each of them its bytes, and how often it is read. `varies` has the variables that depend on the
    example.
    """
    for eqn in eqns:
        loop = Loop.of(eqn)
        if loop is None:
            continue
        body = loop.body.jaxpr
        depends = [is_in(v, varies) for v in eqn.invars]
        by_example = dependents(body.eqns, dependent_inputs(loop, depends))
        consts, carry, xs = loop.operands(body.invars)
        changing = dependents(body.eqns, {*by_example.intersection(consts), *carry, *xs})
        for inner in body.eqns:
            if inner.primitive in PRODUCTS and not changing.isdisjoint(inner.outvars):
                unchanged = variables(inner.invars) - changing
                yield from ((counts.nbytes(v), loop.length) for v in unchanged)
        for nbytes, times in parameters_read_in_loops(body.eqns, by_example):
            yield nbytes, times * loop.length
