"""What a run, or many of them, looks like in the terminal while it goes on."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from pergrad.lab.config import Train


class ProgressBar:
    """Loss, time left, examples per second, and what the statistics cost, measured at the start."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None

    def start(self, config: Train, step: int, price: Callable[[], float] | None) -> None:
        if step:
            self.console.print(f"going on after step {step}")
        shown = "" if price is None else self._measured(price)
        self._unit, self._per_step = _work(config)
        self._first, self._began = step, time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),  # all of it in 80 columns
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn(shown),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self._task = self._progress.add_task(
            config.optimizer, total=config.steps, completed=step, loss="-", speed=""
        )
        self._progress.start()

    def _measured(self, price: Callable[[], float]) -> str:
        with self.console.status("measuring what the statistics cost"):
            measured = price()
        self.console.print(f"statistics and mean gradient take {measured:.2f} x jax.grad (measured)")
        return f"{measured:.2f} x grad"

    def advance(self, row: dict[str, Any]) -> None:
        assert self._progress is not None
        seconds = time.monotonic() - self._began
        speed = (row["step"] - self._first) * self._per_step / max(seconds, 1e-9)
        loss = "not a number" if row["loss"] is None else f"{row['loss']:.3f}"
        self._progress.update(
            self._task, completed=row["step"], loss=loss, speed=f"{speed:,.0f} {self._unit}/s"
        )
        if "tune_loss" in row and row["tune_loss"] is not None:
            self._progress.console.print(f"step {row['step']}: validation loss {row['tune_loss']:.3f}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class RunsBar:
    """Runs done of all that are known, the last one, work per second of all processes, time left.

    `told` is a `sweep.Told`. Only runs that end while it watches count for speed and time left; one that
    went on from a checkpoint counts as if it were whole. Without a terminal each run is a line.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._watched = 0
        self._work: Counter[str] = Counter()
        self._progress = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[speed]}", style="cyan"),
            _TimeLeft(),
            console=console,
            disable=not console.is_interactive,
        )

    def __enter__(self) -> RunsBar:
        self._began = time.monotonic()
        self._task = self._progress.add_task("no run is done yet", total=None, speed="", end=None)
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def told(self, config: Train, result: dict[str, Any], done: int, of: int) -> None:
        unit, per_step = _work(config)
        self._watched += 1
        self._work[unit] += result["steps"] * per_step
        now = time.monotonic()
        seconds = max(now - self._began, 1e-9)
        loss = "diverged" if result["diverged"] else f"loss {result['tune_loss']:.3f}"
        method = f"{config.optimizer} at {config.learning_rate:g}, batch {config.batch_size}"
        run = f"{method}, seed {config.seed}: {loss}"
        speed = ", ".join(f"{n / seconds:,.0f} {unit}/s" for unit, n in self._work.items())
        if self._progress.disable:
            self.console.print(f"{done} of {of}: {run} ({speed})", soft_wrap=True)
        end = now + (of - done) * seconds / self._watched
        self._progress.update(
            self._task, completed=done, total=of, description=run, speed=speed, end=end
        )

    def say(self, line: str) -> None:
        """A line about work that is not a run, above the bar."""
        self._progress.console.print(Text(line), soft_wrap=True)


class _TimeLeft(ProgressColumn):
    """Until `end`, the time of `time.monotonic` at which a task is expected to be done."""

    def render(self, task: Task) -> Text:
        end = task.fields["end"]
        if end is None:
            return Text("")
        left = datetime.timedelta(seconds=round(max(0.0, end - time.monotonic())))
        return Text(f"{left} left", style="progress.remaining")


def _work(config: Train) -> tuple[str, int]:
    """What examples consist of, and how many a step sees."""
    if config.data == "digits":
        return "images", config.batch_size
    return "tokens", config.batch_size * config.model.context
