"""One HTML page that says what a study asked, ran and found, with its figures inside.

The page opens without a network, and without the directory it was written to: figures are in it as SVG,
styles as CSS, and there is no script. A figure follows the reader's colours, and on a phone another
drawing of it is shown, which is as narrow. Nothing in the page depends on the time, so the same results
give the same bytes, and reports can be compared. The page is made from a template, which escapes
everything that a study hands in, in attributes too.
"""

from __future__ import annotations

import base64
import functools
import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape
from matplotlib.figure import Figure as Sheet

from pergrad.lab import files
from pergrad.lab.compare import decide
from pergrad.lab.errors import LabError
from pergrad.lab.pages import sheet


@dataclass(frozen=True)
class Figure:
    """`draw` is given an empty matplotlib figure. The title is drawn in it, the caption below it."""

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
    """Blank lines separate the paragraphs of `text`; a paragraph indented by 4 spaces is code."""

    title: str
    text: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    verdicts: Sequence[decide.Verdict] = ()


@dataclass(frozen=True)
class Page:
    """The question, the claim that was made beforehand, what was run, what was found, and all settings.

    `ran` is text like that of a section. `config` has what one needs to run it again: versions, commit,
    seeds. It may be nested.
    """

    title: str
    question: str
    claim: str
    ran: str
    sections: Sequence[Section]
    config: Mapping[str, Any]


def write(page: Page, out: Path, rows: Iterable[Mapping[str, Any]] = ()) -> Path:
    """Writes `out`/report.html and returns its path.

    Figures also go to `out`/figures/, as PNG and SVG. `rows`, the numbers of the page, go to
    `out`/results.jsonl, with null where a number is not finite. The HTML is written last, and as a
    whole, so that a reader sees the former page or the new one.
    """
    html = out / "report.html"
    lines = "".join(files.to_json(row) + "\n" for row in rows)
    contents: dict[Path, bytes] = {out / "results.jsonl": lines.encode()} if lines else {}
    pictures: list[_Picture] = []
    drawn = [figure for section in page.sections for figure in section.figures]
    for figure, name in zip(drawn, _file_names([figure.title for figure in drawn]), strict=True):
        png, svg = sheet.render(figure.title, figure.draw)
        pictures.append(_Picture(_address(svg), _address(sheet.narrow(figure.title, figure.draw))))
        contents |= {out / "figures" / f"{name}.png": png, out / "figures" / f"{name}.svg": svg}
    # The page may contain file names with bytes that are not text.
    contents[html] = _html(page, pictures).encode(errors="backslashreplace")
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            files.replace(path, content)
    except OSError as error:
        raise LabError(f"cannot write the report to {out}: {error.strerror or error}") from error
    return html


def _file_names(titles: Iterable[str]) -> Iterator[str]:
    """A file name for each title, of letters, digits and hyphens. Equal titles have different names."""
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


class _Picture(NamedTuple):
    """The addresses of a figure's two drawings, which are in the addresses themselves."""

    wide: str
    narrow: str


def _address(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


# The template.


def _html(page: Page, pictures: Sequence[_Picture]) -> str:
    verdicts = [verdict for section in page.sections for verdict in section.verdicts]
    counts = Counter(verdict.answer for verdict in verdicts)
    said = ", ".join(f"{counts[answer]} {answer}" for answer in decide.ANSWERS if counts[answer])
    numbered = enumerate(pictures, 1)
    sections = [
        (section, [(figure, *next(numbered)) for figure in section.figures]) for section in page.sections
    ]
    return (
        _templates()
        .get_template("report.html")
        .render(
            page=page,
            sections=sections,
            has_pictures=bool(pictures),
            verdicts=verdicts,
            answers=f"{said}. {_MEANING}",
            signs=_SIGNS,
            config=Table("", ["setting", "value"], list(_flat(page.config))),
        )
    )


@functools.cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"paragraphs": _paragraphs, "breakable": _breakable, "of_numbers": of_numbers}
    return made


def _paragraphs(text: str) -> Iterator[tuple[bool, str]]:
    """Each paragraph, and whether it is code."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if paragraph.strip():
            own = paragraph.strip("\n")
            is_code = all(line.startswith("    ") for line in own.splitlines())
            yield is_code, textwrap.dedent(own) if is_code else own.strip()


def _breakable(text: str) -> Markup:
    """Long names, such as block_0.attention_norm.bias, may be broken after their dots."""
    return Markup(re.sub(r"(?<=[^\W\d])([._/])(?=\w)", r"\1<wbr>", str(escape(text))))


def of_numbers(table: Table) -> list[bool]:
    """Whether each column of a table has numbers alone."""
    columns = [all(map(_is_number, column)) for column in zip(*table.rows, strict=True)]
    return columns or [False] * len(table.header)


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, perhaps with words after it, or a word in the place of a number."""
    return re.match(r"[-+−]?\.?\d|([-–]|diverged|nan|-?inf|)$", cell) is not None


_MEANING = (
    "A claim is supported if the whole interval of the difference is where the claim says, and "
    "contradicted if the whole interval is where the claim says it is not. Otherwise it is not shown: "
    "these runs do not tell."
)
_SIGNS = {
    decide.SUPPORTED: ("yes", "✓"),
    decide.CONTRADICTED: ("no", "✗"),
    decide.NOT_SHOWN: ("open", "?"),
}


# Settings.


def settings(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Settings for `Page.config`: those that all methods share once, and the others by method."""
    flat = {name: dict(_flat(config)) for name, config in methods.items()}
    first = next(iter(flat.values()))
    shared = {key: x for key, x in first.items() if all(own.get(key) == x for own in flat.values())}
    differ = {name: {k: x for k, x in own.items() if k not in shared} for name, own in flat.items()}
    return {"all methods": shared} | {name: own for name, own in differ.items() if own}


def _flat(config: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{inside}{key}.")
        else:
            yield f"{inside}{key}", str(value)
