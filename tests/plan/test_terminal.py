"""The plan in a terminal: in colours where rich is installed, and elsewhere as plain text."""

import contextlib
import io
import os
import sys
import threading

import jax.numpy as jnp
import pytest
import rich
from rich.console import Console

import pergrad as pg


@pytest.fixture(scope="module")
def plan() -> pg.Plan:
    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"] + params["bias"][None]) ** 2)

    params = {"first": jnp.ones((16, 32)), "second": jnp.ones((32, 8)), "bias": jnp.ones(8)}
    stats = {"square": pg.Mean(jnp.square), "norm": pg.Norm()}
    return pg.explain(loss, stats)(params, jnp.ones((4, 16)))


@pytest.fixture
def printed(monkeypatch):
    """A function that prints to a pseudo-terminal of 200 columns, and returns what came out."""

    def of(thing) -> str:
        ours, theirs = os.openpty()
        parts = []

        def read():  # at the same time, because a terminal that nobody reads soon takes no more text
            with contextlib.suppress(OSError):  # the end
                while part := os.read(ours, 4096):
                    parts.append(part)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        with open(theirs, "w") as out, monkeypatch.context() as patch:
            for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
                patch.delenv(name, raising=False)
            patch.setenv("TERM", "xterm-256color")
            patch.setenv("COLUMNS", "200")
            patch.setattr(sys, "stdout", out)
            print(thing)
        reader.join(10)
        os.close(ours)
        return b"".join(parts).decode().replace("\r\n", "\n")

    return of


def rendered(plan: pg.Plan, **options) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, **options).print(plan, soft_wrap=True)
    return out.getvalue()


def test_print_uses_colours_in_a_terminal(plan, printed):
    out = printed(plan)
    assert "\x1b[" in out
    assert out == rendered(plan, width=200, color_system="256")


def test_print_is_plain_without_a_terminal(plan, capsys):
    print(plan)
    assert capsys.readouterr().out == f"{plan.text}\n"


def test_print_is_plain_without_rich(plan, printed, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert printed(plan) == f"{plan.text}\n"


def test_text_is_plain_in_a_terminal(plan, printed):
    assert printed(plan.text) == f"{plan.text}\n"
    assert "\x1b[" not in plan.text


def test_a_narrow_window_has_the_text_in_colours(plan):
    assert rendered(plan, width=40, color_system=None) == f"{plan.text}\n"
    assert "\x1b[" in rendered(plan, width=40, color_system="truecolor")


def test_a_wide_window_has_all_of_the_table(plan):
    plain = rendered(plan, width=200, color_system=None)
    for row in plan.rows:
        (line,) = (line for line in plain.splitlines() if row.path in line)
        assert all(cell in line for cell in row.cells())
        assert row.reason in plain
    totals = plan.text.split("\n\n")[-1]
    assert totals in plain and plain.index("['bias']") < plain.index(totals)


def test_rich_prints_a_plan(plan, capsys):
    rich.print(plan)
    assert "materialise" in capsys.readouterr().out
