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

from pergrad.lab import cli, figures, price, timing, train
from pergrad.lab.config import Model, Train
from pergrad.lab.decide import CONTRADICTED, NOT_SHOWN, SUPPORTED
from pergrad.lab.errors import LabError
from pergrad.lab.progress import ProgressBar
from pergrad.lab.studies import overhead
from pergrad.lab.studies._study import Lab, write
from tests import labs, pages


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


def test_a_budget_that_is_spent():
    (result,) = timing.time_all({"a": a_program()}, rounds=5, budget=-1.0, say=timing.silent)
    assert len(result.seconds) == 1


def test_who_is_told(capsys):
    said = []
    programs = timing.compile_all({"sine": jnp.sin}, jnp.ones(3), say=said.append)
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


ARGS = np.full((3, 2), 0.3, np.float32), np.arange(12, dtype=np.float32).reshape(4, 3) / 12


@pytest.mark.parametrize("name", price.TASKS)
def test_candidates_agree(name):
    found = price.candidates(loss, price.TASKS[name], (1, 4))
    results = price.measure(found, *ARGS, rounds=1, say=timing.silent)
    sizes = [f"{price.MICRO_GRAD}, microbatch {size}" for size in (1, 4)]
    auto = f"{price.PERGRAD}, microbatch auto"
    assert [r.name for r in results] == [price.FLOOR, price.VMAP, *sizes, price.PERGRAD, auto]


def test_candidates_that_differ_are_not_timed():
    found = price.candidates(loss, micro_grad_sizes=(2,), pergrad_sizes=())
    mine = price.micro_grad(lambda w, x: 2 * loss(w, x), lambda g: ({"mean": g}, {}), 2)
    with pytest.raises(LabError, match=r"mine differs from vmap\(grad\)"):
        price.measure(found | {"mine": mine}, *ARGS, rounds=1, say=timing.silent)
    assert len(price.measure(found, *ARGS, rounds=1, say=timing.silent)) == 4


def test_not_a_number_is_a_difference():
    found = price.candidates(loss, micro_grad_sizes=(), pergrad_sizes=())
    with pytest.raises(LabError):
        price.measure(found, np.full_like(ARGS[0], np.nan), ARGS[1], rounds=1, say=timing.silent)


def made_up(name: str, *seconds: float, temp_bytes: float = 1e6) -> timing.Result:
    return timing.Result(name, a_program(temp_bytes=temp_bytes), seconds)


def test_tables():
    results = [
        made_up(price.FLOOR, 0.010, 0.011),
        made_up(f"{price.MICRO_GRAD}, microbatch 1", 0.05),
        made_up(f"{price.MICRO_GRAD}, microbatch 2", 0.04),
        made_up(price.PERGRAD, 0.013, 0.012, temp_bytes=3e6),
        made_up(f"{price.PERGRAD}, microbatch auto", 0.02),
    ]
    best = price.best_of_each(results)
    assert [r.name for r in best] == [results[i].name for i in (0, 2, 3, 4)]
    table = price.report_table("title", best)
    assert list(table.rows[2]) == [price.PERGRAD, "12.0", "1.20", "3.0", "3.00", "1.00"]
    console = Console(file=io.StringIO(), width=120)
    console.print(price.rich_table("title", best))
    assert all(cell in console.file.getvalue() for row in table.rows for cell in row)  # type: ignore


# The command.

TINY = ["--model.layers=1", "--model.width=16", "--model.heads=2", "--model.context=8"]


def test_bench(text, tmp_path, capsys):
    out = tmp_path / "new" / "bench.json"
    options = [f"--data={text}", f"--out={out}", "--statistics=norms", "--rounds=2"]
    assert cli.main(["bench", *TINY, *options, "--batch-size=3"]) == 0
    printed = capsys.readouterr().out
    assert price.PERGRAD in printed and price.VMAP in printed and "time x" in printed
    found = json.loads(out.read_text())
    assert found["config"]["statistics"] == "norms" and found["config"]["model"]["width"] == 16
    assert {"python", "pergrad", "jax"} <= found["versions"].keys()
    assert found["machine"].keys() == {"platform", "cores", "devices"}
    names = [result["candidate"] for result in found["results"]]
    # Of 3 examples no microbatches of 2, 4 or 8.
    sizes = [f"{price.MICRO_GRAD}, microbatch 1", price.PERGRAD, f"{price.PERGRAD}, microbatch auto"]
    assert names == [price.FLOOR, price.VMAP, *sizes]
    for result in found["results"]:
        assert len(result["seconds"]) == 2 and result["minimum"] == min(result["seconds"])
        assert result["temp_bytes"] > 0 and result["ratios"].keys() == {"time", "memory", "compile"}


def test_mistakes(text, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for wrong in (
        ["--rounds=0"],
        ["--batch-size=0"],
        ["--model.heads=3"],
        [f"--data={tmp_path / 'nothing'}"],
        [f"--data={text}", f"--out={tmp_path / 'file' / 'bench.json'}"],
    ):
        assert cli.main(["bench", *TINY, *wrong]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "--statistics=median"])
    assert exit.value.code == 2


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
        (*size, name) for size in every for name in (price.FLOOR, price.VMAP, price.PERGRAD)
    ]
    assert all(len(row["seconds"]) == len(row["quartiles"]) == 3 for row in rows)
    assert all(row["temp_bytes"] > 0 and row["ratios"]["memory"] > 0 for row in rows)
    assert page.count("data:image/png") == 2 and "pergrad study overhead" in page
    assert page.count('class="answer') == 2 * 5  # above all, and in their sections
    files = sorted(path.suffix for path in (tmp_path / "figures").iterdir())
    assert files == [".png", ".png", ".svg", ".svg"]


def a_point(length: int, ratio: float, temp_bytes: float = 1.1e6) -> overhead.Point:
    """pergrad takes `ratio` times `jax.grad`, give or take a percent; there are 8 rounds and then 2."""
    disturbed = [1, 2, 1, 1, 5, 1, 1, 3, 1, 1]  # which meets both
    floor = made_up(price.FLOOR, *disturbed)
    ours = [ratio * s * (1 + 0.01 * (-1) ** i) for i, s in enumerate(disturbed[:8])]
    results = {price.FLOOR: floor, price.PERGRAD: made_up(price.PERGRAD, *ours, temp_bytes=temp_bytes)}
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
    verdict = overhead.time_verdict("claim", points, price.PERGRAD, price.FLOOR, 1.2)
    most = max(ratios)
    assert verdict.answer == answer
    assert f"{most:.2f} (97.5%" in verdict.why and f"T {8 * (1 + ratios.index(most))}" in verdict.why
    assert "8 rounds" in verdict.why
    assert points[0].time(price.PERGRAD).mean == pytest.approx(ratios[0], rel=1e-3)


def test_two_rounds_show_nothing():
    point = a_point(8, 1.0)
    cut = {name: dataclasses.replace(r, seconds=r.seconds[:2]) for name, r in point.results.items()}
    point = dataclasses.replace(point, results=cut)
    assert overhead.time_verdict("claim", [point], price.PERGRAD, price.FLOOR, 9.0).answer == NOT_SHOWN


@pytest.mark.parametrize(
    ("most", "answer"), [(1.2e6, SUPPORTED), (1.3e6, CONTRADICTED), (math.nan, NOT_SHOWN)]
)
def test_claims_about_memory(most, answer):
    points = [a_point(8, 1.0), a_point(16, 1.0, temp_bytes=most)]
    verdict = overhead.memory_verdict("claim", points, price.PERGRAD, 1.2)
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
