"""What statistics cost: every candidate is checked and told of, whatever the clock says."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure as Sheet
from rich.console import Console

from pergrad.lab import timing
from pergrad.lab.bench import price, tasks
from pergrad.lab.compare.decide import CONTRADICTED, NOT_SHOWN, SUPPORTED
from pergrad.lab.config import Model, Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures
from pergrad.lab.progress import ProgressBar
from pergrad.lab.run import train
from pergrad.lab.studies import overhead
from pergrad.lab.studies._study import Lab, write
from tests.support import labs, pages


@pytest.fixture(autouse=True)
def as_for_users():
    with pages.jax_as_for_users():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return labs.write_text(tmp_path_factory.mktemp("text"))


# Timing.


def a_program(run: Any = lambda: None, temp_bytes: float = 1.0) -> timing.Program:
    return timing.Program(run, 1.0, 1.0, temp_bytes)


def test_programs_take_turns():
    calls = []
    programs = {name: a_program(lambda name=name: calls.append(name)) for name in "abc"}
    results = timing.time_all(programs, rounds=4, say=timing.silent)
    assert [result.name for result in results] == list("abc")
    assert all(len(result.seconds) == 4 for result in results)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert rounds == ["abc", "abc", "acb", "cab", "cba"]  # the first to warm up


def test_results_are_kept_until_the_next_are_there():
    class Results:
        alive = 0

        def __init__(self):
            Results.alive += 1
            seen.append(Results.alive)

        def __del__(self):
            Results.alive -= 1

    seen: list[int] = []
    timing.time_all({"a": a_program(Results)}, rounds=3, say=timing.silent)
    assert seen == [1, 1, 2, 2] and Results.alive == 0  # the first to warm up


@pytest.mark.parametrize(("budget", "runs"), [(0.5, 1), (1.5, 3), (4.5, 4), (10.0, 5)])
def test_a_budget_that_is_spent(budget, runs, monkeypatch):
    monkeypatch.setattr(timing, "_run", lambda *args: (1.0, None))
    (result,) = timing.time_all({"a": a_program()}, rounds=5, budget=budget, say=timing.silent)
    assert len(result.seconds) == runs


def test_who_is_told(capsys):
    said = []
    programs = {"sine": timing.compile_afresh("sine", jnp.sin, jnp.ones(3), say=said.append)}
    timing.time_all(programs, jnp.ones(3), rounds=2, say=said.append)
    assert "compiled sine" in said[0] and "".join(said).count(".") >= 2
    assert capsys.readouterr().err == ""
    timing.time_all(programs, jnp.ones(3), rounds=2)
    assert "timing .." in capsys.readouterr().err


def test_ratio(capsys):
    ratio = timing.ratio(jnp.sin, jnp.cos, jnp.ones(3), rounds=2)
    assert 0 < ratio < math.inf and capsys.readouterr().err == ""


def test_memory_that_is_not_known():
    floor, other = (timing.Result("x", a_program(temp_bytes=b), (1.0,)) for b in (0.0, 5.0))
    assert math.isnan(other.ratios(floor)["memory"])


# Candidates.


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def example() -> Any:
    """What `pergrad bench MODULE:FUNCTION` asks for."""
    return loss, *ARGS


ARGS = np.full((3, 2), 0.3, np.float32), np.arange(12, dtype=np.float32).reshape(4, 3) / 12
MOMENTS = tasks.TASKS["moments"]
ALONE = {"names": (tasks.FLOOR, tasks.VMAP, tasks.PERGRAD), "rounds": 1, "say": timing.silent}


def test_the_fastest_size():
    """The first is slow, the second fast, the third slow again: a fourth is not tried."""
    tried = []

    def sized(size: int) -> Any:
        def run(x: jax.Array) -> jax.Array:
            tried.append(size)
            steps = {1: 300_000, 2: 1, 3: 300_000}[size]
            return jax.lax.fori_loop(0, steps, lambda _, y: jnp.sin(y), x)

        return run

    said = []
    name, program = timing.fastest(
        ((f"size {n}", sized(n)) for n in (1, 2, 3, 4)), jnp.ones(()), say=said.append
    )
    assert name == "size 2" and list(program.tried) == ["size 1", "size 2", "size 3"]
    assert tried == [1, 2, 3] and "size 2 takes" in "".join(said)
    with pytest.raises(ValueError, match="no candidate"):
        timing.fastest((), jnp.ones(()))


def test_candidates_that_differ_are_not_timed(monkeypatch):
    wrong = lambda loss, task, size: tasks._pergrad(lambda *args: 2 * loss(*args), task, size)  # noqa: E731
    monkeypatch.setitem(tasks._MAKERS, tasks.PERGRAD, wrong)
    with pytest.raises(LabError, match=r"pergrad differs from vmap\(grad\)"):
        price.measure(loss, MOMENTS, *ARGS, **ALONE)


def test_not_a_number_is_a_difference():
    with pytest.raises(LabError, match="by nan"):
        price.measure(loss, MOMENTS, np.full_like(ARGS[0], np.nan), ARGS[1], **ALONE)


def test_who_cannot_is_left_out(monkeypatch):
    def fails(loss: Any, task: Any, size: str) -> Any:
        raise NotImplementedError("no such luck\nand more")

    monkeypatch.setitem(tasks._MAKERS, tasks.VMAP, fails)
    found = price.measure(loss, MOMENTS, *ARGS, **ALONE)
    assert [r.name for r in found.results] == [tasks.FLOOR, tasks.PERGRAD]
    assert found.left_out == {tasks.VMAP: "NotImplementedError: no such luck"}
    monkeypatch.setitem(tasks._MAKERS, tasks.PERGRAD, fails)
    with pytest.raises(NotImplementedError):  # it is what this is about
        price.measure(loss, MOMENTS, *ARGS, **ALONE)


def made_up(name: str, *seconds: float, temp_bytes: float = 1e6) -> timing.Result:
    return timing.Result(name, a_program(temp_bytes=temp_bytes), seconds)


# The progress bar.


@pytest.fixture
def config(text) -> Train:
    model = Model(layers=1, width=16, heads=2, context=8)
    return Train(data=str(text), model=model, batch_size=2, steps=2, optimizer="micro_adam")


def test_the_bar_measures_the_price(config, tmp_path, monkeypatch):
    measured = []

    def ratio(*args: Any) -> float:
        measured.append(timing_ratio(*args))
        return 1.0449

    timing_ratio = timing.ratio
    monkeypatch.setattr(timing, "ratio", ratio)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    bar = ProgressBar(console)
    train.train(config, tmp_path / "watched", bar)
    bar.close()
    shown = console.file.getvalue()  # type: ignore
    assert "1.04 x jax.grad (measured)" in shown
    last = [line for line in re.split(r"[\r\n]", shown) if "2/2" in line][-1]
    assert "loss" in last and "tokens/s 1.04 x grad" in last and "00:00" in last
    assert len(measured) == 1 and 0 < measured[0] < math.inf
    train.train(config, tmp_path / "unwatched")
    assert len(measured) == 1  # nobody asked
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("watched", "unwatched")]
    assert metrics[0] == metrics[1]


# The study.


def test_overhead(text, tmp_path):
    sizes = overhead.Preset(
        (16,), (1 / 2, 1.0), tokens=32, layers=1, rounds=3, budget=10.0, data=str(text)
    )
    said = []
    lab = Lab(tmp_path / "runs", say=said.append)
    path, answers = write(overhead.STUDY, sizes, tmp_path, lab, "pergrad study overhead")
    page = path.read_text()
    assert len(answers) == 5
    assert len(said) == 2 and said[1].startswith("2 of 2: D 16, T 16: pergrad ")
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    every = [(8, 4), (16, 2)]
    assert [(row["length"], row["batch_size"], row["candidate"]) for row in rows] == [
        (*size, name) for size in every for name in (tasks.FLOOR, tasks.VMAP, tasks.PERGRAD)
    ]
    assert all(len(row["seconds"]) == len(row["quartiles"]) == 3 for row in rows)
    assert all(row["temp_bytes"] > 0 and row["ratios"]["memory"] > 0 for row in rows)
    assert page.count("data:image/png") == 2 and "pergrad study overhead" in page
    assert page.count('class="answer ') == 2 * 5  # above all, and in their sections
    files = sorted(path.suffix for path in (tmp_path / "figures").iterdir())
    assert files == [".png", ".png", ".svg", ".svg"]


def a_point(length: int, ratio: float, temp_bytes: float = 1.1e6) -> overhead.Point:
    """pergrad takes `ratio` times `jax.grad`, give or take a percent; there are 8 rounds and then 2."""
    disturbed = [1, 2, 1, 1, 5, 1, 1, 3, 1, 1]  # which meets both
    floor = made_up(tasks.FLOOR, *disturbed)
    ours = [ratio * s * (1 + 0.01 * (-1) ** i) for i, s in enumerate(disturbed[:8])]
    results = {tasks.FLOOR: floor, tasks.PERGRAD: made_up(tasks.PERGRAD, *ours, temp_bytes=temp_bytes)}
    return overhead.Point(32, length, 2, results)


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
    verdict = overhead.time_verdict("claim", points, tasks.PERGRAD, tasks.FLOOR, 1.2)
    most = max(ratios)
    assert verdict.answer == answer
    assert f"{most:.2f} (97.5%" in verdict.why and f"T {8 * (1 + ratios.index(most))}" in verdict.why
    assert "8 rounds" in verdict.why
    assert points[0].time(tasks.PERGRAD).mean == pytest.approx(ratios[0], rel=1e-3)


def test_two_rounds_show_nothing():
    point = a_point(8, 1.0)
    cut = {name: dataclasses.replace(r, seconds=r.seconds[:2]) for name, r in point.results.items()}
    point = dataclasses.replace(point, results=cut)
    assert overhead.time_verdict("claim", [point], tasks.PERGRAD, tasks.FLOOR, 9.0).answer == NOT_SHOWN


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


def test_a_reference_in_a_figure():
    sheet = Sheet()
    curve = ([1, 2, 4], [2.0, 3.0, 20.0], [1.5, 2.5, 18.0], [2.5, 3.5, 22.0])
    level = {"logx": True, "logy": True, "reference": (1.0, "jax.grad")}
    figures.lines_with_bands(sheet, {"ours": curve}, "T / D", "time", **level)
    (ax,) = sheet.axes
    low, high = ax.get_ylim()
    assert 0 < low < 1 and high > 20
    legend = ax.get_legend()
    assert legend is not None and "jax.grad" in [text.get_text() for text in legend.get_texts()]
