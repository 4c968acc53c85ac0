"""The work of an instruction on a TPU.

The compiler schedules a program's instructions one after the other and estimates the cycles of most.
The estimates are good for matrix products and convolutions, which decide how the compiler tiles them.
For instructions that only move or combine numbers (copies, elementwise loops, reductions) they can be
many times too high. These instructions run at the speed of the memory, so their time is that of

- the bytes that they read and write in HBM, at the rate that the compiler gives large elementwise loops;
- or their arithmetic, or their copying on the chip, if that takes longer.

The same is the time of an instruction that has no estimate (some gathers, scatters and sorts).
Copies that the compiler has put beside other work take no time of their own; their bytes count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pergrad.lab.bench.compiled.chip import BUNDLED, COPIES, FREE, Work, is_copy, opcodes
from pergrad.lab.bench.compiled.hlo import Computation, Instruction, Program
from pergrad.lab.bench.compiled.traffic import traffic

ESTIMATE = '"estimated_cycles":'

FREE_CALLS = (  # targets of custom calls that are notes of the compiler to itself
    *("AllocateBuffer", "ConcatBitcast", "Sharding"),
    *("AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked"),
)
BESIDE = {"copy-start", "slice-start", "async-start"}  # run beside the instructions after them
# Instructions whose estimates are used, by what a fusion that has one of them inside is called.
ESTIMATED = {
    **{"convolution": "product", "dot": "product"},
    **{name: name for name in ("scatter", "gather", "sort", "reduce-window", "custom-call")},
}

# What the vector unit, with its 8 x 128 lanes, does in a cycle on arrays that lie on the chip: rough
# numbers for a copy and for a sum of squares, which no chip has confirmed. For arrays in HBM they do not
# matter, because the memory is slower.
COPIED_BYTES_A_CYCLE = 3000
NUMBERS_A_CYCLE = 1800

SMALL = 4096  # bytes; smaller results are made in next to no time, whatever makes them


@dataclass(frozen=True)
class Tpu:
    """One chip, with one core that programs run on.

    `group` is the smallest group of such chips that the compiler has a description of. `peak` is how
    many operations a second products in bfloat16 have at most, `bandwidth` how many bytes a second the
    memory has, and `memory` how many bytes.

    `clock`, the cycles a second, follows from them: a chip has `units` matrix units of `side` x `side`
    multipliers, each of which multiplies and adds once a cycle, so
    peak = units x side^2 x 2 x clock.

    `share` is what large elementwise loops get of the bandwidth by the compiler's own estimate: the
    bytes of `2 * x + 1`, read and written, divided by its estimated time and by `bandwidth`.
    """

    about_time: ClassVar[str] = (
        "time: the compiler's estimates of products, and the bytes of other instructions"
    )
    has_estimates: ClassVar[bool] = True

    kind: str
    group: str
    units: int
    side: int
    peak: float
    bandwidth: float
    memory: float
    share: float

    @property
    def clock(self) -> float:
        return self.peak / (self.units * self.side**2 * 2)

    def topology(self) -> dict[str, str]:
        return {"topology_name": self.group}

    def is_free(self, instruction: Instruction) -> bool:
        return instruction.opcode in FREE or (
            instruction.opcode == "custom-call"
            and any(f'custom_call_target="{name}"' in instruction.attributes for name in FREE_CALLS)
        )

    def work(self, program: Program, computation: Computation, instruction: Instruction) -> Work:
        kind = _kind(program, instruction)
        moved = traffic(program, computation, instruction)
        cycles = instruction.quoted_number(ESTIMATE)
        estimated = (cycles or 0) / self.clock
        is_estimated = kind in ESTIMATED.values()
        if kind == "beside":
            seconds = 0.0
        elif is_estimated and cycles is not None:
            seconds = estimated
        else:
            in_memory = moved / (self.share * self.bandwidth)
            seconds = max(in_memory, _on_chip(program, instruction, kind) / self.clock)
        is_known = cycles is not None or not is_estimated or instruction.bytes <= SMALL
        return Work(kind, seconds, moved, estimated, is_known)


def _kind(program: Program, instruction: Instruction) -> str:
    """Which rule gives an instruction its time: the compiler's estimate, or that of memory."""
    if instruction.opcode in BESIDE:
        return "beside"
    inside = set(opcodes(program, instruction))
    for opcode, kind in ESTIMATED.items():
        if opcode in inside:
            return kind
    return "copy" if is_copy(program, instruction) else "elementwise"


def _on_chip(program: Program, instruction: Instruction, kind: str) -> float:
    """The cycles of an instruction apart from HBM: of copying, or of arithmetic."""
    if kind == "copy":
        return instruction.bytes / COPIED_BYTES_A_CYCLE
    return _numbers(program, instruction) / NUMBERS_A_CYCLE


def _numbers(program: Program, instruction: Instruction) -> int:
    """The most numbers that one operation makes: the instruction itself, or those inside of a fusion."""
    fused = program.fused(instruction)
    if fused is None:
        moves = instruction.opcode in COPIES | BUNDLED | {"iota", "dynamic-update-slice"}
        return 0 if moves else instruction.elements
    return max(_numbers(program, inner) for inner in fused)
