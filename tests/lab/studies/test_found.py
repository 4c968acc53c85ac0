"""docs/studies.md says what the results say that were kept, and the rule came before the runs."""

import platform
import re
import subprocess
import sysconfig
from typing import get_args

import pytest

from docs import make_figures
from pergrad.lab.compare import decide
from pergrad.lab.compare.sweep import TUNING_SEED, lowest_point
from pergrad.lab.config import DomainName
from pergrad.lab.run import data
from pergrad.lab.studies import _found, sign
from tests.support import found, pages

PAGE = found.PAGE.read_text()


def test_the_page_has_the_tables_of_the_results():
    assert found.filled(PAGE) == PAGE, "python -m tests.support.found"
    places = set(re.findall(r"<!-- found: ([\w-]+) \d -->", PAGE))
    assert places == set(found.kept())


@pytest.mark.parametrize("name", found.kept())
def test_how_the_results_were_made(name):
    """By a command that the page names, and by a commit, with nothing changed since."""
    about = _found.rows(name)[0]
    study, preset, *others = name.split("-")
    command = f"pergrad study {study} --preset {preset}"
    for other in others:
        command += f" --{'domain' if other in get_args(DomainName) else 'model'} {other}"
    assert about["command"] == command and f"`{command}`" in PAGE
    repeated = "rounds" if study == "overhead" else "seeds"
    assert about["preset"][repeated] == getattr(found.preset_of(name), repeated)
    assert about["versions"].keys() >= {"python", "jax", "pergrad"}
    assert re.fullmatch(r"[0-9a-f]{7,}", about["versions"]["pergrad"])


@pytest.mark.skipif(not (pages.ROOT / ".git").exists(), reason="there is no history to look at")
@pytest.mark.parametrize("name", found.kept())
def test_the_rule_came_before_the_runs(name):
    commit = _found.rows(name)[0]["versions"]["pergrad"]
    command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    assert subprocess.run(command, cwd=pages.ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", found.kept())
def test_no_seed_tunes_and_is_reported(name):
    rows = _found.rows(name)[1:]
    for own in found.tuned(rows).values():
        assert all(seed >= TUNING_SEED for runs in own.tried.values() for seed in runs)
        assert all(seed < TUNING_SEED for seed in own.runs)
        if own.runs:
            assert own.method.learning_rate == lowest_point(own.by_rate)
    if found.study_of(name) == "ramp":
        chosen = {row["plan"]: row["learning_rate"] for row in rows if row["seed"] < TUNING_SEED}
        for plan, rate in chosen.items():
            by_rate = {
                row["learning_rate"]: row["tune_loss"]
                for row in rows
                if row["plan"] == plan and row["seed"] >= TUNING_SEED
            }
            assert by_rate[rate] == min(by_rate.values())


# Tables whose numbers are in a figure of their study, and those that have no results.
DRAWN_ELSEWHERE = (
    "| Python |",
    "| study |",
    "| studies |",
    "| claim |",
    "| step |",
    "| group | ",
    "| layer | ",
    "| method | times the best rate |",
    "| part of the run |",
    "| rule | shown |",
    "| batch size | square",
    "| | not clipped |",
    "| batch | square",
)


def test_every_table_of_results_has_a_figure():
    tables = re.findall(r"(?:^\|.*\n)+(?:<!-- end -->\n)?\n(?:!.*)?", PAGE, re.MULTILINE)
    without = [table for table in tables if "](studies/tables/" not in table]
    assert [table for table in without if not table.startswith(DRAWN_ELSEWHERE)] == []
    drawn = list(make_figures.tables())
    assert len(drawn) == PAGE.count("](studies/tables/") == len(tables) - len(without)
    assert all(path.exists() for path, _ in drawn), "run make docs-figures"


def test_the_digests_of_the_text():
    """Where this Python is one of the page's, and not one that a distribution has changed."""
    digests = dict(re.findall(r"^\| (3\.\d+\.\d+) \| `([0-9a-f]{64})` \|$", PAGE, re.MULTILINE))
    assert len(digests) >= 3
    version = platform.python_version()
    if version in digests and not sysconfig.get_path("stdlib").startswith("/usr/"):
        assert data.load_text().digest == digests[version]


def test_the_demonstration_has_what_longer_runs_found():
    preset = sign.PRESETS["demo"]
    assert (sign.LATE, sign.MEAN) in preset.too_short
    verdict = sign._longer(preset, found.tuned(_found.rows("sign-quick")), (sign.LATE, sign.MEAN))
    assert verdict.answer == decide.NOT_SHOWN
    assert verdict.why.startswith("300 steps are too short to tell. `pergrad study sign --preset quick`")
    assert re.search(r", 2000 steps: supported, lower by 0\.\d+ \(97\.5%: ", verdict.why)
