"""A run's metrics as TensorBoard reads them, written as the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import scalar

from pergrad.lab.config import Train
from pergrad.lab.files import disk_errors
from pergrad.lab.run.found import layer_name
from pergrad.lab.run.records import read_metrics
from pergrad.lab.run.train import Observer

FLUSHED = 1.0  # seconds between writing to disk: TensorBoard looks every few seconds


class Events:
    """Passes on to another observer what it sees, and writes event files in `run_dir/tensorboard`.

    The event files are begun anew whenever a run begins or goes on. The metrics that `metrics.jsonl` has
    already are written first, so that steps which a killed run did after its last checkpoint are not
    there twice. At each step, events older than `FLUSHED` seconds are written to disk.
    """

    def __init__(self, run_dir: Path, observer: Observer) -> None:
        self.run_dir, self.out, self._observer = run_dir, run_dir / "tensorboard", observer
        self._writer: EventsWriter | None = None

    def doing(self, what: str) -> None:
        self._observer.doing(what)

    def say(self, line: str) -> None:
        self._observer.say(line)

    def start(self, config: Train, step: int, price: Callable[[], float] | None) -> None:
        self._begin()
        self._observer.start(config, step, price)

    def advance(self, row: dict[str, Any]) -> None:
        assert self._writer is not None
        with disk_errors(self.out):
            _add(self._writer, row)
            if time.monotonic() >= self._flushed + FLUSHED:
                self._flush(self._writer)
        self._observer.advance(row)

    def _begin(self) -> None:
        with disk_errors(self.out):
            for old in self.out.glob("events.out.tfevents.*"):
                old.unlink()
            self.out.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(self.out / "events"))
            for row in read_metrics(self.run_dir):
                _add(self._writer, row)
            self._flush(self._writer)

    def _flush(self, writer: EventsWriter) -> None:
        writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Closes the file, at the end of a run or when it is interrupted."""
        if self._writer is not None:
            with disk_errors(self.out):
                self._writer.close()

    def write_all(self) -> None:
        """Writes the metrics of a run that was done before, and so was not started."""
        if self._writer is None:
            self._begin()


def _add(writer: EventsWriter, row: dict[str, Any]) -> None:
    numbers = {name: x for name, x in row.items() if name not in ("step", "noise", "outliers")}
    numbers |= {_tag(name): x for name, x in row.get("noise", {}).items()}
    summary = [scalar(name, x).value[0] for name, x in numbers.items() if x is not None]
    writer.write_event(Event(wall_time=time.time(), step=row["step"], summary={"value": summary}))


def _tag(name: str) -> str:
    """`noise_scale` as `noise/scale`, and `snr/block/kernel/value` as `noise/layers/snr/block.kernel`.

    TensorBoard shows names with the same beginning together.
    """
    number, of_layer, layer = name.partition("/")
    number = number.removeprefix("noise_")
    return f"noise/layers/{number}/{layer_name(layer)}" if of_layer else f"noise/{number}"
