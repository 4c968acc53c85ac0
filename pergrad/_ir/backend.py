"""What a kind of device can do, in rates that the plan prices strategies with.

The rates are rough on purpose: what they decide differs by factors, not by percents.
"""

from __future__ import annotations

import dataclasses
import math

import jax


@dataclasses.dataclass(frozen=True)
class Backend:
    """What the plan knows about a kind of device. Rates are per second, sizes in bytes.

    `convolution_rate` is that of operations in a convolution that sums up gradients of kernels.
    `fresh_rate` is that of memory that the operating system has to provide first, which it has for
    programs that take more than `kept_size`. `equation` is what one more equation takes, however small.
    `looped_convolution_rate` is that of convolutions in a loop, infinite where a loop makes no
    difference, and `example_axis` the factor by which a program with an axis of examples takes longer
    than one without. `stream_size` is how much the gradients of one batched product may take; 0 where
    products should not be batched.
    """

    name: str
    product_rate: float
    batched_rate: float
    convolution_rate: float
    looped_convolution_rate: float
    memory_rate: float
    cache_rate: float
    cache_size: float
    fresh_rate: float
    kept_size: float
    example_axis: float
    loop_step: float
    equation: float
    stream_size: float
    working_set: float


BACKENDS = {
    # Measured on two cores. A batched product is slow there, and temporary memory that is larger than
    # what malloc keeps is paged in again for every run of a program.
    "cpu": Backend(
        name="cpu",
        product_rate=2e11,
        batched_rate=1e10,
        looped_convolution_rate=3e9,
        convolution_rate=3e10,  # 0.9e10 to 7e10, for kernels of the benchmark's CNN and ResNet
        memory_rate=2e10,
        cache_rate=6e10,
        cache_size=6.4e7,
        fresh_rate=4e9,
        kept_size=2**25,
        example_axis=1.25,
        loop_step=1e-5,
        equation=1e-6,
        stream_size=0,
        working_set=1e10,
    ),
    # Not measured. Batched products run at the full rate; loops should have few and large steps.
    "gpu": Backend(
        name="gpu",
        product_rate=5e13,
        batched_rate=5e13,
        convolution_rate=5e13,
        looped_convolution_rate=math.inf,
        memory_rate=1e12,
        cache_rate=1e12,
        cache_size=4e7,
        fresh_rate=math.inf,
        kept_size=math.inf,
        example_axis=1.25,
        loop_step=2e-5,
        equation=5e-6,
        stream_size=2.56e8,
        working_set=1e10,
    ),
}


BACKENDS["tpu"] = dataclasses.replace(
    BACKENDS["gpu"], name="tpu", product_rate=1e14, batched_rate=1e14, convolution_rate=1e14
)


# Of an accelerator's memory, what the activations of a microbatch and the gradients of one batched
# product may take.
WORKING_SHARE = 0.4


STREAM_SHARE = 0.01


def backend() -> Backend:
    """The kind of device that programs run on by default, with its memory if it tells."""
    kind = BACKENDS.get(jax.default_backend(), BACKENDS["gpu"])
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if not kind.stream_size or not memory:
        return kind
    return dataclasses.replace(
        kind,
        working_set=WORKING_SHARE * memory,
        stream_size=min(kind.stream_size, STREAM_SHARE * memory),
    )
