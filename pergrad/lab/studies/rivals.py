"""Whether Adam that divides by mu^2, with a floor, ends below Adam, where, and below which rivals.

With `floor=1` the average of mu^2 is taken to be at least one standard error of its own estimate (see
`pergrad.optim`), so it needs no cap on its updates, as mu^2 alone does. Three things are asked. In which
cells, that is for which batch sizes, numbers of steps and widths, does it end below Adam? In one cell,
the home, does it end below what Adam's users have at hand, a cap, a longer average, weight decay, and
below other uses of the examples' noise (`run.rivals`)? And does it still, if b2, weight decay and
clipping are tuned for both alike? Every method in every cell has a learning rate of its own, tuned with
the same number of runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Train
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures, findings, panels, report
from pergrad.lab.studies._study import (
    NEVER,
    SMALL,
    Lab,
    Study,
    StudyResult,
)

ADAM, FLOORED = "Adam", "MSQ with a floor"
CAPPED, LONGER, DECAYED = "Adam, capped", "Adam, b2 = 0.99", "AdamW"
CAPPED_MSQ, STARTED = "MSQ, capped", "Adam from Mean(square)"
SHARED, SHRUNK = "weight of sigma^2 by layer", "Adam, shrunk momentum"
CORRECTED = "Adam, corrected by 8 groups"
OPTIONS: dict[str, dict[str, Any]] = {
    ADAM: {"optimizer": "adam"},
    FLOORED: {"optimizer": "micro_adam_msq", "floor": 1.0},
    CAPPED: {"optimizer": "adam", "max_update": 1.0},
    LONGER: {"optimizer": "adam", "b2": 0.99},
    DECAYED: {"optimizer": "adam", "weight_decay": 0.1},
    STARTED: {"optimizer": "adam", "start_at_batch": True},
    CAPPED_MSQ: {"optimizer": "micro_adam_msq", "max_update": 1.0},
    SHARED: {"optimizer": "share_adam"},
    SHRUNK: {"optimizer": "shrunk_adam"},
    CORRECTED: {"optimizer": "corrected_adam"},
}
RIVALS = tuple(name for name in OPTIONS if name != FLOORED)
MARGIN = 0.02  # nats within which a cap is said to do nothing for Adam

ALIKE = ", all tuned"  # follows the name of a method whose other options were tuned as well


class Cell(NamedTuple):
    """Examples in a batch, steps, and the width of the model."""

    batch_size: int
    steps: int
    width: int = SMALL.width

    def __str__(self) -> str:
        wide = f", width {self.width}" if self.width != SMALL.width else ""
        return f"{self.batch_size} x {self.steps}{wide}"


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. `tuning_seeds` seeds, which are not reported, choose learning rates.

    All rivals run in the cell `home`, and Adam and MSQ with a floor in all `cells`. At home these two
    also run with the best of all combinations of `b2`, `decays` and `clips`.
    """

    base: Train
    cells: tuple[Cell, ...]
    home: Cell
    seeds: int
    tuning_seeds: int
    rates: tuple[float, ...]
    b2: tuple[float, ...]
    decays: tuple[float, ...]
    clips: tuple[float | None, ...]
    extensions: int = 2

    def __post_init__(self) -> None:
        if self.home not in self.cells:
            raise LabError(f"the cells do not contain the home, {self.home}.")


_BASE = Train(model=SMALL, validate_every=NEVER, checkpoint_every=NEVER)
PRESETS = {
    "demo": Preset(
        _BASE,
        cells=(Cell(16, 200), Cell(32, 100)),
        home=Cell(32, 100),
        seeds=3,
        tuning_seeds=1,
        rates=(8e-3, 1.6e-2),
        b2=(0.95,),
        decays=(0.0, 0.1),
        clips=(None,),
        extensions=1,
    ),
    "quick": Preset(
        _BASE,
        cells=(Cell(16, 300), Cell(64, 300), Cell(64, 1200), Cell(256, 300)),
        home=Cell(64, 300),
        seeds=6,
        tuning_seeds=2,
        rates=(4e-3, 8e-3, 1.6e-2),
        b2=(0.95, 0.99),
        decays=(0.0, 0.1, 0.3),
        clips=(None, 1.0),
    ),
    "full": Preset(
        _BASE,
        cells=(
            *(Cell(16, 300), Cell(16, 5000), Cell(64, 300), Cell(64, 1200), Cell(512, 300)),
            *(Cell(64, 300, 64), Cell(64, 300, 128), Cell(16, 5000, 64)),
        ),
        home=Cell(64, 1200),
        seeds=5,
        tuning_seeds=1,
        rates=(4e-3, 8e-3, 1.6e-2),
        b2=(0.95, 0.99),
        decays=(0.0, 0.1, 0.3),
        clips=(None, 1.0),
    ),
}


def run(preset: Preset, lab: Lab) -> StudyResult:
    methods = {
        name_in(cell, name): _in(cell, preset.base, **OPTIONS[name])
        for cell in preset.cells
        for name in (OPTIONS if cell == preset.home else (ADAM, FLOORED))
    }
    tuned = lab.tune(methods, dict.fromkeys(methods, preset.rates), preset)
    at_home = {name: tuned[name_in(preset.home, name)] for name in OPTIONS}
    options = {name + ALIKE: _options(preset, name) for name in (ADAM, FLOORED)}
    chosen = lab.choose(options, dict.fromkeys(options, preset.rates), preset)
    return StudyResult(
        f"{findings.count(tuned)} The cells (examples x steps) are "
        f"{'; '.join(map(str, preset.cells))}; all methods ran in the cell {preset.home}. Capped: no "
        f"coordinate moves by more than the learning rate in a step. {DECAYED}: a weight decay of 0.1. "
        f"{STARTED}: the average of squares starts at the mean of the examples' squares in the first "
        f"batch, in place of 0. {SHARED}: mu^2 with as much of Adam's sigma^2 / B as the layer's own "
        f"gradient is noise, capped. {SHRUNK}: where noise could have made the momentum, it is "
        f"smaller. {CORRECTED}: each of eight groups is divided by what the others tell, "
        "whose spread corrects the inverse (arXiv 2605.20756), capped. All tuned: the best of all "
        f"combinations of b2 in {preset.b2}, weight decay in {preset.decays} and clipping at "
        f"{preset.clips}.",
        [
            _where(preset, tuned),
            findings.at_best(at_home, lab.runs, beside(at_home)),
            dataclasses.replace(
                findings.at_best(chosen.tuned, lab.runs, alike(chosen.tuned)),
                title="Everything tuned for both",
            ),
            findings.options(chosen.every, chosen.best, "b2, weight decay and clipping"),
            findings.tuning(tuned),
        ],
        [
            *findings.rows(tuned),
            *findings.rows(chosen.every),
            *findings.rows(chosen.tuned),
            {"best": chosen.best},
        ],
    )


def name_in(cell: Cell, name: str) -> str:
    """The name of a method in a cell, such as `Adam, 64 x 300`."""
    return f"{name}, {cell}"


def _in(cell: Cell, base: Train, **options: Any) -> Train:
    model = dataclasses.replace(base.model, width=cell.width)
    return dataclasses.replace(
        base, batch_size=cell.batch_size, steps=cell.steps, model=model, **options
    )


def _options(preset: Preset, name: str) -> dict[str, Train]:
    """All combinations of the options that are tuned for both, by their names."""
    return {
        f": b2 {b2:g}, decay {decay:g}, {f'clip {clip:g}' if clip else 'no clip'}": _in(
            preset.home, preset.base, b2=b2, weight_decay=decay, clip=clip, **OPTIONS[name]
        )
        for b2, decay, clip in itertools.product(preset.b2, preset.decays, preset.clips)
    }


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


def alike(tuned: Mapping[str, sweep.Tuned]) -> list[decide.Verdict]:
    """Whether MSQ with a floor ends below Adam if everything is tuned for both."""
    return [_below(tuned, FLOORED + ALIKE, ADAM + ALIKE, 0.95)]


def _below(tuned: Mapping[str, sweep.Tuned], low: str, high: str, level: float) -> decide.Verdict:
    claim = f"{low} ends below {high}"
    return decide.compare(
        claim, tuned[low].reported, tuned[high].reported, level=level, names=(low, high)
    )


def _where(preset: Preset, tuned: Mapping[str, sweep.Tuned]) -> report.Section:
    verdicts = where(preset, tuned)
    gains = {str(cell): v.difference for cell, v in zip(preset.cells, verdicts, strict=True)}
    rows = []
    for cell in preset.cells:
        line = [*map(str, cell)]
        for name in (ADAM, FLOORED):
            own = tuned[name_in(cell, name)]
            loss = decide.estimate(list(own.reported.values()))
            line += [f"{own.method.learning_rate:.3g}", str(loss)]
        rows.append([*line, str(gains[str(cell)])])
    header = [
        "batch",
        "steps",
        "width",
        "learning rate, Adam",
        "final loss",
        "learning rate, with a floor",
    ]
    cells = report.Table("Cells", [*header, "final loss, with a floor", "difference"], rows)
    return report.Section(
        "Where it ends below Adam",
        "Final losses on the half of the validation data that chose nothing, in every cell of batch "
        "size, number of steps and width. The differences are paired by seeds, and their intervals have "
        "the level that the cells share.",
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
                names=3,
            ),
        ],
        tables=[cells],
        verdicts=verdicts,
    )


STUDY = Study(
    title="A preconditioner that ends below Adam",
    question="Adam that divides by an average of mu^2, of at least one standard error of its estimate, "
    "needs no cap. For which batch sizes, numbers of steps and widths does it end below Adam, and does "
    "it end below other ways to improve Adam, and with all options tuned for both?",
    claim="Adam is best when mu^2 dominates what it divides by, and preconditioners that balance mean "
    "and variance are worth finding (arXiv 2510.00236). The paper's own estimator of mu^2 is not known "
    "to us in full: this one is ours.",
    presets=PRESETS,
    run=run,
)
