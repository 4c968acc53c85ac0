"""A run's directory: what was asked, what came out, and where to go on.

    config.json     the configuration, the data's digest, versions and commit, before the first step
    metrics.jsonl   one object a step; no times, so that it is the same whenever it is made
    checkpoints/    parameters, states and keys after some steps
    result.json     the end of a finished run

A step's metrics are on disk before a checkpoint of it is, so going on from the last checkpoint means to
cut `metrics.jsonl` after its step. Files are written under another name and moved into place: whatever
happens, what is there under its own name is whole. A lock keeps a second process out. Where several
processes are one run, the first of them writes, and checkpoints are made by all together.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from pergrad.lab import config as configs
from pergrad.lab import devices
from pergrad.lab.errors import LabError
from pergrad.lab.files import disk_errors, replace, to_json

VERSIONED = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax-checkpoint")


def versions() -> dict[str, str]:
    """Of Python, pergrad and what it computes with, and the commit if there is one."""
    out = {"python": platform.python_version(), "pergrad": _commit() or "unknown commit"}
    return out | {name: importlib.metadata.version(name) for name in VERSIONED}


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed, perhaps inside of a repository that is not ours
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path, data: Any) -> None:
    """All of it or nothing; null for numbers that are not finite."""
    with disk_errors(path):
        replace(path, (to_json(data, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LabError(
            f"{path} cannot be read ({error}). Choose another directory, or delete it."
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def plain(x: Any) -> Any:
    """A number that JSON has: None for what is not finite."""
    x = float(x)
    return x if np.isfinite(x) else None


def directory(root: Path, config: configs.Train) -> Path:
    """`root/adam-1a2b3c4d5e`: one for every configuration."""
    text = json.dumps(configs.to_json(config), sort_keys=True)
    return root / f"{config.optimizer}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


@functools.cache
def _let_one_device_write() -> None:
    """What several devices have is written by one of them, in all of this process.

    To share that takes longer for states of this size, and does not work with JAX before 0.8.
    """
    handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    logger = logging.getLogger("absl")  # where orbax would tell that its own handler is replaced
    level = logger.level
    logger.setLevel(logging.ERROR)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    logger.setLevel(level)


class Run:
    """A run's directory, opened for one process, or for each of several that are one run."""

    def __init__(self, path: Path, config: configs.Train, data_digest: str, data_name: str) -> None:
        self.path, self.config = path, config
        about = {"config": configs.to_json(config), "data": {"name": data_name, "digest": data_digest}}
        self.digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        with contextlib.ExitStack() as opened:
            self._open(opened, about)
            self._opened = opened.pop_all()

    def _open(self, opened: contextlib.ExitStack, about: Any) -> None:
        if devices.is_first():
            self._open_files(opened, about)
        _let_one_device_write()
        with disk_errors(self.path):
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.config.keep or None, create=True, enable_async_checkpointing=False
            )
            manager = ocp.CheckpointManager((self.path / "checkpoints").resolve(), options=options)
            self._checkpoints = opened.enter_context(contextlib.closing(manager))

    def _open_files(self, opened: contextlib.ExitStack, about: Any) -> None:
        """What the first process has for itself."""
        path = self.path
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context((path / ".lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LabError(f"another process is running in {path}.") from error
        file = path / "config.json"
        if file.exists():
            self._check_same(read_json(file), about)
        elif strangers := [p.name for p in path.iterdir() if p.name[0] != "."]:
            raise LabError(
                f"{path} is not a run's directory: it has {strangers[0]!r} and no config.json."
            )
        else:
            write_json(file, about | {"versions": versions()})
        with disk_errors(path):
            self._metrics = opened.enter_context((path / "metrics.jsonl").open("a+b"))

    def _check_same(self, old: Any, new: Any) -> None:
        if not isinstance(old, dict) or not {"config", "data"} <= old.keys():
            raise LabError(f"{self.path / 'config.json'} is not a run's configuration.")
        if changed := configs.differences(old["config"], new["config"]):
            raise LabError(
                f"{self.path} has a run with another configuration: {'; '.join(changed)}. "
                "Choose another --run-dir, or ask for the same run to continue it."
            )
        if old["data"] != new["data"]:
            raise LabError(
                f"the data has changed since the run in {self.path} began, from {old['data']['name']} "
                f"to {new['data']['name']}. Choose another --run-dir."
            )

    @property
    def result(self) -> dict[str, Any] | None:
        """The end of the run, if it has come."""
        file = self.path / "result.json"
        return read_json(file) if file.exists() else None

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

    def save(self, step: int, state: Any) -> None:
        """The state after so many steps; everything logged until now is on disk first."""
        if devices.is_first():
            self._flush()
        leaves = {str(i): _storable(x) for i, x in enumerate(jax.tree.leaves(state))}
        with disk_errors(self.path / "checkpoints"):
            self._checkpoints.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(leaves), about=ocp.args.JsonSave({"run": self.digest})
                ),
                force=True,
            )
            self._checkpoints.wait_until_finished()

    @property
    def saved(self) -> list[int]:
        """The steps of which there are checkpoints."""
        return sorted(self._checkpoints.all_steps())

    def restore(self, like: Any) -> tuple[int, Any]:
        """The number of steps done and the state after them; metrics of later steps are cut off."""
        step = self._checkpoints.latest_step()
        state = like
        if step is not None:
            state = self.read(step, like)
        if devices.is_first():
            self._cut_metrics(step or 0)
        return step or 0, state

    def read(self, step: int, like: Any) -> Any:
        """The state after so many steps, from its checkpoint."""
        leaves, tree = jax.tree.flatten(like)
        wanted = {str(i): _storable(x) for i, x in enumerate(leaves)}
        where = self.path / "checkpoints" / str(step)
        try:
            about = self._checkpoints.restore(
                step, args=ocp.args.Composite(about=ocp.args.JsonRestore())
            )
            if about["about"] != {"run": self.digest}:
                raise LabError(f"the checkpoint {where} belongs to another run. Move it out of the way.")
            found = self._checkpoints.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
            )["state"]
        except LabError:
            raise
        except Exception as error:  # what orbax raises depends on what is broken
            reason = str(error).split("\n")[0]
            raise LabError(
                f"the checkpoint {where} cannot be read ({reason}). Without it an earlier one is used."
            ) from error
        return jax.tree.unflatten(tree, [_restored(found[str(i)], x) for i, x in enumerate(leaves)])

    def _cut_metrics(self, steps: int) -> None:
        """Keeps the lines of so many steps; a line that a killed process left half written goes too."""
        file = self.path / "metrics.jsonl"
        self._metrics.seek(0)
        *lines, _ = self._metrics.read().split(b"\n")
        kept = lines[:steps]
        if [_step_of(line) for line in kept] != list(range(1, steps + 1)):
            raise LabError(
                f"{file} does not have the {steps} steps of the checkpoint. Choose another --run-dir."
            )
        with disk_errors(file):
            self._metrics.truncate(sum(len(line) + 1 for line in kept))

    def _flush(self) -> None:
        with disk_errors(self.path / "metrics.jsonl"):
            self._metrics.flush()
            os.fsync(self._metrics.fileno())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        with disk_errors(self.path):
            self._opened.close()


def _step_of(line: bytes) -> Any:
    try:
        return json.loads(line).get("step")
    except ValueError:
        return None


def _storable(x: Any) -> Any:
    """Keys as the numbers they are made of."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _restored(x: Any, like: Any) -> Any:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    return x
