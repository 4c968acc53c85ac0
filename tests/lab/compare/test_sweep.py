"""Sweeps: what is done is not done again, and no method loses for want of tuning."""

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pergrad.lab import cli, progress
from pergrad.lab.compare import sweep
from pergrad.lab.config import Model, Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import findings
from pergrad.lab.progress import RunsBar
from pergrad.lab.run.records import directory
from tests.support import labs, pages

SEEDS = (0, 1, 2)
ADAM, SIGN = Train(optimizer="adam"), Train(optimizer="sign_ema")


def result(loss: float) -> dict[str, Any]:
    diverged = not math.isfinite(loss)
    losses = dict.fromkeys(("train_loss", "tune_loss", "test_loss"), None if diverged else loss)
    return {"steps": 10, "diverged": diverged, **losses}


@pytest.fixture
def runs(monkeypatch):
    """Runs that are made up: the loss is lowest at a learning rate, and infinite far above it."""
    done = []

    def run(config: Train, path: Path, cache: Any) -> dict[str, Any]:
        best = {"adam": 1e-2, "sign_ema": 6.4e-2}[config.optimizer]
        distance = math.log2(config.learning_rate / best)
        done.append(config)
        out = result(math.inf if distance > 3.5 else 1 + distance**2 + 0.01 * config.seed)
        if out["test_loss"] is not None:
            out["test_loss"] += 5  # what is reported is not what was tuned on
        if config.optimizer == "sign_ema" and out["test_loss"] is not None:
            out["test_loss"] += 3 + 0.001 * config.seed
        path.mkdir(parents=True)
        (path / "result.json").write_text(json.dumps(out))
        (path / "config.json").write_text(json.dumps({"data": {"digest": "of all text"}}))
        rows = [{"step": i + 1, "loss": out["train_loss"]} for i in range(config.steps)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return out

    monkeypatch.setattr(sweep, "_run", run)
    return done


def test_the_grid_grows_to_where_the_best_is(runs, tmp_path):
    tuned = sweep.tune(
        {"Adam": ADAM, "SignEMA": SIGN},
        {"Adam": [5e-3, 1e-2, 2e-2], "SignEMA": [1e-2, 2e-2, 4e-2]},
        SEEDS,
        tmp_path,
        tuning_seeds=2,
        extensions=3,
    )
    assert tuned["Adam"].method.learning_rate == 1e-2 and not tuned["Adam"].is_on_edge
    assert sorted(tuned["Adam"].tried) == [5e-3, 1e-2, 2e-2]
    assert not tuned["SignEMA"].is_on_edge
    assert sorted(tuned["SignEMA"].tried) == [1e-2, 2e-2, 4e-2, 8e-2, 0.16]
    # The losses are a parabola of the logarithm, so its lowest point is found, between two rates.
    assert tuned["SignEMA"].method.learning_rate == pytest.approx(6.4e-2, rel=1e-5)
    assert tuned["Adam"].reported == pytest.approx({0: 6, 1: 6.01, 2: 6.02})
    assert len(runs) == len(set(runs)) == (3 + 5) * 2 + 2 * 3


def test_seeds_that_choose_are_not_reported(runs, tmp_path):
    rates = {"Adam": [5e-3, 1e-2, 2e-2]}
    tuned = sweep.tune({"Adam": ADAM}, rates, SEEDS, tmp_path, tuning_seeds=2)["Adam"]
    choosing = {seed for own in tuned.tried.values() for seed in own}
    assert set(tuned.reported) == set(SEEDS) and choosing == {1000, 1001}
    again = findings.read(findings.rows({"Adam": tuned}), {"Adam": ADAM})["Adam"]
    assert again.by_rate == tuned.by_rate and again.reported == tuned.reported
    assert again.method.learning_rate == tuned.method.learning_rate == sweep.lowest_point(again.by_rate)
    with pytest.raises(LabError, match="seed 1001: seeds from 1000 on choose"):
        sweep.tune({"Adam": ADAM}, rates, (0, 1001), tmp_path, tuning_seeds=2)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0, 1.0, 3.0], 0.02),
        ([2.0, 1.0, 1.5], 0.02 * 2 ** (1 / 6)),
        ([1.0, 1.0, 1.0], 0.01),  # the smallest of those that are as good as others
        ([1.0, 2.0, 3.0], 0.01),  # at an edge
        ([2.0, 1.0, math.inf], 0.02),  # no parabola
        ([math.inf] * 3, 0.01),
    ],
)
def test_the_lowest_point_of_a_parabola(losses, expected):
    by_rate = {
        rate: [loss - 0.1, loss + 0.1] for rate, loss in zip((0.01, 0.02, 0.04), losses, strict=True)
    }
    assert sweep.lowest_point(by_rate) == pytest.approx(expected, rel=1e-5)


def test_down_from_where_all_diverge(runs, tmp_path):
    rates = {"Adam": [0.4, 0.8]}
    tuned = sweep.tune({"Adam": ADAM}, rates, SEEDS, tmp_path, tuning_seeds=1, extensions=8)["Adam"]
    assert not tuned.is_on_edge and 5e-3 < tuned.method.learning_rate < 2e-2


def test_an_edge_that_is_left_is_told(runs, tmp_path):
    rates = {"SignEMA": [1e-3, 2e-3]}
    tuned = sweep.tune({"SignEMA": SIGN}, rates, SEEDS, tmp_path, tuning_seeds=1, extensions=1)
    assert tuned["SignEMA"].is_on_edge


def test_runs_of_other_text_are_not_compared(runs, tmp_path):
    first, second = (replace(ADAM, seed=seed) for seed in SEEDS[:2])
    sweep.run_all([first, second], tmp_path)
    file = directory(tmp_path, first) / "config.json"
    file.write_text(json.dumps({"data": {"digest": "of other text"}}))
    with pytest.raises(LabError, match=r"the text of stdlib is not the same .* Choose another"):
        sweep.run_all([first, second], tmp_path)


def test_what_is_done_is_not_done_again(runs, tmp_path):
    wanted = [replace(ADAM, seed=seed) for seed in SEEDS]
    first = sweep.run_all(wanted[:2], tmp_path)
    told = []
    second = sweep.run_all([*wanted, wanted[0]], tmp_path, told=lambda *args: told.append(args))
    assert runs == wanted and {c: second[c] for c in wanted[:2]} == first
    assert [(config, done, of) for config, _, done, of in told] == [(wanted[2], 3, 3)]


def test_one_learning_rate_is_no_grid(tmp_path):
    with pytest.raises(LabError, match="Adam"):
        sweep.tune({"Adam": ADAM}, {"Adam": [1e-2]}, SEEDS, tmp_path, tuning_seeds=1)


@pytest.mark.parametrize(
    "wrong", ["--optimizers", "--seeds", "--tuning-seeds=0", "--processes=0", "--learning-rates"]
)
def test_a_sweep_of_nothing(wrong, tmp_path, capsys):
    assert cli.main(["sweep", f"--out={tmp_path}", wrong]) == 1
    assert capsys.readouterr().err.startswith("error: ") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("one", ["--optimizer=adam", "--learning_rate=0.1", "--seed"])
def test_what_a_sweep_takes_several_of(one, tmp_path, capsys):
    assert cli.main(["sweep", f"--out={tmp_path}", one, "1"]) == 1
    name = one.partition("=")[0].replace("_", "-")
    assert re.search(rf"write, for example, {name}s .* in place of {name}\.", capsys.readouterr().err)
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--help"])
    assert not re.search(rf"{name}\s", capsys.readouterr().out)


def test_several_processes(tmp_path):
    text = labs.write_text(tmp_path / "text")
    model = Model(layers=1, width=16, heads=2, context=16)
    config = Train(data=str(text), model=model, batch_size=4, steps=4)
    wanted = [config, replace(config, learning_rate=0.02)]
    several = sweep.run_all(wanted, tmp_path / "several", processes=2)
    with pages.jax_as_for_users():
        sweep.run_all(wanted[:1], tmp_path / "one")
    assert set(several) == set(wanted)
    metrics = [
        (directory(tmp_path / n, config) / "metrics.jsonl").read_text() for n in ("several", "one")
    ]
    losses = [[json.loads(line)["loss"] for line in text.splitlines()] for text in metrics]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert several[config] != several[wanted[1]]


# Who watches.


def test_lines_where_there_is_no_terminal(runs, tmp_path):
    file = io.StringIO()
    console = Console(file=file, width=40)
    grid = [1e-2, 2e-2, 0.4]
    sweep.run_all([replace(ADAM, learning_rate=1e-2)], tmp_path)
    with RunsBar(console) as bar:
        for of in (2, 3):
            sweep.run_all([replace(ADAM, learning_rate=r) for r in grid[:of]], tmp_path, told=bar.told)
    first, second = file.getvalue().splitlines()
    assert (
        first.startswith("2 of 2: adam at 0.02, batch 16, seed 0: loss 2.000 (") and "tokens/s" in first
    )
    assert second.startswith("3 of 3: adam at 0.4, batch 16, seed 0: diverged (")


def test_a_bar_in_a_terminal(monkeypatch):
    """20 steps, of 16 windows of 64 tokens, in 10 s, and 3 such runs to come; then the grid grows."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)

    def shown() -> str:
        with console.capture() as capture:
            console.print(bar._progress.get_renderable())
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capture.get())

    with RunsBar(console) as bar:
        assert "no run is done yet" in shown()
        now = 10.0
        bar.told(ADAM, result(2.5) | {"steps": 20}, 5, 8)
        assert "5/8 adam at 0.01, batch 16, seed 0 loss 2.500" in shown()
        assert "2,048 tokens/s" in shown() and "0:00:30 left" in shown()
        now = 20.0
        assert "0:00:20 left" in shown()
        bar.told(replace(ADAM, domain="images", data="digits"), result(math.inf), 6, 12)
        assert "6/12" in shown() and "diverged" in shown()
        assert "1,024 tokens/s, 8 images/s" in shown() and "0:01:00 left" in shown()
    assert "5 of 8" not in file.getvalue()


def test_a_bar_in_a_narrow_terminal(monkeypatch):
    """It has one line, and the name of the run is cut there, but no number."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    with RunsBar(console) as bar:
        now = 10.0
        config = replace(ADAM, optimizer="micro_sign_sgd", learning_rate=0.0340158)
        bar.told(config, result(2.5) | {"steps": 300}, 121, 276)
        with console.capture() as capture:
            console.print(bar._progress.get_renderable())
    (line,) = (line for line in capture.get().splitlines() if "121/276" in line)
    line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip()
    assert len(line) <= 80 and "121/276 micro_sign_sgd at 0.0" in line
    assert line.endswith("… loss 2.500 30,720 tokens/s 0:25:50 left")


# The page.


def test_a_sweep_and_its_page(tmp_path, capsys):
    """Real runs, tiny ones, by the command; a second time nothing is run."""
    labs.write_text(tmp_path / "<script>")
    options = [
        "--steps=25",
        "--batch-size=4",
        "--model.layers=1",
        "--model.width=16",
        "--model.context=16",
    ]
    command = ["sweep", f"--out={tmp_path / 'out'}", f"--data={tmp_path / '<script>'}", *options]
    command += [
        "--optimizers",
        "adam",
        "sign_ema",
        "--learning-rates",
        "0.01",
        "0.02",
        "--seeds",
        "0",
        "1",
        "2",
    ]
    command += ["--processes=1", "--extensions=0", "--tuning-seeds=1"]
    with pages.jax_as_for_users():
        assert cli.main(command) == 0
    first = capsys.readouterr().out
    assert "10 of 10" in first and "report.html" in first
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script>" not in text and "&lt;script&gt;" in text and text.count('src="data:image/svg') == 3
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 10 and {row["method"] for row in rows} == {"adam", "sign_ema"}
    assert cli.main(command) == 0
    assert "of 10" not in capsys.readouterr().out


def test_verdicts_of_a_page(runs, tmp_path):
    """Of runs whose answer is known: SignEMA is worse by 3, whatever the seed."""
    rates = {"Adam": [5e-3, 1e-2, 2e-2], "SignEMA": [3.2e-2, 6.4e-2, 0.128]}
    tuned = sweep.tune({"Adam": ADAM, "SignEMA": SIGN}, rates, SEEDS, tmp_path, tuning_seeds=1)
    page = findings.page(tuned, tmp_path, title="", command="")
    (verdict,) = page.sections[1].verdicts
    assert verdict.answer == "contradicted" and verdict.difference.mean == pytest.approx(3.001)
    page = findings.page(dict(reversed(tuned.items())), tmp_path, title="", command="")
    assert page.sections[1].verdicts[0].answer == "supported"


def test_batch_sizes(runs, tmp_path):
    """Compared within a batch size, though the loss would be lower at another; the level is shared."""
    config = Train(steps=24, batch_size=16)
    methods = sweep.methods(config, ("adam", "sign_ema"), (16, 64, 16))
    assert list(methods) == [
        "adam, batch 16",
        "sign_ema, batch 16",
        "adam, batch 64",
        "sign_ema, batch 64",
    ]
    assert [(m.batch_size, m.steps) for m in methods.values()] == [(16, 24), (16, 24), (64, 6), (64, 6)]
    rates = dict.fromkeys(methods, (1e-2, 2e-2, 4e-2))
    tuned = sweep.tune(methods, rates, SEEDS, tmp_path, tuning_seeds=1, extensions=3)
    page = findings.page(tuned, tmp_path, title="", command="")
    assert [verdict.claim for verdict in page.sections[1].verdicts] == [
        "sign_ema, batch 16 ends below adam, batch 16",
        "sign_ema, batch 64 ends below adam, batch 64",
    ]
    assert all("97.5%" in verdict.why for verdict in page.sections[1].verdicts)
    assert findings.write(tuned, tmp_path, tmp_path / "out", title="", command="").exists()


def test_one_batch_size_keeps_the_names():
    config = Train(steps=24, batch_size=16)
    assert list(sweep.methods(config, ("adam", "sign_ema", "adam"))) == ["adam", "sign_ema"]
    assert sweep.methods(config, ("adam",), (8,)) == {"adam": replace(config, batch_size=8, steps=48)}


@pytest.mark.parametrize("size", [0, -4, 7, 1000])
def test_batch_sizes_that_see_other_examples(size):
    with pytest.raises(LabError, match=str(size)):
        sweep.methods(Train(steps=24, batch_size=16), ("adam",), (16, size))
