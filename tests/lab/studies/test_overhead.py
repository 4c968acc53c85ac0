"""The study of what statistics cost, on times that are made up, and from end to end at a tiny size."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from pergrad.lab import timing
from pergrad.lab.bench import compilers, tasks
from pergrad.lab.compare.decide import CONTRADICTED, NOT_SHOWN, SUPPORTED
from pergrad.lab.config import Train
from pergrad.lab.studies import _points, overhead
from pergrad.lab.studies._study import Lab, write
from tests.support import labs, pages, sheets


@pytest.fixture(autouse=True)
def as_for_users():
    with pages.jax_as_for_users():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return labs.write_text(tmp_path_factory.mktemp("text"))


def made_up(name: str, *seconds: float, temp_bytes: float = 1e6) -> timing.Result:
    return timing.Result(name, timing.Executable(lambda: None, 1.0, 1.0, temp_bytes), seconds)


def test_overhead(text, tmp_path):
    sizes = overhead.Preset(
        *((16,), (1 / 2, 1.0), (8,), (2.0,), (8,)),
        tokens=128,
        layers=1,
        rounds=3,
        budget=10.0,
        base=Train(data=str(text)),
    )
    said = []
    lab = Lab(tmp_path / "runs", say=said.append)
    with sheets.checked():
        path, answers = write(overhead.STUDY, sizes, tmp_path, lab, "pergrad study overhead")
    page = path.read_text()
    assert len(answers) == 5
    assert len(said) == 4 and said[1].startswith("2 of 4: transformer, D 16, T 16: pergrad ")
    _, *rows = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    every = [("transformer", 8, 16), ("transformer", 16, 8), ("LSTM", 16, 8), ("CNN", 64, 2)]
    compiled = [row for row in rows if "target" in row]
    assert len(compiled) == (3 * len(every) if compilers.is_installed("tpu:v5e") else 0)
    assert ("pergrad[tpu-aot]" in page) == (not compiled)
    again = [section.verdicts for section in overhead.sections(_points.read(rows))]
    assert [verdict for own in again for verdict in own] == answers
    rows = [row for row in rows if "target" not in row]
    assert [(row["model"], row["length"], row["batch_size"], row["candidate"]) for row in rows] == [
        (*size, name) for size in every for name in (tasks.FLOOR, tasks.VMAP, tasks.PERGRAD)
    ]
    assert all(len(row["seconds"]) == len(row["quartiles"]) == 3 for row in rows)
    assert all(row["temp_bytes"] > 0 and row["ratios"]["memory"] > 0 for row in rows)
    assert page.count('src="data:image/svg') == 3 * 5 and "pergrad study overhead" in page
    assert page.count('class="answer ') == 2 * 5  # above all, and in their sections
    files = sorted(path.suffix for path in (tmp_path / "figures").iterdir())
    assert files == [".png"] * 15 + [".svg"] * 15


def a_point(length: int, ratio: float, temp_bytes: float = 1.1e6) -> overhead.Point:
    """pergrad takes `ratio` times `jax.grad`, give or take a percent; there are 8 rounds and then 2."""
    disturbed = [1, 2, 1, 1, 5, 1, 1, 3, 1, 1]  # which meets both
    floor = made_up(tasks.FLOOR, *disturbed)
    ours = [ratio * s * (1 + 0.01 * (-1) ** i) for i, s in enumerate(disturbed[:8])]
    results = {tasks.FLOOR: floor, tasks.PERGRAD: made_up(tasks.PERGRAD, *ours, temp_bytes=temp_bytes)}
    return overhead.Point("transformer", 32, length, 2, results)


def test_what_was_measured_is_kept(tmp_path, monkeypatch):
    sizes, measured = overhead.STUDY.presets["demo"], []

    def measure(sizes, model, width, length, is_compiled):
        measured.append((sizes.rounds, length))
        return a_point(length, 1.5)

    monkeypatch.setattr(overhead, "_measure", measure)
    fewer = dataclasses.replace(sizes, rounds=2)
    runs = tmp_path / "runs"
    first = overhead._point(sizes, ("transformer", 32, 8), False, runs)
    again = overhead._point(sizes, ("transformer", 32, 8), False, runs)
    assert again.time(tasks.PERGRAD) == first.time(tasks.PERGRAD)
    assert again.memory(tasks.PERGRAD) == first.memory(tasks.PERGRAD)
    overhead._point(sizes, ("transformer", 32, 16), False, runs)
    overhead._point(fewer, ("transformer", 32, 8), False, runs)
    assert measured == [(sizes.rounds, 8), (sizes.rounds, 16), (2, 8)]


@pytest.mark.parametrize(
    ("ratios", "answer"),
    [
        ((1.1, 0.9), SUPPORTED),
        ((1.1, 1.2), NOT_SHOWN),
        ((1.1, 1.3), CONTRADICTED),
        ((1.2, 1.3), CONTRADICTED),
    ],
)
def test_a_claim_about_times_is_one_about_every_size(ratios, answer):
    points = [a_point(8 * i, ratio) for i, ratio in enumerate(ratios, 1)]
    verdict = overhead.time_verdict("claim", points, tasks.PERGRAD, tasks.FLOOR, 1.2, level=0.975)
    most = max(ratios)
    assert verdict.answer == answer
    assert f"{most:.2f} (97.5%" in verdict.why and f"T {8 * (1 + ratios.index(most))}" in verdict.why
    assert "8 rounds" in verdict.why
    assert points[0].time(tasks.PERGRAD).mean == pytest.approx(ratios[0], rel=1e-3)


def test_two_rounds_show_nothing():
    point = a_point(8, 1.0)
    cut = {name: dataclasses.replace(r, seconds=r.seconds[:2]) for name, r in point.results.items()}
    point = dataclasses.replace(point, results=cut)
    verdict = overhead.time_verdict("claim", [point], tasks.PERGRAD, tasks.FLOOR, 9.0, level=0.95)
    assert verdict.answer == NOT_SHOWN


def test_a_program_without_temporary_memory_on_the_chip():
    judged = {name: _points.Judged(2.0, 0.0) for name in (tasks.FLOOR, *_points.NAMES)}
    point = dataclasses.replace(a_point(8, 1.0), judged=judged)
    section = overhead._compiled([point])
    assert section.tables[0].rows == [["transformer", "32", "8", "1.00", "1.00", "-", "-"]]
    assert not sheets.unwritten([section])


@pytest.mark.parametrize(
    ("most", "answer"), [(1.2e6, SUPPORTED), (1.3e6, CONTRADICTED), (math.nan, NOT_SHOWN)]
)
def test_claims_about_memory(most, answer):
    points = [a_point(8, 1.0), a_point(16, 1.0, temp_bytes=most)]
    verdict = overhead.memory_verdict("claim", points, tasks.PERGRAD, 1.2)
    assert verdict.answer == answer
    assert math.isnan(most) or ("T 16" in verdict.why and f"{most / 1e6:.2f}" in verdict.why)


def test_presets():
    for sizes in overhead.STUDY.presets.values():
        for width in sizes.widths:
            lengths = [width * ratio for ratio in sizes.ratios]
            assert all(length == int(length) and sizes.tokens % length == 0 for length in lengths)
            assert min(lengths) < width < max(lengths) <= sizes.tokens / 2
