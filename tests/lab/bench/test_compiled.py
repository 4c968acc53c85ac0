"""Compiled programs, written by hand: how often loops run, what is read and written, what it costs."""

import math

import jax
import jax.numpy as jnp
import pytest

from pergrad.lab.bench.compiled import hlo, meter, tpu
from pergrad.lab.bench.compiled.chips import TPUS
from pergrad.lab.bench.compiled.loops import Call, rounds
from pergrad.lab.bench.compiled.traffic import traffic
from pergrad.lab.bench.operations import operations

V5E = TPUS["tpu:v5e"]
MEMORY_RATE = V5E.share * V5E.bandwidth
LARGE = "f32[1024,4096]{1,0:T(8,128)}"  # of 16 MiB
LARGE_BYTES = 4 * 1024 * 4096
ROW = "f32[1,4096]{1,0:T(8,128)}"
ROW_BYTES = 4 * 4096


def computation(head: str, *lines: str) -> str:
    return "\n".join([f"{head} (a: f32[]) -> f32[] {{", *(f"  {line}" for line in lines), "}\n"])


def program(*computations: str) -> hlo.Program:
    return hlo.parse("\n".join(["HloModule jit_f, is_scheduled=true\n", *computations]))


# The text.


def test_an_instruction():
    text = computation(
        "ENTRY %main",
        "%a.1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0), sharding={replicated}",
        "ROOT %pair = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/pred[]{:T(512)}, f8e4m3fn[4]{0})"
        ' fusion(%a.1, %a.1), kind=kLoop, calls=%fused.2, metadata={op_name="jit(f)/add (x)"},'
        ' backend_config={"flag":[],"estimated_cycles":"123"}',
    )
    found = program(computation("%fused.2", "ROOT %c = s32[] constant(-7)"), text)
    assert found.entry == "main" and found.computations.keys() == {"fused.2", "main"}
    main = found.computations["main"]
    assert main.parameters[0].name == "a.1" and main.root.name == "pair"
    assert main.root.opcode == "fusion" and main.root.operands == ("a.1", "a.1")
    assert main.root.arrays == (
        hlo.Array("bf16", (8, 128), 1),
        hlo.Array("pred", (), 0),
        hlo.Array("f8e4m3fn", (4,), 0),
    )
    assert [(array.elements, array.bytes) for array in main.root.arrays] == [
        (1024, 2048),
        (1, 1),
        (4, 4),
    ]
    assert main.root.bytes == 2053 and main.root.hbm_bytes == 5
    assert main.root.attribute("kind") == "kLoop"
    assert main.root.quoted_number(tpu.ESTIMATE) == 123
    assert main.parameters[0].quoted_number(tpu.ESTIMATE) is None
    assert found.fused(main.root) is found.computations["fused.2"]
    assert found.fused(main.parameters[0]) is None
    assert main.users["a.1"] == (main.root,)
    with pytest.raises(ValueError, match="pair has no attribute index"):
        main.root.attribute("index")


# Loops.

CARRIED = f"(s32[]{{:T(128)}}, {LARGE}, /*index=2*/s32[]{{:T(128)}})"


def loop(start: int, limit: int, step: int, direction: str, *, in_body: str = "", more: str = "") -> str:
    """A loop that counts from `start` by `step`; its limit is carried, and its condition is a fusion."""
    return "\n".join(
        [
            computation(
                "%compared",
                "%l = s32[] parameter(0)",
                "%r = s32[] parameter(1)",
                f"ROOT %less = pred[] compare(%l, %r), direction={direction}",
            ),
            computation(
                "%condition",
                f"%c = {CARRIED} parameter(0)",
                "%i = s32[] get-tuple-element(%c), index=0",
                "%n = s32[] get-tuple-element(%c), index=2",
                "ROOT %goes = pred[] fusion(%i, %n), kind=kLoop, calls=%compared",
            ),
            computation(
                "%body",
                f"%c = {CARRIED} parameter(0)",
                "%i = s32[] get-tuple-element(%c), index=0",
                f"%x = {LARGE} get-tuple-element(%c), index=1",
                "%n = s32[] get-tuple-element(%c), index=2",
                f"%step = s32[] constant({step})",
                "%after = s32[] add(%i, %step)",
                f"%y = {LARGE} negate(%x)",
                in_body,
                f"ROOT %out = {CARRIED} tuple(%after, %y, %n)",
            ),
            computation(
                "ENTRY %main",
                f"%x = {LARGE} parameter(0)",
                f"%start = s32[] constant({start})",
                f"%limit = s32[] constant({limit})",
                "%copied = s32[] copy(%limit)",
                f"%carried = {CARRIED} tuple(%start, %x, %copied)",
                f"ROOT %while = {CARRIED} while(%carried), condition=%condition, body=%body{more}",
            ),
        ]
    )


def rounds_of(text: str) -> int | None:
    found = program(text)
    main = found.computations["main"]
    return rounds(Call(found, main, ()), main.root).number


@pytest.mark.parametrize(
    ("start", "limit", "step", "direction", "expected"),
    [
        (0, 12, 1, "LT", 12),
        (1, 10, 2, "LT", 5),
        (1, 11, 2, "LE", 6),
        (7, 0, -1, "GT", 7),
        (7, 0, -1, "GE", 8),
        (0, 3, 1, "NE", 3),
        (5, 5, 1, "LT", 0),
        (0, 1, 0, "LT", None),  # it never ends
    ],
)
def test_rounds_are_counted(start, limit, step, direction, expected, monkeypatch):
    monkeypatch.setattr("pergrad.lab.bench.compiled.loops.MOST_ROUNDS", 50)
    assert rounds_of(loop(start, limit, step, direction)) == expected


def test_rounds_that_the_compiler_has_written():
    written = ', backend_config={"known_trip_count":{"n":"41"},"other":{"n":"3"}}'
    assert rounds_of(loop(0, 12, 1, "LT", more=written)) == 41


def test_rounds_that_depend_on_data():
    text = loop(0, 12, 1, "LT").replace("%copied = s32[] copy(%limit)", "%copied = s32[] parameter(1)")
    assert rounds_of(text) is None
    cost = meter.cost(program(text), V5E)
    assert cost.unknown == ("while",)
    assert cost.seconds == pytest.approx(2 * LARGE_BYTES / MEMORY_RATE, rel=1e-3)  # as if it ran once


def test_a_loop_costs_its_rounds():
    once, often = (meter.cost(program(loop(0, n, 1, "LT")), V5E) for n in (1, 12))
    assert once.seconds == pytest.approx(2 * LARGE_BYTES / MEMORY_RATE, rel=1e-3)
    assert often.seconds == pytest.approx(12 * once.seconds)
    assert often.hbm_bytes == pytest.approx(12 * 2 * LARGE_BYTES, rel=1e-3)
    assert not often.unknown


def test_a_loop_in_a_loop():
    """The inner loop's limit is one that the outer loop carries without changing it."""
    inner = loop(0, 5, 1, "LT").rpartition("ENTRY")[0]
    for name in ("compared", "condition", "body"):
        inner = inner.replace(f"%{name}", f"%inner_{name}")
    in_body = "\n  ".join(
        [
            "%zero = s32[] constant(0)",
            f"%again = {CARRIED} tuple(%zero, %x, %n)",
            f"%inner = {CARRIED} while(%again), condition=%inner_condition, body=%inner_body",
        ]
    )
    cost = meter.cost(program(inner, loop(0, 3, 1, "LT", in_body=in_body)), V5E)
    # Three rounds of the outer loop negate once, and each has three rounds of the inner loop.
    assert {line.times for line in cost.lines if line.instruction.opcode == "negate"} == {3, 9}


# Memory.


def moved(fused: str, instruction: str, *before: str) -> float:
    """The bytes that `%it` moves, which may call `%fused`."""
    found = program(fused, computation("ENTRY %main", *before, instruction))
    main = found.computations["main"]
    return traffic(found, main, main.root)


X = f"%x = {LARGE} parameter(0)"
I = "%i = s32[] parameter(1)"  # noqa: E741


def test_what_is_read_and_written_once():
    y = f"%y = {LARGE} parameter(1)"
    assert moved("", f"ROOT %it = {LARGE} add(%x, %y)", X, y) == 3 * LARGE_BYTES
    assert moved("", f"ROOT %it = {LARGE} add(%x, %x)", X) == 2 * LARGE_BYTES
    on_chip = LARGE.replace("T(8,128)", "T(8,128)S(1)")
    assert moved("", f"ROOT %it = {on_chip} negate(%x)", X) == LARGE_BYTES
    assert moved("", f"ROOT %it = {LARGE} negate(%x)", f"%x = {on_chip} parameter(0)") == LARGE_BYTES


def test_slices_are_read_as_large_as_they_are():
    assert moved("", f"ROOT %it = {ROW} dynamic-slice(%x, %i)", X, I) == 2 * ROW_BYTES + 4
    fused = computation(
        "%fused",
        f"%p = {LARGE} parameter(0)",
        "%q = s32[] parameter(1)",
        f"%renamed = {LARGE} bitcast(%p)",
        f"%row = {ROW} dynamic-slice(%renamed, %q)",
        f"ROOT %negated = {ROW} negate(%row)",
    )
    call = f"ROOT %it = {ROW} fusion(%x, %i), kind=kLoop, calls=%fused"
    assert moved(fused, call, X, I) == 2 * ROW_BYTES + 4
    # If anything else in the fusion needs the array, all of it is read.
    whole = fused.replace("negate(%row)", "subtract(%row, %p)")
    assert moved(whole, call, X, I) == LARGE_BYTES + ROW_BYTES + 4
    # A fusion in the fusion takes the slice.
    nested = fused.replace("%fused", "%inner") + computation(
        "%fused",
        f"%p = {LARGE} parameter(0)",
        "%q = s32[] parameter(1)",
        f"ROOT %deep = {ROW} fusion(%p, %q), kind=kLoop, calls=%inner",
    )
    assert moved(nested, call, X, I) == 2 * ROW_BYTES + 4


def test_updates_happen_in_place():
    row = f"%row = {ROW} parameter(2)"
    plain = f"ROOT %it = {LARGE} dynamic-update-slice(%x, %row, %i)"
    assert moved("", plain, X, I, row) == 2 * ROW_BYTES + 4
    fused = computation(
        "%fused",
        f"%p = {LARGE} parameter(0)",
        f"%q = {ROW} parameter(1)",
        "%k = s32[] parameter(2)",
        f"%negated = {ROW} negate(%q)",
        f"%updated = {LARGE} dynamic-update-slice(%p, %negated, %k)",
        f"ROOT %renamed = {LARGE} bitcast(%updated)",
    )
    call = f"ROOT %it = {LARGE} fusion(%x, %row, %i), kind=kLoop, calls=%fused"
    assert moved(fused, call, X, I, row) == 2 * ROW_BYTES + 4
    # A copy of what was updated in place is written as a whole.
    copied = f"ROOT %it = {LARGE} copy(%updated)"
    before = plain.replace("ROOT %it", "%updated")
    assert moved("", copied, X, I, row, before) == 2 * LARGE_BYTES
    # Of two results one is new.
    both = fused.replace("ROOT %renamed", "%renamed").replace(
        "\n}", f"\n  ROOT %both = ({LARGE}, {ROW}) tuple(%renamed, %negated)\n}}"
    )
    call = f"ROOT %it = ({LARGE}, {ROW}) fusion(%x, %row, %i), kind=kLoop, calls=%fused"
    assert moved(both, call, X, I, row) == 3 * ROW_BYTES + 4


def test_scatters_happen_in_place():
    lines = X, I, f"%rows = {ROW} parameter(2)"
    plain = f"ROOT %it = {LARGE} scatter(%x, %i, %rows), to_apply=%sum"
    assert moved("", plain, *lines) == 3 * ROW_BYTES + 4
    fused = computation(
        "%fused",
        f"%p = {LARGE} parameter(0)",
        "%k = s32[] parameter(1)",
        f"%q = {ROW} parameter(2)",
        f"ROOT %added = {LARGE} scatter(%p, %k, %q), to_apply=%sum",
    )
    call = f"ROOT %it = {LARGE} fusion(%x, %i, %rows), kind=kInput, calls=%fused"
    assert moved(fused, call, *lines) == 3 * ROW_BYTES + 4
    # A fusion that makes the array that it scatters into writes all of it.
    made = fused.replace(f"%p = {LARGE} parameter(0)", f"%p = {LARGE} broadcast(%zero)").replace(
        "%k = s32[] parameter(1)", "%zero = f32[] parameter(0)\n  %k = s32[] parameter(1)"
    )
    call = f"ROOT %it = {LARGE} fusion(%x, %i, %rows), kind=kInput, calls=%fused"
    zero = "%x = f32[] constant(0)"
    assert moved(made, call, zero, *lines[1:]) == LARGE_BYTES + ROW_BYTES + 8


def test_a_fusion_of_one_instruction_with_several_results():
    fused = computation(
        "%fused", f"%p = {ROW} parameter(0)", f"ROOT %pair = ({ROW}, {ROW}) sort(%p, %p), to_apply=%less"
    )
    call = f"ROOT %it = ({ROW}, {ROW}) fusion(%x), kind=kLoop, calls=%fused"
    assert moved(fused, call, f"%x = {ROW} parameter(0)") == 3 * ROW_BYTES


def test_copies_between_memories_count_at_the_ends_in_hbm():
    on_chip = ROW.replace("T(8,128)", "T(8,128)S(1)")
    copy = f"ROOT %it = ({on_chip}, {ROW}, u32[]{{:S(2)}}) copy-start(%x)"
    assert moved("", copy, f"%x = {ROW} parameter(0)") == ROW_BYTES
    part = f"ROOT %it = (({LARGE}), {on_chip}, s32[]{{:S(2)}}) slice-start(%x), slice={{[0:1]}}"
    assert moved("", part, X) == ROW_BYTES
    back = f"ROOT %it = ({ROW}, {ROW}, u32[]{{:S(2)}}) copy-start(%x)"
    assert moved("", back, f"%x = {ROW} parameter(0)") == 2 * ROW_BYTES


# Time.

ESTIMATED = ', backend_config={"estimated_cycles":"3000000"}'


def test_the_estimate_counts_for_products_alone():
    fused = computation(
        "%fused", f"%p = {LARGE} parameter(0)", f"ROOT %r = {LARGE} convolution(%p, %p), dim_labels=bf"
    )
    call = f"ROOT %it = {LARGE} fusion(%x), kind=kOutput, calls=%fused{ESTIMATED}"
    product = meter.cost(program(fused, computation("ENTRY %main", X, call)), V5E)
    assert product.seconds == product.estimated_seconds == 3e6 / V5E.clock
    assert product.by_kind == {"product": product.seconds}
    other = fused.replace("convolution", "multiply")
    pointwise = meter.cost(program(other, computation("ENTRY %main", X, call)), V5E)
    assert pointwise.seconds == pytest.approx(2 * LARGE_BYTES / MEMORY_RATE)
    assert pointwise.estimated_seconds == product.estimated_seconds
    assert pointwise.by_kind == {"elementwise": pointwise.seconds}


def test_what_has_no_estimate_is_told():
    gather = f"ROOT %it = {LARGE} gather(%x, %i)"
    cost = meter.cost(program(computation("ENTRY %main", X, I, gather)), V5E)
    assert cost.unknown == ("it",)
    assert cost.seconds == pytest.approx(2 * LARGE_BYTES / MEMORY_RATE, rel=1e-3)
    small = f"ROOT %it = {ROW.replace('4096', '8')} gather(%x, %i)"
    assert not meter.cost(program(computation("ENTRY %main", X, I, small)), V5E).unknown


def test_of_branches_the_dearest_counts():
    cheap = computation("%cheap", f"%p = {ROW} parameter(0)", f"ROOT %r = {ROW} negate(%p)")
    dear = computation("%dear", f"%p = {LARGE} parameter(0)", f"ROOT %r = {LARGE} negate(%p)")
    choice = f"ROOT %it = {LARGE} conditional(%i, %x, %x), branch_computations={{%cheap, %dear}}"
    whole = program(cheap, dear, computation("ENTRY %main", X, I, choice))
    assert meter.cost(whole, V5E).hbm_bytes == 2 * LARGE_BYTES
    assert meter.cost(whole, V5E, branch=min).hbm_bytes < LARGE_BYTES


def test_copies_beside_other_work_take_no_time():
    on_chip = LARGE.replace("T(8,128)", "T(8,128)S(1)")
    lines = (
        f"%start = ({on_chip}, {LARGE}, u32[]{{:S(2)}}) copy-start(%x)",
        f"ROOT %done = {on_chip} copy-done(%start)",
    )
    cost = meter.cost(program(computation("ENTRY %main", X, *lines)), V5E)
    assert cost.seconds == 0 and cost.hbm_bytes == LARGE_BYTES


def test_arithmetic_on_the_chip_takes_time():
    on_chip = LARGE.replace("T(8,128)", "T(8,128)S(1)")
    lines = f"%x = {on_chip} parameter(0)", f"ROOT %it = {on_chip} negate(%x)"
    cost = meter.cost(program(computation("ENTRY %main", *lines)), V5E)
    assert cost.seconds == pytest.approx(1024 * 4096 / tpu.NUMBERS_A_CYCLE / V5E.clock)


def test_clocks_follow_from_the_peaks():
    """To the 1.5 GHz of a v5e and the 1.75 GHz of the others."""
    assert {name: round(chip.clock / 1e9, 2) for name, chip in TPUS.items()} == {
        "tpu:v5e": 1.5,
        "tpu:v5p": 1.75,
        "tpu:v6e": 1.75,
    }


# Operations.


def operations_of(f, *args):
    return operations(jax.make_jaxpr(f)(*args).jaxpr)


def test_operations():
    x, w = jnp.ones((3, 5)), jnp.ones((5, 7))
    assert operations_of(jnp.dot, x, w) == 2 * 3 * 5 * 7
    assert operations_of(jax.jit(lambda x, w: x @ w), x, w) == 2 * 3 * 5 * 7
    assert operations_of(lambda x: jnp.sin(x).sum(), x) == 0

    def scanned(x, ws):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    assert operations_of(scanned, x, jnp.ones((11, 5, 5))) == 11 * 2 * 3 * 5 * 5
    images, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4))
    convolution = lambda x, k: jax.lax.conv_general_dilated(  # noqa: E731
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert operations_of(convolution, images, kernel) == 2 * (2 * 8 * 8 * 4) * (3 * 3 * 3)


def test_operations_of_branches_and_open_loops():
    x = jnp.ones((4, 4))
    branches = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)  # noqa: E731
    assert operations_of(branches, x) == 2 * 4**3
    until = lambda f: lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, f, x)  # noqa: E731
    assert math.isnan(operations_of(until(lambda x: x @ x), x))
    assert operations_of(until(lambda x: x + 1), x) == 0
