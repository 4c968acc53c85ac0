"""What statistics may cost on a TPU beside `jax.grad`, as its compiler has it: a guard without a clock.

Programs are compiled for a v5e, which need not be there, and never run. The time is that of
`pergrad bench --target tpu:v5e`, and memory is what the compiler sets aside apart from the chip's vector
memory. A limit stands a few percent above what was found when it was written. Who makes something
cheaper lowers it. The models are small, so that they compile in seconds. Much of what they make fits
into the vector memory, and large models have other ratios (docs/benchmarks.md).

The compiler is in an extra package (`pip install "pergrad[tpu-aot]"`); without it these tests are
skipped. `make test-tpu` installs it and runs them.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import pergrad as pg
from pergrad.lab.bench import compilers, sharded, target
from pergrad.lab.bench.models import LSTM, MLP, Transformer
from tests.support import pages

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the compiler for TPUs is not installed"
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
    """At most so many seconds and temporary bytes, as multiples of those of `jax.grad`.

    `bytes` is None if `jax.grad` needs no memory apart from the vector memory.
    """

    model: Any
    stats: Any
    microbatch_size: int | None
    seconds: float
    bytes: float | None


LIMITS = {
    "unrolled: moments": Limit(UNROLLED, MOMENTS, None, 0.95, 1.26),
    "unrolled: norms": Limit(UNROLLED, NORMS, None, 1.12, 1.30),
    "scanned: moments": Limit(SCANNED, MOMENTS, None, 1.08, 0.74),
    "scanned: moments, one at a time": Limit(SCANNED, MOMENTS, 1, 1.55, 0.44),
    "scanned: clipped, one at a time": Limit(SCANNED, CLIPPED, 1, 1.32, 0.16),
    "recurrent: moments": Limit(RECURRENT, MOMENTS, None, 1.04, None),
    "perceptron: moments": Limit(PERCEPTRON, MOMENTS, None, 1.48, None),
}


def arguments(model: Any) -> tuple[Any, Any]:
    return jax.eval_shape(lambda key: (model.init(key), model.sample(key)), jax.random.key(0))


@functools.cache
def plain(model: Any) -> target.Judged:
    return target.judge(jax.value_and_grad(model.loss), arguments(model), "tpu:v5e")


@pytest.mark.parametrize("name", LIMITS)
def test_cost(name: str) -> None:
    limit = LIMITS[name]
    with pages.jax_as_for_users():
        compilers.use("tpu:v5e")
        stats_fn = pg.value_and_stats(
            limit.model.loss, limit.stats, microbatch_size=limit.microbatch_size
        )
        found = target.judge(stats_fn, arguments(limit.model), "tpu:v5e")
        floor = plain(limit.model)
    print(f"{name}: {found.seconds / floor.seconds:.3f} times as long as jax.grad")
    assert found.seconds <= limit.seconds * floor.seconds
    if limit.bytes is None:
        assert floor.temp_bytes == 0
    else:
        print(f"{name}: {found.temp_bytes / floor.temp_bytes:.3f} times the memory of jax.grad")
        assert found.temp_bytes <= limit.bytes * floor.temp_bytes


def test_sharded_parameters() -> None:
    """On four chips one layer is gathered at a time, and nothing with an example axis."""
    with pages.jax_as_for_users():
        compilers.use("tpu:v5e")
        model = sharded.MODELS["3M"]
        needs = sharded.build(sharded.place(model, "v5e:2x2"), "moments")
    largest = needs.largest_gathered
    assert largest is not None
    assert largest.elements <= max(4 * model.width, model.vocab) * model.width
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments(model)[0]))
    assert needs.result_bytes <= 1.1 * 2 * whole / 4  # two statistics, in four shards
