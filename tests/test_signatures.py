"""What the public functions say of themselves, and what the functions say that they return.

That a type checker sees wrong names and words of options is in `typed.py`, which `make lint` reads.
"""

import inspect
import typing

import pytest

import pergrad as pg
from pergrad._choose import STRATEGIES
from pergrad._request import StrategyName

OPTIONS = {
    "batch_argnums": 1,
    "has_aux": False,
    "keep_batch_dim": True,
    "rng_argnums": (),
    "microbatch_size": None,
    "spmd_axis_name": None,
    "strategy": "auto",
}


def functions():
    nnx = pytest.importorskip("pergrad.nnx")
    return [
        *(pg.value_and_stats, pg.grad_stats, pg.explain, pg.check),
        *(nnx.value_and_stats, nnx.explain, nnx.check),
    ]


# The functions.


def test_options_are_the_same_everywhere():
    like = inspect.signature(pg.value_and_stats).parameters
    assert list(like) == ["fun", "stats", "argnums", *OPTIONS]
    for fun in functions():
        own = dict(inspect.signature(fun).parameters)
        special = [own.pop(name) for name in ("wrt", "rtol") if name in own]
        assert all(p.kind is p.KEYWORD_ONLY for p in special)
        assert list(own) == [name for name in like if name in own]
        assert set(like) - set(own) <= {"stats"}
        assert all(own[name] == like[name] for name in own), "kind, default and type are the same"


def test_defaults():
    parameters = inspect.signature(pg.value_and_stats).parameters
    assert {name: parameters[name].default for name in OPTIONS} == OPTIONS
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OPTIONS)


def test_strategies_that_editors_offer():
    literal, other = typing.get_args(StrategyName)
    assert other is str
    assert set(typing.get_args(literal)) == {"auto", *(strategy.name for strategy in STRATEGIES)}
