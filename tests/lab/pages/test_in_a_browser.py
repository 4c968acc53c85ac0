"""Pages in a browser: on a phone, a tablet and a desk, by day and by night."""

import dataclasses
import math
from pathlib import Path

import pytest

from pergrad.lab.compare.sweep import Tuned
from pergrad.lab.config import Model, Train
from pergrad.lab.pages import findings, gather
from pergrad.lab.pages.report import Figure, Section, Table, write
from pergrad.lab.run import records
from tests.support import chromium
from tests.support.made_up import DRAWINGS, a_page, made


@pytest.fixture(scope="module")
def browser():
    with chromium.browser() as browser:
        yield browser


def everything(root: Path) -> Path:
    """All kinds of figures; a table that is far too wide, words and code that are far too long."""
    words = "block_0.attention_norm.bias " * 20
    table = Table("Wide", [f"column {i}" for i in range(60)], [[f"{i}.123456"] * 60 for i in range(9)])
    section = Section(words, f"{'x' * 400} {words}\n\n    {words}", tables=[table])
    page = a_page("some words", [Figure(name, words, draw) for name, draw in DRAWINGS.items()])
    return write(dataclasses.replace(page, sections=[*page.sections, section]), root / "page")


def report(root: Path) -> Path:
    """Runs that differ in everything, so that their names are long."""
    for seed in (0, 1, 2):
        for optimizer, size in (("adam", 16), ("micro_adam", 64), ("micro_adam_msq", 4)):
            config = Train(
                optimizer=optimizer,
                batch_size=size,
                learning_rate=size / 1e4,
                steps=8,
                seed=seed,
                model=Model(width=4 * size),
            )
            losses = [2 + seed / step for step in range(1, 9)]
            made(root / "runs" / f"{optimizer}{seed}", config, losses)
    return gather.write([root / "runs"], root / "page", command="pergrad report runs")


def sweep(root: Path) -> Path:
    """Two optimizers at three learning rates, of which the largest is too large."""
    tuned = {}
    for optimizer, best in (("adam", 1.9), ("micro_adam", 2.0)):
        method = Train(optimizer=optimizer, steps=4, learning_rate=2e-3)
        ended: dict[float, dict[int, dict[str, float | bool | None]]] = {}
        for rate, worse in ((1e-3, 0.1), (2e-3, 0.0), (4e-3, 9.0), (8e-3, math.inf)):
            for seed in (1000, 1001, 1002, *((0, 1, 2) if not worse else ())):
                config = dataclasses.replace(method, learning_rate=rate, seed=seed)
                last = best + worse + seed % 1000 / 50
                losses = [4.0, 3.0, 2.5, last if math.isfinite(last) else None]
                made(records.directory(root / "runs", config), config, losses)
                result = dict.fromkeys(("train_loss", "tune_loss", "test_loss"), losses[-1])
                ended.setdefault(rate, {})[seed] = {**result, "steps": 4, "diverged": losses[-1] is None}
        reported = {seed: ended[2e-3].pop(seed) for seed in (0, 1, 2)}
        tuned[optimizer] = Tuned(method, ended, reported)
    return findings.write(tuned, root / "runs", root, title="A sweep of optimizers", command="pergrad")


@pytest.mark.parametrize("make", [everything, report, sweep])
def test_page_in_a_browser(make, browser, tmp_path):
    chromium.check(browser, make(tmp_path))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("<p style='width: 2000px'>wide</p>", "the page is 2000 wide|is cut"),
        ("<img alt='gone' src='data:image/png;base64,AAAA'>", "no picture: gone"),
        ("<a href='#nowhere'>link</a>", "a broken link: #nowhere"),
        ("<p style='color: #999'>pale words</p>", "hard to read: .*pale words"),
        ("<style>figure img { filter: invert(1); }</style>", "a picture on"),
    ],
)
def test_faults_are_found(fault, words, browser, tmp_path):
    page = write(a_page(), tmp_path)
    page.write_text(page.read_text().replace("</body>", f"{fault}</body>"))
    with pytest.raises(AssertionError, match=words):
        chromium.check(browser, page)
