"""The numbers of a benchmark as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pergrad.lab.bench.tasks import PERGRAD, family

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """What a table of a comparison shows of its rows, and what the reader has to know."""

    header: tuple[str, ...]
    cells: Callable[[Row], list[str]]  # the texts below the header
    said: str
    notes: Callable[[Sequence[Row]], list[str]]


def show(console: Console, title: str, rows: Sequence[Row], columns: Columns) -> None:
    """Prints one comparison, its floor first, and which candidates were left out and why.

    No number is cut. In a pipe the table is as wide as it needs to be; in a terminal long names are
    wrapped; and where that is not enough, every candidate has lines of its own.
    """
    table = _table(title, rows, columns)
    needed = Measurement.get(console, console.options.update(max_width=1000), table)
    if not console.is_terminal:
        Console(file=console.file, width=needed.maximum).print(table)
    elif needed.minimum <= console.width:
        console.print(table)
    else:
        console.print(Text(title, "bold"))
        for row in measured(rows):
            name, *numbers = columns.cells(row)
            units = [header.replace("\n", " ") for header in columns.header[1:]]
            said = [f"{unit} {number}" for unit, number in zip(units, numbers, strict=True) if number]
            console.print(Text(f"{name}: {', '.join(said)}", "bold" if _is_ours(row) else ""))
    notes = [columns.said, *columns.notes(rows), *_left_out(rows)]
    console.print(Text("\n".join(notes), "italic"))


def _table(title: str, rows: Sequence[Row], columns: Columns) -> Table:
    """The table of a comparison, without the columns that are empty."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge, table.padding = False, (0, 1, 0, 0)
    lines = [columns.cells(row) for row in measured(rows)]
    there = [any(column) for column in zip(*lines, strict=True)]
    for i, name in enumerate(columns.header):
        if there[i]:
            width = max(len(word) for word in [*name.split("\n"), *(line[i] for line in lines)])
            look: dict[str, Any] = {"justify": "right", "no_wrap": True, "min_width": width}
            if not i:
                look = {"overflow": "fold"}
            table.add_column(name, **look)
    for row, line in zip(measured(rows), lines, strict=True):
        shown = (Text(cell) for cell, is_there in zip(line, there, strict=True) if is_there)
        table.add_row(*shown, style="bold" if _is_ours(row) else "")
    return table


def _is_ours(row: Row) -> bool:
    return family(row["candidate"]) == PERGRAD


def _left_out(rows: Sequence[Row]) -> list[str]:
    return [f"without {row['candidate']}: {row['left_out']}" for row in rows if "left_out" in row]


def _cells_of_runs(row: Row) -> list[str]:
    ratios, process = row["ratios"], row.get("process", {})
    low, _, high = row["quartiles"]
    return [
        row["candidate"],
        f"{1e3 * row['minimum']:.1f}",
        f"{1e3 * low:.0f}–{1e3 * high:.0f}",
        f"{ratios['time']:.2f}",
        _number(ratios.get("tuned"), 1, ".2f"),
        _number(row["temp_bytes"], 1e-6, ".1f"),
        _number(ratios["memory"], 1, ".2f"),
        _number(ratios["compile"], 1, ".2f"),
        _number(process.get("peak_bytes"), 1e-6, ".0f"),
    ]


def _notes_on_runs(rows: Sequence[Row]) -> list[str]:
    if is_disturbed(rows):
        return ["the floor's times vary widely: was the machine busy? Do not trust these"]
    return []


def is_disturbed(rows: Sequence[Row]) -> bool:
    """Whether half of the floor's runs took 1.5 times the fastest: then the machine was busy."""
    floor = measured(rows)[0]
    return floor["quartiles"][1] > 1.5 * floor["minimum"]


RUNS = Columns(
    header=(
        "candidate",
        "time\nms",
        "quartiles\nms",
        "time\nx",
        "time\nx tuned",
        "memory\nMB",
        "memory\nx",
        "compile\nx",
        "process\nMB",
    ),
    cells=_cells_of_runs,
    said="x: as a multiple of the first row; x tuned: of the fastest way to the mean gradient alone; "
    "memory: what XLA sets aside for intermediate results",
    notes=_notes_on_runs,
)


BRIEF = Columns(  # fits 80 columns
    header=("candidate", "time\nms", "time\nx", "memory\nMB", "memory\nx"),
    cells=lambda row: [_cells_of_runs(row)[i] for i in (0, 1, 3, 5, 6)],
    said="x: as a multiple of the first row; memory: what XLA sets aside for intermediate results",
    notes=_notes_on_runs,
)


def _cells_of_target(row: Row) -> list[str]:
    if "out_of_memory" in row:
        return [row["candidate"], "out of memory", "", "", row["out_of_memory"], *[""] * 5]
    ratios = row["ratios"]
    return [
        row["candidate"],
        f"{1e3 * row['seconds']:.3g}",
        _number(ratios["time"], 1, ".2f"),
        _number(ratios["tuned"], 1, ".2f"),
        _number(row["temp_bytes"], 1e-6, ".1f"),
        _number(ratios["memory"], 1, ".2f"),
        _number(row["hbm_bytes"], 1e-9, ".3g"),
        _number(ratios["traffic"], 1, ".2f"),
        _number(row["operations"], 1e-9, ".4g"),
        _number(ratios["operations"], 1, ".2f"),
    ]


def _notes_on_target(rows: Sequence[Row]) -> list[str]:
    """Which instructions the time does not wholly include, and what conditionals make of it.

    Instructions are shown by their names without numbers.
    """
    notes = []
    for row in measured(rows):
        if has_conditional(row):
            least = 1e3 * row["least_seconds"]
            notes.append(f"{row['candidate']}: {least:.3g} ms with the cheapest branch of conditionals")
        if unknown := dict.fromkeys(name.split(".")[0] for name in row.get("unknown", ())):
            notes.append(f"without an estimate in {row['candidate']}: {', '.join(unknown)}")
    return notes


TARGET = Columns(
    header=(
        "candidate",
        "time\nms",
        "time\nx",
        "time\nx tuned",
        "memory\nMB",
        "memory\nx",
        "traffic\nGB",
        "traffic\nx",
        "operations\nG",
        "operations\nx",
    ),
    cells=_cells_of_target,
    said="x: as a multiple of the first row; x tuned: of the fastest way to the mean gradient alone; "
    "memory: what XLA sets aside for intermediate results; traffic: bytes read and written in the "
    "chip's memory; operations: matrix products and convolutions",
    notes=_notes_on_target,
)


def has_conditional(row: Row) -> bool:
    """Whether the time of a compiled program depends on the branches that its conditionals take."""
    return "least_seconds" in row and row["least_seconds"] < 0.995 * row["seconds"]


def measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "left_out" not in row]


def _number(value: float | None, scale: float, form: str) -> str:
    """A number as text; the empty text if it is not known."""
    return "" if value is None or math.isnan(value) else format(scale * value, form)
