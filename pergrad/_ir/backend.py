"""How fast each kind of device is: the rates from which the plan computes the price of a strategy.

The rates are rough on purpose. The prices that the plan compares differ by factors, not by percents.
They stand in `rates.json`, each kind of device with where its rates come from, "measured" or "assumed".
`pergrad bench --rates` measures the rates of the machine that it runs on, and writes such a file.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
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

    Two durations are in seconds: `loop_round` is what every round of a loop costs and `equation` what
    every equation costs, however small its arrays are.

    `example_axis` is the factor by which a program with an axis of examples takes longer than one
    without. `stream_size` is how many bytes the gradients made by one batched product may take; it is 0
    where products should not be batched. `working_set` is how many bytes the activations of one
    microbatch may take.

    The file leaves out the last three fields where they make no difference, which is if they are
    infinite.
    """

    name: str
    product_rate: float
    batched_rate: float
    convolution_rate: float
    memory_rate: float
    cache_rate: float
    cache_size: float
    example_axis: float
    loop_round: float
    equation: float
    stream_size: float
    working_set: float
    looped_convolution_rate: float = math.inf
    fresh_rate: float = math.inf
    kept_size: float = math.inf


def read_rates(text: str) -> dict[str, Backend]:
    """The kinds of devices in a file of rates, by name."""
    return {kind: Backend(name=kind, **entry["rates"]) for kind, entry in json.loads(text).items()}


BACKENDS = read_rates(importlib.resources.files("pergrad._ir").joinpath("rates.json").read_text("utf-8"))


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
