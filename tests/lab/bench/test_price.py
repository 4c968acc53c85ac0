"""What statistics cost: every candidate is checked and told of, whatever the clock says."""

from typing import Any

import numpy as np
import pytest

import pergrad as pg
from pergrad.lab import timing
from pergrad.lab.bench import cases, price, tasks
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


def test_whether_auto_and_the_default_are_the_same():
    """On a GPU, clipping of layers in a loop takes few examples by default, and auto takes all."""
    workload = cases.abstract("large_transformer_scanned")
    with pg.plan_for("gpu:h100"):
        arguments = workload.loss, workload.task("clipped"), workload.params, workload.batch
        assert price.auto_size(*arguments) == 8
        assert not price.takes_all(*arguments)
        arguments = workload.loss, workload.task("moments"), workload.params, workload.batch
        assert price.takes_all(*arguments)
