"""A plan in the terminal: a table with the reasons below it, as wide as the window allows."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

import pergrad as pg

HEAD = ("parameter", "shape", "term", "strategy", "ops", "x grad", "memory", "why")
NUMBERS = {"ops", "x grad", "memory", "why"}
DEAR = 1.5  # multiples of the operations of `jax.grad` from which on a number stands out


def show(console: Console, plan: pg.Plan) -> None:
    """Prints a plan as `print(plan)` does; a terminal has colours, and whole paths if they fit."""
    if not console.is_terminal:
        print(plan, file=console.file)
        return
    reasons = list(dict.fromkeys(row.reason for row in plan.rows))
    table = _table(plan, reasons)
    needed = Measurement.get(console, console.options.update(max_width=1000), table)
    if needed.maximum > console.width:
        console.print(_coloured(plan), soft_wrap=True)
        return
    console.print(table)
    console.print(Text("\nwhy", "bold"))
    below = Table("", "", box=None, show_header=False, padding=(0, 1, 0, 0))
    for number, reason in enumerate(reasons, 1):
        below.add_row(Text(str(number), "dim"), Text(reason))
    console.print(below)
    *_, totals = str(plan).split("\n\n")  # the last paragraph of the text
    console.print(Text(f"\n{totals}", "bold"))


def _coloured(plan: pg.Plan) -> Text:
    """The text of a plan, which has at most 80 columns."""
    text = Text(str(plan))
    text.stylize("bold", 0, text.plain.index("\n"))
    text.highlight_words({row.strategy for row in plan.rows}, "cyan")
    return text


def _table(plan: pg.Plan, reasons: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in HEAD:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for row in plan.rows:
        path, shape, term, strategy, operations, multiple, memory = map(Text, row.cells())
        strategy.stylize("cyan")
        if row.operations > DEAR * row.plain_operations > 0:
            multiple.stylize("yellow")
        number = Text(str(1 + reasons.index(row.reason)), "dim")
        table.add_row(path, shape, term, strategy, operations, multiple, memory, number)
    return table
