"""Whether Adam that divides by mu^2, with a floor, ends below Adam, where, and below which rivals.

With `floor=1` the average of mu^2 is taken to be at least one standard error of its own estimate (see
`pergrad.optim`), so it needs no cap on its updates, as mu^2 alone does. Two things are asked. In which
cells, that is for which batch sizes and numbers of steps, does it end below Adam? And in one cell, the
home, does it end below what Adam's users have at hand: a cap, a longer average, weight decay? Every
method in every cell has a learning rate of its own, tuned with the same number of runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, findings, panels, report
from pergrad.lab.studies._study import LARGE, NEVER, SMALL, Lab, Study, StudyResult

ADAM, FLOORED = "Adam", "MSQ with a floor"
CAPPED, LONGER, DECAYED = "Adam, capped", "Adam, b2 = 0.99", "AdamW"
CAPPED_MSQ, STARTED = "MSQ, capped", "Adam from Mean(square)"
OPTIONS: dict[str, dict[str, Any]] = {
    ADAM: {"optimizer": "adam"},
    FLOORED: {"optimizer": "micro_adam_msq", "floor": 1.0},
    CAPPED: {"optimizer": "adam", "max_update": 1.0},
    LONGER: {"optimizer": "adam", "b2": 0.99},
    DECAYED: {"optimizer": "adam", "weight_decay": 0.1},
    STARTED: {"optimizer": "adam", "start_at_batch": True},
    CAPPED_MSQ: {"optimizer": "micro_adam_msq", "max_update": 1.0},
}
RIVALS = tuple(name for name in OPTIONS if name != FLOORED)
MARGIN = 0.02  # nats within which a cap is said to do nothing for Adam

Cell = tuple[int, int]  # examples in a batch, steps


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. `tuning_seeds` seeds, which are not reported, choose learning rates.

    All rivals run in the cell `home`, and Adam and MSQ with a floor in all `cells`.
    """

    base: Train
    cells: tuple[Cell, ...]
    home: Cell
    seeds: int
    tuning_seeds: int
    rates: tuple[float, ...]
    extensions: int = 2

    def __post_init__(self) -> None:
        if self.home not in self.cells:
            raise LabError(f"the cells do not contain the home, {self.home}.")


_BASE = Train(model=SMALL, validate_every=NEVER, checkpoint_every=NEVER)
PRESETS = {
    "demo": Preset(
        _BASE,
        cells=((16, 200), (32, 100)),
        home=(32, 100),
        seeds=3,
        tuning_seeds=1,
        rates=(8e-3, 1.6e-2),
        extensions=1,
    ),
    "quick": Preset(
        _BASE,
        cells=((16, 300), (64, 300), (64, 1200)),
        home=(64, 300),
        seeds=6,
        tuning_seeds=2,
        rates=(4e-3, 8e-3, 1.6e-2),
    ),
    "full": Preset(
        dataclasses.replace(_BASE, model=LARGE, checkpoint_every=1000),
        cells=((16, 300), (16, 5000), (64, 300), (64, 1200), (64, 5000), (256, 1200), (512, 300)),
        home=(64, 1200),
        seeds=5,
        tuning_seeds=1,
        rates=(1e-3, 2e-3, 4e-3),
    ),
}


def run(preset: Preset, lab: Lab) -> StudyResult:
    methods = {
        name_in(cell, name): dataclasses.replace(
            preset.base, batch_size=cell[0], steps=cell[1], **OPTIONS[name]
        )
        for cell in preset.cells
        for name in (OPTIONS if cell == preset.home else (ADAM, FLOORED))
    }
    tuned = lab.tune(methods, dict.fromkeys(methods, preset.rates), preset)
    at_home = {name: tuned[name_in(preset.home, name)] for name in OPTIONS}
    size, steps = preset.home
    return StudyResult(
        f"{findings.count(tuned)} The cells are {', '.join(map(_cell, preset.cells))}; all methods ran "
        f"with {size} examples x {steps} steps. Capped: no coordinate moves by more than the learning "
        f"rate in a step. {DECAYED}: a weight decay of 0.1. {STARTED}: the average of squares starts at "
        "the mean of the examples' squares in the first batch, in place of 0.",
        [
            _where(preset, tuned),
            findings.at_best(at_home, lab.runs, beside(at_home)),
            findings.tuning(tuned),
        ],
        findings.rows(tuned),
    )


def name_in(cell: Cell, name: str) -> str:
    """The name of a method in a cell, such as `Adam, 64 x 300`."""
    return f"{name}, {_cell(cell)}"


def _cell(cell: Cell) -> str:
    return f"{cell[0]} x {cell[1]}"


# Results of a study that has not come to its end may lack cells or rivals. The others are decided at the
# level that all of them share.


def where(preset: Preset, tuned: Mapping[str, sweep.Tuned]) -> list[decide.Verdict]:
    """Whether MSQ with a floor ends below Adam, in every cell that was run."""
    level = decide.level_of_each(len(preset.cells))
    return [
        _below(tuned, name_in(cell, FLOORED), name_in(cell, ADAM), level)
        for cell in preset.cells
        if {name_in(cell, FLOORED), name_in(cell, ADAM)} <= tuned.keys()
    ]


def beside(at_home: Mapping[str, sweep.Tuned]) -> list[decide.Verdict]:
    """Whether MSQ with a floor ends below each rival, and whether a cap does nothing for Adam."""
    level = decide.level_of_each(len(RIVALS) + 1)
    verdicts = [_below(at_home, FLOORED, rival, level) for rival in RIVALS if rival in at_home]
    if CAPPED in at_home:
        verdicts.append(
            decide.equivalent(
                f"{CAPPED} ends within {MARGIN:g} of {ADAM}",
                at_home[CAPPED].reported,
                at_home[ADAM].reported,
                margin=MARGIN,
                level=level,
                names=(CAPPED, ADAM),
            )
        )
    return verdicts


def _below(tuned: Mapping[str, sweep.Tuned], low: str, high: str, level: float) -> decide.Verdict:
    claim = f"{low} ends below {high}"
    return decide.compare(
        claim, tuned[low].reported, tuned[high].reported, level=level, names=(low, high)
    )


def _where(preset: Preset, tuned: Mapping[str, sweep.Tuned]) -> report.Section:
    verdicts = where(preset, tuned)
    gains = {_cell(cell): v.difference for cell, v in zip(preset.cells, verdicts, strict=True)}
    rows = []
    for cell in preset.cells:
        line = [str(cell[0]), str(cell[1])]
        for name in (ADAM, FLOORED):
            own = tuned[name_in(cell, name)]
            loss = decide.estimate(list(own.reported.values()))
            line += [f"{own.method.learning_rate:.3g}", str(loss)]
        rows.append([*line, str(gains[_cell(cell)])])
    header = ["batch", "steps", "learning rate, Adam", "final loss", "learning rate, with a floor"]
    cells = report.Table("Cells", [*header, "final loss, with a floor", "difference"], rows)
    return report.Section(
        "Where it ends below Adam",
        "Final losses on the half of the validation data that chose nothing, in every cell of batch "
        "size and number of steps. The differences are paired by seeds, and their intervals have the "
        "level that the cells share.",
        figures=[
            report.Figure(
                f"{FLOORED} less {ADAM}",
                "The difference of final losses of runs with the same seed, in each cell (examples in a "
                f"batch x steps). Below 0, {FLOORED} ends lower.",
                lambda fig: figures.bars_with_intervals(
                    fig, gains, xlabel="difference of final losses (nats)"
                ),
            ),
            panels.of_table(
                cells,
                "Learning rates and final losses of each cell",
                f"Of {ADAM} and of {FLOORED}, each at its own best learning rate.",
                names=2,
            ),
        ],
        tables=[cells],
        verdicts=verdicts,
    )


STUDY = Study(
    title="A preconditioner that ends below Adam",
    question="Adam that divides by an average of mu^2, of at least one standard error of its estimate, "
    "needs no cap. For which batch sizes and numbers of steps does it end below Adam, and does it end "
    "below Adam with a cap, a longer average, weight decay or another start?",
    claim="Adam is best when mu^2 dominates what it divides by, and preconditioners that balance mean "
    "and variance are worth finding (arXiv 2510.00236). The paper's own estimator of mu^2 is not known "
    "to us in full: this one is ours.",
    presets=PRESETS,
    run=run,
)
