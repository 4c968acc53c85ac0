"""What statistics may cost on a TPU beside `jax.grad`, as its compiler has it: a guard without a clock.

Programs are compiled for a v5e. The time is that of `pergrad bench --target tpu:v5e`, and memory is what
the compiler sets aside apart from the chip's vector memory. Much of what these small models make fits
into the vector memory, and large models have other ratios (docs/benchmarks.md).

The compiler is in an extra package (`pip install "pergrad[tpu-aot]"`); without it these tests are
skipped. `make test-tpu` installs it and runs them.
"""

import dataclasses
import importlib.util

import jax
import pytest

from pergrad.lab.bench import compilers, sharded
from pergrad.lab.bench.compiled.hlo import Array
from tests.support import guards, pages
from tests.support.guards import CLIPPED, MOMENTS, NORMS, PERCEPTRON, RECURRENT, SCANNED, UNROLLED, Limit

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the compiler for TPUs is not installed"
)

LIMITS = {
    "unrolled: moments": Limit(UNROLLED, MOMENTS, None, 0.95, 1.26),
    "unrolled: norms": Limit(UNROLLED, NORMS, None, 1.12, 1.30),
    "scanned: moments": Limit(SCANNED, MOMENTS, None, 1.08, 0.74),
    "scanned: moments, one at a time": Limit(SCANNED, MOMENTS, 1, 1.55, 0.44),
    "scanned: clipped, one at a time": Limit(SCANNED, CLIPPED, 1, 1.32, 0.16),
    "recurrent: moments": Limit(RECURRENT, MOMENTS, None, 1.04, None),
    "perceptron: moments": Limit(PERCEPTRON, MOMENTS, None, 1.48, None),
}


@pytest.mark.parametrize("name", LIMITS)
def test_cost(name: str) -> None:
    guards.check(name, LIMITS[name], "tpu:v5e")


def test_sharded_parameters() -> None:
    """On four chips one layer is gathered at a time, and nothing with an example axis.

    No axis of a parameter is divisible by the number of examples or of tokens that a chip has.
    """
    with pages.jax_as_for_users():
        compilers.use("tpu:v5e")
        model = dataclasses.replace(sharded.MODELS["3M"], batch=36, length=72)
        placed = sharded.place(model, "v5e:2x2")
        plain, needs = (sharded.build(placed, name) for name in (sharded.GRAD, "moments"))
    assert needs.gathered
    assert all(sharded.is_of_a_parameter(array, placed) for array in needs.gathered), needs.gathered
    activations = Array("bf16", (model.batch // 4, model.length, model.width), 0)
    assert not sharded.is_of_a_parameter(activations, placed)
    assert needs.gathered[0].elements <= max(4 * model.width, model.vocab) * model.width
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(guards.arguments(model)[0]))
    assert needs.result_bytes <= 1.1 * 2 * whole / 4  # two statistics, in four shards
    assert needs.temp_bytes <= 1.1 * plain.temp_bytes + needs.result_bytes
    assert needs.sent_bytes <= 2 * plain.sent_bytes
    assert needs.async_bytes > 0
