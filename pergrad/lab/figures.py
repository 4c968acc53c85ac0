"""How the lab draws: one style, and the figures that all studies share.

A figure is a function of a matplotlib figure; it is given an empty one, in the style of the page, and
never meets pyplot or the user's backend. A method has one colour and one marker throughout, also for
those who see fewer colours, and labels stay beside the data.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Sheet
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from pergrad.lab.decide import Estimate
from pergrad.lab.errors import LabError

# Okabe and Ito's.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DASHES = ("-", "--", "-.", ":")
_INTERVAL = "95% interval over seeds"

_STYLE = {
    "figure.figsize": (7.6, 4.3),
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


def render(title: str, draw: Callable[[Sheet], None]) -> tuple[bytes, bytes]:
    """A figure with its title, as PNG and as SVG."""
    png, svg = io.BytesIO(), io.BytesIO()
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # The font has no Chinese, say. A box in a picture is no reason to lose the page.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        sheet = Sheet(layout="constrained")
        draw(sheet)
        sheet.suptitle(_plain(title, 72), x=0.01, ha="left")
        sheet.savefig(png, format="png", metadata={"Software": None})
        sheet.savefig(svg, format="svg", metadata={"Date": None})
    return png.getvalue(), svg.getvalue()


def lines_with_bands(
    fig: Sheet,
    curves: Mapping[str, tuple[Any, Any, Any, Any]],
    xlabel: str,
    ylabel: str,
    *,
    logx: bool = False,
    logy: bool = False,
    interval: str = _INTERVAL,
    reference: tuple[float, str] | None = None,
    names: Sequence[str] = (),
    lines: Mapping[str, float] | None = None,
) -> None:
    """Curves (x, mean, low, high) by method. A cross ends those that are not finite further on.

    `interval` says what lies between low and high. `reference` is a level with its name, to compare the
    curves with, and `lines` are upright, at an x. `names` are all methods of the study, so that each has
    its colour in every figure.
    """
    ax = _axes(fig, xlabel, ylabel)
    ax.set_xscale("log" if logx else "linear")
    ax.set_yscale("log" if logy else "linear")
    entries: list[tuple[float, Any, str]] = []
    arrays = [np.asarray(np.broadcast_arrays(*curve), float) for curve in curves.values()]
    ends = [int(np.cumprod(np.isfinite(array[1])).sum()) for array in arrays]
    for i, (name, array, end) in enumerate(zip(curves, arrays, ends, strict=True)):
        x, mean, low, high = array[:, :end]
        look = look_of(name, [*names, *curves])
        every = max(1, len(x) // 8)
        (line,) = ax.plot(x, mean, **look, lw=1.8, ms=5, markevery=(i * every // len(curves), every))
        low, high = np.where(np.isfinite(low) & np.isfinite(high), (low, high), np.nan)
        ax.fill_between(x, low, high, color=look["color"], alpha=0.2, lw=0)
        if end < array.shape[1]:
            ax.plot(x[-1:], mean[-1:], "x", color=look["color"], ms=10, mew=2.5, zorder=4)
        nothing = "diverged at once" if array.size else "nothing to draw"
        entries.append((mean[-1], line, name) if end else (math.inf, line, f"{name}\n{nothing}"))
    seen = np.concatenate([array[1:, :end] for array, end in zip(arrays, ends, strict=True)], 1)
    if reference is not None:
        level, label = reference
        entries.append((level, ax.axhline(level, color="#222222", lw=1.2, ls=":", zorder=1), label))
        seen = np.concatenate([seen, np.full((3, 1), level)], 1)
    if logy:
        with np.errstate(divide="ignore"):  # the interval of a single value begins at 0
            seen_log = np.log(seen)
        is_cut = _limit(
            lambda low, high: ax.set_ylim(math.exp(low), math.exp(high)), *seen_log, usual=math.inf
        )
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: _short(value))
        ax.yaxis.set_minor_locator(NullLocator())
    else:  # all of the calmest curve is in sight
        tops = [array[1, :end].max() for array, end in zip(arrays, ends, strict=True) if end]
        is_cut = _limit(ax.set_ylim, *seen, usual=min(tops, default=math.inf))
    if logx:
        _ticks(ax.xaxis, {float(x) for array in arrays for x in array[0]}, log=True)
    entries.sort(key=lambda entry: -entry[0])  # from top to bottom as the lines end
    has_band = bool((seen[1] < seen[2])[np.isfinite(seen).all(0)].any())
    notes = [(Patch(color="#666666", alpha=0.25, lw=0), interval)] * has_band
    has_cross = any(end < array.shape[1] for array, end in zip(arrays, ends, strict=True))
    notes += [(_grey(marker="x", mew=2), "diverged from here on")] * has_cross
    notes += [_ABOVE] * is_cut
    for i, (name, x) in enumerate((lines or {}).items()):
        look = {"color": "#222222", "ls": _DASHES[(i + 1) % len(_DASHES)], "lw": 1.4}
        notes.append((ax.axvline(x, **look), f"{name}: {x:.3g}"))
    _legend(ax, [(handle, name) for _, handle, name in entries] + notes)


def loss_against_rate(
    fig: Sheet,
    by_method: Mapping[str, Mapping[float, Estimate]],
    *,
    xlabel: str = "learning rate",
    ylabel: str = "final loss, mean over seeds",
    interval: str = _INTERVAL,
    names: Sequence[str] = (),
) -> None:
    """The loss at every learning rate that was tried, and which is each method's best.

    Above the axes a cross stands for every rate at which a run diverged, in a row for each method.
    """
    falls = [name for name, at in by_method.items() if not all(map(_has_mean, at.values()))]
    fig.set_figheight(max(4.3, 1.3 + 0.45 * len(by_method)))  # as high as the legend
    ax, top = _axes_below_strip(fig, xlabel, ylabel, falls)
    entries: list[tuple[float, Any, str]] = []
    for name, at in by_method.items():
        look = look_of(name, [*names, *by_method])
        sane = {rate: at[rate] for rate in sorted(at) if _has_mean(at[rate])}
        means = [e.mean for e in sane.values()]
        drawn = ax.errorbar(
            list(sane), means, _bars(sane.values()), **look, ms=5, lw=1.6, elinewidth=1.2, capsize=3
        )
        lowest, said = math.inf, "diverged at every rate"
        if sane:
            lowest, best = min((e.mean, rate) for rate, e in sane.items())
            ax.plot(best, lowest, "o", mfc="none", mec=look["color"], mew=1.8, ms=13, zorder=4)
            said = f"best: {lowest:.4g} at {_short(best)}"
        entries.append((lowest, drawn, f"{name}\n{said}"))
        if name in falls:
            crosses = sorted(at.keys() - sane.keys())
            top.plot(crosses, [falls.index(name)] * len(crosses), "x", color=look["color"], ms=7, mew=2)
    known = [e for at in by_method.values() for e in at.values() if _has_mean(e)]
    is_cut = _limit(ax.set_ylim, *columns(known))
    _ticks(ax.xaxis, {rate for at in by_method.values() for rate in at}, log=True)
    entries.sort(key=lambda entry: entry[0])
    notes = [(_grey(marker="o", mfc="none", mew=1.8, ms=11), "best rate of a method")] * bool(known)
    notes += [(_grey(marker="|", mew=1.2, ms=13), interval)] * any(e.n > 1 for e in known)
    notes += [_ABOVE] * is_cut
    _legend(ax, [(handle, label) for _, handle, label in entries] + notes)


def bars_with_intervals(
    fig: Sheet,
    by_method: Mapping[str, Estimate],
    *,
    xlabel: str = f"final loss, mean and {_INTERVAL}",
    names: Sequence[str] = (),
) -> None:
    """A row for each method: its mean, the interval, and both in numbers. A line at 0 if it is in sight.

    Dots, not bars: a bar must begin at 0, and hides small differences of large losses.
    """
    fig.set_figheight(1.5 + 0.42 * len(by_method))
    ax = _axes(fig, xlabel, "")
    for row, (name, e) in enumerate(by_method.items()):
        look = look_of(name, [*names, *by_method])
        look["ls"] = ""
        if _has_mean(e):
            ax.errorbar([e.mean], [row], xerr=_bars([e]), **look, ms=7, elinewidth=2, capsize=4)
    _limit(ax.set_xlim, *columns(filter(_has_mean, by_method.values())))
    ax.locator_params(axis="x", nbins=6)
    rows = range(len(by_method))
    ax.set_yticks(rows, [_plain(name, 34) for name in by_method])
    ax.set_ylim(len(by_method) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    numbers = ax.secondary_yaxis("right")
    numbers.set_yticks(rows, [str(e) for e in by_method.values()])
    for side in (ax, numbers):
        side.tick_params(axis="y", length=0)
    numbers.spines["right"].set_visible(False)
    if ax.has_data() and ax.get_xlim()[0] < 0 < ax.get_xlim()[1]:
        ax.axvline(0, color="#222222", lw=1.2, zorder=1)


def heat_map(
    fig: Sheet,
    x: Sequence[float],
    y: Sequence[float],
    values: Any,
    xlabel: str,
    ylabel: str,
    *,
    label: str,
    marks: Mapping[str, tuple[float, float]],
    logx: bool = False,
    logy: bool = False,
    ticks: tuple[Sequence[str], Sequence[str]] | None = None,
    missing: str = "diverged",
) -> None:
    """`values` [y, x] in colours that `label` explains; hatched where they are not finite: `missing`.

    `x` and `y` ascend; `ticks` are names for them. `marks` are points (x, y), named below the map.
    """
    z = np.ma.masked_invalid(np.asarray(values, float))
    if z.shape != (len(y), len(x)):
        raise LabError(
            f"a heat map of {len(x)} by {len(y)} points needs values [{len(y)}, {len(x)}], not {z.shape}"
        )
    ax = _axes(fig, xlabel, ylabel)
    ax.grid(False)
    ax.set_xscale("log" if logx else "linear")
    ax.set_yscale("log" if logy else "linear")
    ex, ey = _edges(x, logx), _edges(y, logy)
    hatched = {"fc": "#dddddd", "ec": "#888888", "hatch": "////", "lw": 0}
    ax.fill_between(ex[[0, -1]], *ey[[0, -1]], **hatched, zorder=0)
    white = {"edgecolors": "white", "linewidth": 0.4 if z.size <= 200 else 0}
    mesh = ax.pcolormesh(ex, ey, z, cmap="viridis", **white, zorder=1)
    fig.colorbar(mesh, ax=ax, label=_plain(label, 38)).outline.set_visible(False)
    entries: list[tuple[Any, str]] = []
    for i, (name, (at_x, at_y)) in enumerate(marks.items()):
        form = _MARKERS[i % len(_MARKERS)]
        (mark,) = ax.plot(at_x, at_y, form, mfc="white", mec="black", mew=1.6, ms=10, zorder=3)
        entries.append((mark, name))
    if z.mask.any():
        entries.append((Patch(**hatched), missing))
    if ticks is None:
        _ticks(ax.xaxis, set(x), logx)
        _ticks(ax.yaxis, set(y), logy)
    else:
        ax.set_xticks(x, ticks[0])
        ax.set_yticks(y, ticks[1])
    if entries:
        labels = [_plain(name, 30) for _, name in entries]
        fig.legend(
            [mark for mark, _ in entries], labels, loc="outside lower left", ncols=min(3, len(entries))
        )


def _axes(fig: Sheet, xlabel: str, ylabel: str) -> Axes:
    ax = fig.add_subplot()
    _label(ax, xlabel, ylabel)
    return ax


def _label(ax: Axes, xlabel: str, ylabel: str) -> None:
    ax.set_xlabel(_plain(xlabel, 70))
    ax.set_ylabel(_plain(ylabel, 38))


def _axes_below_strip(fig: Sheet, xlabel: str, ylabel: str, rows: Sequence[str]) -> tuple[Axes, Axes]:
    """Axes with a logarithmic x, and above them a strip with `rows` for what diverged, if any."""
    if not rows:
        ax = top = _axes(fig, xlabel, ylabel)
    else:
        fig.set_figheight(fig.get_figheight() + 0.2 * len(rows))
        top, ax = fig.subplots(2, 1, sharex=True, height_ratios=[0.2 * len(rows) + 0.1, 3.4])
        top.set_ylim(len(rows) - 0.4, -0.6)
        top.yaxis.tick_right()
        top.set_yticks(
            range(len(rows)),
            [_plain(textwrap.shorten(name, 30, placeholder="…"), 30) for name in rows],
            fontsize=8,
        )
        top.set_ylabel("diverged", rotation=0, ha="right", va="center")
        top.tick_params(which="both", length=0, labelbottom=False)
        top.set_facecolor("#f3f3f3")
        top.spines[:].set_visible(False)
        top.grid(axis="y", visible=False)
        _label(ax, xlabel, ylabel)
    ax.set_xscale("log")
    return ax, top


def look_of(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Colour, marker and dash of a method, by its place among all."""
    i = list(names).index(name)
    colour, dash = _COLOURS[i % len(_COLOURS)], _DASHES[i // len(_COLOURS) % len(_DASHES)]
    return {"color": colour, "marker": _MARKERS[i % len(_MARKERS)], "ls": dash}


def _grey(**look: Any) -> Line2D:
    """What explains a mark that all methods share."""
    return Line2D([], [], **({"color": "#666666", "ls": "", "ms": 7} | look))


_ABOVE = _grey(marker="^"), "some are above the figure"


def _legend(ax: Axes, entries: Sequence[tuple[Any, str]]) -> None:
    labels = ["\n".join(_plain(line, 28) for line in label.split("\n")) for _, label in entries]
    beside = {"loc": "upper left", "bbox_to_anchor": (1.02, 1), "borderaxespad": 0}
    ax.legend([handle for handle, _ in entries], labels, **beside, labelspacing=0.7, fontsize=9)


def _has_mean(e: Estimate) -> bool:
    return math.isfinite(e.mean)


def columns(estimates: Iterable[Estimate]) -> np.ndarray:
    """Means, lows and highs [3, n]."""
    return np.array([(e.mean, e.low, e.high) for e in estimates]).reshape(-1, 3).T


def _bars(estimates: Iterable[Estimate]) -> np.ndarray:
    """The lengths of error bars [2, n]; none where there is one seed."""
    mean, low, high = columns(estimates)
    bars = np.array([mean - low, high - mean])
    return np.where(np.isfinite(bars), bars, 0)


def _limit(
    set_limits: Callable[[float, float], Any],
    mean: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    *,
    usual: float | None = None,
) -> bool:
    """Limits that contain the means, and the intervals but for those far wider than the others.

    A loss that exploded would flatten all others: what is far above `usual`, by default three quarters
    of the means, is cut off with its interval, and True is returned.
    """
    mean, low, high = np.array([mean, low, high])[:, np.isfinite(mean)]
    if not mean.size:
        return False
    most = float(np.quantile(mean, 0.75)) if usual is None else usual
    is_seen = mean <= most + (most - mean.min() or math.inf)
    known = is_seen & np.isfinite(low) & np.isfinite(high)
    low, high = low[known], high[known]
    first, last = mean.min(), mean[is_seen].max()
    room = max(last - first, np.median(high - low) if known.any() else 0) or abs(first) / 2 or 1.0
    first, last = max(min([first, *low]), first - room), min(max([last, *high]), last + room)
    pad = 0.06 * (last - first or room)
    set_limits(float(first - pad), float(last + pad))
    return not is_seen.all()


def _ticks(axis: Axis, values: set[float], log: bool) -> None:
    """Ticks at the values themselves, if there is room for their names."""
    points = np.sort(np.array(list(values)))
    steps = np.diff(np.log(points) if log else points)
    if len(points) <= 10 and (not len(steps) or steps.min() > 0.08 * steps.sum()):
        axis.set_ticks(points.tolist(), labels=[_short(v) for v in points])
        axis.set_minor_locator(NullLocator())


def _edges(centres: Sequence[float], log: bool) -> np.ndarray:
    c = np.log(centres) if log else np.asarray(centres, float)
    middles = (c[1:] + c[:-1]) / 2
    first, last = (
        (c[0] - 0.5, c[0] + 0.5) if len(c) == 1 else (2 * c[0] - middles[0], 2 * c[-1] - middles[-1])
    )
    edges = np.concatenate([[first], middles, [last]])
    return np.exp(edges) if log else edges


def _short(value: float) -> str:
    """0.0003, 1e-5: three digits, and no zeros in the exponent."""
    return re.sub(r"e([-+])0*", lambda m: "e" + m[1].strip("+"), f"{value:.3g}")


def _plain(text: str, width: int) -> str:
    """Text for matplotlib, in lines of at most `width`: a dollar is a dollar, no byte is lost."""
    text = text.encode(errors="backslashreplace").decode().replace("$", r"\$")
    return textwrap.fill(text, width)
