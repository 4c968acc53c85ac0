"""What guards on accelerators share: small models, and a test of what statistics cost on a chip.

Programs are compiled for the chip, which need not be there, and never run. A limit stands a few percent
above what was found when it was written. Who makes something cheaper lowers it. The models are small, so
that they compile in seconds.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pergrad as pg
from pergrad.lab.bench import compilers, target
from pergrad.lab.bench.models import LSTM, MLP, Transformer
from pergrad.lab.config import TargetName
from tests.support import pages

MOMENTS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)}
NORMS = {"norm": pg.Norm()}
CLIPPED = {"clipped": pg.ClippedMean(1.0)}
VARIANCE = {"mean": pg.Mean(), "variance": pg.Variance()}

SIZES = {"batch": 8, "length": 512, "width": 512, "vocab": 8192, "compute": "bfloat16"}
UNROLLED = Transformer(layers=2, **SIZES)
SCANNED = Transformer(layers=4, scanned=True, **SIZES)
RECURRENT = LSTM(batch=32, length=64, width=512, vocab=1024, compute="bfloat16")
PERCEPTRON = MLP(batch=256, width=2048, layers=2, compute="bfloat16")


class Limit(NamedTuple):
    """At most so many seconds and temporary bytes, as multiples of those of `jax.grad`.

    `bytes` is None if `jax.grad` needs no memory apart from the chip's vector memory.
    """

    model: Any
    stats: Any
    microbatch_size: int | None
    seconds: float
    bytes: float | None


def arguments(model: Any) -> tuple[Any, Any]:
    return jax.eval_shape(lambda key: (model.init(key), model.sample(key)), jax.random.key(0))


@functools.cache
def plain(model: Any, chip: TargetName) -> target.Judged:
    return target.judge(jax.value_and_grad(model.loss), arguments(model), chip)


def check(name: str, limit: Limit, chip: TargetName) -> None:
    """Compiles the statistics and `jax.grad` for the chip, and holds the ratios to their limits."""
    with pages.jax_as_for_users():
        compilers.use(chip)
        stats_fn = pg.value_and_stats(
            limit.model.loss, limit.stats, microbatch_size=limit.microbatch_size
        )
        found = target.judge(stats_fn, arguments(limit.model), chip)
        floor = plain(limit.model, chip)
    print(f"{name}: {found.seconds / floor.seconds:.3f} times as long as jax.grad")
    assert found.seconds <= limit.seconds * floor.seconds
    if limit.bytes is None:
        assert floor.temp_bytes == 0
    else:
        print(f"{name}: {found.temp_bytes / floor.temp_bytes:.3f} times the memory of jax.grad")
        assert found.temp_bytes <= limit.bytes * floor.temp_bytes
