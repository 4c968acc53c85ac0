"""What must hold of every figure that the lab draws: all of it is in sight and can be read.

A value that is drawn lies within the limits of its axes, or its number is written on the sheet and an
arrow stands at the edge. No label leaves the sheet, and none covers another.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Sheet
from matplotlib.text import Text

from pergrad.lab.pages import report
from pergrad.lab.pages import sheet as sheets

ARROWS = {"^", "v", "<", ">"}


@contextlib.contextmanager
def checked() -> Iterator[list[str]]:
    """Checks every figure that is drawn within; gives the titles of those that were."""
    drawn: list[str] = []

    def checking(render: Any) -> Any:
        def render_and_check(title: str, draw: Any) -> Any:
            kept: list[Sheet] = []

            def keep(sheet: Sheet) -> None:
                kept.append(sheet)
                draw(sheet)

            out = render(title, keep)
            check(kept[0], title)
            if render is not narrow:
                drawn.append(title)
            return out

        return render_and_check

    narrow = sheets.narrow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sheets, "render", checking(sheets.render))
        patch.setattr(sheets, "narrow", checking(narrow))
        yield drawn


def check(sheet: Sheet, title: str = "") -> None:
    sheet.draw_without_rendering()
    words = " ".join(" ".join(text.get_text() for text in _texts(sheet)).split())
    for ax in sheet.axes:
        hidden = [value for value in _outside(ax) if sheets.short(value) not in words]
        assert not hidden, f"{title}: {hidden} are outside the axes, and nothing says so"
        if _leaves(ax):
            assert "cut at the edge" in words or arrows(ax), f"{title}: an interval is cut silently"
    _check_labels(sheet, title)


def unwritten(sections: Sequence[report.Section]) -> list[str]:
    """The cells of the tables' columns of numbers that stand in no figure of the sections."""
    words = ""
    for figure in (figure for section in sections for figure in section.figures):
        sheet = Sheet(layout="constrained")
        figure.draw(sheet)
        sheet.draw_without_rendering()
        words += " ".join(" ".join(text.get_text() for text in _texts(sheet)).split()) + "\n"
    return [
        f"{table.title}, {name}: {cell}"
        for section in sections
        for table in section.tables
        for name, has, column in zip(
            table.header, report.of_numbers(table), zip(*table.rows, strict=True), strict=True
        )
        for cell in column
        if has and not re.search(rf"(?<![\w.]){re.escape(cell)}(?![\w.])", words)
    ]


def _points(line: Any) -> np.ndarray:
    return np.asarray(line.get_xydata(), float).reshape(-1, 2)


def _is_data(ax: Axes, line: Any) -> bool:
    """Not a line that spans the axes, nor an arrow at their edge, nor the end of an error bar."""
    is_end = line.get_marker() in ("|", "_")
    return line.get_transform() == ax.transData and line.get_clip_on() and not is_end


def arrows(ax: Axes) -> list[Any]:
    return [line for line in ax.lines if line.get_marker() in ARROWS and not line.get_clip_on()]


def _outside(ax: Axes) -> list[float]:
    """The farthest values of every line that leaves the axes, and those that no logarithm has."""
    found = []
    for line in (line for line in ax.lines if _is_data(ax, line)):
        points = _points(line)
        points = points[np.isfinite(points).all(1)]
        for values, limits in zip(points.T, (ax.get_xlim(), ax.get_ylim()), strict=True):
            low, high = sorted(limits)
            found += [
                float(x)
                for x in (values.max(initial=low), values.min(initial=high))
                if not low <= x <= high
            ]
    return found


def _leaves(ax: Axes) -> bool:
    """Whether a band or an error bar goes on outside."""
    (x0, x1), (y0, y1) = sorted(ax.get_xlim()), sorted(ax.get_ylim())
    for collection in ax.collections:
        vertices = [path.vertices for path in collection.get_paths()]
        points = np.concatenate([np.asarray(v, float) for v in vertices] or [np.empty((0, 2))])
        points = points[np.isfinite(points).all(1)]
        if collection.get_transform() == ax.transData and points.size:
            slack = 1e-9 * np.array([x1 - x0, y1 - y0])
            if (points + slack < [x0, y0]).any() or (points - slack > [x1, y1]).any():
                return True
    return False


def _texts(sheet: Sheet) -> list[Text]:
    """All that can be seen: ticks beyond the limits are there, but not drawn."""
    hidden = set()
    for axis in sheet.findobj(Axis):
        assert isinstance(axis, Axis)
        low, high = sorted(axis.get_view_interval())
        slack = 1e-6 * min(high - low, abs(low))  # little also where logarithms are drawn
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low - slack <= tick.get_loc() <= high + slack:
                hidden |= {tick.label1, tick.label2}
    found = [text for text in sheet.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in found if text not in hidden]


def _check_labels(sheet: Sheet, title: str) -> None:
    boxes = [(text.get_text(), text.get_window_extent()) for text in _texts(sheet)]
    page = sheet.bbox
    for words, box in boxes:
        assert page.x0 - 2 <= box.x0 and box.x1 <= page.x1 + 2, f"{title}: {words!r} leaves the sheet"
        assert page.y0 - 2 <= box.y0 and box.y1 <= page.y1 + 2, f"{title}: {words!r} leaves the sheet"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        covers = a.x0 + 2 < b.x1 and b.x0 + 2 < a.x1 and a.y0 + 2 < b.y1 and b.y0 + 2 < a.y1
        assert not covers, f"{title}: {one!r} covers {other!r}"
