"""Progress bars in the terminal: of one run, and of many."""

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
from rich.status import Status
from rich.table import Column
from rich.text import Text

from pergrad.lab.config import Train


class ProgressBar:
    """Shows what a run does before its first step, then its loss, speed, price and the time left.

    The price is the time of the statistics as a multiple of that of `jax.grad`, measured at the start
    (see `Observer.start`).
    In a terminal the work before the first step has a spinner; elsewhere each piece of it is a line.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status: Status | None = None
        self._progress: Progress | None = None

    def doing(self, what: str) -> None:
        if self._progress is not None:
            return
        if not self.console.is_interactive:
            self.console.print(f"{what} ...", soft_wrap=True)
        elif self._status is None:
            self._status = self.console.status(what)
            self._status.start()
        else:
            self._status.update(what)

    def say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    def start(self, config: Train, step: int, price: Callable[[], float] | None) -> None:
        if step:
            self.say(f"going on after step {step}")
        self._config = config
        self._first = step
        self._price = "" if price is None else self._measured(price)
        self._unit, self._per_step = _work(config)

    def _measured(self, price: Callable[[], float]) -> str:
        self.doing("compiling the statistics and jax.grad, to compare their times")
        measured = price()
        self.say(f"statistics and mean gradient take {measured:.2f} x jax.grad at its best (measured)")
        return f"{measured:.2f} x grad"

    def _show(self) -> Progress:
        """Starts the bar, after the first step, so that compilation does not count for the speed."""
        self._stop_status()
        progress = Progress(
            TextColumn("[bold]{task.description}"),  # all of it in 80 columns
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn(self._price),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        config = self._config
        self._task = progress.add_task(
            config.optimizer, total=config.steps, completed=self._first, loss="-", speed=""
        )
        progress.start()
        return progress

    def advance(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        if self._progress is None:
            self._progress = self._show()
            self._first, self._began = row["step"], now
        done = (row["step"] - self._first) * self._per_step
        speed = f"{done / max(now - self._began, 1e-9):,.0f} {self._unit}/s" if done else ""
        loss = "not a number" if row["loss"] is None else f"{row['loss']:.3f}"
        self._progress.update(self._task, completed=row["step"], loss=loss, speed=speed)
        if "tune_loss" in row and row["tune_loss"] is not None:
            self._progress.console.print(f"step {row['step']}: validation loss {row['tune_loss']:.3f}")

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def close(self) -> None:
        self._stop_status()
        if self._progress is not None:
            self._progress.stop()


class RunsBar:
    """Shows how many runs are done, the last of them, the speed of all processes, and the time left.

    `told` is a `sweep.Told`. Only runs that end while the bar watches count for the speed and the time
    left; a run that went on from a checkpoint counts as a whole one. In a narrow terminal the name of
    the run is cut, and no number is. Without a terminal each run is a line.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._watched = 0
        self._work: Counter[str] = Counter()
        self._progress = Progress(
            BarColumn(bar_width=8, table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _Name(),
            TextColumn("{task.fields[loss]}", markup=False),
            TextColumn("{task.fields[speed]}", style="cyan"),
            _TimeLeft(table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_interactive,
        )

    def __enter__(self) -> RunsBar:
        self._began = time.monotonic()
        self._task = self._progress.add_task(
            "no run is done yet", total=None, loss="", speed="", end=None
        )
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
        run = f"{method}, seed {config.seed}"
        speed = ", ".join(f"{n / seconds:,.0f} {unit}/s" for unit, n in self._work.items())
        if self._progress.disable:
            self.console.print(f"{done} of {of}: {run}: {loss} ({speed})", soft_wrap=True)
        end = now + (of - done) * seconds / self._watched
        self._progress.update(
            self._task, completed=done, total=of, description=run, loss=loss, speed=speed, end=end
        )

    def say(self, line: str) -> None:
        """A line about work that is not a run, above the bar."""
        self._progress.console.print(Text(line), soft_wrap=True)


class _Name(ProgressColumn):
    """The description, in one line: the only column that gives way where there is too little room."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _TimeLeft(ProgressColumn):
    """The time left until `end`, when (by `time.monotonic`) a task is expected to be done."""

    def render(self, task: Task) -> Text:
        end = task.fields["end"]
        if end is None:
            return Text("")
        left = datetime.timedelta(seconds=round(max(0.0, end - time.monotonic())))
        return Text(f"{left} left", style="progress.remaining")


def _work(config: Train) -> tuple[str, int]:
    """The unit of work, tokens or images, and how many of them a step sees."""
    if config.domain == "images":
        return "images", config.batch_size
    return "tokens", config.batch_size * config.model.context
