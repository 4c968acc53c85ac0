"""A run's directory: what was asked, what came out, and where to go on.

    config.json     the configuration, the data's digest, versions and commit, before the first step
    metrics.jsonl   one object a step; no times, so that it is the same whenever it is made
    checkpoints/    parameters, states and keys after some steps, with checksums
    damaged/        checkpoints that were found damaged
    result.json     the end of a finished run

The metrics of a step are on disk before the checkpoint after that step, so a run that goes on from a
checkpoint cuts `metrics.jsonl` after its step. Files are written under another name and moved into
place, so that a file with its own name is always whole. A lock keeps a second run out. Where several
processes are one run, the first of them writes the files, and all of them write the checkpoints
together.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.lab import config as configs
from pergrad.lab.errors import LabError
from pergrad.lab.files import disk_errors, replace, to_json
from pergrad.lab.run import devices
from pergrad.lab.run.checkpoints import UNFINISHED, Checkpoints

VERSIONED = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax-checkpoint")


RESULT = {"steps", "diverged", "train_loss", "tune_loss", "test_loss"}  # what `result.json` has


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that compute, and pergrad's commit if there is one."""
    out = {"python": platform.python_version(), "pergrad": _commit() or "unknown commit"}
    return out | {name: importlib.metadata.version(name) for name in VERSIONED}


def _commit() -> str | None:
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():  # installed, perhaps inside another project's repository
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path, data: Any) -> None:
    """Writes data as a whole file, with null for numbers that are not finite."""
    with disk_errors(path):
        replace(path, (to_json(data, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LabError(
            f"{path} cannot be read ({error}). Choose another directory, or delete it."
        ) from error


def read_result(path: Path) -> dict[str, Any] | None:
    """The result of the run in `path`, or None if it is not done."""
    file = path / "result.json"
    if not file.exists():
        return None
    result = read_json(file)
    if not isinstance(result, dict) or not result.keys() >= RESULT:
        raise LabError(f"{file} is not the result of a run. Delete it, to go on from a checkpoint.")
    return result


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def to_stderr(line: str) -> None:
    """Prints a line to stderr."""
    print(line, file=sys.stderr)


def plain(x: Any) -> Any:
    """A number as JSON has it: None if it is not finite."""
    x = float(x)
    return x if np.isfinite(x) else None


def directory(root: Path, config: configs.Train) -> Path:
    """The directory of a configuration's run, such as `root/adam-1a2b3c4d5e`."""
    text = json.dumps(configs.to_json(config), sort_keys=True)
    return root / f"{config.optimizer}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


class Run:
    """A run's directory, open in the run's process, or in each of its processes."""

    def __init__(
        self,
        path: Path,
        config: configs.Train,
        data_digest: str,
        data_name: str,
        say: Callable[[str], None] = to_stderr,
    ) -> None:
        self.path, self._say = path, say
        about = {"config": configs.to_json(config), "data": {"name": data_name, "digest": data_digest}}
        self.digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        self._checkpoints = Checkpoints(path / "checkpoints", self.digest, config.keep)
        with contextlib.ExitStack() as opened:
            opened.enter_context(contextlib.closing(self._checkpoints))
            if devices.is_first():
                self._open_files(opened, about)
            self._opened = opened.pop_all()

    def _open_files(self, opened: contextlib.ExitStack, about: Any) -> None:
        """Opens the files that the first process alone writes."""
        path = self.path
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context((path / ".lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LabError(
                f"another process is running in {path}. Wait for it, or choose another --run-dir."
            ) from error
        file = path / "config.json"
        if file.exists():
            self._check_same(read_json(file), about)
        elif strangers := [p.name for p in path.iterdir() if p.name[0] != "."]:
            raise LabError(
                f"{path} is not a run's directory: it has {strangers[0]!r} and no config.json. "
                "Choose another --run-dir."
            )
        else:
            write_json(file, about | {"versions": versions()})
        with disk_errors(path):
            self._metrics = opened.enter_context((path / "metrics.jsonl").open("a+b"))

    def _check_same(self, old: Any, new: Any) -> None:
        parts = [old.get("config"), old.get("data")] if isinstance(old, dict) else [old]
        if not all(isinstance(part, dict) for part in parts):
            raise LabError(
                f"{self.path / 'config.json'} is not a run's configuration. Choose another --run-dir."
            )
        if changed := configs.differences(old["config"], new["config"]):
            raise LabError(
                f"{self.path} has a run with another configuration: {'; '.join(changed)}. "
                "Choose another --run-dir, or ask for the same run to continue it."
            )
        if old["data"] != new["data"]:
            raise LabError(
                f"the data has changed since the run in {self.path} began, from "
                f"{old['data'].get('name')} to {new['data']['name']}. Choose another --run-dir."
            )

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of the run, or None if it is not done."""
        return read_result(self.path)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._flush()
        write_json(self.path / "result.json", dict(result))

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of all steps until now."""
        self._flush()
        return read_metrics(self.path)

    def log(self, rows: list[dict[str, Any]]) -> None:
        if not devices.is_first():
            return
        with disk_errors(self.path / "metrics.jsonl"):
            self._metrics.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            self._metrics.flush()  # for whoever watches the file

    def save(self, step: int, state: Any) -> None:
        """Saves the state after `step` steps. All metrics until now are written to disk first."""
        metrics = ""
        if devices.is_first():
            self._flush()
            metrics = _checksum(self._lines()[:step])
        self._checkpoints.save(step, state, metrics)

    @property
    def saved(self) -> list[int]:
        """The steps of which there are checkpoints."""
        return self._checkpoints.steps

    def restore(self, like: Any) -> tuple[int, Any]:
        """The number of steps done and the state after them; metrics of later steps are cut off."""
        step = devices.from_first(self._choose_checkpoint)
        return step, self._checkpoints.read(step, like) if step else like

    def read(self, step: int, like: Any) -> Any:
        """The state after `step` steps, from its checkpoint."""
        if defect := self._defect(step):
            raise LabError(f"the checkpoint {self._checkpoints.path / str(step)} {defect}.")
        return self._checkpoints.read(step, like)

    def _defect(self, step: int) -> str | None:
        return self._checkpoints.defect(step, _checksum(self._lines()[:step]))

    def _choose_checkpoint(self) -> int:
        """The last step with a checkpoint that is whole, or 0. Damaged ones are moved out of the way."""
        damaged: dict[int, str] = {}
        chosen = 0
        for step in reversed(self.saved):
            if (defect := self._defect(step)) is None:
                chosen = step
                break
            damaged[step] = f"the checkpoint {self._checkpoints.path / str(step)} {defect}"
        if not chosen and not all(text.endswith(UNFINISHED) for text in damaged.values()):
            raise LabError(
                f"{'; '.join(damaged.values())}. No other checkpoint is left: delete "
                f"{self._checkpoints.path} to begin again, or choose another --run-dir."
            )
        for step, text in damaged.items():
            with disk_errors(self.path):
                aside = self.path / "damaged" / str(step)
                shutil.rmtree(aside, ignore_errors=True)
                aside.parent.mkdir(exist_ok=True)
                (self._checkpoints.path / str(step)).rename(aside)
            where = f"after step {chosen}" if chosen else "from the beginning"
            self._say(f"{text}. It is now {aside}, and the run goes on {where}.")
        with disk_errors(self.path / "metrics.jsonl"):
            self._metrics.truncate(sum(map(len, self._lines()[:chosen])))
        return chosen

    def _lines(self) -> list[bytes]:
        """The lines of `metrics.jsonl`; the last may be half written, by a process that was killed."""
        self._metrics.seek(0)
        return self._metrics.read().splitlines(keepends=True)

    def _flush(self) -> None:
        with disk_errors(self.path / "metrics.jsonl"):
            self._metrics.flush()
            os.fsync(self._metrics.fileno())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        with disk_errors(self.path):
            self._opened.close()


def _checksum(lines: list[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()
