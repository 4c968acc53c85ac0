"""What a release says of itself: one version everywhere, commands that exist, the tested packages."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import pergrad as pg
from tests.support.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_changelog_and_citation_have_the_version():
    first = re.search(
        r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert first
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (first[1], first[2]) == (pg.__version__, citation["date-released"])
    assert citation["version"] == pg.__version__ and citation["license"] == PROJECT["license"]
    assert f"pergrad-{pg.__version__}-py3" in (ROOT / "docs" / "install.md").read_text()


def test_pythons_that_are_claimed_are_those_that_are_tested():
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == claimed
    assert PROJECT["requires-python"] == f">={claimed[0]}"


@pytest.mark.parametrize("path", [ROOT / ".ci" / "run", *WORKFLOWS], ids=lambda path: path.name)
def test_targets_exist(path: Path):
    """What the checks run is in the Makefile, with a line of help."""
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"(?:^|- run: )make ([a-z-]+)", path.read_text(), re.MULTILINE))
    assert used and used <= targets


def test_workflows_do_what_the_checks_do():
    """Lint, the tests with several versions of JAX, the site, the package."""
    text = "".join(path.read_text() for path in WORKFLOWS)
    tests = ("test", "test-oldest", "test-newest", "test-nightly", "test-tpu", "test-docs")
    for target in ("lint", "dist", *tests):
        assert re.search(rf"run: make {target}\b(?!-)", text), target


def test_issue_templates_can_be_read():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.name == "config.yml" or (form["name"] and form["body"])


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_pin_what_the_tests_install():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {plain(line.partition("==")[0]) for line in lines if "==" in line}
    extras = PROJECT["optional-dependencies"]
    asked = [
        *PROJECT["dependencies"],
        *(x for name in ("dev", "lab", "examples", "bench") for x in extras[name]),
    ]
    names = {plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in asked} - {"pergrad"}
    assert names <= pinned, f"run make constraints: {names - pinned}"
