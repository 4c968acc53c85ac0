"""Strict mode for every test, and which of the tests run."""

from typing import Any

import pytest

from tests.support import (
    selection,
    strict,  # noqa: F401 (it sets JAX up)
)


def pytest_report_header() -> str:
    seed = selection.FIRST_PROGRAM
    return f"random programs from seed {seed} on (set PERGRAD_SEED={seed} to repeat them)"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    for item in items:
        if group := selection.group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
    chosen = dict.fromkeys(selection.chosen(items))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
