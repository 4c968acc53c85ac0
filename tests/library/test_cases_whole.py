"""Every case meets the statistics of whole gradients, and of other units than examples."""

import pytest

from pergrad._cut import STEPS, TERMS
from pergrad._ir import backend
from tests.support.cases import Case
from tests.support.every_case import CASE, CASES, LOOPED
from tests.support.runner import HANDFUL, PLAIN, STRIDE, VARIANTS, WEIGHTED, check_whole

STRATEGIES = ("auto", "gram", "streamed", "materialise", "summed", "sparse", "projected")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whole_gradients_and_units(case: Case) -> None:
    # What takes time is to compile, so there is one program with everything, and another one with what
    # can be taken in by parts, inside of loops, or, for some of the other cases, with what keeps the
    # factors. From case to case the strategies and the variants move on.
    number = CASES.index(case)
    first, second = (STRATEGIES[(number + k) % len(STRATEGIES)] for k in (0, 2))
    check_whole(case, first, VARIANTS[number % len(VARIANTS)])
    if case in LOOPED:
        names = (IN_PARTS, SOME_IN_PARTS)[number % 2]
    elif number % 6 == 0:
        names = WITH_FACTORS
    else:
        return
    check_whole(case, second, VARIANTS[(number + STRIDE) % len(VARIANTS)], names)


IN_PARTS = ("norm", "norm_where", "norm_by_leaf", "dot", "dot_where")
SOME_IN_PARTS = (*IN_PARTS, "gram_where")  # of half of the parameters whole gradients are wanted
WITH_FACTORS = ("norm", "gram", "gram_where", "dot", "projected", "clipped", "clipped_by_leaf")


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_mixed_precision(case: Case) -> None:
    number = CASES.index(case)
    variant, names = VARIANTS[number % len(VARIANTS)], (None, WITH_FACTORS)[number % 2]
    check_whole(case, STRATEGIES[number // 3 % len(STRATEGIES)], variant, names, dtype="mixed")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["scaled_parameters", "root_of_padding_row"])
def test_every_strategy(name: str, strategy: str) -> None:
    check_whole(CASE[name], strategy, PLAIN)


@pytest.mark.parametrize("name", HANDFUL[::2])
def test_accelerators_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "backend", lambda: backend.BACKENDS["gpu:h100"])
    check_whole(CASE[name], "auto", WEIGHTED)


@pytest.mark.parametrize("name", HANDFUL[1::2])
def test_without_any_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rules in (TERMS, STEPS):
        for primitive in list(rules):
            monkeypatch.delitem(rules, primitive)
    check_whole(CASE[name], "auto", PLAIN)
    check_whole(CASE[name], "gram", WEIGHTED)
