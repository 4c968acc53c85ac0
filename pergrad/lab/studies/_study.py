"""What a study is: a question, a claim, three sizes, and a function that runs one of them.

Everything that decides is written down here and in the studies before any run: which methods, rates and
seeds, which comparisons, and (in `decide`) how seeds are paired and when an interval supports a claim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pergrad.lab import decide, report, sweep
from pergrad.lab.runs import versions


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
    """`presets` (demo, quick, full) are dataclasses of the study's own; `run` is given one."""

    title: str
    question: str
    claim: str
    presets: Mapping[str, Any]
    run: Callable[[Any, Lab], Outcome]


def write(
    study: Study, preset: Any, out: Path, lab: Lab, command: str
) -> tuple[Path, list[decide.Verdict]]:
    """Runs a study and writes results, figures and page; returns the page's path, and the answers."""
    outcome = study.run(preset, lab)
    page = report.Page(
        title=study.title,
        question=study.question,
        claim=study.claim,
        ran=f"{outcome.ran}\n\n    {command}",
        sections=outcome.sections,
        config={"preset": dataclasses.asdict(preset), "versions": versions()},
    )
    answers = [verdict for section in outcome.sections for verdict in section.verdicts]
    return report.write(page, out, outcome.rows), answers
