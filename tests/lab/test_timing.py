"""Functions timed side by side: they take turns, and each is judged by its fastest run."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pergrad.lab import timing
from tests.support import pages


@pytest.fixture(autouse=True)
def as_for_users():
    with pages.jax_as_for_users():
        yield


def an_executable(run: Any = lambda: None, temp_bytes: float = 1.0) -> timing.Executable:
    return timing.Executable(run, 1.0, 1.0, temp_bytes)


def test_executables_take_turns():
    calls = []
    executables = {name: an_executable(lambda name=name: calls.append(name)) for name in "abc"}
    results = timing.time_all(executables, rounds=4, say=timing.silent)
    assert [result.name for result in results] == list("abc")
    assert all(len(result.seconds) == 4 for result in results)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert rounds == ["abc", "abc", "acb", "cab", "cba"]  # the first to warm up


def test_results_are_kept_until_the_next_are_there():
    class Results:
        alive = 0

        def __init__(self):
            Results.alive += 1
            seen.append(Results.alive)

        def __del__(self):
            Results.alive -= 1

    seen: list[int] = []
    timing.time_all({"a": an_executable(Results)}, rounds=3, say=timing.silent)
    assert seen == [1, 1, 2, 2] and Results.alive == 0  # the first to warm up


@pytest.mark.parametrize(("budget", "runs"), [(0.5, 1), (1.5, 3), (4.5, 4), (10.0, 5)])
def test_a_budget_that_is_spent(budget, runs, monkeypatch):
    monkeypatch.setattr(timing, "_run", lambda *args: (1.0, None))
    (result,) = timing.time_all({"a": an_executable()}, rounds=5, budget=budget, say=timing.silent)
    assert len(result.seconds) == runs


def test_who_is_told(capsys):
    said = []
    executables = {"sine": timing.compile_afresh("sine", jnp.sin, jnp.ones(3), say=said.append)}
    timing.time_all(executables, jnp.ones(3), rounds=2, say=said.append)
    assert "compiled sine" in said[0] and "".join(said).count(".") >= 2
    assert capsys.readouterr().err == ""
    timing.time_all(executables, jnp.ones(3), rounds=2)
    assert "timing .." in capsys.readouterr().err


def test_ratio(monkeypatch, capsys):
    """Each counts by the fastest of its runs after the warm-up: 3 s, 2 s and 5 s."""
    sine, cosine, other = 0.0, 1.0, 2.0  # the results at zero, which tell the clock who runs
    clock = {
        sine: iter([1.0, 3.0, 9.0]),
        cosine: iter([0.5, 4.0, 2.0]),
        other: iter([9.0, 5.0, 5.0]),
    }

    def run(executable: Any, args: Any) -> tuple[float, Any]:
        result = executable.run(*args)
        return next(clock[float(result)]), result

    monkeypatch.setattr(timing, "_run", run)
    assert timing.ratio(jnp.sin, [jnp.cos, lambda x: x + 2], jnp.zeros(()), rounds=2) == 3 / 2
    assert [list(left) for left in clock.values()] == [[], [], []]
    assert capsys.readouterr().err == ""


def test_memory_that_is_not_known():
    floor, other = (timing.Result("x", an_executable(temp_bytes=b), (1.0,)) for b in (0.0, 5.0))
    assert math.isnan(other.ratios(floor)["memory"])


def test_the_fastest_size():
    """The first is slow, the second fast, and the two after it are slow again: a fifth is not tried."""
    tried = []

    def sized(size: int) -> Any:
        def run(x: jax.Array) -> jax.Array:
            tried.append(size)
            sines = {1: 300_000, 2: 1, 3: 300_000, 4: 300_000}[size]
            return jax.lax.fori_loop(0, sines, lambda _, y: jnp.sin(y), x)

        return run

    said = []
    name, executable = timing.fastest(
        ((f"size {n}", sized(n)) for n in (1, 2, 3, 4, 5)), jnp.ones(()), say=said.append
    )
    assert name == "size 2" and list(executable.tried) == [f"size {n}" for n in (1, 2, 3, 4)]
    assert tried == [1, 2, 3, 4] and "size 2 takes" in "".join(said)
    with pytest.raises(ValueError, match="no candidate"):
        timing.fastest((), jnp.ones(()))
