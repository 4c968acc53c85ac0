"""How fast each kind of device is: the rates from which the plan computes the price of a strategy.

The rates are rough on purpose. The prices that the plan compares differ by factors, not by percents.
"""

from __future__ import annotations

import dataclasses
import math

import jax


@dataclasses.dataclass(frozen=True)
class Backend:
    """What the plan knows about a kind of device.

    Four rates are in floating-point operations per second: `product_rate` of a matrix product,
    `batched_rate` of a batch of matrix products, `convolution_rate` of a convolution that sums up the
    gradients of a kernel over examples, and `looped_convolution_rate` of a convolution in a loop
    (infinite if a loop makes convolutions no slower).

    Three rates are in bytes per second: `memory_rate` of arrays in memory, `cache_rate` of arrays that
    fit into the cache, which holds `cache_size` bytes, and `fresh_rate` of memory that the operating
    system has to provide first. A program needs such memory if it takes more than the `kept_size` bytes
    that a process keeps from one run to the next.

    Two durations are in seconds: `loop_step` is what every round of a loop costs and `equation` what
    every equation costs, however small its arrays are.

    `example_axis` is the factor by which a program with an axis of examples takes longer than one
    without. `stream_size` is how many bytes the gradients made by one batched product may take; it is 0
    where products should not be batched. `working_set` is how many bytes the activations of one
    microbatch may take.
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
    # Measured on two cores. A batched product is slow there. If a program takes more temporary memory
    # than malloc keeps, the memory is paged in again for every run.
    "cpu": Backend(
        name="cpu",
        product_rate=2e11,
        batched_rate=1e10,
        looped_convolution_rate=3e9,
        convolution_rate=3e10,  # measured: 0.9e10 to 7e10, for kernels of the benchmark's CNN and ResNet
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
    # Not measured. Batched products run at the full rate; loops should have few and large rounds.
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


# The share of an accelerator's memory that the activations of a microbatch may take.
WORKING_SHARE = 0.4


# The share of an accelerator's memory that the gradients made by one batched product may take.
STREAM_SHARE = 0.01


def backend() -> Backend:
    """The kind of device that programs run on by default.

    If an accelerator says how much memory it has, `working_set` and `stream_size` follow from that.
    """
    kind = BACKENDS.get(jax.default_backend(), BACKENDS["gpu"])
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if not kind.stream_size or not memory:
        return kind
    return dataclasses.replace(
        kind,
        working_set=WORKING_SHARE * memory,
        stream_size=min(kind.stream_size, STREAM_SHARE * memory),
    )
