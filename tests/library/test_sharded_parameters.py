"""Parameters that are sharded over the axis of the batch (FSDP), on eight devices.

Everything is compared with what the same call gives on one device, which other tests compare with the
oracle. A process that has fewer devices starts one with eight (`support/devices.py`).
"""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pergrad as pg
import pergrad.nnx
from pergrad._ir import backend, shards
from pergrad._strategies import streamed
from tests.library.test_devices import (
    DIRECTION,
    FEW,
    LAYOUTS,
    SIZE,
    STATS,
    WEIGHTS,
    batch,
    collectives,
    is_sharded_like,
    laid_out,
    loss,
    mesh_of,
    optimized,
    params,
    soft,
    spread,
)
from tests.support.cases import BATCH
from tests.support.claims import close, refused
from tests.support.every_case import CASES
from tests.support.small_model import normal
from tests.support.truth import options

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def specs_of(layout):
    return {name: LAYOUTS[layout].get(name, P()) for name in params()}


# Numbers.


@pytest.mark.parametrize(
    ("layout", "how", "weights", "microbatch_size"),
    [
        ("fsdp", "jit", WEIGHTS, None),
        ("both", "jit", None, 2),
        ("both", "eager", WEIGHTS, 1),
        ("fsdp", "explicit", None, None),
        ("both", "explicit", WEIGHTS, 3),
    ],
)
def test_every_statistic(layout, how, weights, microbatch_size):
    more = {"direction": DIRECTION, "example_weights": weights}
    more |= {"max_norm": {"matrices": 1.0, "others": 2.0}}
    expected = jax.jit(pg.value_and_stats(loss, STATS))(params(), batch(), **more)
    mesh = mesh_of(EXPLICIT if how == "explicit" else AUTO, data=4, model=2)
    specs = specs_of(layout) if how == "jit" else None
    options = {"spmd_axis_name": "data", "param_specs": specs, "microbatch_size": microbatch_size}
    stats_fn = pg.value_and_stats(loss, STATS, **options)
    stats_fn = stats_fn if how == "eager" else jax.jit(stats_fn)
    with jax.set_mesh(mesh):
        value, stats = stats_fn(laid_out(mesh, layout), spread(mesh, batch()), **more)
    close((value, stats), expected)
    for name, x in stats["variance"].items():
        assert is_sharded_like(mesh, x, LAYOUTS[layout].get(name, P()))


def divided(tree, number, *, last):
    """Specs that divide the first dimension of each array that `number` divides, or the last one."""

    def spec(x):
        dims = [d for d, length in enumerate(x.shape) if length and length % number == 0]
        return P(*[None] * dims[-last], "data") if dims else P()

    return jax.tree.map(spec, tree)


def is_divided(spec):
    return spec != P()


def skip_convolutions_that_fail(fun, *args):
    """Skips a test whose function has a convolution, if `vmap(grad)` of one fails on a mesh.

    It does with JAX 0.7.2.
    """

    def total(kernel, x):
        return jnp.sum(lax.conv_general_dilated(x, kernel, (1, 1), "VALID"))

    gradients = jax.vmap(jax.grad(total), in_axes=(None, 0))
    kernel, x = (jax.ShapeDtypeStruct((*more, 1, 1, 3, 3), jnp.float32) for more in ((), (2,)))
    try:
        with jax.set_mesh(mesh_of(data=8)):
            mapped = jax.shard_map(gradients, in_specs=P(), out_specs=P(), check_vma=False)
            jax.eval_shape(mapped, kernel, x)
    except NotImplementedError:
        if "conv_general_dilated" in str(jax.make_jaxpr(fun)(*args)):
            pytest.skip("this JAX has no gradients of convolutions on a mesh")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, last):
    args = list(case.make_args(jnp.float64))
    skip_convolutions_that_fail(case.loss, *args)
    numbers = as_tuple(case.argnums)
    trees = [args[n] for n in numbers]
    found = {n: divided(trees, n, last=last) for n in (2, 3, 4, 5, 7)}
    number = max(found, key=lambda n: sum(map(is_divided, jax.tree.leaves(found[n], is_leaf=is_spec))))
    missing = -BATCH % number
    for n in as_tuple(case.batch_argnums):
        args[n] = jax.tree.map(lambda x: jnp.concatenate([x, x[:missing]]), args[n])
    weights = np.r_[1.0, 2.0, 1.0, 0.5, 1.0, np.zeros(missing)]
    stats = FEW | {"token": pg.Mean(jnp.square, per="token"), "leaf": pg.Norm(by="leaf")}
    specs = tuple(found[number]) if isinstance(case.argnums, tuple) else found[number][0]
    expected = jax.jit(pg.value_and_stats(case.loss, stats, **options(case)))(
        *args, example_weights=weights
    )
    with jax.set_mesh(mesh_of(data=number)):
        more = {"spmd_axis_name": "data", "param_specs": specs, **options(case)}
        stats_fn = jax.jit(pg.value_and_stats(case.loss, stats, **more))
        out = stats_fn(*args, example_weights=weights)
    close(out, expected, rtol=1e-5, atol=1e-7)  # some models compute in float32 in between


def as_tuple(numbers):
    return numbers if isinstance(numbers, tuple) else (numbers,)


def is_spec(x):
    return isinstance(x, P)


@pytest.mark.parametrize(
    "spec",
    [P("data"), P("pod"), P(("pod", "data")), P(("data", "pod")), P("pod", "data"), P("data", "pod")],
    ids=str,
)
def test_two_axes(spec):
    """Along an axis that no spec of a parameter names, all devices have the same shard."""
    specs = {"table": spec, "w": spec, "b": P(spec[0]), "v": P(), "s": P()}
    expected = jax.jit(pg.value_and_stats(loss, FEW))(params(), batch())
    mesh = mesh_of(pod=2, data=4)
    p = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params().items()}
    options = {"spmd_axis_name": ("pod", "data"), "param_specs": specs}
    with jax.set_mesh(mesh):
        value, stats = jax.jit(pg.value_and_stats(loss, FEW, **options))(p, batch())
    close((value, stats), expected)
    for name, own in specs.items():
        assert is_sharded_like(mesh, stats["variance"][name], own)


@pytest.mark.parametrize(("how", "size"), [("jit", None), ("explicit", 1)])
def test_examples_that_fail_are_dropped(how, size):
    # One device is left with nothing.
    bad = np.array([2, 4, 5, 6, 7])
    b = batch() | {"x": batch()["x"].at[bad].set(jnp.nan)}
    stats = {name: STATS[name] for name in ("count", "mean", "moments", "variance", "clipped", "fold")}
    stats |= {"groups": pg.Variance(per=2), "norm": pg.Norm(), "loss": pg.Loss()}
    stats |= {"weighted": pg.WeightedMean(soft, where=lambda path: "w" in path)}
    left = np.where(np.isin(np.arange(SIZE), bad), 0, 1)
    expected = jax.jit(pg.value_and_stats(loss, stats))(params(), b, example_weights=left)
    mesh = mesh_of(EXPLICIT if how == "explicit" else AUTO, data=4, model=2)
    options = {"nonfinite": "drop", "microbatch_size": size, "spmd_axis_name": "data"}
    specs = specs_of("both") if how == "jit" else None
    stats_fn = jax.jit(pg.value_and_stats(loss, stats, param_specs=specs, **options))
    with jax.set_mesh(mesh):
        out = stats_fn(laid_out(mesh, "both"), spread(mesh, b))
    close(out, expected)
    assert out[1]["count"] == SIZE - len(bad)
    for name, x in out[1]["variance"].items():
        assert is_sharded_like(mesh, x, LAYOUTS["both"].get(name, P()))


@pytest.mark.parametrize("how", ["jit", "explicit"])
def test_several_directions(how):
    several = jax.tree.map(lambda x: jnp.stack([x, jnp.sin(x), x + 1]), DIRECTION)
    positions = pg.Dot(where=lambda path: "s" not in path, per="token")
    stats = {"dot": pg.Dot(), "positions": positions, "norm": pg.Norm()}
    expected = jax.jit(pg.grad_stats(loss, stats))(params(), batch(), direction=several)
    assert expected["dot"].shape == (SIZE, 3)
    mesh = mesh_of(EXPLICIT if how == "explicit" else AUTO, data=4, model=2)
    specs = specs_of("both") if how == "jit" else None
    stats_fn = jax.jit(pg.grad_stats(loss, stats, spmd_axis_name="data", param_specs=specs))
    with jax.set_mesh(mesh):
        out = stats_fn(laid_out(mesh, "both"), spread(mesh, batch()), direction=several)
    close(out, expected)


# Layers that a loop runs.

LAYERS, WIDTH, POSITIONS = 4, 16, 3


def layers():
    shapes = {"w": (WIDTH, 2 * WIDTH), "v": (2 * WIDTH, WIDTH), "b": (2 * WIDTH,)}
    stacks = {k: normal(i, LAYERS, *s) / 4 for i, (k, s) in enumerate(shapes.items())}
    return {"blocks": stacks, "head": normal(9, WIDTH, 8) / 4}


def block(p, x):
    h = jnp.tanh(x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)[None, None])
    return x + h @ p["v"].astype(x.dtype)


def make_loss(how, compute=None):
    one = jax.checkpoint(block) if "remat" in how else block

    def of_layers(p, batch):
        x, y = batch
        x = x if compute is None else x.astype(compute)
        if "scan" in how:
            x, _ = lax.scan(lambda x, q: (one(q, x), None), x, p["blocks"])
        else:
            for i in range(LAYERS):
                x = one(jax.tree.map(lambda w, i=i: w[i], p["blocks"]), x)
        return jnp.mean(jnp.square((x @ p["head"].astype(x.dtype)).astype(y.dtype) - y))

    return of_layers


def layers_batch(size=16):
    return normal(20, size, POSITIONS, WIDTH), normal(21, size, POSITIONS, 8)


LAYER_SPECS = {
    "blocks": {"w": P(None, "data"), "v": P(None, "data"), "b": P(None, "data")},
    "head": P("data"),
}
HOW = ["scan", "scan remat", "unrolled", "unrolled remat"]


def lowered_layers(how, stats, compute=None):
    mesh = mesh_of(data=8)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), LAYER_SPECS, is_leaf=is_spec)
    args = jax.device_put(layers(), shardings), spread(mesh, layers_batch())
    if compute is not None:
        args = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    options = {"spmd_axis_name": "data", "param_specs": LAYER_SPECS}
    with jax.set_mesh(mesh):
        return jax.jit(pg.value_and_stats(make_loss(how, compute), stats, **options)).lower(*args)


def compiled_layers(how, stats):
    with optimized():
        return lowered_layers(how, stats).compile()


@pytest.mark.parametrize("microbatch_size", [None, 1])
@pytest.mark.parametrize("how", HOW)
def test_layers(how, microbatch_size):
    stats = FEW | {"dot": pg.Dot()} if microbatch_size else FEW
    more = {"direction": jax.tree.map(jnp.cos, layers())} if microbatch_size else {}
    make = functools.partial(pg.value_and_stats, make_loss(how), stats)
    expected = jax.jit(make())(layers(), layers_batch(), **more)
    options = {"spmd_axis_name": "data", "param_specs": LAYER_SPECS, "microbatch_size": microbatch_size}
    with jax.set_mesh(mesh_of(data=8)):
        close(jax.jit(make(**options))(layers(), layers_batch(), **more), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_several_directions_of_layers(microbatch_size, axis):
    """The axis of directions stands behind that of the layers, also if the layers are divided."""
    several = jax.tree.map(lambda x: jnp.stack([jnp.cos(x), x]), layers())
    specs = LAYER_SPECS | {"blocks": LAYER_SPECS["blocks"] | {"w": P(*[None] * axis, "data")}}
    make = functools.partial(pg.grad_stats, make_loss("scan remat"), [pg.Dot(), pg.Mean()])
    expected = jax.jit(make())(layers(), layers_batch(), direction=several)
    options = {"spmd_axis_name": "data", "param_specs": specs, "microbatch_size": microbatch_size}
    with jax.set_mesh(mesh_of(data=2)):
        close(jax.jit(make(**options))(layers(), layers_batch(), direction=several), expected)


@pytest.mark.parametrize("how", ["scan", "unrolled remat"])
def test_layers_that_leave_their_loop(how):
    """Projections are those of whole parameters, and dropped examples leave the means of the others."""
    x, y = layers_batch()
    failing = x.at[np.array([0, 5])].set(jnp.nan), y
    stats = {"mean": pg.Mean(), "variance": pg.Variance(), "clipped": pg.ClippedMean(1.0)}
    drop = functools.partial(pg.value_and_stats, make_loss(how), stats, nonfinite="drop")
    project = functools.partial(pg.grad_stats, make_loss(how), pg.Project(6, 0))
    expected = jax.jit(drop())(layers(), failing), jax.jit(project())(layers(), (x, y))
    options = {"spmd_axis_name": "data", "param_specs": LAYER_SPECS}
    with jax.set_mesh(mesh_of(data=8)):
        out = jax.jit(drop(**options))(layers(), failing)
        close((out, jax.jit(project(**options))(layers(), (x, y))), expected)


# Large gradients, in blocks.


def head(p, batch):
    x, y = batch
    return jnp.mean(jnp.square(x @ p["w"] - y))


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P("data", "pod"), P(("pod", "data"))])
@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("name", ["cpu", "tpu:v5e"])
def test_blocks(spec, microbatch_size, name, monkeypatch):
    """The cache of this device holds a few columns, so a gradient is divided, with a rest at the end."""
    p = {"w": normal(1, 8, 24)}
    args = p, (normal(2, 32, POSITIONS, 8), normal(3, 32, POSITIONS, 24))
    stats = FEW | {"dot": pg.Dot(), "tokens": pg.Variance(per="token")}
    more = {"direction": {"w": normal(4, 8, 24)}, "example_weights": np.arange(32) % 5}
    expected = jax.jit(pg.value_and_stats(head, stats))(*args, **more)
    device = dataclasses.replace(backend.BACKENDS[name], cache_size=100)
    monkeypatch.setattr(backend, "backend", lambda: device)
    monkeypatch.setattr(streamed, "LANES", 5)
    options = {"spmd_axis_name": ("pod", "data"), "param_specs": spec, "strategy": "streamed"}
    stats_fn = pg.value_and_stats(head, stats, microbatch_size=microbatch_size, **options)
    moments = pg.value_and_stats(head, MOMENTS, microbatch_size=microbatch_size, **options)
    with jax.set_mesh(mesh_of(pod=2, data=2)):
        close(jax.jit(stats_fn)(*args, **more), expected)
        program = str(jax.make_jaxpr(moments)(*args))
    # The states of a block leave as shards, before the next block begins.
    kept = re.findall(r"f64\[(\d+),(\d+)\] = reduce_scatter", program)
    assert kept and max(int(a) * int(b) for a, b in kept) < p["w"].size // 4


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P("pod", "data")], ids=str)
def test_means_are_exchanged_in_pieces(spec, monkeypatch):
    monkeypatch.setattr(shards, "LARGEST", 100)
    monkeypatch.setattr(shards, "LARGEST_PIECE", 50)
    p = {"w": normal(1, 8, 24)}
    args = p, (normal(2, 8, POSITIONS, 8), normal(3, 8, POSITIONS, 24))
    options = {"spmd_axis_name": ("pod", "data"), "param_specs": spec}
    with jax.set_mesh(mesh_of(pod=2, data=2)):
        stats_fn = pg.grad_stats(head, [pg.Variance(), pg.Mean()], **options)
        program = str(jax.make_jaxpr(stats_fn)(*args))
        exchanged = re.findall(r"f64\[\d,(\d+),(\d+)\] = all_to_all", program)
        assert exchanged and max(int(a) * int(b) for a, b in exchanged) < p["w"].size / 2
        close(jax.jit(stats_fn)(*args), jax.jit(pg.grad_stats(head, [pg.Variance(), pg.Mean()]))(*args))


MOMENTS = {"mean": pg.Mean(), "square": pg.Mean(jnp.square)}


def largest_of(kind, program):
    """The size of the largest matrix that collectives of this kind make."""
    made = re.findall(rf"f64\[(\d+),(\d+)\] = {kind}", program)
    return max((int(a) * int(b) for a, b in made), default=0)


@pytest.mark.parametrize("spec", [P("data"), P("data", "pod"), P(("pod", "data"))], ids=str)
def test_one_example_in_blocks(spec, monkeypatch):
    """Each device has one example. The states of its gradient leave in blocks."""
    monkeypatch.setattr(shards, "LARGEST", 100)
    monkeypatch.setattr(shards, "LARGEST_PIECE", 50)
    p = {"w": normal(1, 8, 24)}
    args = p, (normal(2, 4, POSITIONS, 8), normal(3, 4, POSITIONS, 24))
    expected = jax.jit(pg.value_and_stats(head, FEW))(*args)
    options = {"spmd_axis_name": ("pod", "data"), "param_specs": spec}
    with jax.set_mesh(mesh_of(pod=2, data=2)):
        close(jax.jit(pg.value_and_stats(head, FEW, **options))(*args), expected)
        program = str(jax.make_jaxpr(pg.value_and_stats(head, MOMENTS, **options))(*args))
    assert 0 < largest_of("reduce_scatter", program) < p["w"].size // 4


ROWS, COLUMNS = 24, 8


def lookups(mode, axis, p, batch):
    """Looks rows up twice, among them some that the table does not have."""
    x, y = batch
    found = jnp.take(p["table"], x, axis=axis, mode=mode, fill_value=0.5)
    found = jnp.swapaxes(found, 0, 1) if axis else jnp.swapaxes(found, 1, 2)
    again = p["table"].at[x[:, 0]].get(mode=mode, fill_value=0.5) if axis == 0 else 0.0
    return jnp.mean(jnp.square(jnp.sin(found) - y)) + jnp.mean(jnp.square(again))


@pytest.mark.parametrize(
    ("axes", "examples", "mode", "axis"),
    [
        ("data", 12, "fill", 0),
        (("pod", "data"), 4, "clip", 0),
        (("pod", "data"), 12, "fill", 1),
        ("data", 4, "clip", 1),
    ],
)
def test_tables_in_pieces(axes, examples, mode, axis, monkeypatch):
    """A device has a few rows of a table at a time when it looks rows up, and of each statistic."""
    for name, number in (("LARGEST", 100), ("LARGEST_PIECE_OF_TABLE", 50)):
        monkeypatch.setattr(shards, name, number)
    table = normal(1, ROWS, COLUMNS)
    p = {"table": table.T if axis else table}
    keys = jax.random.randint(jax.random.key(2), (examples, 5), -3, ROWS + 4, "int32")
    args = p, (jnp.where(keys < 0, ROWS + 9, keys), normal(3, examples, COLUMNS, 5))
    more = {"example_weights": np.arange(examples) % 3}
    stats = {"norm": pg.Norm(), "variance": pg.Variance(), "shifted": pg.Mean(jnp.cos)}
    fun = functools.partial(lookups, mode, axis)
    expected = jax.jit(pg.value_and_stats(fun, stats))(*args, **more)
    options = {"spmd_axis_name": ("pod", "data"), "param_specs": P(*[None] * axis, axes)}
    with jax.set_mesh(mesh_of(pod=2, data=2)):
        close(jax.jit(pg.value_and_stats(fun, stats, **options))(*args, **more), expected)
        program = str(jax.make_jaxpr(pg.grad_stats(fun, MOMENTS, **options))(*args))
    assert 0 < largest_of("all_gather", program) <= table.size // 3
    assert 0 < largest_of("reduce_scatter", program) <= table.size // 6


@pytest.mark.parametrize("how", HOW)
def test_one_layer_is_gathered_at_a_time(how):
    program = compiled_layers(how, MOMENTS)
    found = collectives(program)
    largest = math.prod(layers()["blocks"]["w"].shape[1:])
    # XLA may join the gathers of one layer's parameters. It never gathers a stack of layers.
    assert found["all-gather"] and max(found["all-gather"]) <= largest
    # Every statistic leaves as shards, from inside of the loop if there is one.
    scattered = [*found["reduce-scatter"], *found["all-reduce"]]
    assert max(scattered) <= largest
    for name, sharding in program.output_shardings[1]["square"]["blocks"].items():
        assert sharding.spec == P(None, "data"), name


def test_casts_come_before_gathers():
    text = lowered_layers("scan remat", MOMENTS, compute=jnp.bfloat16).as_text()
    gathered = re.findall(r"stablehlo.all_gather.*-> tensor<(?:\d+x)*(\w+)>", text)
    assert gathered and set(gathered) == {"bf16"}


@pytest.mark.parametrize("how", HOW)
def test_tails_are_those_of_whole_parameters(how):
    """JAX adds no equation to a gradient, such as a `reshard`, which would end its tail."""
    stats_fn = pg.grad_stats(make_loss(how), MOMENTS, spmd_axis_name="data", param_specs=LAYER_SPECS)
    with jax.set_mesh(mesh_of(data=8)):
        program = str(jax.make_jaxpr(stats_fn)(layers(), layers_batch()))
    assert "reduce_scatter" in program
    assert "reshard" not in program


def test_memory_falls_with_the_number_of_devices():
    """A device never has the whole of a stack of layers, nor of its statistics."""
    whole = sum(x.nbytes for x in jax.tree.leaves(layers()["blocks"]))
    memory = compiled_layers("scan remat", MOMENTS).memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < whole


FSDP, TENSOR = {"w": P("data"), "v": P("data")}, {"w": P(None, "model"), "v": P("model")}


@pytest.mark.parametrize(
    ("specs", "strategy", "more"),
    [
        (FSDP, "auto", {}),
        (FSDP, "materialise", {}),
        (TENSOR, "materialise", {("all-reduce", 2): 2}),
        (TENSOR, "streamed", {("all-reduce", 1): 2}),
        (TENSOR, "gram", {("all-reduce", 2 * POSITIONS): 2, ("all-reduce", 2 * POSITIONS**2): 2}),
    ],
    ids=["fsdp", "fsdp formed", "tensor formed", "tensor streamed", "tensor gram"],
)
def test_what_norms_exchange(specs, strategy, more):
    """Nothing with FSDP, since an example is on one device. With a further axis devices have parts.

    A device adds up the squares of its part of the gradients that are formed, and the sums of the two
    examples, or of one at a time, are added up over devices. From products it has parts of the products.
    """

    def loss(p, batch):
        return jnp.mean(jnp.square(jnp.tanh(batch[0] @ p["w"]) @ p["v"] - batch[1]))

    def exchanged(stats):
        mesh = mesh_of(data=4, model=2)
        shapes = {"w": (8, 64), "v": (64, 8)}
        p = {name: normal(1, *shape) for name, shape in shapes.items()}
        p = jax.device_put(p, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})
        batch = spread(mesh, (normal(2, 8, POSITIONS, 8), normal(3, 8, POSITIONS, 8)))
        options = {"spmd_axis_name": "data", "param_specs": specs, "strategy": strategy}
        with jax.set_mesh(mesh), optimized():
            program = jax.jit(pg.grad_stats(loss, stats, **options)).lower(p, batch).compile()
        found = collectives(program)
        return collections.Counter((kind, size) for kind, sizes in found.items() for size in sizes)

    mean = {"mean": pg.Mean()}
    assert exchanged(mean | {"norm": pg.Norm()}) - exchanged(mean) == more


# Around it.


def test_derivative_and_ensemble():
    def size(p, b, **options):
        stats = pg.grad_stats(loss, [pg.Mean(jnp.square), pg.Variance(), pg.Norm()], **options)(p, b)
        return sum(jnp.sum(x) for x in jax.tree.leaves(stats))

    members = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params())
    expected = jax.jit(jax.vmap(jax.grad(size), (0, None)))(members, batch())
    options = {"spmd_axis_name": "data", "param_specs": specs_of("fsdp")}
    with jax.set_mesh(mesh_of(data=4, model=2)):
        of_all = jax.vmap(jax.grad(lambda p, b: size(p, b, **options)), (0, None))
        close(jax.jit(of_all)(members, batch()), expected)


def test_variance_is_accurate_when_the_mean_is_large():
    x = (1e4 + np.random.default_rng(0).normal(size=(64, 16))).astype(np.float32)
    options = {"spmd_axis_name": "data", "param_specs": P("data"), "microbatch_size": 2}
    stats_fn = pg.grad_stats(lambda w, x: jnp.mean(x @ w), pg.Variance(), **options)
    with jax.set_mesh(mesh_of(data=8)):
        result = jax.jit(stats_fn)(jnp.ones(16, jnp.float32), x)
    np.testing.assert_allclose(result, np.var(x.astype(np.float64), axis=0, ddof=1), rtol=1e-3)


def test_half_precision():
    cast = functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))
    p, b = cast(layers()), cast(layers_batch())
    make = functools.partial(pg.value_and_stats, make_loss("scan"), FEW)
    expected = jax.jit(make())(p, b)
    with jax.set_mesh(mesh_of(data=8)):
        out = jax.jit(make(spmd_axis_name="data", param_specs=LAYER_SPECS))(p, b)
    assert jax.tree.map(lambda x: x.dtype, out) == jax.tree.map(lambda x: x.dtype, expected)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), (out[1], expected[1]))
    close(*wide, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "tx",
    [
        pg.optim.clipped(pg.optim.micro_adam(0.1), 1.0),
        pg.optim.preconditioned_adam(0.1, mean_square=0.5, variance=0.5),
        pg.optim.sign_ema(0.1),
    ],
    ids=["clipped micro_adam", "preconditioned_adam", "sign_ema"],
)
def test_optimizer_states_are_sharded_from_the_first_step(tx):
    mesh = mesh_of(data=4, model=2)
    p, b = laid_out(mesh, "both"), spread(mesh, batch())
    options = {"spmd_axis_name": "data", "param_specs": specs_of("both")}

    @jax.jit
    def step(p, state, b):
        _, stats = pg.value_and_stats(loss, tx.stats, **options)(p, b)
        updates, state = tx.update(stats["mean"], state, p, stats=stats)
        return optax.apply_updates(p, updates), state

    def all_sharded(tree):
        found = 0
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name = getattr(path[-1], "key", None)
            if name in p and x.shape == p[name].shape:
                assert is_sharded_like(mesh, x, specs_of("both")[name]), path
                found += 1
        assert found >= len(p)

    state = tx.init(p)
    all_sharded(state)
    with jax.set_mesh(mesh):
        all_sharded(step(p, state, b))


# A loss that names mesh axes.


def constrained(sharding):
    def of_constrained(p, b):
        h = jnp.tanh((b["x"] + p["table"][b["i"]]) @ p["w"] + p["b"][None, None])
        h = lax.with_sharding_constraint(h, sharding)
        return jnp.mean(jnp.square(p["s"] * h @ p["v"] - b["y"]))

    return of_constrained


@pytest.mark.parametrize("axes", [{"data": 4, "model": 2}, {"data": 8}], ids=str)
def test_constraints_may_name_the_axis_of_the_batch(axes):
    mesh = mesh_of(**axes)
    spec = P("data", None, "model" if "model" in axes else None)
    expected = jax.jit(pg.value_and_stats(loss, FEW))(params(), batch())
    with jax.set_mesh(mesh):
        own = constrained(NamedSharding(mesh, spec))
        out = jax.jit(pg.value_and_stats(own, FEW, spmd_axis_name="data"))(params(), batch())
    close(out, expected)


def test_constraint_by_a_spec_is_explained():
    words = ["sharding constraint", "(of_constrained)", "'data'", "NamedSharding(mesh, spec)"]
    with jax.set_mesh(mesh_of(data=4, model=2)), refused(pg.ArgumentError, *words):
        own = constrained(P("data", None, "model"))
        pg.grad_stats(own, pg.Mean(), spmd_axis_name="data")(params(), batch())


@pytest.mark.parametrize("where", ["outside", "in a loop"])
def test_collectives_over_the_axis_of_the_batch_are_refused(where):
    def mixed(p, b):
        if where == "outside":
            return lax.pmean(loss(p, b), "data")
        return lax.fori_loop(0, 2, lambda i, x: lax.pmean(x, "data"), loss(p, b))

    words = ["psum over the mesh axis 'data'", "test_sharded_parameters.py", "mixed", "one example"]
    with jax.set_mesh(mesh_of(data=8)), refused(pg.ArgumentError, *words[:2], words[3]):
        pg.grad_stats(mixed, pg.Mean(), spmd_axis_name="data")(params(), batch())


# Public examples of `vmap(grad)` that failed on sharded arrays.


def check_individual(fun, param, x):
    """The gradients of all examples are right, stay where the examples are, and nothing travels."""
    expected = jax.vmap(jax.grad(fun), in_axes=(None, 0))(param, x[:, None])
    mesh = mesh_of(data=8)
    gradients = pg.grad_stats(fun, pg.Individual(), spmd_axis_name="data")
    with jax.set_mesh(mesh), optimized():
        program = jax.jit(gradients).lower(param, spread(mesh, x)).compile()
    result = program(param, spread(mesh, x))
    close(result, expected)
    assert is_sharded_like(mesh, result, P("data"))
    assert not any(collectives(program).values())


def test_convolution_of_sharded_inputs():
    """jax-ml/jax issue 32157: gradients of a kernel for each of the images."""
    x, kernel = normal(1, 32, 1, 4, 4), normal(2, 1, 1, 3, 3)

    def total(kernel, x):
        return jnp.sum(lax.conv_general_dilated(x, kernel, (1, 1), "VALID"))

    skip_convolutions_that_fail(total, kernel, x)
    check_individual(total, kernel, x)


def test_gradients_of_a_linear_model():
    """jax-ml/jax issue 20710: the gradients of a linear model for each of the rows."""
    check_individual(lambda w, x: jnp.sum(x @ w), normal(2, 3), normal(1, 8, 3))


def test_modules():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def of_model(model, x):
        return jnp.mean(model.second(jnp.tanh(model.first(x))) ** 2)

    model, x = Two(nnx.Rngs(0)), normal(1, 16, 8).astype(jnp.float32)
    stats = {"variance": pg.Variance(), "norm": pg.Norm()}
    expected = nnx.jit(pergrad.nnx.value_and_stats(of_model, stats))(model, x)
    specs = jax.tree.map(lambda _: P("data"), nnx.state(model, nnx.Param))
    with jax.set_mesh(mesh_of(data=8)):
        options = {"spmd_axis_name": "data", "param_specs": specs}
        out = nnx.jit(pergrad.nnx.value_and_stats(of_model, stats, **options))(model, x)
    close(out, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({"table": P("data")}, ["param_specs", "tree like the parameters"]),
        (P("rows"), ["['b']", "no axis 'rows'", "'data'"]),
        (P(None, None, "data"), ["['b']", "shape (16,)"]),
        ({**dict.fromkeys(params(), P()), "v": P(None, "data")}, ["['v']", "4 entries", "8 devices"]),
        ("data", ["['b']", "'data'", "PartitionSpec"]),
    ],
    ids=str,
)
def test_refused(specs, words):
    with jax.set_mesh(mesh_of(data=8)), refused(pg.ArgumentError, *words):
        pg.grad_stats(loss, pg.Mean(), spmd_axis_name="data", param_specs=specs)(params(), batch())


def test_specs_need_the_axis_of_the_batch():
    with refused(pg.ArgumentError, "param_specs", "spmd_axis_name"):
        pg.grad_stats(loss, pg.Mean(), param_specs=P("data"))
