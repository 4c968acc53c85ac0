"""The numbers of a benchmark as figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet
from matplotlib.ticker import NullLocator

from pergrad.lab.bench import cases, tasks
from pergrad.lab.bench.grid import Grid, Panel, short
from pergrad.lab.bench.tables import Row, measured
from pergrad.lab.bench.tasks import (
    ACCUMULATED,
    AUTO,
    FLOOR,
    JAX_PRIVACY,
    MICRO_GRAD,
    PERGRAD,
    VMAP,
    family,
)
from pergrad.lab.config import PartName, TaskName
from pergrad.lab.files import disk_errors, replace
from pergrad.lab.pages import sheet

# It gives each candidate its colour. Those of PyTorch come after these.
ORDER = (PERGRAD, VMAP, MICRO_GRAD, JAX_PRIVACY, ACCUMULATED)
LOOKS: dict[str, dict[str, Any]] = {
    **{name: sheet.look_of(name, ORDER) | {"label": name} for name in ORDER},
    FLOOR: {"color": "#222222", "ls": ":", "marker": "", "label": "jax.grad"},
}
LABELS = [look["label"] for look in LOOKS.values()]
# The part that a figure draws and the figure's title, by its name.
TITLES = {
    "overhead": ("models", "Time as a multiple of jax.grad"),
    "growth": ("growth", "A transformer that grows: mean and second moment"),
    "compile": ("compile", "Seconds to trace and compile"),
}
BESIDE_NAME = "beside"
BESIDE_TITLE = "Mean and second moment, as a multiple of the time of the mean gradient alone"
AXES = {
    "B": "examples B",
    "T": "positions T",
    "D": "width D",
    "V": "vocabulary V",
    "L": "layers",
}
FEW_TICKS = 5  # a logarithmic axis over a smaller ratio than this has too few labels
BESIDE: tuple[TaskName, ...] = ("moments", "clipped")  # the tasks that all models are measured with


def write(rows: Iterable[Row], out: Path) -> list[Path]:
    """Draws all figures that there are numbers for, as PNG and SVG in the directory `out`."""
    rows = [row for row in measured(rows) if row["candidate"] != AUTO]
    rows = [row for row in rows if row["part"] == "models" or row["axis"]]
    parts = {part: [row for row in rows if row["part"] == part] for part in get_args(PartName)}
    draws = {"models": overhead, "growth": growth, "compile": compile_time}
    paths = []
    for name, (part, title) in TITLES.items():
        own, draw = parts[part], draws[part]
        if own:
            paths += _write(out / name, title, lambda fig, own=own, draw=draw: draw(fig, own))
    return paths


def _write(path: Path, title: str, draw: Callable[[Sheet], None]) -> list[Path]:
    """Writes a figure as PNG and as SVG, with these endings after `path`."""
    paths = []
    for ending, content in zip((".png", ".svg"), sheet.render(title, draw), strict=True):
        paths.append(path.with_suffix(ending))
        with disk_errors(paths[-1]):
            replace(paths[-1], content)
    return paths


def write_beside(panels: Mapping[str, Iterable[Row]], titles: Mapping[str, str], out: Path) -> None:
    """Draws the mean and second moment of all models on several chips, as `beside.png` and `.svg`.

    `panels` has the rows of each chip by the title of its panel, and `titles` are the models to draw.
    Times are multiples of the fastest way to the mean gradient alone.
    """
    shown = {
        title: [row for row in at_auto(rows) if row["case"] in titles] for title, rows in panels.items()
    }
    _write(out / BESIDE_NAME, BESIDE_TITLE, lambda fig: beside(fig, shown, titles))


def at_auto(rows: Iterable[Row]) -> list[Row]:
    """Other candidates' rows as they are, and pergrad's with `microbatch_size="auto"`."""
    own = [row for row in rows if row["task"] == "moments" and "tuned" in row.get("ratios", ())]
    auto = {row["case"]: row for row in own if row["candidate"] == AUTO}
    found = [row for row in own if family(row["candidate"]) in (VMAP, MICRO_GRAD)]
    ours = (row for row in own if row["candidate"] == PERGRAD)
    return found + [{**auto.get(row["case"], row), "candidate": PERGRAD} for row in ours]


def beside(fig: Sheet, shown: Mapping[str, Sequence[Row]], titles: Mapping[str, str]) -> None:
    """Draws a line for each model and a panel for each chip, with pergrad's numbers on the right."""
    there = {row["case"] for rows in shown.values() for row in rows}
    names = [name for name in titles if name in there]
    fig.set_size_inches(3.6 + 3.1 * len(shown), 1.4 + 0.28 * len(names))
    panels = fig.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (title, rows) in zip(panels, shown.items(), strict=True):
        _dots(ax, rows, names, "tuned")
        ax.set_title(title, fontsize=10, loc="left")
    _name_lines(panels[0], [titles[name] for name in names])
    _legend_below(fig, panels)


def write_grid(title: str, grid: Grid, path: Path) -> None:
    """Draws all numbers of a table, as PNG."""
    png, _ = sheet.render(title, lambda fig: of_grid(fig, grid))
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, png)


def of_grid(fig: Sheet, grid: Grid) -> None:
    """Draws a line for each model, a mark for each candidate, and a panel for each kind of number."""
    panels, titles = grid.panels(), list(grid.lines)
    columns = min(2, len(panels))
    rows = -(-len(panels) // 2)
    fig.set_size_inches(3.4 + 3.1 * columns, 0.8 + rows * (0.6 + 0.3 * len(titles)))
    every: list[Axes] = list(fig.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for ax, panel in zip(every, panels, strict=False):
        _draw_panel(ax, grid, panel)
        ax.set_title(panel.title, fontsize=10, loc="left")
        low, high = ax.dataLim.intervalx
        if high > FEW_TICKS * low:
            ax.set_xscale("log")
            sheet.plain_log(ax.xaxis)
        ax.tick_params(axis="y", labelsize=9)
    for ax in every[len(panels) :]:
        ax.set_axis_off()
    _name_lines(every[0], titles)
    _legend_below(fig, every, [heading.name.replace("`", "") for heading in grid.headings])


def _draw_panel(ax: Axes, grid: Grid, panel: Panel) -> None:
    others = [h.candidate for h in grid.headings if h.candidate not in (*ORDER, AUTO, FLOOR)]
    order = [*ORDER, AUTO, FLOOR, *others]
    if panel.is_multiple:
        ax.axvline(1, color="#222222", ls=":", lw=1.4, zorder=1)
    # The first on top, and above all the small cross of "auto", which is often near pergrad's circle.
    top = [AUTO, *order]
    by_place = sorted(enumerate(grid.headings), key=lambda pair: -top.index(pair[1].candidate))
    for number, heading in by_place:
        cells = [line[number] for line in grid.lines.values()]
        there = [(cell.points[panel], row) for row, cell in enumerate(cells) if panel in cell.points]
        look: dict[str, Any] = sheet.look_of(heading.candidate, order) | {"ls": ""}
        look |= {"ms": 6, "label": heading.name.replace("`", "")} if there else {}
        for (low, high), row in there:
            ax.plot([low, high], [row, row], color=look["color"], lw=1.2)
        ax.plot([x for ends, _ in there for x in ends], [row for _, row in there for _ in "12"], **look)


def overhead(fig: Sheet, rows: Sequence[Row]) -> None:
    """Draws a line for each model and a panel for each task, with pergrad's numbers on the right."""
    there = dict.fromkeys(row["task"] for row in rows)
    shown: list[TaskName] = [task for task in BESIDE if task in there] or list(there)[:1]
    names: list[str] = list(dict.fromkeys(row["case"] for row in rows if row["task"] in shown))
    fig.set_size_inches(3.2 + 3.1 * len(shown), 1.7 + 0.34 * len(names))
    panels = fig.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for ax, task in zip(panels, shown, strict=True):
        own = [row for row in rows if row["task"] == task and row["candidate"] != FLOOR]
        _dots(ax, own, names)
        ax.set_title(tasks.TITLES[task], fontsize=10, loc="left")
    _name_lines(panels[0], [cases.EVERY_TITLE.get(name, name) for name in names])
    _legend_below(fig, panels)


def _name_lines(ax: Axes, titles: Sequence[str]) -> None:
    ax.set_yticks(range(len(titles)), titles, fontsize=9)
    ax.set_ylim(len(titles) - 0.5, -0.5)


def _dots(ax: Axes, rows: Sequence[Row], names: Sequence[str], ratio: str = "time") -> None:
    """Draws a dot for each row, at one of its ratios, and pergrad's numbers on the right."""
    ax.set_xscale("log")
    ax.axvline(1, **LOOKS[FLOOR], lw=1.4, zorder=1)
    for name in ORDER[::-1]:  # the first on top
        own = [row for row in rows if family(row["candidate"]) == name]
        if own:
            at = [names.index(row["case"]) for row in own]
            look: dict[str, Any] = LOOKS[name] | {"ls": ""}
            ax.plot([row["ratios"][ratio] for row in own], at, **look, ms=7)
    ours = {row["case"]: row["ratios"][ratio] for row in rows if row["candidate"] == PERGRAD}
    numbers = ax.secondary_yaxis("right")
    numbers.set_yticks(
        [names.index(name) for name in ours],
        [short(multiple) for multiple in ours.values()],
        color=LOOKS[PERGRAD]["color"],
        fontsize=9,
    )
    numbers.spines["right"].set_visible(False)
    for side in (ax, numbers):
        side.tick_params(axis="y", length=0)
    sheet.plain_log(ax.xaxis)


def growth(fig: Sheet, rows: Sequence[Row]) -> None:
    """Draws a column for each size: time as a multiple of `jax.grad`'s, and temporary memory."""
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    fig.set_size_inches(1.2 + 2.3 * len(axes), 5.2)
    panels = fig.subplots(2, len(axes), sharey="row", squeeze=False)
    for (above, below), axis in zip(panels.T, axes, strict=True):
        own = [row for row in rows if row["axis"] == axis]
        _curves(above, own, lambda row: row["ratios"]["time"])
        _curves(below, own, lambda row: row["temp_bytes"] / 1e6)
        above.tick_params(labelbottom=False)
        below.set_xlabel(AXES[axis])
    panels[0, 0].set_ylabel("time, x jax.grad")
    panels[1, 0].set_ylabel("temporary memory, MB")
    _legend_below(fig, panels[0])


def compile_time(fig: Sheet, rows: Sequence[Row]) -> None:
    """Draws the time to compile as the number of layers grows, and that of examples."""
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    panels = fig.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    for ax, axis in zip(panels, axes, strict=True):
        own = [row for row in rows if row["axis"] == axis]
        _curves(ax, own, lambda row: row["lower_seconds"] + row["compile_seconds"])
        ax.set_xlabel(AXES[axis])
    panels[0].set_ylabel("seconds")
    _legend_below(fig, panels)


def _curves(ax: Axes, rows: Sequence[Row], value: Callable[[Row], float]) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    for name in (*ORDER[::-1], FLOOR):
        own = sorted((r for r in rows if family(r["candidate"]) == name), key=lambda row: row["size"])
        if own:
            x, y = [row["size"] for row in own], [value(row) for row in own]
            ax.plot(x, y, **LOOKS[name], ms=5, lw=1.6)
    sizes = sorted({row["size"] for row in rows})
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    sheet.plain_log(ax.yaxis)


def _legend_below(fig: Sheet, panels: Sequence[Axes], order: Sequence[str] = LABELS) -> None:
    handles = {
        label: h for ax in panels for h, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    names = [name for name in dict.fromkeys(order) if name in handles]
    fig.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(len(names), 4),
        fontsize=9,
    )
