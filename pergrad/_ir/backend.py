"""How fast each kind of device is: the rates from which the plan computes the price of a strategy.

The rates are rough on purpose. The prices that the plan compares differ by factors, not by percents.
They stand in `rates.json`, each kind of device with where its rates come from: "measured", "compiled"
(estimates of XLA's compiler for the device) or "assumed". `pergrad bench --rates` measures the rates of
the machine that it runs on, and writes such a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import json
import math
from collections.abc import Iterator

import jax

from pergrad._errors import ArgumentError


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
    where products should not be batched. `memory` is how many bytes the device has. `copies_beside` says
    whether copies between memory and cache run beside products, as on a TPU, whose compiler plans them.
    `keeps_states` says whether the states of a stream stay in the cache from one example to the next.
    `stores_less` says whether XLA stores less than on other devices, as `counts` has it.

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
    memory: float
    copies_beside: bool
    keeps_states: bool
    stores_less: bool
    looped_convolution_rate: float = math.inf
    fresh_rate: float = math.inf
    kept_size: float = math.inf

    @property
    def platform(self) -> str:
        """JAX's word for devices of this kind and their relatives: "cpu", "gpu" or "tpu"."""
        return self.name.partition(":")[0]

    @property
    def batches_products(self) -> bool:
        """Whether one batched product is as fast as many products one after the other."""
        return self.stream_size > 0

    @property
    def working_set(self) -> float:
        """How many bytes the activations of a microbatch may take."""
        return WORKING_SHARE * self.memory


# The share of a device's memory that the activations of a microbatch may take.
WORKING_SHARE = 0.4


# The share of an accelerator's memory that the gradients made by one batched product may take.
STREAM_SHARE = 0.01


def read_rates(text: str) -> dict[str, Backend]:
    """The kinds of devices in a file of rates, by name."""
    return {name: Backend(name=name, **entry["rates"]) for name, entry in json.loads(text).items()}


_FILE = importlib.resources.files("pergrad._ir").joinpath("rates.json").read_text("utf-8")
BACKENDS = read_rates(_FILE)
# What JAX calls a device, and the name that it has here.
_BY_DEVICE_KIND = {
    kind: name for name, entry in json.loads(_FILE).items() for kind in entry["device_kinds"]
}
# The name of the device that `plan_for` has set. A function that was compiled for one device is compiled
# again for another, since the value of this context is part of what `jax.jit` looks programs up by.
_planned_for = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def plan_for(device: str) -> Iterator[None]:
    """Within this context, statistics are planned for another device than the one that JAX runs on.

    `device` is "cpu", "gpu:h100", "tpu:v5e", "tpu:v5p" or "tpu:v6e". The context changes how statistics
    are computed, and not what they are: which strategy each parameter gets, and how many examples run at
    a time with `microbatch_size="auto"`. Use it to see the plan that a run on that device would have, or
    to compile for a device that is not there.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> def loss(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> with pg.plan_for("tpu:v5e"):
    ...     plan = pg.explain(loss, pg.Mean(jnp.square))(jnp.zeros((3, 2)), jnp.ones((8, 3)))
    >>> plan.backend
    'tpu:v5e'
    """
    if device not in BACKENDS:
        raise ArgumentError(f"plan_for knows {', '.join(BACKENDS)}, and not {device!r}.")
    with _planned_for(device):
        yield


def platform() -> str:
    """The platform that programs are compiled for: that of `plan_for`, or of JAX's default device."""
    return BACKENDS[_planned_for.value].platform if _planned_for.value else jax.default_backend()


def backend() -> Backend:
    """The kind of device that programs are planned for: that of `plan_for`, or JAX's default device.

    A device that the file of rates does not have counts as the first of its platform there, and one of
    an unknown platform as a GPU. If an accelerator says how much memory it has, that counts.
    """
    if _planned_for.value:
        return BACKENDS[_planned_for.value]
    device = jax.local_devices()[0]
    relatives = [kind for kind in BACKENDS.values() if kind.platform == jax.default_backend()]
    relatives += [kind for kind in BACKENDS.values() if kind.platform == "gpu"]
    name = _BY_DEVICE_KIND.get(device.device_kind, relatives[0].name)
    kind = BACKENDS[name]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    if kind.platform == "cpu" or not memory:
        return kind
    return dataclasses.replace(
        kind, memory=memory, stream_size=min(kind.stream_size, STREAM_SHARE * memory)
    )
