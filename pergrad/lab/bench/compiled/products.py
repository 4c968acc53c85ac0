"""The operations of the matrix products and convolutions that an instruction of a compiled program does.

A product that sums over K has 2 K operations for every element of its result: K multiplications and K
additions. K is read from the sizes of the left operand and the axes that are summed over. They stand in
an attribute of a `dot`, and in the configuration of a call of a library (cuBLAS).

A convolution whose kernel has E elements and O output features has 2 E / O operations for every element
of what it returns when it runs forward. The two convolutions of its backward pass have as many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pergrad.lab.bench.compiled.hlo import Array, Computation, Instruction, Program

# `"lhs_contracting_dimensions":["1","2"]` in the configuration of a call of cuBLAS.
SUMMED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
HIGHEST = re.compile("highest", re.IGNORECASE)  # in a list of the operands' precisions
PRECISION = re.compile(r'"?operand_precision"?[=:][{\[]([^}\]]*)')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
# `b01f_o01i->b01f`: the axes of the images, of the kernel, and of the result.
LABELS = re.compile(r"dim_labels=\w+_(\w+)->")

CUBLAS = "__cublas$"
RESULT = -1
# Calls of cuDNN: which of their operands are the forward result (or its gradient), and the kernel.
CUDNN = {
    "__cudnn$convForward": (RESULT, 1),
    "__cudnn$convBiasActivationForward": (RESULT, 1),
    "__cudnn$convBackwardInput": (0, 1),
    "__cudnn$convBackwardFilter": (1, RESULT),
}


@dataclass(frozen=True)
class Product:
    """A product or convolution: its operations, and the type of its operands.

    `is_exact` says that the program asks for the full precision of that type.
    """

    operations: float
    kind: str
    is_exact: bool


def products(program: Program, computation: Computation, instruction: Instruction) -> Iterator[Product]:
    """The products of an instruction of `computation`, or of all instructions inside of a fusion."""
    fused = program.fused(instruction)
    if fused is not None:
        for inner in fused:
            yield from products(program, fused, inner)
    elif operations := _operations(computation, instruction):
        precision = PRECISION.search(instruction.attributes)
        kind = _operand(computation, instruction, 0).kind
        yield Product(operations, kind, bool(precision and HIGHEST.search(precision[1])))


def call_target(instruction: Instruction) -> str:
    """The function of a library that an instruction calls; the empty text if it calls none."""
    found = TARGET.search(instruction.attributes)
    return found[1] if found and instruction.opcode == "custom-call" else ""


def _operations(computation: Computation, instruction: Instruction) -> float:
    target = call_target(instruction)
    if instruction.opcode == "dot":
        return _of_product(computation, instruction, instruction.places("lhs_contracting_dims"))
    if instruction.opcode == "convolution":
        return _of_convolution(computation, instruction, RESULT, 1)
    if target in CUDNN:
        return _of_convolution(computation, instruction, *CUDNN[target])
    if target.startswith(CUBLAS) and (summed := SUMMED.search(instruction.attributes)):
        places = tuple(int(place) for place in re.findall(r"\d+", summed[1]))
        return _of_product(computation, instruction, places)
    return 0.0


def _of_product(computation: Computation, product: Instruction, summed: tuple[int, ...]) -> float:
    left = _operand(computation, product, 0)
    return 2.0 * product.arrays[0].elements * math.prod(left.sizes[axis] for axis in summed)


def _of_convolution(
    computation: Computation, instruction: Instruction, result: int, kernel: int
) -> float:
    forward, weights = (_operand(computation, instruction, place) for place in (result, kernel))
    labels = LABELS.search(instruction.attributes)
    assert labels is not None, instruction.name
    return 2.0 * forward.elements * weights.elements / weights.sizes[labels[1].index("o")]


def _operand(computation: Computation, instruction: Instruction, place: int) -> Array:
    """The operand at a place; the result if the place is `RESULT`."""
    if place == RESULT:
        return instruction.arrays[0]
    return computation.instructions[instruction.operands[place]].arrays[0]
