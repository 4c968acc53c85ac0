"""How often a loop of a compiled program runs.

The compiler writes the number of rounds beside many loops, `"known_trip_count":{"n":"12"}`. Of the
others we run the counter: a loop carries a tuple, whose integers are known before the first round if
they are constants; its condition says whether there is another round; and its body says which integers
the next round begins with. All that has to be evaluated for this is arithmetic on single integers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from pergrad.lab.bench.compiled.hlo import Computation, Instruction, Program

# An integer, or a tuple; None is what is not known. A truth value is 0 or 1.
Value = int | tuple["Value", ...] | None

SAME = {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier"}
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "minimum": min,
    "maximum": max,
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
KNOWN = '"known_trip_count":{"n":'
MOST_ROUNDS = 100_000  # after so many the loop is given up as one whose number of rounds is not known


@dataclass
class Call:
    """A computation and the values of its parameters; evaluates its instructions, each once."""

    program: Program
    computation: Computation
    arguments: tuple[Value, ...]
    known: dict[str, Value] = field(default_factory=dict)

    def value(self, name: str) -> Value:
        if name not in self.known:
            self.known[name] = None  # what an instruction is while it waits for its operands
            self.known[name] = self._evaluate(self.computation.instructions[name])
        return self.known[name]

    def result(self) -> Value:
        return self.value(self.computation.root.name)

    def _evaluate(self, instruction: Instruction) -> Value:
        if not instruction.is_tuple and instruction.elements != 1:
            return None
        opcode = instruction.opcode
        if opcode == "constant":
            return _constant(instruction.inside)
        if opcode == "parameter":
            number = int(instruction.inside)
            return self.arguments[number] if number < len(self.arguments) else None
        values = tuple(self.value(operand) for operand in instruction.operands)
        match opcode, values:
            case "tuple", _:
                return values
            case "get-tuple-element", (tuple() as elements,):
                return elements[int(instruction.attribute("index"))]
            case "compare", (int() as left, int() as right):
                return int(COMPARISONS[instruction.attribute("direction")](left, right))
            case _, (int() as left, int() as right) if opcode in ARITHMETIC:
                return ARITHMETIC[opcode](left, right)
            case _, (value, *_) if opcode in SAME:
                return value
        fused = self.program.fused(instruction)
        return None if fused is None else Call(self.program, fused, values).result()


def _constant(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if text.removeprefix("-").isdecimal() else None


@dataclass(frozen=True)
class Rounds:
    """How often a loop runs, None if that is not known, and what its body is given every time.

    In `carried`, elements of the tuple that the body changes are not known.
    """

    number: int | None
    body: Computation
    carried: Value


def rounds(call: Call, loop: Instruction) -> Rounds:
    """The rounds of a `while`, one of the instructions of `call`."""
    program = call.program
    (condition,), (body,) = (
        [program.computations[name] for name in loop.called[key]] for key in ("condition", "body")
    )
    start = call.value(loop.operands[0])
    following = Call(program, body, (start,)).result()
    carried = _unchanged(start, following)
    number = loop.quoted_number(KNOWN)
    if number is not None:
        return Rounds(number, body, carried)
    number, now = 0, start
    while (goes_on := Call(program, condition, (now,)).result()) == 1 and number < MOST_ROUNDS:
        number += 1
        now = following if number == 1 else Call(program, body, (now,)).result()
    return Rounds(number if goes_on == 0 else None, body, carried)


def _unchanged(before: Value, after: Value) -> Value:
    if isinstance(before, tuple) and isinstance(after, tuple):
        return tuple(a if a == b else None for a, b in zip(before, after, strict=True))
    return None
