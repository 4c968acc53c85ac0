"""A table of a benchmark: a line for each model, a column for each candidate.

The same cells are a table in Markdown and a figure (see `drawings`), so every number that the table has
is in the figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pergrad.lab.bench.tables import Row, has_conditional, measured
from pergrad.lab.bench.tasks import FLOOR, family


class Panel(NamedTuple):
    """A part of the figure, for numbers of one kind."""

    title: str
    is_multiple: bool  # of the mean gradient's


@dataclass(frozen=True)
class Cell:
    """What stands where a model meets a candidate.

    `text` is what the table shows. `points` has the numbers in it, by the panel of the figure that they
    belong to: the lowest and the highest value, which are the same unless a time is not known exactly.
    """

    text: str
    points: Mapping[Panel, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Heading:
    """The column of a candidate: its title in the table, and its name in the legend of the figure."""

    title: str
    name: str
    candidate: str


@dataclass(frozen=True)
class Grid:
    """`lines` has the cells of each model, by the model's title."""

    headings: Sequence[Heading]
    lines: Mapping[str, Sequence[Cell]]

    def __str__(self) -> str:
        return pipes(
            [
                ["model", *(heading.title for heading in self.headings)],
                *([title, *(cell.text for cell in cells)] for title, cells in self.lines.items()),
            ]
        )

    def panels(self) -> list[Panel]:
        """The panels of the figure, in the order of their first numbers, column by column."""
        columns = zip(*self.lines.values(), strict=True)
        return list(
            dict.fromkeys(panel for column in columns for cell in column for panel in cell.points)
        )


def pipes(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, whose first line is the header."""
    header, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([header, "|" + "---|" * len(lines[0]), *rest])


def short(ratio: float) -> str:
    """Three digits: 0.97, 14.3, 424."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


# Candidates beside each other.


@dataclass(frozen=True)
class Column:
    """The column of a candidate: its name without its size, and where its rows are.

    `ratio` says which of the ratios of a row is the time: "time" or "tuned". `chip` is where it ran, if
    a table has several.
    """

    name: str
    candidate: str
    rows: Sequence[Row]
    ratio: str = "time"
    chip: str = ""

    @property
    def before(self) -> str:
        return f"{self.chip}, " if self.chip else ""

    def cell(self, case: str) -> Cell:
        """The time and (temporary memory) of a model, as multiples of a floor's."""
        own = [row for row in self.rows if row["case"] == case]
        names = {row["candidate"]: _without_number(row["candidate"]) for row in own}
        own = [row for row in own if self.candidate in (row["candidate"], names[row["candidate"]])]
        if not own:
            return Cell("")
        (row,) = own
        if "left_out" in row:
            return Cell({"all at once": "the same"}.get(row["left_out"], "–"))
        if "out_of_memory" in row:
            return Cell("out of memory")
        most = row["ratios"].get(self.ratio, math.nan)
        if math.isnan(most):  # rows that are older than the tuned floor
            return Cell("")
        least = most * row["least_seconds"] / row["seconds"] if has_conditional(row) else most
        text = short(most) if least == most else f"{short(least)} to {short(most)}"
        points = {Panel(f"{self.before}time", True): (least, most)}
        memory = row["ratios"].get("memory")
        if memory is not None and not math.isnan(memory):
            text += f" ({short(memory)})"
            points[Panel(f"{self.before}temporary memory", True)] = memory, memory
        return Cell(text, points)


def compared(columns: Sequence[Column], titles: Mapping[str, str]) -> Grid:
    """One task, a line for each model that has numbers. `titles` are the models to show, by case."""
    lines = {title: [column.cell(case) for column in columns] for case, title in titles.items()}
    return Grid(
        [Heading(f"{column.before}{column.name}", column.name, column.candidate) for column in columns],
        {title: cells for title, cells in lines.items() if any(cell.text for cell in cells)},
    )


def _without_number(name: str) -> str:
    """The name without a microbatch size, unless that is `auto`, which is a candidate of its own."""
    return name if name.endswith("auto") else family(name)


# Other numbers.


def in_processes(rows: Sequence[Row], titles: Mapping[str, str], names: Mapping[str, str]) -> Grid:
    """A line for each model: the peak memory of its process in MB. `names` are those of candidates."""
    lines = {}
    for case, title in titles.items():
        own = [row for row in measured(rows) if row["case"] == case and "process" in row]
        peaks = {_without_number(r["candidate"]): r["process"]["peak_bytes"] / 1e6 for r in own}
        if peaks:
            lines[title] = [_one(peaks.get(name), "{:.0f}", Panel("MB", False)) for name in names]
    return Grid([Heading(said, said, name) for name, said in names.items()], lines)


def building(rows: Sequence[Row], titles: Mapping[str, str] | None = None) -> Grid:
    """A line for each model: seconds to trace and compile the floor, then multiples of them.

    `titles` are the models to show, by case; without them all, by the names of the cases.
    """
    own = [row for row in rows if row["part"] == "compile" and row["axis"] is None]
    names = list(dict.fromkeys(family(row["candidate"]) for row in own))
    lines = {}
    for case, title in (titles or {row["case"]: row["case"] for row in own}).items():
        found = {
            family(row["candidate"]): row["lower_seconds"] + row["compile_seconds"]
            for row in own
            if row["case"] == case
        }
        if found:
            floor = found[FLOOR]
            multiples = [found[name] / floor if name in found else None for name in names[1:]]
            cells = [_one(multiple, "", Panel(f"multiple of {FLOOR}", True)) for multiple in multiples]
            lines[title] = [
                Cell(f"{short(floor)} s", {Panel(f"seconds of {FLOOR}", False): (floor, floor)}),
                *cells,
            ]
    return Grid([Heading(f"`{name}`", f"`{name}`", name) for name in names], lines)


def _one(value: float | None, form: str, panel: Panel) -> Cell:
    if value is None:
        return Cell("" if form else "–")
    return Cell(form.format(value) if form else short(value), {panel: (value, value)})
