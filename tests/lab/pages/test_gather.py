"""A page about runs that are there, and the command as a newcomer tries it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pergrad.lab import cli
from pergrad.lab.config import Model, Train
from pergrad.lab.pages import gather
from pergrad.lab.run.train import Unwatched, train
from tests.support import labs, pages, sheets
from tests.support.made_up import made

SEEDS = (0, 1, 2)


class Killed(Unwatched):
    """Stops a run after a step."""

    def advance(self, row: dict[str, Any]) -> None:
        if row["step"] == 8:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def figures_in_sight():
    with sheets.checked():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Real runs, tiny ones: two that differ in the seed, one that was killed, one that diverged."""
    root = tmp_path_factory.mktemp("report")
    text = labs.write_text(root / "<script>")
    model = Model(layers=1, width=16, heads=2, context=16)
    config = Train(data=str(text), model=model, batch_size=4, steps=24, noise_every=6)
    with labs.compiled_once(root / "compiled"):
        for seed in (0, 1):
            train(replace(config, seed=seed), root / "runs" / "adam" / str(seed))
        with pytest.raises(KeyboardInterrupt):
            train(replace(config, seed=2), root / "killed", Killed())
        train(replace(config, optimizer="micro_adam_msq", learning_rate=1e6), root / "diverged")
    assert json.loads((root / "diverged" / "result.json").read_text())["diverged"]
    return root


def command(*args: Any) -> int:
    return cli.main([str(arg) for arg in args])


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def methods(*paths: Path) -> dict[str, list[gather.Found]]:
    return gather.group(gather.find(paths))


# The page.


def test_runs(root, tmp_path, capsys):
    assert command("report", root / "runs", "--out", tmp_path / "page") == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "page" / "report.html")
    rows = results(tmp_path / "page")
    assert [(row["method"], row["seed"]) for row in rows] == [("adam", 0), ("adam", 1)]
    assert all(row["finished"] and row["steps"] == 24 for row in rows)
    text = (tmp_path / "page" / "report.html").read_text()
    assert "This page tuned nothing" in text
    assert "<script>" not in text and "&lt;script&gt;" in text
    drawn = ["final-loss-of-each-method", "final-loss-of-each-run", "gradient-norm", "noise-scale"]
    drawn += ["noise-share-of-layers-adam", "training-loss"]
    assert [file.stem for file in sorted((tmp_path / "page" / "figures").glob("*.svg"))] == drawn


def test_killed_and_diverged_runs(root, tmp_path):
    found = [root / "killed", root / "diverged", root / "runs" / "adam"]
    before = sorted(root.rglob("*"))
    assert command("report", *found, "--out", tmp_path) == 0
    assert sorted(root.rglob("*")) == before
    written = {Path(row["run"]).name: row for row in results(tmp_path)}
    assert written["diverged"]["method"] == "micro_adam_msq, learning rate 1e+06"
    assert written["diverged"]["finished"] and written["diverged"]["diverged"]
    assert not written["killed"]["finished"] and written["killed"]["test_loss"] is None
    page = gather.page(methods(*found), command="")
    rows = {row[5]: (row[1], row[3]) for row in page.sections[-1].tables[0].rows}
    assert rows.pop(str(root / "killed")) == ("2", "unfinished")
    assert rows.pop(str(root / "diverged")) == ("0", "diverged")
    assert sorted(rows.values()) == [("0", "done"), ("1", "done")]
    assert not page.sections[0].verdicts and "Compared with no other" in page.sections[0].text
    assert [row[1] for row in page.sections[0].tables[0].rows] == ["2 of 3", "1 of 1"]
    assert page.sections[0].tables[0].rows[1][2] == "diverged"


def test_the_same_run_twice_counts_once(root, tmp_path):
    """Copied when it had come half way, and named twice."""
    run, half = root / "runs" / "adam" / "0", tmp_path / "half"
    half.mkdir()
    shutil.copy(run / "config.json", half)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (half / "metrics.jsonl").write_bytes(b"".join(lines[:12]) + lines[12][:20])
    assert [len(run.rows) for run in gather.find([half])] == [12]
    (only,) = methods(half, run, run)["adam"]
    assert only.path == run


# Runs that are made up.


def test_methods_of_equal_seeds_are_compared(tmp_path):
    """With the first: the one that is named first, and within a directory the slower."""
    for seed in SEEDS:
        made(tmp_path / "runs" / "fast" / str(seed), Train(steps=2, seed=seed), [2, 1 + seed])
        slow = Train(steps=2, seed=seed, learning_rate=1e-4)
        made(tmp_path / "runs" / "slow" / str(seed), slow, [2, 2 + 1.01 * seed])
    slow, fast = "adam, learning rate 0.0001", "adam, learning rate 0.01"
    for first, last, paths, answer in (
        (slow, fast, [tmp_path / "runs"], "supported"),
        (fast, slow, [tmp_path / "runs" / "fast", tmp_path / "runs"], "contradicted"),
    ):
        (verdict,) = gather.page(methods(*paths), command="").sections[0].verdicts
        assert verdict.claim == f"{last} ends below {first}" and verdict.answer == answer


def test_names_say_what_differs(tmp_path):
    a = Train(steps=2, max_update=None)
    b = replace(a, optimizer="micro_adam", batch_size=64, max_update=2.0, model=Model(width=32))
    for name, config in (("a", a), ("b", b)):
        made(tmp_path / name, config, [2, 1])
    assert list(methods(tmp_path)) == [
        "adam, batch size 16, width 64, no max update",
        "micro_adam, batch size 64, width 32, max update 2",
    ]


def test_figures_of_many_different_runs(tmp_path):
    """Long names, many of them, losses that explode and diverge: each label and value is seen."""
    for i, optimizer in enumerate(("adam", "micro_adam", "sign_ema", "micro_adam_msq")):
        for batch_size, width in ((16, 64), (128, 128), (4, 32)):
            model = Model(width=width, layers=width // 16)
            for seed in (0, 1):
                config = Train(
                    optimizer=optimizer,
                    learning_rate=1.23e-4 * batch_size,
                    batch_size=batch_size,
                    steps=480 // batch_size,
                    model=model,
                    seed=seed,
                    clip=1.0 if batch_size == 16 else None,
                )
                losses = [2 + (seed + 1) / step for step in range(1, config.steps + 1)]
                if optimizer == "micro_adam_msq":
                    losses = [10.0 ** (step / 9) for step in range(config.steps)]
                    losses = [*losses[:-1], None] if batch_size == 128 else losses
                made(tmp_path / "runs" / f"{i}-{batch_size}-{seed}", config, losses)
    with sheets.checked() as drawn:
        gather.write([tmp_path / "runs"], tmp_path / "page", command="")
    titles = ["Final loss of each method", "Training loss", "Gradient norm", "Final loss of each run"]
    assert drawn == titles
    found = methods(tmp_path / "runs")
    assert not sheets.unwritten(gather.page(found, command="").sections)


def test_other_data_is_another_method_and_not_compared(tmp_path):
    for seed in SEEDS:
        config = Train(steps=2, seed=seed)
        made(tmp_path / f"a{seed}", config, [2, 1 + seed])
        made(tmp_path / f"b{seed}", config, [2, 2 + seed], data="b")
    found = methods(tmp_path)
    assert set(found) == {"adam, data a", "adam, data b"}
    assert not gather.page(found, command="").sections[0].verdicts


def test_other_seeds_are_not_compared(tmp_path):
    for optimizer, seeds in (("adam", (0, 1, 2)), ("sign_ema", (0, 1, 3)), ("sign_sgd", (0, 1, 3))):
        for seed in seeds:
            config = Train(optimizer=optimizer, steps=2, seed=seed)
            made(tmp_path / f"{optimizer}{seed}", config, [2, 1 + seed])
    first = gather.page(methods(tmp_path), command="").sections[0]
    assert [verdict.claim for verdict in first.verdicts] == ["sign_ema ends below sign_sgd"]
    assert "Compared with no other: adam." in first.text


def test_means_are_over_the_runs_that_came_so_far(tmp_path):
    for seed, losses in enumerate(([4, 3, 2, 1], [2, 1])):
        made(tmp_path / str(seed), Train(steps=4, seed=seed), losses)
    made(tmp_path / "new", Train(steps=4, seed=2), [])
    page = gather.page(methods(tmp_path), command="")
    assert [row[3] for row in page.sections[-1].tables[0].rows] == ["done", "unfinished", "not begun"]
    x, mean, low, _ = gather.curve([[4, 3, 2, 1], [2, 1]], 16)
    assert x.tolist() == [16, 32, 48, 64] and mean.tolist() == [3, 2, 2, 1] and low[3] == -float("inf")
    diverged = gather.curve([[4, 3, 2, 1], [2, None]], 16)[1]
    assert diverged[0] == 3 and not any(mean == mean for mean in diverged[1:])


# Mistakes.


def refused(capsys: Any, *args: Any) -> str:
    """What a command that fails says: one line."""
    assert command(*args) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_no_run_there(tmp_path, capsys):
    page = tmp_path / "page"
    assert "which runs?" in refused(capsys, "report")
    assert "no directory" in refused(capsys, "report", tmp_path / "none", "--out", page)
    (tmp_path / "file").touch()
    assert "no directory" in refused(capsys, "report", tmp_path / "file", "--out", page)
    assert "no run in" in refused(capsys, "report", tmp_path, "--out", page)
    made(tmp_path / "new", Train(), [])
    assert "no metrics yet" in refused(capsys, "report", tmp_path / "new", "--out", page)
    assert not page.exists()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        '{"model_type": "gpt2"}',
        '{"config": {}}',
        '{"config": {"model": {"depth": 3}}}',
        '{"config": {"model": {}, "steps": "ten"}}',
        '{"config": {"model": {}, "seed": "one"}, "data": {"digest": ""}, "versions": {}}',
        '{"config": {"model": {}, "data": []}, "data": {"digest": ""}, "versions": {}}',
        '{"config": {"model": {}, "optimizer": "<b>"}, "data": {"digest": ""}, "versions": {}}',
        '{"config": {"model": {}}, "data": {}, "versions": {}}',
        "\ud800",
    ],
)
def test_foreign_configurations(text, tmp_path, capsys):
    made(tmp_path / "good", Train(steps=1), [1.0])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    assert "config.json" in refused(capsys, "report", tmp_path, "--out", tmp_path / "page")


@pytest.mark.parametrize("file", ["metrics.jsonl", "result.json"])
@pytest.mark.parametrize("text", ["{}\n", "nonsense\n", "[1]\n", '{"step": 7, "loss": 1}\n', "null\n"])
def test_foreign_files(file, text, tmp_path, capsys):
    run = made(tmp_path / "run", Train(steps=1), [1.0])
    (run / file).write_text(text)
    assert file in refused(capsys, "report", run, "--out", tmp_path / "page")


def test_no_place_for_the_page(root, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "cannot write" in refused(capsys, "report", root / "runs", "--out", tmp_path / "file")


# The command, as a newcomer tries it.


def test_help_names_every_command(capsys):
    for args in (["--help"], ["report", "--help"], ["sweep", "--help"]):
        with pytest.raises(SystemExit) as exit:
            cli.main(args)
        assert exit.value.code == 0
    said = capsys.readouterr().out
    assert all(word in said for word in (*cli.COMMANDS, "--batch-sizes", "--out"))


@pytest.mark.parametrize(
    "args", [[], ["reprot"], ["report", "--outt=x"], ["sweep"], ["train", "--step=many"], ["sweep", "x"]]
)
def test_misspelt(args, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(args)
    said = capsys.readouterr()
    assert exit.value.code == 2 and "Traceback" not in said.err and said.err


@pytest.mark.parametrize(
    "args",
    [
        ["train", "--steps=0"],
        ["train", "--data=none"],
        ["sweep", "--out=x", "--data=none", "--processes=1"],
    ],
)
def test_mistakes_are_told_in_a_line(args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(capsys, *args)


def test_nobody_reads_on():
    """`pergrad --help | head -1`, where head is gone before the first line."""
    read, write = os.pipe()
    os.close(read)
    out = subprocess.run(
        [sys.executable, "-m", "pergrad.lab", "--help"],
        cwd=pages.ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert out.stderr == "" and out.returncode == 141
