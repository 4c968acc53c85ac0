"""The list of mutants is complete, and each still fits the code; `make mutants` runs them."""

import pytest

import pergrad as pg
from pergrad._cut import terms
from pergrad._statistics import Merging
from pergrad._strategies import STRATEGIES
from tests.support.mutants import MUTANTS, ROOT, Mutant

BROKEN = {mutant.of for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.of)
def test_mutant_fits_the_code(mutant: Mutant):
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.before) == 1
    compile(text.replace(mutant.before, mutant.after), mutant.file, "exec")


def test_every_strategy_is_broken():
    assert {type(strategy).__name__ for strategy in STRATEGIES} <= BROKEN


def test_every_term_is_broken():
    kinds = {x for x in vars(terms).values() if isinstance(x, type) and issubclass(x, terms.Term)}
    assert {x.__name__ for x in kinds - {terms.Term, terms.Lookup}} <= BROKEN


def test_every_statistic_is_broken():
    kinds = {x for x in vars(pg).values() if isinstance(x, type) and issubclass(x, pg.Statistic)}
    assert {x.__name__ for x in kinds - {pg.Statistic}} <= BROKEN


def test_every_merge_is_broken():
    assert {str(merging) for merging in Merging} <= BROKEN
