"""From the directories of runs, done or not, to a page about them.

Runs that differ in the seed alone are one method. A method is named by its optimizer and by the options
in which the methods differ. Nothing is tuned here: whoever made the runs chose their options, and the
page says so. Methods are compared if they have the same data and the same seeds, and all their runs are
done. Each is compared with the first of them, paired by seeds, at a level that all claims share (see
`decide`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from matplotlib.figure import Figure as Sheet

from pergrad.lab import config as configs
from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import OptimizerName, Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, panels, report
from pergrad.lab.pages.findings import Curve, curve
from pergrad.lab.run import found, records

FEW_LAYERS = 14  # lines that a figure has room for
FEW_METHODS = 6  # figures of layers that a page has room for


@dataclasses.dataclass(frozen=True)
class Found:
    """A run's directory, as far as the run has come. `result` is None while it is not done."""

    path: Path
    config: Train
    digest: str  # of the data
    versions: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any] | None

    @property
    def diverged(self) -> bool:
        at_the_end = bool(self.rows) and found.number(self.rows[-1]["loss"]) is None
        return at_the_end or (self.result is not None and self.result["diverged"])

    @property
    def method(self) -> tuple[Train, str]:
        """What defines the method of a run: its configuration without the seed, and its data."""
        return dataclasses.replace(self.config, seed=0), self.digest


Methods = Mapping[str, Sequence[Found]]  # a method has at least one run, and one run for a seed


def write(paths: Sequence[Path], out: Path, *, command: str) -> Path:
    """Writes `results.jsonl`, figures and page of all runs in `paths`; returns the page's path."""
    methods = group(find(paths))
    return report.write(page(methods, command=command), out, _results(methods))


# The runs.


def find(paths: Sequence[Path]) -> list[Found]:
    """The runs in `paths`, each the directory of a run or one that contains runs, at any depth."""
    if not paths:
        raise LabError("which runs? Name their directories, such as runs/first.")
    runs: dict[Path, Found] = {}
    for path in paths:
        if not path.is_dir():
            raise LabError(f"there is no directory {path}.")
        inside = found.directories(path)
        if not inside:
            raise LabError(f"there is no run in {path}: a run's directory has a config.json.")
        for run in sorted(map(_read, inside), key=_order):
            runs.setdefault(run.path.resolve(), run)
    if not any(run.rows for run in runs.values()):
        raise LabError(f"{paths[0]} has no metrics yet: wait for its first steps.")
    return list(runs.values())


def _order(run: Found) -> Any:
    config = run.config
    optimizer = get_args(OptimizerName).index(config.optimizer)
    return optimizer, config.batch_size, config.learning_rate, config.seed, str(run.path)


def _read(path: Path) -> Found:
    said = found.about(path)
    rows = found.rows(path / "metrics.jsonl")
    return Found(path, said.config, said.digest, said.versions, rows, records.read_result(path))


def group(runs: Sequence[Found]) -> dict[str, list[Found]]:
    """Runs by the name of their method. Of two runs with one method and seed, the longer one counts."""
    methods: dict[Any, dict[int, Found]] = {}
    for run in runs:
        by_seed = methods.setdefault(run.method, {})
        same = by_seed.get(run.config.seed)
        if same is None or _progress(run) > _progress(same):
            by_seed[run.config.seed] = run
    names = found.names([config for config, _ in methods])
    count = collections.Counter(names)
    out = {}
    for name, ((_, digest), by_seed) in zip(names, methods.items(), strict=True):
        full = f"{name}, data {digest[:8]}" if count[name] > 1 else name
        out[full] = [by_seed[seed] for seed in sorted(by_seed)]
    return out


def _progress(run: Found) -> tuple[bool, int]:
    return run.result is not None, len(run.rows)


def _results(methods: Methods) -> Iterator[dict[str, Any]]:
    for name, runs in methods.items():
        for run in runs:
            end = run.result or dict.fromkeys(records.RESULT) | {
                "steps": len(run.rows),
                "diverged": run.diverged,
            }
            at = {"method": name, "learning_rate": run.config.learning_rate, "seed": run.config.seed}
            yield at | {"run": str(run.path), "finished": run.result is not None, **end}


# The page.


def page(methods: Methods, *, command: str) -> report.Page:
    runs = [run for own in methods.values() for run in own]
    done = sum(run.result is not None for run in runs)
    sections = [_losses(methods), _training(methods), *_noise(methods), _listed(methods)]
    return report.Page(
        title="A report of runs",
        question=f"How did the runs of {_methods(len(methods))} go: {'; '.join(methods)}?",
        claim="None was made beforehand: the runs were there before this page asked.",
        ran=f"{len(runs)} runs of {_methods(len(methods))}; {done} of the runs are done. This page "
        "tuned nothing: where the loss of a method is lower, the reason may be that its learning rate "
        "suits it better."
        f"\n\n    {command}",
        sections=sections,
        config={
            "page made with": records.versions(),
            **report.settings(
                {
                    name: {
                        **configs.to_json(own[0].config),
                        "seed": ", ".join(str(run.config.seed) for run in own),
                        "data digest": own[0].digest,
                        "made with": own[0].versions,
                    }
                    for name, own in methods.items()
                }
            ),
        },
    )


def _methods(count: int) -> str:
    return f"{count} methods" if count > 1 else "one method"


def _losses(methods: Methods) -> report.Section:
    final = {name: _final(own) for name, own in methods.items()}
    estimates = {name: decide.estimate(list(by.values())) for name, by in final.items() if by}
    verdicts, said = _verdicts(methods)
    rows = [
        [
            name,
            f"{len(final[name])} of {len(own)}",
            str(estimates.get(name, "-")),
            _examples(own[0].config),
        ]
        for name, own in methods.items()
    ]
    header = ["method", "runs done", "final loss (nats)", "examples in a run"]
    table = report.Table("Methods", header, rows)
    drawn = panels.of_table(
        table,
        "Final loss of each method",
        "How many runs are done, the loss at the end of their training (lower is better), and how many "
        "examples a run takes.",
    )
    return report.Section(
        "Final losses",
        "The losses are those on the test half of the validation data, of the runs that are done. One "
        f"method ends below another if its loss is lower. {said}",
        figures=[drawn] if estimates else [],
        tables=[table],
        verdicts=verdicts,
    )


def _examples(config: Train) -> str:
    return str(config.steps * config.batch_size)


def _final(runs: Sequence[Found]) -> dict[int, float]:
    """The final loss of the runs that are done, by seed."""
    ends = {run.config.seed: run.result for run in runs}
    return {s: sweep.loss_of(end, "test_loss") for s, end in ends.items() if end is not None}


def _verdicts(methods: Methods) -> tuple[list[decide.Verdict], str]:
    """The verdicts on all methods that can be compared, and a sentence on the others."""
    alike: dict[Any, list[str]] = {}
    for name, own in methods.items():
        if all(run.result is not None for run in own):
            alike.setdefault((own[0].digest, *(run.config.seed for run in own)), []).append(name)
    pairs = [(name, first) for first, *others in alike.values() for name in others]
    compared = {name for pair in pairs for name in pair}
    left = [name for name in methods if name not in compared]
    said = "Methods are compared if they have the same data and the same seeds, and all runs are done."
    said += f" Compared with no other: {'; '.join(left)}." if left else ""
    level = decide.level_of_each(max(1, len(pairs)))
    verdicts = [
        decide.compare(
            f"{name} ends below {first}",
            _final(methods[name]),
            _final(methods[first]),
            level=level,
            names=(name, first),
        )
        for name, first in pairs
    ]
    return verdicts, said


def _training(methods: Methods) -> report.Section:
    begun = {name: [run for run in own if run.rows] for name, own in methods.items()}
    begun = {name: own for name, own in begun.items() if own}

    def drawn(title: str, field: str, ylabel: str) -> report.Figure:
        curves = {
            name: curve(
                [[found.number(row.get(field)) for row in run.rows] for run in own],
                own[0].config.batch_size,
            )
            for name, own in begun.items()
        }
        caption = "Each point is the mean over a twentieth of the steps, and over the seeds."
        return _lines(title, caption, curves, ylabel, methods)

    return report.Section(
        "Training",
        "How the loss fell while the examples went by. Where some runs of a method are not done, a "
        "point is the mean over the runs that have come so far.",
        figures=[
            drawn("Training loss", "loss", "training loss (nats)"),
            drawn("Gradient norm", "gradient_norm", "norm of the mean gradient"),
        ],
    )


def _noise(methods: Methods) -> Iterator[report.Section]:
    """The noise diagnostics, if a run has any."""
    scales = _curves(methods, lambda noise: noise.get("noise_scale"))
    if not scales:
        return
    caption = "The noise scale tr Sigma / |mu|^2, the mean over seeds."
    drawn = [_lines("Noise scale", caption, scales, "noise scale (examples)", methods, logy=True)]
    text = (
        "The noise scale is the size of the batch in whose mean gradient noise and signal are equal. A "
        "step without a point is one at which no run saw any signal: its noise scale would be infinite."
    )
    seen = [noise for own in methods.values() for noise in _noises(own)]
    layers = sorted({layer for noise in seen for layer in found.layers_of(noise)})
    if len(layers) > FEW_LAYERS or len(scales) > FEW_METHODS:
        text += (
            " The noise in each layer is not drawn, because there are too many layers or methods: it is "
            "in the file metrics.jsonl of each run."
        )
    elif layers:
        drawn += [_layers(name, methods[name], layers) for name in scales]
    yield report.Section("Noise", text, figures=drawn)


def _layers(name: str, runs: Sequence[Found], paths: Sequence[str]) -> report.Figure:
    def part(path: str) -> Callable[[Mapping[str, Any]], float | None]:
        return lambda noise: found.noise_in_divisor(noise, path)

    every = {found.layer_name(path): _curves({name: runs}, part(path)) for path in paths}
    curves = {layer: own[name] for layer, own in every.items() if name in own}
    caption = (
        "How much of the square of a batch's mean gradient is noise, in each layer: 0 is all signal, 1 "
        "all noise. It is noise_share / (1 + noise_share), and 1 where no signal was seen."
    )
    return _lines(f"Noise share of layers: {name}", caption, curves, "part that is noise", curves)


def _noises(runs: Sequence[Found]) -> list[Mapping[str, Any]]:
    """The noise diagnostics of all rows that have them."""
    noises = (found.noise_of(row) for run in runs for row in run.rows)
    return [noise for noise in noises if noise is not None]


def _curves(methods: Methods, number: Callable[[Mapping[str, Any]], Any]) -> dict[str, Curve]:
    """The curves of one noise diagnostic over the steps that have it. Infinite values are left out."""
    out = {}
    for name, own in methods.items():
        at: dict[int, list[float]] = {}
        for run in own:
            for row in run.rows:
                noise = found.noise_of(row)
                x = None if noise is None else found.number(number(noise))
                if x is not None:
                    at.setdefault(row["step"] * run.config.batch_size, []).append(x)
        if at:
            points = [(x, decide.estimate(at[x])) for x in sorted(at)]
            out[name] = tuple(np.array([[x, p.mean, p.low, p.high] for x, p in points]).T)
    return out


def _lines(
    title: str,
    caption: str,
    curves: Mapping[str, Curve],
    ylabel: str,
    names: Mapping[str, Any],
    *,
    logy: bool = False,
) -> report.Figure:
    def draw(fig: Sheet) -> None:
        figures.lines_with_bands(fig, curves, "examples seen", ylabel, names=list(names), logy=logy)

    return report.Figure(title, caption, draw)


def _listed(methods: Methods) -> report.Section:
    rows = []
    for name, own in methods.items():
        for run in own:
            loss = None if run.result is None else run.result["test_loss"]
            steps = f"{len(run.rows)} of {run.config.steps}"
            shown = f"{loss:.4g}" if loss is not None else "diverged" if run.result else "-"
            rows.append([name, str(run.config.seed), steps, _state(run), shown, str(run.path)])
    header = ["method", "seed", "steps", "state", "final loss (nats)", "directory"]
    text = "Every run, how far it has come, and where its files are."
    table = report.Table("All runs", header, rows)
    drawn = panels.of_table(
        table,
        "Final loss of each run",
        "How many steps each run has done, and the loss at the end of training (lower is better).",
        names=2,
    )
    is_done = any(run.result is not None for own in methods.values() for run in own)
    return report.Section("Runs", text, figures=[drawn] if is_done else [], tables=[table])


def _state(run: Found) -> str:
    if run.result is None:
        return "diverged, unfinished" if run.diverged else "unfinished" if run.rows else "not begun"
    return "diverged" if run.diverged else "done"
