"""What users get wrong: one line that says what to do, a code that is not 0, and no traceback."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pergrad.lab import cli
from pergrad.lab.config import Train
from pergrad.lab.errors import LabError
from pergrad.lab.files import disk_errors
from pergrad.lab.run import records
from tests.support import labs, pages

SMALL = ("--model.layers=1", "--model.width=16", "--model.heads=2", "--model.context=16")
DONE = {"steps": 3, "diverged": False, "train_loss": 1.0, "tune_loss": 1.0, "test_loss": 1.0}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return labs.write_text(tmp_path_factory.mktemp("text"))


def error_of(args: list[str], capsys) -> str:
    """The line that the command ends with."""
    assert cli.main(args) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--steps=-3", "steps must be at least 1, not -3"),
        ("--batch-size=0", "batch_size must be at least 1"),
        ("--learning-rate=inf", "learning_rate must be a positive number, not inf"),
        ("--learning-rate=nan", "learning_rate must be a positive number, not nan"),
        ("--clip=-1", "clip must be a positive number, not -1.0"),
        ("--max-update=0", "max_update must be a positive number"),
        ("--eps=0", "eps must be a positive number"),
        ("--b1=1.5", "b1 is a decay, from 0 to below 1, not 1.5"),
        ("--b2=1", "b2 is a decay"),
        ("--weight-decay=-0.1", "weight_decay must be at least 0"),
        ("--seed=-1", "seed is -1; choose 0 or more"),
        ("--microbatch-size=0", "microbatch_size must be"),
        ("--model.heads=3", "3 heads cannot share a width of 16"),
        ("--data=/nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_numbers_that_make_no_sense(option, words, text, tmp_path, capsys):
    args = ["train", f"--data={text}", *SMALL, f"--run-dir={tmp_path / 'run'}", option]
    with pages.jax_as_for_users():
        assert words in error_of(args, capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{broken", "config.json cannot be read"),
        ("[1]", "config.json is not a run's configuration. Choose another --run-dir."),
        ('{"config": 3, "data": 4}', "config.json is not a run's configuration."),
        ('{"config": {}, "data": {}}', "has a run with another configuration: b1 is None, not 0.9;"),
    ],
)
def test_a_broken_configuration(content, words, text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    args = ["train", f"--data={text}", *SMALL, f"--run-dir={tmp_path}"]
    with pages.jax_as_for_users():
        assert words in error_of(args, capsys)
    assert (tmp_path / "config.json").read_text() == content


@pytest.mark.parametrize("content", ["{broken", "{}", "[]", json.dumps({**DONE, "steps": 3})[:-9] + "}"])
def test_a_broken_result(content, tmp_path):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(LabError, match=r"result\.json .*[Dd]elete it"):
        records.read_result(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(DONE))
    assert records.read_result(tmp_path) == DONE


@pytest.mark.parametrize(
    "command", ["train --run-dir", "sweep --optimizers adam --out", "study sign --out"]
)
def test_a_file_in_place_of_a_directory(command, text, tmp_path, capfd):
    file = tmp_path / "file"
    file.write_text("mine")
    data = [] if "study" in command else [f"--data={text}", *SMALL]
    with pages.jax_as_for_users():
        error = error_of([*command.split(), str(file), *data], capfd)
    assert str(file) in error and "choose another directory" in error and file.read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "Make room"),
        (errno.EACCES, "you may write"),
        (errno.EROFS, "you may write"),
        (errno.EIO, "Choose another directory"),
    ],
)
def test_disks(number, words):
    with pytest.raises(LabError, match=words), disk_errors(Path("somewhere")):
        raise OSError(number, os.strerror(number))


def test_two_runs_at_a_time(tmp_path):
    config = Train()
    with records.Run(tmp_path, config, "digest", "data"):
        with pytest.raises(LabError, match=r"another process is running .* choose another --run-dir"):
            records.Run(tmp_path, config, "digest", "data")
        with pytest.raises(LabError, match="another process"):
            records.Run(tmp_path, replace(config, seed=1), "digest", "data")


@pytest.fixture
def interrupts():
    """In the background of a script SIGINT is ignored, by the tests and by what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_within_a_callback(interrupts, monkeypatch, capsys):
    """Python drops what a finalizer raises. Ctrl-C at that moment still ends the command."""

    class Interrupts:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def command() -> None:
        one = Interrupts()
        del one
        for _ in range(100):
            time.sleep(0.1)

    monkeypatch.setitem(cli.COMMANDS, "explain", command)
    hook = sys.unraisablehook
    assert cli.main(["explain"]) == 130 and sys.unraisablehook is hook
    assert capsys.readouterr().err == "interrupted; the same command again continues\n"


def test_interrupted(interrupts, text, tmp_path):
    """As by Ctrl-C, in the midst of a run: one line, and the code that a shell expects."""
    options = [f"--data={text}", *SMALL, f"--run-dir={tmp_path}", "--steps=1000000"]
    with subprocess.Popen(
        [sys.executable, "-m", "pergrad.lab", "train", *options],
        env=os.environ | {"PYTHONPATH": str(pages.ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until = time.monotonic() + 120
            while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < until:
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    # Grain warns on JAX before 0.11 that it cannot profile its workers.
    own = [line for line in error.splitlines() if not line.startswith("WARNING:absl:Grain")]
    assert process.returncode == 130 and own == ["interrupted; the same command again continues"]
