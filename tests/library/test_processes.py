"""Several processes: the statistics and the curves of one, and a clear end if one of them dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from pergrad.lab import cli
from pergrad.lab.config import Model, Train
from pergrad.lab.run.records import read_metrics
from pergrad.lab.run.train import Unwatched, train
from tests.support import labs
from tests.support.pages import ROOT

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
        tmp_path, [start(tmp_path, i, "tests.support.in_processes", address, str(i)) for i in range(2)]
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


class Interrupt(Unwatched):
    """Stops a run after a step."""

    def advance(self, row):
        if row["step"] == 3:
            raise KeyboardInterrupt


LATE = 4.0  # seconds


def test_lab_goes_on_in_two_processes(tmp_path, compiled_once):
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 16}
    asked = {"optimizer": "micro_adam", "batch_size": 4, "steps": 5, "checkpoint_every": 2}
    asked |= {"noise_every": 2, "data": str(labs.write_text(tmp_path / "text"))}
    config = Train(**asked, model=Model(**shape))
    train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", Interrupt())

    asked |= {f"model.{name}": size for name, size in shape.items()}
    asked |= {"run_dir": tmp_path / "run", "mesh": "data=4"}
    asked |= {"coordinator_address": free_address(), "num_processes": 2}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    processes = []
    for i in range(2):  # the second process comes late, while the first one waits for it
        processes.append(start(tmp_path, i, "pergrad.lab", "train", *options, f"--process-id={i}"))
        time.sleep(0 if i else LATE)
    codes, outputs = ends(tmp_path, processes)
    assert codes == [0, 0], outputs
    assert "going on after step 2" in outputs[0] and "validation data" in outputs[0]
    assert "step" not in outputs[1]  # one is enough to tell
    rows = [read_metrics(tmp_path / name) for name in ("run", "whole")]
    np.testing.assert_allclose(*([row["loss"] for row in own] for own in rows), rtol=1e-5)
    noises = [[row["noise"]["noise"] for row in own if "noise" in row] for own in rows]
    np.testing.assert_allclose(*noises, rtol=1e-4)
    listed = [[found["place"] for row in own for found in row.get("outliers", ())] for own in rows]
    assert len(noises[0]) == 2 and listed[0] == listed[1]
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "whole")]
    np.testing.assert_allclose(results[0]["test_loss"], results[1]["test_loss"], rtol=1e-5)


SHAPE = ("--model.layers=1", "--model.width=16", "--model.heads=2", "--model.context=16")


def started(folder, processes, *, of, seconds=60.0, **options):
    """`pergrad train` in processes with these numbers; `options` may have a value for each."""
    common = {"mesh": f"data={2 * of}", "batch_size": 12, "run_dir": folder / "run"}
    common |= {"data": folder / "text", "coordinator_address": free_address(), "num_processes": of}
    common |= {"coordinator_timeout": seconds, **options}
    labs.write_text(folder / "text")
    out = []
    for n, process in enumerate(processes):
        own = {name: x[n] if isinstance(x, list) else x for name, x in common.items()}
        given = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
        args = ["pergrad.lab", "train", *SHAPE, *given, f"--process-id={process}"]
        out.append(start(folder, n, *args))
    return out


def error_of(output):
    """The one line that tells what is wrong; what JAX and Gloo say in their own ways is not there."""
    assert not re.search(r"Traceback|Gloo error|^[EF]\d{4} |Check failure", output, re.MULTILINE), output
    (line,) = (line for line in output.splitlines() if line.startswith("error: "))
    return line


def test_a_process_that_comes_too_late(tmp_path):
    """And one that never comes. When the late one comes, the first has ended."""
    address = free_address()
    late = {"of": 3, "seconds": 2, "coordinator_address": address}
    codes, (output,) = ends(tmp_path, started(tmp_path, [0], **late))
    assert codes == [1] and "processes 1, 2 of 3 did not come" in error_of(output)
    assert "within 2 s" in output and not (tmp_path / "run").exists()
    codes, (output,) = ends(tmp_path, started(tmp_path, [1], **late))
    assert codes == [1] and f"process 0 does not answer at {address} within 2 s" in error_of(output)


def test_a_process_twice(tmp_path):
    codes, outputs = ends(tmp_path, started(tmp_path, [0, 1, 1], of=3, seconds=12))
    assert codes == [1, 1, 1]
    first, *others = map(error_of, outputs)
    assert "process 2 of 3 did not come" in first and "--process-id 1 already" in first
    refused, waiting = sorted(others, key=lambda line: "is not let in" not in line)
    assert "there is a process with --process-id 1 already" in refused
    assert waiting == first  # it is told why


def test_the_first_process_twice(tmp_path):
    processes = started(tmp_path, [0, 0], of=2, seconds=10)
    codes, outputs = ends(tmp_path, processes)
    assert codes == [1, 1]
    assert any("another one with --process-id 0" in error_of(output) for output in outputs)


def test_processes_with_other_options(tmp_path):
    codes, outputs = ends(tmp_path, started(tmp_path, [0, 1], of=2, learning_rate=[0.01, 0.02]))
    assert codes == [1, 1]
    for output in outputs:
        assert "process 1 has options or data that differ from those of process 0" in error_of(output)


def left_alone(folder, lost, sent):
    """The exit code and the output of one of two processes, of which the other one gets a signal."""
    processes = started(folder, [0, 1], of=2, seconds=8, steps=10**6, checkpoint_every=10**6)
    try:
        until = time.monotonic() + PATIENCE
        while not list(folder.glob("run/metrics.jsonl")) and time.monotonic() < until:
            time.sleep(0.1)
        processes[lost].send_signal(sent)
        since = time.monotonic()
        code = processes[1 - lost].wait(60)
        assert time.monotonic() - since < 30
    finally:
        processes[lost].kill()
        ends(folder, processes)
    return code, (folder / f"{1 - lost}.log").read_text()


@pytest.mark.parametrize(
    ("lost", "sent", "words"),
    [
        (1, signal.SIGKILL, "process 1 has ended unexpectedly"),
        (1, signal.SIGSTOP, "not been heard of for 8 s"),
        (0, signal.SIGKILL, "process 0 has ended unexpectedly"),
        (0, signal.SIGSTOP, "not been heard of for 8 s"),
    ],
    ids=["killed", "stopped", "first killed", "first stopped"],
)
def test_a_process_that_is_lost(tmp_path, lost, sent, words):
    """JAX's coordinator is in the first process, and ends with it."""
    code, output = left_alone(tmp_path, lost, sent)
    line = error_of(output)
    assert code == 1
    assert words in line and f"process {lost}" in line and "The same commands again" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--process-id", "1"], ["--coordinator-address", "--num-processes"]),
        (
            ["--coordinator-address", "localhost:1", "--num-processes", "2", "--process-id", "2"],
            ["0 to 1, not 2"],
        ),
        (
            ["--coordinator-address", "here", "--num-processes", "2", "--process-id", "0"],
            ["HOST:PORT", "'here'"],
        ),
        (
            [
                *("--coordinator-address", "a:1", "--num-processes", "2", "--process-id", "0"),
                "--coordinator-timeout=0",
            ],
            ["at least 1 second"],
        ),
        (["--fsdp"], ["--fsdp", "--mesh"]),
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
