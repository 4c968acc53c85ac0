"""Lookups: whole gradients in every way that knows their rows, and what the plan makes of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from tests.support.cases import Case, array
from tests.support.every_case import LOOKUPS
from tests.support.runner import PLAIN, WEIGHTED, check_whole


@pytest.mark.parametrize("case", LOOKUPS, ids=lambda case: case.name)
def test_whole_gradients(case: Case) -> None:
    check_whole(case, "summed", PLAIN, ("dot", "clipped"))
    check_whole(case, "sparse", WEIGHTED, ("norm", "gram", "dot", "clipped"))


def test_bytes_as_indices() -> None:
    # 300 rows are more than a byte counts.
    def loss(table: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(jnp.take(table, x, axis=0)))

    r = np.random.default_rng(0)
    table, x = array(r.normal(size=(300, 2))), r.integers(256, size=(5, 6))
    stats = {"square": pg.Mean(jnp.square), "norm": pg.Norm(), "tokens": pg.Mean(per="token")}
    stats_fn = jax.jit(pg.grad_stats(loss, stats, strategy="sparse"))
    narrow, wide = (stats_fn(table, array(x, dtype)) for dtype in (np.uint8, np.int32))
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


def sine(rows: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sin(rows))


# Losses of a large table E and a small one F whose gradients have few rows, and the kind in the plan.
SPARSE = {
    "twice": ("scatter + scatter", lambda p, b: sine(p["E"][b["x"]] * p["E"][b["z"]])),
    "twice, one of them scaled": (
        "scatter + scatter",
        lambda p, b: sine((3 * p["E"])[b["x"]] + p["E"][b["z"]]),
    ),
    "set to 0": ("scatter", lambda p, b: sine(p["E"].at[0].set(0.0)[b["x"]])),
    "several set to 0": ("scatter", lambda p, b: sine(p["E"].at[jnp.arange(3)].set(0.0)[b["x"]])),
    "chosen": ("scatter", lambda p, b: sine(jnp.where(real(p["E"]), p["E"], 0)[b["x"]])),
    "masked": ("scatter", lambda p, b: sine((p["E"] * real(p["E"]))[b["x"]])),
    "padded": ("scatter", lambda p, b: sine(jnp.pad(p["E"], ((1, 0), (0, 0)))[b["x"]])),
    "joined": ("scatter", lambda p, b: sine(jnp.concatenate([p["F"], p["E"]])[b["x"]])),
}
ROWS_ALONE = {
    "square": pg.Mean(jnp.square),
    "cos": pg.Mean(jnp.cos),
    "variance": pg.Variance(),
    "norm": pg.Norm(),
    "gram": pg.Gram(),
    "clipped": pg.ClippedMean(1.0),
}


def real(table: jax.Array) -> jax.Array:
    return jnp.arange(len(table))[:, None] > 0


def arguments(rows: int, batch: int = 16) -> tuple[dict, dict]:
    x = jax.ShapeDtypeStruct((batch, 12), jnp.int32)
    shapes = {"E": (rows, 8), "F": (3, 8)}
    return {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}, {"x": x, "z": x}


@pytest.mark.parametrize("name", SPARSE)
def test_the_plan_keeps_to_rows(name: str) -> None:
    kind, loss = SPARSE[name]
    plan = pg.explain(loss, ROWS_ALONE)(*arguments(4096))
    row = next(row for row in plan.rows if row.path == "['E']")
    assert row.kind == kind
    assert set(row.strategy.split(", ")) <= {"sparse", "summed"} and "sparse" in row.strategy
    assert f"touches at most {12 * kind.count('scatter')} of" in row.reason


@pytest.mark.parametrize("name", SPARSE)
def test_no_table_for_each_example(name: str) -> None:
    # With 64 examples the program has as many tables as with 16, none of which is an example's.
    _, loss = SPARSE[name]
    rows, more = 4096, 48
    step = jax.jit(pg.grad_stats(loss, ROWS_ALONE))

    def temporary(batch: int) -> int:
        compiled: Any = step.lower(*arguments(rows, batch)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown, table = temporary(16 + more) - temporary(16), rows * 8 * 4
    assert grown < more * table / 4


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_rows_times_what_is_not_finite(scale: float) -> None:
    # A scale that is not finite is seen in every statistic, also if nobody reads its row.
    def loss(p: dict, x: jax.Array) -> jax.Array:
        return sine((p["E"] * p["scale"][:, None])[x])

    r = np.random.default_rng(0)
    scales = r.normal(size=7)
    scales[5] = scale
    p = {"E": array(r.normal(size=(7, 2))), "scale": array(scales)}
    x = array(r.integers(5, size=(6, 4)), np.int32)
    stats = {name: ROWS_ALONE[name] for name in ("square", "cos", "variance", "norm", "gram")}
    stats["isnan"] = pg.Mean(jnp.isnan)
    own, dense = (pg.grad_stats(loss, stats, strategy=s)(p, x) for s in ("sparse", "materialise"))
    assert np.isnan(own["square"]["E"][5]).all() and np.isnan(own["norm"]).all()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12), own, dense)


def test_rows_left_out_may_be_nan() -> None:
    # The root of 0 has no derivative, and the row that is set to 0 takes none in.
    def loss(p: dict, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sqrt(jnp.abs(p["E"].at[0].set(0.0)[x])))

    r = np.random.default_rng(0)
    p, x = {"E": array(r.normal(size=(7, 2)))}, array(r.integers(4, size=(6, 4)), np.int32)
    own, dense = (pg.grad_stats(loss, ROWS_ALONE, strategy=s)(p, x) for s in ("sparse", "materialise"))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12), own, dense)
