"""The command `pergrad`: every subcommand is a function, its options are the function's arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, get_args

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pergrad as pg
from pergrad.lab.compare import decide
from pergrad.lab.config import (
    CaseName,
    LargeName,
    Model,
    OptimizerName,
    PartName,
    PresetName,
    StudyName,
    TargetName,
    TaskName,
    Train,
)
from pergrad.lab.errors import LabError, in_one_line
from pergrad.lab.files import disk_errors
from pergrad.lab.progress import ProgressBar, RunsBar

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
    """Train a language model.

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
        seeds: each method runs with all of them.
        processes: how many runs at a time.
        extensions: how often a grid may grow where the best value sits on its edge.
    """
    from pergrad.lab.compare import sweep as sweeps
    from pergrad.lab.pages import findings

    console = Console()

    methods = sweeps.methods(config.as_train(), optimizers, batch_sizes)
    with RunsBar(console) as bar:
        tuned = sweeps.tune(
            methods,
            dict.fromkeys(methods, learning_rates),
            seeds,
            out / "runs",
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
    name: Annotated[StudyName, tyro.conf.Positional],
    preset: PresetName = "demo",
    out: Path | None = None,
    processes: int = 2,
) -> None:
    """Test what the paper claims, and write a page about what was found.

    sign: where the sign goes in SignSGD. adam: what Adam divides by. plane: all weights of mean square
    and variance. scaling: learning rates for other batch sizes. clipping: none, by batch, by example.
    snr: signal and noise over a run. overhead: what statistics cost as sequences grow.

    Args:
        name: the question.
        preset: how much is run: about two minutes, a quarter of an hour, or some hours.
        out: where runs, results, figures and the page are written; by default in `studies`.
        processes: how many runs at a time.
    """
    from pergrad.lab.studies import STUDIES, Lab, write

    console = Console()
    chosen = STUDIES[name]
    out = out or Path("studies") / f"{name}-{preset}"
    console.print(
        f"[bold]{chosen.title}[/bold]\n{chosen.question}\n[bold]Claim:[/bold] {chosen.claim}\n"
    )
    with RunsBar(console) as bar:
        lab = Lab(out / "runs", processes, bar.told, bar.say)
        command = f"pergrad study {name} --preset {preset}"
        page, answers = write(chosen, chosen.presets[preset], out, lab, command)
    table = Table("claim", "answer", "why")
    for verdict in answers:
        table.add_row(*map(Text, (verdict.claim, verdict.answer, verdict.why)))
    console.print(table)
    console.print(Text(str(page), "bold"), soft_wrap=True)


def demo(out: Path = Path("studies/demo"), processes: int = 2) -> None:
    """See all of it in three minutes.

    The plan of a small language model, what its statistics cost beside `jax.grad`, and a comparison of
    three optimizers on real text, with a page about it.

    Args:
        out: where runs, results, figures and the page are written.
        processes: how many runs at a time.
    """
    from pergrad.lab.bench import price, tables, tasks
    from pergrad.lab.run import train

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
    tables.show(console, "", price.numbers(found.results), tables.RUNS)
    console.rule("A study: three places for the sign, on the sources of Python's library")
    study("sign", "demo", out, processes)


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


def explain(loss: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """Print the plan of a loss.

    Which strategy every parameter gets, what it costs and why.

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


def bench(
    loss: Annotated[str | None, tyro.conf.Positional] = None,
    cases: tuple[CaseName | LargeName, ...] = (),
    tasks: tuple[TaskName, ...] = (),
    parts: tuple[PartName, ...] = (),
    rounds: int = 30,
    budget: float = 4.0,
    peak: tuple[TaskName, ...] = ("moments",),
    rates: bool = False,
    target: TargetName | None = None,
    ours: bool = False,
    out: Path = Path("bench"),
) -> None:
    """Measure what statistics cost on this machine.

    Time, memory and compilation of pergrad beside `jax.grad`, `vmap(grad)`, optax and jax_privacy, in
    one process that wants the machine for itself. Without options all models, how one of them grows,
    and compilation, in an hour or more on two cores. The same command again continues.

    Args:
        loss: yours: `MODULE:FUNCTION`, which returns a loss, its parameters and a batch.
        cases: these models only; the last nine, from `large_mlp` on, only with --target.
        tasks: these statistics only.
        parts: models, growth of one as its sizes grow, compilation; all if nothing else is chosen.
        rounds: at most so many timed runs of each candidate, which take turns; the fastest counts.
        budget: seconds after which a candidate sits out the remaining rounds.
        peak: tasks for which each candidate also runs in a process of its own, for the memory of it all.
        rates: measure the rates that the plan prices strategies with, in place of statistics.
        target: compile for this chip and judge the compiled programs; nothing runs.
        ours: leave out other packages and `vmap(grad)`, which take most of the time.
        out: where `results.json` and the figures go, or `rates.json`, or a target's `tpu-v5e.json`.
    """
    if rates:
        if loss or cases or tasks or parts or target:
            raise LabError("--rates measures the machine: no loss, cases, tasks, parts or target.")
        _bench_rates(rounds, budget, out / "rates.json")
        return
    if target:
        if parts:
            raise LabError("--target compiles models, and has no parts.")
        _bench_target(target, (*cases, loss) if loss else cases, tasks, ours, out)
        return
    if large := [name for name in cases if name in get_args(LargeName)]:
        raise LabError(f"{', '.join(large)}: too large to run here. With --target it is compiled.")
    from pergrad.lab.bench import drawings, run, tables

    console = Console()
    wanted = run.items(parts, (*cases, loss) if loss else cases, tasks)
    settings = run.Settings(rounds, budget, peak)
    every = run.run(
        wanted,
        lambda item: run.measure(item, settings, ours=ours),
        run.about(settings),
        out / "results.json",
    )
    for item, rows in run.comparisons(every).items():
        if item.part == "models":
            tables.show(console, str(item), rows, tables.RUNS)
    if built := tables.building(every):
        console.print(
            Text(f"seconds to trace and compile, then multiples of them\n{built}"), soft_wrap=True
        )
    console.print(f"times are the fastest of at most {rounds} rounds")
    for path in (out / "results.json", *drawings.write(every, out)):
        console.print(Text(str(path), "bold"), soft_wrap=True)


def _bench_rates(rounds: int, budget: float, out: Path) -> None:
    from pergrad.lab.bench import rates
    from pergrad.lab.run import records

    if rounds < 1:
        raise LabError(f"rounds must be at least 1, not {rounds}.")
    with disk_errors(out):  # before anything is measured that could not be written
        out.parent.mkdir(parents=True, exist_ok=True)
    measured = rates.measure(rounds=rounds, budget=budget)
    known = rates.of_package()
    records.write_json(out, rates.with_measured(known, measured))
    print(rates.table(known[rates.name_of_today(known)]["rates"], measured))
    Console().print(Text(str(out), "bold"), soft_wrap=True)


def _bench_target(
    target: TargetName, names: Sequence[str], wanted: Sequence[TaskName], ours: bool, out: Path
) -> None:
    from pergrad.lab.bench import compilers, run, tables
    from pergrad.lab.bench import target as targets

    compilers.use(target)
    console = Console()
    path = out / f"{target.replace(':', '-')}.json"
    every = run.run(
        targets.items(names, wanted),
        lambda item: targets.measure(item, target, ours=ours),
        targets.about(target),
        path,
    )
    for item, rows in run.comparisons(every).items():
        tables.show(console, targets.title(item, target), rows, targets.columns(target))
    console.print(Text(str(path), "bold"), soft_wrap=True)


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "train": train,
    "sweep": sweep,
    "study": study,
    "report": report,
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


def main(args: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 for an error that is told in one line, or 2 for a wrong option."""
    args = sys.argv[1:] if args is None else args
    if list(args) == ["--version"]:
        print(f"pergrad {pg.__version__}")
        return 0
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
