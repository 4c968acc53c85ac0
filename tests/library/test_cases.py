"""Every case meets every statistic and every strategy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.interpreters.ad import add_jaxvals
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pergrad as pg
from pergrad._compat import (
    name_p,
    optimization_barrier_p,
    ragged_dot_general_p,
    sharding_constraint_p,
    split_p,
)
from pergrad._cut import STEPS, TERMS
from pergrad._ir import backend
from pergrad._strategies import streamed
from tests.support.bounds import STATISTICS
from tests.support.cases import BATCH, Case, array
from tests.support.every_case import CASE, CASES, LOOPED
from tests.support.runner import HANDFUL, PLAIN, VARIANTS, WEIGHTED, Runner, check_all

STRATEGIES = ("auto", "streamed", "materialise", "summed", "factored", "centred", "sparse")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_auto(case: Case) -> None:
    check_all(case, STRATEGIES[:1], STATISTICS, "float64")


# In each turn a third of these runs; two strategies share a case's trace.
@pytest.mark.parametrize("first", [1, 3, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_strategies(case: Case, first: int) -> None:
    own = STRATEGIES[first : first + 2]
    check_all(case, own, STATISTICS, "float64", beside=STRATEGIES[:first])


# Where the backward pass starts from the examples' weight even beside moments, since they pass over the
# factors anyway.
FROM_THE_WEIGHT = (
    "bilinear", "cast_parameter", "custom_jvp", "custom_vjp", "dropout_raw_key", "dropout_two_keys",
    "dropout_typed_key", "integer_inputs", "library_activations", "linear_loss", "linear_regression",
    "masked_examples", "mixture_of_experts", "mlp", "mlp_transposed", "nested_jit", "reshaped",
    "scalar_parameters", "stopped", "two_argnums", "two_batch_arguments", "unused_parameter",
    "vmap_inside", "with_aux",
)  # fmt: skip
# Where it may start from 1 even for a mean alone: a gradient that comes out of a loop or a branch, or
# that is not known to be linear in the cotangent.
FROM_ONE = (
    "affine_cotangents", "affine_gathers", "affine_joins", "affine_scatters", "attention_flash",
    "attention_local", "attention_to_memory", "clipped_cotangent", "cond_on_step", "conv_2d",
    "conv_depthwise", "dynamic_slice", "filled_cotangent", "fori_loop", "ignored_cotangent",
    "not_linear", "scan_over_layers", "scan_over_nothing", "scan_over_time", "slices_outside",
    "written_outside",
    *(case.name for case in LOOPED),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_means_alone(case: Case) -> None:
    """With these moments, or the mean alone, the backward pass starts from the examples' weight, which
    the means then leave out; in every case but those of `FROM_ONE`."""
    size = (None, 1, BATCH)[CASES.index(case) % 3]
    runner = Runner(case, (True, "none", size))

    def starts_from_the_weight(*names: str) -> bool:
        runner.statistics = {name: STATISTICS[name] for name in names}
        plan = pg.explain(runner.loss, runner.statistics, **runner.options)(*runner.args)
        return bool(plan.weighed)

    if not starts_from_the_weight("mean", "square", "cube", "count"):
        assert case.name not in FROM_THE_WEIGHT
        assert starts_from_the_weight("mean") or case.name in FROM_ONE
    runner.check("auto")


# A backward rule that casts to 8 bits turns the last digit of a bfloat16 into a whole step of its own.
SMOOTH = [case for case in CASES if case.name != "not_linear"]


@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.name)
def test_low_precision(case: Case) -> None:
    # What rounds in its own way; the other means do as the square does. From case to case the type
    # changes, the strategy, and whether there is something that wants whole gradients. Most models are
    # trained in mixed precision, and so is every second case.
    index = CASES.index(case)
    dtype = ("mixed", "float32", "mixed", "bfloat16")[index % 4]
    number = index // 4 + index // len(VARIANTS)
    whole = ("fold", "individual") if number % 4 < 2 else ()
    names = ("mean", "square", "cos", "sign", "variance", *whole)
    strategy = ("auto", "streamed")[number % 2]
    check_all(case, [strategy], {name: STATISTICS[name] for name in names}, dtype)


@pytest.mark.parametrize("name", HANDFUL)
def test_accelerators_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Planned for a GPU, and run here: batched streams, other choices, the same numbers.
    monkeypatch.setattr(backend, "backend", lambda: backend.BACKENDS["gpu:h100"])
    Runner(CASE[name], PLAIN).check("auto")
    Runner(CASE[name], WEIGHTED).check("streamed:2")


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_gradients_in_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is so small that gradients are streamed in blocks of one or two columns."""
    index = CASES.index(case)
    device = dataclasses.replace(backend.BACKENDS[("cpu", "tpu:v5e")[index % 2]], cache_size=100)
    monkeypatch.setattr(backend, "backend", lambda: device)
    monkeypatch.setattr(streamed, "LANES", 1 + index // 2 % 2)
    check_all(case, ["streamed"], STATISTICS, "float64")


@pytest.mark.parametrize("name", HANDFUL)
def test_without_any_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rules in (TERMS, STEPS):
        for primitive in list(rules):
            monkeypatch.delitem(rules, primitive)
    Runner(CASE[name], PLAIN).check("auto")
    Runner(CASE[name], WEIGHTED).check("streamed")


@pytest.mark.parametrize(
    "primitive, name",
    [
        (primitives.dot_general_p, "fused_qkv"),
        (primitives.dynamic_update_slice_p, "dynamic_slice"),
        (primitives.conv_general_dilated_p, "conv_1d"),
        (primitives.scatter_add_p, "embedding_take"),
        (ragged_dot_general_p, "experts_ragged"),
    ],
)
def test_without_a_term(primitive: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASE[name]
    used = []
    for _ in with_and_without(TERMS, primitive, monkeypatch):
        plan = pg.explain(case.loss, pg.Mean())(*case.make_args(jnp.float64))
        terms = [term for t in plan.tails for term in t.tail.terms]
        used.append(any(term.eqn and term.eqn.primitive is primitive for term in terms))
    assert used == [True, False]
    Runner(case, PLAIN).check("auto")
    Runner(case, WEIGHTED).check("streamed")


def with_and_without(rules: Any, primitive: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    yield
    monkeypatch.delitem(rules, primitive)
    yield


# One use of every step: a linear function of the gradient of a matrix, [4, 6].

KERNEL = jnp.arange(1.0, 7.0).reshape(3, 1, 2) / 7
CONSTANT = jnp.sin(jnp.arange(24.0)).reshape(4, 6)
CONV = {"dimension_numbers": ("NWC", "WIO", "NWC")}
REPLICATED = NamedSharding(
    jax.make_mesh((1,), ("all",), axis_types=(AxisType.Auto,)), PartitionSpec(None, None)
)
STEP_EXAMPLES = {
    primitives.broadcast_in_dim_p: lambda g: lax.broadcast_in_dim(g, (4, 6, 2), (0, 1)),
    primitives.convert_element_type_p: lambda g: g.astype(jnp.float32),
    primitives.copy_p: jnp.copy,
    primitives.dynamic_slice_p: lambda g: lax.dynamic_slice(g, (jnp.int32(1), jnp.int32(9)), (2, 3)),
    name_p: lambda g: checkpoint_name(g, "gradient"),
    optimization_barrier_p: lax.optimization_barrier,
    primitives.reshape_p: lambda g: g.reshape(2, 12),
    primitives.rev_p: lambda g: g[::-1],
    sharding_constraint_p: lambda g: lax.with_sharding_constraint(g, REPLICATED),
    primitives.slice_p: lambda g: lax.slice(g, (1, 0), (4, 5), (2, 1)),
    primitives.squeeze_p: lambda g: lax.squeeze(lax.slice(g, (1, 0), (2, 6)), (0,)),
    primitives.transpose_p: lambda g: g.T,
    primitives.div_p: lambda g: g / (3 + CONSTANT),
    primitives.mul_p: lambda g: CONSTANT * g,
    primitives.neg_p: lambda g: -g,
    primitives.conv_general_dilated_p: lambda g: lax.conv_general_dilated(
        g[..., None], KERNEL, (1,), "SAME", **CONV
    ),
    primitives.cumsum_p: lambda g: jnp.cumsum(g, axis=1),
    primitives.dot_general_p: lambda g: CONSTANT.T @ g,
    primitives.gather_p: lambda g: g[jnp.array([3, 0, 3]), jnp.array([1, 5, 1])],
    primitives.reduce_sum_p: lambda g: jnp.sum(g, axis=0),
    primitives.reduce_window_sum_p: lambda g: lax.reduce_window(g, 0.0, lax.add, (2, 2), (1, 2), "SAME"),
    split_p: lambda g: lax.split(g, (1, 3))[1],
    primitives.add_p: lambda g: g + CONSTANT,
    primitives.add_jaxvals_p: lambda g: add_jaxvals(g, CONSTANT),
    primitives.concatenate_p: lambda g: jnp.concatenate([g, CONSTANT[:2], g]),
    primitives.pad_p: lambda g: lax.pad(g, 0.5, ((1, -1, 0), (2, 0, 1))),
    primitives.sub_p: lambda g: CONSTANT - g,
    primitives.dynamic_update_slice_p: lambda g: lax.dynamic_update_slice(
        jnp.ones((5, 8)), g, (jnp.int32(1), jnp.int32(1))
    ),
    primitives.scatter_add_p: lambda g: CONSTANT.at[jnp.array([0, 2, 2, 1])].add(g),
    primitives.scatter_p: lambda g: CONSTANT.at[jnp.array([0, 3, 2, 1])].set(g),
    primitives.select_n_p: lambda g: jnp.where(CONSTANT > 0.2, g, CONSTANT),
}


def step_case(step: Any) -> Case:
    """A case in which each parameter's gradient is `step` of a gradient [4, 6].

    That one is a sum of products, an outer product, a lookup.
    """

    @jax.custom_vjp
    def matrix(w: jax.Array) -> jax.Array:
        return CONSTANT * jnp.mean(w).astype(CONSTANT.dtype)

    matrix.defvjp(lambda w: (matrix(w), None), lambda _, g: (step(g),))

    def loss(p: Any, batch: Any) -> jax.Array:
        products = jnp.tanh(batch["x"] @ matrix(p["products"]))
        outer = jnp.tanh(batch["z"] @ matrix(p["outer"]))
        rows = jnp.tanh(matrix(p["lookup"])[batch["i"]])
        return jnp.mean(batch["y"] * (products + rows + outer[:, None]))

    def make_args(dtype: Any) -> Any:
        r = np.random.default_rng(0)
        like = jax.eval_shape(step, CONSTANT)
        p = {name: jnp.full(like.shape, 0.7, like.dtype) for name in ("products", "outer", "lookup")}
        x, z, y = (array(r.normal(size=(BATCH, *s))) for s in ((3, 4), (4,), (3, 6)))
        return p, {"x": x, "z": z, "y": y, "i": array(r.integers(4, size=(BATCH, 3)))}

    return Case("step", loss, make_args)


def test_every_step_has_an_example() -> None:
    assert set(STEP_EXAMPLES) == set(STEPS)


@pytest.mark.parametrize("primitive", STEP_EXAMPLES, ids=lambda p: p.name)
def test_with_and_without_a_step(primitive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = step_case(STEP_EXAMPLES[primitive])
    # The gradient itself is rounded to float32.
    dtype = "float32" if primitive is primitives.convert_element_type_p else "float64"
    args = case.make_args(None)
    used = []
    for _ in with_and_without(STEPS, primitive, monkeypatch):
        plan = pg.explain(case.loss, pg.Mean())(*args)
        used.append(sum(s.primitive is primitive for t in plan.tails for s in t.tail.steps))
        for variant, strategy in ((PLAIN, "summed"), (WEIGHTED, "streamed")):
            Runner(case, variant, dtype).check(strategy)
    assert used[0] >= 2 and used[1] == 0
