"""What a study is: a question, a claim, three sizes, a function that runs one and says what it found.

Everything that decides is written down here and in the studies before any run: which methods, rates and
seeds, which comparisons, and (in `decide`) how seeds are paired and when an interval supports a claim.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pergrad.lab import report, sweep
from pergrad.lab.files import disk_errors, replace
from pergrad.lab.runs import versions

PresetName = Literal["demo", "quick", "full"]


@dataclasses.dataclass(frozen=True)
class Lab:
    """Where a study works, and who is told how far it is."""

    runs: Path
    processes: int = 1
    told: sweep.Told = sweep.silent
    say: Callable[[str], None] = lambda line: None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`rows` become results.jsonl; `ran` says in a paragraph what was run."""

    ran: str
    sections: Sequence[report.Section]
    rows: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Study:
    """`presets` are dataclasses of the study's own; `run` is given one."""

    title: str
    question: str
    claim: str
    presets: Mapping[PresetName, Any]
    run: Callable[[Any, Lab], Outcome]


def write(study: Study, preset: Any, out: Path, lab: Lab, command: str) -> Path:
    """Runs a study at the size of `preset`; writes results.jsonl, figures and report.html, its path."""
    outcome = study.run(preset, lab)
    lines = "".join(json.dumps(row) + "\n" for row in outcome.rows)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        replace(out / "results.jsonl", lines.encode())
    page = report.Page(
        title=study.title,
        question=study.question,
        claim=study.claim,
        ran=f"{outcome.ran}\n\n    {command}",
        sections=outcome.sections,
        config={"preset": dataclasses.asdict(preset), "versions": versions()},
    )
    return report.write(page, out)
