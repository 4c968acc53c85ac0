"""Pages: complete, closed to markup of others, the same twice."""

import base64
import dataclasses
import io
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from pergrad.lab.compare.decide import estimate
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, sheet
from pergrad.lab.pages.report import Figure, Page, Section, Table, settings, write
from tests.support.made_up import DRAWINGS, a_line, a_page
from tests.support.pages import ROOT

ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "</style><b>",
]
VOID = {"img", "meta", "source"}


class Parsed(HTMLParser):
    """Every tag with its attributes, and the text; fails where tags do not match.

    <wbr>, a place where a word may be broken, is no tag of a text's.
    """

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.said = [], [], []
        self.feed(html.replace("<wbr>", ""))
        self.close()
        assert not self.open
        self.text = "\n".join(self.said)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def read(path):
    return Parsed(path.read_text())


def colours(png):
    pixels = matplotlib.image.imread(io.BytesIO(png), format="png")
    return len(np.unique(pixels[..., :3] @ np.array([1.0, 300.0, 90000.0])))


def embedded(parsed, tag="img", attribute="src"):
    """The drawings of the page: those for a desk, or those for a phone, which are in <source>."""
    head = "data:image/svg+xml;base64,"
    sources = [image[attribute] for image in parsed.named(tag)]
    assert all(source.startswith(head) for source in sources)
    return [base64.b64decode(source.removeprefix(head), validate=True) for source in sources]


def width(svg):
    return float(ElementTree.fromstring(svg).attrib["width"].removesuffix("pt")) / 72


# The page.


def test_everything_is_on_the_page(tmp_path):
    path = write(a_page("a claim"), tmp_path / "new" / "study")
    assert path == tmp_path / "new" / "study" / "report.html"
    parsed = read(path)
    for words in ("Question", "Claim", "What was run", "1 supported, 1 contradicted, 1 not shown."):
        assert words in parsed.text
    for words in (
        "✓ supported",
        "✗ contradicted",
        "? not shown",
        "Figure 1.",
        "It goes down and up.",
        "0.7",
    ):
        assert words in parsed.text
    assert {"versions.jax", "seeds", "none"} <= set(parsed.text.split())
    # The verdicts, above and in their section; the table; the configuration. Each scrolls by itself.
    assert len(parsed.named("table")) == 4
    assert len([a for a in parsed.named("div") if a["class"] == "wide"]) == 4
    assert [image["alt"] for image in parsed.named("img")] == ["A line. It goes down and up."]
    assert parsed.named("pre") and [a["href"] for a in parsed.named("a")] == ["#s0", "#s1"]
    assert {"s0", "s1"} == {a["id"] for a in parsed.named("section") if "id" in a}


def test_figures_are_in_the_page_and_beside_it(tmp_path):
    figures = [
        Figure(title, "", a_line) for title in ("Loss", "Loss", "loss 2", "漢字", "../../etc/x", "")
    ]
    out = tmp_path / "out"
    inside = embedded(read(write(a_page(drawn=figures), out)))
    names = ["loss", "loss-2", "loss-2-2", "figure", "etc-x", "figure-2"]
    assert inside == [(out / "figures" / f"{name}.svg").read_bytes() for name in names]
    assert all(width(svg) == pytest.approx(sheet.WIDE) for svg in inside)
    assert all(colours((out / "figures" / f"{name}.png").read_bytes()) > 10 for name in names)
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {"report.html"} | {f"figures/{n}.{end}" for n in names for end in ("png", "svg")}
    assert list(tmp_path.iterdir()) == [out]


def test_a_phone_has_drawings_of_its_own(tmp_path):
    drawn = [Figure(name, "", draw) for name, draw in DRAWINGS.items()]
    parsed = read(write(a_page(drawn=drawn), tmp_path))
    assert {source["media"] for source in parsed.named("source")} == {"(max-width: 36rem)"}
    narrow = embedded(parsed, "source", "srcset")
    assert len(narrow) == len(DRAWINGS) == len(embedded(parsed))
    assert all(width(svg) == pytest.approx(sheet.NARROW) for svg in narrow)


def test_every_colour_but_those_of_maps_has_one_for_the_night(tmp_path):
    drawn = [Figure(name, "", draw) for name, draw in DRAWINGS.items() if name != "map"]
    for svg in embedded(read(write(a_page(drawn=drawn), tmp_path))):
        text = svg.decode()
        style, rest = text[: text.index('<g id="figure_1">')], text[text.index('<g id="figure_1">') :]
        assert "prefers-color-scheme: dark" in style
        used = set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", rest))
        assert used
        for what, colour in used:
            assert f'[style*="{what}: {colour}"]' in style


@pytest.mark.parametrize("attack", ATTACKS)
def test_text_stays_text(tmp_path, attack):
    figure = Figure(attack, attack, a_line)
    harmless = read(
        write(a_page("x", [dataclasses.replace(figure, title="x", caption="x")]), tmp_path / "a")
    )
    parsed = read(write(a_page(attack, [figure]), tmp_path / "b"))
    shape = [(tag, set(attrs)) for tag, attrs in parsed.tags]
    assert shape == [(tag, set(attrs)) for tag, attrs in harmless.tags]
    assert parsed.text.count(attack) >= 20
    assert [image["alt"] for image in parsed.named("img")] == [f"{attack}. {attack}"]


def test_the_page_needs_no_network_and_runs_nothing(tmp_path):
    parsed = read(write(a_page(), tmp_path))
    links = [v for _, attrs in parsed.tags for k, v in attrs.items() if k in ("src", "href", "srcset")]
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in parsed.tags}
    html = (tmp_path / "report.html").read_text()
    assert "http://" not in html and "https://" not in html and "url(" not in html
    assert "prefers-color-scheme: dark" in html and "@media print" in html


def test_the_same_page_has_the_same_bytes(tmp_path):
    for out in ("a", "b"):
        write(a_page(drawn=[Figure(name, "", draw) for name, draw in DRAWINGS.items()]), tmp_path / out)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 1 + 2 * len(DRAWINGS)
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_long_tables_and_any_letters(tmp_path):
    words = "Größe σ² 漢字 🙂 \u202eright to left \udcff $x^2 $ \\frac"
    table = Table(words, [f"column {i}" for i in range(60)], [[f"{i}"] * 60 for i in range(1000)])
    drawn = [
        Figure(words, words, lambda fig: figures.bars_with_intervals(fig, {words: estimate([1, 2])}))
    ]
    page = a_page(words, drawn)
    page = dataclasses.replace(page, sections=[*page.sections, Section("", "", tables=[table])])
    parsed = read(write(page, tmp_path))
    assert len(parsed.named("td")) > 60_000
    assert words.replace("\udcff", "\\udcff") in parsed.text  # a byte of a file name that is no text


def test_columns_of_numbers(tmp_path):
    table = Table(
        "", ["method", "loss", "note"], [["a", "2.3 (2.2 to 2.4)", "1"], ["b", "diverged", "x"]]
    )
    page = Page("", "", "", "", [Section("", "", tables=[table])], {})
    parsed = read(write(page, tmp_path))
    assert [cell.get("class") for cell in parsed.named("td")[:6]] == [None, "number", None] * 2
    assert [cell.get("class") for cell in parsed.named("th")[:3]] == [None, "number", None]


def test_settings_that_all_share_are_told_once():
    one = {"steps": 5, "model": {"width": 64, "layers": 2}}
    other = {"steps": 5, "model": {"width": 32, "layers": 2}}
    shared = {"steps": "5", "model.layers": "2"}
    assert settings({"a": one, "b": other}) == {
        "all methods": shared,
        "a": {"model.width": "64"},
        "b": {"model.width": "32"},
    }
    assert settings({"a": one}) == {"all methods": shared | {"model.width": "64"}}


def test_an_empty_page(tmp_path):
    parsed = read(write(Page("Nothing", "", "", "", [], {}), tmp_path))
    assert "Nothing" in parsed.text and not parsed.named("img") and not parsed.named("nav")
    assert read(
        write(Page("", "", "", "", [Section("", "", tables=[Table("", ["a"], [])])], {}), tmp_path)
    )


def test_rows_fit_the_header():
    with pytest.raises(LabError, match="table 't': 2 columns, and a row of 1"):
        Table("t", ["a", "b"], [["1", "2"], ["1"]])


# Files.


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(LabError, match="cannot write the report to ") as error:
            write(a_page(), out)
        assert "\n" not in str(error.value) and str(out) in str(error.value)


def test_the_former_page_stays_if_writing_fails(tmp_path, monkeypatch):
    before = write(a_page("before"), tmp_path).read_bytes()
    replace = os.replace

    def full(source, target):
        if str(target).endswith(".html"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LabError, match="No space left on device"):
        write(a_page("after"), tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert not [path for path in tmp_path.rglob(".*")]


# matplotlib as the user left it.


def test_styles_are_not_left_behind(tmp_path):
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"lines.linewidth": 9.0, "savefig.dpi": 20}):
        mine = (write(a_page(), tmp_path / "a").parent / "figures" / "a-line.png").read_bytes()
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    plain = (write(a_page(), tmp_path / "b").parent / "figures" / "a-line.png").read_bytes()
    assert mine == plain, "the user's settings are not the page's"
    assert dict(matplotlib.rcParams) == before


def test_pyplot_and_the_backend_are_left_alone(tmp_path):
    code = f"""
import sys, matplotlib
from pathlib import Path
from pergrad.lab.pages.report import Figure, Page, Section, write
matplotlib.use("svg")
draw = lambda sheet: sheet.add_subplot().plot([1, 2])
page = Page("", "", "", "", [Section("", "", [Figure("", "", draw)])], {{}})
write(page, Path({str(tmp_path)!r}))
print("matplotlib.pyplot" in sys.modules, matplotlib.get_backend())
"""
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == ["False", "svg"]
