"""The plan: what it chooses, how it reads, and that it is true of the program that runs.

Everything here is abstract: shapes are planned, lowered and compiled, and nothing runs.
"""

import inspect
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pergrad as pg
from pergrad._ir import backend, counts
from pergrad._strategies import streamed
from pergrad.lab.bench.image_models import CNN
from pergrad.lab.bench.models import MLP, Transformer

STRATEGIES = ["summed", "factored", "sparse", "streamed", "materialise"]
MOMENTS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)}


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def abstract(model):
    """The loss of a benchmark, and its parameters and batch as float32 shapes."""

    def loss(params, batch):
        with jax.numpy_rank_promotion("allow"):
            return model.loss(params, batch)

    def make(key):
        return model.init(key), model.sample(key)

    shapes = jax.eval_shape(make, jax.random.key(0))
    return loss, *jax.tree.map(
        lambda x: floats(*x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else x, shapes
    )


def plan_moments(model):
    return plan_of(model, MOMENTS)


def plan_of(model, stats):
    loss, *args = abstract(model)
    return pg.explain(loss, stats)(*args)


def rows_of(plan):
    return {row.path: row for row in plan.rows}


def tagger(params, batch):
    """Lookups, a product summed over positions, a sum over positions; one parameter has no use."""
    x, y = batch
    h = jnp.tanh(params["table"][x] @ params["w"] + params["b"][None, None])
    return jnp.mean(jnp.square(h - y))


def tagger_args(size, positions=32, vocab=4096, width=128, make=floats):
    params = {
        "table": make(vocab, width),
        "w": make(width, width),
        "b": make(width),
        "unused": make(3, 2),
    }
    return params, (tokens(size, positions), make(size, positions, width))


def whitened(w, x):
    # A matrix of each example's own meets the parameter in a solver.
    covariance = jnp.einsum("btd,bte->bde", x, x) + jnp.eye(x.shape[-1], dtype=x.dtype)[None]
    return jnp.mean(jax.vmap(lambda c: jnp.sum(jnp.linalg.solve(c, w)))(covariance))


# The table.


def test_table_ends_in_totals():
    plan = pg.explain(tagger, MOMENTS)(*tagger_args(16))
    examples, operations, memory = plan.text.splitlines()[-3:]
    assert examples == "16 examples, all at once, planned for cpu"
    assert operations.startswith("operations: ")
    assert operations.endswith(f"{plan.operations / plan.plain_operations:.2f} x jax.grad")
    assert memory.startswith("temporary memory: ")
    assert f"{plan.bytes / plan.plain_bytes:.2f} x jax.grad" in memory


def test_table_of_one_scalar():
    plan = pg.explain(lambda w, x: jnp.mean(w * x), pg.Mean())(floats(), floats(4))
    (row,) = plan.rows
    assert (row.path, row.shape) == ("args[0]", ())
    assert "args[0]    scalar  " in plan.text


def test_shapes_are_as_good_as_arrays():
    arrays = tagger_args(4, 3, 7, 5, make=lambda *shape: jnp.zeros(shape, jnp.float32))
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays)
    explain = pg.explain(tagger, MOMENTS)
    assert str(explain(*arrays)) == str(explain(*tagger_args(4, 3, 7, 5)))


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
@pytest.mark.parametrize("how", [{"rng_argnums": 3}, {"shared_argnums": 3}], ids=["split", "shared"])
def test_other_arguments_may_be_shapes(key, how):
    def loss(w, x, state, key, *, scale):
        drop = jax.random.bernoulli(key, shape=x.shape)
        return scale["s"] * jnp.mean(jnp.square(jnp.where(drop, 0, x) @ w - state["mean"]))

    def shapes(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    args = floats(3, 2), floats(8, 3), {"mean": jnp.zeros((1, 2), jnp.float32), "more": None}, key
    scale = {"s": jnp.float32(2), "name": "scale"}
    explain = pg.explain(loss, {"mean": pg.Mean(), "norm": pg.Norm()}, **how)
    plan = explain(*args, scale=scale)
    assert str(explain(*args[:2], *shapes(args[2:]), scale=scale | {"s": shapes(scale["s"])})) == str(
        plan
    )


def test_nothing_is_allocated():
    plan = pg.explain(tagger, MOMENTS)(*tagger_args(10**6, vocab=10**9, width=10**5))
    assert plan.plain_bytes > 1e13


# What is chosen.


def test_mlp():
    plan = plan_moments(MLP(batch=128, width=1024, layers=2))
    for row in plan.rows:
        if row.path.endswith("['weight']"):
            assert (row.kind, row.strategy) == ("product", "summed, factored")
            assert "one sum over all examples" in row.reason
            assert "an outer product for each" in row.reason
            assert row.operations == 2 * row.plain_operations
        else:
            assert (row.kind, row.strategy) == ("value", "summed, materialise")
            assert row.reason.startswith("made by ")


def test_patches_go_through_a_stream_one_by_one():
    rows = rows_of(plan_moments(CNN(batch=8, size=16, widths=(32, 64), strides=(1, 2), classes=4)))
    for layer in (0, 1):
        row = rows[f"['layers'][{layer}]['kernel']"]
        assert (row.kind, row.strategy) == ("convolution", "streamed")


def test_sums_of_convolutions(monkeypatch):
    """The CPU forms kernels' gradients one by one faster than it convolves all examples."""
    model = CNN(batch=8, size=16, widths=(32, 64), strides=(1, 2), classes=4)

    def strategy():
        return rows_of(plan_of(model, pg.Mean()))["['layers'][1]['kernel']"].strategy

    assert strategy() == "streamed"
    monkeypatch.setattr(backend, "backend", lambda: backend.BACKENDS["gpu:h100"])
    assert strategy() == "summed"


@jax.custom_vjp
def clipped_backward(x):
    return x


clipped_backward.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))


def test_what_the_backward_pass_starts_from():
    def weighed(prepared, stats, dtype=jnp.float32):
        x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in [(8, 4), (4, 4)])
        return pg.explain(lambda w, x: jnp.mean(jnp.tanh(prepared(x @ w))), stats)(w, x).weighed

    assert weighed(jnp.tanh, MOMENTS)
    assert weighed(jnp.tanh, pg.Mean())
    assert not weighed(clipped_backward, MOMENTS)
    assert not weighed(jnp.tanh, MOMENTS, jnp.bfloat16)
    assert not weighed(jnp.tanh, {"norm": pg.Norm(), **MOMENTS})
    assert not plan_moments(Transformer(batch=4, length=8, width=64, layers=1, vocab=32)).weighed


def test_tokens_of_a_lookup():
    model = Transformer(batch=4, length=32, width=64, layers=1, vocab=512)
    table = rows_of(plan_of(model, pg.Mean(jnp.square, per="token")))["['embed']"]
    assert (table.kind, table.strategy) == ("scatter", "sparse")
    assert table.reason == "touches at most 1 of 512 rows"


@pytest.mark.parametrize("tied", [False, True])
def test_transformer(tied):
    model = Transformer(batch=16, length=128, width=256, layers=1, vocab=8192, tied=tied)
    rows = rows_of(plan_moments(model))
    table = rows.pop("['embed']")
    if tied:
        assert (table.kind, table.strategy) == ("product + scatter", "streamed")
        assert table.reason == "sums over 128 positions, 2 terms"
    else:
        assert (table.kind, table.strategy) == ("scatter", "sparse")
        assert table.reason == "touches at most 128 of 8192 rows"
    for row in rows.values():
        if row.path == "['head']" or row.path.endswith(("['qkv']", "['out']", "['up']", "['down']")):
            assert (row.kind, row.strategy) == ("product", "streamed")
            assert row.reason == "sums over 128 positions"
        else:
            # Positions are added to one example's tokens, which leaves no sum over anything.
            kind = "value" if row.path == "['position']" else "sum"
            assert (row.kind, row.strategy) == (kind, "materialise")


@pytest.mark.parametrize("model", [MLP(128, 1024, 2), Transformer(16, 128, 256, 1, 8192)], ids=type)
def test_mean_alone(model):
    loss, *args = abstract(model)
    plan = pg.explain(loss, pg.Mean())(*args)
    assert {row.strategy for row in plan.rows} == {"summed"}
    assert {row.reason for row in plan.rows} == {"one sum over all examples"}
    assert plan.operations == plan.plain_operations
    assert plan.bytes == plan.plain_bytes


def test_unused_parameter():
    row = rows_of(pg.explain(tagger, MOMENTS)(*tagger_args(16)))["['unused']"]
    assert (row.kind, row.strategy, row.reason) == ("constant", "summed", "the same for every example")


def test_what_no_rule_knows():
    row = pg.explain(whitened, pg.Mean(jnp.square))(floats(64, 64), floats(8, 16, 64)).rows[0]
    assert (row.kind, row.strategy) == ("value", "materialise")
    lines, start = inspect.getsourcelines(whitened)
    named = [f"test_plan.py:{start + i} (whitened" in row.reason for i in range(len(lines))]
    assert row.reason.startswith("made by ") and any(named), row.reason


def test_individual():
    plan = pg.explain(tagger, pg.Individual())(*tagger_args(16))
    assert {row.strategy for row in plan.rows} <= {"materialise", "streamed"}


# A strategy that was asked for.


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_as_asked(name):
    plan = pg.explain(tagger, MOMENTS, strategy=name)(*tagger_args(16))
    for tail in plan.tails:
        for choice in tail.choices:
            said = "as asked" if choice.strategy.name == name else f"not {name}: "
            assert all(reason.startswith(said) for reason in choice.reason.split("; "))
    for row in plan.rows:
        assert ("as asked" in row.reason) == (name in row.strategy.replace(":4", "").split(", "))


def test_examples_at_a_time_as_asked():
    plan = pg.explain(tagger, MOMENTS, strategy="streamed:8")(*tagger_args(16))
    assert rows_of(plan)["['w']"].strategy == "streamed:8"
    assert "streamed:8" in str(plan)
    few = pg.explain(tagger, MOMENTS, strategy="streamed:8")(*tagger_args(3))
    assert rows_of(few)["['w']"].strategy == "streamed:3"


def test_streams_of_an_accelerator_are_as_wide_as_its_memory_allows(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    widths = []
    for memory in (8e10, 8e8):
        device = types.SimpleNamespace(
            device_kind="?", memory_stats=lambda memory=memory: {"bytes_limit": memory}
        )
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        plan = pg.explain(tagger, MOMENTS, strategy="streamed")(*tagger_args(4096, width=256))
        assert plan.backend == "gpu:h100"
        (streams,) = {c.strategy for t in plan.tails for c in t.choices if t.tail.params == (3,)}
        assert streams.batched
        widths.append(streams.at_a_time)
    assert widths[0] > widths[1] > 1


@pytest.mark.parametrize(
    ("name", "path", "strategy", "reason"),
    [
        ("sparse", "['table']", "sparse", "as asked"),
        ("sparse", "['w']", "streamed", "not sparse: not lookups alone"),
        ("factored", "['w']", "streamed", "not factored: sums over positions"),
        ("summed", "['w']", "streamed", "not summed: not the mean gradient"),
        ("streamed", "['b']", "streamed", "as asked"),
        ("materialise", "['table']", "materialise", "as asked"),
    ],
)
def test_strategy_for_one_parameter(name, path, strategy, reason):
    plan = pg.explain(tagger, pg.Mean(jnp.square), strategy=name)(*tagger_args(16))
    row = rows_of(plan)[path]
    assert (row.strategy, row.reason) == (strategy, reason)


# The plan tells the truth.


@pytest.fixture
def optimised():
    """XLA as users have it."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


def unrolled_scan(body, init, xs, length, unroll=1):
    return lax.scan(body, init, xs, length, unroll=length)


@pytest.mark.parametrize(
    "model",
    [
        MLP(batch=32, width=256, layers=4),
        Transformer(batch=4, length=64, width=128, layers=1, vocab=512),
        Transformer(batch=4, length=64, width=128, layers=1, vocab=512, tied=True),
    ],
    ids=["mlp", "transformer", "tied"],
)
def test_truth(model, optimised, monkeypatch):
    loss, *args = abstract(model)
    plan = pg.explain(loss, MOMENTS)(*args)

    def compiled(fun):
        return jax.jit(fun).lower(*args).compile()

    plain, stats = compiled(jax.value_and_grad(loss)), compiled(pg.value_and_stats(loss, MOMENTS))
    # XLA counts the body of a loop once, so its operations are counted without loops.
    monkeypatch.setattr(streamed, "lax", types.SimpleNamespace(scan=unrolled_scan))
    without_loops = compiled(pg.value_and_stats(loss, MOMENTS))

    assert plan.plain_operations == pytest.approx(plain.cost_analysis()["flops"], rel=0.05)
    assert plan.operations == pytest.approx(without_loops.cost_analysis()["flops"], rel=0.1)
    assert 1 / 2 < plan.plain_bytes / plain.memory_analysis().temp_size_in_bytes < 2
    # An older XLA lays out less. That of today lays what an MLP's factors are turned into over
    # activations that are no longer needed, and takes less than `jax.grad`.
    most = 2 if jax.__version_info__ >= (0, 10) and not isinstance(model, MLP) else 2.6
    assert 1 / 2 < plan.bytes / stats.memory_analysis().temp_size_in_bytes < most


def test_totals_are_more_than_the_rows():
    plan = pg.explain(tagger, MOMENTS)(*tagger_args(16))
    assert plan.operations > sum(row.operations for row in plan.rows)
    assert plan.plain_operations > sum(row.plain_operations for row in plan.rows)
    assert plan.bytes > max(row.bytes for row in plan.rows)


@pytest.mark.parametrize("microbatch_size", [None, 4])
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_program_does_not_grow_with_the_batch(strategy, microbatch_size):
    everything = MOMENTS | {"variance": pg.Variance(), "loss": pg.Loss(), "count": pg.Count()}
    stats_fn = pg.value_and_stats(tagger, everything, strategy=strategy, microbatch_size=microbatch_size)

    def lines(size):
        return jax.jit(stats_fn).lower(*tagger_args(size)).as_text().count("\n")

    assert lines(8) == lines(32)


# Microbatches.


def test_auto_microbatch_of_large_activations():
    args = tagger_args(32, positions=4096, width=512)
    at_once = pg.explain(tagger, MOMENTS)(*args)
    auto = pg.explain(tagger, MOMENTS, microbatch_size="auto")(*args)
    assert 1 <= auto.microbatch_size < 32
    assert f"32 examples, {auto.microbatch_size} at a time" in str(auto)
    assert auto.bytes < at_once.bytes / 2
    assert auto.plain_bytes == at_once.plain_bytes
    assert auto.operations == pytest.approx(at_once.operations, rel=0.01)


def test_auto_microbatch_of_small_activations():
    loss, *args = abstract(MLP(batch=32, width=1024, layers=2))
    plan = pg.explain(loss, MOMENTS, microbatch_size="auto")(*args)
    assert plan.microbatch_size == 32
    assert "all at once" in str(plan)


def test_auto_microbatch_of_clipped_means():
    """One by one where activations are large, several where it is the gradients."""

    def size_for(model):
        loss, *args = abstract(model)
        clipped = {"clipped": pg.ClippedMean(1.0)}
        return pg.explain(loss, clipped, microbatch_size="auto")(*args).microbatch_size

    assert size_for(Transformer(batch=8, length=256, width=256, layers=4, vocab=1024)) == 1
    assert size_for(Transformer(batch=32, length=64, width=512, layers=1, vocab=1024)) > 1


def test_one_example_is_formed_for_its_norm_and_clipped():
    """Inner products of factors would be fewer operations for the norm alone, but not for both."""
    loss, *args = abstract(Transformer(batch=8, length=128, width=256, layers=1, vocab=1024))

    def strategies(stats, size):
        plan = pg.explain(loss, stats, microbatch_size=size)(*args)
        rows = {row.path: row for row in plan.rows if row.path.endswith("['up']")}
        (row,) = rows.values()
        return row.strategy, row.operations / row.plain_operations

    assert strategies({"norm": pg.Norm()}, 1)[0] == "gram"
    both = {"clipped": pg.ClippedMean(1.0)}
    strategy, operations = strategies(both, 1)
    assert strategy == "materialise, materialise" and operations < 1.1
    assert strategies(both, 4)[0] == "gram, summed"


def test_gradient_is_formed_once_for_its_norm_and_clipped():
    """In the program itself, not only after XLA has merged equal equations."""

    def loss(w, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ w)))

    def products(stats):
        stats_fn = pg.grad_stats(loss, stats, microbatch_size=1)
        args = jnp.ones((8, 6), jnp.float32), jnp.ones((3, 64, 8), jnp.float32)
        return str(jax.make_jaxpr(stats_fn)(*args)).count("dot_general[")

    assert products(pg.ClippedMean(1.0)) == products(pg.Mean()) == 2


def test_equations_of_loops_count_as_often_as_they_run():
    def step(x, _):
        return jnp.sin(jnp.cos(x)), None

    def program(x):
        return lax.scan(step, jnp.tanh(x), length=5)

    assert counts.equations(jax.make_jaxpr(program)(1.0).eqns) == 2 + 5 * 2


@pytest.mark.parametrize(
    ("positions", "size", "planned"),
    [
        # What an example takes is little beside the parameters: all at once.
        (1, 1, 1),
        (1, 7, 7),
        (1, 48, 48),
        (512, 7, 7),
        # As many as fit into the memory that malloc keeps.
        (512, 48, 24),
        # One example alone takes more than that.
        (2**17, 7, 1),
        (2**17, 48, 1),
    ],
)
def test_auto_microbatch_fits_the_activations(positions, size, planned):
    plan = pg.explain(tagger, MOMENTS, microbatch_size="auto")(*tagger_args(size, positions))
    assert plan.microbatch_size == planned


@pytest.mark.parametrize(("asked", "planned"), [(3, 3), (16, 16), (100, 16)])
def test_microbatch_as_asked(asked, planned):
    plan = pg.explain(tagger, MOMENTS, microbatch_size=asked)(*tagger_args(16))
    assert plan.microbatch_size == planned


# What half-precision compute may not change: which products are seen.


def half_layer(w, x):
    return jnp.mean(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))


def half_recurrence(w, x):
    def step(h, x_t):
        return jnp.tanh((h + x_t) @ w.astype(jnp.bfloat16)), None

    start = jnp.zeros((x.shape[0], x.shape[2]), jnp.bfloat16)
    h, _ = lax.scan(step, start, jnp.swapaxes(x, 0, 1).astype(jnp.bfloat16))
    return jnp.mean(h.astype(jnp.float32))


@pytest.mark.parametrize("per", ["example", 2, "token"])
@pytest.mark.parametrize("loss", [half_layer, half_recurrence], ids=lambda f: f.__name__)
def test_products_of_half_precision_models_are_seen(loss, per):
    args = jnp.ones((64, 64), jnp.float32), jnp.ones((8, 16, 64), jnp.float32)
    (row,) = pg.explain(loss, pg.Mean(jnp.square, per=per))(*args).rows
    assert row.kind == "product"
    assert row.strategy.startswith("factored" if per == "token" else "streamed")


def test_planned_for_a_device_that_is_not_there():
    with pg.plan_for("tpu:v5e"):
        there = pg.explain(tagger, MOMENTS)(*tagger_args(16))
        with pg.plan_for("gpu:h100"):
            assert pg.explain(tagger, MOMENTS)(*tagger_args(16)).backend == "gpu:h100"
    here = pg.explain(tagger, MOMENTS)(*tagger_args(16))
    assert (there.backend, here.backend) == ("tpu:v5e", "cpu")
    assert "planned for tpu:v5e" in str(there)


def test_a_function_is_compiled_anew_for_another_device():
    seen = []

    def loss(params, batch):
        seen.append(backend.platform())
        return tagger(params, batch)

    stats = jax.jit(pg.grad_stats(loss, MOMENTS))
    args = tagger_args(4)
    for device in ("tpu:v5e", "cpu", "tpu:v5e"):
        with pg.plan_for(device):
            stats.trace(*args)
    assert list(dict.fromkeys(seen)) == ["tpu", "cpu"] and seen[-1] == "cpu"


def test_unknown_device():
    known = r"cpu, gpu:h100, tpu:v5e, .*'tpu:v9'"
    with pytest.raises(pg.ArgumentError, match=known), pg.plan_for("tpu:v9"):
        pass


def test_devices_by_what_jax_calls_them(monkeypatch):
    for platform, kind, name in (
        ("tpu", "TPU v6 lite", "tpu:v6e"),
        ("tpu", "TPU v9", "tpu:v5e"),
        ("gpu", "NVIDIA H100 PCIe", "gpu:h100"),
        ("quantum", "?", "gpu:h100"),
    ):
        device = types.SimpleNamespace(device_kind=kind, memory_stats=lambda: None)
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert backend.backend() is backend.BACKENDS[name]
