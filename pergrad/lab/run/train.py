"""One run, which reads straight down: data, model, optimizer, then step after step.

A step is one jitted function of the state, the batch and the learning rate. Batches are looked up by the
number of the step, so a run that goes on needs no other position in the data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import pergrad as pg
from pergrad.lab import floor, timing
from pergrad.lab.config import Train
from pergrad.lab.run import data, devices, images, model, optimizers, outliers
from pergrad.lab.run.devices import Place
from pergrad.lab.run.records import Run, plain, to_stderr

VALIDATION_EXAMPLES = 4096  # at most, in each half of the validation data
VALIDATED = 256  # examples that go through the model at a time in a validation
FETCHED = 20  # steps whose metrics are fetched together, so that not every step waits for the device
PRICED = 3  # microbatch sizes of `jax.grad` that statistics are compared with: 1, 2 and 4 examples
QUANTILE_DECAY = 0.9  # the decay of the average of the quantiles at which examples are clipped
NOISE_DECAY = 0.9  # the decay of the noise diagnostics' averages, over one step in `noise_every`

Tree = Any


class Problem(NamedTuple):
    """A loss with its first parameters, and where its examples come from."""

    name: str
    digest: str
    loss: Callable[[Tree, Any], jax.Array]
    params: Tree
    batches: Any  # [step] is a batch
    tune: Any  # validation examples on which learning rates are chosen
    test: Any  # and others, on which they are reported


class State(NamedTuple):
    """Everything that a step changes."""

    params: Tree
    optimizer: Tree
    noise: pg.noise.NoiseState
    key: jax.Array
    max_norm: jax.Array  # the quantile of the examples' norms, if these are clipped there


class Observer(Protocol):
    """Something that watches a run, such as a progress bar.

    `price()` measures the time of the statistics as a multiple of that of `jax.grad`: of the whole batch
    or of small microbatches whose gradients are added up, whichever is faster. It takes a while, and
    works only during `start`, since the first step donates the parameters. With several processes
    `price` is None: a measurement would need all of them, and only the first one is watched.
    """

    def doing(self, what: str) -> None:
        """The run tells what it does from now on, if it is not a step."""
        ...

    def say(self, line: str) -> None:
        """The run says something that the user must know."""
        ...

    def start(self, config: Train, step: int, price: Callable[[], float] | None) -> None: ...

    def advance(self, row: dict[str, Any]) -> None: ...


def make_problem(config: Train) -> Problem:
    """The data of a configuration, and the model for it."""
    problems = {"photos": _photos, "digits": _digits} if config.domain == "images" else {}
    return problems.get(config.data, _text)(config, nnx.Rngs(config.seed))


def _text(config: Train, rngs: nnx.Rngs) -> Problem:
    corpus = data.load_text(config.data, config.tokens, config.vocabulary)
    context = config.model.context
    sized: Any = {"batch_size": config.batch_size, "seed": config.seed, "outliers": config.outliers}
    batches = data.batches(corpus, context=context, **sized)
    tune, test = (
        data.validation_windows(part, context=context, limit=VALIDATION_EXAMPLES, train=corpus.train)
        for part in (corpus.tune, corpus.test)
    )
    module = model.LANGUAGES[config.model.kind](config.model, corpus.vocabulary, rngs)
    return _problem(corpus, module, model.text_loss, batches, tune, test)


def _photos(config: Train, rngs: nnx.Rngs) -> Problem:
    photos = images.load_photos()
    sized: Any = {"batch_size": config.batch_size, "seed": config.seed, "outliers": config.outliers}
    batches = images.batches(photos, **sized)
    tune, test = (images.spread(part, VALIDATION_EXAMPLES) for part in (photos.tune, photos.test))
    module = model.Pixels(config.model, rngs)
    return _problem(photos, module, model.photo_loss, batches, tune, test)


def _digits(config: Train, rngs: nnx.Rngs) -> Problem:
    digits = data.load_digits()
    batches = data.image_batches(digits, batch_size=config.batch_size, seed=config.seed)
    module = model.Convolutional(config.model, 10, rngs)
    return _problem(digits, module, model.digit_loss, batches, digits.tune, digits.test)


def _problem(source: Any, module: Any, loss: Any, batches: Any, tune: Any, test: Any) -> Problem:
    graph, params = nnx.split(module, nnx.Param)
    return Problem(
        source.name, source.digest, functools.partial(loss, graph), params, batches, tune, test
    )


class Unwatched:
    """Nobody watches. What the user must know is printed to stderr."""

    def doing(self, what: str) -> None:
        pass

    def say(self, line: str) -> None:
        to_stderr(line)

    def start(self, config: Train, step: int, price: Callable[[], float] | None) -> None:
        pass

    def advance(self, row: dict[str, Any]) -> None:
        pass


UNWATCHED = Unwatched()
ANYWHERE = Place()


def train(
    config: Train, run_dir: Path, observer: Observer = UNWATCHED, place: Place = ANYWHERE
) -> dict[str, Any]:
    """Begins a run, goes on with it, or reads it if it is done; returns the content of `result.json`."""
    place.check(config.batch_size)
    observer.doing("reading the data and making the model")
    problem = make_problem(config)
    with Run(run_dir, config, problem.digest, problem.name, observer.say) as run:
        devices.check_same("options or data", run.digest)
        if run.result is not None:
            return run.result
        compiled = _compile(_without_numbers(config), problem.digest, place)
        monitor = compiled.monitor
        observer.doing("preparing the devices and the state")
        done, state = run.restore(place.spread(_start(config, compiled, problem.params)))
        observer.start(config, done, _price(problem, compiled, state.params, place))
        halves = {"tune_loss": place.examples(problem.tune), "test_loss": place.examples(problem.test)}

        observer.doing("tracing and compiling a step, and taking the first one")
        first, waiting, diverged = done + 1, [], False
        while done < config.steps and not diverged:
            examples, rate = problem.batches[done], optimizers.learning_rate(config, done)
            batch = place.examples(examples)
            state, metrics = compiled.step(state, batch, rate)
            done += 1
            row = {"step": done, **metrics, "learning_rate": rate, "examples": done * config.batch_size}
            if config.noise_every and done % config.noise_every == 0:
                state, norms = compiled.noise(state, batch)
                row["noise"] = monitor.summary(state.noise, layers=True)
                row["outliers"] = outliers.listed(norms, examples, config.tokens)
            is_checkpoint = done % config.checkpoint_every == 0
            is_validated = done % config.validate_every == 0 or done == config.steps
            if is_validated:
                row |= {name: compiled.validate(state.params, part) for name, part in halves.items()}
            waiting.append(row)
            if done == first or is_checkpoint or is_validated or len(waiting) == FETCHED:
                rows, waiting = _until_divergence([_plain_row(row) for row in waiting]), []
                diverged = rows[-1]["loss"] is None
                run.log(rows)
                for row in rows:
                    observer.advance(row)
            if is_checkpoint and not diverged:
                run.save(done, state)
        if devices.is_first():
            run.finish(_result(run.rows(), config, diverged))
        devices.wait_for_others("the result")
        assert run.result is not None
        return run.result


def _price(
    problem: Problem, compiled: _Compiled, params: Tree, place: Place
) -> Callable[[], float] | None:
    if jax.process_count() > 1:
        return None
    first, floors = place.examples(problem.batches[0]), [jax.value_and_grad(problem.loss)]
    if place.mesh is None:
        few = [size for size in floor.sizes(first)[:PRICED] if size < floor.examples(first)]
        floors += [floor.accumulated(problem.loss, size) for size in few]
    return lambda: timing.ratio(compiled.stats, floors, params, first)


def parameters(config: Train, run_dir: Path) -> dict[int, Tree]:
    """The parameters of a run's checkpoints, by step."""
    problem = make_problem(config)
    with Run(run_dir, config, problem.digest, problem.name) as run:
        compiled = _compile(_without_numbers(config), problem.digest, ANYWHERE)
        start = _start(config, compiled, problem.params)
        return {step: run.read(step, start).params for step in run.saved}


class _Compiled(NamedTuple):
    """An optimizer, and the functions of a run, which are compiled with it."""

    tx: pg.optim.StatsTransformation
    monitor: pg.noise.Monitor
    stats: Callable[[Tree, Any], Any]
    step: Callable[[State, Any, Any], tuple[State, dict[str, jax.Array]]]
    noise: Callable[[State, Any], tuple[State, jax.Array]]  # and the norms of the gradients [B]
    validate: Callable[[Tree, Any], jax.Array]


def _without_numbers(config: Train) -> Train:
    """A configuration that is equal for all runs of the same program, which a process compiles once."""
    anything: Any = {"learning_rate": 1.0, "seed": 0, "steps": 1, "warmup": 0.0, "outliers": 0.0}
    anything["schedule"] = "cosine"
    never = dict.fromkeys(("validate_every", "noise_every", "checkpoint_every", "keep"), 1)
    return dataclasses.replace(config, **anything, **never)


@functools.lru_cache(maxsize=32)
def _compile(config: Train, data_digest: str, place: Place) -> _Compiled:
    """Everything that runs on the device. `data_digest` tells apart data of the same name."""
    problem = make_problem(config)
    loss = problem.loss
    tx = optimizers.make(config)
    monitor = pg.noise.Monitor(decay=NOISE_DECAY, signs=True)
    options: Any = {
        "microbatch_size": config.microbatch_size,
        "spmd_axis_name": place.batch_axis,
        "param_specs": place.specs(problem.params),
    }
    stats_fn = pg.value_and_stats(loss, tx.stats, **options)
    noise_fn = pg.grad_stats(loss, monitor.stats, **options)

    by_quantile = config.clip is not None and config.clip_by == "quantile"

    def step(state: State, batch: Any, rate: Any) -> tuple[State, dict[str, jax.Array]]:
        if by_quantile:
            value, stats = stats_fn(state.params, batch, max_norm=state.max_norm)
            state = state._replace(max_norm=_followed(state.max_norm, stats["norm"], config.clip))
        else:
            value, stats = stats_fn(state.params, batch)
        updates, optimizer = tx.update(stats["mean"], state.optimizer, state.params, stats=stats)
        updates = jax.tree.map(lambda u: rate * u, updates)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "gradient_norm": optax.tree.norm(stats["mean"])}
        return place.kept(state._replace(params=params, optimizer=optimizer)), metrics

    def noise(state: State, batch: Any) -> tuple[State, jax.Array]:
        stats = noise_fn(state.params, batch)
        norms = jnp.sqrt(sum(jnp.square(norm) for norm in jax.tree.leaves(stats["norm"])))
        if place.mesh is not None:  # so that every process has all of them
            norms = jax.lax.with_sharding_constraint(norms, NamedSharding(place.mesh, PartitionSpec()))
        return place.kept(state._replace(noise=monitor.update(stats, state.noise))), norms

    return _Compiled(
        tx,
        monitor,
        functools.partial(stats_fn, max_norm=1.0) if by_quantile else stats_fn,
        jax.jit(step, donate_argnums=0),
        jax.jit(noise, donate_argnums=0),
        jax.jit(functools.partial(_mean_loss, loss)),
    )


def _start(config: Train, compiled: _Compiled, params: Tree) -> State:
    return State(
        params,
        compiled.tx.init(params),
        compiled.monitor.init(params),
        jax.random.key(config.seed),
        jnp.asarray(jnp.inf, jnp.float32),
    )


def _followed(max_norm: jax.Array, norms: jax.Array, share: Any) -> jax.Array:
    """The average of the quantiles of all batches so far. The first batch is not clipped."""
    now = jnp.quantile(norms, share).astype(max_norm.dtype)
    return jnp.where(jnp.isinf(max_norm), now, QUANTILE_DECAY * max_norm + (1 - QUANTILE_DECAY) * now)


def _mean_loss(loss: Any, params: Tree, examples: Any) -> jax.Array:
    """The mean loss of all examples, from `VALIDATED` of them at a time."""
    examples = jax.tree.map(jnp.asarray, examples)
    n = floor.examples(examples)
    whole = n - n % VALIDATED
    parts = jax.tree.map(lambda x: x[:whole].reshape(-1, VALIDATED, *x.shape[1:]), examples)
    # The parameters are carried along, since Flax refuses those of an outer trace in a loop of its own.
    _, losses = jax.lax.scan(lambda own, part: (own, loss(own, part)), params, parts)
    total = VALIDATED * jnp.sum(losses)
    if whole < n:
        total += (n - whole) * loss(params, jax.tree.map(lambda x: x[whole:], examples))
    return total / n


def _plain_row(row: dict[str, Any]) -> dict[str, Any]:
    def of(x: Any) -> Any:
        return x if isinstance(x, (int, dict, list)) else plain(x)  # what is inside them is plain

    return {name: of(x) for name, x in row.items()}


def _until_divergence(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows up to the first loss that is not finite, and that one. Later rows mean nothing."""
    ends = [i for i, row in enumerate(rows) if row["loss"] is None]
    return rows[: ends[0] + 1] if ends else rows


def _result(rows: list[dict[str, Any]], config: Train, diverged: bool) -> dict[str, Any]:
    """The result of a run: the mean loss over its last tenth, and the losses of the last validation."""
    last = rows[-1]
    diverged = diverged or last["tune_loss"] is None or last["test_loss"] is None
    tail = [row["loss"] for row in rows[-max(1, config.steps // 10) :]]
    return {
        "steps": last["step"],
        "diverged": diverged,
        "train_loss": None if diverged else float(np.mean(tail)),
        "tune_loss": None if diverged else last["tune_loss"],
        "test_loss": None if diverged else last["test_loss"],
    }
