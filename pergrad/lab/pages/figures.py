"""The figures that all pages of the lab share.

A figure is a function of a matplotlib figure; it is given an empty one, in the style of the page, and
never uses pyplot or the user's backend. A method has one colour and one marker in all figures of a page,
and legends stay beside the data. A value outside the axes has an arrow and its number (see `sheet`).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet
from matplotlib.patches import Patch

from pergrad.lab.compare import decide
from pergrad.lab.errors import LabError
from pergrad.lab.pages import sheet
from pergrad.lab.pages.sheet import look_of

_INTERVAL = "95% interval over seeds"


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
    """Curves (x, mean, low, high) by method. A cross marks where a curve is not finite.

    `interval` says what lies between low and high. `reference` is a horizontal line, given by its level
    and its name, and `lines` are vertical ones, given by their x. `names` are all methods of the study,
    so that each has the same colour in every figure.
    """
    ax = sheet.axes(fig, xlabel, ylabel)
    ax.set_xscale("log" if logx else "linear")
    ax.set_yscale("log" if logy else "linear")
    arrays = {name: np.asarray(np.broadcast_arrays(*c), float) for name, c in curves.items()}
    seen = _seen(arrays, reference, logy)
    ax.set_ylim(*seen)
    entries: list[tuple[float, Any, str]] = []
    crosses: set[str] = set()
    for i, (name, array) in enumerate(arrays.items()):
        x, mean, low, high = array
        look = look_of(name, [*names, *curves])
        every = max(1, len(x) // 8)
        (line,) = ax.plot(x, mean, **look, lw=1.8, ms=5, markevery=(i * every // len(curves), every))
        low, high = np.where(np.isfinite(low) & np.isfinite(high), (low, high), np.nan)
        shade = 0.2 if len(curves) <= 6 else 0.08  # many bands lie on top of each other
        ax.fill_between(x, low, high, color=look["color"], alpha=shade, lw=0)
        said = [name, *_arrows(ax, x, mean, seen, look["color"])]
        crosses |= _crosses(ax, x, mean, seen[1], look["color"])
        last = mean[np.isfinite(mean)][-1:]
        if not last.size:
            said.append("diverged at once" if x.size else "nothing to draw")
        entries.append((last[0] if last.size else math.inf, line, "\n".join(said)))
    if reference is not None:
        level, label = reference
        entries.append((level, ax.axhline(level, color="#222222", lw=1.2, ls=":", zorder=1), label))
    if logy:
        sheet.plain_log(ax.yaxis)
    sheet.ticks(ax.xaxis, {float(x) for array in arrays.values() for x in array[0]}, logx)
    entries.sort(key=lambda entry: -entry[0])  # from top to bottom as the lines end
    notes = _band_note(arrays, seen, interval)
    notes += [(sheet.grey(marker="x", mew=2), note) for note in sorted(crosses)]
    for i, (name, x) in enumerate((lines or {}).items()):
        look = {"color": "#222222", "ls": sheet.DASHES[(i + 1) % len(sheet.DASHES)], "lw": 1.4}
        notes.append((ax.axvline(x, **look), f"{name}: {x:.3g}"))
    sheet.legend(fig, ax, [(handle, name) for _, handle, name in entries] + notes)


def _seen(
    arrays: Mapping[str, np.ndarray], reference: tuple[float, str] | None, log: bool
) -> tuple[float, float]:
    """The limits of y. They contain the curve with the lowest top; on a logarithmic axis, all curves."""
    level = np.full((3, 1), math.nan if reference is None else reference[0])
    values = np.concatenate([level, *(array[1:] for array in arrays.values())], 1)
    tops = [array[1][np.isfinite(array[1])].max(initial=-math.inf) for array in arrays.values()]
    usual = min((top for top in tops if math.isfinite(top)), default=math.inf)
    return sheet.limits(*values, usual=usual, log=log) or (0.1, 1.0)


def _arrows(ax: Axes, x: Any, values: Any, seen: tuple[float, float], colour: str) -> list[str]:
    """Marks where a curve is outside the limits, and returns words on how far it goes."""
    far: dict[bool, float] = {}
    for i, value, is_above in sheet.outside(values, seen):
        sheet.arrow(ax, x[i], seen[is_above], "^" if is_above else "v", colour)
        far[is_above] = (max if is_above else min)(value, far.get(is_above, value))
    words = {True: "▲ outside: up to", False: "▼ outside: down to"}
    return [f"{words[is_above]} {sheet.short(value)}" for is_above, value in far.items()]


def _crosses(ax: Axes, x: Any, mean: Any, top: float, colour: str) -> set[str]:
    """Marks where a curve is not finite: at its end, or above a gap. Returns what the marks mean."""
    there = np.flatnonzero(np.isfinite(mean))
    if not there.size:
        return set()
    look: dict[str, Any] = {"color": colour, "ms": 10, "mew": 2.5, "zorder": 5, "ls": "", "marker": "x"}
    notes = set()
    last = there[-1]
    if last + 1 < len(mean):
        ax.plot(x[last : last + 1], np.minimum(mean[last : last + 1], top), **look, clip_on=False)
        notes.add("diverged from here on")
    gaps = x[: last + 1][~np.isfinite(mean[: last + 1])]
    if gaps.size:
        ax.plot(gaps, np.full(gaps.shape, top), **look, clip_on=False)
        notes.add("at the top: diverged")
    return notes


def _band_note(
    arrays: Mapping[str, np.ndarray], seen: tuple[float, float], interval: str
) -> list[tuple[Any, str]]:
    """The entry of the legend that explains the bands, if there are any."""
    _, mean, low, high = np.concatenate([np.empty((4, 0)), *arrays.values()], 1)
    if not (low < high)[np.isfinite([mean, low, high]).all(0)].any():
        return []
    cut = ", cut at the edge" * sheet.is_cut(low, high, seen)
    return [(Patch(color="#666666", alpha=0.25, lw=0), interval + cut)]


def loss_against_rate(
    fig: Sheet,
    by_method: Mapping[str, Mapping[float, decide.Estimate]],
    *,
    xlabel: str = "learning rate",
    ylabel: str = "final loss (nats), mean over seeds",
    interval: str = _INTERVAL,
    names: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
) -> None:
    """The loss at every learning rate that was tried, with a ring around each method's best.

    `notes` are further words on a method, for the legend.

    A strip above the axes shows the rates that have no place in them, in one row for each method: a
    cross where a run diverged, and a number where the loss is so high that it would flatten all others.
    """
    known = [e for at in by_method.values() for e in at.values() if _has_mean(e)]
    usual = float(np.median([e.mean for e in known])) if known else math.nan
    seen = sheet.limits(*columns(known), usual=usual) or (0.0, 1.0)
    fits = {
        name: {rate: at[rate] for rate in sorted(at) if seen[0] <= at[rate].mean <= seen[1]}
        for name, at in by_method.items()
    }
    rows = [name for name, at in by_method.items() if len(fits[name]) < len(at)]
    fig.set_figheight(max(4.3, 1.3 + 0.45 * len(by_method)))  # as high as the legend
    ax, top = _axes_below_strip(fig, xlabel, ylabel, rows)
    ax.set_ylim(*seen)
    entries: list[tuple[float, Any, str]] = []
    for name, at in by_method.items():
        look = look_of(name, [*names, *by_method])
        own = fits[name]
        drawn = ax.errorbar(
            list(own),
            [e.mean for e in own.values()],
            _bars(own.values()),
            **look,
            ms=5,
            lw=1.6,
            elinewidth=1.2,
            capsize=3,
        )
        sane = {rate: e.mean for rate, e in at.items() if _has_mean(e)}
        best = min(sane, key=lambda rate: (sane[rate], rate), default=math.nan)
        if best in own:
            ax.plot(best, sane[best], "o", mfc="none", mec=look["color"], mew=1.8, ms=13, zorder=4)
        said = f"best: {sane[best]:.4g} at {sheet.short(best)}" if sane else "diverged at every rate"
        said += f"\n{notes[name]}" if notes else ""
        entries.append((sane.get(best, math.inf), drawn, f"{name}\n{said}"))
        if name in rows:
            _row_of_strip(top, rows.index(name), at.items() - own.items(), look["color"])
    sheet.ticks(ax.xaxis, {rate for at in by_method.values() for rate in at}, log=True)
    entries.sort(key=lambda entry: entry[0])
    marks = [(sheet.grey(marker="o", mfc="none", mew=1.8, ms=11), "best rate of a method")]
    marks *= any(fits.values())
    if any(e.n > 1 for e in known):
        _, low, high = columns(e for own in fits.values() for e in own.values())
        cut = ", cut at the edge" * sheet.is_cut(low, high, seen)
        marks.append((sheet.grey(marker="|", mew=1.2, ms=13), interval + cut))
    if rows:
        marks.append((sheet.grey(marker="x", mew=2), "diverged"))
    sheet.legend(fig, ax, [(handle, label) for _, handle, label in entries] + marks)


def _axes_below_strip(fig: Sheet, xlabel: str, ylabel: str, rows: Sequence[str]) -> tuple[Axes, Axes]:
    """Axes with a logarithmic x, and a strip of `rows` above them for values with no place in them."""
    if not rows:
        ax = top = sheet.axes(fig, xlabel, ylabel)
    else:
        fig.set_figheight(fig.get_figheight() + 0.2 * len(rows))
        top, ax = fig.subplots(2, 1, sharex=True, height_ratios=[0.2 * len(rows) + 0.1, 3.4])
        top.set_ylim(len(rows) - 0.4, -0.6)
        top.yaxis.tick_right()
        # On a narrow sheet there is no room for names: the marks have the colours of the methods.
        names = [sheet.plain(textwrap.shorten(name, 30, placeholder="…"), 30) for name in rows]
        names = [""] * len(rows) if sheet.is_narrow(fig) else names
        top.set_yticks(range(len(rows)), names, fontsize=8)
        top.set_ylabel("above the\nfigure", rotation=0, ha="right", va="center", fontsize=8)
        top.tick_params(which="both", length=0, labelbottom=False)
        # A number at the first or the last rate reaches over the edge of the strip.
        top.yaxis.labelpad = 12
        top.tick_params(axis="y", pad=12)
        top.set_facecolor("#f3f3f3")
        top.spines[:].set_visible(False)
        top.grid(axis="y", visible=False)
        sheet.label(ax, xlabel, ylabel)
    ax.set_xscale("log")
    return ax, top


def _row_of_strip(top: Axes, row: int, at: Iterable[tuple[float, decide.Estimate]], colour: str) -> None:
    """Draws a cross where a run diverged, and the number of the loss elsewhere."""
    for rate, e in sorted(at, key=lambda pair: pair[0]):
        if _has_mean(e):
            top.plot([rate], [row], "")  # so that the axes reach as far
            top.text(
                rate, row, f"▲{sheet.short(e.mean)}", color=colour, fontsize=8, ha="center", va="center"
            )
        else:
            top.plot([rate], [row], "x", color=colour, ms=7, mew=2)


def bars_with_intervals(
    fig: Sheet,
    by_method: Mapping[str, decide.Estimate],
    *,
    xlabel: str = f"final loss (nats), mean and {_INTERVAL}",
    names: Sequence[str] = (),
    kind: Callable[[str], str] = lambda name: name,
    log: bool = False,
) -> None:
    """A row for each method: its mean, the interval, and both in numbers. There is a line at 0.

    Means are dots: bars would have to begin at 0, and would hide small differences of large losses.
    Methods of one `kind` have one colour; by default each method is a kind of its own.
    """
    labels, numbers = [sheet.plain(name, 34) for name in by_method], list(map(str, by_method.values()))
    if sheet.is_narrow(fig):  # the number stands below the name, and both above the dot
        labels = [f"{label}\n{number}" for label, number in zip(labels, numbers, strict=True)]
    lines = max((label.count("\n") + 1 for label in labels), default=1)
    fig.set_figheight(
        1.5 + max(0.42, 0.12 + sheet.LINE * (lines + sheet.is_narrow(fig))) * len(by_method)
    )
    seen = sheet.limits(*columns(filter(_has_mean, by_method.values())), log=log) or (0.0, 1.0)
    ax = fig.add_subplot()
    ax.set_xscale("log" if log else "linear")
    ax.set_xlim(*seen)
    kinds = list(dict.fromkeys(map(kind, [*names, *by_method])))
    outside = ""
    for row, (name, e) in enumerate(by_method.items()):
        look = look_of(kind(name), kinds)
        look["ls"] = ""
        if not _has_mean(e):
            continue
        if seen[0] <= e.mean <= seen[1]:
            ax.errorbar([e.mean], [row], xerr=_bars([e]), **look, ms=7, elinewidth=2, capsize=4)
        ends = [e.mean] if e.n == 1 else [e.mean, e.low, e.high]
        for is_out, edge, to in ((min(ends) < seen[0], 0, "<"), (max(ends) > seen[1], 1, ">")):
            if is_out:
                sheet.arrow(ax, seen[edge], row, to, look["color"])
                outside = " (an arrow: it goes on outside)"
    ax.set_xlabel(sheet.plain(xlabel + outside, 40 if sheet.is_narrow(fig) else 52))
    if log:
        sheet.plain_log(ax.xaxis)
    else:
        ax.locator_params(axis="x", nbins=6)
    ax.set_ylim(len(by_method) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    (_above if sheet.is_narrow(fig) else _beside)(ax, labels, numbers)
    if ax.has_data() and seen[0] < 0 < seen[1]:
        ax.axvline(0, color="#222222", lw=1.2, zorder=1)


def _beside(ax: Axes, labels: Sequence[str], numbers: Sequence[str]) -> None:
    """Writes the names of the rows on the left of the axes, and their numbers on the right."""
    rows = range(len(labels))
    ax.set_yticks(rows, labels)
    right = ax.secondary_yaxis("right")
    right.set_yticks(rows, numbers)
    for side in (ax, right):
        side.tick_params(axis="y", length=0, pad=8)  # arrows stand on the edge
    right.spines["right"].set_visible(False)


def _above(ax: Axes, labels: Sequence[str], numbers: Sequence[str]) -> None:
    """Writes the names of the rows, which have the numbers already, above their dots."""
    ax.set_yticks([])
    for row, label in enumerate(labels):
        ax.text(0.01, row - 0.1, label, transform=ax.get_yaxis_transform(), fontsize=9, va="bottom")


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
    """`values` [y, x] in colours that `label` explains.

    Values that are not finite are hatched, and `missing` says why they are not there. `x` and `y`
    ascend, and `ticks` are names for them. `marks` are points (x, y), which are named below the map.
    """
    z = np.ma.masked_invalid(np.asarray(values, float))
    if z.shape != (len(y), len(x)):
        raise LabError(
            f"a heat map of {len(x)} by {len(y)} points needs values [{len(y)}, {len(x)}], not {z.shape}"
        )
    ax = sheet.axes(fig, xlabel, ylabel)
    ax.grid(False)
    ax.set_xscale("log" if logx else "linear")
    ax.set_yscale("log" if logy else "linear")
    ex, ey = _edges(x, logx), _edges(y, logy)
    hatched = {"fc": "#dddddd", "ec": "#888888", "hatch": "////", "lw": 0}
    ax.fill_between(ex[[0, -1]], *ey[[0, -1]], **hatched, zorder=0)
    white = {"edgecolors": "white", "linewidth": 0.4 if z.size <= 200 else 0}
    mesh = ax.pcolormesh(ex, ey, z, cmap="viridis", **white, zorder=1)
    side: Any = {"location": "bottom", "fraction": 0.06} if sheet.is_narrow(fig) else {}
    fig.colorbar(mesh, ax=ax, label=sheet.plain(label, 38), **side).outline.set_visible(False)
    entries: list[tuple[Any, str]] = []
    for i, (name, (at_x, at_y)) in enumerate(marks.items()):
        (mark,) = ax.plot(
            at_x, at_y, sheet.marker(i), mfc="white", mec="black", mew=1.6, ms=10, zorder=3
        )
        entries.append((mark, name))
    if z.mask.any():
        entries.append((Patch(**hatched), missing))
    if ticks is None:
        sheet.ticks(ax.xaxis, x, logx)
        sheet.ticks(ax.yaxis, y, logy)
    else:
        ax.set_xticks(x, ticks[0], rotation=90 if sheet.is_narrow(fig) else 0)
        ax.set_yticks(y, ticks[1])
    if entries:
        labels = [sheet.plain(name, 30) for _, name in entries]
        columns = 1 if sheet.is_narrow(fig) else min(3, len(entries))
        fig.legend([mark for mark, _ in entries], labels, loc="outside lower left", ncols=columns)
        if sheet.is_narrow(fig):
            fig.set_figheight(fig.get_figheight() + sheet.LINE * (len(entries) + 2))


def _has_mean(e: decide.Estimate) -> bool:
    return math.isfinite(e.mean)


def columns(estimates: Iterable[decide.Estimate]) -> np.ndarray:
    """Means, lows and highs [3, n]."""
    return np.array([(e.mean, e.low, e.high) for e in estimates]).reshape(-1, 3).T


def _bars(estimates: Iterable[decide.Estimate]) -> np.ndarray:
    """The lengths of error bars [2, n]; 0 for a single seed, which has no interval."""
    mean, low, high = columns(estimates)
    bars = np.array([mean - low, high - mean])
    return np.where(np.isfinite(bars), bars, 0)


def _edges(centres: Sequence[float], log: bool) -> np.ndarray:
    c = np.log(centres) if log else np.asarray(centres, float)
    middles = (c[1:] + c[:-1]) / 2
    first, last = (
        (c[0] - 0.5, c[0] + 0.5) if len(c) == 1 else (2 * c[0] - middles[0], 2 * c[-1] - middles[-1])
    )
    edges = np.concatenate([[first], middles, [last]])
    return np.exp(edges) if log else edges
