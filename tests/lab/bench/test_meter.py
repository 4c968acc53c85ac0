"""The meter beside what the numbers of TPUs say, and the benchmark of a target.

Where a test needs the compiler for TPUs (`pip install 'pergrad[tpu-aot]'`), it is skipped without it.
"""

import importlib.util
import io
import json
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p
from rich.console import Console

import pergrad as pg
from pergrad.lab import cli, timing
from pergrad.lab.bench import cases, compilers, rates, run, tables, target, tasks
from pergrad.lab.bench.compiled.chips import CHIPS, TPUS
from pergrad.lab.bench.models import MLP
from pergrad.lab.bench.operations import called
from pergrad.lab.bench.tasks import ACCUMULATED, AUTO, FLOOR, MICRO_GRAD, PERGRAD, VMAP
from pergrad.lab.config import LargeName, TargetName
from pergrad.lab.errors import LabError
from pergrad.lab.run import records
from tests.support import pages

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the compiler for TPUs is not installed"
)
TARGETS: tuple[Any, ...] = tuple(TPUS)


@pytest.fixture(autouse=True)
def as_for_users():
    target.floor_row.cache_clear()
    with pages.jax_as_for_users():
        yield


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def judged(f: Any, *args: Any, on: TargetName = "tpu:v5e") -> target.Judged:
    compilers.use(on)
    return target.judge(f, args, on)


# The meter.


@needs_compiler
@pytest.mark.parametrize("on", TARGETS)
def test_a_large_product_takes_the_peak(on):
    """No faster than the chip can multiply, and at most 15% slower."""
    n = 4096
    found = judged(jnp.dot, array(n, n), array(n, n), on=on)
    assert found.operations == 2 * n**3
    assert 0.85 < found.operations / found.seconds / TPUS[on].peak < 1
    assert found.hbm_bytes >= 3 * 2 * n**2
    assert not found.unknown


@needs_compiler
@pytest.mark.parametrize("on", TARGETS)
def test_an_elementwise_pass_takes_its_bytes(on):
    """The share of the bandwidth that large passes get is what the compiler itself estimates."""
    found = judged(lambda x: 2 * x + 1, array(8192, 8192, dtype=jnp.float32), on=on)
    chip = TPUS[on]
    assert found.hbm_bytes == 2 * 4 * 8192**2
    assert found.seconds == pytest.approx(found.hbm_bytes / (chip.share * chip.bandwidth))
    assert found.estimated_seconds == pytest.approx(found.seconds, rel=0.05)


@needs_compiler
def test_a_scan_takes_as_long_as_its_rounds():
    def chain(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    few, many = (judged(chain, array(2048, 2048), array(n, 2048, 2048)) for n in (4, 32))
    assert many.operations == 8 * few.operations
    assert many.seconds == pytest.approx(8 * few.seconds, rel=0.05)
    product = judged(jnp.dot, array(2048, 2048), array(2048, 2048))
    assert many.seconds == pytest.approx(32 * product.seconds, rel=0.2)


@needs_compiler
def test_a_loop_around_a_loop():
    """A scan of two in a scan of three takes as long as a scan of six."""

    def flat(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    def nested(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, ws: (flat(x, ws), None), x, weights)[0]

    one = judged(flat, array(2048, 2048), array(24, 2048, 2048))
    other = judged(nested, array(2048, 2048), array(3, 8, 2048, 2048))
    assert other.seconds == pytest.approx(one.seconds, rel=0.15)


# The benchmark of a target.


@needs_compiler
@pytest.mark.parametrize("on", TARGETS)
def test_pergrad_plans_for_the_target(on):
    seen = []

    def candidate(weight: jax.Array, x: jax.Array) -> jax.Array:
        loss = lambda weight, x: jnp.mean((x @ weight) ** 2)  # noqa: E731
        seen.append(pg.explain(loss, pg.Mean(jnp.square))(weight, x).backend)
        return loss(weight, x)

    judged(candidate, array(8, 8, dtype=jnp.float32), array(4, 8, dtype=jnp.float32), on=on)
    assert seen == [on]


@pytest.mark.parametrize(
    "on, what, extra", [("tpu:v5e", "TPUs", "tpu-aot"), ("gpu:h100", "GPUs", "gpu-aot")]
)
def test_without_the_compiler(on, what, extra, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", f"--target={on}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: --target {on} needs the compiler for {what}: pip install 'pergrad[{extra}]'."


def test_all_targets_have_a_chip_and_a_compiler():
    assert CHIPS.keys() == set(get_args(TargetName))
    assert all(compilers.compiler_of(on) for on in get_args(TargetName))


def test_large_models_are_not_run(capsys):
    assert cli.main(["bench", "--cases", "billion"]) == 1
    assert "billion: too large to run here" in capsys.readouterr().err
    assert cli.main(["bench", "--target=tpu:v5e", "--parts=growth"]) == 1
    assert "no parts" in capsys.readouterr().err


def test_items_of_a_target():
    every = target.items()
    assert {item.case for item in every} == {*cases.CASES, *cases.LARGE}
    assert {item.task for item in every if item.case == "billion"} == set(cases.LARGE_TASKS)
    usual = {(item.case, item.task) for item in run.items(("models",))}
    assert {(item.case, item.task) for item in every if item.case in cases.CASES} == usual
    chosen = target.items(("billion",), ("norms",))
    assert [(item.case, item.task) for item in chosen] == [("billion", "norms")]
    assert cases.LARGE.keys() == cases.LARGE_TITLES.keys() == set(get_args(LargeName))


@pytest.mark.parametrize("name", [*cases.CASES, *cases.LARGE])
def test_products_are_those_of_bfloat16(name):
    """Parameters and the loss are float32, and nothing is allocated."""
    workload = cases.abstract(name)
    leaves = jax.tree.leaves(workload.params)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    jaxpr = jax.make_jaxpr(workload.loss)(workload.params, workload.batch)
    assert jaxpr.out_avals[0].dtype == jnp.float32
    assert types_of_products(jaxpr.jaxpr) == {jnp.dtype(jnp.bfloat16)}


def types_of_products(jaxpr: Any) -> set[Any]:
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive in (dot_general_p, conv_general_dilated_p):
            found.add(eqn.outvars[0].aval.dtype)
        for inner in called(eqn):
            found |= types_of_products(inner)
    return found


def a_row(candidate: str, seconds: float, **more: Any) -> dict[str, Any]:
    numbers = {"seconds": seconds, "temp_bytes": 1e6, "hbm_bytes": 2e9, "operations": 3e9}
    return {"candidate": candidate, **numbers, "unknown": (), **more}


FULL = {"candidate": FLOOR, "out_of_memory": "21.10G of 15.75G"}


def test_ratios():
    rows = [a_row(FLOOR, 2.0), a_row(f"{ACCUMULATED}, microbatch 2", 1.0), a_row(PERGRAD, 3.0)]
    *_, last = target.with_ratios(rows)
    assert last["ratios"] == {"time": 1.5, "tuned": 3.0, "memory": 1, "traffic": 1, "operations": 1}
    floor, _, last = target.with_ratios([FULL, *rows[1:]])
    assert floor == FULL and last["ratios"]["tuned"] == 3.0 and math.isnan(last["ratios"]["time"])


def test_the_fastest_size_that_fits():
    times = (4.0, 2.0, 2.5, 1.9, 2.5, 2.6, 0.1)
    sized = [a_row(f"{MICRO_GRAD}, microbatch {2**i}", time) for i, time in enumerate(times)]
    best = target.fastest(sized)
    assert best["candidate"] == f"{MICRO_GRAD}, microbatch 8" and len(best["tried"]) == 6
    assert target.fastest([sized[0], FULL])["candidate"] == f"{MICRO_GRAD}, microbatch 1"
    assert target.fastest([FULL, sized[0]]) == FULL


def test_the_table_of_a_target():
    rows = [FULL, a_row(f"{ACCUMULATED}, microbatch 2", 1.0), a_row(PERGRAD, 3.0, unknown=("sort.12",))]
    rows.append({"candidate": AUTO, "left_out": "all at once"})
    rows[2] |= {"least_seconds": 1.5}
    file = io.StringIO()
    tables.show(Console(file=file), "title", target.with_ratios(rows), target.columns("gpu:h100"))
    shown = " ".join(file.getvalue().split())
    assert f"{FLOOR} out of memory 21.10G of 15.75G" in shown
    assert f"{PERGRAD} 3e+03 3.00 1.0 2 3" in shown
    assert f"without an estimate in {PERGRAD}: sort" in shown
    assert f"without {AUTO}: all at once" in shown
    assert f"{PERGRAD}: 1.5e+03 ms with the cheapest branch of conditionals" in shown
    assert (
        "time: a roofline over the compiled kernels" in shown and "no estimate of the compiler" in shown
    )


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(21.10G) exceeds available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 21.10G of 15.75G hbm. Exceeded hbm capacity by 5.35G.",
    ],
)
def test_out_of_memory(message, monkeypatch):
    @compilers.full_explained()
    def judge(*args: Any) -> Any:
        raise RuntimeError(message)

    monkeypatch.setattr(target, "judge", judge)
    rows = target.measure(run.Item("target", "mlp", "moments"), "tpu:v5e", timing.silent)
    assert {row["out_of_memory"] for row in tables.measured(rows)} == {"21.10G of 15.75G"}


def test_who_cannot_is_left_out(monkeypatch):
    def judge(candidate: Any, args: Any, on: TargetName) -> target.Judged:
        if "vmap_grad" in candidate.__qualname__:
            raise NotImplementedError("no such luck\nand more")
        return target.Judged(1.0, 0.5, 2.0, 3.0, 4.0, 5.0, 6.0, {}, (), 0.1, 0.2)

    monkeypatch.setattr(target, "judge", judge)
    item = run.Item("target", "mlp", "moments")
    rows = {row["candidate"]: row for row in target.measure(item, "tpu:v5e", timing.silent)}
    assert rows[VMAP]["left_out"] == "NotImplementedError: no such luck"
    assert rows[PERGRAD]["ratios"]["tuned"] == 1
    assert rows[PERGRAD] in target.measure(item, "tpu:v5e", timing.silent)  # the floors are known now
    ours = {row["candidate"] for row in target.measure(item, "tpu:v5e", timing.silent, ours=True)}
    assert ours == {name for name in rows if tasks.family(name) in (*tasks.FLOORS, PERGRAD)}
    monkeypatch.setitem(tasks._MAKERS, PERGRAD, tasks._MAKERS[VMAP])
    with pytest.raises(NotImplementedError):  # it is what this is about
        target.measure(item, "tpu:v5e", timing.silent)


@needs_compiler
def test_bench_of_a_target(tmp_path, capsys, monkeypatch):
    """The command; what is there already is not compiled again."""
    monkeypatch.setattr(records, "versions", lambda: {"pergrad": "a commit"})
    monkeypatch.setitem(cases.CASES, "mlp", MLP(batch=4, width=256, layers=2))
    command = ["bench", "--target=tpu:v6e", "--cases=mlp", "--tasks=moments", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    title = "MLP, B128, 4 x 1024: mean and second moment (compiled for tpu:v6e, not run on it)"
    assert title in " ".join(printed.split())
    log = json.loads((tmp_path / "tpu-v6e.json").read_text())
    assert log["about"]["target"] == "tpu:v6e" and log["about"]["versions"]["libtpu"]
    rows = tables.measured(log["results"])
    assert [tasks.family(row["candidate"]) for row in rows] == [*tasks.FLOORS, VMAP, MICRO_GRAD, PERGRAD]
    for row in rows:
        assert row["seconds"] > 0 and row["hbm_bytes"] > 0 and row["operations"] > 0
        assert row["model"]["compute"] == "bfloat16"
        assert row["ratios"].keys() == {"time", "tuned", "memory", "traffic", "operations"}
    monkeypatch.setattr(target, "measure", lambda *args: pytest.fail("it is there"))
    assert cli.main(command) == 0


def test_a_loss_of_ones_own():
    workload = cases.abstract("tests.support.own_loss:example")
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(workload.params))
    with pytest.raises(LabError, match="mlpp"):
        cases.abstract("mlpp")


@needs_compiler
def test_rates_of_the_plan_are_those_of_the_compiler():
    """`pergrad bench --rates --target`, beside the file of the package, in the file's three digits."""
    compilers.use("tpu:v5e")
    known = rates.of_package()["tpu:v5e"]["rates"]
    for name, value in rates.compiled("tpu:v5e").items():
        assert value == pytest.approx(known[name], rel=0.01)
