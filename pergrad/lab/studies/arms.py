"""The layers in which it matters whether a sign is taken of every example's gradient or of their mean.

MicroSign averages the signs of the examples' gradients, Sign takes the sign of their mean. Arms between
the two take the sign of the mean in some groups of layers, and of the examples in the others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from pergrad.lab.compare import decide, sweep
from pergrad.lab.config import Train
from pergrad.lab.pages import findings
from pergrad.lab.run import optimizers, train
from pergrad.lab.studies import _layers
from pergrad.lab.studies._study import LARGE, SMALL, Lab, Study, StudyResult

MICRO, MEAN = "MicroSign", "Sign"
# The groups of layers whose sign is taken of the mean, from the fewest on.
ARMS = {
    "MicroSign but output": ("head",),
    "MicroSign but output, feed-forward, embedding": ("head", "feed-forward", "embedding"),
}


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is run. `tuning_seeds` seeds choose learning rates; the arms begin with MicroSign's."""

    base: Train
    seeds: int
    tuning_seeds: int
    rates: Mapping[str, tuple[float, ...]]
    extensions: int = 2


_RATES = {MICRO: (8e-3, 1.6e-2, 3.2e-2, 6.4e-2), MEAN: (4e-3, 8e-3, 1.6e-2, 3.2e-2)}
PRESETS = {
    "demo": Preset(
        Train(model=SMALL, steps=300, validate_every=300, checkpoint_every=300),
        seeds=4,
        tuning_seeds=1,
        rates={name: rates[1:] for name, rates in _RATES.items()},
        extensions=1,
    ),
    "quick": Preset(
        Train(model=SMALL, steps=2000, validate_every=500, checkpoint_every=500),
        seeds=8,
        tuning_seeds=2,
        rates=_RATES,
    ),
    "full": Preset(
        Train(model=LARGE, steps=5000, validate_every=1000, checkpoint_every=1000),
        seeds=5,
        tuning_seeds=2,
        rates={name: tuple(rate / 2 for rate in rates) for name, rates in _RATES.items()},
    ),
}


def arms_of(base: Train) -> dict[str, Train]:
    """The arms that differ for this model: a group that it does not have makes no difference."""
    names = optimizers.names_of(train.make_problem(base).params)
    arms: dict[str, Train] = {}
    for name, groups in ARMS.items():
        own = ",".join(word for group in groups for word in _layers.GROUPS[group] if word in names)
        if own and own not in {arm.mean_signs for arm in arms.values()}:
            arms[name] = dataclasses.replace(base, optimizer="micro_sign_sgd", mean_signs=own)
    return arms


def run(preset: Preset, lab: Lab) -> StudyResult:
    methods = {
        MICRO: dataclasses.replace(preset.base, optimizer="micro_sign_sgd"),
        **arms_of(preset.base),
        MEAN: dataclasses.replace(preset.base, optimizer="sign_sgd"),
    }
    rates = {name: preset.rates.get(name, preset.rates[MICRO]) for name in methods}
    tuned = lab.tune(methods, rates, preset)
    return StudyResult(
        f"{findings.count(tuned)} A run takes {preset.base.steps} steps of {preset.base.batch_size} "
        "examples. In the layers that an arm's name has, the sign is taken of the mean gradient.",
        [findings.at_best(tuned, lab.runs, decided(tuned)), findings.tuning(tuned)],
        findings.rows(tuned),
    )


def decided(tuned: Mapping[str, sweep.Tuned]) -> list[decide.Verdict]:
    """Whether Sign ends below MicroSign, and each arm below the one before it."""
    pairs = [(later, earlier) for earlier, later in itertools.pairwise(tuned)]
    return findings.compare(tuned, [(MEAN, MICRO), *pairs])


STUDY = Study(
    title="In which layers the sign's place matters",
    question="Sign ends below MicroSign. Which layers does the difference come from?",
    claim="The paper makes none (arXiv 2510.00236). Tested is that the difference comes from layers "
    "with skewed gradients, whose mean and median can differ in sign: the output layer first, then "
    "the feed-forward layers and the embedding.",
    presets=PRESETS,
    run=run,
)
