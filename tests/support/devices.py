"""Tests that need eight devices, in a process that has fewer.

They are collected here one by one, and those of a file run in one process of their own, which is told
to have eight and writes down what became of each. Every test here then looks at its own outcome. A
process that has eight devices runs them itself.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import pytest

from tests.support.pages import ROOT

FILES = {
    f"library/test_{name}.py"
    for name in ("devices", "devices_apart", "sharded_parameters", "sharded_programs", "varying")
}
NUMBER = 8
FLAG = f"--xla_force_host_platform_device_count={NUMBER}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a test, whose `kind` is "passed", or "skipped" or "failed" for a reason."""

    kind: str
    reason: str
    output: str


class OnDevices(pytest.Item):
    """A test that another process runs."""

    def __init__(self, *, of: Any, **options: Any) -> None:
        super().__init__(**options)
        self.originalname = of.originalname

    def runtest(self) -> None:
        outcome = _outcomes(self.session, self.path)[self.name]
        self.add_report_section("call", "of the process with eight devices", outcome.output)
        if outcome.kind == "skipped":
            pytest.skip(outcome.reason)
        assert outcome.kind == "passed", outcome.reason

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def elsewhere(item: Any) -> Any:
    """The test, or what stands in for it if this process has too few devices."""
    if jax.device_count() >= NUMBER:
        return item
    return OnDevices.from_parent(item.parent, name=item.name, of=item)


OUTCOMES = pytest.StashKey[dict[Path, dict[str, Outcome]]]()


def _outcomes(session: pytest.Session, file: Path) -> dict[str, Outcome]:
    """What became of the tests of a file that need devices; the first to ask runs all of them."""
    of_files = session.stash.setdefault(OUTCOMES, {})
    if file not in of_files:
        own = [item for item in session.items if isinstance(item, OnDevices) and item.path == file]
        of_files[file] = _run(own)
    return of_files[file]


def _run(tests: Sequence[OnDevices]) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "outcomes.xml"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_logging=all", f"--junitxml={written}"]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *(f"{t.path}::{t.name}" for t in tests)],
            env=os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        report = written.read_text() if written.exists() else "<none/>"
    return outcomes([t.name for t in tests], report, ran.stdout + ran.stderr)


def outcomes(names: Sequence[str], report: str, printed: str) -> dict[str, Outcome]:
    """The outcome of each of these tests, from pytest's report and all that it printed."""
    did_not_run = Outcome("failed", f"The test did not run.\n{printed}", "")
    cases = ElementTree.fromstring(report).iter("testcase")
    return dict.fromkeys(names, did_not_run) | {
        case.get("name", ""): _outcome_of(case) for case in cases
    }


def _outcome_of(case: ElementTree.Element) -> Outcome:
    """The outcome of a test, of what pytest wrote about it."""
    parts = {part.tag: part for part in case}
    output = "".join(parts[tag].text or "" for tag in ("system-out", "system-err") if tag in parts)
    for tag, kind in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if tag in parts:
            reason = parts[tag].text if kind == "failed" else parts[tag].get("message")
            return Outcome(kind, reason or tag, output)
    return Outcome("passed", "", output)
