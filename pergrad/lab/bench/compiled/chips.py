"""The numbers of the chips that programs are compiled for, and where they come from."""

from __future__ import annotations

from pergrad.lab.bench.compiled.gpu import EXACT, Gpu
from pergrad.lab.bench.compiled.tpu import Tpu

# Of a TPU, `peak`, `bandwidth` and `memory` are in the vendor's tables (cloud.google.com/tpu/docs, the
# pages v5e, v5p and v6e). `units` and `side` are there, too.
TPUS: dict[str, Tpu] = {
    "tpu:v5e": Tpu("TPU v5 lite", "v5e:2x2", 4, 128, 197e12, 819e9, 16e9, share=0.81),
    "tpu:v5p": Tpu("TPU v5", "v5p:2x2x1", 8, 128, 459e12, 2765e9, 95e9, share=0.72),
    "tpu:v6e": Tpu("TPU v6 lite", "v6e:2x2", 4, 256, 918e12, 1640e9, 32e9, share=0.81),
}

# What CUDA says about an H100 SXM with 80 GB, by the names of XLA's description of a device. Sizes are
# in bytes, the bandwidth in bytes a second. "Core" is XLA's word for one of the 132 multiprocessors.
H100 = {
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "memory_bandwidth": 3_352_320_000_000,
    "device_memory_size": 84_929_347_584,
    "l2_cache_size": 52_428_800,
    "shared_memory_per_core": 233_472,
    "shared_memory_per_block": 49_152,
    "shared_memory_per_block_optin": 232_448,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
    "threads_per_core_limit": 2048,
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "block_dim_limit_x": 2_147_483_647,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
}
# The peaks of a GPU are in the vendor's data sheet (nvidia.com, H100 Tensor Core GPU, SXM). Those of
# bf16, f16 and f32 are half of what stands there, which is for matrices half of whose numbers are zeros.
# No table has the cost of a launch: two microseconds are assumed.
GPUS: dict[str, Gpu] = {
    "gpu:h100": Gpu(
        "NVIDIA H100 80GB HBM3",
        description=H100,
        capability=(9, 0),
        libraries={"runtime_version": (12, 9), "dnn_version_info": (9, 8)},
        peaks={"bf16": 989e12, "f16": 989e12, "f32": 494e12, EXACT: 67e12, "f64": 67e12},
        launch=2e-6,
    ),
}

CHIPS: dict[str, Tpu | Gpu] = {**TPUS, **GPUS}
