"""The bytes that an instruction of a compiled program reads and writes in the chip's memory (HBM).

An instruction reads each of its operands once and writes its result once, with three exceptions:

- Of an operand from which it takes slices alone, it reads these slices.
- A result that is an operand with a slice replaced is updated in place: the slice is written, and
  nothing is read of what stays. A scatter reads and writes as many bytes of its operand as it is given.
- What lies on the chip (VMEM) is neither read from HBM nor written to it.
"""

from __future__ import annotations

import math

from pergrad.lab.bench.compiled.hlo import Computation, Instruction, Program

SLICES = {"slice", "dynamic-slice", "gather"}
UPDATE = "dynamic-update-slice"  # its operands: the array, the new slice, the place
SCATTER = "scatter"  # its operands: the array, the places, the new slices
RENAMED = {"bitcast", "reshape"}  # inside of a fusion these move nothing
MOVES = {"copy-start", "slice-start"}  # copies between memories beside other work


def traffic(program: Program, computation: Computation, instruction: Instruction) -> float:
    """The bytes that an instruction of `computation` reads and writes in HBM."""
    if instruction.opcode in MOVES:
        return _moved(instruction)
    reads: dict[str, float] = {}
    for k, name in enumerate(instruction.operands):  # the same one may be there several times
        operand = computation.instructions[name]
        taken = reads.get(name, 0.0) + _read(program, computation, instruction, k)
        reads[name] = min(operand.hbm_bytes, taken)
    return sum(reads.values()) + _written(program, computation, instruction)


def _moved(instruction: Instruction) -> float:
    """A copy reads and writes as many bytes as arrive; those of its two ends that lie in HBM count."""
    source, target = sorted(instruction.arrays, key=lambda array: array.bytes)[-2:]
    moved = min(source.bytes, target.bytes)
    return moved * sum(array.hbm_bytes > 0 for array in (source, target))


def _read(program: Program, computation: Computation, instruction: Instruction, k: int) -> float:
    """The bytes of its operand number `k` that an instruction of `computation` reads in HBM."""
    operand = computation.instructions[instruction.operands[k]]
    fused = program.fused(instruction)
    if fused is not None:
        return min(operand.hbm_bytes, _taken(program, fused, fused.parameters[k]))
    if instruction.opcode in SLICES and k == 0:
        return min(operand.hbm_bytes, instruction.bytes)
    if instruction.opcode == UPDATE and k == 0:
        return 0.0
    if instruction.opcode == SCATTER and k == 0:
        return min(operand.hbm_bytes, _scattered(computation, instruction))
    return operand.hbm_bytes


def _taken(program: Program, fused: Computation, array: Instruction) -> float:
    """The bytes that a fusion takes of an array inside of it; infinity stands for all of them."""
    if array.is_root:
        return math.inf
    return sum(_taken_by(program, fused, user, array) for user in fused.users.get(array.name, ()))


def _taken_by(program: Program, fused: Computation, user: Instruction, array: Instruction) -> float:
    places = [k for k, name in enumerate(user.operands) if name == array.name]
    if user.opcode in SLICES and places == [0]:
        return user.bytes
    if user.opcode == UPDATE and places == [0]:
        return 0.0
    if user.opcode == SCATTER and places == [0]:
        return _scattered(fused, user)
    if user.opcode in RENAMED:
        return _taken(program, fused, user)
    inner = program.fused(user)
    if inner is not None:
        return sum(_taken(program, inner, inner.parameters[k]) for k in places)
    return math.inf


def _written(program: Program, computation: Computation, instruction: Instruction) -> float:
    fused = program.fused(instruction)
    if fused is None:
        return _stored(computation, instruction, instruction.hbm_bytes)
    results = [fused.root] * len(instruction.arrays)  # a reduction may have several
    if fused.root.opcode == "tuple":
        results = [fused.instructions[name] for name in fused.root.operands]
    sizes = [array.hbm_bytes for array in instruction.arrays]
    return sum(
        _stored_by_fusion(program, fused, result, size)
        for result, size in zip(results, sizes, strict=True)
    )


def _stored_by_fusion(program: Program, fused: Computation, result: Instruction, size: float) -> float:
    """The bytes written for one result of a fusion, of `size` bytes in HBM."""
    while result.opcode in RENAMED:
        result = fused.instructions[result.operands[0]]
    inner = program.fused(result)
    if inner is not None and inner.root.opcode != "tuple":
        return _stored_by_fusion(program, inner, inner.root, size)
    if result.opcode == SCATTER and fused.instructions[result.operands[0]].opcode == "broadcast":
        return size  # the fusion makes the array that it scatters into
    return _stored(fused, result, size)


def _stored(computation: Computation, result: Instruction, size: float) -> float:
    """Of an array that is updated in place, the bytes of the slices; else all."""
    if result.opcode == UPDATE:
        return min(size, computation.instructions[result.operands[1]].bytes)
    if result.opcode == SCATTER:
        return min(size, _scattered(computation, result))
    return size


def _scattered(computation: Computation, scatter: Instruction) -> float:
    """The bytes that a scatter is given; infinity if it updates several arrays at once."""
    _, *rest = scatter.operands
    return computation.instructions[rest[-1]].bytes if len(rest) == 2 else math.inf
