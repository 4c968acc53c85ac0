"""Time several functions of the same arguments, side by side.

The speed of a machine drifts by more than the differences we look for. So all candidates are
compiled first. Then they take turns, in an order that changes from round to round, so that no
candidate always follows the same neighbour. Each is judged by its fastest run, and the number to read
is the ratio of its time to that of the first candidate.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

LEAST = 3  # timed runs of each candidate: a minimum over fewer would be unfair to slow ones

Say = Callable[[str], None]  # is given pieces of text, not always whole lines


def to_stderr(text: str) -> None:
    """Tells how far the work is, at the terminal."""
    print(text, end="", file=sys.stderr, flush=True)


def silent(text: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Executable:
    """A candidate that is ready to run, and what it took to compile it.

    `temp_bytes` is the memory that XLA sets aside for intermediate results; arguments and results do not
    count. It is NaN where XLA does not say. All three numbers are NaN if nothing is compiled (PyTorch).

    `tried` has the seconds of one run of each of the candidates among which this one was the fastest. It
    is empty where there was no choice.
    """

    run: Callable[..., Any]
    lower_seconds: float
    compile_seconds: float
    temp_bytes: float
    tried: Mapping[str, float] = field(default_factory=dict)

    @property
    def build_seconds(self) -> float:
        """Tracing, lowering and compiling together."""
        return self.lower_seconds + self.compile_seconds


@dataclass(frozen=True)
class Result:
    """An executable and the seconds of each of its timed runs."""

    name: str
    executable: Executable
    seconds: tuple[float, ...]

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        low, median, high = np.percentile(self.seconds, [25, 50, 75])
        return float(low), float(median), float(high)

    def ratios(self, floor: Result) -> dict[str, float]:
        """Time, temporary memory and build time as multiples of those of `floor`; NaN if that is 0."""
        return {
            "time": self.minimum / floor.minimum,
            "memory": self.executable.temp_bytes / (floor.executable.temp_bytes or math.nan),
            "compile": self.executable.build_seconds / floor.executable.build_seconds,
        }


def compile_one(candidate: Callable[..., Any], *args: Any) -> Executable:
    """Compile a candidate for `args`. JAX is quicker if it has compiled parts of it before."""
    start = time.perf_counter()
    lowered = jax.jit(candidate).lower(*args)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    return Executable(
        run=compiled,
        lower_seconds=middle - start,
        compile_seconds=end - middle,
        temp_bytes=math.nan if memory is None else memory.temp_size_in_bytes,
    )


def compile_afresh(
    name: str, candidate: Callable[..., Any], *args: Any, say: Say = to_stderr
) -> Executable:
    """Compile a candidate from empty caches, so that one candidate does not speed up the next."""
    jax.clear_caches()
    executable = compile_one(candidate, *args)
    say(f"  compiled {name} in {executable.build_seconds:.1f} s\n")
    return executable


def fastest(
    candidates: Iterable[tuple[str, Callable[..., Any]]], *args: Any, say: Say = to_stderr
) -> tuple[str, Executable]:
    """The fastest of candidates of rising size, which are tried until they get slower (`past_best`)."""
    tried: dict[str, float] = {}
    best = None
    for name, candidate in candidates:
        executable = compile_afresh(name, candidate, *args, say=say)
        tried[name], _ = _run(executable, args)
        if tried[name] <= 2 * min(tried.values()):  # else one run is enough to see that it is slow
            tried[name] = min(_run(executable, args)[0] for _ in range(2))
        say(f"  {name} takes {1e3 * tried[name]:.0f} ms\n")
        if tried[name] == min(tried.values()):
            best = name, executable
        if past_best(tried.values()):
            break
    if best is None:
        raise ValueError("there is no candidate")
    return best[0], replace(best[1], tried=tried)


def past_best(seconds: Iterable[float]) -> bool:
    """Whether larger candidates need not be tried: the last two were slower than the fastest.

    The candidates do not take turns, so small differences mean nothing: a candidate counts as slower if
    it takes more than 1.1 times as long as the fastest. One slower candidate may lie between two faster
    ones, because a size can fit a cache or the cores badly.
    """
    tried = list(seconds)
    return len(tried) > 2 and min(tried[-2:]) > 1.1 * min(tried)


def time_all(
    executables: Mapping[str, Executable],
    *args: Any,
    rounds: int = 15,
    budget: float = 10.0,
    say: Say = to_stderr,
) -> list[Result]:
    """Run each executable once to warm up, then let them take turns for `rounds` rounds.

    An executable that has used up its `budget` of seconds sits out the remaining rounds, but not before
    it has had `LEAST` timed runs, or one run if that alone takes the whole budget. So `seconds[i]` of
    every result was measured in round i.

    The results of a run are kept until the executable's next run is over, as a training loop keeps them.
    If they were dropped at once, the memory of large results would go back to the operating system after
    some runs and not after others, and the next run would pay for paging it in again.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    spent = {name: _run(executable, args)[0] for name, executable in executables.items()}
    kept: dict[str, Any] = {}
    timed: dict[str, list[float]] = {name: [] for name in executables}
    say("  timing ")
    for index in range(rounds):
        for name in _order(list(executables), index):
            least = LEAST if min(timed[name], default=0) < budget else 1
            if spent[name] > budget and len(timed[name]) >= least:
                continue
            seconds, kept[name] = _run(executables[name], args)
            timed[name].append(seconds)
            spent[name] += seconds
        say(".")
    say("\n")
    return [Result(name, executables[name], tuple(seconds)) for name, seconds in timed.items()]


def ratio(
    candidate: Callable[..., Any], floors: Sequence[Callable[..., Any]], *args: Any, rounds: int = 5
) -> float:
    """The time of a candidate as a multiple of that of the fastest of `floors`, by their fastest runs.

    All of them are jitted.
    """
    functions = {"candidate": candidate} | {f"floor {i}": floor for i, floor in enumerate(floors)}
    executables = {name: compile_one(function, *args) for name, function in functions.items()}
    first, *others = time_all(executables, *args, rounds=rounds, say=silent)
    return first.minimum / min(result.minimum for result in others)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [list(header), ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _order(names: list[str], index: int) -> list[str]:
    """The names as they run in round `index`: rotated by one each round, reversed in every second."""
    turn = index % len(names)
    rotated = names[turn:] + names[:turn]
    return rotated[::-1] if index % 2 else rotated


def _run(executable: Executable, args: tuple[Any, ...]) -> tuple[float, Any]:
    """The seconds of one run, and what it returns."""
    start = time.perf_counter()
    results = jax.block_until_ready(executable.run(*args))
    return time.perf_counter() - start, results
