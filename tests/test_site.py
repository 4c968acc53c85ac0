"""The documentation site: its menu has every page, its reference every public name, no link is broken.

These checks need no mkdocs. `make test-docs` builds the site and sets PERGRAD_SITE to its directory.
Then a browser opens every page of it as well.
"""

import ast
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import pergrad as pg
from tests.support import chromium, pages
from tests.support.pages import ROOT

DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def entries(nav: Any) -> Iterator[str]:
    """The pages of the menu, from top to bottom."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(part)


def test_menu_has_every_page_once():
    written = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert sorted(entries(CONFIG["nav"])) == written


def defined(path: Path) -> set[str]:
    """The public functions and classes that a module defines."""
    found = [node for node in ast.parse(path.read_text()).body if hasattr(node, "name")]
    return {node.name for node in found if not node.name.startswith("_")}


def test_reference_has_every_public_name_once():
    rooms = {"optim": pg.optim.__all__, "noise": pg.noise.__all__}
    rooms |= {name: defined(ROOT / "pergrad" / f"{name}.py") for name in ("scaling", "linen", "nnx")}
    expected = [f"pergrad.{name}" for name in {*pg.__all__, *rooms}]
    expected += [f"pergrad.{room}.{name}" for room, names in rooms.items() for name in names]
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert sorted(re.findall(r"^::: (.*)$", text, re.MULTILINE)) == sorted(expected)


@pytest.mark.parametrize("page", pages.EVERY, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path):
    for link in LINK.findall(CODE.sub("", page.read_text())):
        target = urlsplit(link)
        if not target.scheme and target.path:
            assert (page.parent / target.path).exists(), link


def test_nothing_comes_from_elsewhere():
    assert CONFIG["theme"]["font"] is False
    assert "repo_url" not in CONFIG  # the theme would ask the repository's host for its number of stars
    for name in (*CONFIG.get("extra_css", ()), *CONFIG.get("extra_javascript", ())):
        assert (DOCS / name).exists()


# The built site, in a browser.

SITE = Path(os.environ.get("PERGRAD_SITE", "no such directory")).absolute()
# 404.html is for a server: its links begin at the root of the host.
BUILT = sorted(page for page in SITE.rglob("*.html") if page.name != "404.html")
needs_site = pytest.mark.skipif(not BUILT, reason="make test-docs builds the site and opens it")
FAULTS = """(() => {
  const faults = [], wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) faults.push(`the page is ${wide} wide`);
  for (const e of document.images) {
    e.loading = 'eager';
    if (e.complete && !e.naturalWidth) faults.push(`no picture: ${e.src}`);
  }
  for (const e of document.querySelectorAll('article pre'))
    if (e.scrollWidth > e.clientWidth && !['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
        && !['auto', 'scroll'].includes(getComputedStyle(e.firstElementChild || e).overflowX))
      faults.push(`it does not scroll: ${e.textContent.slice(0, 60)}`);
  for (const e of document.querySelectorAll('article blockquote'))
    faults.push(`an example became a quotation: ${e.textContent.slice(0, 60)}`);
  for (const e of performance.getEntriesByType('resource'))
    if (!e.name.startsWith('file:')) faults.push(`it asks for ${e.name}`);
  return faults;
})()"""
LINKS = "[...document.links].map(e => e.href)"
IDENTIFIERS = "[...document.querySelectorAll('[id]')].map(e => e.id)"
RESULTS = "[...document.querySelectorAll('.md-search-result__link')].map(e => e.href)"


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    with chromium.browser() as opened:
        yield opened


@needs_site
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("page", BUILT, ids=lambda page: page.relative_to(SITE).as_posix())
def test_page_can_be_read(page: Path, width: int, browser: chromium.Browser):
    browser.open(page, width, dark=width == 390)
    faults = browser.ask(FAULTS)
    assert not faults


@needs_site
def test_a_result_is_one_entry(browser: chromium.Browser):
    """Every line of a docstring's `Returns` once became an entry of its own, with the type in front."""
    entries = """[...document.querySelectorAll('.doc-contents > p')].filter(
      e => e.textContent.trim() == 'Returns:').map(e => e.nextElementSibling.children.length)"""
    browser.open(SITE / "reference" / "functions.html", 1440)
    found = browser.ask(entries)
    assert found and set(found) == {1}


def test_warnings_are_errors():
    """With `--quiet` mkdocs does not count its warnings, and `--strict` does nothing."""
    (build,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert "--strict" in build and "-q" not in build


@needs_site
def test_a_name_is_shown_as_what_it_is(browser: chromium.Browser):
    """A function with the name of its file was once shown as that file, without its arguments."""
    browser.open(SITE / "reference" / "functions.html", 1440)
    shown = browser.ask(
        """[...document.querySelectorAll('.doc-object')].map(e => [
          e.querySelector('.doc-heading').id, e.className, !!e.querySelector('.doc-signature')])"""
    )
    kinds = {name.removeprefix("pergrad."): kind.split("doc-")[-1] for name, kind, _ in shown}
    for name in ("check", "combine", "value_and_stats", "gram"):
        assert inspect.isfunction(getattr(pg, name)) and kinds[name] == "function"
    assert "module" not in kinds.values()
    assert all(signed for name, kind, signed in shown if kind.endswith("function"))


@needs_site
def test_no_link_is_broken(browser: chromium.Browser):
    links, known = {}, {}
    for page in BUILT:
        browser.open(page, 1440)
        links[page], known[page] = browser.ask(LINKS), set(browser.ask(IDENTIFIERS))
    broken = []
    for page in BUILT:
        for link in links[page]:
            parts = urlsplit(link)
            if parts.scheme != "file":
                continue
            target = Path(unquote(parts.path))
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in known and anchor not in known[target]):
                broken.append((page.name, link))
    assert sum(map(len, links.values())) > 1000 and not broken


@needs_site
def test_search_needs_no_network(browser: chromium.Browser):
    browser.open(SITE / "index.html", 1440)
    found = browser.wait_for(
        f"""(() => {{
          const field = document.querySelector('.md-search__input');
          if (!field.value) {{
            field.focus();
            field.value = 'mislabelled';
            field.dispatchEvent(new Event('keyup'));
            field.dispatchEvent(new Event('input'));
          }}
          return {RESULTS};
        }})()"""
    )
    assert any("mislabelled" in link for link in found)
