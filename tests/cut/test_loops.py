"""Loops and branches: tails that are reduced inside of them, factors that leave them, and neither."""

import importlib.util
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import scan_p
from jax.interpreters import ad, batching

import pergrad as pg
from pergrad._compat import aval
from pergrad._cut.hoist import hoist, leaving
from pergrad._ir import loop, programs
from tests.support.bounds import STATISTICS
from tests.support.cases import Case
from tests.support.cases_loops import new_ref
from tests.support.every_case import CASE, CASES, LOOPED
from tests.support.pages import ROOT
from tests.support.runner import VARIANTS, Runner, check_all

ELEMENTWISE = {name: STATISTICS[name] for name in ("mean", "square", "cos", "sign", "variance")}


@pytest.mark.parametrize("case", LOOPED, ids=lambda case: case.name)
def test_elementwise_statistics(case: Case) -> None:
    # A statistic that wants whole gradients keeps tails out of loops, so here there is none.
    strategy = ("auto", "streamed")[LOOPED.index(case) % 2]
    check_all(case, [strategy], ELEMENTWISE, "float64")


@pytest.mark.parametrize("case", LOOPED[::2], ids=lambda case: case.name)
def test_all_that_can_leaves(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "_is_smaller", lambda tail: True)
    runner = Runner(case, VARIANTS[CASES.index(case) % len(VARIANTS)])
    runner.statistics = {name: STATISTICS[name] for name in ("mean", "square", "fold")}
    runner.check("auto")


@pytest.mark.parametrize("name", ["scan_over_layers", "scan_layers_in_time", "lstm", "cond_in_scan"])
def test_without_the_rules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASE[name]
    kinds = []
    for without in (False, True):
        if without:
            monkeypatch.setattr(loop, "LOOPS", set())
            monkeypatch.setattr(hoist, "RULES", {})
        plan = pg.explain(case.loss, pg.Mean())(*case.make_args(jnp.float64))
        kinds.append([row.kind for row in plan.rows])
        runner = Runner(case, VARIANTS[3])
        runner.statistics = ELEMENTWISE
        runner.check("auto")
    assert kinds[0].count("value") < kinds[1].count("value")


# A width that makes a gradient larger than all that it is made of.
B, T, D, L = 8, 4, 32, 3


def layers_loss(p: Any, x: Any) -> jax.Array:
    step = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jnp.mean(jnp.square(lax.scan(step, x, p)[0]))


def recurrence_loss(w: Any, x: Any) -> jax.Array:
    def step(h: Any, x: Any) -> Any:
        return jnp.tanh(x + h @ w), None

    return jnp.mean(jnp.square(lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[0]))


def branches_loss(w: Any, x: Any) -> jax.Array:
    y = lax.cond(x[0, 0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: 2 * x)
    return jnp.mean(jnp.square(y))


@pytest.mark.parametrize(
    "loss, shape, kind",
    [
        (layers_loss, (L, D, D), "3 x product"),
        (recurrence_loss, (D, D), "product"),
        (branches_loss, (D, D), "product"),
    ],
)
def test_no_gradient_is_formed_for_all_examples(loss: Any, shape: Any, kind: str) -> None:
    args = jnp.ones(shape), jnp.ones((B, T, D))
    options = {"strategy": "streamed"}
    assert pg.explain(loss, pg.Mean(jnp.square), **options)(*args).rows[0].kind == kind
    stats_fn = pg.value_and_stats(loss, {"mean": pg.Mean(), "square": pg.Mean(jnp.square)}, **options)
    assert largest_variable(jax.make_jaxpr(stats_fn)(*args).jaxpr) < B * D * D
    materialised = pg.value_and_stats(loss, pg.Individual())
    assert largest_variable(jax.make_jaxpr(materialised)(*args).jaxpr) >= B * D * D


def largest_variable(jaxpr: Any) -> int:
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    return max([*sizes, *(largest_variable(inner) for inner in inner_programs(jaxpr))], default=0)


def inner_programs(jaxpr: Any) -> list[Any]:
    values = [value for eqn in jaxpr.eqns for value in eqn.params.values()]
    flat = [x for value in values for x in (value if isinstance(value, (tuple, list)) else [value])]
    return [getattr(x, "jaxpr", x) for x in flat if hasattr(getattr(x, "jaxpr", x), "eqns")]


def test_inputs_of_a_loop_are_not_handed_out_again() -> None:
    """The factor of an input weight is an input of the loop without its axis of one example."""
    width = 24

    def loss(w: Any, x: Any) -> jax.Array:
        def step(h: Any, x: Any) -> Any:
            return jnp.tanh(x @ w["input"] + h @ w["state"]), None

        start = jnp.zeros((x.shape[0], D))
        return jnp.mean(jnp.square(lax.scan(step, start, jnp.swapaxes(x, 0, 1))[0]))

    w = {"input": jnp.ones((width, D)), "state": jnp.ones((D, D))}
    program = jax.make_jaxpr(pg.grad_stats(loss, pg.Mean(jnp.square)))(w, jnp.ones((B, T, width)))
    made = [aval(v).shape for rounds in _loops(program.jaxpr, T) for v in rounds.outvars]
    assert (T, B, D) in made
    assert not [shape for shape in made if width in shape]


def _loops(program: Any, length: int) -> list[Any]:
    """The loops of so many rounds in a program, and in the programs that its equations run."""
    inside = [eqn for outer in program.eqns for p in programs(outer) for eqn in _loops(p, length)]
    return [e for e in program.eqns if e.primitive is scan_p and e.params["length"] == length] + inside


def test_what_stays_in_a_loop_has_a_reason() -> None:
    case = CASE["rnn_scaled_each_step"]
    plan = pg.explain(case.loss, pg.Mean(jnp.square))(*case.make_args(jnp.float64))
    stays = [row for row in plan.rows if row.kind == "value"]
    assert stays
    for row in stays:
        assert "made by scan at cases_loops.py" in row.reason


def test_in_a_loop_of_the_user() -> None:
    # A scan around the whole: one model after the other.
    case = CASE["scan_over_layers"]
    p, batch = case.make_args(jnp.float64)
    stats_fn = pg.grad_stats(case.loss, ELEMENTWISE)
    models = jax.tree.map(lambda x: np.stack([x, 2 * np.asarray(x)]), p)
    _, scanned = lax.scan(lambda c, p: (c, stats_fn(p, batch)), None, models)
    mapped = jax.jit(jax.vmap(lambda p: stats_fn(p, batch)))(models)
    stats_fn = jax.jit(stats_fn)
    for k in range(2):
        alone = stats_fn(jax.tree.map(lambda x, k=k: x[k], models), batch)
        for together in (scanned, mapped):
            jax.tree.map(lambda a, b, k=k: assert_close(a[k], b), together, alone)


def assert_close(a: jax.Array, b: jax.Array) -> None:
    assert np.allclose(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["scan_over_layers", "scan_over_time", "cond_on_example", "lstm"])
def test_differentiated(name: str) -> None:
    # The gradient of a function of the second moment, through what was reduced inside and outside.
    case = CASE[name]
    p, *rest = case.make_args(jnp.float64)

    def spread(p: Any, strategy: str, statistics: Any) -> jax.Array:
        moments = pg.grad_stats(case.loss, statistics, strategy=strategy)(p, *rest)["square"]
        return sum(jnp.sum(m) for m in jax.tree.leaves(moments))

    square = {"square": pg.Mean(jnp.square)}
    derivative = jax.grad(spread)
    inside = jax.jit(lambda p: derivative(p, "auto", square))(p)
    each = square | {"individual": pg.Individual()}
    whole = jax.jit(lambda p: derivative(p, "materialise", each))(p)
    jax.tree.map(assert_close, inside, whole)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older versions have other names")
def test_support_page_is_fresh() -> None:
    path = ROOT / "docs" / "make_support.py"
    spec = importlib.util.spec_from_file_location("make_support", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.support_page(), "run python docs/make_support.py"


def of_another_platform() -> jax.extend.core.Primitive:
    """A function that no platform here can compile."""
    primitive = jax.extend.core.Primitive("of_another_platform")
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = lambda ins, axes: (primitive.bind(*ins), axes[0])
    ad.deflinear2(primitive, lambda ct, x: [primitive.bind(ct)])
    return primitive


@pytest.mark.parametrize("size", [None, 1])
def test_branches_for_platforms(size: int | None) -> None:
    # The branch for another platform must not be compiled; weights are in both.
    kernel = of_another_platform()

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def product(x: jax.Array, p: jax.Array) -> jax.Array:
            return lax.platform_dependent(
                x, p, tpu=lambda x, p: kernel.bind(x @ p), default=lambda x, p: jnp.tanh(x @ p)
            )

        def layer(x: jax.Array, p: jax.Array) -> tuple[jax.Array, None]:
            return product(x, p), None

        return jnp.mean(jnp.square(lax.scan(layer, product(x, p[0]), p)[0]))

    def plain(p: Any, x: jax.Array) -> jax.Array:
        for w in (p[0], *p):
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x))

    r = np.random.default_rng(0)
    p, x = jnp.asarray(0.2 * r.normal(size=(L, D, D))), jnp.asarray(r.normal(size=(5, D)))
    stats = {"mean": pg.Mean(), "each": pg.Individual()}
    result = pg.grad_stats(loss, stats, microbatch_size=size)(p, x)
    truth = [jax.grad(plain)(p, x[i : i + 1]) for i in range(5)]
    np.testing.assert_allclose(result["each"], np.stack(truth), atol=1e-12)
    np.testing.assert_allclose(result["mean"], np.mean(truth, axis=0), atol=1e-12)


def test_one_at_a_time_takes_one_branch() -> None:
    # Several examples together run all branches, and one alone runs the branch that it takes.
    case = CASE["cond_on_example"]
    args = case.make_args(jnp.float64)

    def number_of_conds(**options: Any) -> int:
        stats_fn = pg.grad_stats(case.loss, pg.Mean(), **options)
        return str(jax.make_jaxpr(stats_fn)(*args)).count("cond[")

    assert number_of_conds() == 0
    assert number_of_conds(microbatch_size=1) == 2  # forward and backward


def test_reference_from_outside_is_refused() -> None:
    seen = new_ref(jnp.zeros(D))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        seen[...] += x[0]
        return jnp.mean(jnp.square(x @ w))

    with pytest.raises(pg.ArgumentError, match=r"made outside of it, at test_loops.*jax\.new_ref"):
        pg.grad_stats(loss, pg.Mean())(jnp.ones((D, D)), jnp.ones((B, D)))


def test_joined_weights_have_products_of_their_own() -> None:
    case = CASE["attention_of_joined_weights"]
    plan = pg.explain(case.loss, pg.Mean())(*case.make_args(jnp.float64))
    assert [(row.kind, row.strategy) for row in plan.rows] == 4 * [("product", "summed")]
