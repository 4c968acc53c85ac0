"""One HTML page that says what a study asked, ran and found, with its figures inside.

The page opens without a network, and without the directory it was written to: figures are in it as PNG,
styles as CSS, and there is no script. Nothing in it depends on the time, so the same results give the
same bytes, and reports can be compared. Everything that a study hands in is treated as text and escaped,
in attributes too.
"""

from __future__ import annotations

import base64
import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

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
    pictures: list[bytes] = []
    drawn = [figure for section in page.sections for figure in section.figures]
    for figure, name in zip(drawn, _file_names([figure.title for figure in drawn]), strict=True):
        png, svg = sheet.render(figure.title, figure.draw)
        pictures.append(png)
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


def _html(page: Page, pictures: Sequence[bytes]) -> str:
    title = escape(page.title)
    verdicts = [verdict for section in page.sections for verdict in section.verdicts]
    parts = [f"<header><h1>{title}</h1>"]
    parts += [f"<dl><dt>Question</dt><dd>{_text(page.question)}</dd>"]
    parts += [f"<dt>Claim</dt><dd>{_text(page.claim)}</dd>"]
    parts += [f"<dt>What was run</dt><dd>{_text(page.ran)}</dd></dl></header>"]
    if verdicts:
        counts = Counter(verdict.answer for verdict in verdicts)
        said = ", ".join(f"{counts[answer]} {answer}" for answer in decide.ANSWERS if counts[answer])
        parts += [f"<section><h2>Answers</h2><p>{escape(f'{said}. {_MEANING}')}</p>"]
        parts += [f"{_verdicts(verdicts)}</section>"]
    if len(page.sections) > 1:
        links = (f'<li><a href="#s{i}">{escape(s.title)}</a></li>' for i, s in enumerate(page.sections))
        parts += [f"<nav><ol>{''.join(links)}</ol></nav>"]
    numbered = enumerate(pictures, 1)
    parts += [_section(f"s{i}", section, numbered) for i, section in enumerate(page.sections)]
    config = Table("", ["setting", "value"], list(_flat(page.config)))
    files = "<p>The directory figures/ beside this page has its figures, as PNG and SVG.</p>" * bool(
        pictures
    )
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
    picture = f'<img alt="{alt}" src="data:image/png;base64,{image}">'
    return (
        f'<figure><div class="wide" tabindex="0">{picture}</div>'
        f"<figcaption><b>Figure {number}.</b> {escape(figure.caption)}</figcaption></figure>"
    )


def _table(table: Table) -> str:
    of_numbers = [all(map(_is_number, column)) for column in zip(*table.rows, strict=True)]
    of_numbers = of_numbers or [False] * len(table.header)

    def row(cells: Sequence[str], tag: str) -> str:
        classes = (' class="number"' if right else "" for right in of_numbers)
        tags = (f"<{tag}{c}>{_cell(cell)}</{tag}>" for c, cell in zip(classes, cells, strict=True))
        return f"<tr>{''.join(tags)}</tr>"

    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    body = "\n".join(row(cells, "td") for cells in table.rows)
    return _scrolling(f"{caption}<thead>{row(table.header, 'th')}</thead><tbody>{body}</tbody>")


def _cell(text: str) -> str:
    """Long names, such as block_0.attention_norm.bias, may be broken after their dots."""
    return re.sub(r"(?<=[^\W\d])([._/])(?=\w)", r"\1<wbr>", escape(text))


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, perhaps with words after it, or a word in the place of a number."""
    return re.match(r"[-+−]?\.?\d|([-–]|diverged|nan|-?inf|)$", cell) is not None


def _scrolling(inside: str, kind: str = "numbers") -> str:
    return f'<div class="wide" tabindex="0"><table class="{kind}">{inside}</table></div>'


def _verdicts(verdicts: Sequence[decide.Verdict]) -> str:
    rows = (
        f'<tr><td><span class="answer {kind}">{sign} {escape(v.answer)}</span></td>'
        f"<td>{escape(v.claim)}</td><td>{escape(v.why)}</td></tr>"
        for v, (kind, sign) in ((v, _SIGNS[v.answer]) for v in verdicts)
    )
    head = "<thead><tr><th>Answer</th><th>Claim</th><th>Why</th></tr></thead>"
    return _scrolling(f"{head}<tbody>{''.join(rows)}</tbody>", "answers")


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

# Figures are drawn on white. In the dark their lightness is turned round, which keeps the hues, and
# black, added to the ground as light, is the ground. What is wider than the page scrolls by itself, with
# a shadow at the side where it goes on.
_CSS = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c1e21; --soft: #5b6169; --line: #d9dce0;
  --code: #f3f4f6; --link: #0b5cad; --yes: #00674b; --no: #a63c00; --open: #4d535b; --shade: #0003; }
@media screen and (prefers-color-scheme: dark) { :root {
  --ground: #16181b; --ink: #e6e7e9; --soft: #a3a9b1; --line: #3a3f46; --shade: #fff3;
  --code: #22262b; --link: #7cb8f5; --yes: #4cd3a5; --no: #ff9a62; --open: #c3c8ce; } }
html { background: var(--ground); }
body { font: 1rem/1.55 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; color: var(--ink);
  max-width: 54rem; margin: 2.5rem auto 5rem; padding: 0 1.2rem; overflow-wrap: break-word; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1.2rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.6rem 0 .6rem; }
p { margin: .6rem 0; max-width: 44rem; }
a { color: var(--link); }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1.2rem; margin: 0; }
dt { color: var(--soft); margin: .6rem 0; } dd { margin: 0; }
pre { font: .875rem/1.45 ui-monospace, Menlo, Consolas, monospace; background: var(--code);
  padding: .6rem .8rem; border-radius: .4rem; overflow-x: auto; margin: .6rem 0; }
nav ol { padding-left: 1.3rem; columns: 20rem; }
.wide { overflow-x: auto; margin: 1.2rem 0; background:
  linear-gradient(to right, var(--ground) 1rem, transparent) left / 2rem 100% no-repeat local,
  linear-gradient(to left, var(--ground) 1rem, transparent) right / 2rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / .7rem 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / .7rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums;
  min-width: 50%; }
caption { text-align: left; font-weight: 600; padding: .2rem 0 .4rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; }
td { white-space: pre-line; overflow-wrap: anywhere; min-width: 7em; }
.number { text-align: right; white-space: nowrap; min-width: 0; overflow-wrap: normal; }
.answer { font-weight: 600; white-space: nowrap; padding: .1rem .5rem;
  border: 1.5px solid; border-radius: 1rem; }
.yes { color: var(--yes); } .no { color: var(--no); } .open { color: var(--open); border-style: dashed; }
figure { margin: 1.6rem 0; }
figure .wide { margin: 0 0 .4rem; }
figure img { width: 100%; height: auto; display: block; mix-blend-mode: multiply; }
@media screen and (prefers-color-scheme: dark) {
  figure img { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; } }
figcaption { color: var(--soft); font-size: .9375rem; max-width: 44rem; }
@media (max-width: 36rem) { dl { display: block; } dt { margin-bottom: -.6rem; }
  table { font-size: .8125rem; } th, td { padding-right: .6rem; }
  .number { white-space: normal; } figure img { width: 36rem; }
  .answers thead { display: none; } .answers tr { display: block; padding: .5rem 0;
    border-bottom: 1px solid var(--line); }
  .answers td { display: block; border: 0; padding: .15rem 0; font-size: .9375rem; } }
@media print { body { max-width: none; margin: 0; font-size: 10pt; } nav { display: none; }
  .wide { overflow: visible; background: none; } figure img { width: 100%; }
  figure, tr { break-inside: avoid; } h2, caption { break-after: avoid; }
  pre { white-space: pre-wrap; } .number { white-space: normal; } }
"""
