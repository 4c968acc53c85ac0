"""The time that a compiled program takes on a chip: of all its instructions, each as often as it runs.

The compiler schedules a program's instructions one after the other and estimates the cycles of most.
The sum of the estimates over all rounds of all loops is the time of the program, with one correction.
The estimates are good for matrix products and convolutions, which decide how the compiler tiles them.
For instructions that only move or combine numbers (copies, elementwise loops, reductions) they can be
many times too high. These instructions run at the speed of the memory, so their time is that of

- the bytes that they read and write in HBM, at the rate that the compiler gives large elementwise loops;
- or their arithmetic, or their copying on the chip, if that takes longer.

The same is the time of an instruction that has no estimate (some gathers, scatters and sorts).
Copies that the compiler has put beside other work take no time of their own; their bytes count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pergrad.lab.bench.compiled.chips import Chip
from pergrad.lab.bench.compiled.hlo import Instruction, Program
from pergrad.lab.bench.compiled.loops import Call, rounds
from pergrad.lab.bench.compiled.traffic import traffic

ESTIMATE = '"estimated_cycles":'

# Instructions that name, bundle or await what others have made. They take no time.
FREE = {
    *("parameter", "constant", "iota", "partition-id", "replica-id"),
    *("tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all"),
    *("copy-done", "slice-done", "async-done", "async-update"),
}
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
COPIES = {"copy", "transpose", "reshape", "broadcast", "concatenate", "slice", "pad"}
# What a fusion of copies may have inside besides.
BUNDLED = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}

# What the vector unit, with its 8 x 128 lanes, does in a cycle on arrays that lie on the chip: rough
# numbers for a copy and for a sum of squares, which no chip has confirmed. For arrays in HBM they do not
# matter, because the memory is slower.
COPIED_BYTES_A_CYCLE = 3000
NUMBERS_A_CYCLE = 1800

SMALL = 4096  # bytes; smaller results are made in next to no time, whatever makes them


@dataclass(frozen=True)
class Line:
    """A scheduled instruction: what kind it is, how often it runs, and its cost in all of its runs."""

    instruction: Instruction
    kind: str
    times: int
    seconds: float
    estimated_seconds: float
    hbm_bytes: float
    is_known: bool


@dataclass(frozen=True)
class Cost:
    """What a program costs on a chip: the cost of its lines, which are added up."""

    lines: tuple[Line, ...]

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    @property
    def estimated_seconds(self) -> float:
        """The time if all of the compiler's estimates are taken as they are."""
        return sum(line.estimated_seconds for line in self.lines)

    @property
    def hbm_bytes(self) -> float:
        return sum(line.hbm_bytes for line in self.lines)

    @property
    def by_kind(self) -> dict[str, float]:
        """The seconds of each kind of instruction."""
        found: dict[str, float] = {}
        for line in self.lines:
            found[line.kind] = found.get(line.kind, 0.0) + line.seconds
        return found

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names of instructions that should have an estimate but have none, and of loops whose
        number of rounds is not known. The former count by their traffic alone, the latter once."""
        return tuple(line.instruction.name for line in self.lines if not line.is_known)


def cost(program: Program, chip: Chip) -> Cost:
    """What a program costs on a chip."""
    entry = program.computations[program.entry]
    return Cost(tuple(_lines(Call(program, entry, ()), chip, 1)))


def _lines(call: Call, chip: Chip, times: int) -> Iterator[Line]:
    """All that is scheduled in a computation that runs `times` times."""
    program = call.program
    for instruction in call.computation:
        match instruction.opcode:
            case "while":
                loop = rounds(call, instruction)
                if loop.number is None:
                    yield Line(instruction, "while", times, 0.0, 0.0, 0.0, is_known=False)
                body = Call(program, loop.body, (loop.carried,))
                yield from _lines(body, chip, times * (1 if loop.number is None else loop.number))
            case "call" | "conditional":
                branches = [
                    tuple(_lines(Call(program, program.computations[name], ()), chip, times))
                    for names in instruction.called.values()
                    for name in names
                    if name in program.computations
                ]
                # Which branch runs is not known before the program does: the one that takes longest.
                yield from max(branches, key=lambda lines: Cost(lines).seconds)
            case _ if not _is_free(instruction):
                yield _line(call, instruction, chip, times)


def _is_free(instruction: Instruction) -> bool:
    return instruction.opcode in FREE or (
        instruction.opcode == "custom-call"
        and any(f'custom_call_target="{name}"' in instruction.attributes for name in FREE_CALLS)
    )


def _line(call: Call, instruction: Instruction, chip: Chip, times: int) -> Line:
    program = call.program
    kind = _kind(program, instruction)
    moved = traffic(program, call.computation, instruction)
    cycles = instruction.quoted_number(ESTIMATE)
    estimated = (cycles or 0) / chip.clock
    is_estimated = kind in ESTIMATED.values()
    if kind == "beside":
        seconds = 0.0
    elif is_estimated and cycles is not None:
        seconds = estimated
    else:
        in_memory = moved / (chip.share * chip.bandwidth)
        seconds = max(in_memory, _on_chip(program, instruction, kind) / chip.clock)
    is_known = cycles is not None or not is_estimated or instruction.bytes <= SMALL
    return Line(instruction, kind, times, times * seconds, times * estimated, times * moved, is_known)


def _kind(program: Program, instruction: Instruction) -> str:
    """Which rule gives an instruction its time: the compiler's estimate, or that of memory."""
    if instruction.opcode in BESIDE:
        return "beside"
    inside = set(_opcodes(program, instruction))
    for opcode, kind in ESTIMATED.items():
        if opcode in inside:
            return kind
    return "copy" if inside <= COPIES | BUNDLED else "elementwise"


def _opcodes(program: Program, instruction: Instruction) -> Iterator[str]:
    """The opcode of an instruction, or all of those inside of a fusion."""
    fused = program.fused(instruction)
    if fused is None:
        yield instruction.opcode
    else:
        for inner in fused:
            yield from _opcodes(program, inner)


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
