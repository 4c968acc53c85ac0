"""All cases: those of `cases.py` and of the files for one topic each."""

from types import ModuleType

from tests.support import (
    cases,
    cases_attention,  # noqa: F401 (it adds cases)
    cases_branches,
    cases_guards,
    cases_lookups,
    cases_loops,
)
from tests.support.cases import Case

CASES = list(cases.ADDED)
CASE = {case.name: case for case in CASES}


def _of(*topics: ModuleType) -> list[Case]:
    names = {topic.__name__ for topic in topics}
    return [case for case in CASES if case.loss.__module__ in names]


LOOKUPS = _of(cases_lookups)
LOOPED = _of(cases_loops, cases_branches, cases_guards)
