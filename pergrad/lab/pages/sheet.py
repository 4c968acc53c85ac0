"""The sheet that a figure is drawn on: its style, labels and legend, and what part of the data is seen.

Every figure of the lab keeps two rules. Every value is seen: a value that would flatten all others lies
outside the axes, but an arrow at their edge points to it, and its number is written on the sheet. And
every label can be read: the sheet grows until the names fit, so that none is cut or covers another.

A figure is drawn twice: on a sheet as wide as a page, and on one as narrow as a phone. As SVG it follows
the reader's colours: it has those of the day, and a style that puts others in their place at night.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Sheet
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

# The colours of Okabe and Ito, which colour-blind readers can tell apart, and lighter ones for night.
_METHODS = {
    "#0072b2": "#4c9aff",
    "#d55e00": "#ff8342",
    "#009e73": "#2cc99a",
    "#cc79a7": "#e59ac6",
    "#e69f00": "#f5b335",
    "#56b4e9": "#8fd3ff",
    "#4d4d4d": "#b8bec6",
}
_COLOURS = tuple(_METHODS)
_INK, _GROUND = "#1c1e21", "#ffffff"
_NIGHT = _METHODS | {
    _GROUND: "#16181b",
    _INK: "#e6e7e9",
    "#000000": "#e6e7e9",
    "#222222": "#d5d8dc",
    "#444444": "#a3a9b1",
    "#666666": "#8b929b",
    "#888888": "#70767e",
    "#dddddd": "#33383e",
    "#e6e6e6": "#33383e",
    "#f3f3f3": "#22262b",
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", "-.", ":")

WIDE, NARROW = 7.6, 4.0  # inches: the width of a sheet
_STYLE = {
    "figure.figsize": (WIDE, 4.3),
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "savefig.dpi": 160,
    "svg.hashsalt": "pergrad",
    "font.size": 10,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
LINE = 0.17  # inches: the height of a line of small letters
FLATTENED = 4  # how many times as high axes may become for the sake of unusual values
_ROOM_BESIDE = 3.5  # inches: a legend up to this height fits beside axes of the usual height


def render(title: str, draw: Callable[[Sheet], None]) -> tuple[bytes, bytes]:
    """A figure with its title, as PNG and as SVG."""
    png = io.BytesIO()
    with _drawn(title, draw, WIDE) as sheet:
        sheet.savefig(png, format="png", metadata={"Software": None})
        return png.getvalue(), _svg(sheet)


def narrow(title: str, draw: Callable[[Sheet], None]) -> bytes:
    """The same figure on a sheet as narrow as a phone, as SVG."""
    with _drawn(title, draw, NARROW) as sheet:
        return _svg(sheet)


@contextlib.contextmanager
def _drawn(title: str, draw: Callable[[Sheet], None], width: float) -> Iterator[Sheet]:
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # The font may lack a letter (it has no Chinese). A box in its place does not spoil the page.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        sheet = Sheet(layout="constrained")
        sheet.set_figwidth(width)
        draw(sheet)
        sheet.suptitle(plain(title, int(9.4 * sheet.get_figwidth())), x=0.01, ha="left")
        yield sheet


def _svg(sheet: Sheet) -> bytes:
    """The sheet as SVG, with a style that changes its colours at night."""
    out = io.StringIO()
    sheet.savefig(out, format="svg", metadata={"Date": None})
    rules = (
        f'[style*="{what}: {day}"],[{what}="{day}"]{{{what}:{night} !important}}'
        for day, night in _NIGHT.items()
        for what in ("fill", "stroke")
    )
    style = f"<style>@media screen and (prefers-color-scheme: dark){{{''.join(rules)}}}</style>\n"
    return out.getvalue().replace('<g id="figure_1">', f'{style}<g id="figure_1">', 1).encode()


def is_narrow(fig: Any) -> bool:
    return fig.get_figwidth() < (WIDE + NARROW) / 2


# Axes, names and legends.


def axes(fig: Sheet, xlabel: str, ylabel: str) -> Axes:
    ax = fig.add_subplot()
    label(ax, xlabel, ylabel)
    return ax


def label(ax: Axes, xlabel: str, ylabel: str) -> None:
    ax.set_xlabel(plain(xlabel, 36 if is_narrow(ax.figure) else 70))
    ax.set_ylabel(plain(ylabel, 38))


def look_of(name: Any, names: Sequence[Any]) -> dict[str, Any]:
    """Colour, marker and dash of a method, which follow from its place among all methods."""
    i = list(names).index(name)
    colour, dash = _COLOURS[i % len(_COLOURS)], DASHES[i // len(_COLOURS) % len(DASHES)]
    return {"color": colour, "marker": marker(i), "ls": dash}


def marker(i: int) -> str:
    return _MARKERS[i % len(_MARKERS)]


def grey(**look: Any) -> Line2D:
    """A grey mark for a legend, which explains a mark that all methods share."""
    return Line2D([], [], **({"color": "#666666", "ls": "", "ms": 7} | look))


def legend(fig: Sheet, ax: Axes, entries: Sequence[tuple[Any, str]]) -> None:
    """Draws a legend beside the axes if it fits there; else below them, in two columns.

    On a narrow sheet it is always below them, in one column.
    """
    handles = [handle for handle, _ in entries]
    beside = [_lines(said, 28) for _, said in entries]
    look = {"labelspacing": 0.7, "fontsize": 9}
    if not is_narrow(fig) and _height(beside) <= max(_ROOM_BESIDE, fig.get_figheight() - 0.8):
        ax.legend(handles, beside, **look, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
        return
    columns = 1 if is_narrow(fig) else 2
    below = [_lines(said, 46) for _, said in entries]
    half = -(-len(below) // columns)
    fig.set_figheight(fig.get_figheight() + max(_height(below[:half]), _height(below[half:])))
    fig.legend(handles, below, **look, loc="outside lower left", ncols=columns)


def _lines(text: str, width: int) -> str:
    return "\n".join(plain(line, width) for line in text.split("\n"))


def _height(labels: Sequence[str]) -> float:
    """The height of a column of a legend, in inches."""
    return sum(LINE * (said.count("\n") + 1) + 0.09 for said in labels)


# What is seen.


def limits(
    mean: Any, low: Any, high: Any, *, usual: float | None = None, log: bool = False
) -> tuple[float, float] | None:
    """Limits that contain the means, and their intervals unless those are far wider than the others.

    A loss that exploded would flatten all others. So a mean far above `usual` (by default, above three
    quarters of the means) is outside, with its interval: "far" is `FLATTENED` times the span of the
    usual means. A logarithmic axis has room for all values above 0. The result is None if there is
    nothing to see. The caller marks the values that are outside.
    """
    known = np.array([mean, low, high], float)
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            known = np.log(known)
    mean, low, high = known[:, np.isfinite(known[0])]
    if not mean.size:
        return None
    most = math.inf if log else float(np.quantile(mean, 0.75)) if usual is None else usual
    is_seen = mean <= most + (FLATTENED * (most - mean.min()) or math.inf)
    whole = is_seen & np.isfinite(low) & np.isfinite(high)
    low, high = low[whole], high[whole]
    first, last = mean.min(), mean[is_seen].max()
    room = max(last - first, np.median(high - low) if whole.any() else 0) or abs(first) / 2 or 1.0
    first, last = max(min([first, *low]), first - room), min(max([last, *high]), last + room)
    pad = 0.06 * (last - first or room)
    first, last = float(first - pad), float(last + pad)
    return (math.exp(first), math.exp(last)) if log else (first, last)


def outside(values: Any, seen: tuple[float, float]) -> Iterator[tuple[int, float, bool]]:
    """Where finite values leave the limits `seen`.

    It yields, for every stretch of values outside, the index and the value of the farthest one, and
    whether it is above.
    """
    values = np.where(np.isfinite(values), values, math.nan)
    side = (values > seen[1]).astype(int) - (values < seen[0])
    edges = [*np.flatnonzero(np.diff(side, prepend=0)), len(values)]
    for begin, end in itertools.pairwise(edges):
        if side[begin]:
            far = begin + int(np.argmax(side[begin] * values[begin:end]))
            yield far, float(values[far]), bool(side[begin] > 0)


def is_cut(low: Any, high: Any, seen: tuple[float, float]) -> bool:
    """Whether an interval goes on outside the limits. The interval of a single seed is not drawn."""
    low, high = np.asarray(low, float), np.asarray(high, float)
    known = np.isfinite(low) & np.isfinite(high)
    return bool((known & ((low < seen[0]) | (high > seen[1]))).any())


def arrow(ax: Axes, x: float, y: float, to: str, colour: str) -> None:
    """Draws an arrow at the edge of the axes to a value outside. `to` is one of ^ v < >."""
    ax.plot([x], [y], to, color=colour, ms=8, mec="white", mew=0.8, clip_on=False, zorder=6)


def ticks(axis: Axis, values: Iterable[float], log: bool) -> None:
    """Sets ticks at the values themselves, if there is room for their labels."""
    points = np.array(sorted(set(values)))
    gaps = np.diff(np.log(points) if log else points)
    most = 5 if is_narrow(axis.get_figure()) else 10
    if len(points) <= most and (not len(gaps) or gaps.min() > 0.8 / most * gaps.sum()):
        axis.set_ticks(points.tolist(), labels=[short(v) for v in points])
        axis.set_minor_locator(NullLocator())


def plain_log(axis: Axis) -> None:
    """Labels a logarithmic axis with 1, 2, 5, 10, not with powers, and with fewer over many decades."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1, 3)))
    axis.set_major_formatter(lambda value, _: short(value))
    axis.set_minor_locator(NullLocator())


# Words.


def short(value: float) -> str:
    """0.0003, 1e-5, 2890: three digits, and no zeros in the exponent."""
    if 1e3 <= abs(value) < 1e5:
        return f"{value:.0f}"
    return re.sub(r"e([-+])0*", lambda m: "e" + m[1].strip("+"), f"{value:.3g}")


def plain(text: str, width: int) -> str:
    """Text for matplotlib, in lines of at most `width`, with dollars and odd bytes escaped."""
    text = text.encode(errors="backslashreplace").decode().replace("$", r"\$")
    return textwrap.fill(text, width)
