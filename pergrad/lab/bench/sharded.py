"""What statistics of sharded parameters cost on many TPU chips, as their compiler has it.

    python -m pergrad.lab.bench.sharded --model 169M --topology v5e:4x4 --stats grad moments

A transformer whose layers a `scan` runs, each recomputed in the backward pass, is compiled for a mesh of
chips that need not be there. The mesh has an axis for each dimension of the torus that the chips form.
The batch is divided along all axes. So are the parameters and their statistics with `--layout fsdp`.
With `--layout tensor` the last axis divides the parameters, and not the batch. For `jax.grad` and for
each set of statistics a line says how much temporary memory a chip needs, how large its shard of the
results is, and which is the largest array that is gathered. Nothing runs.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pergrad as pg
from pergrad.lab.bench import compilers
from pergrad.lab.bench.compiled.hlo import ARRAY, Array
from pergrad.lab.bench.models import Transformer

# Sequences for each of 16 chips: two of the smaller model, one of the larger. The largest has one for
# each of 64 chips.
SIZES: dict[str, Any] = {"scanned": True, "compute": "bfloat16"}
MODELS = {
    "3M": Transformer(batch=32, length=128, width=256, layers=3, vocab=1024, **SIZES),
    "169M": Transformer(batch=32, length=512, width=768, layers=12, vocab=54272, **SIZES),
    "1.2B": Transformer(batch=16, length=2048, width=2048, layers=22, vocab=32768, **SIZES),
    "7B": Transformer(batch=64, length=2048, width=4096, layers=32, vocab=32768, **SIZES),
}
STATS = {
    "mean": {"mean": pg.Mean()},
    "moments": {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square)},
    "variance": {"mean": pg.Mean(), "variance": pg.Variance()},
    "norms": {"mean": pg.Mean(), "norm": pg.Norm()},
}
GRAD = "grad"  # stands for `jax.value_and_grad`
Layout = Literal["replicated", "fsdp", "tensor"]


@dataclass(frozen=True)
class Placed:
    """A model on a mesh: the `specs` of its parameters, and its arguments as shapes with shardings.

    `axes` divide the batch. `chip` is the kind of device that pergrad plans for.
    """

    chip: str
    model: Transformer
    mesh: Mesh
    axes: tuple[str, ...]
    specs: Any
    params: Any
    batch: Any


@dataclass(frozen=True)
class Needs:
    """What a compiled program needs on each chip, in bytes, and the largest array that it gathers."""

    temp_bytes: int
    result_bytes: int
    largest_gathered: Array | None


def place(model: Transformer, topology: str, layout: Layout = "fsdp") -> Placed:
    """The model on all chips of a topology, such as `v5e:4x4`."""
    sizes = [int(size) for size in topology.partition(":")[2].split("x")]
    names = ["x", "y", "z"][: len(sizes)]
    axes = tuple(names[:-1] if layout == "tensor" else names)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    shape = mesh_utils.create_device_mesh(sizes, chips)
    mesh = Mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    params, batch = jax.eval_shape(lambda k: (model.init(k), model.sample(k)), jax.random.key(0))
    divided = {"replicated": [], "fsdp": [axes], "tensor": [axes, (names[-1],)]}[layout]
    specs = jax.tree_util.tree_map_with_path(lambda path, x: _spec(path, x, mesh, divided), params)

    def sharded(x: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    own = jax.tree.map(sharded, params, specs)
    chip = f"tpu:{topology.partition(':')[0]}"
    examples = jax.tree.map(lambda x: sharded(x, P(axes)), batch)
    return Placed(chip, model, mesh, axes, specs, own, examples)


def _spec(path: Any, x: Any, mesh: Mesh, divided: Sequence[tuple[str, ...]]) -> P:
    """The longest axis is divided along the first of `divided`, and so on; a stack's layers are not."""
    first = 1 if "blocks" in jax.tree_util.keystr(path) else 0
    names: list[tuple[str, ...] | None] = [None] * x.ndim
    for axis in sorted(range(first, x.ndim), key=lambda axis: -x.shape[axis]):
        free = [own for own in divided if own not in names]
        fitting = (n for n in free if x.shape[axis] % math.prod(mesh.shape[a] for a in n) == 0)
        names[axis] = next(fitting, None)
    return P(*names)


def candidate(placed: Placed, name: str) -> tuple[Callable[..., Any], Any]:
    """The function of this name, and the shardings of its results (None if it gives them itself)."""
    if name == GRAD:
        shardings = jax.tree.map(lambda x: x.sharding, placed.params)
        return jax.value_and_grad(placed.model.loss), (NamedSharding(placed.mesh, P()), shardings)
    options: Any = {"spmd_axis_name": placed.axes, "param_specs": placed.specs}
    return pg.value_and_stats(placed.model.loss, STATS[name], **options), None


def build(placed: Placed, name: str) -> Needs:
    """Compiles one candidate for all chips of the mesh."""
    fun, shardings = candidate(placed, name)
    with jax.set_mesh(placed.mesh), pg.plan_for(placed.chip):
        traced = jax.jit(fun, out_shardings=shardings).trace(placed.params, placed.batch)
        lowered = traced.lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    gathered = arrays_made_by("all-gather", compiled.as_text() or "")
    return Needs(
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        max(gathered, key=lambda array: array.bytes, default=None),
    )


def arrays_made_by(opcode: str, text: str) -> list[Array]:
    """The arrays that the instructions of this opcode, or their starts, make in a compiled program."""
    found = re.compile(rf" = (.*?) {opcode}(?:-start)?\(")
    made = (match[1] for match in map(found.search, text.splitlines()) if match)
    return [
        Array(kind, tuple(int(n) for n in sizes.split(",") if n), 0)
        for shape in made
        for kind, sizes, _ in ARRAY.findall(shape)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="169M")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--layout", choices=get_args(Layout), default="fsdp")
    parser.add_argument("--stats", nargs="+", choices=[GRAD, *STATS], default=[GRAD, "moments"])
    options = parser.parse_args(arguments)
    compilers.use("tpu:v5e")  # the same compiler for all TPUs
    placed = place(MODELS[options.model], options.topology, options.layout)
    for name in options.stats:
        needs = build(placed, name)
        array = needs.largest_gathered
        largest = "nothing" if array is None else f"{array.kind}{list(array.sizes)}"
        print(
            f"{options.model} {options.topology} {options.layout} {name}: "
            f"{needs.temp_bytes / 1e6:.0f} MB temporary, {needs.result_bytes / 1e6:.0f} MB of results, "
            f"gathers {largest} at most",
            flush=True,
        )


if __name__ == "__main__":
    main()
