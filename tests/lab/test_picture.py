"""The picture of the noise scale, in a terminal and elsewhere."""

import contextlib
import io
import re

from rich.console import Console

from pergrad.lab.config import Train
from pergrad.lab.picture import LABELS, ROWS, NoisePicture, draw

CONFIG = Train(steps=100, batch_size=16)


def row(step: int, scale: float | None) -> dict:
    return {"step": step, "loss": 2.5, "noise": {"noise_scale": scale}}


def heights(lines: list[str]) -> list[int]:
    """How many lines of every column are full."""
    columns = [line[LABELS + 2 :].ljust(72) for line in lines[:ROWS]]
    return [sum(line[i] == "█" for line in columns) for i in range(70)]


def test_columns_are_as_high_as_the_logarithm():
    lines = draw([(1, 10.0), (51, 100.0)], 100, 80)
    assert heights(lines) == [5] * 35 + [10] + [0] * 34
    assert lines[0].startswith("     100 │") and lines[5].startswith("      10 │")
    assert len(lines) == ROWS + 1 and max(map(len, lines)) <= 80
    assert heights(draw([(1, 1000.0)], 1, 80))[0] == 10  # the axis grows
    assert heights(draw([(1, 0.5)], 1, 80))[0] == 0  # below 1
    assert heights(draw([], 100, 80)) == [0] * 70


def test_letters_for_a_terminal_without_them():
    lines = draw([(1, 10.0)], 10, 40, is_unicode=False)
    assert all(line.isascii() for line in lines) and "#" in lines[-2] and "#" not in lines[0]


def test_elsewhere_it_is_printed_once():
    file = io.StringIO()
    with contextlib.closing(NoisePicture(Console(file=file, width=100), CONFIG)) as picture:
        picture.doing("reading the data")
        for step, scale in ((10, None), (20, 12.0), (30, 40.0)):
            picture.advance(row(step, scale))
    lines = file.getvalue().splitlines()
    assert lines[0] == "reading the data ..." and len(lines) == 1 + ROWS + 1 + 1
    assert lines[-1].strip() == "noise scale 40, batch 16, loss 2.50, step 30 of 100"
    assert max(map(len, lines)) <= 80


def test_in_a_terminal_it_grows():
    file = io.StringIO()
    console = Console(file=file, width=60, force_terminal=True, color_system=None)
    with contextlib.closing(NoisePicture(console, CONFIG)) as picture:
        picture.doing("compiling")
        picture.advance(row(10, 12.0))
        picture.advance({"step": 11, "loss": None})
        picture.say("a line above")
        picture.advance(row(20, 40.0))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    first, last = shown.index("noise scale 12, batch 16"), shown.index("noise scale 40, batch 16")
    assert shown.index("compiling") < first < shown.index("a line above") < last
