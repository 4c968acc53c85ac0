"""A table as a figure, in which every number of the table is drawn, and written beside its dot.

Each column of numbers has a panel, with a row for each row of the table. A cell such as
`2.3 (2.2 to 2.4)` is a dot with its interval. A cell without a number, such as `diverged`, is written
and has no dot.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet
from matplotlib.ticker import LogLocator, NullLocator

from pergrad.lab.pages import report, sheet

_NUMBER = r"[-+−]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_CELL = re.compile(rf"({_NUMBER})(?:.*\(({_NUMBER}) to ({_NUMBER})[^)]*\))?")
_TWO_PANELS = 62  # letters beside two panels that leave room for the panels
_DECADES = 20  # from this ratio of the largest to the smallest number on, an axis is logarithmic


class Point(NamedTuple):
    """The numbers in a cell. The ends of the interval are the value itself if there is none."""

    value: float
    low: float
    high: float


def point(cell: str) -> Point | None:
    """The numbers that a cell has, or None if it has words in their place.

    >>> point("2.30 (2.28 to 2.32)"), point("7.1%").value, point("diverged")
    (Point(value=2.3, low=2.28, high=2.32), 7.1, None)
    """
    found = _CELL.match(cell)
    if found is None:
        return None
    value, *ends = (None if text is None else float(text.replace("−", "-")) for text in found.groups())
    low, high = ends if None not in ends else (value, value)
    return Point(value, low, high)  # type: ignore[arg-type]


def of_table(
    table: report.Table, title: str, caption: str, *, names: int = 1, alike: bool = False
) -> report.Figure:
    """The figure of a table, whose first `names` columns are the names of its rows.

    `alike` says that all columns have the same quantity: then their panels have the same axis.
    """
    rows = [_name(table.header[:names], row[:names]) for row in table.rows]
    drawn = [i for i, has in enumerate(report.of_numbers(table)) if has and i >= names]
    columns = [(table.header[i], [row[i] for row in table.rows]) for i in drawn]
    return report.Figure(title, caption, lambda fig: _draw(fig, rows, columns, alike))


def _name(header: Sequence[str], cells: Sequence[str]) -> str:
    """The name of a row. A number in it stands behind the name of its column."""
    pairs = zip(header, cells, strict=True)
    return ", ".join(f"{of} {cell}" if of and point(cell) else cell for of, cell in pairs)


def _draw(
    fig: Sheet, names: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]], alike: bool
) -> None:
    is_narrow = sheet.is_narrow(fig)
    together = [cell for _, cells in columns for cell in cells]
    words = max(map(len, names), default=0) + 2 * max(map(len, together), default=0)
    across = 1 if is_narrow or len(columns) == 1 or words > _TWO_PANELS else 2
    down = -(-len(columns) // across)
    labels = [sheet.plain(name, 20 if is_narrow else 30) for name in names]
    lines = max((label.count("\n") + 1 for label in labels), default=1) + is_narrow
    fig.set_figheight(0.6 + down * (0.7 + max(0.3, 0.1 + sheet.LINE * lines) * len(names)))
    every: list[Axes] = list(fig.subplots(down, across, squeeze=False, sharex=alike).flat)
    for number, (ax, (title, cells)) in enumerate(zip(every, columns, strict=False)):
        look: dict[str, Any] = sheet.look_of(number, range(len(columns))) | {"ls": ""}
        _panel(ax, title, cells, look, _needs_log(together if alike else cells))
        ax.tick_params(labelbottom=True)
        if is_narrow:
            ax.set_yticks([])
            look_of_text: dict[str, Any] = {"fontsize": 9, "va": "bottom"}
            for row, (name, cell) in enumerate(zip(names, cells, strict=True)):
                said = sheet.plain(f"{name}: {cell}", 44)
                ax.text(0.01, row - 0.12, said, transform=ax.get_yaxis_transform(), **look_of_text)
        else:
            ax.set_yticks(range(len(names)), labels if number % across == 0 else [""] * len(names))
            right = ax.secondary_yaxis("right")
            right.set_yticks(range(len(names)), [sheet.plain(cell, 40) for cell in cells], fontsize=9)
            right.spines["right"].set_visible(False)
            for side in (ax, right):
                side.tick_params(axis="y", length=0)
    for ax in every[len(columns) :]:
        ax.set_axis_off()


def _needs_log(cells: Sequence[str]) -> bool:
    ends = [x for cell in cells for x in point(cell) or ()]
    return bool(ends) and min(ends) > 0 and max(ends) / min(ends) > _DECADES


def _panel(ax: Axes, title: str, cells: Sequence[str], look: dict[str, Any], is_log: bool) -> None:
    points = [(row, found) for row, cell in enumerate(cells) if (found := point(cell)) is not None]
    ends = [x for _, found in points for x in found]
    ax.set_xscale("log" if is_log else "linear")
    for row, (value, low, high) in points:
        bars = [[value - low], [high - value]] if low < high else None
        ax.errorbar([value], [row], xerr=bars, **look, ms=6, elinewidth=1.6, capsize=3)
    if is_log:
        ax.xaxis.set_major_locator(LogLocator(numticks=4))
        ax.xaxis.set_major_formatter(lambda value, _: sheet.short(value))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.locator_params(axis="x", nbins=4)
        if ends and min(ends) < 0 < max(ends):
            ax.axvline(0, color="#888888", lw=0.9, zorder=1)
    if not math.isclose(ax.get_xlim()[0], ax.get_xlim()[1]):
        ax.margins(x=0.1)
    ax.set_ylim(len(cells) - 0.5, -0.5 - 0.4 * sheet.is_narrow(ax.figure))
    ax.grid(axis="y", visible=False)
    ax.set_title(sheet.plain(title, 40), fontsize=10, loc="left")
