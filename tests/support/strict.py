"""JAX as the tests want it: strict, in float64, and quick to compile. Imported before anything runs."""

import gc
import os

import jaxlib

# The tests' programs run once, on tiny arrays, so that the time to compile them is what counts. XLA ends
# the process for a flag that it does not know: jaxlib 0.11.0 knows the last one, 0.11.2 does not.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false" if jaxlib.version.__version_info__ < (0, 11, 1) else "",
    ]
)

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
# Traced programs are many small objects, most of which live on.
gc.set_threshold(50_000)
