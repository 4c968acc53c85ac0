"""What a run looks like in the terminal while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pergrad.lab.config import Train


class ProgressBar:
    """Loss, time left, examples per second, and what the statistics cost, measured at the start."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None

    def start(self, config: Train, step: int, price: Callable[[], float]) -> None:
        if step:
            self.console.print(f"going on after step {step}")
        with self.console.status("measuring what the statistics cost"):
            measured = price()
        self._unit, per_example = (
            ("images", 1) if config.data == "digits" else ("tokens", config.model.context)
        )
        self._per_step = config.batch_size * per_example
        self._first, self._began = step, time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn(f"statistics {measured:.2f} x jax.grad (measured)"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task(
            config.optimizer, total=config.steps, completed=step, loss="-", speed=""
        )
        self._progress.start()

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
