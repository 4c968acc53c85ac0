"""The rates of this machine, which the plan prices strategies with, measured by small programs.

Each rate has a program that does a known amount of work and hardly anything else. All programs take
turns, and the fastest run of each counts, as for every other number of the benchmark. Sizes and a factor
that was measured on whole models cannot be read off a small program. They are taken over from the
package's own file.

The rates of a TPU that is not there come from some of these programs, in larger sizes. They are compiled
for it, and the time is that of `target`, the compiler's estimate. It leaves out the start of a round, so
it cannot say what a round of a loop costs.

The result is a file like the package's own, `pergrad/_ir/rates.json`, in which the rates of one kind of
device are replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pergrad.lab import timing
from pergrad.lab.bench import price
from pergrad.lab.bench.compiled.chips import CHIPS
from pergrad.lab.bench.target import judge
from pergrad.lab.config import TargetName
from pergrad.lab.errors import LabError
from pergrad.lab.run import records
from pergrad.lab.timing import Say, to_stderr

TAKEN_OVER = (
    "cache_size",
    "kept_size",
    "example_axis",
    "stream_size",
    "memory",
    "copies_beside",
    "keeps_states",
    "stores_less",
)
ABOUT = (
    "Measured by `pergrad bench --rates`. No small program shows these, which are taken over from the "
    f"file of the package: {', '.join(TAKEN_OVER)}."
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the programs are. They have to be large enough for the rate not to grow any more."""

    product: int = 2048
    """Rows and columns of the matrices of a product."""
    examples: int = 32
    """Of batched products, and of convolutions."""
    positions: int = 64
    """The rows that a batched product sums over."""
    width: int = 256
    """Columns of the matrices of a batched product."""
    image: int = 32
    """Height and width of the images of a convolution."""
    channels: int = 32
    """Channels of the images, before and after the convolution."""
    memory: int = 2**27
    """Bytes of an array that no cache holds, and that a process does not keep."""
    cache: int = 2**22
    """Bytes of an array that a cache holds."""
    moved: int = 2**33
    """Bytes that are read and written altogether, to measure memory and cache."""
    rounds: int = 2000
    """Rounds of a loop that does hardly anything."""
    equations: int = 500
    """Equations that do hardly anything."""
    dtype: Any = jnp.float32
    """Of the operands of products and convolutions."""


# For a TPU: products as large as those of a large transformer, and an array that its vector memory does
# not hold.
OF_A_CHIP = Sizes(
    product=4096,
    examples=64,
    channels=256,
    memory=2**28,
    dtype=jnp.bfloat16,
)
BY_COMPILER = ("product_rate", "convolution_rate", "memory_rate")
ABOUT_COMPILED = (
    "By XLA's compiler for this chip (`pergrad bench --rates --target`): nothing has run on it. "
    f"{', '.join(BY_COMPILER)} come from it. A batch of products has the rate of one product: what it "
    "takes longer is the traffic of its result, which counts apart. The compiler has no estimates for "
    "sorts and scatters, nor for the start of a round of a loop, which is assumed to cost one "
    "microsecond. An equation is assumed to cost 0.2 microseconds, since XLA fuses most equations into "
    "others. The cache is the chip's vector memory, and its rate is that of a copy there."
)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A program, its arguments, and how much it does: operations, bytes, rounds or equations."""

    program: Callable[..., Any]
    args: tuple[Any, ...]
    amount: float
    is_rate: bool = True
    """Whether the result is the amount per second; otherwise it is the seconds for one."""

    def result(self, seconds: float) -> float:
        return self.amount / seconds if self.is_rate else seconds / self.amount


def probes(sizes: Sizes) -> dict[str, Probe]:
    """The programs, by the names of what they measure."""
    return {
        **_of_products(sizes),
        **_of_convolutions(sizes),
        "memory_rate": _passes(sizes.memory, sizes.moved),
        "cache_rate": _passes(sizes.cache, sizes.moved),
        "fresh_rate": _new_memory(sizes.memory),
        "loop_round": _small_rounds(sizes.rounds),
        "equation": _small_equations(sizes.equations),
    }


def _of_products(sizes: Sizes) -> dict[str, Probe]:
    n, b, t, d = sizes.product, sizes.examples, sizes.positions, sizes.width
    batched = functools.partial(jnp.einsum, "bti,btj->bij")
    return {
        "product_rate": Probe(jnp.matmul, (_ones(sizes, n, n),) * 2, 2 * n**3),
        "batched_rate": Probe(batched, (_ones(sizes, b, t, d),) * 2, 2 * b * t * d * d),
    }


def _of_convolutions(sizes: Sizes) -> dict[str, Probe]:
    """The gradient of a kernel, summed over all examples; and the gradients of images, in a loop.

    XLA runs the convolution that gives the gradient of an image more slowly in a loop on the CPU, by a
    factor that depends on the sizes; the convolution of the forward pass is as fast as elsewhere.
    """
    b, n, c = sizes.examples, sizes.image, sizes.channels
    images, kernel = _ones(sizes, b, n, n, c), _ones(sizes, 3, 3, c, c)

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)

    def of_kernel(x: jax.Array, ct: jax.Array) -> jax.Array:
        (found,) = jax.linear_transpose(lambda kernel: convolve(x, kernel), kernel)(ct)
        return found

    def of_image(ct: jax.Array, kernel: jax.Array) -> jax.Array:
        (found,) = jax.linear_transpose(lambda x: convolve(x, kernel), ct)(ct)
        return found

    def in_a_loop(cts: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.map(lambda ct: of_image(ct[None], kernel), cts)

    # A position at an edge meets two of the three places of the kernel in that direction.
    meetings = (3 * n - 2) ** 2
    operations = 2 * b * meetings * c * c
    return {
        "convolution_rate": Probe(of_kernel, (images, images), operations),
        "looped_convolution_rate": Probe(in_a_loop, (images, kernel), operations),
    }


def _passes(size: int, moved: int) -> Probe:
    """Passes over an array, each of which reads and writes all of it in place."""
    passes = max(1, moved // (2 * size))

    def program(x: jax.Array, factor: jax.Array) -> jax.Array:
        return lax.fori_loop(0, passes, lambda _, x: x * factor, x)

    return Probe(
        program, (jnp.ones(size // 4, jnp.float32), jnp.ones((), jnp.float32)), 2 * size * passes
    )


def _new_memory(size: int) -> Probe:
    """A result that is written to memory which the operating system has to provide."""
    return Probe(lambda x: jnp.broadcast_to(x, (size // 4,)), (jnp.ones((), jnp.float32),), size)


def _small_rounds(rounds: int) -> Probe:
    """A loop as it runs over examples: form a gradient, add it and its square up."""

    def body(sums: tuple[jax.Array, jax.Array], factors: tuple[jax.Array, jax.Array]) -> Any:
        x, ct = factors
        g = x.T @ ct
        return (sums[0] + g, sums[1] + g * g), None

    def program(xs: jax.Array, cts: jax.Array) -> Any:
        zeros = jnp.zeros((8, 8), jnp.float32)
        return lax.scan(body, (zeros, zeros), (xs, cts))[0]

    factors = jnp.ones((rounds, 8, 8), jnp.float32)
    return Probe(program, (factors, factors), rounds, is_rate=False)


def _small_equations(equations: int) -> Probe:
    """Products one after the other, which XLA cannot make one of."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(equations):
            x = x @ w
        return x

    eye = jnp.eye(8, dtype=jnp.float32)
    return Probe(program, (jnp.ones_like(eye), eye), equations, is_rate=False)


def _ones(sizes: Sizes, *shape: int) -> jax.Array:
    return jnp.ones(shape, sizes.dtype)


def measure(
    sizes: Sizes | None = None, *, rounds: int = 10, budget: float = 3.0, say: Say = to_stderr
) -> dict[str, float]:
    """The rates of the device that programs run on by default, by name."""
    executables = {}
    made = probes(sizes or Sizes())
    for index, (name, probe) in enumerate(made.items(), 1):
        say(f"{index} of {len(made)}: {name}\n")
        executable = timing.compile_afresh(name, probe.program, *probe.args, say=say)
        run = functools.partial(executable.run, *probe.args)
        executables[name] = dataclasses.replace(executable, run=run)
    results = timing.time_all(executables, rounds=rounds, budget=budget, say=say)
    return {result.name: made[result.name].result(result.minimum) for result in results}


def compiled(target: TargetName, sizes: Sizes = OF_A_CHIP, *, say: Say = to_stderr) -> dict[str, float]:
    """The rates of a chip as its compiler has them, by name."""
    if not CHIPS[target].has_estimates:
        raise LabError(f"The compiler for {target} makes no estimates of time, so it has no rates.")
    found, made = {}, probes(sizes)
    for index, name in enumerate(BY_COMPILER, 1):
        say(f"{index} of {len(BY_COMPILER)}: {name}\n")
        probe = made[name]
        found[name] = probe.result(judge(probe.program, probe.args, target).seconds)
    return found


def of_package() -> dict[str, Any]:
    """The package's own file of rates: what the plan prices with."""
    file = importlib.resources.files("pergrad").joinpath("_ir", "rates.json")
    return json.loads(file.read_text("utf-8"))


def name_of_today(known: Mapping[str, Any]) -> str:
    """The name in a file of rates of the device that programs run on by default.

    A device that the file does not have counts as the first of its platform, or as the first GPU.
    """
    kind = jax.local_devices()[0].device_kind
    named = [name for name, entry in known.items() if kind in entry["device_kinds"]]
    platforms = jax.default_backend(), "gpu"
    relatives = [name for platform in platforms for name in known if name.startswith(platform)]
    return (named + relatives)[0]


def with_measured(known: Mapping[str, Any], measured: Mapping[str, float]) -> dict[str, Any]:
    """A file of rates with those that were measured, and where they come from."""
    name = name_of_today(known)
    kept = {n: known[name]["rates"][n] for n in TAKEN_OVER if n in known[name]["rates"]}
    source = {"source": "measured", "about": ABOUT, "machine": price.machine()}
    return _with_rates(known, name, source, {**measured, **kept})


def with_compiled(
    known: Mapping[str, Any], found: Mapping[str, float], target: TargetName
) -> dict[str, Any]:
    """A file of rates with those of a chip's compiler, and where they come from."""
    source = {"source": "compiled", "about": ABOUT_COMPILED}
    batched = {"batched_rate": found["product_rate"]}
    return _with_rates(known, target, source, {**known[target]["rates"], **found, **batched})


def _with_rates(
    known: Mapping[str, Any], name: str, source: Mapping[str, Any], rates: Mapping[str, float]
) -> dict[str, Any]:
    kinds, versions = known[name]["device_kinds"], records.versions()
    return {**known, name: {"device_kinds": kinds, **source, "versions": versions, "rates": rates}}


def table(today: Mapping[str, float], found: Mapping[str, float]) -> str:
    """Name, today's value, the value that was found, and how many times today's that is."""
    rows = []
    for name, value in found.items():
        before = today.get(name, math.inf)
        rows.append([name, f"{before:.3g}", f"{value:.3g}", f"{value / before:.2f}"])
    for name in (*TAKEN_OVER, *(today.keys() - found.keys() - {*TAKEN_OVER})):
        value = today.get(name, math.inf)
        rows.append([name, str(value) if isinstance(value, bool) else f"{value:.3g}", "taken over", ""])
    return timing.table(["rate", "today", "found", "ratio"], rows)
