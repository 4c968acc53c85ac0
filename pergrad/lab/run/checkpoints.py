"""Checkpoints: the state after some steps, with a checksum of every file.

    checkpoints/100/state/           the arrays, as orbax writes them
    checkpoints/100/checksums.json   the run, and the SHA-256 of these files and of the metrics so far

The checksums are written after everything else, and older checkpoints are deleted after that. So
whenever a run is killed, its last checkpoint with checksums is whole, and a checkpoint without checksums
was not written to its end. Orbax reads files only if their checksums are right: without that check it
may read other numbers from a damaged file, and raise no error.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from pergrad.lab.errors import LabError
from pergrad.lab.files import disk_errors, replace, to_json
from pergrad.lab.run import devices

CHECKSUMS = "checksums.json"
UNFINISHED = f"was not written to its end: it has no {CHECKSUMS}"


@functools.cache
def _let_one_device_write() -> None:
    """Lets one device write an array of which several devices have copies. It holds for this process.

    Sharing the work among the devices takes longer for states of this size, and does not work with JAX
    before 0.8.
    """
    handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    logger = logging.getLogger("absl")  # where orbax would tell that its own handler is replaced
    level = logger.level
    logger.setLevel(logging.ERROR)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    logger.setLevel(level)


class Checkpoints:
    """A run's checkpoints, in `path`. `run` is the digest of the run that they must belong to."""

    def __init__(self, path: Path, run: str, keep: int) -> None:
        self.path, self.run, self.keep = path, run, keep

    @property
    def steps(self) -> list[int]:
        """The steps of which there are checkpoints, whole or not."""
        return sorted(int(p.name) for p in self.path.glob("*") if p.is_dir() and p.name.isdecimal())

    def defect(self, step: int, metrics: str) -> str | None:
        """What is wrong with a checkpoint, if anything; `metrics` is the checksum of the metrics."""
        path = self.path / str(step)
        file = path / CHECKSUMS
        if not file.exists():
            return UNFINISHED
        try:
            about = json.loads(file.read_bytes())
            run, files, old = about["run"], dict(about["files"]), about["metrics"]
            changed = [name for name, checksum in files.items() if _checksum(path / name) != checksum]
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"is damaged: {CHECKSUMS} cannot be read"
        except OSError as error:
            return f"is damaged: {error.filename} cannot be read ({error.strerror})"
        if not files or changed:
            return f"is damaged: {', '.join(changed) or CHECKSUMS} does not have its checksum"
        if run != self.run:
            return "belongs to another run"
        if old != metrics:
            return f"has other metrics than the {step} steps in metrics.jsonl"
        return None

    def save(self, step: int, state: Any, metrics: str) -> None:
        """Saves the state after `step` steps. Then all but the last `keep` checkpoints are deleted."""
        leaves = {str(i): _storable(x) for i, x in enumerate(jax.tree.leaves(state))}
        with disk_errors(self.path):
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(leaves)), force=True
            )
            self._manager.wait_until_finished()
            if devices.is_first():
                write_checksums(self.path / str(step), {"run": self.run, "metrics": metrics})
            old = sorted(self._manager.all_steps())[: -self.keep] if self.keep else []
            for step in old:
                self._manager.delete(step)

    def read(self, step: int, like: Any) -> Any:
        """The state after `step` steps, from a checkpoint without defects."""
        leaves, tree = jax.tree.flatten(like)
        wanted = {str(i): _storable(x) for i, x in enumerate(leaves)}
        try:
            found = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
            )["state"]
        except Exception as error:  # orbax raises errors of many classes
            reason = str(error).split("\n")[0]
            raise LabError(
                f"the checkpoint {self.path / str(step)} cannot be read ({reason}). If another version "
                "of orbax-checkpoint wrote it, use that one; or delete it, to go on from an earlier one."
            ) from error
        return jax.tree.unflatten(tree, [_restored(found[str(i)], x) for i, x in enumerate(leaves)])

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's manager. It reads the directory once, so damaged checkpoints are moved before."""
        _let_one_device_write()
        options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
        with disk_errors(self.path):
            return ocp.CheckpointManager(self.path.resolve(), options=options)

    def close(self) -> None:
        if "_manager" in self.__dict__:
            self._manager.close()


def write_checksums(path: Path, about: Mapping[str, str]) -> None:
    """Declares the checkpoint in `path` whole."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    checksums = {str(file.relative_to(path)): _checksum(file) for file in files}
    replace(path / CHECKSUMS, to_json({**about, "files": checksums}, indent=1).encode())


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _storable(x: Any) -> Any:
    """An array that orbax can store: random keys become the numbers they are made of."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _restored(x: Any, like: Any) -> Any:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    return x
