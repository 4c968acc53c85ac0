"""What statistics cost: every candidate is checked and told of, whatever the clock says."""

from typing import Any

import numpy as np
import pytest

from pergrad.lab import timing
from pergrad.lab.bench import price, tasks
from pergrad.lab.errors import LabError
from tests.support import pages
from tests.support.own_loss import ARGS, loss


@pytest.fixture(autouse=True)
def as_for_users():
    with pages.jax_as_for_users():
        yield


MOMENTS = tasks.TASKS["moments"]
ALONE = {"names": (tasks.FLOOR, tasks.VMAP, tasks.PERGRAD), "rounds": 1, "say": timing.silent}


def test_candidates_that_differ_are_not_timed(monkeypatch):
    wrong = lambda loss, task, size: tasks._pergrad(lambda *args: 2 * loss(*args), task, size)  # noqa: E731
    monkeypatch.setitem(tasks._MAKERS, tasks.PERGRAD, wrong)
    with pytest.raises(LabError, match=r"pergrad differs from vmap\(grad\)"):
        price.measure(loss, MOMENTS, *ARGS, **ALONE)


def test_not_a_number_is_a_difference():
    with pytest.raises(LabError, match="by nan"):
        price.measure(loss, MOMENTS, np.full_like(ARGS[0], np.nan), ARGS[1], **ALONE)


def test_who_cannot_is_left_out(monkeypatch):
    def fails(loss: Any, task: Any, size: str) -> Any:
        raise NotImplementedError("no such luck\nand more")

    monkeypatch.setitem(tasks._MAKERS, tasks.VMAP, fails)
    found = price.measure(loss, MOMENTS, *ARGS, **ALONE)
    assert [r.name for r in found.results] == [tasks.FLOOR, tasks.PERGRAD]
    assert found.left_out == {tasks.VMAP: "NotImplementedError: no such luck"}
    monkeypatch.setitem(tasks._MAKERS, tasks.PERGRAD, fails)
    with pytest.raises(NotImplementedError):  # it is what this is about
        price.measure(loss, MOMENTS, *ARGS, **ALONE)
