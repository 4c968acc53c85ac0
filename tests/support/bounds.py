"""The statistics that every case is asked for, their truth, and how far a result may be from it.

Every number is compared with the oracle in float64, whatever the dtype under test; the oracle is then
given the same inputs, rounded to that dtype. All bounds follow from one number, `ERROR[dtype]`: how far
an example's gradient may be from the true one, as a fraction of the largest entry G of its leaf. A
statistic E[phi(g)] may then be off by that error times the slope of phi, and by the rounding of the
values of phi that are summed:

    |result - truth| <= ERROR * (max |phi'| * G + max |phi|)    both over [-G, G].
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pergrad as pg
from tests.support import oracle
from tests.support.cases import BATCH
from tests.support.truth import Truth

Tree = Any

ERROR = {
    # A few hundred roundings of 1e-16 each.
    "float64": 1e-12,
    # The same count of roundings of 6e-8.
    "float32": 1e-4,
    # Roundings of 4e-3 each, in the model's own forward and backward pass, which no strategy can undo.
    "bfloat16": 1e-1,
    # float32 parameters and a model that computes in bfloat16: what rounds is the model.
    "mixed": 1e-1,
}
# A leaf's G is not taken to be less than this fraction of the largest gradient of all parameters and of
# the loss: a gradient that is zero by cancellation is as inexact as what cancels.
SMALLEST_LEAF = 1e-3


def signed_square(g: Any) -> Any:
    """The square with the sign of its argument: factorable, which the library cannot know."""
    return g * abs(g)


def largest_magnitude(state: Any, g: Any) -> Any:
    return jnp.maximum(state, jnp.abs(g))


@dataclass(frozen=True)
class Expectation:
    """A statistic, its truth for one leaf [B, ...] and weights [B], and the bound on its error.

    `slope` and `size` give the largest |phi'| and |phi| over gradients up to G.
    """

    statistic: pg.Statistic
    truth: Callable[[np.ndarray, Any], np.ndarray]
    slope: Callable[[float], float]
    size: Callable[[float], float]


def _mean_of(phi: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray, Any], np.ndarray]:
    return lambda g, w: oracle.mean_of(phi, g, w)


EXPECTATIONS = {
    "mean": Expectation(pg.Mean(), oracle.mean, lambda G: 1, lambda G: G),
    "square": Expectation(pg.Mean(jnp.square), _mean_of(np.square), lambda G: 2 * G, lambda G: G**2),
    "abs": Expectation(pg.Mean(jnp.abs), _mean_of(np.abs), lambda G: 1, lambda G: G),
    "cube": Expectation(
        pg.Mean(pg.power(3)), _mean_of(lambda g: g**3), lambda G: 3 * G**2, lambda G: G**3
    ),
    # Not factorable, and phi(0) is not 0.
    "cos": Expectation(pg.Mean(jnp.cos), _mean_of(np.cos), lambda G: 1, lambda G: 1),
    "signed_square": Expectation(
        pg.Mean(signed_square, factorable=True),
        _mean_of(signed_square),
        lambda G: 2 * G,
        lambda G: G**2,
    ),
    # Deviations from the mean are up to 2 G; the sum is over the examples less one, so up to twice.
    "variance": Expectation(pg.Variance(), oracle.variance, lambda G: 8 * G, lambda G: 8 * G**2),
    "fold": Expectation(
        pg.Fold(jnp.zeros_like, largest_magnitude),
        lambda g, w: np.max(np.abs(kept(g, w)), axis=0),
        lambda G: 1,
        lambda G: G,
    ),
}
# The same for other units than examples. A token's gradient is not bounded by G, but its mean is.
UNITS = {
    "token_mean": replace(EXPECTATIONS["mean"], statistic=pg.Mean(per="token")),
    "single_square": replace(EXPECTATIONS["square"], statistic=pg.Mean(jnp.square, per=1)),
    "single_variance": replace(EXPECTATIONS["variance"], statistic=pg.Variance(per=1)),
    "group_mean": replace(EXPECTATIONS["mean"], statistic=pg.Mean(per=BATCH)),
    "group_square": Expectation(
        pg.Mean(jnp.square, per=BATCH),
        lambda g, w: oracle.mean_of(np.square, *oracle.groups(g, BATCH, w)),
        lambda G: 2 * G,
        lambda G: G**2,
    ),
}
STATISTICS = {name: e.statistic for name, e in EXPECTATIONS.items()} | {
    "sign": pg.Mean(jnp.sign),
    "individual": pg.Individual(),
    "loss": pg.Loss(),
    "count": pg.Count(),
}


def assert_agrees(out: Any, truth: Truth, weights: Any, error: float) -> None:
    """Compares what `value_and_stats` returned for some of `STATISTICS` with the truth.

    `error` is what a gradient may be off by, as a fraction of the largest of its leaf. An example of
    weight 0 may have any loss, aux and gradient of its own.
    """
    value, stats = out
    w = np.ones(len(truth.losses)) if weights is None else np.asarray(weights)
    if truth.aux is not None:
        value, aux = value
        _assert_aux(aux, truth.aux, w, error)
    losses = np.asarray(truth.losses)
    loss_bound = error * (1 + np.max(np.abs(losses)))
    assert_within(value, oracle.mean(losses, w), loss_bound, "value")
    if "loss" in stats:
        assert_within(kept(stats["loss"], w), kept(losses, w), loss_bound, "loss")
    if "count" in stats:
        assert stats["count"] == w.sum()

    with_path, tree = jax.tree_util.tree_flatten_with_path(truth.grads)
    flat = {
        name: tree.flatten_up_to(stat) for name, stat in stats.items() if name not in ("loss", "count")
    }
    for i, ((path, g), G) in enumerate(zip(with_path, scales(truth, w), strict=True)):
        g = np.asarray(g, np.float64)
        for name, leaves in flat.items():
            where = f"{name}{jax.tree_util.keystr(path)}"
            if name == "sign":
                _assert_sign(leaves[i], g, w, error, G, where)
            elif name == "individual":
                assert_within(kept(leaves[i], w), kept(g, w), error * G, where)
            else:
                e = EXPECTATIONS.get(name) or UNITS[name]
                bound = error * (e.slope(G) * G + e.size(G))
                assert_within(leaves[i], e.truth(g, w), bound, where)
            if name == "variance":
                assert np.all(np.asarray(leaves[i]) >= 0), where


def scales(truth: Truth, w: np.ndarray) -> list[float]:
    """G of every leaf."""
    leaves = jax.tree.leaves(truth.grads)
    largest = max(np.max(np.abs(kept(x, w)), initial=0) for x in (truth.losses, *leaves))
    return [max(np.max(np.abs(kept(g, w)), initial=0), SMALLEST_LEAF * largest) for g in leaves]


def _assert_sign(result: Any, g: np.ndarray, w: np.ndarray, error: float, G: float, where: str) -> None:
    """An entry that is zero up to rounding may have any sign, so its weight bounds the difference."""
    unsure = _mean_of(lambda g: np.abs(g) <= error * G)(g, w)
    difference = np.abs(np.asarray(result, np.float64) - _mean_of(np.sign)(g, w))
    # An exact zero counts as sure where all examples have it: a row that nobody looked up.
    unsure = np.where(np.all(kept(g, w) == 0, axis=0), 0, unsure)
    assert np.all(difference <= 2 * unsure + max(error, 1e-12) / 10), f"{where}: {difference}"


def _assert_aux(aux: Tree, truth: Tree, w: np.ndarray, error: float) -> None:
    assert jax.tree.structure(aux) == jax.tree.structure(truth)
    for result, x in zip(jax.tree.leaves(aux), jax.tree.leaves(truth), strict=True):
        if np.issubdtype(x.dtype, np.integer):
            # A choice between two numbers that are equal up to rounding may fall either way.
            assert error > 1e-6 or np.array_equal(kept(result, w), kept(x, w))
        else:
            assert_within(kept(result, w), kept(x, w), error * (1 + np.max(np.abs(x))), "aux")


def assert_within(result: Any, truth: Any, bound: float, where: str) -> None:
    """They have the same shape, and no entry differs by more than `bound`."""
    result, truth = np.asarray(result, np.float64), np.asarray(truth, np.float64)
    assert result.shape == truth.shape, f"{where}: shape {result.shape}, not {truth.shape}"
    difference = np.max(np.abs(result - truth), initial=0)
    assert difference <= bound, f"{where}: off by {difference:.3g}, more than {bound:.3g}"


def kept(x: Any, w: np.ndarray) -> np.ndarray:
    """The examples that count."""
    return np.asarray(x)[w > 0]
