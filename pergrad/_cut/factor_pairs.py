"""The saved inputs and residuals of a layer, laid out like its parameter.

A gradient that is a sum of products, whose entries are then moved and multiplied by a number c, is

    g = c sum_n x_n d_n^T,

with inputs x_n from the forward pass and residuals d_n from the backward pass. Of the two factors, the
residual is the one that depends on the cotangent of the loss. The steps after the product decide which
axis of the parameter an axis of x or d becomes. A reshape may split an axis (into heads, say), and
another may join the pieces again. So every axis is followed as a list of pieces, and a reshape deals all
pieces out to the new axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence

import jax
from jax.extend.core import primitives as p

from pergrad._compat import Var, aval
from pergrad._cut.examples import Examples
from pergrad._cut.tail import Tail
from pergrad._cut.terms import Convolution, Product
from pergrad._cut.units import Units, contributions, units_of
from pergrad._ir import dependents, is_in, read
from pergrad._trace import Program

AxisName = str | int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactorPair:
    """What the gradients of one parameter are made of.

    `inputs` were saved by the forward pass and `residuals` were computed by the backward pass. Both are
    [B, positions, ...]. An example's gradient is the sum over positions of their outer products.
    `input_axes` and `residual_axes` name the axes: "example", "position", and for every other axis the
    number of the parameter's axis that it stands for. If the same axis of the parameter is in both, such
    as the axis of experts, there is one outer product for each index of that axis.
    """

    inputs: jax.Array
    residuals: jax.Array
    input_axes: tuple[AxisName, ...] = dataclasses.field(metadata={"static": True})
    residual_axes: tuple[AxisName, ...] = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class FactorLayout:
    """How the two factors of a gradient are laid out like its parameter.

    The gradient is that of a tail with a single term, a product or a convolution. `units` are the
    products of single positions, and `sides` says for each factor of such a product which axes of the
    parameter it has.
    """

    tail: Tail
    units: Units
    sides: tuple[Side, Side]

    @property
    def product(self) -> Product:
        """The product of one position."""
        (product,) = self.units.tail.terms
        assert isinstance(product, Product)
        return product

    def arrays(self, examples: Examples) -> tuple[jax.Array, jax.Array]:
        """Both factors of these examples, as arrays [B, positions, ...] with axes of the parameter.

        The sum over positions of their outer products is the gradient.
        """
        own, unit = self.units.of(examples), self.units.tail
        env = unit.env(own.factors, own.constants)
        x, d = (read(env, v) for v in self.product.eqn.invars)
        d = d * (unit.similarity(env, d.dtype) / contributions(self.tail, 0))
        first, second = self.sides
        return first.laid_out(x, examples.size), second.laid_out(d, examples.size)


def factor_layout(tail: Tail, takes_others: tuple[bool, bool] = (False, False)) -> FactorLayout | None:
    """The layout of the factors of a tail's gradient.

    None if the gradient is not a sum of products, moved and multiplied by one number. `takes_others`
    says which of the factors gets the axes of length 1 that neither of them has.
    """
    if len(tail.grads) != 1 or len(tail.terms) != 1:
        return None
    if not isinstance(tail.terms[0], (Product, Convolution)):
        return None
    (units,) = units_of(tail, "token")
    unit = units.tail
    if unit.why_not_similar() or not isinstance(product := unit.terms[0], Product):
        return None

    (x_batch, d_batch) = product.eqn.params["dimension_numbers"][1]
    x_axes, d_axes = ([_Piece(n) for n in aval(v).shape] for v in product.eqn.invars)
    for i, j in zip(x_batch, d_batch, strict=True):
        d_axes[j] = x_axes[i]
    free = [a for i, a in enumerate(x_axes) if i not in x_batch]
    free += [a for j, a in enumerate(d_axes) if j not in d_batch]
    axes = _follow(unit, [[piece] for piece in [*(x_axes[i] for i in x_batch), *free]])
    if axes is None:
        return None
    leaves = [[leaf for piece in axis for leaf in piece.leaves()] for axis in axes]
    x = Side.of(x_axes, leaves, takes_others[0])
    d = Side.of(d_axes, leaves, takes_others[1])
    return None if x is None or d is None else FactorLayout(tail, units, (x, d))


def factor_pair(tail: Tail, late: Collection[Var], examples: Examples) -> FactorPair | None:
    """The inputs and residuals of these examples, from which a tail makes its gradient.

    None if the gradient of the tail is not a sum of products, moved and multiplied by one number.
    `late` are the variables that depend on the cotangent of the loss.
    """
    if len(tail.terms) != 1 or not isinstance(tail.terms[0], (Product, Convolution)):
        return None
    first_is_late, second_is_late = (is_in(v, late) for v in tail.terms[0].eqn.invars)
    if first_is_late == second_is_late:
        return None
    layout = factor_layout(tail, (first_is_late, second_is_late))
    if layout is None:
        return None
    x, d = zip(layout.arrays(examples), (side.names for side in layout.sides), strict=True)
    (inputs, input_axes), (residuals, residual_axes) = (d, x) if first_is_late else (x, d)
    return FactorPair(inputs, residuals, input_axes, residual_axes)


class _Piece:
    """A piece of an axis, which may be cut into smaller pieces."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[_Piece] = []

    def cut(self, first: int) -> list[_Piece]:
        """Cuts the piece in two, as a reshape from [size] to [first, size // first] does."""
        self.parts = [_Piece(first), _Piece(self.size // first)]
        return self.parts

    def leaves(self) -> Iterator[_Piece]:
        """The smallest pieces that this one was cut into, in order; itself if it was not cut."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()


Axes = list[list[_Piece]]


def _follow(tail: Tail, axes: Axes) -> Axes | None:
    """The pieces that each axis of a tail's gradient consists of, from those of the term's axes.

    None if a step does anything but transpose axes, reshape, or keep the shape.
    """
    for step in tail.steps:
        shape = aval(step.outvars[0]).shape
        match step.primitive:
            case p.transpose_p:
                axes = [axes[i] for i in step.params["permutation"]]
            case p.reshape_p | p.squeeze_p | p.broadcast_in_dim_p:
                dealt = _deal([piece for axis in axes for piece in axis], shape)
                if dealt is None:
                    return None
                axes = dealt
            case p.rev_p:
                return None
            case _ if shape != aval(tail.operand(step)).shape:
                return None
    return axes


def _deal(pieces: list[_Piece], shape: Sequence[int]) -> Axes | None:
    """Deals pieces out, in order, to axes of these sizes, and cuts pieces where an axis ends.

    None if an axis ends within a piece that cannot be cut there.
    """
    ahead = [leaf for piece in pieces for leaf in piece.leaves()]
    axes: Axes = []
    for size in shape:
        if size == 1:
            axes.append([ahead.pop(0)] if ahead and ahead[0].size == 1 else [])
            continue
        axis: list[_Piece] = []
        while (missing := size // math.prod(piece.size for piece in axis)) > 1:
            piece = ahead.pop(0)
            if piece.size == 1:
                continue
            if piece.size > missing and piece.size % missing == 0:
                piece, rest = piece.cut(missing)
                ahead.insert(0, rest)
            elif missing % piece.size:
                return None
            axis.append(piece)
        axes.append(axis)
    return axes


@dataclasses.dataclass(frozen=True)
class Side:
    """The axes of one factor of a product, and how they become axes of the parameter.

    The axes are split into pieces of the lengths `pieces`, which are then brought into the `order` of
    the parameter's axes number `numbers` and joined to `lengths`.
    """

    pieces: tuple[int, ...]
    order: tuple[int, ...]
    numbers: tuple[int, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def of(own: Sequence[_Piece], axes: Axes, takes_others: bool) -> Side | None:
        """The side of a factor whose axes are `own`, if the parameter's axes consist of `axes`.

        An axis of length 1 of the parameter may consist of no piece; `takes_others` says whether this
        factor gets such axes. The result is None if an axis of the parameter has pieces of both factors,
        or if an axis of the factor is not in the parameter.
        """
        ids = {id(leaf) for piece in own for leaf in piece.leaves()}
        has = [[id(leaf) in ids for leaf in axis] or [takes_others] for axis in axes]
        if any(any(axis) and not all(axis) for axis in has):
            return None
        numbers = tuple(n for n, axis in enumerate(has) if all(axis))
        order = [id(leaf) for n in numbers for leaf in axes[n]]
        pieces = [leaf for piece in own for leaf in piece.leaves() if id(leaf) in order or leaf.size > 1]
        if len(pieces) != len(order):
            return None
        places = {id(piece): i for i, piece in enumerate(pieces)}
        return Side(
            pieces=tuple(piece.size for piece in pieces),
            order=tuple(places[leaf] for leaf in order),
            numbers=numbers,
            lengths=tuple(math.prod(leaf.size for leaf in axes[n]) for n in numbers),
        )

    @property
    def names(self) -> tuple[AxisName, ...]:
        """The names of the axes of an array that is laid out like this."""
        return ("example", "position", *self.numbers)

    def laid_out(self, x: jax.Array, size: int) -> jax.Array:
        """A factor [B N, ...] as an array [B, N, ...] whose further axes are axes of the parameter."""
        positions = x.shape[0] // size
        x = x.reshape(size, positions, *self.pieces)
        x = x.transpose(0, 1, *(2 + place for place in self.order))
        return x.reshape(size, positions, *self.lengths)


def depends_on_cotangent(program: Program) -> set[Var]:
    """The variables of the backward pass: those that depend on the cotangent of the loss."""
    return dependents(program.jaxpr.eqns, {program.cotangent}, inside=True)
