"""What a study is: a question, a claim, three sizes, and a function that runs one of them.

Everything that decides is written down here and in the studies before any run: which methods, rates and
seeds, which comparisons, and (in `decide`) how seeds are paired and when an interval supports a claim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import DomainName, KindName, Model, Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import report
from pergrad.lab.run import records

# The models of most presets. On one core a step of 16 examples takes 5 ms with the first, and 30 ms with
# the second.
SMALL = Model(layers=2, width=32, heads=4, context=32)
LARGE = Model(layers=2, width=64, heads=4, context=64)
NEVER = 10**6  # steps between validations or checkpoints of short runs, which validate at the end alone


class Amount(Protocol):
    """How much a preset tunes: seeds that are reported, and others that choose learning rates."""

    @property
    def seeds(self) -> int: ...

    @property
    def tuning_seeds(self) -> int: ...

    @property
    def extensions(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Lab:
    """Where a study works, in how many processes, and whom it tells how far it is."""

    runs: Path
    processes: int = 1
    told: sweep.Told = sweep.silent
    say: Callable[[str], None] = lambda line: None

    def run(self, runs: Iterable[Train]) -> sweep.Results:
        """Runs those of the runs that are not done yet."""
        return sweep.run_all(runs, self.runs, processes=self.processes, told=self.told)

    def tune(
        self,
        methods: Mapping[str, Train],
        rates: Mapping[str, Sequence[float]],
        amount: Amount,
        *,
        reported: bool = True,
    ) -> dict[str, sweep.Tuned]:
        """Tunes every method's learning rate, with as many seeds as the preset says.

        It then runs the seeds that are `reported`.
        """
        return sweep.tune(
            methods,
            rates,
            range(amount.seeds if reported else 0),
            self.runs,
            tuning_seeds=amount.tuning_seeds,
            processes=self.processes,
            extensions=amount.extensions,
            told=self.told,
        )

    def choose(
        self,
        methods: Mapping[str, Mapping[str, Train]],
        rates: Mapping[str, Sequence[float]],
        amount: Amount,
    ) -> Chosen:
        """Chooses the best of each method's options, each at its own best learning rate.

        The seeds that choose learning rates choose the option, too, by the lowest mean loss of the rates
        that were tried. Then the chosen option runs with the seeds that are reported.
        """
        options = {name + o: one for name, own in methods.items() for o, one in own.items()}
        by_option = {name + o: rates[name] for name, own in methods.items() for o in own}
        every = self.tune(options, by_option, amount, reported=False)
        best = {
            name: min(own, key=lambda o: every[name + o].tuning_loss) for name, own in methods.items()
        }
        chosen = {name: methods[name][option] for name, option in best.items()}
        return Chosen(every, best, self.tune(chosen, rates, amount))


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Methods whose options were chosen: `every` option, the `best` of each method, `tuned`.

    `every` is named by the method's name followed by the option's, the others by the method's name.
    """

    every: dict[str, sweep.Tuned]
    best: dict[str, str]
    tuned: dict[str, sweep.Tuned]


@dataclasses.dataclass(frozen=True)
class StudyResult:
    """What a study found. `ran` is a paragraph on what was run.

    `rows` become results.jsonl, below a line with the command, the preset and the versions.
    """

    ran: str
    sections: Sequence[report.Section]
    rows: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Study:
    """A question and how it is answered. `run` is given a preset, a dataclass of the study's own."""

    title: str
    question: str
    claim: str
    presets: Mapping[str, Any]
    run: Callable[[Any, Lab], StudyResult]
    domains: tuple[DomainName, ...] = ("text", "images")

    def preset(self, name: str, domain: DomainName = "text", kind: KindName = "transformer") -> Any:
        """A preset with the data of a domain and a kind of model, which are options of its `base`."""
        if domain not in self.domains:
            raise LabError(f"this study is about {' and '.join(self.domains)} alone, not {domain}.")
        preset = self.presets[name]
        base = preset.base
        model = dataclasses.replace(base.model, kind=kind)
        data = base.data if domain == base.domain else ""
        base = dataclasses.replace(base, domain=domain, data=data, model=model)
        return dataclasses.replace(preset, base=base)


def write(
    study: Study, preset: Any, out: Path, lab: Lab, command: str
) -> tuple[Path, list[decide.Verdict]]:
    """Runs a study and writes results, figures and page; returns the page's path, and the answers.

    The versions are those from before the runs, so that the commit is the one that fixed the rule.
    """
    about = {"preset": dataclasses.asdict(preset), "versions": records.versions()}
    result = study.run(preset, lab)
    page = report.Page(
        title=study.title,
        question=study.question,
        claim=study.claim,
        ran=f"{result.ran}\n\n    {command}",
        sections=result.sections,
        config=about,
    )
    answers = [verdict for section in result.sections for verdict in section.verdicts]
    return report.write(page, out, [{"command": command, **about}, *result.rows]), answers
