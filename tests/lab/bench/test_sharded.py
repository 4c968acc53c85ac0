"""What sharded parameters cost on many chips: how it is counted, the figures, and their limits."""

import json

import pytest

from pergrad.lab.bench import sharded
from pergrad.lab.bench.compiled.wires import collectives
from tests.support.pages import ROOT

ROWS = json.loads((ROOT / "docs" / "devices.json").read_text())
PROGRAM = """
%all-reduce-scatter.1 (p: f32[64]) -> f32[16] {
  %p = f32[64]{0} parameter(0)
  %all-reduce.1 = f32[64]{0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %s = f32[16]{0} dynamic-slice(%all-reduce.1, %i), dynamic_slice_sizes={16}
}

%first_piece (q: f32[8]) -> f32[64] {
  %q = f32[8]{0} parameter(0)
  ROOT %all-gather.1 = f32[64]{0} all-gather(%q), replica_groups=[1,8]<=[8], attributes={chain_id="0"}
}

%second_piece (r: f32[8]) -> f32[64] {
  %r = f32[8]{0} parameter(0)
  ROOT %all-gather.2 = f32[64]{0} all-gather(%r), replica_groups=[1,8]<=[8], attributes={chain_id="0"}
}

%body (arg: (s32[], f32[64])) -> (s32[], f32[64]) {
  %arg = (s32[], f32[64]{0}) parameter(0)
  %x = f32[64]{0} get-tuple-element(%arg), index=1
  %fusion.1 = f32[16]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %fusion.2 = f32[64]{0} fusion(%fusion.1), kind=kCustom, calls=%first_piece
  %fusion.3 = f32[64]{0} fusion(%fusion.1), kind=kCustom, calls=%second_piece
  %i = s32[] get-tuple-element(%arg), index=0
  ROOT %out = (s32[], f32[64]{0}) tuple(%i, %fusion.3)
}

%condition (arg.1: (s32[], f32[64])) -> pred[] {
  %arg.1 = (s32[], f32[64]{0}) parameter(0)
  ROOT %go = pred[] custom-call(%arg.1)
}

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  %sum = bf16[100]{0} all-reduce(%a), replica_groups=mesh['x'=4,'y'=2] {'y'}, ALONE, to_apply=%add
  %sent = (f32[5]{0}, f32[5]{0}, u32[]) collective-permute-start(%a), source_target_pairs={{0,1}}
  %zero = s32[] constant(0)
  %start = (s32[], f32[64]{0}) tuple(%zero, %a)
  %w = (s32[], f32[64]{0}) while(%start), condition=%condition, body=%body, ROUNDS
  ROOT %result = f32[64]{0} get-tuple-element(%w), index=1
}
"""


ROUNDS = 'backend_config={"known_trip_count":{"n":"3"}}'
ALONE = 'frontend_attributes={async_collective_name="all-reduce-start"}'


def test_bytes_that_collectives_send():
    found = collectives(PROGRAM.replace("ROUNDS", ROUNDS).replace("ALONE", ALONE))
    counted = {one.kind: (one.times, one.bytes, one.numbers, one.is_async) for one in found}
    assert len(found) == len(counted) == 4
    assert counted == {
        "all-reduce": (1, 2 * 200 / 2, 100, False),  # bfloat16, two chips
        "collective-permute": (1, 20, 5, True),
        "reduce-scatter": (3, 3 * 256 * 3 / 4, 3 * 64 * 3 / 4, False),  # four chips, three rounds
        "all-gather": (3, 3 * 256 * 7 / 8, 3 * 64 * 7 / 8, True),  # eight chips, in two pieces
    }


def test_page_has_the_figures():
    page = (ROOT / "docs" / "devices.md").read_text()
    assert sharded.table(ROWS) in page


@pytest.mark.parametrize(
    "key",
    [tuple(row[key] for key in sharded.KEY) for row in ROWS if row["stats"] != sharded.GRAD],
    ids=str,
)
def test_beside_jax_grad(key):
    """1.1 times the memory and the shards of further statistics; what is sent once for each of them."""
    rows = {tuple(row[name] for name in sharded.KEY): row for row in ROWS}
    row, plain = rows[key], rows[*key[:-1], sharded.GRAD]
    shards = row["result_bytes"] - plain["result_bytes"]
    assert row["temp_bytes"] <= 1.10 * plain["temp_bytes"] + shards
    # With replicated parameters, chips add up gradients of bfloat16 products in bfloat16 for `jax.grad`,
    # and in float32 for pergrad. So the numbers are compared, and not the bytes.
    what = "sent_numbers" if row["layout"] == "replicated" else "sent_bytes"
    assert row[what] <= len(sharded.STATS[row["stats"]]) * plain[what]


def test_memory_falls_with_the_number_of_chips():
    """The same 64 sequences on 4 and on 64 chips. A chip has the whole head, whatever their number."""
    rows = {tuple(row[name] for name in sharded.KEY): row for row in ROWS}

    def fall(stats):
        few, many = (rows["169M", f"v5e:{chips}", "fsdp", 64, stats] for chips in ("2x2", "8x8"))
        return few["temp_bytes"] / many["temp_bytes"]

    assert fall("moments") >= 0.85 * fall(sharded.GRAD)
