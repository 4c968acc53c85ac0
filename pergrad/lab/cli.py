"""The command `pergrad`: every subcommand is a function, its options are the function's arguments."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pergrad as pg
from pergrad.lab.cli_bench import bench
from pergrad.lab.compare import decide
from pergrad.lab.config import (
    DomainName,
    KindName,
    Model,
    OptimizerName,
    PresetName,
    StudyName,
    Train,
)
from pergrad.lab.errors import LabError, in_one_line
from pergrad.lab.picture import NoisePicture
from pergrad.lab.progress import ProgressBar, RunsBar

if TYPE_CHECKING:
    from pergrad.lab.studies import Study

DEMO = Train(model=Model(context=128), batch_size=8)  # whose plan and price the demonstration shows
Flat = tyro.conf.arg(name="")  # `--steps`, not `--config.steps`


def train(
    config: Annotated[Train, Flat],
    run_dir: Path | None = None,
    tensorboard: bool = False,
    mesh: str | None = None,
    fsdp: bool = False,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    coordinator_timeout: float = 30.0,
) -> None:
    """Train a language model, or one that predicts the pixels of photographs.

    The same command again goes on with an interrupted run, also on other devices.

    Args:
        config: what to train.
        run_dir: where the run is written; by default in `runs`, named after the options.
        tensorboard: also write event files for TensorBoard into the run's directory, step by step.
        mesh: the devices: `data=4` share the examples, `data=2,model=2` also the parameters.
        fsdp: the devices that share the examples share the parameters, too.
        coordinator_address: of several processes, HOST:PORT of the first; `auto` on a cluster.
        num_processes: how many there are. All see the same run directory; the first one writes.
        process_id: which of them this is, from 0.
        coordinator_timeout: seconds to wait for the others, at the start and when one falls silent.
    """
    from pergrad.lab.run import devices  # imported here, as all that `pergrad --help` can do without

    peers = devices.join(coordinator_address, num_processes, process_id, coordinator_timeout)
    with devices.together(peers):
        _train(config, run_dir, tensorboard, mesh, fsdp)


def _train(config: Train, run_dir: Path | None, tensorboard: bool, mesh: str | None, fsdp: bool) -> None:
    from pergrad.lab.run import devices, events, records, train

    directory = run_dir or records.directory(Path("runs"), config)
    place = devices.make_place(mesh, fsdp)
    if not devices.is_first():
        train.train(config, directory, place=place)
        return
    console = Console()
    with contextlib.closing(ProgressBar(console)) as bar:
        if tensorboard:
            with contextlib.closing(events.Events(directory, bar)) as recorder:
                result = train.train(config, directory, recorder, place)
                recorder.write_all()
        else:
            result = train.train(config, directory, bar, place)
    if result["diverged"]:
        console.print(f"[red]diverged at step {result['steps']}[/red]")
    else:
        console.print(
            f"loss {result['train_loss']:.3f} in training, {result['tune_loss']:.3f} and "
            f"{result['test_loss']:.3f} on the two halves of the validation data"
        )
    console.print(Text(str(directory), "bold"), soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Common(Train):
    """What all runs of a sweep have in common: not the options of which it takes several values."""

    optimizer: tyro.conf.Fixed[OptimizerName] = "adam"
    learning_rate: tyro.conf.Fixed[float] = 1e-2
    seed: tyro.conf.Fixed[int] = 0

    def as_train(self) -> Train:
        return Train(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Train)})


def sweep(
    config: Annotated[Common, Flat],
    out: Path,
    optimizers: tuple[OptimizerName, ...] = ("adam", "micro_adam"),
    batch_sizes: tuple[int, ...] = (),
    learning_rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2),
    seeds: tuple[int, ...] = (0, 1, 2),
    tuning_seeds: int = 2,
    processes: int = 2,
    extensions: int = 3,
) -> None:
    """Compare optimizers, each at its own best learning rate, and write a page about it.

    What is done is not run again: a larger sweep into the same directory adds to a smaller one.

    Args:
        config: what all runs have in common.
        out: where runs, results and the page are written.
        optimizers: the others are compared with the first, at the same batch size.
        batch_sizes: each optimizer runs at all of them, over the same number of examples; if none is
            given, at `--batch-size`.
        learning_rates: the grid to begin with, at least two.
        seeds: with which each method runs at the learning rate that was chosen for it.
        tuning_seeds: how many others, from 1000 on, choose the learning rates.
        processes: how many runs at a time.
        extensions: how often a grid may grow where the best value sits on its edge.
    """
    from pergrad.lab.compare import sweep as sweeps
    from pergrad.lab.pages import findings

    console = Console()
    if not seeds:
        raise LabError("a sweep needs at least one seed.")
    methods = sweeps.methods(config.as_train(), optimizers, batch_sizes)
    with RunsBar(console) as bar:
        tuned = sweeps.tune(
            methods,
            dict.fromkeys(methods, learning_rates),
            seeds,
            out / "runs",
            tuning_seeds=tuning_seeds,
            processes=processes,
            extensions=extensions,
            told=bar.told,
        )
    page = findings.write(
        tuned,
        out / "runs",
        out,
        title="A sweep of optimizers",
        command="pergrad " + shlex.join(sys.argv[1:]),
    )
    for name, own in tuned.items():
        console.print(
            f"{name} at {own.method.learning_rate:g}: {decide.estimate(list(own.reported.values()))}"
        )
    console.print(Text(str(page), "bold"), soft_wrap=True)


def study(
    name: Annotated[StudyName | Literal["all"], tyro.conf.Positional],
    preset: PresetName = "demo",
    domain: DomainName = "text",
    model: KindName = "transformer",
    out: Path | None = None,
    processes: int = 2,
) -> None:
    """Test what the paper claims, and write a page about what was found.

    sign: where the sign goes in SignSGD. arms: in which layers that matters. argument: whether signal
    and noise explain it. adam: what Adam divides by. plane: all weights of mean square and variance.
    rivals: a preconditioner that ends below Adam. scaling: learning rates for other batch sizes. law:
    the best learning rate as a function of the batch size. ramp: batches that follow the noise.
    clipping: none, by batch, by example. quantile: clipping where examples are of no use. snr: signal
    and noise over a run. overhead: what statistics cost as sequences grow. all: every study that the
    domain allows, one after the other.

    Args:
        name: the question.
        preset: how much is run: on two cores about two minutes, a quarter of an hour to an hour, or at
            most three hours.
        domain: text, or images, whose pixels are predicted by a convolutional network.
        model: what reads text, a transformer or an LSTM.
        out: where runs, results, figures and the page are written; by default in `studies`. With `all`
            every study has a directory of its own there.
        processes: how many runs at a time.
    """
    from pergrad.lab.studies import STUDIES

    allowed = {one: study for one, study in STUDIES.items() if domain in study.domains}
    chosen = allowed if name == "all" else {name: STUDIES[name]}
    options = [f"--preset {preset}"]
    options += [f"--domain {domain}"] if domain != "text" else []
    options += [f"--model {model}"] if model != "transformer" else []
    for one, study in chosen.items():
        ending = "-".join([one, *(option.split()[1] for option in options)])
        own = (out / one if name == "all" else out) if out else Path("studies") / ending
        size = study.preset(preset, domain, model)
        command = f"pergrad study {one} {' '.join(options)}"
        _study(Console(), study, size, own, processes, command)


def _study(
    console: Console, chosen: Study, preset: Any, out: Path, processes: int, command: str
) -> None:
    """Runs a study, and shows its question, its answers and where its page is."""
    from pergrad.lab.studies import Lab, write

    console.print(
        f"[bold]{chosen.title}[/bold]\n{chosen.question}\n[bold]Claim:[/bold] {chosen.claim}\n"
    )
    with RunsBar(console) as bar:
        lab = Lab(out / "runs", processes, bar.told, bar.say)
        page, answers = write(chosen, preset, out, lab, command)
    table = Table("claim", "answer", "why")
    for verdict in answers:
        table.add_row(*map(Text, (verdict.claim, verdict.answer, verdict.why)))
    console.print(table)
    console.print(Text(str(page), "bold"), soft_wrap=True)


def demo(out: Path = Path("studies/demo"), processes: int = 2) -> None:
    """See all of it in three minutes.

    The plan of a small language model, what its statistics cost beside `jax.grad`, the noise scale of a
    run while it trains, and where a sign goes, on real text; with a page about it.

    Args:
        out: where runs, results, figures and the page are written.
        processes: how many runs at a time.
    """
    from pergrad.lab.bench import price, tables, tasks
    from pergrad.lab.run import records, train
    from pergrad.lab.studies import demo

    console = Console()
    problem = train.make_problem(DEMO)
    params, batch = problem.params, problem.batches[0]
    task = tasks.TASKS["moments"]
    console.rule("The plan: mean and second moment of per-example gradients")
    print(pg.explain(problem.loss, task.statistics)(params, batch))
    console.rule("The price, measured beside jax.grad")
    one_at_a_time = f"{tasks.MICRO_GRAD}{tasks.MICROBATCH}1"
    names = (tasks.FLOOR, tasks.VMAP, one_at_a_time, tasks.PERGRAD, tasks.AUTO)
    found = price.measure(problem.loss, task, params, batch, names=names, rounds=9, budget=4.0)
    tables.show(console, "", price.numbers(found.results), tables.BRIEF)
    console.rule("The noise scale of a run, as it trains on the sources of Python's library")
    watched = demo.PRESET.base
    directory = records.directory(out / "runs", watched)
    with contextlib.closing(NoisePicture(console, watched)) as picture:
        train.train(watched, directory, picture)
        if not picture.points:  # the run was done before
            for row in records.read_metrics(directory):
                picture.advance(row)
    console.print(demo.in_words(demo.noise_of(records.read_metrics(directory))), highlight=False)
    console.rule("A study: where the sign goes")
    _study(console, demo.STUDY, demo.PRESET, out, processes, "pergrad demo")


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (), out: Path = Path("report")
) -> None:
    """Write a page about runs, finished or not.

    Curves, final losses, noise diagnostics, and comparisons of methods that have the same seeds.

    Args:
        runs: directories of runs, or directories that contain them, such as a sweep's.
        out: where the page, its figures and `results.jsonl` are written.
    """
    from pergrad.lab.pages import gather

    page = gather.write(runs, out, command="pergrad " + shlex.join(sys.argv[1:]))
    Console().print(Text(str(page), "bold"), soft_wrap=True)


def watch(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),), port: int = 8321
) -> None:
    """Follow runs in the browser while they go on.

    Loss, learning rate, noise scale, signal-to-noise by layer, the noise in Adam's divisor, and outlier
    examples. The page needs no network, and only this machine can open it.

    Args:
        runs: directories of runs, or directories that contain them. They need not be there yet.
        port: where the page is, on 127.0.0.1; 0 takes one that is free.
    """
    from pergrad.lab.watch import server

    console = Console()
    with server.make(runs, port) as page:
        for path in runs:
            if not path.exists():
                console.print(Text(f"{path} is not there yet: the page waits for it"), soft_wrap=True)
        console.print(Text(page.address, "bold"), soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):  # the usual end
            page.serve_forever()


def explain(loss: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """Print the plan of a loss.

    Which strategy every parameter gets, what it costs and why: what `print(pg.explain(...)(...))` says.

    Args:
        loss: `MODULE:FUNCTION`, which returns a loss, its parameters and a batch; or the lab's model.
    """
    if loss is None:
        from pergrad.lab.run import optimizers, train

        config = Train(optimizer="micro_adam")
        problem = train.make_problem(config)
        args = problem.params, problem.batches[0]
        print(pg.explain(problem.loss, optimizers.make(config).stats)(*args))
        return
    from pergrad.lab.bench import cases

    function, params, batch = cases.example(loss)
    stats = {"mean": pg.Mean(), "second_moment": pg.Mean(pg.power(2)), "norm": pg.Norm()}
    print(pg.explain(function, stats)(params, batch))


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "train": train,
    "sweep": sweep,
    "study": study,
    "report": report,
    "watch": watch,
    "bench": bench,
    "explain": explain,
}


# What a sweep takes several values of, and what to write.
SEVERAL = {
    "--optimizer": "--optimizers adam micro_adam",
    "--learning-rate": "--learning-rates 0.005 0.01 0.02",
    "--seed": "--seeds 0 1 2",
}


def _check_sweep(args: Sequence[str]) -> None:
    for option in (arg.partition("=")[0].replace("_", "-") for arg in args):
        if option in SEVERAL:
            raise LabError(
                f"a sweep takes several values where a run has one: write, for example, "
                f"{SEVERAL[option]} in place of {option}."
            )


@contextlib.contextmanager
def _interrupts_are_heard() -> Iterator[None]:
    """Python drops the exceptions of callbacks, such as those of its garbage collector.

    If Ctrl-C comes while a callback runs, its KeyboardInterrupt is dropped too, and the command would go
    on. So an interrupt that was dropped is sent again, a moment later.
    """
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, _thread.interrupt_main).start()
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def main(args: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 for an error that is told in one line, or 2 for a wrong option."""
    args = sys.argv[1:] if args is None else args
    if list(args) == ["--version"]:
        print(f"pergrad {pg.__version__}")
        return 0
    with _interrupts_are_heard():
        return _command(args)


def _command(args: Sequence[str]) -> int:
    try:
        if args and args[0] == "sweep":
            _check_sweep(args)
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="pergrad",
            description="Per-example gradients: train with them, and see what they say. "
            "`pergrad --version` prints the version.",
            args=args,
            config=(tyro.conf.SuppressFixed,),
        )
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command again continues")
        return 130
    except Exception as error:
        if (line := in_one_line(error)) is None:
            raise
        Console(stderr=True).print(Text.assemble(("error: ", "red"), line), soft_wrap=True)
        return 1
    return 0
