"""What equations cost: floating-point operations as XLA counts them, and memory.

Operations: a product counts two for each pair of numbers that it multiplies and adds up, an elementwise
equation one for every number that it makes, and a reduction one for every number that it reads. Moving
numbers counts nothing. Transcendental functions are not counted, because XLA counts them apart.

Memory: XLA fuses elementwise equations into their consumers, so that only some variables are ever
stored: those that an equation like a matrix product makes or reads, and those that are read more than
once. A stored variable is kept until the last equation that reads it, directly or through fused ones.
The peak over the program of what is kept is the estimate, good to a factor of two.

XLA's compiler for GPUs stores less than that (`stores_less`, a fact about the device):

- It fuses an elementwise equation into all equations that read its result. So a result that takes more
  bytes than what it is computed from is not stored, and is computed again from that. For example, the
  exponentials of logits, in float32, are computed again from the logits, in bfloat16.
- But it stores a result that is reduced along rows of at most 16384 entries. One kernel then makes the
  row, reduces it and normalises it. It did so for a softmax of 8192 and 16384 logits, and not for 32768.
- It writes an elementwise result over an operand of the same size that nothing reads later.

With these three, the estimate for `jax.grad` of transformers that were compiled for an H100, with
products in bfloat16, is these multiples of what XLA takes. In brackets is the estimate without them:

    2 layers, vocabulary 32768                1.28 (1.65)
    12 layers in a loop, vocabulary 32768     1.05 (1.65)
    22 layers in a loop, vocabulary 32768     1.07 (1.28)
    4 layers in a loop, vocabulary 8192       1.11 (1.11)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from pergrad import _compat
from pergrad._compat import Atom, Jaxpr, JaxprEqn, Literal, Primitive, Var, aval
from pergrad._ir.dependence import readers_of
from pergrad._ir.equations import programs
from pergrad._ir.primitives import Is, those_that_are


def size(v: Atom) -> int:
    """How many entries the array of a variable or literal has."""
    return math.prod(aval(v).shape)


def nbytes(v: Atom) -> int:
    """How many bytes the array of a variable or literal takes; a typed PRNG key counts as two words."""
    return size(v) * getattr(aval(v).dtype, "itemsize", 8)


def operations(eqns: Iterable[JaxprEqn]) -> float:
    """How many floating-point operations these equations do."""
    return float(sum(OPERATIONS.get(eqn.primitive, _elementwise)(eqn) for eqn in eqns))


def _elementwise(eqn: JaxprEqn) -> float:
    inner = programs(eqn)
    if inner:
        times = eqn.params.get("length", 1)
        return times * max(operations(jaxpr.eqns) for jaxpr in inner)
    return sum(size(v) for v in eqn.outvars if jnp.issubdtype(aval(v).dtype, jnp.floating))


def equations(eqns: Iterable[JaxprEqn]) -> int:
    """How many equations run. An equation in the body of a loop counts once for every round."""
    return sum(_equations_of(eqn) for eqn in eqns)


def _equations_of(eqn: JaxprEqn) -> int:
    inner = max((equations(jaxpr.eqns) for jaxpr in programs(eqn)), default=0)
    return 1 + eqn.params.get("length", 1) * inner


def results(eqn: JaxprEqn, times: int = 1) -> Iterator[tuple[int, int]]:
    """The bytes of an equation's results, and how often it runs: `times`.

    An equation that runs programs, such as a loop, gives those of the equations in them.
    """
    inner = programs(eqn)
    if not inner:
        yield sum(map(nbytes, eqn.outvars)), times
    for jaxpr in inner:
        for one in jaxpr.eqns:
            yield from results(one, times * eqn.params.get("length", 1))


def _nothing(eqn: JaxprEqn) -> float:
    return 0


def _reduction(eqn: JaxprEqn) -> float:
    return size(eqn.invars[0])


def _product(eqn: JaxprEqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    length = math.prod(aval(eqn.invars[0]).shape[a] for a in contracted)
    return 2 * size(eqn.outvars[0]) * length


def _convolution(eqn: JaxprEqn) -> float:
    lhs, rhs = (aval(v).shape for v in eqn.invars)
    out, params = aval(eqn.outvars[0]).shape, eqn.params
    (_, _, *xs), (o, i, *ks), (n, _, *ps) = params["dimension_numbers"]
    axes = zip(
        (lhs[a] for a in xs),
        params["lhs_dilation"],
        (low for low, _ in params["padding"]),
        zip(params["window_strides"], (out[a] for a in ps), strict=True),
        zip(params["rhs_dilation"], (rhs[a] for a in ks), strict=True),
        strict=True,
    )
    return 2 * out[n] * rhs[o] * rhs[i] * math.prod(_meetings(*axis) for axis in axes)


def _meetings(length: int, dilation: int, low: int, *strides: tuple[int, int]) -> int:
    """How many pairs of a position p and a kernel entry k meet a true entry of x along one axis.

    The operand x has `length` entries, with `dilation` - 1 holes between neighbours and `low` entries of
    padding before the first. For position p of the result, entry k of the kernel is multiplied by the
    entry of x at s p + d k - low. That entry may be padding or a hole, and then XLA does not count the
    multiplication. `strides` holds s with the number of positions p, and d with the number of entries k.
    """
    (s, few), (d, many) = sorted(strides, key=lambda stride: stride[1])
    found = 0
    for start in s * np.arange(few) - low:
        entry, hole = np.divmod(start + d * np.arange(many), dilation)
        found += int(np.count_nonzero((entry >= 0) & (entry < length) & (hole == 0)))
    return found


def _ragged_product(eqn: JaxprEqn) -> float:
    # The CPU runs a ragged product as one dense product for each group.
    (contracted, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    length = math.prod(aval(eqn.invars[0]).shape[a] for a in contracted)
    shares_out = len(eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions) > 0
    groups = aval(eqn.invars[2]).shape[-1] if shares_out else 1
    return 2 * groups * size(eqn.outvars[0]) * length


def _updates(eqn: JaxprEqn) -> float:
    return size(eqn.invars[2])


OPERATIONS: dict[Primitive, Callable[[JaxprEqn], float]] = {
    p.dot_general_p: _product,
    p.conv_general_dilated_p: _convolution,
    p.scatter_add_p: _updates,
    _compat.ragged_dot_general_p: _ragged_product,
    **dict.fromkeys([p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p, p.cumsum_p], _reduction),
}


OPERATIONS |= dict.fromkeys(those_that_are(Is.MOVE) | those_that_are(Is.TRANSCENDENTAL), _nothing)


REDUCTIONS = frozenset({p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p})
LONGEST_ROW = 16384  # a GPU reduces rows up to this length in the kernel that makes their entries
ELEMENTWISE = those_that_are(Is.ELEMENTWISE)
WRITING, READING = those_that_are(Is.WRITES), those_that_are(Is.READS)


def peak_bytes_of(jaxpr: Jaxpr, stores_less: bool) -> float:
    """The most bytes that a program keeps at one time, its inputs not counted."""

    def inside(eqn: JaxprEqn) -> float:
        return peak_bytes_inside(eqn, stores_less)

    return peak_bytes(jaxpr.eqns, nbytes, lambda v: True, inside, stores_less)


def peak_bytes_inside(eqn: JaxprEqn, stores_less: bool) -> float:
    """The most bytes that the body of a loop, or a branch of a conditional, keeps at one time."""
    return max((peak_bytes_of(jaxpr, stores_less) for jaxpr in programs(eqn)), default=0)


def _row(reduction: JaxprEqn) -> int:
    """How many entries are reduced to one."""
    return size(reduction.invars[0]) // max(1, size(reduction.outvars[0]))


def peak_bytes(
    eqns: Sequence[JaxprEqn],
    nbytes_of: Callable[[Var], float],
    temporary: Callable[[Var], bool],
    inside: Callable[[JaxprEqn], float],
    stores_less: bool,
) -> float:
    """The most bytes that these equations keep at one time.

    `nbytes_of` gives the bytes of a variable and `temporary` says whether the variable counts. `inside`
    gives the bytes that an equation takes only while it runs. `stores_less` says whether XLA stores
    less, as its compiler for GPUs does (see above).
    """
    readers = readers_of(eqns)

    def is_stored(v: Var, eqn: JaxprEqn, needs: frozenset[Var]) -> bool:
        read_by = readers.get(v, [])
        if all(isinstance(operand, Literal) for operand in eqn.invars):
            return False  # v is a constant
        if eqn.primitive in WRITING or any(reader.primitive in READING for reader in read_by):
            return True
        if len(read_by) < 2:
            return False
        if not stores_less or nbytes_of(v) <= sum(map(nbytes_of, needs)):
            return True
        return any(reader.primitive in REDUCTIONS and _row(reader) <= LONGEST_ROW for reader in read_by)

    # The stored variables that a variable is computed from: itself, if it is stored, or those that the
    # equations fused into it read.
    kept_for: dict[Var, frozenset[Var]] = {}
    made_at: dict[Var, int] = {}
    last_read: dict[Var, int] = {}
    may_overwrite: dict[Var, frozenset[Var]] = {}
    for i, eqn in enumerate(eqns):
        needs = frozenset().union(
            *(kept_for.get(v, frozenset()) for v in eqn.invars if not isinstance(v, Literal))
        )
        stored = [v for v in eqn.outvars if is_stored(v, eqn, needs)]
        kept_for |= {v: frozenset({v}) if v in stored else needs for v in eqn.outvars}
        if stored:
            made_at |= dict.fromkeys(stored, i)
            last_read |= dict.fromkeys(needs, i)
        if stores_less and eqn.primitive in ELEMENTWISE:
            may_overwrite |= {v: needs for v in stored if temporary(v)}

    overwritten: set[Var] = set()
    for v, operands in may_overwrite.items():
        ending = (u for u in operands if last_read[u] == made_at[v] and nbytes_of(u) == nbytes_of(v))
        overwritten.update(itertools.islice(ending, 1))

    events = []
    for v, at in made_at.items():
        if temporary(v):
            events.append((at, 0, nbytes_of(v)))
            events.append((last_read.get(v, at), -1 if v in overwritten else 2, -nbytes_of(v)))
    for i, eqn in enumerate(eqns):
        events += [(i, 1, inside(eqn)), (i, 2, -inside(eqn))]
    kept = most = 0.0
    for _, _, change in sorted(events):
        kept += change
        most = max(most, kept)
    return most
