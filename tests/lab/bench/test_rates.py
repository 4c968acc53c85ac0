"""`pergrad bench --rates`: what it measures, and that the plan can read the file that it writes."""

import json
import math

import jax
import pytest

from pergrad._ir import backend
from pergrad.lab import cli
from pergrad.lab.bench import price, rates
from pergrad.lab.errors import LabError
from pergrad.lab.run import records
from tests.support import pages

SMALL = rates.Sizes(
    product=16,
    examples=2,
    positions=4,
    width=8,
    image=4,
    channels=2,
    memory=2**12,
    cache=2**10,
    moved=2**14,
    rounds=4,
    equations=3,
)


@pytest.fixture(autouse=True)
def as_for_users():
    with pages.jax_as_for_users():
        yield


def test_the_command_writes_what_the_plan_can_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rates, "Sizes", lambda: SMALL)
    out = tmp_path / "new"
    before = rates.of_package()
    assert cli.main(["bench", "--rates", "--rounds=2", "--budget=0.01", "--out", str(out)]) == 0
    assert rates.of_package() == before
    text = (out / "rates.json").read_text()
    entry = json.loads(text)[jax.default_backend()]
    assert entry["source"] == "measured"
    assert entry["machine"] == json.loads(json.dumps(price.machine()))
    assert entry["versions"] == records.versions() and entry["versions"]["pergrad"]
    measured = {name: entry["rates"][name] for name in rates.probes(SMALL)}
    assert all(0 < value < math.inf for value in measured.values())
    device = backend.read_rates(text)[jax.default_backend()]
    today = backend.BACKENDS[jax.default_backend()]
    for name in rates.TAKEN_OVER:
        assert getattr(device, name) == getattr(today, name) and name in entry["about"]
    for name, value in measured.items():
        assert getattr(device, name) == value
    printed = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    for name, value in measured.items():
        now = getattr(today, name)
        assert printed[name] == [f"{now:.3g}", f"{value:.3g}", f"{value / now:.2f}"]
    assert all(printed[name][1:] == ["taken", "over"] for name in rates.TAKEN_OVER)


def test_every_rate_is_measured_or_taken_over():
    assert {"name", *rates.probes(SMALL), *rates.TAKEN_OVER} == set(vars(backend.BACKENDS["cpu"]))


def test_amounts_of_work():
    """Operations as XLA counts them."""
    made = rates.probes(SMALL)
    for name in ("product_rate", "batched_rate", "convolution_rate"):
        compiled = jax.jit(made[name].program).lower(*made[name].args).compile()
        assert compiled.cost_analysis()["flops"] == made[name].amount
    assert made["memory_rate"].amount == made["cache_rate"].amount == SMALL.moved
    assert made["product_rate"].result(2.0) == made["product_rate"].amount / 2
    assert made["loop_round"].result(2.0) == 2 / SMALL.rounds


def test_other_devices_keep_their_rates():
    known = rates.of_package()
    found = rates.with_measured(known, dict.fromkeys(rates.probes(SMALL), 1.0))
    others = known.keys() - {jax.default_backend()}
    assert found.keys() == known.keys() and others
    assert all(found[kind] == known[kind] for kind in others)


def test_rates_of_a_compiler_take_the_place_of_those_of_its_chip():
    known = rates.of_package()
    found = dict.fromkeys(rates.BY_COMPILER, 1.0)
    written = rates.with_compiled(known, found, "tpu:v6e")
    assert {name: entry for name, entry in written.items() if name != "tpu:v6e"} == {
        name: entry for name, entry in known.items() if name != "tpu:v6e"
    }
    device = vars(backend.read_rates(json.dumps(written))["tpu:v6e"])
    before = vars(backend.BACKENDS["tpu:v6e"])
    assert {name for name in device if device[name] != before[name]} == {*found, "batched_rate"}
    assert written["tpu:v6e"]["source"] == "compiled"


def test_a_compiler_without_estimates_has_no_rates():
    with pytest.raises(LabError, match="gpu:h100 makes no estimates of time"):
        rates.compiled("gpu:h100", SMALL)


def test_rates_take_no_models(capfd):
    assert cli.main(["bench", "--rates", "--cases", "mlp"]) == 1
    assert "no loss, cases, tasks or parts" in capfd.readouterr().err


@pytest.mark.parametrize("kind", rates.of_package())
def test_the_file_of_the_package(kind):
    """Every entry says where its rates come from, and infinite is what makes no difference."""
    entry = rates.of_package()[kind]
    assert entry["about"].endswith(".")
    assert entry["source"] in ("measured", "compiled", "assumed")
    assert ("versions" in entry) == (entry["source"] != "assumed")
    assert ("machine" in entry) == (entry["source"] == "measured")
    device = vars(backend.BACKENDS[kind])
    assert {name for name in device if device[name] == math.inf} == device.keys() - {
        "name",
        *entry["rates"],
    }
