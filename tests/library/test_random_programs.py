"""Random small programs against the oracle. `make fuzz` runs as many as one likes.

Every day has programs of its own. The name of a test has the program's seed, and
`python -m tests.support.fuzz --first-seed <seed> --programs 1` runs that program again and reduces it.
"""

import dataclasses
import itertools
import math

import pytest

from tests.support import programs
from tests.support.program_edges import HEADS, WITH_KEY
from tests.support.programs import FORMS, Call, Layer, Network, RandomProgram, check, draw, reduced
from tests.support.selection import FIRST_PROGRAM


@pytest.mark.parametrize("seed", range(FIRST_PROGRAM, FIRST_PROGRAM + 200))
def test_random_program(seed):
    check(draw(seed))


def test_a_seed_makes_one_program_and_all_that_there_is_is_drawn():
    assert str(draw(5)) == str(draw(5)) != str(draw(6))
    drawn = [draw(seed) for seed in range(2000)]
    layers = list(itertools.chain(*(program.network.layers for program in drawn)))
    assert {layer.operation for layer in layers} == set(programs.OPERATIONS)
    assert {layer.view for layer in layers} == set(programs.VIEWS)
    assert {layer.wrapper for layer in layers} == set(programs.WRAPPERS)
    assert {program.network.head for program in drawn} == set(HEADS)
    assert {program.call.form for program in drawn} == set(FORMS)
    assert {program.call.asked for program in drawn} == set(programs.ASKED)
    for share, has in {
        "mixed precision": lambda p: p.network.precision == "mixed",
        "keys": lambda p: any(layer.operation in WITH_KEY for layer in p.network.layers),
        "padding that is not finite": lambda p: not math.isfinite(p.call.padding),
        "several batch arguments": lambda p: isinstance(p.call.options["batch_argnums"], tuple),
        "weights": lambda p: p.call.weights is not None,
    }.items():
        assert sum(map(has, drawn)) > 100, share


def test_most_programs_are_compared():
    outcomes = [check(draw(seed)) for seed in range(10)]
    assert outcomes.count("ok") >= 9


def test_a_wrong_statistic_is_noticed(monkeypatch):
    program = RandomProgram(Network((Layer(),)), Call(asked="powers"), seed=0)
    assert check(program) == "ok"
    wrong = dict(programs.STATISTICS, square=programs.STATISTICS["abs"])
    monkeypatch.setattr(programs, "STATISTICS", wrong)
    with pytest.raises(AssertionError, match="square"):
        check(program)


def test_a_wrong_program_is_reduced():
    program = next(p for p in map(draw, itertools.count()) if p.call.has_aux and p.call.padding)
    simplest = reduced(program, lambda program: program.call.has_aux)
    assert simplest.call == dataclasses.replace(Call(), has_aux=True, size=simplest.call.size)
    assert simplest.network == Network((Layer(),))
