"""Random calls with sharded parameters against the oracle, on eight devices (`support/devices.py`).

Every day has calls of its own. The name of a test has the seed, with which
`python -m tests.support.sharded_programs --first-seed <seed> --programs 1` runs that call again.
"""

import dataclasses

import jax.numpy as jnp
import pytest

import pergrad as pg
from tests.support import sharded_programs
from tests.support.selection import FIRST_PROGRAM
from tests.support.sharded_programs import FORMS, MESHES, STATISTICS, check, draw


@pytest.mark.parametrize("seed", range(FIRST_PROGRAM, FIRST_PROGRAM + 4))
def test_random_call(seed):
    check(draw(seed))


def test_all_that_there_is_is_drawn():
    drawn = [draw(seed) for seed in range(300)]
    assert str(drawn[5]) == str(draw(5)) != str(drawn[6])
    assert {one.form for one in drawn} == set(FORMS)
    assert all(any(one.mesh == mesh for one in drawn) for mesh in MESHES)
    assert {name for one in drawn for name in one.names} == set(STATISTICS)


def test_a_wrong_statistic_is_noticed(monkeypatch):
    drawn = dataclasses.replace(draw(5), names=("token square",), options={}, size=16, weights=None)
    check(drawn)
    wrong = STATISTICS | {"token square": pg.Mean(jnp.square)}
    monkeypatch.setattr(sharded_programs, "STATISTICS", wrong)
    with pytest.raises(AssertionError, match="token square"):
        check(drawn)
