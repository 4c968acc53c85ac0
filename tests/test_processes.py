"""Several processes: the statistics and the curves of one, and a clear end if one of them dies."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from pergrad.lab import cli
from pergrad.lab.config import Model, Train
from pergrad.lab.runs import read_metrics
from pergrad.lab.train import train
from tests import labs
from tests.pages import ROOT

PATIENCE = 240  # seconds until a test gives up; all of them together take a fraction of it


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def start(folder, process, *args):
    """A Python with two devices; what it writes goes to a file, so that nobody waits for a reader."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    with (folder / f"{process}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *args],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def ends(folder, processes):
    """Exit codes and outputs. None of them outlives the test."""
    try:
        until = time.monotonic() + PATIENCE
        codes = [p.wait(max(1, until - time.monotonic())) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    return codes, [(folder / f"{i}.log").read_text() for i in range(len(processes))]


def test_same_statistics_and_a_clear_end(tmp_path):
    address = free_address()
    codes, outputs = ends(
        tmp_path, [start(tmp_path, i, "tests.in_processes", address, str(i)) for i in range(2)]
    )
    assert all("same statistics" in output for output in outputs), outputs
    assert codes[1] == 7
    # The other ends, too, and says why.
    assert codes[0] != 0
    assert re.search(r"unhealthy|another task died|closed by peer", outputs[0]), outputs[0]


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    with labs.compiled_once(tmp_path_factory.mktemp("compiled")):
        yield


class Interrupt:
    """Stops a run after a step."""

    def doing(self, what):
        pass

    def say(self, line):
        pass

    def start(self, config, step, price):
        pass

    def advance(self, row):
        if row["step"] == 3:
            raise KeyboardInterrupt


def test_lab_goes_on_in_two_processes(tmp_path, compiled_once):
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 16}
    asked = {"optimizer": "micro_adam", "batch_size": 4, "steps": 5, "checkpoint_every": 2}
    asked["data"] = str(labs.write_text(tmp_path / "text"))
    config = Train(**asked, model=Model(**shape))
    train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", Interrupt())

    asked |= {f"model.{name}": size for name, size in shape.items()}
    asked |= {"run_dir": tmp_path / "run", "mesh": "data=4"}
    asked |= {"coordinator_address": free_address(), "num_processes": 2}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    codes, outputs = ends(
        tmp_path,
        [start(tmp_path, i, "pergrad.lab", "train", *options, f"--process-id={i}") for i in range(2)],
    )
    assert codes == [0, 0], outputs
    assert "going on after step 2" in outputs[0] and "validation data" in outputs[0]
    assert "step" not in outputs[1]  # one is enough to tell
    curves = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("run", "whole")]
    np.testing.assert_allclose(*curves, rtol=1e-5)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "whole")]
    np.testing.assert_allclose(results[0]["test_loss"], results[1]["test_loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--process-id", "1"], ["--coordinator-address", "--num-processes"]),
        (
            ["--coordinator-address", "localhost:1", "--num-processes", "2", "--process-id", "2"],
            ["0 to 1, not 2"],
        ),
        (["--mesh", "data=4096"], ["4096 devices", "xla_force_host_platform_device_count=4096"]),
        (["--mesh", "batch=4"], ["data=2,model=2", "'batch=4'"]),
        (["--mesh", "data=2,data=2"], ["'data=2,data=2'"]),
        (["--mesh", "data=0"], ["'data=0'"]),
    ],
    ids=str,
)
def test_refused(options, words, capsys):
    assert cli.main(["train", *options]) == 1
    told = capsys.readouterr().err
    for word in words:
        assert word in told
