"""Damaged checkpoints: a run resumes with the numbers of an undisturbed one, or ends with an error."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pergrad.lab.config import Model, Train
from pergrad.lab.errors import LabError
from pergrad.lab.run import checkpoints
from pergrad.lab.run.records import directory
from pergrad.lab.run.train import Unwatched, parameters, train
from tests.support import labs, selection

# All ways to damage a file, or those that have their turn.
SOME_DAMAGE = slice(None) if selection.HOW_MANY == "all" else slice(selection.TURN % 6, None, 6)
TINY = Model(layers=1, width=16, heads=2, context=16)


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory):
    with labs.compiled_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Train:
    return Train(
        data=str(labs.write_text(tmp_path_factory.mktemp("text"), files=12)),
        model=TINY,
        optimizer="micro_adam",
        batch_size=4,
        steps=12,
        checkpoint_every=4,
        validate_every=6,
    )


class Watcher(Unwatched):
    """Keeps what a run says, and stops it after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def start(self, config: Any, step: int, price: Any) -> None:
        self.started = step
        if step == self.stop_after:
            raise KeyboardInterrupt

    def advance(self, row: dict[str, Any]) -> None:
        if row["step"] == self.stop_after:
            raise KeyboardInterrupt


def outcome(path: Path) -> tuple[bytes, bytes]:
    return (path / "metrics.jsonl").read_bytes(), (path / "result.json").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> tuple[bytes, bytes]:
    path = tmp_path_factory.mktemp("undisturbed")
    train(config, path)
    return outcome(path)


@pytest.fixture(scope="module")
def interrupted(config, tmp_path_factory) -> Path:
    """A run that was stopped after step 11, with checkpoints of steps 4 and 8."""
    path = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(KeyboardInterrupt):
        train(config, path, Watcher(stop_after=11))
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["4", "8"]
    return path


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def damages(content: bytes, seed: str) -> list[bytes | None]:
    """Contents with a flipped bit at many places, bytes overwritten, cut off or added; None: no file."""
    rng = random.Random(seed)
    places = {0, len(content) // 2, len(content) - 1, rng.randrange(len(content))}
    flipped = [
        content[:i] + bytes([content[i] ^ (1 << rng.randrange(8))]) + content[i + 1 :] for i in places
    ]
    middle = len(content) // 2
    overwritten = content[:middle] + b"\0" * (len(content) - middle)
    cut = [content[:-1], content[:middle], b""]
    return [*flipped, overwritten, *cut, content + b"\n", None]


def write(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


def test_every_file_of_a_checkpoint_damaged_in_many_ways(config, undisturbed, interrupted, tmp_path):
    path, tried = tmp_path / "run", 0
    for file in files(interrupted / "checkpoints" / "8"):
        name = file.relative_to(interrupted)
        content = file.read_bytes()
        for damaged in damages(content, str(name))[SOME_DAMAGE]:
            if damaged == content:
                continue
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(interrupted, path)
            write(path / name, damaged)
            watcher = Watcher(stop_after=4)
            try:
                train(config, path, watcher)
            except KeyboardInterrupt:
                (line,) = watcher.said
                assert watcher.started == 4 and "after step 4" in line and "\n" not in line
                assert str(path / "checkpoints" / "8") in line and (path / "damaged" / "8").is_dir()
                tried += 1
            else:  # another space between the same checksums
                assert file.name == checkpoints.CHECKSUMS and outcome(path) == undisturbed
        train(config, path)  # after the last damage
        assert outcome(path) == undisturbed
    assert tried > (60 if selection.HOW_MANY == "all" else 8)


def test_an_intact_run_says_nothing_and_can_be_interrupted_again(
    config, undisturbed, interrupted, tmp_path
):
    path = tmp_path / "run"
    shutil.copytree(interrupted, path)
    for _ in range(2):
        watcher = Watcher(stop_after=10)
        with pytest.raises(KeyboardInterrupt):
            train(config, path, watcher)
        assert (watcher.started, watcher.said) == (8, [])
    train(config, path)
    assert outcome(path) == undisturbed and not (path / "damaged").exists()


def test_no_checkpoint_is_left(config, interrupted, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(interrupted, path)
    for step in ("4", "8"):
        data = max(files(path / "checkpoints" / step), key=lambda p: p.stat().st_size)
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    before = {p: p.read_bytes() for p in files(path)}
    with pytest.raises(LabError, match="begin again") as error:
        train(config, path)
    assert "\n" not in str(error.value) and str(path / "checkpoints" / "8") in str(error.value)
    assert {p: p.read_bytes() for p in files(path)} == before


@pytest.mark.parametrize("step", [4, 8])
def test_killed_before_the_checksums_are_written(config, undisturbed, tmp_path, monkeypatch, step):
    real = checkpoints.write_checksums

    def killed(path: Path, about: Any) -> None:
        if path.name == str(step):
            raise KeyboardInterrupt
        real(path, about)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "write_checksums", killed)
        train(config, tmp_path)
    watcher = Watcher()
    train(config, tmp_path, watcher)
    assert watcher.started == step - 4 and outcome(tmp_path) == undisturbed
    (line,) = watcher.said
    assert "not written to its end" in line


def test_old_checkpoints_go_when_the_new_one_is_whole(config, undisturbed, tmp_path, monkeypatch):
    real = checkpoints.write_checksums

    def watched(path: Path, about: Any) -> None:
        if path.name == "8":
            assert (path.parent / "4").exists()
        real(path, about)

    monkeypatch.setattr(checkpoints, "write_checksums", watched)
    one = replace(config, keep=1)
    train(one, tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["12"]


def test_damaged_metrics(config, undisturbed, interrupted, tmp_path):
    """The metrics of steps 5 to 8 are computed again; steps 1 to 4 belong to both checkpoints."""
    lines = (interrupted / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for line in (6, 2):
        path = tmp_path / f"line_{line}"
        shutil.copytree(interrupted, path)
        digit = lines[line].index(b'"loss": ') + len(b'"loss": ') + 3
        wrong = lines[line][:digit] + bytes([lines[line][digit] ^ 1]) + lines[line][digit + 1 :]
        json.loads(wrong)
        (path / "metrics.jsonl").write_bytes(b"".join([*lines[:line], wrong, *lines[line + 1 :]]))
        if line == 2:
            with pytest.raises(LabError, match=r"metrics\.jsonl"):
                train(config, path)
        else:
            watcher = Watcher()
            train(config, path, watcher)
            assert outcome(path) == undisturbed and watcher.started == 4 and "metrics" in watcher.said[0]


def test_a_study_reads_no_damaged_checkpoint(config, tmp_path):
    path = directory(tmp_path, config)
    train(config, path)
    intact = parameters(config, path)
    assert sorted(intact) == [8, 12]
    data = max(files(path / "checkpoints" / "12"), key=lambda p: p.stat().st_size)
    content = np.frombuffer(data.read_bytes(), np.uint8).copy()
    content[-3] ^= 4
    data.write_bytes(content.tobytes())
    with pytest.raises(LabError, match="checkpoints/12"):
        parameters(config, path)
