"""Statistics in a `shard_map` of the user's that checks varying axes, as JAX does by default.

Everything is compared with what the same call gives on one device. A process that has fewer than eight
devices starts one with eight (`support/devices.py`).
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pergrad as pg
from tests.library.test_devices import (
    DIRECTION,
    FEW,
    REDUCED,
    STATS,
    WEIGHTS,
    batch,
    laid_out,
    loss,
    mesh_of,
    params,
    spread,
)
from tests.library.test_sharded_parameters import as_tuple, skip_convolutions_that_fail
from tests.support.claims import close, refused
from tests.support.every_case import CASES
from tests.support.truth import options

JOINED = {name: STATS[name] for name in ("norm", "loss", "dot", "projected", "individual", "factors")}
ALL = REDUCED | JOINED | {"groups": pg.Mean(jnp.square, per=2), "weighted": pg.WeightedMean(jnp.cos)}


def merged(stats, fun=loss, **options):
    """The statistics of a device's examples, merged over all devices."""

    def on_each(p, b, **more):
        return pg.all_combine(stats, pg.grad_stats(fun, stats, **options)(p, b, **more), "data")

    return on_each


@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
def test_every_statistic(microbatch_size):
    expected = jax.jit(pg.grad_stats(loss, ALL))(
        params(), batch(), example_weights=WEIGHTS, direction=DIRECTION
    )

    def on_each(p, b, w, direction):
        of_device = merged(ALL, microbatch_size=microbatch_size)
        return of_device(p, b, example_weights=w, direction=direction)

    specs = {"in_specs": (P(), P("data"), P("data"), P()), "out_specs": P()}
    mapped = jax.shard_map(on_each, mesh=mesh_of(data=4), **specs)
    close(jax.jit(mapped)(params(), batch(), jnp.asarray(WEIGHTS), DIRECTION), expected)


@pytest.mark.parametrize("case", [c for c in CASES if c.rng_argnums == ()], ids=lambda case: case.name)
def test_case(case):
    args = list(case.make_args(jnp.float64))
    skip_convolutions_that_fail(case.loss, *args)
    numbers = [n % len(args) for n in as_tuple(case.batch_argnums)]  # some count from the end
    for n in numbers:
        args[n] = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]]), args[n])
    stats = FEW | {"count": pg.Count()}
    stats_fn = pg.value_and_stats(case.loss, stats, **options(case))

    def on_each(*args):
        return pg.all_combine(stats, stats_fn(*args)[1], "data")

    specs = tuple(P("data") if n in numbers else P() for n in range(len(args)))
    mapped = jax.shard_map(on_each, mesh=mesh_of(data=5), in_specs=specs, out_specs=P())
    close(jax.jit(mapped)(*args), jax.jit(stats_fn)(*args)[1], rtol=1e-5, atol=1e-7)


def test_beside_automatic_axes():
    mesh = mesh_of(data=4, model=2)
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
    with jax.set_mesh(mesh):
        mapped = jax.jit(jax.shard_map(merged(REDUCED), **specs))
        out = mapped(laid_out(mesh, "tensor"), spread(mesh, batch()))
    close(out, jax.jit(pg.grad_stats(loss, REDUCED))(params(), batch()))


def test_around_a_call_that_spreads_its_examples():
    """One axis is the user's own, and the call divides its examples along another one."""
    stats = FEW | {"count": pg.Count()}

    def on_each(p, b):
        return pg.all_combine(stats, pg.grad_stats(loss, stats, spmd_axis_name="data")(p, b), "pod")

    specs = {"in_specs": (P(), P("pod")), "out_specs": P(), "axis_names": {"pod"}}
    with jax.set_mesh(mesh_of(pod=2, data=4)):
        out = jax.jit(jax.shard_map(on_each, **specs, check_vma=False))(params(), batch())
        with refused(pg.ArgumentError, "('data',)", "vary along 'pod'", "check_vma=False"):
            jax.eval_shape(jax.shard_map(on_each, **specs), params(), batch())
    close(out, jax.jit(pg.grad_stats(loss, stats))(params(), batch()))


def test_parameters_of_each_device():
    """An ensemble: every device has its own parameters, and all examples."""
    members = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params())

    def on_each(p, b):
        stats = pg.grad_stats(loss, FEW)(jax.tree.map(lambda x: x[0], p), b)
        return jax.tree.map(lambda x: x[None], stats)

    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    mapped = jax.shard_map(on_each, mesh=mesh_of(data=2), **specs)
    expected = jax.jit(jax.vmap(pg.grad_stats(loss, FEW), (0, None)))(members, batch())
    close(jax.jit(mapped)(members, batch()), expected)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_derivative(where):
    stats = {"square": pg.Mean(jnp.square), "variance": pg.Variance(), "mean": pg.Mean()}
    stats |= {"count": pg.Count()}

    def size(stats):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(stats))

    def on_each(p, b):
        of_all = lambda p: size(merged(stats)(p, b))  # noqa: E731
        return jax.grad(of_all)(p) if where == "inside" else of_all(p)

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = jax.shard_map(on_each, mesh=mesh_of(data=8), **specs)
    mapped = jax.jit(mapped if where == "inside" else jax.grad(mapped))
    expected = jax.grad(lambda p: size(pg.grad_stats(loss, stats)(p, batch())))
    close(mapped(params(), batch()), jax.jit(expected)(params()))


def test_collectives_in_the_loss_are_refused():
    def mixed(p, b):
        return lax.pmean(loss(p, b), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = jax.shard_map(merged({"mean": pg.Mean()}, mixed), mesh=mesh_of(data=8), **specs)
    with refused(pg.ArgumentError, "mesh axis 'data'", "mixed)", "check_vma=False"):
        jax.jit(mapped)(params(), batch())


def test_arrays_that_vary_are_arguments():
    def on_each(p, b):
        def closed_over(p, x):
            return loss(p, b | {"x": x})

        return pg.grad_stats(closed_over, pg.Mean())(p, b["x"][:1])

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    mapped = jax.shard_map(on_each, mesh=mesh_of(data=8), **specs)
    with refused(pg.ArgumentError, "closes over an array that varies", "shared_argnums"):
        jax.jit(mapped)(params(), jax.tree.map(lambda x: x[:8], batch()))


def test_a_custom_derivative_is_not_differentiated():
    @jax.custom_jvp
    def own(x):
        return jnp.tanh(x)

    own.defjvp(lambda x, dx: (own(*x), 2 * dx[0]))

    def with_own(p, b):
        return loss(p, b | {"x": own(b["x"])})

    def on_each(p, b):
        return jnp.sum(merged({"mean": pg.Mean(), "count": pg.Count()}, with_own)(p, b)["mean"]["w"])

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = jax.shard_map(on_each, mesh=mesh_of(data=8), **specs)
    expected = jnp.sum(jax.jit(pg.grad_stats(with_own, pg.Mean()))(params(), batch())["w"])
    close(jax.jit(mapped)(params(), batch()), expected)
    b = {name: x for name, x in batch().items() if name != "i"}
    of_floats = jax.grad(lambda b: mapped(params(), b | {"i": batch()["i"]}))
    with refused(pg.ArgumentError, "custom derivative", "with_own)", "check_vma=False"):
        jax.jit(of_floats)(b)
