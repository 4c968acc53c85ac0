"""The roofline of a GPU: programs written by hand, and programs that XLA compiles for an H100.

Where a test needs the compiler for GPUs (`pip install 'pergrad[gpu-aot]'`), it is skipped without it.
"""

import importlib.util
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pergrad as pg
from pergrad._ir import backend
from pergrad.lab import cli
from pergrad.lab.bench import cases, compilers, tables, target, tasks
from pergrad.lab.bench.compiled import hlo, meter
from pergrad.lab.bench.compiled.chips import GPUS
from pergrad.lab.bench.compiled.gpu import EXACT
from pergrad.lab.bench.compiled.products import products
from pergrad.lab.bench.models import MLP
from pergrad.lab.run import records
from tests.support import pages

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="the compiler for GPUs is not installed",
)
H100 = GPUS["gpu:h100"]


@pytest.fixture(autouse=True)
def as_for_users():
    with pages.jax_as_for_users():
        yield


def computation(head: str, *lines: str) -> str:
    return "\n".join([f"{head} (a: f32[]) -> f32[] {{", *(f"  {line}" for line in lines), "}\n"])


def program(*computations: str) -> hlo.Program:
    return hlo.parse("\n".join(["HloModule jit_f, is_scheduled=true\n", *computations]))


def entry(*lines: str) -> str:
    return computation("ENTRY %main", *lines)


def cost(*computations: str) -> meter.Cost:
    return meter.cost(program(*computations), H100)


# Operations of products.


def operations(*lines: str) -> tuple[float, str, bool]:
    found = program(entry(*lines))
    main = found.computations["main"]
    (product,) = products(found, main, main.root)
    return product.operations, product.kind, product.is_exact


BATCHED = "%x = bf16[8,64,32]{2,1,0} parameter(0)", "%y = bf16[8,32,16]{2,1,0} parameter(1)"
MATRICES = "%x = f32[64,32]{1,0} parameter(0)", "%y = f32[32,16]{1,0} parameter(1)"


def test_a_dot():
    dot = (
        "ROOT %it = f32[8,64,16]{2,1,0} dot(%x, %y), lhs_batch_dims={0}, lhs_contracting_dims={2},"
        " rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    assert operations(*BATCHED, dot) == (2 * 8 * 64 * 32 * 16, "bf16", False)
    exact = (
        "ROOT %it = f32[64,16]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0},"
        " operand_precision={highest,highest}"
    )
    assert operations(*MATRICES, exact) == (2 * 64 * 32 * 16, "f32", True)


CALL = (
    "ROOT %it = (f32[64,16]{1,0}, s8[4194304]{0}) custom-call(%x, %y),"
    ' custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"beta":0,'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]},'
    '"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}'
)


def test_a_call_of_cublas():
    """Its workspace is memory, and no traffic."""
    assert operations(*MATRICES, CALL) == (2 * 64 * 32 * 16, "f32", False)
    assert operations(*MATRICES, CALL.replace("DEFAULT", "HIGHEST"))[2]
    assert cost(entry(*MATRICES, CALL)).hbm_bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)


IMAGES = "%x = bf16[2,8,8,3]{3,2,1,0} parameter(0)"
KERNEL = "%k = bf16[4,3,3,3]{3,2,1,0} parameter(1)"
OUTPUT = "%y = bf16[2,8,8,4]{3,2,1,0} parameter(2)"


@pytest.mark.parametrize(
    "name, result, operands",
    [
        ("convForward", "bf16[2,8,8,4]{3,2,1,0}", "%x, %k"),
        ("convBackwardInput", "bf16[2,8,8,3]{3,2,1,0}", "%y, %k"),
        ("convBackwardFilter", "bf16[4,3,3,3]{3,2,1,0}", "%x, %y"),
    ],
)
def test_a_call_of_cudnn(name, result, operands):
    """A convolution and the two of its backward pass have the same number of operations."""
    call = (
        f"ROOT %it = ({result}, u8[0]{{0}}) custom-call({operands}), window={{size=3x3 pad=1_1x1_1}},"
        f' dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn${name}"'
    )
    found, kind, _ = operations(IMAGES, KERNEL, OUTPUT, call)
    assert found == 2 * (2 * 8 * 8 * 4) * (3 * 3 * 3) and kind == "bf16"


# The roofline.

SQUARE = "bf16[4096,4096]{1,0}"
PRODUCT = computation(
    "%gemm",
    f"%p = {SQUARE} parameter(0)",
    f"%q = {SQUARE} parameter(1)",
    f"%r = {SQUARE} dot(%p, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
    f"ROOT %t = {SQUARE} tanh(%r)",
)
TRITON = (
    "fusion(%x, %y), kind=kCustom, calls=%gemm,"
    ' backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}'
)
BOTH = f"%x = {SQUARE} parameter(0)", f"%y = {SQUARE} parameter(1)"


def test_a_product_with_what_follows_it():
    found = cost(PRODUCT, entry(*BOTH, f"ROOT %it = {SQUARE} {TRITON}"))
    assert found.seconds == pytest.approx(2 * 4096**3 / 989e12 + H100.launch)
    assert found.by_kind == {"product": found.seconds} and not found.unknown
    assert found.hbm_bytes == 3 * 2 * 4096**2


def test_the_type_of_the_operands_decides_about_the_peak():
    def seconds(kind: str, more: str = "") -> float:
        text = PRODUCT.replace("bf16", kind).replace("rhs_contracting_dims={0}", f"{more}")
        lines = (line.replace("bf16", kind) for line in (*BOTH, f"ROOT %it = {SQUARE} {TRITON}"))
        return cost(text, entry(*lines)).seconds - H100.launch

    assert seconds("f16") == seconds("bf16")
    assert seconds("f32") == pytest.approx(2 * 4096**3 / H100.peaks["f32"])
    exact = seconds("f32", "operand_precision={highest,highest}")
    assert exact == pytest.approx(2 * 4096**3 / H100.peaks[EXACT])


LARGE = "f32[1024,4096]{1,0}"
X = f"%x = {LARGE} parameter(0)"


def test_a_copy_takes_its_bytes():
    found = cost(entry(X, f"ROOT %it = {LARGE} copy(%x)"))
    assert found.seconds == pytest.approx(2 * 4 * 1024 * 4096 / H100.bandwidth + H100.launch)
    assert found.by_kind.keys() == {"copy"}


def test_arithmetic_inside_of_a_kernel():
    """Many outer products that are summed at once: few bytes, and much to multiply and add."""
    fused = computation(
        "%fused",
        "%p = f32[128,1024]{1,0} parameter(0)",
        "%left = f32[128,1024,1024]{2,1,0} broadcast(%p), dimensions={0,1}",
        "%right = f32[128,1024,1024]{2,1,0} broadcast(%p), dimensions={0,2}",
        "%outer = f32[128,1024,1024]{2,1,0} multiply(%left, %right)",
        "%zero = f32[] constant(0)",
        "ROOT %sum = f32[1024,1024]{1,0} reduce(%outer, %zero), dimensions={0}, to_apply=%add",
    )
    call = "ROOT %it = f32[1024,1024]{1,0} fusion(%x), kind=kInput, calls=%fused"
    found = cost(fused, entry("%x = f32[128,1024]{1,0} parameter(0)", call))
    lanes = 132 * 128 * 1.98e9
    assert found.seconds == pytest.approx(2 * 128 * 1024**2 / lanes + H100.launch)


def test_a_loop_takes_as_long_as_its_rounds():
    carried = f"(s32[], {LARGE})"
    body = computation(
        "%body",
        f"%c = {carried} parameter(0)",
        "%i = s32[] get-tuple-element(%c), index=0",
        f"%x = {LARGE} get-tuple-element(%c), index=1",
        f"%y = {LARGE} copy(%x)",
        f"ROOT %next = {carried} tuple(%i, %y)",
    )
    condition = computation(
        "%condition", f"%c = {carried} parameter(0)", "ROOT %goes = pred[] constant(true)"
    )
    loop = (
        f"ROOT %it = {carried} while(%start), condition=%condition, body=%body,"
        ' backend_config={"known_trip_count":{"n":"7"}}'
    )
    main = entry(X, "%i = s32[] constant(0)", f"%start = {carried} tuple(%i, %x)", loop)
    once = cost(entry(X, f"ROOT %it = {LARGE} copy(%x)"))
    assert cost(body, condition, main).seconds == pytest.approx(7 * once.seconds)


def test_a_call_of_several_kernels():
    """The compiler may gather kernels in a computation of their own, to start them together."""
    inner = computation("%command_buffer", X, f"%y = {LARGE} copy(%x)", f"ROOT %z = {LARGE} copy(%y)")
    found = cost(inner, entry(X, f"ROOT %it = {LARGE} call(%x), to_apply=%command_buffer"))
    assert found.seconds == 2 * cost(entry(X, f"ROOT %it = {LARGE} copy(%x)")).seconds


def test_an_unknown_call_counts_by_its_bytes_and_is_told():
    call = f'ROOT %it = {LARGE} custom-call(%x), custom_call_target="__cub$DeviceRadixSort"'
    found = cost(entry(X, call))
    assert found.unknown == ("it",) and found.by_kind.keys() == {"custom-call"}
    assert found.seconds == cost(entry(X, f"ROOT %it = {LARGE} copy(%x)")).seconds


def test_the_rates_are_those_of_the_description():
    with pg.plan_for("gpu:h100"):
        rates = backend.backend()
    assert rates.product_rate == rates.batched_rate == rates.convolution_rate == H100.peak
    assert rates.memory_rate == pytest.approx(H100.bandwidth, rel=1e-3)
    assert rates.memory == H100.memory and rates.cache_size == H100.description["l2_cache_size"]
    assert rates.loop_round == pytest.approx(6 * H100.launch)


def test_the_description():
    text = H100.topology()["target_config"]
    assert "core_count: 132 " in text and "cuda_compute_capability { major: 9 minor: 0 }" in text
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in text


# Compiled for an H100.


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def judged(f: Any, *args: Any) -> target.Judged:
    compilers.use("gpu:h100")
    return target.judge(f, args, "gpu:h100")


@needs_compiler
def test_a_large_product_takes_the_peak():
    n = 4096
    found = judged(jnp.dot, array(n, n), array(n, n))
    assert found.operations == 2 * n**3
    assert 0.95 < found.operations / found.seconds / H100.peak < 1
    assert found.hbm_bytes == 3 * 2 * n**2
    assert found.estimated_seconds is None and not found.unknown


@needs_compiler
def test_an_elementwise_pass_takes_its_bytes():
    found = judged(lambda x: 2 * x + 1, array(8192, 8192, dtype=jnp.float32))
    assert found.hbm_bytes == 2 * 4 * 8192**2
    assert found.seconds == pytest.approx(found.hbm_bytes / H100.bandwidth + H100.launch)


@needs_compiler
def test_a_scan_takes_as_long_as_its_rounds():
    def chain(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    first, second, third = (judged(chain, array(2048, 2048), array(n, 2048, 2048)) for n in (4, 32, 60))
    assert second.operations == 8 * first.operations
    assert third.seconds - second.seconds == pytest.approx(second.seconds - first.seconds)
    product = judged(jnp.dot, array(2048, 2048), array(2048, 2048))
    assert 60 * product.seconds < third.seconds < 120 * product.seconds  # slices and copies are kernels


@needs_compiler
def test_the_convolutions_of_a_gradient():
    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(y.astype(jnp.float32) ** 2)

    found = judged(jax.grad(loss, (0, 1)), array(256, 32, 32, 256), array(3, 3, 256, 256))
    assert found.operations == 3 * 2 * (256 * 32 * 32 * 256) * (3 * 3 * 256)
    assert 0.7 < found.operations / H100.peak / found.seconds < 1


@needs_compiler
def test_a_program_that_does_not_fit():
    with pytest.raises(compilers.OutOfMemory, match=r"^96\.00G of 79\.10G$"):
        judged(lambda x: 2 * x, array(12 * 2**30, dtype=jnp.float32))


@needs_compiler
def test_pergrad_plans_for_the_gpu():
    seen = []

    def candidate(weight: jax.Array, x: jax.Array) -> jax.Array:
        loss = lambda weight, x: jnp.mean((x @ weight) ** 2)  # noqa: E731
        seen.append(pg.explain(loss, pg.Mean(jnp.square))(weight, x).backend)
        return loss(weight, x)

    judged(candidate, array(8, 8, dtype=jnp.float32), array(4, 8, dtype=jnp.float32))
    assert seen == ["gpu:h100"]


@needs_compiler
def test_bench_of_a_gpu(tmp_path, capsys, monkeypatch):
    """The command; what is there already is not compiled again."""
    monkeypatch.setattr(records, "versions", lambda: {"pergrad": "a commit"})
    monkeypatch.setitem(cases.CASES, "mlp", MLP(batch=4, width=256, layers=2))
    command = ["bench", "--target=gpu:h100", "--cases=mlp", "--tasks=moments", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "mean and second moment (compiled for gpu:h100, not run on it)" in printed
    assert "time: a roofline over the compiled kernels" in printed
    log = json.loads((tmp_path / "gpu-h100.json").read_text())
    assert log["about"]["target"] == "gpu:h100" and log["about"]["versions"]["jax_cuda12_plugin"]
    for row in tables.measured(log["results"]):
        assert row["seconds"] > 0 and row["hbm_bytes"] > 0 and math.isfinite(row["ratios"]["time"])
        assert row["model"]["compute"] == "bfloat16" and row["estimated_seconds"] is None
    assert tasks.family(log["results"][-2]["candidate"]) == tasks.PERGRAD
    monkeypatch.setattr(target, "measure", lambda *args: pytest.fail("it is there"))
    assert cli.main(command) == 0
