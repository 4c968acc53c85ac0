"""What statistics of sharded parameters cost on many TPU chips, as their compiler has it.

    python -m pergrad.lab.bench.sharded --model 169M --topology v5e:4x4 --stats grad moments

A transformer whose layers a `scan` runs, each recomputed in the backward pass, is compiled for a mesh of
chips that need not be there. The mesh has an axis for each dimension of the torus that the chips form.
The batch is divided along all axes. So are the parameters and their statistics with `--layout fsdp`.
With `--layout tensor` the last axis divides the parameters, and not the batch. For `jax.grad` and for
each set of statistics a line says how much temporary memory a chip needs, how large its shard of the
results is, how many bytes and numbers it sends to others, and which is the largest array that is
gathered. Nothing runs. With `--json docs/devices.json` the figures go into a file, from which `--table`
makes the table of docs/devices.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pergrad as pg
from pergrad.lab.bench import compilers
from pergrad.lab.bench.compiled.hlo import Array
from pergrad.lab.bench.compiled.wires import collectives
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
    """What a compiled program needs on each chip, in bytes.

    `sent_bytes` are those that a chip sends to others, which are `sent_numbers` numbers, and
    `async_bytes` those of them that it sends beside other work. `gathered` has the arrays that are
    gathered, the largest first.
    """

    temp_bytes: int
    result_bytes: int
    sent_bytes: float
    sent_numbers: float
    async_bytes: float
    gathered: tuple[Array, ...]


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
    sent = collectives(compiled.as_text() or "")
    gathered = {array for one in sent if one.kind == "all-gather" for array in one.arrays}
    return Needs(
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        sum(one.bytes for one in sent),
        sum(one.numbers for one in sent),
        sum(one.bytes for one in sent if one.is_async),
        tuple(sorted(gathered, key=lambda array: -array.bytes)),
    )


def is_of_a_parameter(array: Array, placed: Placed) -> bool:
    """Whether an array may be a parameter, a layer of a stack, or a part of these.

    Then it has as many axes, without those of length 1, each of which divides the parameter's.
    """
    sizes = [size for size in array.sizes if size > 1]
    for path, x in jax.tree_util.tree_leaves_with_path(placed.params):
        whole = list(x.shape[1:] if "blocks" in jax.tree_util.keystr(path) else x.shape)
        if len(whole) == len(sizes) and all(n % k == 0 for n, k in zip(whole, sizes, strict=True)):
            return True
    return False


Row = Mapping[str, Any]


def row_of(model: str, topology: str, layout: str, stats: str, batch: int, needs: Needs) -> Row:
    """The figures of a compiled program, as they are kept in a file."""
    largest = next(iter(needs.gathered), None)
    return {
        "model": model,
        "topology": topology,
        "layout": layout,
        "stats": stats,
        "batch": batch,
        "temp_bytes": needs.temp_bytes,
        "result_bytes": needs.result_bytes,
        "sent_bytes": round(needs.sent_bytes),
        "sent_numbers": round(needs.sent_numbers),
        "async_bytes": round(needs.async_bytes),
        "largest_gathered": "nothing" if largest is None else f"{largest.kind}{list(largest.sizes)}",
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
    }


KEY = ("model", "topology", "layout", "batch", "stats")


def keep(path: Path, new: Row) -> None:
    """Writes a row into the file, in the place of an older one for the same program."""
    rows = json.loads(path.read_text()) if path.exists() else []
    others = [row for row in rows if any(row[key] != new[key] for key in KEY)]
    rows = sorted([*others, new], key=lambda row: [str(row[key]) for key in KEY])
    path.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: Sequence[Row]) -> str:
    """The figures beside those of `jax.grad`, as a table in Markdown: memory, and bytes on the wire."""
    lines = [
        "| parameters | tokens a chip | chips | layout | statistics | temporary memory, `jax.grad` "
        "| pergrad | its results | sent, `jax.grad` | pergrad | times the bytes | times the numbers "
        "| beside other work, `jax.grad` | pergrad |",
        f"|{'---|' * 14}",
    ]
    plain = {tuple(row[key] for key in KEY[:-1]): row for row in rows if row["stats"] == GRAD}
    order = {name: number for number, name in enumerate(MODELS)}
    for row in sorted(rows, key=lambda row: (order[row["model"]], _chips(row), row["layout"])):
        beside = plain.get(tuple(row[key] for key in KEY[:-1]))
        if row["stats"] == GRAD or beside is None:
            continue
        chip, _, sizes = row["topology"].partition(":")
        cells = [
            row["model"],
            f"{_examples(row)} x {MODELS[row['model']].length}",
            f"{chip}, {sizes.replace('x', ' x ')}",
            f"`{row['layout']}`",
            row["stats"],
            *(_megabytes(x) for x in (beside["temp_bytes"], row["temp_bytes"], row["result_bytes"])),
            *(_megabytes(x) for x in (beside["sent_bytes"], row["sent_bytes"])),
            *(f"{row[name] / beside[name]:.2f}" for name in ("sent_bytes", "sent_numbers")),
            *(f"{own['async_bytes'] / own['sent_bytes']:.0%}" for own in (beside, row)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _chips(row: Row) -> int:
    return math.prod(int(size) for size in row["topology"].partition(":")[2].split("x"))


def _examples(row: Row) -> int:
    """The examples of each chip; chips along the axis of `tensor` share theirs."""
    shared = int(row["topology"].rpartition("x")[2]) if row["layout"] == "tensor" else 1
    return row["batch"] * shared // _chips(row)


def _megabytes(number: float) -> str:
    return f"{number / 1e6:.0f} MB"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="169M")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--layout", choices=get_args(Layout), default="fsdp")
    parser.add_argument("--stats", nargs="+", choices=[GRAD, *STATS], default=[GRAD, "moments"])
    parser.add_argument("--batch", type=int, help="sequences on all chips together")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and do nothing else")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    compilers.use("tpu:v5e")  # the same compiler for all TPUs
    model = MODELS[options.model]
    model = dataclasses.replace(model, batch=options.batch or model.batch)
    placed = place(model, options.topology, options.layout)
    for name in options.stats:
        needs = build(placed, name)
        row = row_of(options.model, options.topology, options.layout, name, model.batch, needs)
        print(
            f"{options.model} {options.topology} {options.layout} {name}: "
            f"{_megabytes(needs.temp_bytes)} temporary, {_megabytes(needs.result_bytes)} of results, "
            f"sends {_megabytes(needs.sent_bytes)} ({needs.sent_numbers / 1e6:.0f} million numbers), "
            f"{_megabytes(needs.async_bytes)} of them beside "
            f"other work, gathers {row['largest_gathered']} at most",
            flush=True,
        )
        if options.json is not None:
            keep(options.json, row)


if __name__ == "__main__":
    main()
