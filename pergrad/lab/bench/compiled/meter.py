"""The time that a compiled program takes on a chip: of all its instructions, each as often as it runs.

XLA schedules the instructions of a program one after the other. How long one of them takes, the chip
says (`tpu`, `gpu`). Their sum over all rounds of all loops is the time of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pergrad.lab.bench.compiled.chip import Chip
from pergrad.lab.bench.compiled.hlo import Instruction, Program
from pergrad.lab.bench.compiled.loops import Call, rounds


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
        """The names of instructions whose time leaves out a part of their work, and of loops whose
        number of rounds is not known. The former count by their traffic alone, the latter once."""
        return tuple(line.instruction.name for line in self.lines if not line.is_known)


def cost(program: Program, chip: Chip, branch: Callable[..., tuple[Line, ...]] = max) -> Cost:
    """What a program costs on a chip.

    Which branch of a conditional runs is not known before the program does. It counts as the branch that
    takes longest, or with `branch=min` as the one that takes the least time.
    """
    entry = program.computations[program.entry]
    return Cost(tuple(_lines(Call(program, entry, ()), chip, 1, branch)))


def _lines(
    call: Call, chip: Chip, times: int, branch: Callable[..., tuple[Line, ...]]
) -> Iterator[Line]:
    """All that is scheduled in a computation that runs `times` times."""
    program = call.program
    for instruction in call.computation:
        match instruction.opcode:
            case "while":
                loop = rounds(call, instruction)
                if loop.number is None:
                    yield Line(instruction, "while", times, 0.0, 0.0, 0.0, is_known=False)
                body = Call(program, loop.body, (loop.carried,))
                number = 1 if loop.number is None else loop.number
                yield from _lines(body, chip, times * number, branch)
            case "call" | "conditional":
                branches = [
                    tuple(_lines(Call(program, program.computations[name], ()), chip, times, branch))
                    for names in instruction.called.values()
                    for name in names
                    if name in program.computations
                ]
                yield from branch(branches, key=lambda lines: Cost(lines).seconds)
            case _ if not chip.is_free(instruction):
                yield _line(call, instruction, chip, times)


def _line(call: Call, instruction: Instruction, chip: Chip, times: int) -> Line:
    work = chip.work(call.program, call.computation, instruction)
    return Line(
        instruction=instruction,
        kind=work.kind,
        times=times,
        seconds=times * work.seconds,
        estimated_seconds=times * work.estimated_seconds,
        hbm_bytes=times * work.hbm_bytes,
        is_known=work.is_known,
    )
