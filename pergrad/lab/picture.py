"""The noise scale of a run, drawn in the terminal while the run trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pergrad.lab.config import Train

ROWS = 10  # lines of the picture
LABELS = 8  # columns to its left
EIGHTHS = " ▁▂▃▄▅▆▇█"

Point = tuple[int, float]  # a step, and the noise scale there


class NoisePicture:
    """Watches a run (see `Observer` in `run.train`) and draws its noise scale over the steps.

    In a terminal the picture grows with the run. Elsewhere it is printed once, at the end.
    """

    def __init__(self, console: Console, config: Train) -> None:
        self.console, self.config = console, config
        self.points: list[Point] = []
        self._last: dict[str, Any] = {"step": 0, "loss": None}
        self._doing = ""
        self._live = Live(console=console, auto_refresh=False, get_renderable=self.picture)
        if console.is_interactive:
            self._live.start()

    def doing(self, what: str) -> None:
        self._doing = what
        if self.console.is_interactive:
            self._live.refresh()
        else:
            self.console.print(f"{what} ...", soft_wrap=True)

    def say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    def start(self, config: Train, step: int, price: Callable[[], float] | None) -> None:
        pass

    def advance(self, row: dict[str, Any]) -> None:
        self._last = row
        if row.get("noise", {}).get("noise_scale"):  # None where no signal is seen
            self.points.append((row["step"], row["noise"]["noise_scale"]))
            self._live.refresh()

    def picture(self) -> Text:
        """The picture as it is now, with a line on the run below it."""
        width = min(self.console.width, 80)
        lines = draw(self.points, self.config.steps, width, _is_unicode(self.console))
        if not self.points:
            return Text(self._doing)
        scale, loss = self.points[-1][1], self._last["loss"]
        said = "not a number" if loss is None else f"{loss:.2f}"
        lines.append(
            f"{'':{LABELS}}noise scale {scale:.0f}, batch {self.config.batch_size}, loss {said}, "
            f"step {self._last['step']} of {self.config.steps}"
        )
        return Text("\n".join(lines), no_wrap=True)

    def close(self) -> None:
        if self.console.is_interactive:
            self._live.refresh()
            self._live.stop()
        else:
            self.console.print(self.picture())


def draw(points: Sequence[Point], steps: int, width: int, is_unicode: bool = True) -> list[str]:
    """Columns over the steps, as high as the logarithm of the noise scale; lines of `width` at most."""
    columns = width - LABELS - 2
    top = max([2.0, *(math.ceil(math.log10(scale)) for _, scale in points)])  # 10^top is the highest
    heights = [0.0] * columns  # in lines
    firsts = [(step - 1) * columns // steps for step, _ in points]  # the first column of each point
    for (_, scale), first, end in zip(points, firsts, [*firsts[1:], 0], strict=False):
        for column in range(first, max(end, first + 1)):
            heights[column] = ROWS * max(math.log10(scale), 0.0) / top
    lines = []
    for row in reversed(range(ROWS)):
        cells = "".join(_cell(height - row, is_unicode) for height in heights)
        power = next((k for k in range(int(top) + 1) if round(ROWS * k / top) == row + 1), None)
        label = "" if power is None else f"{10**power:,}"
        lines.append(f"{label:>{LABELS}} {'│' if is_unicode else '|'}{cells}".rstrip())
    corner = "└" + "─" * columns if is_unicode else "+" + "-" * columns
    lines.append(f"{'1':>{LABELS}} {corner}")
    return lines


def _cell(height: float, is_unicode: bool) -> str:
    """The part of a column in one line, in eighths, where the letters for them are known."""
    eighths = round(8 * min(max(height, 0.0), 1.0))
    return EIGHTHS[eighths] if is_unicode else "#" if eighths >= 4 else " "


def _is_unicode(console: Console) -> bool:
    return console.encoding.startswith("utf")
