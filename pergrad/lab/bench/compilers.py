"""XLA's compilers for chips, which work on machines without the chip.

Each compiler is in packages of its own, which an extra of pergrad's brings. It is told what the chip is
like. It gives the text of the compiled program and says how much memory the program needs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pergrad as pg
from pergrad.lab.bench.compiled.chips import CHIPS
from pergrad.lab.config import TargetName
from pergrad.lab.errors import LabError


@dataclass(frozen=True)
class Compiler:
    """The compiler for the chips of one platform, which XLA calls `platform`.

    `package` has to be installed, and pergrad's extra `extra` brings it. `environment` are variables
    that keep the compiler quiet and from looking for chips. `refuses_large` says whether a program that
    does not fit into the chip's memory is an error.
    """

    platform: str
    chips: str
    package: str
    extra: str
    environment: Mapping[str, str]
    refuses_large: bool

    @property
    def version(self) -> dict[str, str]:
        return {self.package: importlib.metadata.version(self.package)}


COMPILERS = {
    "tpu": Compiler(
        platform="tpu",
        chips="TPUs",
        package="libtpu",
        extra="tpu-aot",
        environment={
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
            "TPU_MIN_LOG_LEVEL": "3",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        refuses_large=True,
    ),
    "gpu": Compiler(
        platform="cuda",
        chips="GPUs",
        package="jax_cuda12_plugin",
        extra="gpu-aot",
        environment={"TF_CPP_MIN_LOG_LEVEL": "3"},
        refuses_large=False,
    ),
}


def compiler_of(target: TargetName) -> Compiler:
    return COMPILERS[target.partition(":")[0]]


def is_installed(target: TargetName) -> bool:
    return importlib.util.find_spec(compiler_of(target).package) is not None


def use(target: TargetName) -> None:
    """Prepares this process; raises a `LabError` if the compiler is not installed.

    JAX is kept on the CPU, which has nothing to do but trace: otherwise it would look for a chip.
    """
    compiler = compiler_of(target)
    if not is_installed(target):
        raise LabError(
            f"--target {target} needs the compiler for {compiler.chips}: "
            f"pip install 'pergrad[{compiler.extra}]'."
        )
    for name, value in compiler.environment.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


@functools.cache
def _place(target: TargetName) -> NamedSharding:
    """One chip, as the place of a program's arguments."""
    described = topologies.get_topology_desc(
        platform=compiler_of(target).platform, **CHIPS[target].topology()
    )
    return NamedSharding(Mesh(np.array(described.devices[:1]), ("chip",)), PartitionSpec())


@dataclass(frozen=True)
class Built:
    """A program as it was traced and compiled, and how long that took."""

    jaxpr: Jaxpr
    text: str
    temp_bytes: float
    """What the compiler sets aside for intermediate results."""
    peak_bytes: float
    """Parameters, batch, results and intermediate results together."""
    lower_seconds: float
    compile_seconds: float


def build(candidate: Callable[..., Any], args: tuple[Any, ...], target: TargetName) -> Built:
    """Compiles a function of abstract arguments for a target, for which pergrad plans in it.

    Raises `OutOfMemory` if the program does not fit into the memory of the chip.
    """
    compiler, place = compiler_of(target), _place(target)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    jax.clear_caches()
    start = time.perf_counter()
    with pg.plan_for(target):
        traced = jax.jit(candidate).trace(*args)
        # JAX would look for a GPU on this machine if it were not told the platform.
        lowered = traced.lower(lowering_platforms=(compiler.platform,))
    middle = time.perf_counter()
    with full_explained():
        compiled = lowered.compile()
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    assert memory is not None
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak, there = whole + memory.temp_size_in_bytes, CHIPS[target].memory
    if peak > there and not compiler.refuses_large:
        raise OutOfMemory(f"{peak / 2**30:.2f}G", f"{there / 2**30:.2f}G")
    return Built(
        jaxpr=traced.jaxpr.jaxpr,
        text=compiled.as_text() or "",
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=peak,
        lower_seconds=middle - start,
        compile_seconds=end - middle,
    )


class OutOfMemory(Exception):
    """A program needs more memory than the chip has: `needed` of `there`."""

    def __init__(self, needed: str, there: str) -> None:
        super().__init__(f"{needed} of {there}")


# How the compiler for TPUs says that a program needs more than the chip's memory, and how much.
FULL = re.compile(r"Used (\S+) of (\S+) hbm|temporaries \((\S+)\) exceeds available HBM \((\S+)\)")


@contextlib.contextmanager
def full_explained() -> Iterator[None]:
    """Turns an error of the compiler that says that a program does not fit into an `OutOfMemory`."""
    try:
        yield
    except Exception as error:
        if full := FULL.search(str(error)):
            raise OutOfMemory(*filter(None, full.groups())) from error
        raise
