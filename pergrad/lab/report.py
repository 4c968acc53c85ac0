"""One HTML page that says what a study asked, ran and found, with its figures inside.

The page opens without a network, and without the directory it was written to: figures are in it as PNG,
styles as CSS, and there is no script. Nothing in it depends on the time: the same results give the same
bytes, so that reports can be compared. Everything a study hands in is text: it is escaped, in attributes
too.

The second half draws. A figure is a function of a matplotlib figure; it is given an empty one, in the
style of the page, and never meets pyplot or the user's backend. All studies share the functions below:
a method has one colour and one marker throughout, also for those who see fewer colours, and labels stay
beside the data.
"""

from __future__ import annotations

import base64
import io
import math
import os
import re
import textwrap
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Sheet
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from pergrad.lab.decide import ANSWERS, CONTRADICTED, NOT_SHOWN, SUPPORTED, Estimate, Verdict
from pergrad.lab.errors import LabError


@dataclass(frozen=True)
class Figure:
    """`draw` is given an empty matplotlib figure. The title is drawn in it; the caption stands below."""

    title: str
    caption: str
    draw: Callable[[Sheet], None]


@dataclass(frozen=True)
class Table:
    """Columns of numbers are aligned to the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise LabError(
                    f"table {self.title!r}: {len(self.header)} columns, and a row of {len(row)}"
                )


@dataclass(frozen=True)
class Section:
    """Of `text`, blank lines separate the paragraphs; those indented by 4 spaces are code."""

    title: str
    text: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    verdicts: Sequence[Verdict] = ()


@dataclass(frozen=True)
class Page:
    """What was asked, claimed beforehand and run, what came of it, and what one needs to run it again.

    `ran` is text like that of a section. `config` has versions, commit, seeds; it may be nested.
    """

    title: str
    question: str
    claim: str
    ran: str
    sections: Sequence[Section]
    config: Mapping[str, Any]


def write(page: Page, out: Path) -> Path:
    """Writes `out`/report.html and returns its path; figures also to `out`/figures/, as PNG and SVG.

    The HTML comes last and at once: whoever reads it sees the former page or the new one.
    """
    html = out / "report.html"
    files: dict[Path, bytes] = {}
    pictures: list[bytes] = []
    figures = [figure for section in page.sections for figure in section.figures]
    for figure, name in zip(figures, _file_names([figure.title for figure in figures]), strict=True):
        png, svg = _render(figure)
        pictures.append(png)
        files |= {out / "figures" / f"{name}.png": png, out / "figures" / f"{name}.svg": svg}
    # A file name may hold bytes that are no text.
    files[html] = _html(page, pictures).encode(errors="backslashreplace")
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            _replace(path, content)
    except OSError as error:
        raise LabError(f"cannot write the report to {out}: {error.strerror or error}") from error
    return html


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _file_names(titles: Iterable[str]) -> Iterator[str]:
    """Names of files, of letters, digits and hyphens; different ones also where titles are alike."""
    taken: Counter[str] = Counter()
    for title in titles:
        letters = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
        slug = re.sub(r"[^a-z0-9]+", "-", letters).strip("-")[:60].strip("-") or "figure"
        name = slug
        while taken[name]:
            taken[slug] += 1
            name = f"{slug}-{taken[slug]}"
        taken[name] += 1
        yield name


def _render(figure: Figure) -> tuple[bytes, bytes]:
    png, svg = io.BytesIO(), io.BytesIO()
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # The font has no Chinese, say. A box in a picture is no reason to lose the page.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        sheet = Sheet(layout="constrained")
        figure.draw(sheet)
        sheet.suptitle(_plain(figure.title, 72), x=0.01, ha="left")
        sheet.savefig(png, format="png", metadata={"Software": None})
        sheet.savefig(svg, format="svg", metadata={"Date": None})
    return png.getvalue(), svg.getvalue()


# The page.


def _html(page: Page, pictures: Sequence[bytes]) -> str:
    title = escape(page.title)
    verdicts = [verdict for section in page.sections for verdict in section.verdicts]
    parts = [f"<header><h1>{title}</h1>"]
    parts += [f"<dl><dt>Question</dt><dd>{_text(page.question)}</dd>"]
    parts += [f"<dt>Claim</dt><dd>{_text(page.claim)}</dd>"]
    parts += [f"<dt>What was run</dt><dd>{_text(page.ran)}</dd></dl></header>"]
    if verdicts:
        counts = Counter(verdict.answer for verdict in verdicts)
        said = ", ".join(f"{counts[answer]} {answer}" for answer in ANSWERS if counts[answer])
        parts += [f"<section><h2>Answers</h2><p>{escape(said)}.</p>{_verdicts(verdicts)}</section>"]
    if len(page.sections) > 1:
        links = (f'<li><a href="#s{i}">{escape(s.title)}</a></li>' for i, s in enumerate(page.sections))
        parts += [f"<nav><ol>{''.join(links)}</ol></nav>"]
    numbered = enumerate(pictures, 1)
    parts += [_section(f"s{i}", section, numbered) for i, section in enumerate(page.sections)]
    config = Table("", ["setting", "value"], list(_flat(page.config)))
    files = "<p>The figures lie beside this page too, in figures/, as PNG and SVG.</p>" * bool(pictures)
    parts += [f"<section><h2>To run it again</h2>{_table(config)}{files}</section>"]
    return _FRAME.format(title=title, style=_CSS, body="\n".join(parts))


def _section(anchor: str, section: Section, pictures: Iterator[tuple[int, bytes]]) -> str:
    parts = [f'<section id="{anchor}"><h2>{escape(section.title)}</h2>', _text(section.text)]
    if section.verdicts:
        parts.append(_verdicts(section.verdicts))
    parts += [_figure(figure, *next(pictures)) for figure in section.figures]
    parts += [_table(table) for table in section.tables]
    return "\n".join([*parts, "</section>"])


def _text(text: str) -> str:
    paragraphs = [p.strip("\n") for p in re.split(r"\n\s*\n", text.strip("\n")) if p.strip()]
    return "\n".join(
        f"<pre>{escape(textwrap.dedent(p))}</pre>" if _is_code(p) else f"<p>{escape(p.strip())}</p>"
        for p in paragraphs
    )


def _is_code(paragraph: str) -> bool:
    return all(line.startswith("    ") for line in paragraph.splitlines())


def _figure(figure: Figure, number: int, png: bytes) -> str:
    image = base64.b64encode(png).decode()
    alt = escape(f"{figure.title}. {figure.caption}")
    return (
        f'<figure><img alt="{alt}" src="data:image/png;base64,{image}">'
        f"<figcaption><b>Figure {number}.</b> {escape(figure.caption)}</figcaption></figure>"
    )


def _table(table: Table) -> str:
    of_numbers = [all(map(_is_number, column)) for column in zip(*table.rows, strict=True)]
    of_numbers = of_numbers or [False] * len(table.header)

    def row(cells: Sequence[str], tag: str) -> str:
        classes = (' class="number"' if right else "" for right in of_numbers)
        tags = (f"<{tag}{c}>{escape(cell)}</{tag}>" for c, cell in zip(classes, cells, strict=True))
        return f"<tr>{''.join(tags)}</tr>"

    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    body = "\n".join(row(cells, "td") for cells in table.rows)
    return _scrolling(f"{caption}<thead>{row(table.header, 'th')}</thead><tbody>{body}</tbody>")


def _is_number(cell: str) -> bool:
    """A number, perhaps with something behind it, or a word in its place."""
    return re.match(r"[-+−]?\.?\d|([-–]|diverged|nan|-?inf|)$", cell) is not None


def _scrolling(inside: str) -> str:
    return f'<div class="wide" tabindex="0"><table>{inside}</table></div>'


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    rows = (
        f'<tr><td><span class="answer {kind}">{sign} {escape(v.answer)}</span></td>'
        f"<td>{escape(v.claim)}</td><td>{escape(v.why)}</td></tr>"
        for v, (kind, sign) in ((v, _SIGNS[v.answer]) for v in verdicts)
    )
    head = "<thead><tr><th>Answer</th><th>Claim</th><th>Why</th></tr></thead>"
    return _scrolling(f"{head}<tbody>{''.join(rows)}</tbody>")


def _flat(config: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{inside}{key}.")
        else:
            yield f"{inside}{key}", str(value)


_SIGNS = {SUPPORTED: ("yes", "✓"), CONTRADICTED: ("no", "✗"), NOT_SHOWN: ("open", "?")}

_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_CSS = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c1e21; --soft: #5b6169; --line: #d9dce0;
  --code: #f3f4f6; --link: #0b5cad; --yes: #00674b; --no: #a63c00; --open: #4d535b; }
@media screen and (prefers-color-scheme: dark) { :root {
  --ground: #16181b; --ink: #e6e7e9; --soft: #a3a9b1; --line: #3a3f46;
  --code: #22262b; --link: #7cb8f5; --yes: #4cd3a5; --no: #ff9a62; --open: #c3c8ce; } }
body { font: 1rem/1.55 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; color: var(--ink);
  background: var(--ground); max-width: 54rem; margin: 2.5rem auto 5rem; padding: 0 1.2rem;
  overflow-wrap: break-word; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1.2rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.6rem 0 .6rem; }
p { margin: .6rem 0; max-width: 44rem; }
a { color: var(--link); }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1.2rem; margin: 0; }
dt { color: var(--soft); margin: .6rem 0; } dd { margin: 0; }
@media (max-width: 36rem) { dl { display: block; } dt { margin-bottom: -.6rem; } }
pre { font: .875rem/1.45 ui-monospace, Menlo, Consolas, monospace; background: var(--code);
  padding: .6rem .8rem; border-radius: .4rem; overflow-x: auto; margin: .6rem 0; }
nav ol { padding-left: 1.3rem; columns: 20rem; }
.wide { overflow-x: auto; margin: 1.2rem 0; }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums;
  min-width: 50%; }
caption { text-align: left; font-weight: 600; padding: .2rem 0 .4rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; }
td { overflow-wrap: normal; white-space: pre-line; }
.number { text-align: right; white-space: nowrap; }
.answer { font-weight: 600; white-space: nowrap; padding: .1rem .5rem;
  border: 1.5px solid; border-radius: 1rem; }
.yes { color: var(--yes); } .no { color: var(--no); } .open { color: var(--open); border-style: dashed; }
figure { margin: 1.6rem 0; }
figure img { width: 100%; height: auto; background: #fff; border-radius: .4rem; }
figcaption { color: var(--soft); font-size: .9375rem; max-width: 44rem; }
@media print { body { max-width: none; margin: 0; font-size: 10pt; } nav { display: none; }
  .wide { overflow: visible; } figure, tr { break-inside: avoid; } h2, caption { break-after: avoid; }
  pre { white-space: pre-wrap; } .number { white-space: normal; } }
"""


# The figures.

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


def lines_with_bands(
    fig: Sheet,
    curves: Mapping[str, tuple[Any, Any, Any, Any]],
    xlabel: str,
    ylabel: str,
    *,
    logx: bool = False,
    interval: str = _INTERVAL,
    names: Sequence[str] = (),
) -> None:
    """Curves (x, mean, low, high) by method. A cross ends those that are not finite further on.

    `interval` says what lies between low and high. `names` are all methods of the study, so that each
    has its colour in every figure.
    """
    ax = _axes(fig, xlabel, ylabel)
    ax.set_xscale("log" if logx else "linear")
    entries: list[tuple[float, Any, str]] = []
    arrays = [np.asarray(np.broadcast_arrays(*curve), float) for curve in curves.values()]
    ends = [int(np.cumprod(np.isfinite(array[1])).sum()) for array in arrays]
    for i, (name, array, end) in enumerate(zip(curves, arrays, ends, strict=True)):
        x, mean, low, high = array[:, :end]
        look = _look(name, [*names, *curves])
        every = max(1, len(x) // 8)
        (line,) = ax.plot(x, mean, **look, lw=1.8, ms=5, markevery=(i * every // len(curves), every))
        low, high = np.where(np.isfinite(low) & np.isfinite(high), (low, high), np.nan)
        ax.fill_between(x, low, high, color=look["color"], alpha=0.2, lw=0)
        if end < array.shape[1]:
            ax.plot(x[-1:], mean[-1:], "x", color=look["color"], ms=10, mew=2.5, zorder=4)
        entries.append((mean[-1], line, name) if end else (math.inf, line, f"{name}\ndiverged at once"))
    seen = np.concatenate([array[1:, :end] for array, end in zip(arrays, ends, strict=True)], 1)
    _limit(ax.set_ylim, *seen)
    entries.sort(key=lambda entry: -entry[0])  # from top to bottom as the lines end
    has_band = bool((seen[1] < seen[2])[np.isfinite(seen).all(0)].any())
    notes = [(Patch(color="#666666", alpha=0.25, lw=0), interval)] * has_band
    has_cross = any(end < array.shape[1] for array, end in zip(arrays, ends, strict=True))
    notes += [(_grey(marker="x", mew=2), "diverged from here on")] * has_cross
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
        look = _look(name, [*names, *by_method])
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
    _limit(ax.set_ylim, *_columns(known))
    _ticks(ax.xaxis, {rate for at in by_method.values() for rate in at}, log=True)
    entries.sort(key=lambda entry: entry[0])
    notes = [(_grey(marker="o", mfc="none", mew=1.8, ms=11), "best rate of a method")] * bool(known)
    notes += [(_grey(marker="|", mew=1.2, ms=13), interval)] * any(e.n > 1 for e in known)
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
        look = _look(name, [*names, *by_method])
        look["ls"] = ""
        if _has_mean(e):
            ax.errorbar([e.mean], [row], xerr=_bars([e]), **look, ms=7, elinewidth=2, capsize=4)
    _limit(ax.set_xlim, *_columns(filter(_has_mean, by_method.values())))
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
) -> None:
    """`values` [y, x] in colours that `label` explains; hatched where they are not finite: diverged.

    `x` and `y` ascend. `marks` are points (x, y), named below the map.
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
        entries.append((Patch(**hatched), "diverged"))
    _ticks(ax.xaxis, set(x), logx)
    _ticks(ax.yaxis, set(y), logy)
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


def _look(name: str, names: Sequence[str]) -> dict[str, Any]:
    i = list(names).index(name)
    colour, dash = _COLOURS[i % len(_COLOURS)], _DASHES[i // len(_COLOURS) % len(_DASHES)]
    return {"color": colour, "marker": _MARKERS[i % len(_MARKERS)], "ls": dash}


def _grey(**look: Any) -> Line2D:
    """What explains a mark that all methods share."""
    return Line2D([], [], **({"color": "#666666", "ls": "", "ms": 7} | look))


def _legend(ax: Axes, entries: Sequence[tuple[Any, str]]) -> None:
    labels = ["\n".join(_plain(line, 28) for line in label.split("\n")) for _, label in entries]
    beside = {"loc": "upper left", "bbox_to_anchor": (1.02, 1), "borderaxespad": 0}
    ax.legend([handle for handle, _ in entries], labels, **beside, labelspacing=0.7, fontsize=9)


def _has_mean(e: Estimate) -> bool:
    return math.isfinite(e.mean)


def _columns(estimates: Iterable[Estimate]) -> np.ndarray:
    """Means, lows and highs [3, n]."""
    return np.array([(e.mean, e.low, e.high) for e in estimates]).reshape(-1, 3).T


def _bars(estimates: Iterable[Estimate]) -> np.ndarray:
    """The lengths of error bars [2, n]; none where there is one seed."""
    mean, low, high = _columns(estimates)
    bars = np.array([mean - low, high - mean])
    return np.where(np.isfinite(bars), bars, 0)


def _limit(
    set_limits: Callable[[float, float], Any], mean: np.ndarray, low: np.ndarray, high: np.ndarray
) -> None:
    """Limits that contain all means, and the intervals but for those far wider than the others."""
    mean = mean[np.isfinite(mean)]
    if not mean.size:
        return
    known = np.isfinite(low) & np.isfinite(high)
    low, high = low[known], high[known]
    first, last = mean.min(), mean.max()
    room = max(last - first, np.median(high - low) if known.any() else 0) or abs(first) / 2 or 1.0
    first, last = max(min([first, *low]), first - room), min(max([last, *high]), last + room)
    pad = 0.06 * (last - first or room)
    set_limits(float(first - pad), float(last + pad))


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
