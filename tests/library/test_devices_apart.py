"""Devices whose examples take different branches, on eight devices (`support/devices.py`).

Along the axis `model` XLA divides the work of each example, and adds collectives where it likes, also to
branches. A branch that only some devices take must not have one in which all of them meet: they would
wait for each other for ever, and XLA ends the process.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pergrad as pg
from tests.library.test_devices import mesh_of, spread
from tests.support import oracle
from tests.support.claims import close, refused
from tests.support.small_model import normal

LAYOUTS = {
    "replicated": {},
    "fsdp": {"w": P("data"), "u": P(None, "data"), "v": P("data")},
    "tensor": {"w": P(None, "model"), "u": P("model"), "v": P(None, "model")},
    "both": {"w": P("data", "model"), "u": P("model", "data"), "v": P("data", "model")},
}


def params(dtype=jnp.float64):
    shapes = {"w": (8, 16), "u": (16, 16), "v": (16, 8)}
    return {name: normal(i, *s).astype(dtype) for i, (name, s) in enumerate(shapes.items())}


def stats_on(layout, loss, stats, p, batch, **options):
    mesh = mesh_of(data=4, model=2)
    specs = {name: LAYOUTS[layout].get(name, P()) for name in p}
    p = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in p.items()}
    options |= {"spmd_axis_name": "data", "param_specs": specs}
    with jax.set_mesh(mesh):
        return jax.jit(pg.grad_stats(loss, stats, **options))(p, spread(mesh, batch))


@pytest.mark.parametrize(
    ("layout", "size", "microbatch_size"), [("fsdp", 4, None), ("tensor", 4, None), ("both", 8, 1)]
)
def test_branches_of_the_loss(layout, size, microbatch_size):
    """One example at a time takes one branch, unless XLA divides its work."""

    def loss(p, batch):
        x = batch["x"][0] @ p["w"]

        def rolled():
            return jnp.tanh(jnp.roll(x, 1))  # a permutation of devices, if `x` is divided

        h = lax.cond(batch["flag"][0] > 0, rolled, lambda: x @ p["u"])
        return jnp.sum(jnp.square(h @ p["v"]))

    batch = {"x": normal(5, size, 8), "flag": jnp.arange(size) % 3 - 1.0}
    stats = {"variance": pg.Variance(), "norm": pg.Norm()}
    out = stats_on(layout, loss, stats, params(), batch, microbatch_size=microbatch_size)
    _, _, g = oracle.per_example(loss, (params(), batch))
    close(out, {"variance": oracle.variance(g), "norm": oracle.norm(g)}, rtol=1e-9)


@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_rounds_of_the_loss(microbatch_size):
    """The rounds of a loop in a loop over layers, and of random numbers, depend on the example."""

    def loss(p, batch, key):
        x = batch["x"][0] @ lax.stop_gradient(p["w"])

        def layer(x, number):
            start = x, batch["rounds"][0] + number
            rolled = lax.while_loop(
                lambda state: state[1] > 0, lambda s: (jnp.tanh(jnp.roll(s[0], 1)), s[1] - 1), start
            )
            return rolled[0], None

        x, _ = lax.scan(layer, x, jnp.arange(2))
        x = x + jax.random.poisson(key, 2.0, x.shape)
        return jnp.sum(jnp.square(x @ p["u"] @ p["v"]))

    args = params(), {"x": normal(5, 8, 8), "rounds": jnp.arange(8)}, jax.random.key(0)
    make = functools.partial(pg.grad_stats, loss, [pg.Variance(), pg.Norm()], rng_argnums=2)
    mesh = mesh_of(data=4, model=2)
    p = jax.device_put(args[0], {k: NamedSharding(mesh, s) for k, s in LAYOUTS["tensor"].items()})
    with jax.set_mesh(mesh):
        options = {"spmd_axis_name": "data", "microbatch_size": microbatch_size}
        out = jax.jit(make(**options))(p, *args[1:])
    close(out, jax.jit(make())(*args), rtol=1e-9)


def rolled(x, rounds):
    """A loop whose rounds depend on the example, and have a permutation of devices if `x` is divided."""

    def one_round(state):
        return jnp.tanh(jnp.roll(state[0], 1)), state[1] - 1

    return lax.while_loop(lambda state: state[1] > 0, one_round, (x, rounds))[0]


@jax.custom_jvp
def with_own_derivative(x, rounds):
    return rolled(x, rounds)


with_own_derivative.defjvp(lambda primals, tangents: (rolled(*primals), tangents[0]))


def with_solver(x, rounds):
    return lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, b: rolled(b, rounds) / 2)


def loss_with(function, p, batch):
    x = function(batch["x"][0] @ lax.stop_gradient(p["w"]), batch["rounds"][0])
    return jnp.sum(jnp.square(x @ p["u"] @ p["v"]))


ROUNDS = {"x": normal(5, 4, 8), "rounds": jnp.arange(4)}


def turned(x, flag):
    return lax.cond(flag % 2 > 0, lambda: jnp.tanh(jnp.roll(x, 1)), lambda: x)


@jax.custom_vjp
def turned_with_own_rule(x, flag):
    return turned(x, flag)


turned_with_own_rule.defvjp(lambda x, flag: (turned(x, flag), None), lambda _, ct: (ct, None))


def turned_in_a_solver(x, flag):
    return lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, b: turned(b, flag) / 2)


def turned_in_a_while(x, flag):
    def one_round(state):
        return turned(state[0], flag + state[1]), state[1] + 1

    return lax.while_loop(lambda state: state[1] < 2, one_round, (x, 0))[0]


@pytest.mark.parametrize("function", [turned_with_own_rule, turned_in_a_solver, turned_in_a_while])
def test_branches_inside_of_calls(function):
    """One example at a time does not take its own branch there, either."""
    loss, stats = functools.partial(loss_with, function), {"variance": pg.Variance(), "norm": pg.Norm()}
    out = stats_on("tensor", loss, stats, params(), ROUNDS, microbatch_size=1)
    _, _, g = oracle.per_example(loss, (params(), ROUNDS))
    close(out, {"variance": oracle.variance(g), "norm": oracle.norm(g)}, rtol=1e-9)


def test_rounds_of_a_function_with_its_own_derivative():
    loss, stats = functools.partial(loss_with, with_own_derivative), [pg.Variance(), pg.Norm()]
    out = stats_on("tensor", loss, stats, params(), ROUNDS)
    close(out, jax.jit(pg.grad_stats(loss, stats))(params(), ROUNDS), rtol=1e-9)

    def size(x, **options):
        batch = ROUNDS | {"x": x}
        return jnp.sum(pg.grad_stats(loss, pg.Norm(), **options)(params(), batch))

    assert jnp.all(jnp.isfinite(jax.grad(size)(ROUNDS["x"])))
    with (
        jax.set_mesh(mesh_of(data=4, model=2)),
        refused(pg.ArgumentError, "a `while` loop", "test_devices_apart.py"),
    ):
        jax.grad(functools.partial(size, spmd_axis_name="data"))(ROUNDS["x"])


def test_rounds_of_a_solver_are_refused():
    with refused(
        pg.ArgumentError, "`while` loop inside of custom_linear_solve", "test_devices_apart.py"
    ):
        stats_on("tensor", functools.partial(loss_with, with_solver), pg.Norm(), params(), ROUNDS)


@pytest.mark.parametrize("layout", ["replicated", "both"])
def test_digits_that_one_device_loses(layout):
    """One device's examples are nearly the same, so their variance is no difference of two sums."""

    def loss(p, batch):
        h = jnp.tanh(jnp.tanh(batch["x"] @ p["w"]) @ p["u"])
        return jnp.mean(jnp.square(h @ p["v"]))

    x = normal(5, 64, 8)
    near = x[16:17] + 1e-4 * normal(6, 16, 8)
    batch = {"x": x.at[16:32].set(near)}
    out = stats_on(layout, loss, pg.Variance(), params(), batch, strategy="centred")
    _, _, g = oracle.per_example(loss, (params(), batch))
    close(out, oracle.variance(g), rtol=1e-9)


@pytest.mark.parametrize(("layout", "microbatch_size"), [("replicated", None), ("both", 2)])
def test_large_gradients_of_one_device(layout, microbatch_size):
    """A finite gradient whose square is infinite is looked at, and is not dropped."""

    def loss(p, batch):
        h = jnp.tanh(jnp.tanh(batch["x"] @ p["w"]) @ p["u"])
        return jnp.mean(batch["scale"][:, None, None] * (h @ p["v"]))

    scale = np.ones(16, np.float32)
    scale[5], scale[9] = 1e25, np.inf
    batch = {"x": normal(5, 16, 3, 8).astype(jnp.float32), "scale": scale}
    stats = {"mean": pg.Mean(), "count": pg.Count()}
    p = params(jnp.float32)
    expected = pg.grad_stats(loss, stats)(p, batch, example_weights=np.isfinite(scale))
    options = {"nonfinite": "drop", "microbatch_size": microbatch_size}
    out = stats_on(layout, loss, stats, p, batch, **options)
    assert out["count"] == 15
    scaled = jax.tree.map(lambda x: x / 1e24, (out["mean"], expected["mean"]))
    close(*scaled, rtol=1e-4, atol=1e-6)
