"""Pages as a browser shows them: headless Chromium, driven over its DevTools protocol.

Chromium reads commands from one pipe and answers into another, in JSON that ends with a zero byte. That
needs no other package. Where Chromium is not installed, tests that ask for it are skipped.
"""

import base64
import contextlib
import io
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
PATIENCE = 120  # seconds that an answer may take, on a busy machine
# The pipes are to be the descriptors 3 and 4 of the browser.
START = (
    "import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); os.execvp(c[0], c)"
)


def installed() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browser() -> Iterator["Browser"]:
    """A browser with one empty tab; skips the test if there is none."""
    program = installed()
    if program is None:
        pytest.skip("Chromium is not installed: the pages are not opened in a browser")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        to_browser, commands = os.pipe()
        answers, from_browser = os.pipe()
        # Above 4, so that taking their places overwrites neither.
        ends = [os.dup(fd) for fd in (to_browser, from_browser)]
        while min(ends) <= 4:
            ends = [os.dup(fd) for fd in ends]
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, ends), *command],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (to_browser, from_browser, *ends):
            os.close(fd)
        try:
            yield Browser(commands, answers)
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(answers)


class Browser:
    """One tab, which shows one page after the other."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._ids = itertools.count(1)
        self._unread = b""
        self._events: list[str] = []
        self._session: str | None = None
        tab = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        self._call("Page.enable")

    def open(self, page: Path | str, width: int, *, dark: bool = False) -> None:
        """Shows a file or an address in a window of that many pixels, in the colours of that mode."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._events.clear()
        self._call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._read()

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page, as JSON has it."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of the expression, once it is neither empty nor false."""
        until = time.monotonic() + PATIENCE
        while not (found := self.ask(expression)):
            if time.monotonic() > until:
                raise TimeoutError(f"the page never had {expression}")
            time.sleep(0.05)
        return found

    def screenshot(self, **part: float) -> bytes:
        """All of the page, or the part at x, y, width, height and a scale, as PNG."""
        options = {"format": "png", "captureBeyondViewport": True} | ({"clip": part} if part else {})
        return base64.b64decode(self._call("Page.captureScreenshot", **options)["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        message = {"id": next(self._ids), "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != message["id"]:
            pass
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message, an answer or an event."""
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError("Chromium does not answer")
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                raise ConnectionError("Chromium has ended")
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        found = json.loads(message)
        self._events.append(found.get("method", ""))
        return found


# What must hold of every page.

WIDTHS = (390, 820, 1440)  # a phone, a tablet, a desk
CONTRAST = 4.5  # of WCAG, level AA
FAULTS = """(() => {
  const faults = [], wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) faults.push(`the page is ${wide} wide`);
  for (const e of document.body.querySelectorAll('*'))
    if (!e.closest('.wide, pre') && e.getBoundingClientRect().right > innerWidth + 1)
      faults.push(`${e.tagName} is cut: ${e.textContent.slice(0, 60)}`);
  for (const e of document.querySelectorAll('.wide, pre'))
    if (e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX != 'auto')
      faults.push(`it does not scroll: ${e.textContent.slice(0, 60)}`);
  for (const e of document.images)
    if (!e.complete || !e.naturalWidth) faults.push(`no picture: ${e.alt}`);
  for (const e of document.links)
    if (!e.hash || !document.getElementById(decodeURIComponent(e.hash.slice(1))))
      faults.push(`a broken link: ${e.getAttribute('href')}`);
  return faults;
})()"""
# Of every element that has text of its own: the text, its colour and that of the ground it stands on.
COLOURS = """(() => {
  const found = [];
  for (const e of document.querySelectorAll('body, body *')) {
    const text = [...e.childNodes].filter(n => n.nodeType == 3).map(n => n.textContent).join('').trim();
    if (!text || !e.getClientRects().length) continue;
    let ground = e;
    while (ground && getComputedStyle(ground).backgroundColor == 'rgba(0, 0, 0, 0)')
      ground = ground.parentElement;
    const rgb = c => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
    found.push([text.slice(0, 60), rgb(getComputedStyle(e).color),
      ground ? rgb(getComputedStyle(ground).backgroundColor) : [255, 255, 255]]);
  }
  return found;
})()"""

PICTURES = """[...document.images].map(e => e.getBoundingClientRect()).map(
  r => ({x: r.left + scrollX, y: r.top + scrollY, width: r.width, height: r.height}))"""


def check(browser: Browser, page: Path) -> None:
    """At every width, by day and by night: nothing is cut, missing or hard to read."""
    for dark in (False, True):
        for width in WIDTHS:
            browser.open(page, width, dark=dark)
            where = f"{page.name}, {width} pixels, {'dark' if dark else 'light'}"
            assert not (faults := browser.ask(FAULTS)), f"{where}: {faults}"
        assert not (hard := pale(browser)), f"{where}: hard to read: {hard}"
        ground = np.array(browser.ask(COLOURS)[0][2])
        for place in browser.ask(PICTURES):
            png = browser.screenshot(**place, scale=0.25)
            corner = 255 * matplotlib.image.imread(io.BytesIO(png), format="png")[-2, -2, :3]
            assert abs(corner - ground).max() < 4, (
                f"{where}: a picture on {corner}, the page on {ground}"
            )


def pale(browser: Browser) -> list[str]:
    """The texts on the page that are hard to read, because their colour is close to their ground's."""
    colours = browser.ask(COLOURS)
    assert colours, "the page has no text"
    return [text for text, ink, ground in colours if _contrast(ink, ground) < CONTRAST]


def _contrast(a: list[float], b: list[float]) -> float:
    """The ratio of WCAG, from 1 to 21."""
    low, high = sorted(map(_luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: list[float]) -> float:
    parts = np.array(colour) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
