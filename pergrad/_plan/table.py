"""The table of a plan: as text of 80 columns, in colours for a terminal, and as HTML for notebooks.

Paths of parameters are long, and many have the same beginning. If a path does not fit into its row, its
beginning stands on a line above all rows that share it:

    parameter     shape   term     strategy     ops    x grad  memory  why
    ------------  ------  -------  -----------  -----  ------  ------  ---
    ['params']['Dense_0']
      ['bias']    64      sum      materialise  3.07k  -       2.05kB  1
      ['kernel']  256x64  product  streamed:4   9.18M  1.09    262kB   2

Many rows share a reason, and reasons are long. So they are numbered, and stand below the table.

Colours come from the package rich, if it is installed. pergrad does not need it.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80


GAP = "  "


INDENT = "  "


HEAD = ("parameter", "shape", "term", "strategy", "ops", "x grad", "memory")


DEAR = 1.5  # multiples of the operations of `jax.grad` from which on a number stands out


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter's row in the table. Operations and bytes are for the examples of one device."""

    path: str
    shape: tuple[int, ...]
    kind: str
    strategy: str
    operations: float
    plain_operations: float
    bytes: float
    reason: str

    def cells(self) -> list[str]:
        """The texts of all columns of `HEAD`, which does not include the reason."""
        return [
            self.path,
            "x".join(map(str, self.shape)) or "scalar",
            self.kind,
            self.strategy,
            short(self.operations),
            ratio(self.operations, self.plain_operations),
            short(self.bytes) + "B",
        ]


def as_text(rows: Sequence[Row], totals: Sequence[str]) -> str:
    """The table in the layout with the fewest lines that fits, or in the narrowest if none fits."""
    reasons = list(dict.fromkeys(row.reason for row in rows))
    numbers = [str(1 + reasons.index(row.reason)) for row in rows]
    most = max(len(keys_of(row.path)) for row in rows)
    layouts = [
        _layout(rows, numbers, keys, wrapped)
        for wrapped in (False, True)
        for keys in range(most, -1, -1)
    ]
    fitting = [lines for lines in layouts if max(map(len, lines)) <= WIDTH]
    table = min(fitting, key=len) if fitting else layouts[-1]
    return "\n".join([*table, "", *_notes(reasons), "", *totals])


def in_terminal(plan: Any) -> str | None:
    """What rich prints of a plan, or None without rich, or if the standard output is no terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    with console.capture() as captured:
        console.print(plan, soft_wrap=True)
    return captured.get().removesuffix("\n")


def as_rich(rows: Sequence[Row], totals: Sequence[str], console: Console) -> Iterator[Any]:
    """The table for a terminal: in colours, with whole paths if the window is wide enough for them."""
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    reasons = list(dict.fromkeys(row.reason for row in rows))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in (*HEAD, "why"):
        is_text = name in HEAD[:4]
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        cells = [Text(cell) for cell in (*row.cells(), str(1 + reasons.index(row.reason)))]
        cells[3].stylize("cyan")
        if row.operations > DEAR * row.plain_operations > 0:
            cells[5].stylize("yellow")
        table.add_row(*cells)
    needed = Measurement.get(console, console.options.update(max_width=1000), table)
    if needed.maximum > console.width:
        text = Text(as_text(rows, totals))
        text.stylize("bold", 0, text.plain.index("\n"))
        text.highlight_words({row.strategy for row in rows}, "cyan")
        yield text
        return
    yield table
    yield Text("\nwhy", "bold")
    below = Table("", "", box=None, show_header=False, padding=(0, 1, 0, 0))
    for number, reason in enumerate(reasons, 1):
        below.add_row(Text(str(number)), Text(reason))
    yield below
    yield Text("\n" + "\n".join(totals), "bold")


def as_html(rows: Sequence[Row], totals: Sequence[str]) -> str:
    """The table with whole paths and reasons, because a page is wide enough or can be scrolled."""

    style = "text-align: left; vertical-align: top"

    def line(tag: str, cells: Iterable[str]) -> str:
        *short_ones, why = (html.escape(cell) for cell in cells)
        made = [f'<{tag} style="{style}; white-space: nowrap">{cell}</{tag}>' for cell in short_ones]
        return f'<tr>{"".join(made)}<{tag} style="{style}">{why}</{tag}></tr>'

    head = line("th", (*HEAD, "why"))
    body = "\n".join(line("td", [*row.cells(), row.reason]) for row in rows)
    below = "<br>\n".join(map(html.escape, totals))
    return f"<table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n<p>{below}</p>"


def _layout(rows: Sequence[Row], numbers: Sequence[str], keys: int, wrapped: bool) -> list[str]:
    """The lines of the table if every row has the last `keys` keys of its path.

    If `wrapped` is true, the terms of a row stand below each other, and so do the strategies.
    """
    above, body = [], []
    for row, number in zip(rows, numbers, strict=True):
        group, own = _split(row.path, keys)
        cells = [[cell] for cell in (*row.cells(), number)]
        cells[0] = [INDENT + own if group else own]
        if wrapped:
            cells[2], cells[3] = _words(row.kind, " + "), _words(row.strategy, ", ")
        above.append(group)
        body.append(cells)
    head = [[name] for name in (*HEAD, "why")]
    columns = zip(head, *body, strict=True)
    widths = [max(len(text) for cell in column for text in cell) for column in columns]
    lines = [*_lines(head, widths), *_lines([["-" * width] for width in widths], widths)]
    for group, members in itertools.groupby(zip(above, body, strict=True), key=lambda pair: pair[0]):
        lines += _broken(group)
        for _, cells in members:
            lines += _lines(cells, widths)
    return lines


def _lines(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """The lines of one row, in which a cell may have several lines."""
    return [
        GAP.join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in itertools.zip_longest(*cells, fillvalue="")
    ]


def _words(text: str, separator: str) -> list[str]:
    *others, last = text.split(separator)
    return [*(word + separator.rstrip() for word in others), last]


def _broken(path: str) -> list[str]:
    """A path, broken into as many lines as it needs."""
    lines = []
    for key in keys_of(path):
        if lines and len(lines[-1] + key) <= WIDTH:
            lines[-1] += key
        else:
            lines.append(key)
    return lines


def _notes(reasons: Sequence[str]) -> list[str]:
    width = len(str(len(reasons)))
    return ["why"] + [
        line
        for number, reason in enumerate(reasons, 1)
        for line in textwrap.wrap(
            reason,
            WIDTH,
            initial_indent=f"{INDENT}{number:>{width}}{GAP}",
            subsequent_indent=" " * (len(INDENT) + width + len(GAP)),
            break_on_hyphens=False,
        )
    ]


def _split(path: str, keys: int) -> tuple[str, str]:
    """The beginning of a path, and its last `keys` keys."""
    own = keys_of(path)
    place = max(0, len(own) - keys)
    return "".join(own[:place]), "".join(own[place:])


def keys_of(path: str) -> list[str]:
    """The pieces of a path: its keys, such as `['a']`, `[0]` and `.b`, and any other text."""
    return re.findall(r"""\['.*?'\]|\[".*?"\]|\[[^'"\]]*\]|\.\w+|[^.\[]+|.""", path, re.DOTALL)


def short(number: float) -> str:
    """A number with three digits and a unit, such as `9.18M`."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"


def ratio(number: float, plain: float) -> str:
    """How many times as large as `plain` a number is, or `-` if `plain` is 0."""
    return f"{number / plain:.2f}" if plain else "-"
