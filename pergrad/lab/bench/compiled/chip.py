"""What the meter asks of a chip: how long an instruction takes, and how many bytes it moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pergrad.lab.bench.compiled.hlo import Computation, Instruction, Program

# Instructions that name, bundle or await what others have made. They take no time.
FREE = {
    *("parameter", "constant", "iota", "partition-id", "replica-id"),
    *("tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all"),
    *("copy-done", "slice-done", "async-done", "async-update"),
}
COPIES = {"copy", "transpose", "reshape", "broadcast", "concatenate", "slice", "pad"}
# What a fusion of copies may have inside besides.
BUNDLED = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}


@dataclass(frozen=True)
class Work:
    """What one run of an instruction costs on a chip.

    `kind` is the kind of instruction, such as "product" or "copy". `estimated_seconds` is the compiler's
    own estimate, 0 if there is none. `is_known` is False if `seconds` leaves out a part of the work.
    """

    kind: str
    seconds: float
    hbm_bytes: float
    estimated_seconds: float = 0.0
    is_known: bool = True


class Chip(Protocol):
    """A chip that programs are compiled for."""

    about_time: ClassVar[str]
    """What the time of a program is, in words for those who read a table."""
    has_estimates: ClassVar[bool]
    """Whether the compiler estimates how long instructions take."""

    @property
    def kind(self) -> str:
        """What JAX calls the chip."""
        ...

    @property
    def memory(self) -> float:
        """The bytes of its memory."""
        ...

    def topology(self) -> dict[str, str]:
        """What `jax.experimental.topologies.get_topology_desc` is told about the chip."""
        ...

    def is_free(self, instruction: Instruction) -> bool:
        """Whether nothing runs on the chip for an instruction."""
        ...

    def work(self, program: Program, computation: Computation, instruction: Instruction) -> Work:
        """What an instruction of `computation` costs, if it is not free."""
        ...


def opcodes(program: Program, instruction: Instruction) -> Iterator[str]:
    """The opcode of an instruction, or all of those inside of a fusion."""
    fused = program.fused(instruction)
    if fused is None:
        yield instruction.opcode
    else:
        for inner in fused:
            yield from opcodes(program, inner)


def is_copy(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction does nothing but move numbers."""
    return set(opcodes(program, instruction)) <= COPIES | BUNDLED
