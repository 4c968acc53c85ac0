"""The work of an instruction on a GPU: a roofline.

Every instruction that is not free is a kernel. The compiler chooses and schedules the kernels without a
GPU, and says nothing of use about their time: it would measure candidates for the products on the GPU.
So the time of a kernel is the least that the chip allows, the largest of

- the operations of its matrix products and convolutions, at the peak for their type;
- its other arithmetic, one operation for each number that an instruction makes, on all lanes;
- the bytes that it reads and writes in HBM, at the bandwidth;

and what the start of a kernel costs is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pergrad.lab.bench.compiled.chip import BUNDLED, COPIES, FREE, Work, is_copy
from pergrad.lab.bench.compiled.hlo import Computation, Instruction, Program
from pergrad.lab.bench.compiled.products import Product, call_target, products
from pergrad.lab.bench.compiled.traffic import SLICES, traffic

# What moves numbers inside of a kernel and makes none. Products count apart.
MOVES = COPIES | BUNDLED | SLICES | {"iota", "dynamic-update-slice", "scatter", "dot", "convolution"}
WORKSPACES = ("__cublas$", "__cudnn$")  # calls of these libraries have a workspace as their last result
EXACT = "exact f32"  # the key of the peak of float32 products that may not be rounded


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Three fields are what the compiler is told: `description`, numbers by the compiler's names for them;
    `capability`, the version of the GPU's instructions; and `libraries`, the versions of CUDA and cuDNN.

    `peaks` are the operations a second of products, by the type of their operands. XLA computes those of
    float32 with the 19 bits of TF32 unless the program asks for more (`EXACT`). `launch` is how many
    seconds the start of a kernel takes.
    """

    about_time: ClassVar[str] = (
        "time: a roofline over the compiled kernels, the least that the chip allows, and no estimate of "
        "the compiler"
    )
    has_estimates: ClassVar[bool] = False

    kind: str
    description: Mapping[str, int | float]
    capability: tuple[int, int]
    libraries: Mapping[str, tuple[int, int]]
    peaks: Mapping[str, float]
    launch: float

    @property
    def peak(self) -> float:
        """The operations a second of products in bfloat16."""
        return self.peaks["bf16"]

    @property
    def bandwidth(self) -> float:
        """The bytes a second of its memory."""
        return self.description["memory_bandwidth"]

    @property
    def memory(self) -> float:
        return self.description["device_memory_size"]

    @property
    def lanes_rate(self) -> float:
        """The operations a second of all lanes, outside of the units for products."""
        lanes = self.description["core_count"] * self.description["fpus_per_core"]
        return lanes * self.description["clock_rate_ghz"] * 1e9

    def topology(self) -> dict[str, str]:
        """One GPU, described in the text form of XLA's message `GpuTargetConfigProto`."""
        numbers = " ".join(f"{name}: {value}" for name, value in self.description.items())
        capability = f"cuda_compute_capability {{ {_version(self.capability)} }}"
        config = [
            f"gpu_device_info {{ {numbers} {capability} }}",
            *(f"{name} {{ {_version(found)} }}" for name, found in self.libraries.items()),
            'platform_name: "CUDA"',
            f'device_description_str: "{self.kind}"',
        ]
        return {"topology": "1x1x1", "target_config": "\n".join(config)}

    def is_free(self, instruction: Instruction) -> bool:
        return instruction.opcode in FREE

    def work(self, program: Program, computation: Computation, instruction: Instruction) -> Work:
        found = tuple(products(program, computation, instruction))
        moved = traffic(program, computation, instruction) - _workspace(instruction)
        seconds = max(
            sum(self._seconds(product) for product in found),
            _numbers(program, computation, instruction) / self.lanes_rate,
            moved / self.bandwidth,
        )
        is_known = bool(found) or instruction.opcode != "custom-call"
        return Work(_kind(program, instruction, found), seconds + self.launch, moved, is_known=is_known)

    def _seconds(self, product: Product) -> float:
        kind = EXACT if product.is_exact and product.kind == "f32" else product.kind
        return product.operations / self.peaks.get(kind, self.peak)


def _version(numbers: tuple[int, int]) -> str:
    major, minor = numbers
    return f"major: {major} minor: {minor}"


def _kind(program: Program, instruction: Instruction, found: tuple[Product, ...]) -> str:
    if found:
        return "product"
    if instruction.opcode == "custom-call":
        return "custom-call"
    return "copy" if is_copy(program, instruction) else "elementwise"


def _workspace(instruction: Instruction) -> float:
    """The bytes of the workspace of a call of a library, which are no traffic of the program's."""
    has_one = instruction.is_tuple and call_target(instruction).startswith(WORKSPACES)
    return instruction.arrays[-1].hbm_bytes if has_one else 0.0


def _numbers(program: Program, computation: Computation, instruction: Instruction) -> int:
    """How many numbers are made by an instruction, or by all of those inside of a fusion.

    A sum over an axis takes as many operations as there are numbers to add.
    """
    fused = program.fused(instruction)
    if fused is not None:
        return sum(_numbers(program, fused, inner) for inner in fused)
    if instruction.opcode in MOVES:
        return 0
    if instruction.opcode == "reduce":
        return computation.instructions[instruction.operands[0]].elements
    return instruction.elements
