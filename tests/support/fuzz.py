"""Runs many random programs, one line each in a log: `python -m tests.support.fuzz --programs 1000`.

A program is made from its seed alone: `python -m tests.support.fuzz --first-seed 17 --programs 1` runs
number 17 again. Seeds that the log already has are not run again, so that a long run can be stopped and
continued.
With other parts in `programs` a seed makes another program: begin a new log then. A program that is
wrong is reduced to a simpler one that is wrong, too.
"""

import argparse
import functools
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import jax

from tests.support import strict  # noqa: F401 (it sets JAX up)
from tests.support.programs import RandomProgram, check, draw, reduced

CLEARED_EVERY = 50  # programs, after which what JAX keeps of them is forgotten


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="where the lines go; by default they are printed alone")
    options = parser.parse_args()
    warnings.simplefilter("error")
    done = _seeds(options.log)
    counts: Counter[str] = Counter()
    seeds = range(options.first_seed, options.first_seed + options.programs)
    for number, seed in enumerate(seed for seed in seeds if seed not in done):
        start = time.perf_counter()
        program = draw(seed)
        outcome = _outcome(program)
        seconds = time.perf_counter() - start
        kind = outcome if outcome in ("ok", "not finite", "badly conditioned") else "wrong"
        counts[kind] += 1
        lines = [f"{seed}\t{outcome}\t{seconds:.2f} s\t{program}"]
        if kind == "wrong":
            simplest = reduced(program, functools.partial(_fails_alike, outcome))
            lines.append(f"#\t{_outcome(simplest)}\treduced\t{simplest!r}")
        _write(lines, options.log)
        if number % CLEARED_EVERY == 0:
            jax.clear_caches()
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing to do")
    sys.exit(counts["wrong"] > 0)


def _outcome(program: RandomProgram) -> str:
    """What `check` says, or its error on one line."""
    try:
        return check(program)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = re.sub(r"\s+", " ", str(error))[:300]
        return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {text}"


def _fails_alike(outcome: str, program: RandomProgram) -> bool:
    """Whether a program has the same kind of error as one with this outcome."""
    return _outcome(program).split(" ")[0] == outcome.split(" ")[0]


def _seeds(log: Path | None) -> set[int]:
    """The seeds that the log has."""
    lines = log.read_text().splitlines() if log and log.exists() else []
    return {int(line.split("\t")[0]) for line in lines if line[:1].isdigit()}


def _write(lines: list[str], log: Path | None) -> None:
    text = "\n".join(lines) + "\n"
    if log is None:
        print(text, end="", flush=True)
    else:
        with log.open("a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
