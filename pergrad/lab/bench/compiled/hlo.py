"""The text of a compiled program, as computations and instructions.

`jax.jit(f).lower(...).compile().as_text()` is a list of computations. Each has one instruction a line,
in the order in which they run:

    %body (arg: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
      %arg = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
      %x = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%arg), index=1
      ROOT %pair = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%i, %x), metadata={...}
    }

After the sign `=` stand the shape of the result, the opcode, its operands in parentheses, and the
attributes. The computation that begins with `ENTRY` is the program; others are called by attributes:
`calls=%fused`, `body=%body`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# `f32[8,128]{1,0:T(8,128)S(1)}`: the type, the sizes, and in braces the layout, which may be missing.
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
# `S(1)` in a layout names the memory in which the array lies.
SPACE = re.compile(r"S\((\d+)\)")
# `%fusion.12`: the name of an instruction or a computation.
NAME = re.compile(r"%([\w.\-]+)")
# `calls=%fused` or `branch_computations={%first, %second}`: computations that an instruction calls.
CALLED = re.compile(r"(\w+)=(%[\w.\-]+|\{%[^}]*\})")

HBM = 0  # the memory of the chip; the other spaces lie on the chip itself, or on the host
TYPE_BITS = re.compile(r"\d+")  # of `bf16`, `s32`, `f8e4m3fn`: the first number


@dataclass(frozen=True)
class Array:
    """An array of a shape: the type of its elements, its sizes, and its memory."""

    kind: str
    sizes: tuple[int, ...]
    space: int

    @functools.cached_property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @functools.cached_property
    def bytes(self) -> float:
        """Without the layout's padding."""
        return self.elements * _bits(self.kind) / 8

    @property
    def hbm_bytes(self) -> float:
        return self.bytes if self.space == HBM else 0.0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    `arrays` are those of its result, which are several if the result is a tuple. `inside` is the text
    in the parentheses: of a constant its value, of a parameter its number, else the operands.
    """

    name: str
    is_root: bool
    is_tuple: bool
    arrays: tuple[Array, ...]
    opcode: str
    inside: str
    attributes: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(NAME.findall(self.inside))

    @functools.cached_property
    def called(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the computations that it calls, by the attribute that names them."""
        return {key: tuple(NAME.findall(names)) for key, names in CALLED.findall(self.attributes)}

    @property
    def bytes(self) -> float:
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> float:
        return sum(array.hbm_bytes for array in self.arrays)

    @property
    def elements(self) -> int:
        """The number of elements of its largest array."""
        return max((array.elements for array in self.arrays), default=0)

    def attribute(self, key: str) -> str:
        """The word or number of an attribute such as `index=1` or `direction=LT`."""
        found = re.search(rf"\b{key}=(\w+)", self.attributes)
        if found is None:
            raise ValueError(f"{self.name} has no attribute {key}")
        return found[1]

    def places(self, key: str) -> tuple[int, ...]:
        """The numbers of an attribute such as `lhs_contracting_dims={1,2}`; none if it is not there."""
        found = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(place) for place in found[1].split(",") if place) if found else ()

    def quoted_number(self, before: str) -> int | None:
        """The number in quotes right behind the text `before` in the attributes, if that is there."""
        _, there, rest = self.attributes.partition(f'{before}"')
        return int(rest[: rest.index('"')]) if there else None


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is that of the computation."""
        return next(instruction for instruction in self if instruction.is_root)

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {int(one.inside): one for one in self if one.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions that have an instruction of this name among their operands."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}


@dataclass(frozen=True)
class Program:
    """Computations by name, and the name of the one that runs first."""

    computations: Mapping[str, Computation]
    entry: str

    def fused(self, instruction: Instruction) -> Computation | None:
        """What a fusion computes; None for other instructions."""
        if instruction.opcode != "fusion":
            return None
        (name,) = instruction.called["calls"]
        return self.computations[name]


def parse(text: str) -> Program:
    """The program of a text."""
    computations: dict[str, Computation] = {}
    entry = ""
    name, found = "", {}
    for line in text.splitlines():
        if line.startswith(" "):
            if name and " = " in line:
                instruction = _instruction(line.strip())
                found[instruction.name] = instruction
        elif line.endswith("{") and " -> " in line:  # the head of a computation
            head = line.split(" (")[0]
            name, found = head.removeprefix("ENTRY ").removeprefix("%"), {}
            computations[name] = Computation(name, found)
            entry = name if head.startswith("ENTRY ") else entry
        elif line.startswith("}"):
            name = ""
    return Program(computations, entry)


def _instruction(line: str) -> Instruction:
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    end = _end(rest, " ")
    shape, rest = rest[:end], rest[end + 1 :]
    opcode = rest.partition("(")[0]
    operands = rest[len(opcode) :]
    end = _end(operands, ")")
    return Instruction(
        name=name.removeprefix("%"),
        is_root=line.startswith("ROOT "),
        is_tuple=shape.startswith("("),
        arrays=tuple(_arrays(shape)),
        opcode=opcode,
        inside=operands[1:end],
        attributes=operands[end + 1 :],
    )


def _end(text: str, sign: str) -> int:
    """Where the first `sign` stands that is in no bracket; a bracket that closes the last one is not."""
    depth = 0
    for i, found in enumerate(text):
        depth += (found in "([{") - (found in ")]}")
        if not depth and found == sign:
            return i
    return len(text)


def _arrays(shape: str) -> Iterator[Array]:
    for kind, sizes, layout in ARRAY.findall(shape):
        space = SPACE.search(layout)
        numbers = tuple(int(size) for size in sizes.split(",") if size)
        yield Array(kind, numbers, int(space[1]) if space else HBM)


def _bits(kind: str) -> int:
    """The bits of a number of this type; a truth value takes a byte, and a token nothing."""
    found = TYPE_BITS.search(kind)
    return int(found[0]) if found else 8 * (kind == "pred")
