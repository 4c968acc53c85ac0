"""The page that follows runs, in a browser, beside a run in progress."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pergrad.lab.config import Train
from pergrad.lab.watch import server
from tests.support import chromium, labs
from tests.support.made_up import made
from tests.support.pages import ROOT

CHARTS = ("loss", "learning_rate", "scale", "divisor", "gradient_norm", "outliers")
DRAWN = f"{json.dumps(CHARTS)}.every(id => document.getElementById(id).data?.length)"
KNOWN = """(run => ({
  loss: document.getElementById('loss').data[run].y,
  rate: document.getElementById('learning_rate').data[run].y,
  scale: document.getElementById('scale').data[run].x,
  divisor: document.getElementById('divisor').data[run].y,
  layers: [...document.querySelectorAll('.layers')].map(e => e.data[0].y.length),
  said: [...document.querySelectorAll('#runs .said')].map(e => e.textContent),
}))(0)"""
ELSEWHERE = """performance.getEntriesByType('resource').map(e => e.name).filter(
  name => !name.startsWith(location.origin) && !name.startsWith('data:'))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    with chromium.browser() as browser:
        yield browser


@pytest.fixture
def served(tmp_path) -> Iterator[str]:
    """The address of a page about all runs in `tmp_path / "runs"`."""
    with server.make([tmp_path / "runs"], 0) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.05,))
        thread.start()
        yield page.address
        page.shutdown()
        thread.join()


def noisy(path: Path, config: Train, rows: int) -> Path:
    """A run that is made up, with noise in many layers and outliers."""
    losses = [2 + 3 / step for step in range(1, rows + 1)]
    run = made(path, config, losses)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for i, row in enumerate(lines):
        row |= {"learning_rate": 0.01, "gradient_norm": 1 / (i + 1), "examples": 16 * (i + 1)}
        if i % 20 == 0:
            layers = {f"snr/block_{k}/attention/kernel/value": 0.1 + k / 50 for k in range(24)}
            row["noise"] = {"snr": 0.1, "noise_scale": 100.0 + i, "noise_share": 2.0, "outliers": 0.1}
            row["noise"] |= layers
            text = "def <b>function</b>(self, argument):\n    return " + "x" * 120
            row["outliers"] = [{"place": 3, "norm": 9.0, "times_median": 4.0, "text": text}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return run


def test_a_run_in_progress(browser, served, tmp_path):
    """The page waits for the run, grows with it, and has all of its numbers in the end."""
    browser.open(served, 1440)
    waiting = "document.getElementById('status').textContent.includes('Waiting for')"
    assert browser.wait_for(waiting)
    text, run = labs.write_text(tmp_path / "text"), tmp_path / "runs" / "first"
    options = {"--data": text, "--run-dir": run, "--steps": 60, "--noise-every": 5, "--batch-size": 4}
    options |= {"--model.layers": 1, "--model.width": 16, "--model.heads": 2, "--model.context": 16}
    options |= {"--validate-every": 10, "--checkpoint-every": 10}
    command = [sys.executable, "-m", "pergrad.lab", "train"]
    command += [str(part) for pair in options.items() for part in pair]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as training:
        browser.wait_for("document.getElementById('loss').data?.[0]?.y.length > 0")
        some = browser.ask(KNOWN)
        assert training.wait() == 0
    browser.wait_for("document.querySelector('#runs .said')?.textContent.endsWith('done')")
    browser.wait_for("document.getElementById('loss').data[0].y.length == 60")
    found = browser.ask(KNOWN)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found["loss"] == [row["loss"] for row in rows]
    assert found["loss"][: len(some["loss"])] == some["loss"]
    assert found["rate"] == [row["learning_rate"] for row in rows]
    assert found["scale"] == [row["step"] for row in rows if "noise" in row] == [*range(5, 61, 5)]
    assert all(0 <= share <= 1 for share in found["divisor"])
    assert found["layers"] == [len([name for name in rows[4]["noise"] if name.startswith("snr/")])]
    assert browser.ask(ELSEWHERE) == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", chromium.WIDTHS)
def test_the_page_can_be_read(browser, served, tmp_path, width, dark):
    for name, optimizer, rows in (("a", "adam", 300), ("b", "micro_adam", 200)):
        config = Train(optimizer=optimizer, steps=300, noise_every=20, data="some/long/path" * 5)
        noisy(tmp_path / "runs" / name, config, rows)
    browser.open(served, width, dark=dark)
    browser.wait_for(DRAWN)
    assert browser.ask("[...document.querySelectorAll('.layers')].map(e => e.data[0].y.length)") == [
        24,
        24,
    ]
    assert not (faults := browser.ask(chromium.FAULTS)), faults
    assert not (pale := chromium.pale(browser)), pale
    assert browser.ask("document.querySelectorAll('#examples tbody tr').length") == 20
    assert browser.ask("document.querySelectorAll('#examples b').length") == 0
    said = browser.ask("document.querySelector('#examples tbody code').textContent")
    assert said.startswith("def <b>function</b>(self, argument): ⏎ return xxx")
    named = browser.ask("[...document.querySelectorAll('#scale .ytick text')].map(e => e.textContent)")
    assert set(named) <= {"50", "100", "200", "500", "1000"} and "200" in named
    ink = browser.ask("getComputedStyle(document.body).color")
    drawn = browser.ask("getComputedStyle(document.querySelector('#loss .xtick text')).fill")
    assert ink == drawn


def test_choosing_runs_and_the_axis(browser, served, tmp_path):
    for name, size in (("a", 16), ("b", 32)):
        noisy(tmp_path / "runs" / name, Train(batch_size=size, steps=99, noise_every=20), 40)
    browser.open(served, 1440)
    browser.wait_for(DRAWN)

    def names() -> list[Any]:
        return browser.ask("document.getElementById('loss').data.map(e => e.name)")

    assert names() == ["adam, batch size 16", "adam, batch size 32"]
    browser.ask("document.querySelector('#runs input').click()")
    assert names() == ["adam, batch size 32"]
    browser.ask("document.querySelector('input[value=examples]').click()")
    assert browser.ask("document.getElementById('loss').data[0].x[39]") == 640
    browser.ask("document.querySelector('#runs li:last-child input').click()")
    assert names() == []
    assert "No run is chosen." in browser.ask("document.querySelector('#loss .none').textContent")


def test_a_run_that_is_cut_and_goes_on(browser, served, tmp_path):
    run = noisy(tmp_path / "runs" / "a", replace(Train(), steps=99), 30)
    browser.open(served, 820)
    browser.wait_for("document.getElementById('loss').data?.[0]?.y.length == 30")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = [
        json.dumps({"step": step, "loss": 9.0, "examples": 16 * step}) + "\n" for step in range(11, 36)
    ]
    (run / "metrics.jsonl").write_text("".join([*lines[:10], *again]))
    browser.wait_for("document.getElementById('loss').data[0].y.length == 35")
    assert browser.ask("document.getElementById('loss').data[0].y")[9:12] == [2.3, 9.0, 9.0]


def test_long_runs_keep_their_extremes(browser, served, tmp_path):
    losses: list[float | None] = [2.0 + (i % 7) / 100 for i in range(20_000)]
    losses[7_777], losses[15_001] = 50.0, 0.5
    made(tmp_path / "runs" / "a", Train(steps=30_000), losses)
    browser.open(served, 1440)
    browser.wait_for("document.querySelector('#runs .said')?.textContent.includes('step 20000')")
    browser.wait_for("document.getElementById('loss').data?.[0]?.x.at(-1) > 19900")
    drawn = browser.ask("document.getElementById('loss').data[0]")
    assert len(drawn["y"]) < 2000 and {50.0, 0.5} <= set(drawn["y"])
    assert drawn["x"] == sorted(drawn["x"]) and drawn["x"][drawn["y"].index(50.0)] == 7_778
    assert "--noise-every" in browser.ask("document.querySelector('#scale .none').textContent")


def test_the_server_ends(browser, tmp_path):
    made(tmp_path / "runs" / "a", Train(steps=9), [3.0, 2.0])
    with server.make([tmp_path / "runs"], 0) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.05,))
        thread.start()
        browser.open(page.address, 820)
        browser.wait_for("document.getElementById('loss').data?.[0]?.y.length == 2")
        page.shutdown()
        thread.join()
    browser.wait_for("document.getElementById('status').textContent.includes('does not answer')")
    assert browser.ask("document.getElementById('loss').data[0].y") == [3, 2]
