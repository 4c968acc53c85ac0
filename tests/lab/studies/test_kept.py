"""docs/studies.md has the numbers of the results that are kept beside it."""

import json
import re
from typing import Any

import numpy as np
import pytest

from docs import make_figures
from pergrad.lab.compare import decide, sweep
from pergrad.lab.studies import STUDIES, argument, law, ramp
from pergrad.lab.studies._agreement import FORMULA, KINDS, PLACES, REAL, SURROGATE, Look
from tests.support import pages

PAGE = (pages.ROOT / "docs" / "studies.md").read_text()
KEPT = sorted((pages.ROOT / "docs" / "studies").glob("*.jsonl"))


def results(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """By which command and versions results were made, and the results."""
    lines = (pages.ROOT / "docs" / "studies" / f"{name}.jsonl").read_text().splitlines()
    about, *rows = map(json.loads, lines)
    return about, rows


# Tables whose numbers are in a figure of their study, and those that have no results.
DRAWN_ELSEWHERE = (
    "| Python |",
    "| study |",
    "| studies |",
    "| claim |",
    "| step |",
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


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_how_they_were_made(path):
    about, _ = results(path.stem)
    name, preset = path.stem.split("-")[:2]
    assert about["command"].startswith(f"pergrad study {name} --preset {preset}")
    assert f"`{about['command']}`" in PAGE and name in STUDIES
    assert "dirty" not in about["versions"]["pergrad"]


def test_the_argument():
    _, rows = results("argument-quick")
    looks = [Look(**row) for row in rows]
    assert {verdict.answer for verdict in argument.verdicts(looks)} == {decide.SUPPORTED}
    names = {REAL: "gradients", SURROGATE: "Gaussian surrogates", FORMULA: "formulas"}
    for step in (500, 1000, 1500):
        for kind in KINDS:
            own = [look.shares[kind] for look in looks if look.step == step]
            cells = [f"{np.mean([shares[place] for shares in own]):.3f}" for place in PLACES]
            first = f"| {step} | " if kind == REAL else "| | "
            assert f"{first}{names[kind]} | {' | '.join(cells)} |\n" in PAGE


@pytest.mark.parametrize("name", ["arms-demo", "arms-demo-images"])
def test_the_arms(name):
    _, rows = results(name)
    final = {row["method"]: {} for row in rows}
    for row in rows:
        final[row["method"]].setdefault(row["learning_rate"], []).append(row["test_loss"])
    for by_rate in final.values():
        rate, losses = max(by_rate.items(), key=lambda pair: len(pair[1]))  # more seeds than the others
        assert f" | {rate:g} | {decide.estimate(losses)} |\n" in PAGE


def test_the_law():
    _, rows = results("law-demo")
    curves = {}
    for row in rows:
        if "seed" in row:
            own = curves.setdefault((row["optimizer"], row["batch_size"]), {})
            own.setdefault(row["seed"], {})[row["learning_rate"]] = row["tune_loss"]
    (noise_scale,) = (row["noise_scale"] for row in rows if "noise_scale" in row)
    for name in (law.ADAM, law.LATE):
        best = {
            size: {seed: law.lowest(curve) for seed, curve in by_seed.items()}
            for (of, size), by_seed in curves.items()
            if of == name
        }
        cells = [law._shown(decide.estimate(list(own.values())), own) for own in best.values()]
        parts = law.parts(list(best), noise_scale).values()
        cells += [str(decide.estimate(list(law.slopes(best, sizes).values()))) for sizes in parts]
        assert f"| {name} | {' | '.join(cells)} |\n" in PAGE


def test_the_ramp():
    _, rows = results("ramp-quick")
    own = [row for row in rows if row["seed"] < sweep.TUNING_SEED]
    losses = {row["plan"]: {} for row in own}
    for row in own:
        losses[row["plan"]][row["seed"]] = row["test_loss"]
    for row in own:
        steps = np.mean([other["steps"] for other in own if other["plan"] == row["plan"]])
        ended = decide.estimate(list(losses[row["plan"]].values()))
        assert f"| {row['plan']} | {row['learning_rate']:g} | {ended} | {steps:.0f} |\n" in PAGE
    answers = [verdict.answer for verdict in ramp.verdicts(ramp.PRESETS["quick"], losses)]
    assert answers == [decide.SUPPORTED, decide.NOT_SHOWN, decide.SUPPORTED]
