"""Other units than examples: groups of neighbours, and tokens.

The truth for tokens comes from another model, in which every position has its own copy of each
parameter: the gradients of the copies are the single contributions to the gradient of the parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import pergrad as pg
from tests.support import oracle
from tests.support.cases import array
from tests.support.claims import close
from tests.support.small_model import batch as some_batch
from tests.support.small_model import ensemble, loss, member, normal, params, some_number

STRATEGIES = ["auto", "streamed", "materialise", "factored", "summed", "sparse"]
PHI = {"mean": None, "square": jnp.square, "abs": jnp.abs, "cos": jnp.cos}

Tree = Any


def statistics(per):
    return {name: pg.Mean(phi, per=per) for name, phi in PHI.items()} | {
        "variance": pg.Variance(per=per)
    }


def truth_of_units(units, counts):
    """The statistics of gradients `units` that count as often as `counts` says."""
    phi = {"mean": lambda g: g, "square": np.square, "abs": np.abs, "cos": np.cos}
    truth = {name: oracle.mean_of(f, units, counts) for name, f in phi.items()}
    return truth | {"variance": oracle.variance(units, counts)}


# Groups.

SIZE = 12
WEIGHTS = np.array([1, 0, 2.5, 3, 0.5, 1, 0, 0, 0, 2, 1, 0])


def batch(size=SIZE):
    return some_batch(size)


def grads(p=None, b=None):
    return oracle.per_example(loss, (params() if p is None else p, batch() if b is None else b))[2]


def group_truth(k, w=None):
    return truth_of_units(*oracle.groups(grads(), k, w))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups(strategy):
    # Each strategy meets two sizes of groups and of microbatches, and all sizes meet one of them.
    sizes = [(1, None), (2, None), (3, 2), (4, 6), (6, 5)]
    number = STRATEGIES.index(strategy)
    for (k, size), w in zip([sizes[number % 5], sizes[(number + 2) % 5]], (None, WEIGHTS), strict=True):
        stats_fn = pg.grad_stats(loss, statistics(k), microbatch_size=size, strategy=strategy)
        close(jax.jit(stats_fn)(params(), batch(), example_weights=w), group_truth(k, w))


@pytest.mark.parametrize("size", [1, 3, 4, 7, "auto", 100])
def test_groups_do_not_depend_on_the_microbatch(size):
    # Sizes that divide the groups, that the groups divide, and neither.
    stats = {k: statistics(k) for k in (2, 3)}
    stats_fn = pg.grad_stats(loss, stats, microbatch_size=size)
    result = jax.jit(stats_fn)(params(), batch(), example_weights=WEIGHTS)
    close(result, {k: group_truth(k, WEIGHTS) for k in stats})


def test_units_of_one_are_examples():
    p, b = params(), batch()
    for size in (None, 5):
        stats = [statistics(1), statistics("example")]
        stats_fn = jax.jit(pg.grad_stats(loss, stats, microbatch_size=size))
        ones, examples = stats_fn(p, b, example_weights=WEIGHTS)
        close(ones, examples)


def test_one_group_of_all():
    p, b = params(), batch()
    result = jax.jit(pg.grad_stats(loss, pg.Mean(jnp.square, per=SIZE)))(p, b)
    close(result, jax.tree.map(jnp.square, jax.grad(loss)(p, b)))


def test_groups_are_batches_of_their_own():
    # The same as a loss whose examples are groups.
    p, b = params(), batch()
    grouped = jax.tree.map(lambda x: x.reshape(4, 3, *x.shape[1:]), b)
    stats = [statistics(3), pg.Count()]
    result, count = jax.jit(pg.grad_stats(loss, stats))(p, b)
    stats = statistics("example")
    close(result, jax.jit(pg.grad_stats(loss, stats, keep_batch_dim=False))(p, grouped))
    assert count == SIZE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padding_in_groups(strategy):
    # NaN beside members that count, and a group of nothing else.
    p, b = params(), batch()
    bad = b | {"x": b["x"].at[WEIGHTS == 0].set(jnp.nan)}
    stats_fn = pg.grad_stats(loss, statistics(3), microbatch_size=4, strategy=strategy)
    close(jax.jit(stats_fn)(p, bad, example_weights=WEIGHTS), group_truth(3, WEIGHTS))


def test_group_that_does_not_count():
    p, b = params(), batch()
    w = np.array([1.0, 2, 0, 0, 1, 1, 3, 1, 0, 0, 2, 1])
    rest = jax.tree.map(lambda x: x[np.array([0, 1, 4, 5, 6, 7, 10, 11])], b)
    stats_fn = jax.jit(pg.grad_stats(loss, statistics(2)))
    expected = stats_fn(p, rest, example_weights=w[[0, 1, 4, 5, 6, 7, 10, 11]])
    close(stats_fn(p, b, example_weights=w), expected)


def test_value_and_other_statistics_stay_what_they_are():
    p, b, g = params(), batch(), grads()
    stats = {"group": pg.Variance(per=3), "example": pg.Variance(), "g": pg.Individual()}
    value, result = jax.jit(pg.value_and_stats(loss, stats))(p, b)
    close(value, loss(p, b))
    truth = {"group": group_truth(3)["variance"], "example": oracle.variance(g), "g": g}
    close(result, truth)


def test_groups_in_an_ensemble():
    many, b = ensemble(), batch()
    stats_fn = pg.grad_stats(loss, statistics(3), microbatch_size=5)
    stats = jax.jit(jax.vmap(stats_fn, (0, None)))(many, b)
    for k in range(3):
        units = oracle.groups(grads(member(many, k), b), 3)
        close(member(stats, k), truth_of_units(*units))


@pytest.mark.parametrize("strategy", ["auto", "streamed"])
def test_derivative_of_statistics_of_groups(strategy):
    p, b = params(), batch()
    grouped = jax.tree.map(lambda x: x.reshape(4, 3, *x.shape[1:]), b)
    names = ("mean", "square", "variance")

    def plain(p):
        g = jax.vmap(lambda group: jax.grad(loss)(p, group))(grouped)
        variance = jax.tree.map(lambda x: jnp.var(x, axis=0, ddof=1), g)
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), g)
        square = jax.tree.map(lambda x: jnp.mean(jnp.square(x), axis=0), g)
        return dict(zip(names, (mean, square, variance), strict=True))

    stats = {name: statistics(3)[name] for name in names}
    stats_fn = pg.grad_stats(loss, stats, strategy=strategy, microbatch_size=4)
    ours = jax.jit(jax.grad(lambda p: some_number(stats_fn(p, b))))(p)
    close(ours, jax.jit(jax.grad(lambda p: some_number(plain(p))))(p), rtol=1e-8)


@pytest.mark.parametrize("per", [2, "token"])
def test_precision_of_units(per):
    # The mean gradient has the parameter's dtype, the others at least float32.
    p, b = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params()), batch()
    b = b | {name: b[name].astype(jnp.bfloat16) for name in "xy"}
    result = jax.jit(pg.grad_stats(loss, statistics(per)))(p, b)
    for name, tree in result.items():
        dtype = jnp.bfloat16 if name == "mean" else jnp.float32
        assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype(dtype)}, name


def test_sums_of_a_group_are_kept_in_float32():
    # One large and 511 small gradients: in bfloat16 the sum would not move.
    x = jnp.full(1024, 2.0**-8, jnp.bfloat16).at[::512].set(1)
    expected = ((1 + 511 / 256) / 512) ** 2
    for size in (None, 100):
        stats = pg.Mean(jnp.square, per=512)
        stats_fn = pg.grad_stats(lambda w, x: jnp.sum(w * x), stats, microbatch_size=size)
        np.testing.assert_allclose(jax.jit(stats_fn)(jnp.bfloat16(1), x), expected, rtol=1e-5)


def test_statistics_with_units_are_values():
    for make in (pg.Mean, pg.Variance):
        assert make(per=2) == make(per=2) and hash(make(per=2)) == hash(make(per=2))
        assert len({make(), make(per=2), make(per=3), make(per="token")}) == 4
        assert "per=2" in repr(make(per=2)) and "per='token'" in repr(make(per="token"))
        assert "per" not in repr(make())


# Tokens.


@dataclass(frozen=True)
class Model:
    """A loss, and the same loss of one example with copies of the parameters.

    `positions` says for each parameter how many contributions its gradient has, which is how many copies
    `spread` is given, in front.
    """

    loss: Callable[[Tree, Tree], Array]
    spread: Callable[[Tree, Tree], Array]
    params: Tree
    batch: Tree
    positions: Tree


MODELS: dict[str, Callable[[], Model]] = {}
B, T, D, K, V = 5, 4, 3, 2, 6


def model(make: Callable[[], Model]) -> Callable[[], Model]:
    MODELS[make.__name__] = make
    return make


def shaped(**shapes: tuple[int, ...]) -> Tree:
    return {name: normal(n, *shape) for n, (name, shape) in enumerate(shapes.items())}


def data(**shapes: tuple[int, ...]) -> Tree:
    return {name: normal(10 + n, B, *shape) for n, (name, shape) in enumerate(shapes.items())}


def ids(*shape: int, below: int = V) -> Array:
    """Integers of which the first comes again at the end."""
    x = np.random.default_rng(9).integers(below, size=(B, *shape))
    x[:, -1] = x[:, 0]
    return array(x)


def mse(y: Array, target: Array) -> Array:
    return jnp.mean(jnp.square(y - target))


def each(x: Array, w: Array) -> Array:
    """A product in which each position has its own matrix."""
    return jnp.einsum("ti,tij->tj", x, w)


@model
def dense_bias_and_scale() -> Model:
    def loss(p: Tree, batch: Tree) -> Array:
        h = jnp.tanh(batch["x"] @ p["w"] + p["b"][None, None])
        return mse((h * p["scale"][None, None]) @ p["out"], batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        h = jnp.tanh(each(e["x"], q["w"]) + q["b"])
        return mse(each(h * q["scale"], q["out"]), e["y"])

    p = shaped(w=(D, 7), b=(7,), scale=(7,), out=(7, K))
    return Model(loss, spread, p, data(x=(T, D), y=(T, K)), dict.fromkeys(p, T))


@model
def no_positions() -> Model:
    # One vector an example; an entry for each position.
    def loss(p: Tree, batch: Tree) -> Array:
        h = jnp.tanh(batch["z"] @ p["w"] + p["b"][None])
        x = jnp.tanh(batch["x"] + p["places"][None])
        return mse(h @ p["out"], batch["y"]) + jnp.mean(jnp.square(x))

    def spread(q: Tree, e: Tree) -> Array:
        return loss(jax.tree.map(lambda x: x[0], q), jax.tree.map(lambda x: x[None], e))

    p = shaped(w=(D, 7), b=(7,), out=(7, K), places=(T, D))
    return Model(loss, spread, p, data(z=(D,), x=(T, D), y=(K,)), dict.fromkeys(p, 1))


@model
def sums_over_features() -> Model:
    # A number for each position, which meets all features, and one number for all.
    def loss(p: Tree, batch: Tree) -> Array:
        h = batch["x"] * p["row"][None, :, None]
        return mse(jnp.tanh(h * p["one"]), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        h = e["x"] * q["row"].T
        return mse(jnp.tanh(h * q["one"].reshape(T, D)), e["y"])

    p = shaped(row=(T,), one=())
    return Model(loss, spread, p, data(x=(T, D), y=(T, D)), {"row": D, "one": T * D})


@model
def embedding() -> Model:
    def loss(p: Tree, batch: Tree) -> Array:
        return mse(jnp.mean(jnp.tanh(p["table"][batch["i"]]), axis=1) @ p["out"], batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        h = q["table"][jnp.arange(T), e["i"]]
        return mse(jnp.mean(jnp.tanh(h), axis=0) @ q["out"][0], e["y"])

    p = shaped(table=(V, D), out=(D, K))
    return Model(loss, spread, p, data(y=(K,)) | {"i": ids(T)}, {"table": T, "out": 1})


@model
def embedding_outside() -> Model:
    # What is not in the table reads as NaN and is left out; its cotangent is NaN, and goes nowhere.
    def read(table: Array, i: Any) -> Array:
        rows = jnp.tanh(table.at[i].get(mode="drop"))
        return jnp.where(jnp.isnan(rows), 0, jnp.square(rows))

    def loss(p: Tree, batch: Tree) -> Array:
        return mse(jnp.mean(read(p["table"], batch["i"]), axis=1) @ p["out"], batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        h = read(q["table"], (jnp.arange(T), e["i"]))
        return mse(jnp.mean(h, axis=0) @ q["out"][0], e["y"])

    p = shaped(table=(V, D), out=(D, K))
    return Model(loss, spread, p, data(y=(K,)) | {"i": ids(T, below=V + 2)}, {"table": T, "out": 1})


@model
def tied_embedding() -> Model:
    # T lookups and T products are 2 T contributions.
    def loss(p: Tree, batch: Tree) -> Array:
        h = jnp.tanh(p["table"][batch["i"]] @ p["w"])
        logp = jax.nn.log_softmax(h @ p["table"].T)
        return -jnp.mean(jnp.take_along_axis(logp, batch["j"][..., None], 2))

    def spread(q: Tree, e: Tree) -> Array:
        h = jnp.tanh(each(q["table"][jnp.arange(T), e["i"]], q["w"]))
        logp = jax.nn.log_softmax(jnp.einsum("td,tvd->tv", h, q["table"][T:]))
        return -jnp.mean(jnp.take_along_axis(logp, e["j"][..., None], 1))

    p = shaped(table=(V, D), w=(D, D))
    return Model(loss, spread, p, {"i": ids(T), "j": ids(T)[::-1]}, {"table": 2 * T, "w": T})


@model
def used_twice() -> Model:
    # Two layers with one matrix, over positions and after their mean.
    def loss(p: Tree, batch: Tree) -> Array:
        h = jnp.mean(jnp.tanh(batch["x"] @ p["w"]), axis=1)
        return mse(jnp.tanh(h @ p["w"]), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        h = jnp.mean(jnp.tanh(each(e["x"], q["w"][:T])), axis=0)
        return mse(jnp.tanh(h @ q["w"][T]), e["y"])

    return Model(loss, spread, shaped(w=(D, D)), data(x=(T, D), y=(D,)), {"w": T + 1})


@model
def two_axes_of_positions() -> Model:
    # An image of patches: both axes are summed over. Heads are not.
    def loss(p: Tree, batch: Tree) -> Array:
        h = jnp.tanh(jnp.einsum("buvi,ihk->buvhk", batch["x"], p["w"]))
        return mse(jnp.einsum("buvhk,hk->buvh", h, p["out"]), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        x = e["x"].reshape(6, D)
        h = jnp.tanh(jnp.einsum("ti,tihk->thk", x, q["w"]))
        return mse(jnp.einsum("thk,thk->th", h, q["out"]), e["y"].reshape(6, 5))

    p = shaped(w=(D, 5, K), out=(5, K))
    return Model(loss, spread, p, data(x=(2, 3, D), y=(2, 3, 5)), dict.fromkeys(p, 6))


@model
def convolution_1d() -> Model:
    dims = {"dimension_numbers": ("NWC", "WIO", "NWC")}

    def loss(p: Tree, batch: Tree) -> Array:
        y = lax.conv_general_dilated(batch["x"], p["w"], (1,), ((1, 1),), **dims)
        return mse(jnp.tanh(y + p["b"][None, None]), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        x = jnp.pad(e["x"], ((1, 1), (0, 0)))
        patches = jnp.stack([x[t : t + 3] for t in range(6)])
        return mse(jnp.tanh(jnp.einsum("tki,tkio->to", patches, q["w"]) + q["b"]), e["y"])

    return Model(loss, spread, shaped(w=(3, D, K), b=(K,)), data(x=(6, D), y=(6, K)), {"w": 6, "b": 6})


@model
def convolution_centred() -> Model:
    # A kernel whose mean is taken off: steps after the sum that mix its entries.
    dims = {"dimension_numbers": ("NWC", "WIO", "NWC")}

    def loss(p: Tree, batch: Tree) -> Array:
        w = p["w"] - jnp.mean(p["w"], axis=(0, 1), keepdims=True)
        return mse(jnp.tanh(lax.conv_general_dilated(batch["x"], w, (1,), "VALID", **dims)), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        w = q["w"] - jnp.mean(q["w"], axis=(1, 2), keepdims=True)
        patches = jnp.stack([e["x"][t : t + 3] for t in range(4)])
        return mse(jnp.tanh(jnp.einsum("tki,tkio->to", patches, w)), e["y"])

    return Model(loss, spread, shaped(w=(3, D, K)), data(x=(6, D), y=(4, K)), {"w": 4})


@model
def convolution_2d() -> Model:
    # With strides: twelve positions go in, six come out.
    dims = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def loss(p: Tree, batch: Tree) -> Array:
        y = lax.conv_general_dilated(batch["x"], p["w"], (2, 1), "VALID", **dims)
        return mse(jnp.tanh(y), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        corners = [(i, j) for i in (0, 2) for j in (0, 1, 2)]
        patches = jnp.stack([e["x"][i : i + 2, j : j + 2] for i, j in corners])
        y = jnp.einsum("tijc,tijco->to", patches, q["w"])
        return mse(jnp.tanh(y).reshape(2, 3, K), e["y"])

    return Model(loss, spread, shaped(w=(2, 2, D, K)), data(x=(4, 4, D), y=(2, 3, K)), {"w": 6})


@model
def layers_in_a_scan() -> Model:
    # Each layer's gradient is a sum over its positions.
    def loss(p: Tree, batch: Tree) -> Array:
        def body(x: Array, q: Tree) -> tuple[Array, None]:
            return x + jnp.tanh(x @ q["w"] + q["b"][None, None]), None

        return mse(lax.scan(body, batch["x"], p)[0], batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        x = e["x"]
        for n in range(2):
            x = x + jnp.tanh(each(x, q["w"][:, n]) + q["b"][:, n])
        return mse(x, e["y"])

    p = shaped(w=(2, D, D), b=(2, D))
    return Model(loss, spread, p, data(x=(T, D), y=(T, D)), {"w": T, "b": T})


@model
def recurrence() -> Model:
    # The steps are the positions.
    def loss(p: Tree, batch: Tree) -> Array:
        def cell(h: Array, x: Array) -> tuple[Array, Array]:
            h = jnp.tanh(x @ p["x"] + h @ p["h"] + p["b"][None])
            return h, h

        start = jnp.zeros((len(batch["x"]), 5))
        _, h = lax.scan(cell, start, jnp.swapaxes(batch["x"], 0, 1))
        return mse(jnp.swapaxes(h, 0, 1) @ p["out"], batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        h, y = jnp.zeros(5), []
        for t in range(T):
            h = jnp.tanh(e["x"][t] @ q["x"][t] + h @ q["h"][t] + q["b"][t])
            y.append(h @ q["out"][t])
        return mse(jnp.stack(y), e["y"])

    p = shaped(x=(D, 5), h=(5, 5), b=(5,), out=(5, K))
    return Model(loss, spread, p, data(x=(T, D), y=(T, K)), dict.fromkeys(p, T))


@model
def recurrence_over_places() -> Model:
    # Every step is a product over places: steps times places.
    def loss(p: Tree, batch: Tree) -> Array:
        def step(h: Array, x: Array) -> tuple[Array, None]:
            return jnp.tanh(x + h @ p["w"]), None

        h, _ = lax.scan(step, batch["start"], jnp.swapaxes(batch["x"], 0, 1))
        return mse(h, batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        w, h = q["w"].reshape(3, T, D, D), e["start"]
        for s in range(3):
            h = jnp.tanh(e["x"][s] + each(h, w[s]))
        return mse(h, e["y"])

    batch = data(x=(3, T, D), y=(T, D), start=(T, D))
    return Model(loss, spread, shaped(w=(D, D)), batch, {"w": 3 * T})


@model
def ragged_experts() -> Model:
    # Every position is sent to one of three experts; one of them may have none.
    def loss(p: Tree, batch: Tree) -> Array:
        expert = batch["expert"].reshape(-1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=3).astype(jnp.int32)
        y = lax.ragged_dot(batch["x"].reshape(-1, D)[order], p["w"], sizes)
        return mse(jnp.tanh(y[jnp.argsort(order)]).reshape(-1, T, K), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        return mse(jnp.tanh(each(e["x"], q["w"][jnp.arange(T), e["expert"]])), e["y"])

    batch = data(x=(T, D), y=(T, K)) | {"expert": ids(T, below=3)}
    return Model(loss, spread, shaped(w=(3, D, K)), batch, {"w": T})


@model
def low_rank_product() -> Model:
    # The two factors are multiplied first; the positions are those of the product's gradient.
    def loss(p: Tree, batch: Tree) -> Array:
        return mse(jnp.tanh(batch["x"] @ (p["a"] @ p["b"])), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        return mse(jnp.tanh(each(e["x"], jnp.einsum("tir,trj->tij", q["a"], q["b"]))), e["y"])

    p = shaped(a=(D, 2), b=(2, K))
    return Model(loss, spread, p, data(x=(T, D), y=(T, K)), {"a": T, "b": T})


@model
def low_rank_product_and_a_factor() -> Model:
    # Both gradients share a step, and one of the factors has contributions of its own beside.
    def loss(p: Tree, batch: Tree) -> Array:
        h = batch["x"] @ (3 * (p["a"] @ p["b"]))
        return mse(jnp.tanh(h), batch["y"]) + jnp.mean(jnp.square(jnp.tanh(batch["z"] @ p["b"])))

    def spread(q: Tree, e: Tree) -> Array:
        h = each(e["x"], 3 * jnp.einsum("tir,trj->tij", q["a"], q["b"][:T]))
        return mse(jnp.tanh(h), e["y"]) + jnp.mean(jnp.square(jnp.tanh(each(e["z"], q["b"][T:]))))

    p = shaped(a=(D, 2), b=(2, K))
    return Model(loss, spread, p, data(x=(T, D), y=(T, K), z=(3, 2)), {"a": T, "b": T + 3})


@model
def normalised_matrix() -> Model:
    # Weight normalisation: after the sum over positions the entries of a column are mixed.
    def loss(p: Tree, batch: Tree) -> Array:
        length = jnp.sqrt(jnp.sum(jnp.square(p["w"]), axis=0, keepdims=True))
        return mse(jnp.tanh(batch["x"] @ (p["w"] / length)), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        length = jnp.sqrt(jnp.sum(jnp.square(q["w"]), axis=1, keepdims=True))
        return mse(jnp.tanh(each(e["x"], q["w"] / length)), e["y"])

    return Model(loss, spread, shaped(w=(D, K)), data(x=(T, D), y=(T, K)), {"w": T})


@model
def rearranged() -> Model:
    # Transposed, reshaped and scaled before it is used.
    def loss(p: Tree, batch: Tree) -> Array:
        h = jnp.tanh(batch["x"] @ (0.5 * p["w"].T))
        return mse(h @ p["flat"].reshape(5, K), batch["y"])

    def spread(q: Tree, e: Tree) -> Array:
        h = jnp.tanh(each(e["x"], 0.5 * jnp.swapaxes(q["w"], 1, 2)))
        return mse(each(h, q["flat"].reshape(T, 5, K)), e["y"])

    p = shaped(w=(5, D), flat=(5 * K,))
    return Model(loss, spread, p, data(x=(T, D), y=(T, K)), {"w": T, "flat": T})


def contributions(m: Model) -> Tree:
    """The single contributions to each example's gradients, [B, N, ...]."""
    copies = jax.tree.map(lambda x, n: jnp.broadcast_to(x[None], (n, *x.shape)), m.params, m.positions)
    gradient = jax.jit(jax.grad(m.spread))
    examples = [jax.tree.map(lambda x, i=i: x[i], m.batch) for i in range(B)]
    return jax.tree.map(lambda *g: np.stack(g), *[gradient(copies, e) for e in examples])


def token_truth(m: Model, w: Any = None) -> dict[str, Tree]:
    counts = np.ones(B) if w is None else np.asarray(w)

    def leaf(g: np.ndarray) -> dict[str, np.ndarray]:
        n = g.shape[1]
        units = n * g.reshape(B * n, *g.shape[2:])
        return truth_of_units(units, np.repeat(counts, n))

    by_leaf = jax.tree.map(leaf, contributions(m))
    return jax.tree.transpose(
        jax.tree.structure(m.params), jax.tree.structure(dict.fromkeys([*PHI, "variance"], 0)), by_leaf
    )


def same(result: Tree, truth: Tree, error: float = 1e-11) -> None:
    """Equal up to `error` times the largest entry of each leaf."""
    assert jax.tree.structure(result) == jax.tree.structure(truth)

    def leaf(path: Any, a: Any, b: np.ndarray) -> None:
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=error * np.max(np.abs(b)), err_msg=where)

    jax.tree_util.tree_map_with_path(leaf, result, truth)


TOKEN_WEIGHTS = np.array([1, 0, 2.5, 3, 0.5])


@pytest.mark.parametrize("name", MODELS)
def test_the_two_models_are_one(name):
    m = MODELS[name]()
    g = oracle.per_example(m.loss, (m.params, m.batch))[2]
    same(jax.tree.map(lambda x: np.sum(x, axis=1), contributions(m)), g)


@pytest.mark.parametrize("name", MODELS)
def test_tokens(name):
    # What the plan chooses, and one strategy for all, which changes from model to model.
    m = MODELS[name]()
    forced = ("streamed", "materialise", "factored", "sparse")[list(MODELS).index(name) % 4]
    for strategy, size, weights in (("auto", None, None), (forced, 2, TOKEN_WEIGHTS)):
        stats_fn = pg.grad_stats(m.loss, statistics("token"), strategy=strategy, microbatch_size=size)
        result = jax.jit(stats_fn)(m.params, m.batch, example_weights=weights)
        same(result, token_truth(m, weights))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["tied_embedding", "recurrence_over_places"])
def test_tokens_by_any_strategy(name, strategy):
    m = MODELS[name]()
    stats_fn = pg.grad_stats(m.loss, statistics("token"), strategy=strategy, microbatch_size=3)
    result = jax.jit(stats_fn)(m.params, m.batch, example_weights=TOKEN_WEIGHTS)
    same(result, token_truth(m, TOKEN_WEIGHTS))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_one_statistic_at_a_time(name):
    # Each may take another way when nothing else is asked for.
    m = MODELS[name]()
    truth = token_truth(m, TOKEN_WEIGHTS)
    for key in ("square", "variance"):
        result = jax.jit(pg.grad_stats(m.loss, statistics("token")[key]))(
            m.params, m.batch, example_weights=TOKEN_WEIGHTS
        )
        same(result, truth[key])


@pytest.mark.parametrize(
    "name", ["dense_bias_and_scale", "embedding", "recurrence", "convolution_centred"]
)
def test_tokens_of_padding(name):
    m = MODELS[name]()
    bad = {
        key: x.at[TOKEN_WEIGHTS == 0].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for key, x in m.batch.items()
    }
    for strategy in ("auto", "streamed"):
        stats_fn = pg.grad_stats(m.loss, statistics("token"), strategy=strategy)
        result = jax.jit(stats_fn)(m.params, bad, example_weights=TOKEN_WEIGHTS)
        same(result, token_truth(m, TOKEN_WEIGHTS))


def test_tokens_without_positions_are_examples():
    m = MODELS["no_positions"]()
    tokens, examples = jax.jit(pg.grad_stats(m.loss, [statistics("token"), statistics("example")]))(
        m.params, m.batch
    )
    close(tokens, examples)


def test_units_side_by_side():
    m = MODELS["dense_bias_and_scale"]()
    g = oracle.per_example(m.loss, (m.params, m.batch))[2]
    stats = {per: statistics(per) for per in ("example", "token")} | {"group": statistics(1)}
    result = jax.jit(pg.grad_stats(m.loss, stats))(m.params, m.batch)
    of_examples = truth_of_units(g, np.ones(B))
    same(result, {"example": of_examples, "token": token_truth(m), "group": of_examples})


def test_mean_square_of_one_token_is_larger():
    # By Jensen's inequality; equal only where an example's tokens agree.
    m = MODELS["dense_bias_and_scale"]()
    token, example = jax.jit(
        pg.grad_stats(m.loss, [pg.Mean(jnp.square, per=u) for u in ("token", "example")])
    )(m.params, m.batch)
    for name in m.params:
        assert np.all(token[name] > example[name] * (1 + 1e-6))


def test_tokens_in_an_ensemble():
    m = MODELS["recurrence"]()
    many = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), m.params)
    stats_fn = pg.grad_stats(m.loss, statistics("token"))
    stats = jax.jit(jax.vmap(stats_fn, (0, None)))(many, m.batch)
    for k in range(2):
        one = Model(m.loss, m.spread, member(many, k), m.batch, m.positions)
        same(member(stats, k), token_truth(one))
