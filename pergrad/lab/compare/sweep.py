"""Many runs, fairly tuned.

A method is everything in a configuration but the learning rate and the seed. Each method runs on a grid
of learning rates, with seeds that do nothing else (`TUNING_SEED` and on). While the best value is at the
edge of the grid, the grid grows there, so that no method loses for want of tuning. The chosen learning
rate is the lowest point of a parabola through the best value and its two neighbours: the losses are the
means over these seeds on the `tune` half of the validation data. Then the method runs at this learning
rate with the seeds that are reported, and their losses on the other half are what is reported. So
neither a seed nor an example that is reported has chosen anything.

Each run has a directory that is named by its configuration. Runs that are done are not run again.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import functools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.lab.config import OptimizerName, Train
from pergrad.lab.errors import LabError
from pergrad.lab.files import disk_errors
from pergrad.lab.run import records

TUNING_SEED = (
    1000  # the first of the seeds that choose learning rates; those that are reported are below
)
Results = dict[Train, dict[str, Any]]  # the content of `result.json`, by run
# Is told of a run that is done, with its result, how many runs are done, and of how many.
Told = Callable[[Train, dict[str, Any], int, int], None]


def silent(config: Train, result: dict[str, Any], done: int, of: int) -> None:
    """Tells nobody."""


def run_all(runs: Iterable[Train], root: Path, *, processes: int = 1, told: Told = silent) -> Results:
    """Runs what is not done yet, several at a time."""
    if processes < 1:
        raise LabError(f"runs need at least one process, not {processes}.")
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
    runs = list(dict.fromkeys(runs))
    results = {
        config: done
        for config in runs
        if (done := records.read_result(records.directory(root, config))) is not None
    }
    waiting = [config for config in runs if config not in results]
    if processes == 1:
        for config in waiting:
            results[config] = _run(config, records.directory(root, config), None)
            told(config, results[config], len(results), len(runs))
    elif waiting:
        pool = _workers(processes)
        cache = str((root / ".compiled").resolve())
        futures = {pool.submit(_run, c, records.directory(root, c), cache): c for c in waiting}
        try:
            for future in concurrent.futures.as_completed(futures):
                config = futures[future]
                results[config] = future.result()
                told(config, results[config], len(results), len(runs))
        except BaseException as error:
            _workers.cache_clear()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise LabError(
                    "a process was killed, perhaps for want of memory. The same command again "
                    "continues; fewer processes need less."
                ) from error
            raise
    _check_same_data(results, root)
    return results


def _check_same_data(runs: Iterable[Train], root: Path) -> None:
    """Raises an error if the text of a folder has changed since some of the runs were done."""
    digests: dict[tuple[Any, ...], str] = {}
    for config in runs:
        path = records.directory(root, config)
        about = records.read_json(path / "config.json")["data"]
        key = config.data, config.tokens, config.vocabulary
        if digests.setdefault(key, about["digest"]) != about["digest"]:
            raise LabError(
                f"the text of {config.data} is not the same for all runs in {root}: it has changed "
                f"since some were done (see {path / 'config.json'}). Choose another directory."
            )


@functools.lru_cache(maxsize=1)
def _workers(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """Spawned processes, since JAX does not survive a fork. They stay, with what they compiled."""
    fresh = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(processes, mp_context=fresh)
    atexit.register(pool.shutdown)
    return pool


def _run(config: Train, path: Path, cache: str | None) -> dict[str, Any]:
    if cache is not None:  # this is a worker, in which JAX has not started: it gets one core
        flags, flag = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_multi_thread_eigen=false"
        os.environ["XLA_FLAGS"] = flags if flag in flags else f"{flags} {flag}"
        import jax

        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    from pergrad.lab.run import train

    return train.train(config, path)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A method at the learning rate that was chosen for it.

    `tried` has the runs that chose it, by learning rate and seed, and `runs` those that are reported, by
    seed. The learning rate need not be one of those that were tried.
    """

    method: Train  # with the chosen learning rate
    tried: Mapping[float, Mapping[int, dict[str, Any]]]
    runs: Mapping[int, dict[str, Any]]

    @property
    def reported(self) -> dict[int, float]:
        """The final loss of every seed at the chosen learning rate, on the half that chose nothing."""
        return {seed: loss_of(run, "test_loss") for seed, run in self.runs.items()}

    @property
    def by_rate(self) -> dict[float, list[float]]:
        """The losses that chose the learning rate, of every seed at every rate that was tried."""
        return {
            rate: [loss_of(run, "tune_loss") for run in runs.values()]
            for rate, runs in self.tried.items()
        }

    @property
    def tuning_loss(self) -> float:
        """The lowest mean loss of the rates that were tried."""
        return min(sum(losses) / len(losses) for losses in self.by_rate.values())

    @property
    def is_on_edge(self) -> bool:
        """Whether the best of the rates that were tried is the smallest or the largest of them."""
        return best_rate(self.by_rate) in (min(self.tried), max(self.tried))


def loss_of(result: Mapping[str, Any], name: str) -> float:
    """A final loss; infinite for a run that diverged."""
    return math.inf if result[name] is None else result[name]


def methods(
    config: Train, optimizers: Sequence[OptimizerName], batch_sizes: Sequence[int] = ()
) -> dict[str, Train]:
    """Every optimizer at every batch size, by default the configuration's own.

    Every method sees as many examples as the configuration asks for, in fewer steps if batches are
    larger.
    """
    examples = config.steps * config.batch_size
    sizes = list(dict.fromkeys(batch_sizes or (config.batch_size,)))
    for size in sizes:
        if size < 1:
            raise LabError(f"a batch size is at least 1, not {size}.")
        if examples % size:
            raise LabError(
                f"{config.steps} steps of {config.batch_size} are {examples} examples, which batches of "
                f"{size} do not divide. Choose --steps or --batch-size so that they do."
            )
    return {
        f"{name}, batch {size}" if len(sizes) > 1 else name: dataclasses.replace(
            config, optimizer=name, batch_size=size, steps=examples // size
        )
        for size in sizes
        for name in dict.fromkeys(optimizers)
    }


def tune(
    methods: Mapping[str, Train],
    rates: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    root: Path,
    *,
    tuning_seeds: int,
    processes: int = 1,
    extensions: int = 3,
    told: Told = silent,
) -> dict[str, Tuned]:
    """Tunes every method's learning rate, beginning with its own `rates`, then runs it with `seeds`.

    Without seeds it tunes alone.

    The grid grows at most `extensions` times, by the ratio of the two values at that end.
    `Tuned.is_on_edge` says whether that was not enough. As many seeds as `tuning_seeds`, from
    `TUNING_SEED` on, choose the learning rate.
    """
    grids = {name: sorted(set(rates[name])) for name in methods}
    if not methods or tuning_seeds < 1:
        raise LabError("a sweep needs at least one method, and one seed that tunes.")
    if taken := [seed for seed in seeds if seed >= TUNING_SEED]:
        raise LabError(f"seed {taken[0]}: seeds from {TUNING_SEED} on choose learning rates.")
    if short := [name for name, grid in grids.items() if len(grid) < 2]:
        raise LabError(f"{short[0]} needs at least two learning rates, to know where to look further.")
    choosing = range(TUNING_SEED, TUNING_SEED + tuning_seeds)
    while True:
        grid_runs = [
            dataclasses.replace(method, learning_rate=rate, seed=seed)
            for name, method in methods.items()
            for rate in grids[name]
            for seed in choosing
        ]
        results = run_all(grid_runs, root, processes=processes, told=told)
        tuned = {
            name: _choose(method, grids[name], choosing, results) for name, method in methods.items()
        }
        if extensions <= 0 or not any(t.is_on_edge for t in tuned.values()):
            break
        grids = {name: _extended(grids[name], t) for name, t in tuned.items()}
        extensions -= 1
    chosen = {
        name: {seed: dataclasses.replace(t.method, seed=seed) for seed in seeds}
        for name, t in tuned.items()
    }
    reported = [config for by_seed in chosen.values() for config in by_seed.values()]
    results = run_all([*grid_runs, *reported], root, processes=processes, told=told)
    return {
        name: dataclasses.replace(t, runs={s: results[c] for s, c in chosen[name].items()})
        for name, t in tuned.items()
    }


def _choose(method: Train, grid: Sequence[float], seeds: Sequence[int], results: Results) -> Tuned:
    tried = {
        rate: {
            seed: results[dataclasses.replace(method, learning_rate=rate, seed=seed)] for seed in seeds
        }
        for rate in grid
    }
    tuned = Tuned(method, tried, {})
    rate = lowest_point(tuned.by_rate)
    return dataclasses.replace(tuned, method=dataclasses.replace(method, learning_rate=rate))


def best_rate(by_rate: Mapping[float, Sequence[float]]) -> float:
    """The rate with the lowest mean loss; the smallest, if runs diverged at all of them."""
    return min(sorted(by_rate), key=lambda rate: sum(by_rate[rate]))


def vertex(losses: Mapping[float, float]) -> float | None:
    """The logarithm of the learning rate at the lowest point of a parabola through three losses.

    These are the lowest loss and its two neighbours, over the logarithm of the rate. None if the lowest
    loss is the first or the last, if runs diverged at a neighbour, or if all three losses are equal.

    >>> round(math.exp(vertex({0.01: 2.25, 0.02: 1.25, 0.04: 2.25})), 6)
    0.02
    >>> vertex({0.01: 1.25, 0.02: 2.25, 0.04: 2.25})
    """
    rates = sorted(losses)
    i = min(range(len(rates)), key=lambda i: losses[rates[i]])
    around = rates[max(i - 1, 0) : i + 2]
    near = [losses[rate] for rate in around]
    if len(around) < 3 or not np.isfinite(near).all():
        return None
    x = np.log(np.divide(around, rates[i]))
    curvature, slope, _ = np.polyfit(x, near, 2)
    if curvature <= 0:
        return None
    return math.log(rates[i]) + float(np.clip(-slope / (2 * curvature), x[0], x[-1]))


def lowest_point(by_rate: Mapping[float, Sequence[float]]) -> float:
    """The rate at the lowest point of a parabola through the best rate and its two neighbours.

    The losses are means over runs (`vertex`). If there is no such point, it is the best rate itself.

    >>> lowest_point({0.01: [2.25], 0.02: [1.25], 0.04: [2.25]})
    0.02
    >>> lowest_point({0.01: [2.25, 2.45], 0.02: [1.35, 1.55], 0.04: [1.35, 1.55]})
    0.0282843
    """
    found = vertex({rate: float(np.mean(losses)) for rate, losses in by_rate.items()})
    return best_rate(by_rate) if found is None else _rounded(math.exp(found))


def _extended(grid: list[float], tuned: Tuned) -> list[float]:
    """The grid, with one more learning rate beyond its edge if the best one is there."""
    best = best_rate(tuned.by_rate)
    if best == grid[0]:
        return [_rounded(grid[0] ** 2 / grid[1]), *grid]
    return [*grid, _rounded(grid[-1] ** 2 / grid[-2])] if best == grid[-1] else grid


def _rounded(rate: float) -> float:
    """A rate of six digits, so that the same grid always has the same numbers, and so the same runs."""
    return float(f"{rate:.6g}")
