"""Tests that take turns: over all turns each of them runs, and the lists name tests that are there."""

import ast

import pytest

from tests.support import selection

NAMES = [f"test_x[case{number}-{option}]" for number in range(200) for option in ("auto", "streamed")]


@pytest.mark.parametrize(
    ("how_many", "is_long", "parts"),
    [
        ("all", True, 1),
        ("all", False, 1),
        ("some", True, 3),
        ("some", False, 1),
        ("few", True, 9),
        ("few", False, 3),
    ],
)
def test_every_test_has_one_turn(how_many, is_long, parts):
    turns = [
        {name for name in NAMES if selection.runs(name, is_long, how_many, turn)} for turn in range(9)
    ]
    assert all(turns[turn] == turns[turn % parts] for turn in range(9))
    assert sum(map(len, turns[:parts])) == len(NAMES)
    assert set.union(*turns) == set(NAMES)
    smallest, largest = min(map(len, turns)), max(map(len, turns))
    assert smallest > 0 and largest < 2 * len(NAMES) / parts


def test_what_runs_seldom_runs_often_too():
    for turn in range(9):
        few, some = (
            {name for name in NAMES if selection.runs(name, True, how_many, turn)}
            for how_many in ("few", "some")
        )
        assert few < some


@pytest.mark.parametrize("file", sorted({*selection.SHORTENED, *selection.ONE_WORKER}))
def test_lists_name_tests_that_are_there(file):
    tree = ast.parse((selection.TESTS / file).read_text())
    with_lists = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("parametrize" in ast.unparse(d) for d in node.decorator_list)
    }
    assert selection.SHORTENED.get(file, set()) <= with_lists
