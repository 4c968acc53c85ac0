"""The progress bar of a run: it measures the price of statistics, which changes nothing else."""

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pergrad.lab import timing
from pergrad.lab.config import Model, Train
from pergrad.lab.progress import ProgressBar
from pergrad.lab.run import train
from tests.support import labs, pages


@pytest.fixture(autouse=True)
def as_for_users():
    with pages.jax_as_for_users():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return labs.write_text(tmp_path_factory.mktemp("text"))


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
    assert "1.04 x jax.grad at its best (measured)" in shown
    last = [line for line in re.split(r"[\r\n]", shown) if "2/2" in line][-1]
    assert "loss" in last and "tokens/s 1.04 x grad" in last and "00:00" in last
    assert len(measured) == 1 and 0 < measured[0] < math.inf
    train.train(config, tmp_path / "unwatched")
    assert len(measured) == 1  # nobody asked
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("watched", "unwatched")]
    assert metrics[0] == metrics[1]
