"""Every case meets the statistics of whole gradients, and of other units than examples."""

from collections.abc import Sequence
from typing import Any

import jax
import pytest

import pergrad as pg
from pergrad._call import Call, Request
from pergrad._cut import STEPS, TERMS
from pergrad._ir import backend
from tests.cases import CASES, Case
from tests.conftest import UNITS, assert_agrees
from tests.test_cases import CASE, HANDFUL, PLAIN, STRIDE, VARIANTS, WEIGHTED, Runner
from tests.test_structures import LOOPED
from tests.whole import Questions

STRATEGIES = ("auto", "gram", "streamed", "materialise", "summed", "sparse")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whole_gradients_and_units(case: Case) -> None:
    # What takes time is to compile, so there is one program with everything, and another one with what
    # can be taken in by parts, inside of loops, or, for some of the other cases, with what keeps the
    # factors. From case to case the strategies and the variants move on.
    number = CASES.index(case)
    first, second = (STRATEGIES[(number + k) % len(STRATEGIES)] for k in (0, 2))
    run(case, first, VARIANTS[number % len(VARIANTS)])
    if case in LOOPED:
        names = (IN_PARTS, SOME_IN_PARTS)[number % 2]
    elif number % 6 == 0:
        names = WITH_FACTORS
    else:
        return
    run(case, second, VARIANTS[(number + STRIDE) % len(VARIANTS)], names)


IN_PARTS = ("norm", "norm_where", "norm_by_leaf", "dot")
SOME_IN_PARTS = (*IN_PARTS, "gram_where")  # of half of the parameters whole gradients are wanted
WITH_FACTORS = ("norm", "gram", "gram_where", "dot", "clipped", "clipped_by_leaf")


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_mixed_precision(case: Case) -> None:
    number = CASES.index(case)
    variant, names = VARIANTS[number % len(VARIANTS)], (None, WITH_FACTORS)[number % 2]
    run(case, STRATEGIES[number // 3 % len(STRATEGIES)], variant, names, dtype="mixed")


def run(
    case: Case,
    strategy: str,
    variant: tuple[bool, str, Any],
    names: Sequence[str] | None = None,
    dtype: str = "float64",
) -> None:
    """Asks a case for statistics of whole gradients: for these, or for all and other units too."""
    runner = Runner(case, variant, dtype, once=True)
    call = Call(Request(runner.loss, pg.Mean(), **runner.options), runner.args, {})
    questions = Questions(runner.truth, call.paths)
    units = {name: unit.statistic for name, unit in UNITS.items()} if names is None else {}
    spared = ("clipped_square", "clipped_by_leaf")[CASES.index(case) % 2]
    whole = {name: questions.statistics[name] for name in names or {*questions.statistics} - {spared}}
    argnums = case.argnums
    params = runner.args[argnums] if isinstance(argnums, int) else tuple(runner.args[n] for n in argnums)
    direction = questions.direction(params)

    stats_fn = pg.value_and_stats(
        runner.loss, {"whole": whole, "units": units}, strategy=strategy, **runner.options
    )
    value, stats = jax.jit(stats_fn)(*runner.args, direction=direction, example_weights=runner.weights)
    assert_agrees((value, stats["units"]), runner.truth, runner.weights, runner.error)
    questions.assert_agrees(stats["whole"], direction, runner.weights, runner.error)


@pytest.mark.parametrize("name", HANDFUL[::2])
def test_accelerators_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "backend", lambda: backend.BACKENDS["gpu"])
    run(CASE[name], "auto", WEIGHTED)


@pytest.mark.parametrize("name", HANDFUL[1::2])
def test_without_any_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rules in (TERMS, STEPS):
        for primitive in list(rules):
            monkeypatch.delitem(rules, primitive)
    run(CASE[name], "auto", PLAIN)
    run(CASE[name], "gram", WEIGHTED)
