"""What studies have found: the `results.jsonl` of runs of a preset, compressed, in the folder `found`.

docs/studies.md has its numbers from these files, and a test compares the two.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "found"


def rows(name: str) -> list[dict[str, Any]]:
    """The lines of results such as `sign-quick`. The first says by which command and commit."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt") as opened:
        return [json.loads(line) for line in opened]
