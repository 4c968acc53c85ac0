"""How many bytes the collectives of a compiled program send from each chip.

A ring of n chips sends from each of them, for an array of b bytes,

    all-gather          b (n - 1) / n     of the gathered array
    reduce-scatter      b (n - 1) / n     of the array before it is divided
    all-to-all          b (n - 1) / n
    all-reduce        2 b (n - 1) / n     which is a reduce-scatter and an all-gather
    collective-permute  b

each as often as it runs. Three forms that the compiler for TPUs gives them are not what they seem:

- A fusion that is called `all-reduce-scatter` has an all-reduce inside, and is a reduce-scatter.
- A collective that runs beside other work stands in several fusions, one for each piece of that work.
  All of them have the same `chain_id`, and together they are one collective.
- An `all-gather` with the attribute `async_collective_name` does not run beside other work. The compiler
  had given it a start and an end, found nothing to run in between, and made one operation of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pergrad.lab.bench.compiled.hlo import Array, Computation, Instruction, Program, parse
from pergrad.lab.bench.compiled.loops import Call, rounds

KINDS = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "collective-permute")
# How often a chip sends the bytes of the whole array, with n chips: times (n - 1) / n.
SENT = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
SCATTERS = "all-reduce-scatter"  # the first part of the name of such a fusion
CHAIN = re.compile(r'chain_id="(\d+)"')
# `replica_groups=mesh['x'=4,'y'=2] {'y'}`, `replica_groups=[4,2]<=[8]` or `replica_groups={{0,1},{2,3}}`
OF_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
AXIS = re.compile(r"'([^']*)'(?:=(\d+))?")
IN_ORDER = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")


@dataclass(frozen=True)
class Sent:
    """A collective: its kind, how often it runs, and what it sends from each chip in all runs.

    It sends so many `numbers`, of so many `bytes`. `arrays` are those that it makes. `is_async` says
    whether it runs beside other work. `chain` is the name of its chain, empty if it stands in one place.
    """

    kind: str
    arrays: tuple[Array, ...]
    times: int
    bytes: float
    numbers: float
    is_async: bool
    chain: str


def collectives(text: str) -> list[Sent]:
    """All collectives of a compiled program. One in a loop counts as often as the loop runs."""
    program = parse(text)
    found = list(_of_call(Call(program, program.computations[program.entry], ()), 1))
    chains: dict[str, Sent] = {}
    for one in found:  # pieces of a chain in an inner loop belong to a collective outside of that loop
        if one.chain and (one.chain not in chains or one.times < chains[one.chain].times):
            chains[one.chain] = one
    return [*(one for one in found if not one.chain), *chains.values()]


def _of_call(call: Call, times: int) -> Iterator[Sent]:
    for instruction in call.computation:
        if instruction.opcode == "while":
            found = rounds(call, instruction)
            often = times * (1 if found.number is None else found.number)
            yield from _of_call(Call(call.program, found.body, (found.carried,)), often)
        elif instruction.opcode == "conditional":
            names = [name for own in instruction.called.values() for name in own]
            branches = [
                list(_of_call(Call(call.program, call.program.computations[name], ()), times))
                for name in names
                if name in call.program.computations
            ]
            yield from max(branches, key=lambda own: sum(one.bytes for one in own), default=[])
        else:
            for one in _inside(call.program, instruction):
                yield _sent(one, instruction, times)


def _inside(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """The collectives that an instruction is or, if it calls computations, has inside."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        yield instruction
    elif instruction.opcode in ("fusion", "call", "async-start"):
        for name in instruction.called.get("calls", ()) + instruction.called.get("to_apply", ()):
            computation: Computation = program.computations[name]
            for one in computation:
                yield from _inside(program, one)


def _sent(one: Instruction, outer: Instruction, times: int) -> Sent:
    kind = one.opcode.removesuffix("-start")
    has_started = one.opcode.endswith("-start")
    # The start of a collective has its operands before its results.
    arrays = one.arrays[1:2] if has_started else one.arrays
    number = _group_size(one)
    names = "".join(name for own in outer.called.values() for name in own)
    if kind == "collective-permute":
        often = 1
    elif kind == "reduce-scatter":
        often = number - 1
    else:
        often = (1 if names.startswith(SCATTERS) else SENT[kind]) * (number - 1) / number
    chain = CHAIN.search(one.attributes)
    is_async = has_started or chain is not None
    kind = "reduce-scatter" if names.startswith(SCATTERS) else kind
    sent, numbers = sum(array.bytes for array in arrays), sum(array.elements for array in arrays)
    often *= times
    return Sent(kind, arrays, times, often * sent, often * numbers, is_async, chain[0] if chain else "")


def _group_size(one: Instruction) -> int:
    """How many chips take part in a collective together."""
    if found := OF_MESH.search(one.attributes):
        sizes = dict(AXIS.findall(found[1]))
        size = 1
        for name, _ in AXIS.findall(found[2]):
            size *= int(sizes[name])
        return size
    if found := IN_ORDER.search(one.attributes):
        return int(found[1])
    found = LISTED.search(one.attributes)
    return len(found[1].split(",")) if found else 1
