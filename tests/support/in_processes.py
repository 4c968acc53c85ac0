"""What each of two processes with two devices runs; `test_processes.py` starts them.

    python -m tests.support.in_processes ADDRESS PROCESS

Each has its own half of the examples, and compares its part of the statistics of all with what one
device makes of the whole batch. Then the second one dies, and the first does not know.
"""

import functools
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pergrad as pg

EXAMPLES, PADDED = 13, 16
STATS = {
    "count": pg.Count(),
    "mean": pg.Mean(),
    "square": pg.Mean(jnp.square),
    "variance": pg.Variance(),
    "clipped": pg.ClippedMean(0.5),
    "largest": pg.Fold(jnp.zeros_like, lambda s, g: jnp.maximum(s, jnp.abs(g)), merge=jnp.maximum),
    "norm": pg.Norm(),
}


def loss(p, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ p["w"]) @ p["v"]))


def arguments():
    """Parameters and a batch, filled up with what must not count."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 12)), "v": rng.normal(size=(12, 3))}
    batch = rng.normal(size=(PADDED, 4, 8))
    batch[EXAMPLES:] = np.nan
    return params, batch


def sharded(mesh, params, batch, process):
    """Parameters sharded as in FSDP; of the batch every process gives its own half."""
    everything = NamedSharding(mesh, P("data"))
    params = {
        name: jax.make_array_from_callback(x.shape, everything, lambda index, x=x: x[index])
        for name, x in params.items()
    }
    half = slice(process * PADDED // 2, (process + 1) * PADDED // 2)
    weights = np.r_[np.ones(EXAMPLES), np.zeros(PADDED - EXAMPLES)]
    own = [jax.make_array_from_process_local_data(everything, x[half]) for x in (batch, weights)]
    return params, *own


def assert_same(result, expected):
    """The parts that are here are those of what one device has."""
    for x, whole in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        for shard in x.addressable_shards:
            # Of what has an example axis `whole` has fewer, and the slice is shorter.
            part = np.asarray(whole)[shard.index]
            here = np.asarray(shard.data)
            np.testing.assert_allclose(here[: len(part)] if part.ndim else here, part, rtol=1e-10)


def main(address: str, process: int) -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, 2, process, initialization_timeout=60, heartbeat_timeout_seconds=10
    )
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params, batch = arguments()
    expected = jax.jit(pg.value_and_stats(loss, STATS))(params, batch[:EXAMPLES])

    p, b, weights = sharded(mesh, params, batch, process)
    make = functools.partial(pg.value_and_stats, loss, STATS, spmd_axis_name="data")
    for stats_fn in (jax.jit(make()), jax.jit(make(param_specs=P("data")))):
        result = stats_fn(p, b, example_weights=weights)
        assert_same(result, expected)
        assert result[1]["variance"]["w"].sharding == p["w"].sharding
        assert not result[1]["norm"].is_fully_addressable
    print("same statistics", flush=True)

    if process == 1:
        time.sleep(1)  # the first has finished, too
        os._exit(7)
    while True:
        jax.block_until_ready(stats_fn(p, b, example_weights=weights))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
