"""A strategy, a statistic and a term, each added in one small class from outside of the package.

Nothing else is touched. Each is planned, explained, priced and run, and agrees with the oracle: that a
new one is one file cannot become untrue.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

import pergrad as pg
from pergrad import _cut, _plan, _statistics, _strategies
from pergrad._cut import terms
from pergrad._plan import choose
from tests.support import oracle

BATCH, POSITIONS, INPUTS, OUTPUTS = 6, 4, 3, 5


def loss(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    h = jnp.tanh(x @ params["w"] + params["b"][None, None])
    running = lax.cumsum(h * params["scale"][None, None], axis=1)
    return jnp.mean(jnp.square(running - y))


def arguments() -> tuple[Any, Any]:
    r = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(r.normal(size=(INPUTS, OUTPUTS))),
        "b": jnp.asarray(r.normal(size=OUTPUTS)),
        "scale": jnp.asarray(r.normal(size=OUTPUTS)),
    }
    x = jnp.asarray(r.normal(size=(BATCH, POSITIONS, INPUTS)))
    return params, (x, jnp.asarray(r.normal(size=(BATCH, POSITIONS, OUTPUTS))))


def gradients(loss: Any, *args: Any) -> Any:
    _, _, g = oracle.per_example(loss, args)
    return g


def assert_close(result: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), result, expected)


# A statistic: the largest magnitude of each entry, over the examples.


@dataclasses.dataclass(frozen=True)
class Largest(_statistics.Accumulator):
    """max_i |g_i|, entry by entry."""

    @property
    def in_parts(self) -> bool:
        return True

    def init(self, like: Any) -> Any:
        return jnp.zeros(like.shape, like.dtype)

    def add(self, state: Any, g: Any, w: Any) -> Any:
        return jnp.where(jnp.asarray(w) > 0, jnp.maximum(state, jnp.abs(g)), state)

    def add_all(self, state: Any, gs: Any, w: Any) -> Any:
        w = jnp.broadcast_to(jnp.asarray(w), len(gs))
        return lax.scan(lambda state, gw: (self.add(state, *gw), None), state, (gs, w))[0]

    def part_of_all(self, state: Any, devices: Any) -> Any:
        raise NotImplementedError

    def finish(self, state: Any, count: Any, like: Any) -> Any:
        return state


@pytest.mark.parametrize("strategy", ["auto", *(s.name for s in _strategies.STRATEGIES)])
@pytest.mark.parametrize("microbatch_size", [None, 1, 4, "auto"])
def test_statistic(strategy: str, microbatch_size: Any) -> None:
    args, stats = arguments(), {"largest": Largest(), "mean": pg.Mean()}
    options = {"strategy": strategy, "microbatch_size": microbatch_size}
    found = pg.grad_stats(loss, stats, **options)(*args)
    g = gradients(loss, *args)
    assert_close(found["largest"], jax.tree.map(lambda x: np.max(np.abs(x), axis=0), g))
    assert_close(found["mean"], jax.tree.map(lambda x: np.mean(x, axis=0), g))
    plan = pg.explain(loss, stats, **options)(*args)
    assert all(row.operations > 0 and row.reason for row in plan.rows)


def test_statistic_of_weighted_examples() -> None:
    args, w = arguments(), jnp.asarray([1.0, 0.0, 2.0, 1.0, 0.0, 1.0])
    found = pg.grad_stats(loss, Largest())(*args, example_weights=w)
    g = gradients(loss, *args)
    assert_close(found, jax.tree.map(lambda x: np.max(np.abs(x[np.asarray(w) > 0]), axis=0), g))


# A strategy: it halves the batch, and forms the gradients of one half after the other.


@dataclasses.dataclass(frozen=True)
class Halves(_strategies.Strategy):
    name = "halves"
    forms_gradients = True
    feeds_all = True
    price = 1e-30  # the cheapest of all

    def why_not(self, tail: Any, statistic: Any) -> str | None:
        return None if statistic.accumulates else "not an accumulator"

    def seconds(self, work: Any, statistic: Any) -> float:
        return self.price

    def operations(self, work: Any, statistics: Any) -> float:
        return 12345 * len(statistics)

    def temporary_bytes(self, work: Any) -> float:
        return work.formed * work.size / 2

    def reason(self, work: Any) -> str:
        return f"{work.size} in two halves"

    def reduce(self, tail: Any, jobs: Any, examples: Any) -> list[Any]:
        half = examples.size // 2
        for own in (slice(0, half), slice(half, None)):
            factors = [x[own] for x in examples.factors]
            size = len(range(examples.size)[own])
            gs = jax.vmap(lambda f: tail.gradients(f, examples.constants), axis_size=size)(factors)
            w = examples.weights
            w = w[own] if isinstance(w, jax.Array) else w
            jobs = [dataclasses.replace(job, state=job.fed(tail, gs[job.place], w)) for job in jobs]
        return [job.state for job in jobs]


@pytest.fixture
def with_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "STRATEGIES", (Halves(), *_strategies.STRATEGIES))


STATS = {"mean": pg.Mean(), "cosine": pg.Mean(jnp.cos), "variance": pg.Variance(), "norm": pg.Norm()}


@pytest.mark.usefixtures("with_halves")
@pytest.mark.parametrize("microbatch_size", [None, 1, 4])
def test_strategy(microbatch_size: Any) -> None:
    args = arguments()
    found = pg.grad_stats(loss, STATS, microbatch_size=microbatch_size)(*args)
    g = gradients(loss, *args)
    assert_close(found["mean"], jax.tree.map(lambda x: np.mean(x, axis=0), g))
    assert_close(found["cosine"], jax.tree.map(lambda x: np.mean(np.cos(x), axis=0), g))
    assert_close(found["variance"], jax.tree.map(lambda x: np.var(x, axis=0, ddof=1), g))
    squares = sum(np.sum(np.square(x.reshape(BATCH, -1)), axis=1) for x in jax.tree.leaves(g))
    assert_close(found["norm"], np.sqrt(squares))


@pytest.mark.usefixtures("with_halves")
def test_strategy_is_explained_and_priced() -> None:
    stats = {"cosine": pg.Mean(jnp.cos), "variance": pg.Variance()}
    plan = pg.explain(loss, stats)(*arguments())
    for row in plan.rows:
        assert row.strategy == "halves"
        assert row.reason == f"{BATCH} in two halves"
        assert row.operations == 2 * 12345
    assert "halves" in str(plan)


@pytest.mark.usefixtures("with_halves")
def test_strategy_is_not_taken_if_it_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Halves, "price", 1e30)
    plan = pg.explain(loss, {"cosine": pg.Mean(jnp.cos)})(*arguments())
    assert not any("halves" in row.strategy for row in plan.rows)


# A term: entries that were used backwards have a gradient that is turned around again.


@dataclasses.dataclass(frozen=True)
class Reversed(_cut.Term):
    """`rev` of something that varies: one contribution, which is its factor backwards."""

    eqn: Any

    @property
    def kind(self) -> str:
        return "reversed"

    @staticmethod
    def match(eqn: Any, varying: Any, made_by: Any) -> Reversed | None:
        return Reversed(eqn, eqn.outvars[0], (eqn.invars[0],)) if varying else None

    def sum(self, env: Any, w: Any) -> jax.Array:
        x = env[self.factors[0]]
        w = jnp.broadcast_to(jnp.asarray(w, x.dtype), len(x))
        summed = jnp.tensordot(jnp.where(w > 0, w, 0), x, axes=1)
        return lax.rev(summed, self.eqn.params["dimensions"])

    def split(self, env: Any) -> list[jax.Array]:
        return [env[self.factors[0]][:, None]]

    def contribution(self, parts: Any) -> jax.Array:
        return lax.rev(parts[0], self.eqn.params["dimensions"])


def reversing_loss(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean(jnp.square(x[:, 0] @ params["w"] * lax.rev(params["scale"], (0,))[None] - y[:, 0]))


@pytest.fixture
def with_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(terms.TERMS, primitives.rev_p, Reversed.match)


@pytest.mark.usefixtures("with_reversed")
@pytest.mark.parametrize("strategy", ["auto", *(s.name for s in _strategies.STRATEGIES)])
def test_term(strategy: str) -> None:
    args = arguments()
    stats = STATS | {"tokens": pg.Mean(jnp.square, per="token"), "groups": pg.Mean(jnp.square, per=2)}
    found = pg.grad_stats(reversing_loss, stats, strategy=strategy)(*args)
    g = gradients(reversing_loss, *args)
    assert_close(found["mean"], jax.tree.map(lambda x: np.mean(x, axis=0), g))
    assert_close(found["variance"], jax.tree.map(lambda x: np.var(x, axis=0, ddof=1), g))
    pairs = jax.tree.map(lambda x: x.reshape(BATCH // 2, 2, *x.shape[1:]).mean(axis=1), g)
    assert_close(found["groups"], jax.tree.map(lambda x: np.mean(np.square(x), axis=0), pairs))
    # One contribution an example: here, single contributions are the examples' gradients.
    assert_close(found["tokens"], jax.tree.map(lambda x: np.mean(np.square(x), axis=0), g))


@pytest.mark.usefixtures("with_reversed")
def test_term_is_explained() -> None:
    plan = pg.explain(reversing_loss, STATS)(*arguments())
    rows = {row.path: row for row in plan.rows}
    assert rows["['scale']"].kind == "reversed"
    assert isinstance(plan, _plan.Plan)
