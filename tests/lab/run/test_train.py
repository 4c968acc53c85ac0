"""One run: the same by its seed, whole after any interruption, and clear about what it cannot do."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pergrad as pg
from pergrad.lab import cli
from pergrad.lab.config import Model, OptimizerName, Train, differences, from_json, to_json
from pergrad.lab.errors import LabError
from pergrad.lab.run import events, model, outliers, records
from pergrad.lab.run import train as training
from pergrad.lab.run.optimizers import learning_rate
from pergrad.lab.run.train import Unwatched, make_problem, train
from tests.support import labs, pages

TINY = Model(layers=1, width=16, heads=2, context=16)
OPTIMIZERS = get_args(OptimizerName)
RIVALS = ("share_adam", "shrunk_adam", "corrected_adam")  # without weight decay, clip and cap


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory):
    """Most runs here are the same program."""
    with labs.compiled_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return labs.write_text(tmp_path_factory.mktemp("text"), files=12)


@pytest.fixture
def config(text) -> Train:
    return Train(
        data=str(text),
        model=TINY,
        batch_size=4,
        steps=12,
        learning_rate=1e-2,
        checkpoint_every=4,
        validate_every=6,
        noise_every=5,
    )


def metrics(path: Path) -> bytes:
    return (path / "metrics.jsonl").read_bytes()


class Interrupt(Unwatched):
    """Watches a run, and stops it after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def start(self, config: Any, step: int, price: Any) -> None:
        self.started = step

    def advance(self, row: dict[str, Any]) -> None:
        if row["step"] == self.step:
            raise KeyboardInterrupt


def test_a_run(config, tmp_path):
    result = train(config, tmp_path / "run")
    rows = [json.loads(line) for line in metrics(tmp_path / "run").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["examples"] for row in rows] == list(range(4, 49, 4))
    assert [row["learning_rate"] for row in rows] == [learning_rate(config, i) for i in range(12)]
    assert [row["step"] for row in rows if "test_loss" in row] == [6, 12]
    assert [row["step"] for row in rows if "noise" in row] == [5, 10]
    assert (
        rows[-1]["noise"]["noise_scale"] if "noise" in rows[-1] else rows[9]["noise"]["noise_scale"] != 0
    )
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert not result["diverged"] and result["test_loss"] == rows[-1]["test_loss"]
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert from_json(about["config"]) == config
    assert {"python", "jax", "pergrad"} <= about["versions"].keys()


def test_the_same_by_its_seed(config, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(replace(config, seed=seed, steps=5), tmp_path / name)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") != metrics(tmp_path / "c")


def test_goes_on_after_an_interruption(config, tmp_path):
    train(config, tmp_path / "whole")
    for step in (3, 11):
        path = tmp_path / f"stopped_{step}"
        with pytest.raises(KeyboardInterrupt):
            train(config, path, Interrupt(step))
        watcher = Interrupt(-1)
        train(config, path, watcher)
        # A step is told before it is saved: stopped at step 4 it would not have been.
        assert watcher.started == (step - 1) // 4 * 4
        assert metrics(path) == metrics(tmp_path / "whole")
        assert (path / "result.json").read_bytes() == (tmp_path / "whole" / "result.json").read_bytes()


def test_a_line_half_written_is_dropped(config, tmp_path):
    train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", Interrupt(6))
    with open(tmp_path / "cut" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "lo')
    train(config, tmp_path / "cut")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def command(config: Train, path: Path) -> list[str]:
    model = [
        f"--model.{name}={getattr(config.model, name)}"
        for name in ("layers", "width", "heads", "context")
    ]
    names = (
        "data",
        "batch_size",
        "steps",
        "learning_rate",
        "checkpoint_every",
        "validate_every",
        "noise_every",
    )
    options = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in names]
    return [sys.executable, "-m", "pergrad.lab", "train", *options, *model, f"--run-dir={path}"]


def test_killed_at_any_moment(config, tmp_path):
    config = replace(config, steps=120, checkpoint_every=10, noise_every=0)
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env = os.environ | quick | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    subprocess.run(command(config, tmp_path / "whole"), env=env, check=True, capture_output=True)
    path = tmp_path / "killed"
    process = subprocess.Popen(command(config, path), env=env, stdout=subprocess.DEVNULL)
    while process.poll() is None and (
        not (path / "metrics.jsonl").exists() or metrics(path).count(b"\n") < 45
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (path / "result.json").exists()
    done = subprocess.run(command(config, path), env=env, check=True, capture_output=True, text=True)
    assert "going on after step" in done.stdout
    assert metrics(path) == metrics(tmp_path / "whole")


def test_a_finished_run_is_not_run_again(config, tmp_path, monkeypatch):
    result = train(config, tmp_path)
    monkeypatch.setattr("pergrad.lab.run.optimizers.make", None)
    assert train(config, tmp_path) == result


# What goes wrong.


def contents(path: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"}


def refused(config: Train, path: Path) -> str:
    """The error, in one line; nothing is overwritten."""
    before = contents(path)
    with pytest.raises(LabError) as error:
        train(config, path)
    assert contents(path) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def test_another_configuration(config, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, Interrupt(6))
    changed = replace(config, learning_rate=0.5, model=replace(TINY, width=32))
    text = refused(changed, tmp_path)
    assert "learning_rate is 0.01, not 0.5" in text and "model.width is 16, not 32" in text


def test_other_data(config, tmp_path):
    (tmp_path / "text").mkdir()
    for file in Path(config.data).iterdir():
        shutil.copy(file, tmp_path / "text")
    config = replace(config, data=str(tmp_path / "text"))
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", Interrupt(6))
    other = "".join(f"something else, {i}\n" for i in range(1000))  # no window of it occurs twice
    next((tmp_path / "text").iterdir()).write_text(other)
    assert "data has changed" in refused(config, tmp_path / "run")


def test_not_a_run(config, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "thesis.tex" in refused(config, tmp_path)


def test_unwritable_directory(config, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(config, tmp_path / "file" / "run")


def test_full_disk(config, tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, Interrupt(6))
    init = records.Run.__init__

    def on_a_full_disk(self, *args):
        init(self, *args)
        self._metrics.close()
        full = Path("/dev/full").open("r+b", buffering=0)  # noqa: SIM115 (the run closes it)
        self._metrics = self._opened.enter_context(full)

    monkeypatch.setattr(records.Run, "__init__", on_a_full_disk)
    monkeypatch.setattr(records.Run, "_choose_checkpoint", lambda self: 0)
    assert "No space left" in refused(config, tmp_path)


@pytest.mark.parametrize("what", ["truncated", "missing"])
def test_corrupt_checkpoint(config, tmp_path, what):
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, Interrupt(6))
    (step,) = (p for p in (tmp_path / "checkpoints").iterdir() if p.name == "4")
    for file in (p for p in (step / "state").rglob("*") if p.is_file()):
        if what == "truncated":
            file.write_bytes(file.read_bytes()[:10])
        else:
            file.unlink()
    assert str(step) in refused(config, tmp_path)


def test_foreign_checkpoint(config, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        with pytest.raises(KeyboardInterrupt):
            train(replace(config, seed=seed), tmp_path / name, Interrupt(6))
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    shutil.copytree(tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    assert "belongs to another run" in refused(config, tmp_path / "a")


def test_metrics_that_are_not_those_of_the_checkpoint(config, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, Interrupt(6))
    (tmp_path / "metrics.jsonl").write_text("")
    assert "4 steps" in refused(config, tmp_path)


def test_two_processes(config, tmp_path):
    with records.Run(tmp_path, config, "digest", "data"):
        assert "another process" in refused(config, tmp_path)


def test_divergence(config, tmp_path):
    config = replace(config, optimizer="micro_adam_msq", learning_rate=1e6, steps=60)
    result = train(config, tmp_path / "a")
    assert result["diverged"] and result["steps"] < 60 and result["test_loss"] is None
    rows = [json.loads(line) for line in metrics(tmp_path / "a").splitlines()]
    assert rows[-1]["loss"] is None and all(row["loss"] is not None for row in rows[:-1])
    # Where it is seen does not depend on how often the run looks.
    train(replace(config, validate_every=7, checkpoint_every=3), tmp_path / "b")
    losses = [
        [json.loads(line)["loss"] for line in metrics(tmp_path / name).splitlines()]
        for name in ("a", "b")
    ]
    assert losses[0] == losses[1]


# Every kind of run.


@pytest.mark.parametrize("n", [3, 8, 10])
def test_validation_in_parts_is_a_mean_over_all(monkeypatch, n):
    """Of fewer examples than a part has, of whole parts, and of parts with some left over."""
    monkeypatch.setattr(training, "VALIDATED", 4)
    x = np.arange(n, dtype=np.float32) ** 2
    found = training._mean_loss(lambda p, x: jnp.mean((x - p) ** 2), jnp.float32(3), x)
    np.testing.assert_allclose(found, np.mean((x - 3) ** 2), rtol=1e-6)


def test_adam_that_starts_at_the_first_batch(config, tmp_path):
    config = replace(config, optimizer="adam", steps=4, noise_every=0)
    usual, started = (
        train(replace(config, start_at_batch=start), tmp_path / str(start))["train_loss"]
        for start in (False, True)
    )
    assert np.isfinite(started) and started != usual


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(config, tmp_path, optimizer):
    config = replace(config, optimizer=optimizer, steps=4, noise_every=0, learning_rate=1e-3)
    if optimizer in RIVALS:
        config = replace(config, batch_size=8)
    else:
        clip_by = "example" if "micro" in optimizer else "batch"
        config = replace(config, clip=1.0, clip_by=clip_by, max_update=1.0, weight_decay=0.1)
    result = train(config, tmp_path)
    assert np.isfinite(result["test_loss"])


@pytest.mark.parametrize(
    "model",
    [
        replace(TINY, layers=2, scanned=True),
        replace(TINY, tied=True, dtype="bfloat16"),
        replace(TINY, kind="lstm", layers=2),
        replace(TINY, kind="lstm", layers=2, scanned=True, tied=True),
    ],
)
def test_every_model(config, tmp_path, model):
    result = train(replace(config, model=model, steps=30, optimizer="micro_adam"), tmp_path)
    first = json.loads(metrics(tmp_path).splitlines()[0])
    assert result["test_loss"] < first["loss"]


def test_digits(tmp_path):
    model = Model(width=32)
    config = Train(
        domain="images", data="digits", model=model, batch_size=32, steps=200, learning_rate=1e-2
    )
    result = train(config, tmp_path)
    assert result["test_loss"] < 1 < np.log(10)


def test_photos(tmp_path):
    config = Train(domain="images", model=TINY, steps=60, learning_rate=2e-2, optimizer="micro_adam")
    assert config.data == "photos" and from_json(to_json(config)) == config
    for older in (Train(), Train(domain="images", data="digits")):
        without = {name: value for name, value in to_json(older).items() if name != "domain"}
        assert from_json(without) == older
    result = train(config, tmp_path)
    assert result["test_loss"] < np.log(256) - 0.3


@pytest.mark.parametrize(
    "config",
    [Train(model=replace(TINY, kind="lstm")), Train(domain="images", model=TINY)],
    ids=["lstm", "photos"],
)
def test_statistics_of_every_model(config):
    """The second moment beside a loop of `jax.grad`."""
    problem = make_problem(replace(config, batch_size=3))
    batch = problem.batches[0]
    ours = pg.grad_stats(problem.loss, pg.Mean(jnp.square))(problem.params, batch)
    each = [jax.grad(problem.loss)(problem.params, batch[i : i + 1]) for i in range(3)]
    theirs = jax.tree.map(lambda *g: sum(map(jnp.square, g)) / 3, *each)
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.max(b)))


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_text_is_read_forwards(kind):
    """What a model says about a token does not depend on that token, nor on later ones."""
    module = model.LANGUAGES[kind](replace(TINY, kind=kind, layers=2), 16, nnx.Rngs(0))
    tokens = jnp.arange(TINY.context)[None] % 16
    before, after = module(tokens), module(tokens.at[0, 5].add(1))
    moved = np.abs(before - after).max((0, 2)) > 0
    assert moved.tolist() == [position >= 5 for position in range(TINY.context)]


def test_photos_are_read_row_by_row():
    """Pixels move the predictions of later pixels alone, and of all that are near enough."""
    module = model.Pixels(replace(TINY, layers=2), nnx.Rngs(0))
    pixels = jnp.full((1, 8, 8), 100)
    before, after = module(pixels), module(pixels.at[0, 1, 3].add(50))
    moved = np.abs(before - after).max((0, 3)) > 0
    later = np.arange(64).reshape(8, 8) > 1 * 8 + 3
    assert not moved[~later].any()
    assert moved[1, 4:].all() and moved[2:7].all()
    assert not moved[7].any()  # six rows below: a layer reaches three rows, and each other one more


def test_schedule():
    config = Train(steps=100, warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == rates[10] == 1.0 and rates[55] == pytest.approx(0.5) and rates[-1] < 1e-3
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(Train(steps=10, warmup=0.0, learning_rate=1.0), 0) == 1.0


def test_configurations():
    config = Train(variance=0.5, microbatch_size="auto", model=TINY)
    assert from_json(to_json(config)) == config
    assert differences(to_json(config), to_json(config)) == []
    for wrong in ({"domain": "images"}, {"data": "digits"}):  # stdlib is text, digits are images
        with pytest.raises(LabError, match="images"):
            replace(config, **wrong)
    with pytest.raises(LabError, match="lstm reads text"):
        Train(domain="images", model=replace(TINY, kind="lstm"))
    for wrong in ({"steps": 0}, {"warmup": 2.0}, {"learning_rate": 0.0}, {"keep": -1}):
        with pytest.raises(LabError):
            replace(config, **wrong)
    for wrong in ({"heads": 3}, {"heads": 0}, {"layers": 0}):
        with pytest.raises(LabError):
            replace(TINY, **wrong)


# The command.


def run_command(*args: str, cwd: Path | None = None) -> Any:
    env = os.environ | {"PYTHONPATH": str(pages.ROOT), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "pergrad.lab", *args], capture_output=True, text=True, cwd=cwd, env=env
    )


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    train_options = "--optimizer --learning-rate --batch-size --model.layers --run-dir --data"
    for command, words in (([], "train explain"), (["train"], train_options)):
        with pytest.raises(SystemExit) as exit:
            cli.main([*command, "--help"])
        assert exit.value.code == 0
        out = capsys.readouterr().out
        for word in words.split():
            assert word in out


def test_mistakes(tmp_path, capsys):
    assert cli.main(["train", f"--data={tmp_path / 'nothing'}", f"--run-dir={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "nothing" in error
    assert cli.main(["train", "--steps=0"]) == 1
    assert cli.main(["explain", "nonsense"]) == 1
    assert cli.main(["explain", "no_such_module:f"]) == 1
    for wrong in (["train", "--optimiser=adam"], ["train", "--optimizer=adma"], ["trian"]):
        with pytest.raises(SystemExit) as exit:
            cli.main(wrong)
        assert exit.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_explain_of_a_users_loss(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n"
        "def example():\n"
        "    return lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((3, 2)), jnp.ones((8, 3))\n"
    )
    out = run_command("explain", "mine:example", cwd=tmp_path)
    assert out.returncode == 0 and "x jax.grad" in out.stdout and "3x2" in out.stdout


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def example(): return lambda w, x: 0.0", "returns one thing (function)"),
        ("def example(): return 1, 2", "returns 2 things (int, int)"),
        ("def example(): return 1, 2, 3", "returns 3 things (int, int, int)"),
        ("def example(size): return 1, 2, 3", "has arguments (size)"),
        ("example = 3", "is a int, not a function"),
        ("def example(: pass", "cannot be loaded"),
    ],
)
def test_explain_of_something_else(source, words, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"mine_{abs(hash(source))}"
    (tmp_path / f"{module}.py").write_text(source + "\n")
    assert cli.main(["explain", f"{module}:example"]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert "cannot be loaded" in error or "return loss, params, batch" in error


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pergrad {pg.__version__}\n"


def test_out_of_memory(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pergrad.lab.run.train.make_problem", lambda config: jax.numpy.ones(2**44))
    assert cli.main(["train", *command(config, tmp_path)[4:]]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the memory is not enough: 65536.0 GiB") and error.count("\n") == 1
    assert "--microbatch-size" in error


def test_what_happens_before_the_first_step_is_told(config, tmp_path, capsys):
    args = command(replace(config, steps=3, noise_every=0), tmp_path)[4:]
    assert cli.main(["train", *args]) == 0
    out = capsys.readouterr().out
    told = ["reading the data", "compiling the statistics", "x jax.grad", "compiling a step", "step 3"]
    assert [out.index(words) for words in told] == sorted(out.index(words) for words in told)


def tags(path: Path) -> list[tuple[str, int]]:
    """What the event files of a run have: names and steps of scalars, in their order."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = (path / "tensorboard").iterdir()
    content, found = file.read_bytes(), []
    while (
        content
    ):  # a record: its length in eight bytes, a checksum in four, the event, another checksum
        length = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + length])
        found += [(value.tag, event.step) for value in event.summary.value]
        content = content[16 + length :]
    return found


def test_tensorboard_can_watch(config, tmp_path, monkeypatch):
    """Each step is in the event file when it is told; a run that goes on does not repeat steps."""
    monkeypatch.setattr(events, "FLUSHED", 0.0)
    told = []

    class Watching(Interrupt):
        def advance(self, row: dict[str, Any]) -> None:
            assert tags(tmp_path)[-1][1] == row["step"]
            told.append(row["step"])
            super().advance(row)

    with closing(events.Events(tmp_path, Watching(6))) as watched, pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, watched)
    with closing(events.Events(tmp_path, Watching(-1))) as watched:
        train(config, tmp_path, watched)
    assert told == [*range(1, 7), *range(5, 13)]
    assert [step for tag, step in tags(tmp_path) if tag == "loss"] == list(range(1, 13))


def test_tensorboard(config, tmp_path):
    # The noise scale is only told if there is a signal, which few examples may not show.
    args = command(replace(config, steps=3, noise_every=2, batch_size=16), tmp_path)[4:]
    assert cli.main(["train", *args, "--tensorboard"]) == 0
    (file,) = (tmp_path / "tensorboard").iterdir()
    names = {tag for tag, step in tags(tmp_path) if step == 2}
    assert {"loss", "learning_rate", "noise/scale", "noise/share", "noise/snr"} <= names
    layers = {name for name in names if name.startswith("noise/layers/snr/")}
    assert "noise/layers/snr/embed.embedding" in layers and len(layers) > 5
    assert not [name for name in names if "value" in name or "noise_" in name]
    file.unlink()
    assert cli.main(["train", *args, "--tensorboard"]) == 0  # also of a run that is done
    assert [step for tag, step in tags(tmp_path) if tag == "loss"] == [1, 2, 3]
    assert jax.config.jax_enable_x64 is False


# Outliers.


def test_outlier_examples_are_listed(config):
    """The largest first, with as much of their text as the metrics have room for."""
    norms = np.array([1.0, 1.1, 0.9, 50.0, 1.0, 90.0, np.nan])
    batch = np.stack([np.frombuffer(f"example {i} ".encode() * 40, np.uint8) for i in range(7)])
    first, second = outliers.listed(norms, batch.astype(np.int32), "bytes")
    assert (first["place"], second["place"]) == (5, 3)
    assert first["norm"] == 90 and first["times_median"] == pytest.approx(90 / 1.05)
    assert first["text"].startswith("example 5 ") and len(first["text"]) == outliers.READ
    assert "text" not in outliers.listed(norms, batch, "bpe")[0]
    assert "text" not in outliers.listed(norms, (batch, batch), "bytes")[0]
    assert outliers.listed(np.ones(4), batch[:4], "bytes") == []
    assert outliers.listed(np.full(4, np.nan), batch[:4], "bytes") == []
    many = np.array([1.0] * 20 + [99.0 + i for i in range(9)])
    assert [own["norm"] for own in outliers.listed(many, (), "bytes")] == [107, 106, 105, 104, 103]
    assert outliers.listed(np.array([1.0, 1.1, 0.9, np.inf]), (), "bytes")[0]["norm"] is None
