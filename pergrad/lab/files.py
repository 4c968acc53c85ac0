"""Writing files: a file is written whole or not at all, and errors of the disk are told in one line."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pergrad.lab.errors import LabError

A_FILE = "A file has the name of a directory: choose another directory."
NOT_ALLOWED = "Choose a directory in which you may write."
ADVICE = {
    errno.EEXIST: A_FILE,
    errno.ENOTDIR: A_FILE,
    errno.EACCES: NOT_ALLOWED,
    errno.EPERM: NOT_ALLOWED,
    errno.EROFS: NOT_ALLOWED,
    errno.ENOSPC: "Make room, and the same command again continues; or choose another directory.",
    errno.EDQUOT: "Make room, and the same command again continues; or choose another directory.",
}


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an error of the operating system (no space, no permission) into a `LabError` of one line."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "Choose another directory.")
        raise LabError(f"cannot write to {path}: {error.strerror or error}. {advice}") from error


def to_json(data: Any, indent: int | None = None) -> str:
    """Data as JSON. NaN and infinity, which JSON does not have, become null."""
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def replace(path: Path, content: bytes) -> None:
    """Writes a new file and moves it into place, so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
