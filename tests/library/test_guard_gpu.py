"""What statistics may cost on a GPU beside `jax.grad`, as XLA compiles them: a guard without a clock.

Programs are compiled for an H100, which need not be there, and never run. Memory is what the compiler
sets aside, and the time is the roofline of `pergrad bench --target gpu:h100`. A limit stands a few
percent above what was found when it was written. Who makes something cheaper lowers it. The models are
those of `test_guard_tpu`, small enough to compile in seconds.

The compiler is in extra packages (`pip install "pergrad[gpu-aot]"`, 5.6 GB); without them these tests
are skipped. `make test-gpu` installs them and runs the tests, which CI does not.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import pergrad as pg
from pergrad.lab.bench import compilers, target
from pergrad.lab.bench.models import LSTM, MLP, Transformer
from tests.support import pages

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="the compiler for GPUs is not installed",
)

MOMENTS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)}
NORMS = {"norm": pg.Norm()}
CLIPPED = {"clipped": pg.ClippedMean(1.0)}

SIZES = {"batch": 8, "length": 512, "width": 512, "vocab": 8192, "compute": "bfloat16"}
UNROLLED = Transformer(layers=2, **SIZES)
SCANNED = Transformer(layers=4, scanned=True, **SIZES)
RECURRENT = LSTM(batch=32, length=64, width=512, vocab=1024, compute="bfloat16")
PERCEPTRON = MLP(batch=256, width=2048, layers=2, compute="bfloat16")


class Limit(NamedTuple):
    """At most so many seconds and temporary bytes, as multiples of those of `jax.grad`."""

    model: Any
    stats: Any
    microbatch_size: int | None
    seconds: float
    bytes: float


LIMITS = {
    "unrolled: moments": Limit(UNROLLED, MOMENTS, None, 1.13, 0.73),
    "unrolled: norms": Limit(UNROLLED, NORMS, None, 1.02, 0.90),
    "scanned: moments": Limit(SCANNED, MOMENTS, None, 1.09, 0.65),
    "scanned: moments, one at a time": Limit(SCANNED, MOMENTS, 1, 3.90, 0.17),
    "scanned: clipped": Limit(SCANNED, CLIPPED, None, 1.23, 2.30),
    "recurrent: moments": Limit(RECURRENT, MOMENTS, None, 0.95, 3.13),
    "perceptron: moments": Limit(PERCEPTRON, MOMENTS, None, 1.46, 2.06),
}


def arguments(model: Any) -> tuple[Any, Any]:
    return jax.eval_shape(lambda key: (model.init(key), model.sample(key)), jax.random.key(0))


@functools.cache
def plain(model: Any) -> target.Judged:
    return target.judge(jax.value_and_grad(model.loss), arguments(model), "gpu:h100")


@pytest.mark.parametrize("name", LIMITS)
def test_cost(name: str) -> None:
    limit = LIMITS[name]
    with pages.jax_as_for_users():
        compilers.use("gpu:h100")
        stats_fn = pg.value_and_stats(
            limit.model.loss, limit.stats, microbatch_size=limit.microbatch_size
        )
        found = target.judge(stats_fn, arguments(limit.model), "gpu:h100")
        floor = plain(limit.model)
    print(f"{name}: {found.seconds / floor.seconds:.3f} times as long as jax.grad")
    print(f"{name}: {found.temp_bytes / floor.temp_bytes:.3f} times the memory of jax.grad")
    assert found.seconds <= limit.seconds * floor.seconds
    assert found.temp_bytes <= limit.bytes * floor.temp_bytes
