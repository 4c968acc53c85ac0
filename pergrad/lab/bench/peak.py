"""The most memory that a process has had, with one candidate in it.

    python -m pergrad.lab.bench.peak CASE TASK CANDIDATE

A peak never goes down again, so every candidate has a process of its own. The memory that compiling took
does not count, since the peak is set back before the candidate runs. Parameters, batch and results
count, as do Python and JAX; `before_bytes` says how much memory the process had before the first run.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from pergrad.lab import timing
from pergrad.lab.bench import cases, tasks
from pergrad.lab.errors import LabError

# `ru_maxrss` would not do: Linux includes in it the memory of the parent when it started the child.
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def in_a_process(case: str, task: str, candidate: str) -> dict[str, float]:
    """`peak_bytes` and `before_bytes` of a process of its own; NaN where the system does not say."""
    if not CLEAR.exists():
        return {"peak_bytes": math.nan, "before_bytes": math.nan}
    command = [sys.executable, "-m", "pergrad.lab.bench.peak", case, task, candidate]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        *_, last = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        raise LabError(f"{candidate} in a process of its own: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def of_this_process(workload: cases.Workload, task: tasks.Task, candidate: str) -> dict[str, float]:
    """Compiles a candidate and runs it twice; the first results are still there in the second run."""
    args = workload.params, workload.batch
    executable = timing.compile_one(tasks.make(candidate, workload.loss, task), *args)
    jax.clear_caches()
    gc.collect()
    _give_back()
    before = _status("VmRSS")
    CLEAR.write_text("5")  # sets the peak to what is there now
    for _ in range(2):
        jax.block_until_ready(executable.run(*args))
    return {"peak_bytes": _status("VmHWM"), "before_bytes": before}


def _give_back() -> None:
    """Gives memory that is free, but kept by the C library, back to the system."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(key: str) -> float:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:")]
    return 1024.0 * int(line.split()[1])


if __name__ == "__main__":
    case, task, candidate = sys.argv[1:]
    workload = cases.workload(case)
    print(json.dumps(of_this_process(workload, workload.task(task), candidate)))
