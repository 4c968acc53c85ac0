"""Unmodified models of Flax, Equinox and Haiku meet the oracle; `pergrad.nnx`; the page of the docs."""

import doctest
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pergrad as pg
from tests.support import oracle, pages
from tests.support.bounds import ERROR, STATISTICS, assert_agrees
from tests.support.cases import array, in_float64
from tests.support.truth import Truth

STATS = {name: STATISTICS[name] for name in ("mean", "square", "variance")}
B, T, D = 4, 5, 8


@pytest.fixture(autouse=True)
def frameworks_promote_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def normal(seed, *shape):
    return array(np.random.default_rng(seed).normal(size=shape))


def sequences():
    return normal(0, B, T, D), normal(1, B, T, D)


def images():
    return normal(0, B, 6, 6, 2), normal(1, B, 3)


def squared_error(out, y):
    return jnp.mean(jnp.square(out - y))


# Models: each function returns a loss, its arguments, and options of `value_and_stats`.

MODELS = []


def model(make):
    MODELS.append(make)
    return make


def nnx_loss(model, batch):
    """The loss of a module, split by hand. The keys in its state are not used, or nothing is random."""
    from flax import nnx

    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, batch, rest):
        x, y = batch
        return squared_error(nnx.merge(graphdef, params, rest, copy=True)(x), y)

    return loss, (params, batch, rest), {"shared_argnums": 2}


def nnx_block():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs, rate=0.0):
            self.norm = nnx.LayerNorm(D, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
            self.linear = nnx.Linear(D, D, rngs=rngs)
            self.dropout = nnx.Dropout(rate, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.dropout(nnx.gelu(self.linear(x)))

    return Block


def nnx_layers(rate=0.0, remat=False):
    """Blocks that `nnx.vmap` stacks and `nnx.scan` runs through."""
    from flax import nnx

    block = nnx_block()

    class Layers(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=2)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return block(rngs, rate)

            self.layers = make(rngs)

        def __call__(self, x):
            def run(x, layer):
                return layer(x)

            run = nnx.remat(run) if remat else run
            return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    return Layers


@model
def nnx_attention():
    nnx = pytest.importorskip("flax.nnx")
    return nnx_loss(nnx_block()(nnx.Rngs(0)), sequences())


@model
def nnx_scan_of_remat():
    nnx = pytest.importorskip("flax.nnx")
    return nnx_loss(nnx_layers(remat=True)(nnx.Rngs(0)), sequences())


@model
def nnx_recurrent():
    nnx = pytest.importorskip("flax.nnx")
    cell = nnx.LSTMCell(D, D, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    return nnx_loss(nnx.RNN(cell), sequences())


@model
def nnx_convolution_with_running_statistics():
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    net = nnx.Sequential(
        nnx.Conv(2, 4, (3, 3), rngs=rngs),
        nnx.BatchNorm(4, use_running_average=True, rngs=rngs),
        nnx.relu,
        nnx.Conv(4, 4, (3, 3), strides=2, rngs=rngs),
        nnx.GroupNorm(4, num_groups=2, rngs=rngs),
        lambda x: x.reshape(x.shape[0], -1),
        nnx.Linear(36, 3, rngs=rngs),
    )
    return nnx_loss(net, images())


def linen_loss(net, batch):
    """The loss of a linen module: parameters, examples, other collections, a key."""
    key = jax.random.key(0)
    state = jax.jit(net.init)({"params": key, "dropout": key}, batch[0])
    params = state.pop("params")

    def loss(params, batch, state, key):
        x, y = batch
        return squared_error(net.apply({"params": params, **state}, x, rngs={"dropout": key}), y)

    # Running statistics are as long as the batch by chance.
    options = {"rng_argnums": 3, "shared_argnums": 2}
    return loss, (params, batch, state, jax.random.key(7)), options


def linen_block():
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = nn.make_causal_mask(x[..., 0])
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dropout(0.5, deterministic=False)(nn.gelu(nn.Dense(D)(x)))

    return Block


@model
def linen_attention_and_dropout():
    pytest.importorskip("flax.linen")
    return linen_loss(linen_block()(), sequences())


@model
def linen_scan_of_remat():
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.remat(linen_block())()(x), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            rngs = {"params": True, "dropout": True}
            layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs=rngs, length=2)
            return layers()(x, None)[0]

    return linen_loss(Net(), sequences())


@model
def linen_recurrent():
    nn = pytest.importorskip("flax.linen")
    return linen_loss(nn.RNN(nn.OptimizedLSTMCell(D, param_dtype=jnp.float64)), sequences())


@model
def linen_convolution_with_running_statistics():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Conv(4, (3, 3))(x)))
            x = nn.GroupNorm(2)(nn.Conv(4, (3, 3), feature_group_count=2)(x))
            return nn.Dense(3)(nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1))

    return linen_loss(Net(), images())


@model
def equinox_attention_of_one_example():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        dropout: eqx.nn.Dropout
        order: jax.Array  # integers, which cannot be differentiated

        def __init__(self, key):
            self.norm = eqx.nn.LayerNorm(D)
            self.attention = eqx.nn.MultiheadAttention(
                2, D, use_query_bias=True, use_key_bias=True, use_output_bias=True, key=key
            )
            self.dropout = eqx.nn.Dropout(0.5)
            self.order = jnp.arange(T)[::-1]

        def __call__(self, x, key):
            h = jax.vmap(self.norm)(x)[self.order]
            return x + self.dropout(self.attention(h, h, h, jnp.tri(T, dtype=bool)), key=key)

    params, static = eqx.partition(Block(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, example, key):
        x, y = example
        return squared_error(eqx.combine(params, static)(x, key), y)

    options = {"keep_batch_dim": False, "rng_argnums": 2}
    return loss, (params, sequences(), jax.random.key(7)), options


@model
def equinox_recurrent():
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(eqx.nn.LSTMCell(D, D, key=jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, batch):
        def run(xs):
            cell = eqx.combine(params, static)
            zero = jnp.zeros(D)
            return jax.lax.scan(lambda s, x: 2 * (cell(x, s),), (zero, zero), xs)[1][0]

        x, y = batch
        return squared_error(jax.vmap(run)(x), y)

    return loss, (params, sequences()), {}


@model
def equinox_convolution():
    eqx = pytest.importorskip("equinox")
    k1, k2 = jax.random.split(jax.random.key(0))
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(6, 4, 3, key=k1),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.Lambda(jax.nn.silu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(32, 3, key=k2),
        ]
    )
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params, batch):
        x, y = batch
        return squared_error(jax.vmap(eqx.combine(params, static))(x), y)

    return loss, (params, (normal(0, B, 6, 4, 6), normal(1, B, 3))), {}


def haiku_loss(forward, batch):
    """The loss of a Haiku function that may draw random numbers; its state is an argument, and aux."""
    import haiku as hk

    net = hk.transform_with_state(forward)
    params, state = jax.jit(net.init)(jax.random.key(0), batch[0])

    def loss(params, batch, state, key):
        x, y = batch
        out, state = net.apply(params, state, key, x)
        return squared_error(out, y), state

    return loss, (params, batch, state, jax.random.key(7)), {"rng_argnums": 3, "has_aux": True}


@model
def haiku_attention_and_dropout():
    hk = pytest.importorskip("haiku")

    def forward(x):
        h = hk.LayerNorm(-1, True, True)(x)
        attention = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())
        x = x + attention(h, h, h, jnp.tri(T, dtype=bool)[None, None])
        return x + hk.dropout(hk.next_rng_key(), 0.5, hk.nets.MLP([6, D])(x))

    return haiku_loss(forward, sequences())


@model
def haiku_recurrent():
    hk = pytest.importorskip("haiku")

    def forward(x):
        core = hk.LSTM(D)
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)[0]

    return haiku_loss(forward, sequences())


@model
def haiku_convolution_with_running_statistics():
    hk = pytest.importorskip("haiku")

    def forward(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(4, 3)(x), is_training=hk.running_init())
        return hk.Linear(3)(hk.Flatten()(jax.nn.relu(x)))

    return haiku_loss(forward, images())


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_model_meets_the_oracle(make):
    loss, args, options = make()
    args = in_float64(args)
    roles = {name: value for name, value in options.items() if name != "shared_argnums"}
    truth = Truth(*oracle.per_example(loss, args, **roles))
    out = jax.jit(pg.value_and_stats(loss, STATS, **options))(*args)
    assert_agrees(out, truth, None, ERROR["float64"])
    assert jax.tree.structure(out[1]["mean"]) == jax.tree.structure(args[0])


# `pergrad.nnx`: the module itself.


@pytest.fixture
def nnx():
    nnx = pytest.importorskip("flax.nnx")
    importlib.import_module("pergrad.nnx")
    return nnx


def module_loss(model, batch):
    x, y = batch
    return squared_error(model(x), y)


def assert_close(tree, truth):
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(compare, tree, truth)


def widened(nnx, module):
    nnx.update(module, in_float64(nnx.state(module)))
    return module


def one_after_the_other(nnx, loss, module, batch):
    """`nnx.value_and_grad` of each example, whose streams start from keys of its own."""
    run, results = nnx.jit(nnx.value_and_grad(loss)), []
    for i in range(len(batch[0])):
        copy = nnx.clone(module)
        for _, stream in nnx.iter_graph(copy):
            if isinstance(stream, nnx.RngStream):
                fold = jax.vmap(jax.random.fold_in) if stream.key.shape else jax.random.fold_in
                next_key = fold(stream.key[...], stream.count[...])
                stream.key[...] = fold(next_key, jnp.full_like(stream.count[...], i))
        results.append(run(copy, jax.tree.map(lambda x, i=i: np.asarray(x)[i : i + 1], batch)))
    losses, grads = jax.tree.map(lambda *leaves: np.stack(leaves), *results)
    return Truth(losses, None, grads)


@pytest.mark.parametrize("remat", [False, True])
def test_module_with_dropout(nnx, remat):
    module, batch = nnx_layers(0.5, remat)(nnx.Rngs(0)), sequences()
    truth = one_after_the_other(nnx, module_loss, widened(nnx, module), batch)
    before, reference = nnx.clone(module), nnx.clone(module)
    stats_fn = nnx.jit(pg.nnx.value_and_stats(module_loss, STATS))
    first = stats_fn(module, batch)
    assert_agrees(first, truth, None, ERROR["float64"])

    # What is left behind is what `nnx.grad` leaves behind, so the next call draws other numbers.
    _, grads = nnx.jit(nnx.value_and_grad(module_loss))(reference, batch)
    assert jax.tree.structure(first[1]["mean"]) == jax.tree.structure(grads)
    jax.tree.map(np.testing.assert_array_equal, *(state_of(nnx, m) for m in (module, reference)))
    assert np.all(module.layers.dropout.rngs.count[...] == before.layers.dropout.rngs.count[...] + 1)
    second = stats_fn(module, batch)
    assert abs(second[0] - first[0]) > 1e-3


def state_of(nnx, module):
    def numbers(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return jax.tree.map(numbers, nnx.state(module))


def test_weights_and_microbatches(nnx):
    module, batch, weights = nnx_block()(nnx.Rngs(0), 0.5), sequences(), jnp.array([1.0, 0.0, 2.0, 1.0])
    truth = one_after_the_other(nnx, module_loss, widened(nnx, module), batch)
    stats_fn = pg.nnx.value_and_stats(module_loss, STATS, microbatch_size=3)
    out = nnx.jit(stats_fn)(module, batch, example_weights=weights)
    assert_agrees(out, truth, weights, ERROR["float64"])


def test_whole_gradients(nnx):
    # The direction is a state like the parameters, and is not given to the loss.
    module, batch = widened(nnx, nnx.Linear(D, D, rngs=nnx.Rngs(0))), sequences()
    stats = {"mean": pg.Mean(), "gram": pg.Gram(), "norm": pg.Norm(where=lambda path: "kernel" in path)}
    _, first = pg.nnx.value_and_stats(module_loss, stats)(module, batch)
    dot = pg.nnx.value_and_stats(module_loss, pg.Dot())
    _, dots = nnx.jit(dot)(module, batch, direction=first["mean"])
    assert_close(dots, jnp.mean(first["gram"], axis=1))
    plan = pg.nnx.explain(module_loss, pg.Dot())(module, batch, direction=first["mean"])
    assert len(plan.rows) == 2
    truth = one_after_the_other(nnx, module_loss, module, batch)
    assert_close(first["norm"], oracle.norm(truth.grads["kernel"]))


@pytest.mark.parametrize("make", ["value_and_stats", "explain", "check"])
def test_arguments_without_a_role(nnx, make):
    def loss(model, x, y):
        return squared_error(model(x), y)

    def fun(loss, **options):
        stats = () if make == "check" else (pg.Mean(),)
        return getattr(pg.nnx, make)(loss, *stats, **options)

    model, (x, y) = nnx.Linear(D, D, rngs=nnx.Rngs(0)), sequences()
    with pytest.raises(pg.ArgumentError, match=r"(?s)args\[2\].*=\(1, 2\).*shared_argnums=2"):
        fun(loss)(model, x, y)
    fun(loss, batch_argnums=(1, 2))(model, x, y)
    fun(lambda model, x, y: jnp.mean(model(x)), shared_argnums=2)(model, x, y)
    with pytest.raises(pg.ArgumentError, match=r"(?s)args\[2\].*PRNG key.*rng_argnums=2"):
        fun(loss)(model, x, jax.random.key(0))
    with pytest.raises(pg.ArgumentError, match=r"(?s)y is of the type Rngs.*by position"):
        fun(loss)(model, x, y=nnx.Rngs(0))
    with pytest.raises(pg.ArgumentError, match=r"(?s)make the batch an argument"):
        fun(loss)(model)
    # Modules are as wide as they are, whatever the batch, and have streams of their own.
    rows, noisy = jnp.ones((D, D)), nnx.Dropout(0.5, rngs=nnx.Rngs(0), deterministic=True)
    fun(lambda model, x, more: jnp.mean(more(model(x))))(model, rows, noisy)


def test_training_step(nnx):
    batch, modules = sequences(), []
    for grad in (
        lambda *args: pg.nnx.value_and_stats(module_loss, STATS)(*args)[1]["mean"],
        nnx.grad(module_loss),
    ):

        @nnx.jit
        def step(module, optimizer, batch, grad=grad):
            optimizer.update(module, grad(module, batch))

        module = widened(nnx, nnx.Linear(D, D, rngs=nnx.Rngs(0)))
        optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
        for _ in range(2):
            step(module, optimizer, batch)
        modules.append(nnx.state(module))
    assert_close(*modules)


def test_modules_in_any_argument(nnx):
    # Two modules share a parameter; the noise comes from a stream that is an argument.
    x, y = normal(0, B, D), normal(1, B, D)
    first, second = (nnx.Linear(D, D, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    second.kernel, rngs = first.kernel, nnx.Rngs(noise=2)

    def loss(x, first, rngs, y, second, *, scale):
        out = second(jnp.tanh(first(x)) + scale * rngs.noise.normal(x.shape))
        return squared_error(out, y), out

    options = {"argnums": (1, -1), "has_aux": True}
    fun = pg.nnx.value_and_stats(loss, {"mean": pg.Mean()}, batch_argnums=(0, 3), **options)
    (value, aux), stats = fun(x, first, rngs, y, second, scale=0.0)
    assert rngs.noise.count[...] == 1
    quiet = functools.partial(loss, scale=0.0)
    whole_grad = nnx.value_and_grad(lambda *args: quiet(*args), argnums=(1, 4), has_aux=True)
    (whole, out), grads = whole_grad(x, first, rngs, y, second)
    assert jax.tree.structure(stats["mean"]) == jax.tree.structure(grads)
    assert_close((value, aux[:, 0], stats["mean"]), (whole, out, grads))
    (noisy, _), _ = fun(x, first, rngs, y, second, scale=1.0)
    assert abs(noisy - value) > 1e-2


def test_filter_and_one_example_without_batch_axis(nnx):
    layer = nnx.LoRALinear(D, D, lora_rank=2, rngs=nnx.Rngs(0))
    x = normal(0, B, D)
    fun = pg.nnx.value_and_stats(
        lambda layer, x: jnp.sum(layer(x) ** 2), pg.Mean(), wrt=nnx.LoRAParam, keep_batch_dim=False
    )
    _, mean = fun(layer, x)
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(lambda layer, x: jnp.sum(layer(x) ** 2) / B, argnums=wrt)(layer, x)
    assert_close(mean, grads)


def test_ensemble_of_modules(nnx):
    x = normal(0, B, D)
    make = nnx.vmap(lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(key)))
    members = make(jax.random.split(jax.random.key(0), 3))
    members.scale = nnx.Param(jnp.arange(1.0, 4.0)[:, None] * jnp.ones(D))

    def loss(member, x):
        return jnp.mean(member(x) * member.scale[...])

    fun = pg.nnx.value_and_stats(loss, {"mean": pg.Mean(), "loss": pg.Loss()})
    alone = [fun(member, x) for member in unstacked(nnx, members, 3)]
    value, stats = nnx.vmap(fun, in_axes=(0, None))(members, x)
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    assert_close((value, stats), together)
    assert members.rngs.count[...].tolist() == [1, 1, 1]


def unstacked(nnx, modules, count):
    graphdef, state = nnx.split(modules)
    return [nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(count)]


def batch_norm(nnx):
    rngs = nnx.Rngs(0)
    return widened(nnx, nnx.Sequential(nnx.Linear(D, D, rngs=rngs), nnx.BatchNorm(D, rngs=rngs)))


def test_state_computed_from_examples_is_refused(nnx):
    module, batch = batch_norm(nnx), sequences()
    kept = nnx.state(module)
    for fun in (pg.nnx.value_and_stats(module_loss, STATS), pg.nnx.check(module_loss)):
        with pytest.raises(pg.NotPerExampleError, match=r"\['mean'\].*argument 0.*model.eval\(\)"):
            fun(module, batch)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(module), kept)
    module.eval()
    pg.nnx.value_and_stats(module_loss, STATS)(module, batch)
    pg.nnx.check(module_loss)(module, batch)


def test_state_that_is_the_same_for_all_examples_is_kept(nnx):
    class Counting(nnx.Module):
        def __init__(self):
            self.scale, self.calls = nnx.Param(jnp.ones(D)), nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            return self.scale * x

    module = Counting()
    pg.nnx.value_and_stats(module_loss, STATS)(module, sequences())
    assert module.calls[...] == 1


def test_variable_that_the_loss_creates_is_refused(nnx):
    def loss(model, batch):
        model.hidden = nnx.Intermediate(model(batch[0]))
        return squared_error(model.hidden[...], batch[1])

    with pytest.raises(pg.NotPerExampleError, match=r"\['hidden'\].*has_aux"):
        pg.nnx.value_and_stats(loss, STATS)(nnx.Linear(D, D, rngs=nnx.Rngs(0)), sequences())


def test_check_of_a_module_that_draws_random_numbers(nnx):
    module = nnx.Sequential(nnx.Linear(D, D, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    with pytest.raises(pg.ArgumentError, match=r"random.*model.eval\(\)"):
        pg.nnx.check(module_loss)(module, sequences())
    assert module.layers[1].rngs.count[...] == 0
    module.eval()
    pg.nnx.check(module_loss)(module, sequences())


def test_plan_of_a_module(nnx):
    plan = pg.nnx.explain(module_loss, pg.Mean())(nnx.Linear(D, D, rngs=nnx.Rngs(0)), sequences())
    assert "['kernel']" in str(plan)


@pytest.mark.parametrize("options", [{"argnums": 2}, {"batch_argnums": -3}, {"rng_argnums": 2}])
def test_arguments_that_are_not_there(nnx, options):
    fun = pg.nnx.value_and_stats(module_loss, STATS, **options)
    with pytest.raises(pg.ArgumentError, match=next(iter(options))):
        fun(nnx.Linear(D, D, rngs=nnx.Rngs(0)), sequences())


@pytest.mark.parametrize("options", [{"argnums": "model"}, {"batch_argnums": ()}, {"strategy": "?"}])
def test_options_that_cannot_be_right(nnx, options):
    for make in (pg.nnx.value_and_stats, pg.nnx.explain):
        with pytest.raises(pg.ArgumentError, match=next(iter(options))):
            make(module_loss, STATS, **options)
    with pytest.raises(pg.ArgumentError, match=next(iter(options))):
        pg.nnx.check(module_loss, **options)


def test_module_without_parameters(nnx):
    with pytest.raises(pg.ArgumentError, match="argnums=0 names nothing that has parameters"):
        pg.nnx.value_and_stats(module_loss, STATS)(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), sequences())


def test_example_in_the_docstring(nnx):
    globs = {"pg": pg, "nnx": nnx, "jnp": jnp}
    (test,) = doctest.DocTestFinder().find(pg.nnx.value_and_stats, "value_and_stats", globs=globs)
    with pages.jax_as_for_users():
        assert doctest.DocTestRunner().run(test).failed == 0


# `check`: losses that mix examples are found, and others are not.


@pytest.mark.parametrize(
    "make", [nnx_attention, nnx_convolution_with_running_statistics, equinox_recurrent]
)
def test_check_accepts(make):
    loss, args, options = make()
    pg.check(loss, **options)(*args)


def rejected():
    return pytest.raises(pg.NotPerExampleError, match="influence each other")


def test_check_finds_batch_norm_of_nnx_split_by_hand(nnx):
    loss, args, options = nnx_loss(batch_norm(nnx), sequences())
    with rejected():
        pg.check(loss, **options)(*args)


def test_check_finds_batch_norm_of_linen():
    nn = pytest.importorskip("flax.linen")
    net = nn.Sequential([nn.Dense(D), nn.BatchNorm(use_running_average=False)])
    batch = sequences()
    state = net.init(jax.random.key(0), batch[0])
    params = state.pop("params")

    def loss(params, batch, state):
        out, state = net.apply({"params": params, **state}, batch[0], mutable=["batch_stats"])
        return squared_error(out, batch[1]), state

    with rejected():
        pg.check(loss, has_aux=True)(params, batch, state)


def test_check_finds_batch_norm_of_haiku():
    hk = pytest.importorskip("haiku")

    def forward(x):
        return hk.BatchNorm(True, True, 0.9)(hk.Linear(D)(x), is_training=True)

    loss, (params, batch, state, _), _ = haiku_loss(forward, sequences())
    with rejected():
        pg.check(loss, has_aux=True)(params, batch, state, None)


def test_check_finds_a_contrastive_loss_of_equinox():
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(eqx.nn.MLP(D, D, 6, 1, key=jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, batch):
        x, y = batch
        similarity = jax.vmap(eqx.combine(params, static))(x) @ y.T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(similarity)))

    batch = normal(0, B, D), normal(1, B, D)
    with rejected():
        pg.check(loss)(params, batch)
    groups = jax.tree.map(lambda x: x.reshape(2, 2, D), batch)
    options = {"keep_batch_dim": False}
    truth = Truth(*oracle.per_example(loss, (params, groups), **options))
    assert_agrees(
        pg.value_and_stats(loss, STATS, **options)(params, groups), truth, None, ERROR["float64"]
    )


def test_check_finds_a_balancing_loss_of_nnx(nnx):
    def loss(router, x):
        p = nnx.softmax(router(x))
        fraction = jnp.mean(jax.nn.one_hot(jnp.argmax(p, axis=-1), D), axis=0)
        return jnp.sum(fraction * jnp.mean(p, axis=0))

    with rejected():
        pg.nnx.check(loss)(nnx.Linear(D, D, rngs=nnx.Rngs(0)), 3 * normal(0, B, D))


# The page.


def test_page(nnx):
    for framework in ("flax.linen", "equinox", "haiku"):
        pytest.importorskip(framework)
    with pages.jax_as_for_users():
        run_page(nnx)


def run_page(nnx):
    """Runs each block, and compares its `stats` with the oracle of its `loss`."""

    def module(make):
        return lambda s: one_after_the_other(nnx, s["loss"], make(s), s["batch"])

    def tree(names, **options):
        return lambda s: Truth(*oracle.per_example(s["loss"], tuple(s[n] for n in names), **options))

    truths = [
        module(lambda s: s["Block"](32, nnx.Rngs(0))),
        module(lambda s: s["make_layers"](nnx.Rngs(0))),
        tree(["params", "batch", "state"]),
        tree(["params", "batch", "state", "key"], rng_argnums=3),
        tree(["params", "batch", "state", "key"], rng_argnums=3),  # the same, in a TrainState
        tree(["params", "batch", "key"], rng_argnums=2, keep_batch_dim=False),
        tree(["params", "batch", "key"], rng_argnums=2),
    ]
    (data, _), *blocks = pages.blocks(pages.ROOT / "docs" / "frameworks.md")
    shown = {"__name__": "frameworks"}
    exec(data, shown)
    for (code, _), truth in zip(blocks, truths, strict=True):
        exec(code, shown)
        stats = {"square" if name == "second_moment" else name: s for name, s in shown["stats"].items()}
        assert_agrees((shown["value"], stats), truth(shown), None, ERROR["float32"])
