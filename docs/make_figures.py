"""Draws the figures of the pages again: `make docs-figures`.

    python -m docs.make_figures [TUTORIAL ...]

With the names of tutorials, such as `equinox`, it draws the figures of these tutorials alone.
Each tutorial draws its own figure, into the directory that it runs in. The tests run the same code in a
directory of their own. The figures in docs/studies/tables are tables of docs/studies.md: such a figure
stands right below its table, and has all of its numbers.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pergrad.lab.pages import panels, report, sheet
from tests.support import pages

STUDIES = pages.ROOT / "docs" / "studies.md"
TABLE = re.compile(
    r"((?:^\|.*\n)+)(?:<!-- end -->\n)?\n!\[(.*)\]\((studies/tables/([\w-]+)\.png)\)", re.MULTILINE
)
# How many columns name a row, if it is not the first alone.
NAMES = {"rivals-cells": 3, "law-slopes": 3, "law-slopes-images": 3, "overhead": 4, "overhead-tpu": 3}
ALIKE = {
    "plane",
    "clipping",
    "overhead",
    "overhead-tpu",
}  # tables whose columns all have the same quantity


def tables() -> Iterator[tuple[Path, report.Figure]]:
    """The file and the figure of each table of the studies that has one."""
    for text, title, file, name in TABLE.findall(STUDIES.read_text()):
        header, _, *rows = (
            [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
            for line in text.splitlines()
        )
        table = report.Table(title, header, rows)
        options = {"names": NAMES.get(name, 1), "alike": name in ALIKE}
        yield STUDIES.parent / file, panels.of_table(table, title, "", **options)


def main(*names: str) -> None:
    for path, figure in () if names else tables():
        path.parent.mkdir(exist_ok=True)
        png, _ = sheet.render(figure.title, figure.draw)
        path.write_bytes(png)
        print(f"{STUDIES.name}: {path.name}")
    tutorials = {page.stem: page for page in sorted((pages.ROOT / "docs" / "tutorials").glob("*.md"))}
    for page in (tutorials[name] for name in names or tutorials):
        figures = pages.figures(page)
        if not figures:
            continue
        namespace: dict[str, object] = {}
        with contextlib.chdir(page.parent), open(os.devnull, "w") as nowhere:
            for code, _ in pages.blocks(page):
                with contextlib.redirect_stdout(nowhere):
                    exec(code, namespace)
        print(f"{page.name}: {', '.join(figures)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
