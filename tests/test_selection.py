"""How the tests are run: in turns, over which each of them runs, and on devices of another process."""

import ast

import pytest

from tests.support import devices, groups, selection

NAMES = [f"test_x[case{number}-{option}]" for number in range(200) for option in ("auto", "streamed")]


@pytest.mark.parametrize(
    ("length", "how_many", "parts"),
    [
        ("longest", "all", 1),
        ("longest", "some", 24),
        ("longest", "few", 24),
        ("long", "all", 1),
        ("long", "some", 12),
        ("long", "few", 24),
        ("short", "all", 1),
        ("short", "some", 3),
        ("short", "few", 6),
        ("brief", "all", 1),
        ("brief", "some", 1),
        ("brief", "few", 4),
    ],
)
def test_every_test_has_one_turn(length, how_many, parts):
    turns = [
        {name for name in NAMES if selection.runs(name, length, how_many, turn)}
        for turn in range(selection.TURNS)
    ]
    assert all(turns[turn] == turns[turn % parts] for turn in range(selection.TURNS))
    assert sum(map(len, turns[:parts])) == len(NAMES)
    assert set.union(*turns) == set(NAMES)
    smallest, largest = min(map(len, turns)), max(map(len, turns))
    assert smallest > 0 and largest < 2 * len(NAMES) / parts


@pytest.mark.parametrize("length", ["long", "short", "brief"])
def test_what_runs_seldom_runs_often_too(length):
    for turn in range(selection.TURNS):
        few, some = (
            {name for name in NAMES if selection.runs(name, length, how_many, turn)}
            for how_many in ("few", "some")
        )
        assert few < some


@pytest.mark.parametrize("file", sorted({*selection.SHORTENED, *selection.LONGEST, *groups.ONE_WORKER}))
def test_lists_name_tests_that_are_there(file):
    tree = ast.parse((selection.TESTS / file).read_text())
    with_lists = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("parametrize" in ast.unparse(d) for d in node.decorator_list)
    }
    of_file = [lists.get(file, set()) for lists in (selection.SHORTENED, selection.LONGEST)]
    assert set.union(*of_file) <= with_lists
    assert not set.intersection(*of_file)


def test_groups():
    devices = {"tests/library/test_devices.py::test_page", "tests/library/test_devices.py::test_x[mlp]"}
    case = {"tests/library/test_cases.py::test_x[mlp]", "tests/cut/test_lookups.py::test_y[mlp]"}
    alone = {"tests/library/test_cases.py::test_x[mlp-2]", "tests/plan/test_plan.py::test_mlp"}
    names = [{groups.group_of(test) for test in tests} for tests in (devices, case, alone)]
    assert list(map(len, names)) == [1, 1, 2]
    assert len(set.union(*names)) == 4


def test_outcomes_of_another_process():
    report = """
        <testsuites><testsuite>
          <testcase name="test_good[a-1]"><system-out>seen</system-out></testcase>
          <testcase name="test_bad"><failure message="short">assert 1 == 2</failure></testcase>
          <testcase name="test_broken"><error message="short">no such fixture</error></testcase>
          <testcase name="test_old"><skipped message="for newer JAX">long</skipped></testcase>
        </testsuite></testsuites>
    """
    names = ["test_good[a-1]", "test_bad", "test_broken", "test_old", "test_missing"]
    assert devices.outcomes(names, report, "Segmentation fault") == {
        "test_good[a-1]": devices.Outcome("passed", "", "seen"),
        "test_bad": devices.Outcome("failed", "assert 1 == 2", ""),
        "test_broken": devices.Outcome("failed", "no such fixture", ""),
        "test_old": devices.Outcome("skipped", "for newer JAX", ""),
        "test_missing": devices.Outcome("failed", "The test did not run.\nSegmentation fault", ""),
    }
