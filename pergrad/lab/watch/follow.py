"""What is new in the directories of runs, since someone looked last.

Whoever looks keeps a position for each run: a byte offset in `metrics.jsonl`, always after a whole line,
and a checksum of the bytes before it. So nothing is kept here, and any number of pages may look. If a
run goes on from a checkpoint, it cuts off the steps after it and writes others in their place. Then the
checksum differs, or the file is shorter than the offset, and the rows are told anew from the first one.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pergrad.lab.config import Train
from pergrad.lab.errors import LabError
from pergrad.lab.run import found, records

BUDGET = 1 << 20  # bytes of metrics that one answer has about; whoever looks asks again for the rest
CHECKED = 512  # bytes before the offset that the checksum is of: the last row, or the end of it
START = "0-0"

NUMBERS = ("loss", "tune_loss", "test_loss", "learning_rate", "gradient_norm")


def news(paths: Sequence[Path], since: Mapping[str, Any]) -> dict[str, Any]:
    """The runs in `paths` with their new rows, and the paths in which there is no run yet.

    `since` has the position of each run that was told before, by the path of the run. `more` says that
    there are further rows already.
    """
    runs, waiting, budget = [], [], BUDGET
    for path in paths:
        inside = found.directories(path)
        runs += [run for run in inside if run not in runs]
        if not inside:
            waiting.append(str(path))
    told = []
    for run, name, config in _named(runs):
        own: dict[str, Any] = {"path": str(run), "name": name}
        if isinstance(config, Train):
            position = since.get(str(run), START)
            own |= _options(config) | _rows(run, str(position), budget)
            budget = max(0, budget - own.pop("bytes"))
        else:
            own["problem"] = str(config)
        told.append(own)
    return {"runs": told, "waiting": waiting, "more": any(run.get("more") for run in told)}


def _named(runs: Sequence[Path]) -> list[tuple[Path, str, Train | LabError]]:
    """Each run with its name and its configuration, or with the reason why there is none.

    A run is named by its optimizer and the options in which the runs differ. Runs with equal options
    have their paths in addition.
    """
    configs = [_config(run) for run in runs]
    names = iter(found.names([config for config in configs if isinstance(config, Train)]))
    own = [
        next(names) if isinstance(config, Train) else str(run)
        for run, config in zip(runs, configs, strict=True)
    ]
    full = [
        f"{name} ({run})" if own.count(name) > 1 else name for run, name in zip(runs, own, strict=True)
    ]
    return list(zip(runs, full, configs, strict=True))


def _config(run: Path) -> Train | LabError:
    try:
        return found.about(run).config
    except LabError as error:
        return error


def _options(config: Train) -> dict[str, Any]:
    """What the page says of a run beside its name."""
    return {
        "steps": config.steps,
        "optimizer": config.optimizer,
        "learning_rate": config.learning_rate,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "data": config.data,
        "noise_every": config.noise_every,
    }


def _rows(run: Path, position: str, budget: int) -> dict[str, Any]:
    file = run / "metrics.jsonl"
    try:
        with file.open("rb") as metrics:
            offset = _offset(metrics, position)
            lines = _whole_lines(metrics, offset, budget)
            end = offset + len(lines)
            out: dict[str, Any] = {
                "anew": offset == 0,
                "rows": [_row(json.loads(line)) for line in lines.splitlines()],
                "since": f"{end}-{_checksum(metrics, end)}",
                "bytes": len(lines),
                "more": _has_line(metrics, end),
                "seconds": max(0, round(time.time() - file.stat().st_mtime)),
            }
        result = records.read_result(run)
    except FileNotFoundError:
        return {"anew": True, "rows": [], "since": START, "bytes": 0, "state": "not begun"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LabError) as error:
        said = str(error) if isinstance(error, LabError) else f"{file} cannot be read: {error}"
        return {"anew": True, "rows": [], "since": START, "bytes": 0, "problem": said}
    state = "going on" if result is None else "diverged" if result["diverged"] else "done"
    return out | {"state": state}


def _offset(metrics: BinaryIO, position: str) -> int:
    """Where to read on: at the offset, if the bytes before it are what they were; else at the start."""
    offset, _, checksum = position.partition("-")
    if not offset.isdecimal() or int(offset) > metrics.seek(0, 2):
        return 0
    return int(offset) if _checksum(metrics, int(offset)) == checksum else 0


def _checksum(metrics: BinaryIO, offset: int) -> str:
    first = max(0, offset - CHECKED)
    metrics.seek(first)
    return str(zlib.crc32(metrics.read(offset - first)))


def _whole_lines(metrics: BinaryIO, offset: int, budget: int) -> bytes:
    """About `budget` bytes, up to the end of a line. A line without an end is still being written."""
    if not budget:
        return b""
    metrics.seek(offset)
    read = metrics.read(budget) + metrics.readline()
    return read[: read.rfind(b"\n") + 1]


def _has_line(metrics: BinaryIO, offset: int) -> bool:
    metrics.seek(offset)
    return metrics.readline().endswith(b"\n")


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page draws of a row."""
    out: dict[str, Any] = {name: found.number(row[name]) for name in NUMBERS if name in row}
    out |= {"step": row["step"], "examples": row.get("examples")}
    if (noise := found.noise_of(row)) is not None:
        out["noise"] = {
            "scale": found.number(noise.get("noise_scale")),
            "divisor": found.noise_in_divisor(noise),
            "outliers": found.number(noise.get("outliers")),
            "layers": {
                found.layer_name(layer): found.number(noise.get(f"snr{layer}"))
                for layer in found.layers_of(noise)
            },
        }
    if row.get("outliers"):
        out["outliers"] = row["outliers"]
    return out
