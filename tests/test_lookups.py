"""Lookups: whole gradients in every way that knows their rows, and what the plan makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from tests.cases import CASES, Case, array
from tests.test_cases import PLAIN, WEIGHTED
from tests.test_cases_whole import run

LOOKUPS = [c for c in CASES if c.loss.__module__ == "tests.cases_lookups"]


@pytest.mark.parametrize("case", LOOKUPS, ids=lambda case: case.name)
def test_whole_gradients(case: Case) -> None:
    run(case, "summed", PLAIN, ("dot", "clipped"))
    run(case, "sparse", WEIGHTED, ("norm", "gram", "dot", "clipped"))


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
