"""The plan in a terminal: in colour where it fits, and elsewhere as `print` has it."""

import io

import jax.numpy as jnp
import pytest
from rich.console import Console

import pergrad as pg
from pergrad.lab import plans


@pytest.fixture
def plan() -> pg.Plan:
    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"] + params["bias"][None]) ** 2)

    params = {"first": jnp.ones((16, 32)), "second": jnp.ones((32, 8)), "bias": jnp.ones(8)}
    stats = {"square": pg.Mean(jnp.square), "norm": pg.Norm()}
    return pg.explain(loss, stats)(params, jnp.ones((4, 16)))


def shown(plan: pg.Plan, **options) -> str:
    out = io.StringIO()
    plans.show(Console(file=out, **options), plan)
    return out.getvalue()


def test_without_a_terminal_it_is_the_text(plan):
    assert shown(plan, force_terminal=False) == f"{plan}\n"


def test_a_narrow_terminal_has_the_text_in_colour(plan):
    assert shown(plan, force_terminal=True, width=40, color_system=None) == f"{plan}\n"
    assert "\x1b[" in shown(plan, force_terminal=True, width=40, color_system="truecolor")


def test_a_terminal_has_all_of_it_in_colour(plan):
    out = shown(plan, force_terminal=True, width=200, color_system="truecolor")
    assert "\x1b[" in out
    plain = shown(plan, force_terminal=True, width=200, color_system=None)
    for row in plan.rows:
        (line,) = (line for line in plain.splitlines() if row.path in line)
        assert all(cell in line for cell in row.cells())
        assert row.reason in plain
    totals = str(plan).split("\n\n")[-1]
    assert totals in plain and plain.index("['bias']") < plain.index(totals)
