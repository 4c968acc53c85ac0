"""Writing files: all of it or nothing, and complaints in one line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from pergrad.lab.errors import LabError


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """An operating system's complaint (no space, no permission) in one line."""
    try:
        yield
    except OSError as error:
        raise LabError(f"cannot write to {path}: {error.strerror or error}.") from error


def replace(path: Path, content: bytes) -> None:
    """Writes under another name and moves it into place: whoever reads sees the old file or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
