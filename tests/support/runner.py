"""Cases are run: with any strategy, weights, microbatches and dtype, and compared with the truth."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pergrad as pg
from pergrad._call import Call, Request
from tests.support import oracle
from tests.support.bounds import ERROR, STATISTICS, UNITS, assert_agrees
from tests.support.cases import BATCH, Case, array
from tests.support.every_case import CASES
from tests.support.truth import in_mixed_precision, options, traced_once, truth_of
from tests.support.whole import IN_TURNS, SEVERAL, Questions, of_positions

WEIGHTS = np.array([1, 0, 2.5, 3, 0.5])

# How a case is run: (keep_batch_dim, weights, microbatch_size). "padded": weights, and the example of
# weight 0 is NaN. "dropped": that example has a weight, and is dropped if it is not finite. Of the
# sizes, 1 divides the batch and 2 does not.
VARIANTS = list(
    itertools.product((True, False), ("none", "weights", "padded", "dropped"), (None, 1, 2, "auto"))
)


ERROR_OF_CASE = {
    # In bfloat16 a maximum of this model falls on another entry: the plain loop is off by 0.19 as well.
    ("conv_2d", "bfloat16"): 0.4,
    # A product of two activations of which one is near 0: the plain loop is off by as much.
    ("cond_in_scan_by_example", "bfloat16"): 0.2,
    # JAX's attention computes its softmax in float32.
    ("attention_of_jax", "float64"): 1e-5,
    ("attention_grouped", "float64"): 1e-5,
}
STRIDE = 5  # shares no factor with the number of variants
PLAIN, WEIGHTED = (True, "none", None), (True, "weights", 2)
# A few cases of many kinds, for what takes long.
HANDFUL = (
    "mlp", "embedding_indexed", "embedding_twice", "dynamic_slice", "lora_merged", "weight_norm",
    "regularised", "scan_over_layers", "conv_2d",
)  # fmt: skip


def as_single(case: Case, loss: Any) -> Any:
    """The case's `loss` for one example without a batch axis."""
    batched = case.batch_argnums if isinstance(case.batch_argnums, tuple) else (case.batch_argnums,)

    def single(*args: Any) -> Any:
        args = list(args)
        for n in batched:
            args[n] = jax.tree.map(lambda x: x[None], args[n])
        return loss(*args)

    return single


def pad(case: Case, args: Any) -> Any:
    """The arguments with NaN for every float of the examples of weight 0."""
    batched = case.batch_argnums if isinstance(case.batch_argnums, tuple) else (case.batch_argnums,)

    def leaf(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        x = np.array(x)
        x[WEIGHTS == 0] = np.nan
        return array(x)

    args = list(args)
    for n in batched:
        args[n] = jax.tree.map(leaf, args[n])
    return tuple(args)


@functools.cache
def finite_if_padded(case: Case) -> np.ndarray:
    """Which examples have a finite loss and gradient if the floats of some are NaN, by the oracle."""
    args = pad(case, case.make_args(jnp.dtype("float64")))
    losses, _, grads = oracle.per_example(traced_once(case.loss), args, **options(case))
    leaves = (losses, *jax.tree.leaves(grads))
    return np.all([np.isfinite(x).reshape(BATCH, -1).all(axis=1) for x in leaves], axis=0)


class Runner:
    """Runs one case in one variant: `explain` and `run` take the same options.

    With `once` its loss is traced and differentiated once for all of these runs. The call has the
    weights `given`, and the truth those of `weights`, which are 0 for examples that are dropped.
    """

    statistics = STATISTICS

    def __init__(
        self, case: Case, variant: tuple[bool, str, Any], dtype: str = "float64", once: bool = False
    ) -> None:
        keep_batch_dim, weights, size = variant
        loss = traced_once(case.loss) if once else case.loss
        rounded = "bfloat16" if dtype == "mixed" else dtype
        self.error = ERROR_OF_CASE.get((case.name, rounded), ERROR[dtype])
        self.truth = truth_of(case, rounded)
        self.args = case.make_args(jnp.dtype(rounded))
        if dtype == "mixed":
            loss, self.args = in_mixed_precision(case, loss, self.args)
        self.loss = loss if keep_batch_dim else as_single(case, loss)
        self.options = options(case) | {"keep_batch_dim": keep_batch_dim, "microbatch_size": size}
        self.weights = self.given = None if weights == "none" else WEIGHTS
        if weights in ("padded", "dropped"):
            self.args = pad(case, self.args)
        if weights == "dropped":
            self.options["nonfinite"] = "drop"
            self.given = np.where(WEIGHTS > 0, WEIGHTS, 1.25)
            self.weights = np.where(finite_if_padded(case), self.given, 0)

    def ways(self, strategy: str) -> set[tuple[str, Any, Any]]:
        """Which strategy would feed which statistic of which parameters."""
        plan = pg.explain(self.loss, self.statistics, strategy=strategy, **self.options)(*self.args)
        assert str(plan)
        return {
            (name, tail.tail.params, choice.strategy)
            for tail in plan.tails
            for choice in tail.choices
            for name, statistic in self.statistics.items()
            if statistic in choice.statistics
        }

    def check(self, strategy: str) -> None:
        """Runs all statistics in one program and compares them with the truth."""
        stats_fn = pg.value_and_stats(self.loss, self.statistics, strategy=strategy, **self.options)
        out = jax.jit(stats_fn)(*self.args, example_weights=self.given)
        assert_agrees(out, self.truth, self.weights, self.error)


def check_all(
    case: Case, strategies: Any, statistics: Any, dtype: str, beside: Sequence[str] = ()
) -> None:
    """Each strategy in one variant, which moves on by one from case to case, so that over all cases
    every strategy meets every variant.

    A program has those statistics that one of its parameters has not got in this way before, nor gets
    from a strategy of `beside` in another test: what takes time is to compile them. All but the first
    trace the loss together.
    """
    done: set[Any] = set()
    for offset, strategy in enumerate((*beside, *strategies)):
        number = CASES.index(case) + offset * STRIDE
        runner = Runner(case, VARIANTS[number % len(VARIANTS)], dtype, once=offset > 0)
        runner.statistics = statistics
        new = runner.ways(strategy) - done
        names = {name for name, *_ in new} | {"loss", "count"}
        runner.statistics = {name: STATISTICS[name] for name in sorted(names)}
        if new and strategy in strategies:
            runner.check(strategy)
        done |= new


def check_whole(
    case: Case,
    strategy: str,
    variant: tuple[bool, str, Any],
    names: Sequence[str] | None = None,
    dtype: str = "float64",
) -> None:
    """Asks a case for statistics of whole gradients: for these, or for all and other units too."""
    runner = Runner(case, variant, dtype, once=True)
    call = Call(Request(runner.loss, pg.Mean(), **runner.options), runner.args, {})
    questions = Questions(runner.truth, call.paths)
    units = {name: unit.statistic for name, unit in UNITS.items()} if names is None else {}
    number = CASES.index(case)
    spared = {IN_TURNS[(number + k) % len(IN_TURNS)] for k in range(3)}
    whole = {name: questions.statistics[name] for name in names or {*questions.statistics} - spared}
    argnums = case.argnums
    params = runner.args[argnums] if isinstance(argnums, int) else tuple(runner.args[n] for n in argnums)
    keywords = questions.keywords(whole, params, (0, SEVERAL)[number // 2 % 2])

    leaf = number % len(call.paths)
    some = of_positions(runner.loss, runner.args, call.paths[leaf], runner.options) if units else {}
    asked = {"whole": whole, "units": units, "positions": some}
    stats_fn = pg.value_and_stats(runner.loss, asked, strategy=strategy, **runner.options)
    value, stats = jax.jit(stats_fn)(*runner.args, example_weights=runner.given, **keywords)
    if some:
        questions.assert_positions_agree(
            stats["positions"], leaf, keywords["direction"], runner.weights, runner.error
        )
    assert_agrees((value, stats["units"]), runner.truth, runner.weights, runner.error)
    questions.assert_agrees(stats["whole"], keywords, runner.weights, runner.error)
