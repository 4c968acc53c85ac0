"""What statistics may cost on a GPU beside `jax.grad`, as XLA compiles them: a guard without a clock.

Programs are compiled for an H100. Memory is what the compiler sets aside, and the time is the roofline
of `pergrad bench --target gpu:h100`.

The compiler is in extra packages (`pip install "pergrad[gpu-aot]"`, 5.6 GB); without them these tests
are skipped. `make test-gpu` installs them and runs the tests, which CI does not.
"""

import importlib.util

import pytest

from tests.support import guards
from tests.support.guards import CLIPPED, MOMENTS, NORMS, PERCEPTRON, RECURRENT, SCANNED, UNROLLED, Limit

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="the compiler for GPUs is not installed",
)

LIMITS = {
    "unrolled: moments": Limit(UNROLLED, MOMENTS, None, 1.13, 0.73),
    "unrolled: norms": Limit(UNROLLED, NORMS, None, 1.02, 0.90),
    "scanned: moments": Limit(SCANNED, MOMENTS, None, 1.09, 0.65),
    "scanned: moments, one at a time": Limit(SCANNED, MOMENTS, 1, 3.90, 0.17),
    "scanned: clipped": Limit(SCANNED, CLIPPED, None, 1.60, 1.25),
    "recurrent: moments": Limit(RECURRENT, MOMENTS, None, 0.95, 3.13),
    "perceptron: moments": Limit(PERCEPTRON, MOMENTS, None, 1.46, 2.06),
}


@pytest.mark.parametrize("name", LIMITS)
def test_cost(name: str) -> None:
    guards.check(name, LIMITS[name], "gpu:h100")
