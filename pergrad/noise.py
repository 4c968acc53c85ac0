"""How much the examples of a batch agree: signal, noise, and what follows for batch sizes and signs.

The gradients g_i of B examples have the mean mu and the covariance Sigma. From s, the mean of ||g_i||^2,
and G = ||gbar||^2 both have unbiased estimates (McCandlish et al. 2018; coordinate by coordinate in
`pergrad._moments`):

    noise   tr Sigma = (s - G) B / (B - 1)
    signal  |mu|^2   = G - tr Sigma / B

A batch of B has the noise tr Sigma / B, as much as the signal at the noise scale Bn = tr Sigma / |mu|^2.
The best step along the gradient of a quadratic loss with Hessian H lowers it by an amount that goes with
1 / (1 + Bc / B), Bc = tr(H Sigma) / (mu' H mu): half of what is possible at the critical batch size Bc,
which is Bn where H is a multiple of the identity, and near it where nothing else is known.

Both are ratios of noisy numbers. The mean of ratios is not the ratio of means, and a single batch may
even have a signal below 0, so numerator and denominator are averaged over steps first: that is what
`Monitor` is for. Everything here is jit-able but `Monitor.summary`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pergrad import _moments
from pergrad._call import ArgNums, Request, check_others, roles_of
from pergrad._errors import ArgumentError
from pergrad._ir import weigh, wide
from pergrad._names import Stats, asked, missing, source
from pergrad._statistics import Fold, Mean, Norm, Statistic, Variance, Where, added_up

Tree = Any


class SignalNoise(NamedTuple):
    """Estimates of |mu|^2 and tr Sigma; the first may be negative."""

    signal: Any
    noise: Any

    @property
    def noise_scale(self) -> jax.Array:
        """tr Sigma / |mu|^2, infinite where no signal is seen."""
        is_seen = self.signal > 0
        return jnp.where(is_seen, self.noise / jnp.where(is_seen, self.signal, 1), _unseen(self.signal))

    @property
    def snr(self) -> jax.Array:
        """|mu| / sqrt(tr Sigma) of one example, 0 where no signal is seen."""
        return jnp.sqrt(1 / self.noise_scale)


def by_layer(
    stats: Stats, where: Where | None = None, *, example_weights: Any = None
) -> dict[str, SignalNoise]:
    """Signal and noise of each parameter, by its path, from one batch.

    `stats` has the `mean`, the `count`, and one of: `norm` (`pg.Norm(by="leaf")`; from `pg.Norm()` there
    is one entry for all), `variance`, `second_moment`, all of examples (not of groups or tokens, not
    clipped). `where` selects parameters by their path. Norms know nothing of weights: give
    `example_weights` if there were any. One example has no variance: NaN.
    """
    count = _get(stats, "count")
    means = _flat(_get(stats, "mean"), where)
    if not means:
        raise ArgumentError("pergrad.noise: where selects no parameter.")
    squares = {path: jnp.sum(jnp.square(wide(g))) for path, g in means.items()}
    if "norm" in stats:
        if hasattr(stats["norm"], "shape") and "" not in means:
            squares = {"": added_up(list(squares.values()))}
            where = None
        norms = _flat(stats["norm"], where)
        count = _checked_count(count, next(iter(norms.values()), None), example_weights)
        mean_squares = {k: _mean(jnp.square(norms[k]), example_weights) for k in squares if k in norms}
        # At least 0 but for rounding.
        noises = {
            k: _moments.correction(count) * jnp.maximum(s - squares[k], 0)
            for k, s in mean_squares.items()
        }
    else:
        noises = {k: jnp.sum(s) for k, s in _flat(_variance(stats), where).items()}
    return {k: SignalNoise(squares[k] - noise / count, noise) for k, noise in noises.items()}


def total(layers: Mapping[str, SignalNoise]) -> SignalNoise:
    """Signal and noise of all layers together: both add up."""
    return SignalNoise(
        added_up([x.signal for x in layers.values()]), added_up([x.noise for x in layers.values()])
    )


def snr(stats: Stats) -> Tree:
    """The signal-to-noise ratio |mu| / sigma of one example, in each coordinate; 0 where none is seen.

    That of the mean of B examples is sqrt(B) times as much. Where all examples agree it is infinite.

    >>> stats = {"mean": jnp.array([3.0]), "second_moment": jnp.array([10.0]), "count": 5}
    >>> pg.noise.snr(stats)  # sigma^2 = (10 - 9) 5/4, mu^2 = 9 - sigma^2 / 5
    Array([2.6457512], dtype=float32)
    """
    return jax.tree.map(lambda x: x.snr, _coordinates(stats), is_leaf=_is_pair)


def share(stats: Stats) -> Tree:
    """(sigma^2 / B) / mu^2 in each coordinate: what noise adds to Adam's second moment."""
    n = _get(stats, "count")
    return jax.tree.map(lambda x: x.noise_scale / n, _coordinates(stats), is_leaf=_is_pair)


def diversity(layers: Mapping[str, SignalNoise], count: Any) -> jax.Array:
    """Gradient diversity, sum ||g_i||^2 / ||sum g_i||^2 (Yin et al. 2018).

    1 / B if all examples have the same gradient, 1 if gradients are orthogonal.
    """
    signal, noise = total(layers)
    return jnp.divide(signal + noise, count * signal + noise)


def outliers(norms: jax.Array, threshold: float = 3.5) -> jax.Array:
    """Which examples have an unusually large gradient, from their norms [B]: booleans [B].

    The distance of log ||g_i|| from the median, in units of the median distance times 1.4826 (the
    standard deviation, for Gaussian numbers), is larger than `threshold`. Spreads below one in a
    thousand count as that. NaN is no example: it is passed over.

    >>> pg.noise.outliers(jnp.array([1.0, 1.1, 0.9, 1.0, 50.0]))
    Array([False, False, False, False,  True], dtype=bool)
    """
    norms = wide(norms)
    logs = jnp.log(jnp.maximum(norms, jnp.finfo(norms.dtype).tiny))
    away = logs - jnp.nanmedian(logs)
    spread = 1.4826 * jnp.nanmedian(jnp.abs(away))
    return away > threshold * jnp.maximum(spread, 1e-3)


# What a sign keeps of the signal. For small mu the mean of sign(g) is 2 f(0) mu, with f the density of
# the gradient, and the sign's own deviation is 1, so of the ratio mu / sigma it keeps 2 f(0) sigma:
# sqrt(2 / pi) = 0.80 for Gaussian gradients, 0.58 for uniform ones, 1.41 for Laplace's. f(0) is the
# share of examples in (-h sigma, h sigma) over its width. That has an error of order h where the density
# has a kink at 0, as Laplace's, which cancels in twice the share of half the width less that of the
# whole. An example is held against the deviation of those before it on its device, of which there are
# some at least. Exact zeros are no density.
_WIDTH = 0.2
_BEFORE = 8


def _start_sign_factor(zeros: jax.Array) -> Any:
    zeros = wide(zeros)
    none = jnp.zeros((), zeros.dtype)
    return {"n": none, "trials": none, "mean": zeros, "m2": zeros, "near": zeros}


def _feed_sign_factor(state: Any, g: jax.Array) -> Any:
    g = g.astype(state["mean"].dtype)
    n, size = state["n"], jnp.abs(g)
    sigma = jnp.sqrt(state["m2"] / jnp.maximum(n - 1, 1))

    def density(h: float) -> jax.Array:
        """2 f(0) sigma, times the number of examples, from this one."""
        return ((size > 0) & (size < h * sigma)) / h

    near = jnp.where(n >= _BEFORE, 2 * density(_WIDTH / 2) - density(_WIDTH), 0).astype(g.dtype)
    away = g - state["mean"]
    mean = state["mean"] + away / (n + 1)
    m2 = state["m2"] + away * (g - mean)
    trials = state["trials"] + (n >= _BEFORE)
    return {"n": n + 1, "trials": trials, "mean": mean, "m2": m2, "near": state["near"] + near}


def _merge_sign_factors(a: Any, b: Any) -> Any:
    n, mean, m2 = Variance().merge(*((s["n"], s["mean"], s["m2"]) for s in (a, b)))
    trials, near = (a[name] + b[name] for name in ("trials", "near"))
    return {"n": n, "trials": trials, "mean": mean, "m2": m2, "near": near}


def _read_sign_factor(state: Any) -> jax.Array:
    trials = state["trials"]
    is_known = (state["m2"] > 0) & (trials > 0)
    return jnp.where(is_known, state["near"] / jnp.maximum(trials, 1), jnp.nan)


SIGN_FACTOR = Fold(_start_sign_factor, _feed_sign_factor, _read_sign_factor, merge=_merge_sign_factors)
"""A statistic: 2 f(0) sigma in each coordinate, the part of the signal-to-noise ratio that a sign keeps.

From one batch it is rough: average it over many coordinates with `jnp.nanmean`. NaN where all examples
agree and in batches of at most 8. On several devices these are the first 8 of each.
"""


def sign_disagreement(
    stats: Stats, where: Where | None = None, *, z: float = 2.0
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """In how many coordinates the mean gradient and the mean of the signs have different signs.

    The mean of the signs has the sign of the median, if few gradients are 0. The result has two numbers
    for each parameter: the coordinates in which the two signs differ, and the coordinates in which both
    signs are sure, which means that both means are more than `z` standard errors from 0. Only sure
    coordinates are counted in the first number; the others cannot be told from noise. `stats` has
    `mean`, `sign`, `count`, and `variance` or `second_moment`.
    """
    n = _get(stats, "count")
    means, signs, variances = (
        _flat(x, where) for x in (_get(stats, "mean"), _get(stats, "sign"), _variance(stats))
    )

    def one(g: jax.Array, sign: jax.Array, sigma2: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_sure = jnp.abs(g) > z * jnp.sqrt(jnp.maximum(sigma2, 0) / n)
        is_sure &= jnp.abs(sign) > z * jnp.sqrt(jnp.maximum(1 - jnp.square(sign), 0) / n)
        disagree = is_sure & (jnp.sign(g) != jnp.sign(sign))
        return jnp.sum(disagree, dtype=sigma2.dtype), jnp.sum(is_sure, dtype=sigma2.dtype)

    return {k: one(wide(g), signs[k], variances[k]) for k, g in means.items()}


def curvature(
    fun: Callable[..., Any],
    *,
    batch_argnums: ArgNums = 1,
    shared_argnums: ArgNums = (),
    keep_batch_dim: bool = True,
    probes: int = 1,
    microbatch_size: int | None = None,
) -> Callable[..., SignalNoise]:
    """Makes a function `(key, params, ...) -> (mu' H mu, tr(H Sigma))`, which estimates both.

    The second divided by the first is the critical batch size Bc. `fun(params, ...)` is the loss as for
    `pg.value_and_stats`. With random signs e_i,

        u = sum_i (e_i - ebar) g_i / sqrt(B - 1)  has  E[u u'] = Sigma,  so  E[u' H u] = tr(H Sigma).

    Each of the `probes` takes one gradient and one product with the Hessian. The mean of gbar' H gbar is
    mu' H mu + tr(H Sigma) / B, and the second term is subtracted. Where the Hessian is not positive
    definite, both estimates may be negative, and then their ratio says nothing. Arguments that look like
    examples and have no role are refused, as `pg.value_and_stats` refuses them. With a
    `microbatch_size` that many examples go through the model at a time: this needs the memory of that
    many examples, and every forward pass runs once more.
    """

    request = Request(fun, Mean(), batch_argnums=batch_argnums, shared_argnums=shared_argnums)

    def at(key: jax.Array, params: Tree, *rest: Any) -> SignalNoise:
        args = (params, *rest)
        roles = roles_of(request, args, {})
        batch = roles.batch_argnums
        n = jax.tree.leaves([args[i] for i in batch])[0].shape[0]
        check_others(request, roles, args, {}, n)
        axes = tuple(0 if i in batch else None for i in range(len(args)))

        def one(*example: Any) -> jax.Array:
            as_batch = (
                jax.tree.map(lambda x: x[None], x) if i in batch else x for i, x in enumerate(example)
            )
            return fun(*(as_batch if keep_batch_dim else example))

        def weighted(params: Tree, w: jax.Array) -> jax.Array:
            if microbatch_size is None:
                return jnp.sum(w * jax.vmap(one, in_axes=axes)(params, *rest))

            def at_one(example: dict[int, Any]) -> jax.Array:
                return one(*(example.get(i, x) for i, x in enumerate((params, *rest))))

            examples = {i: args[i] for i in batch}
            losses = jax.lax.map(jax.checkpoint(at_one), examples, batch_size=microbatch_size)
            return jnp.sum(w * losses)

        equal = jnp.full(n, 1 / n)
        gradient = jax.grad(weighted)

        def curved(v: Tree) -> jax.Array:
            _, product = jax.jvp(lambda p: gradient(p, equal), (params,), (v,))
            return added_up(
                [
                    jnp.vdot(wide(a), wide(b))
                    for a, b in zip(*map(jax.tree.leaves, (v, product)), strict=True)
                ]
            )

        def probe(key: jax.Array) -> jax.Array:
            e = jax.random.rademacher(key, (n,), equal.dtype)
            return curved(gradient(params, (e - jnp.mean(e)) / jnp.sqrt(n - 1)))

        noise = jnp.mean(jax.lax.map(probe, jax.random.split(key, probes)))
        return SignalNoise(curved(gradient(params, equal)) - noise / n, noise)

    return at


class NoiseState(NamedTuple):
    """Sums with decaying weights, of which `weight` is the total; `examples`: of the last batch."""

    weight: jax.Array
    examples: jax.Array
    layers: dict[str, SignalNoise]
    curvature: SignalNoise
    outliers: tuple[jax.Array, jax.Array]
    sign_factor: dict[str, tuple[jax.Array, jax.Array]]
    sign_disagreement: dict[str, tuple[jax.Array, jax.Array]]
    previous: Tree | None


@dataclasses.dataclass(frozen=True)
class Monitor:
    """Noise diagnostics as a small state that a training loop updates.

        monitor = pg.noise.Monitor()
        stats_fn = pg.value_and_stats(loss, monitor.stats | tx.stats)
        state = monitor.init(params)
        ...
        state = monitor.update(stats, state)      # jit-able
        print(monitor.summary(state))             # plain numbers, for a log

    In the averages a batch of B examples has the weight B - 1. A batch of one example says nothing about
    noise and has the weight 0.

    Args:
      decay: the decay of the moving averages at each update.
      where: selects parameters by their path, as in `pg.Norm`.
      signs: whether the summary also tells how much of the signal the signs keep, and how often the mean
        and the median of the examples have different signs.
      across_steps: whether signal and noise are estimated from the mean gradients gbar and gbar' of two
        consecutive steps, and not from the examples of one step: <gbar, gbar'> has the mean |mu|^2. This
        works for batches of one example and needs the mean and the count alone. It keeps one gradient
        in the state, and it counts the change of mu from step to step as noise.
    """

    decay: float = 0.95
    where: Where | None = None
    signs: bool = False
    across_steps: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ArgumentError(
                f"Monitor: decay must be at least 0 and less than 1, not {self.decay!r}."
            )

    @property
    def stats(self) -> dict[str, Statistic]:
        """What to ask `pg.value_and_stats` for.

        In place of `norm` there may be a `variance` or `second_moment`, such as an optimizer asks for;
        without norms there are no outliers.
        """
        stats = asked("mean", "count")
        if not self.across_steps:
            stats["norm"] = Norm(by="leaf", where=self.where)
        if self.signs:
            stats |= asked("sign", "second_moment") | {"sign_factor": SIGN_FACTOR}
        return stats

    def init(self, params: Tree) -> NoiseState:
        def zero() -> jax.Array:  # a buffer of its own, so that the state can be donated
            return jnp.zeros((), jnp.float32)

        paths = list(_flat(params, self.where))
        if not paths:
            raise ArgumentError("Monitor: where selects no parameter.")
        of_signs = paths if self.signs else []
        return NoiseState(
            weight=zero(),
            examples=zero(),
            layers={path: SignalNoise(zero(), zero()) for path in paths},
            curvature=SignalNoise(zero(), zero()),
            outliers=(zero(), zero()),
            sign_factor={path: (zero(), zero()) for path in of_signs},
            sign_disagreement={path: (zero(), zero()) for path in of_signs},
            previous=jax.tree.map(jnp.zeros_like, params) if self.across_steps else None,
        )

    def update(
        self,
        stats: Stats,
        state: NoiseState,
        *,
        example_weights: Any = None,
        curvature: SignalNoise | None = None,
    ) -> NoiseState:
        """The state after one more batch.

        Give `example_weights` if there were any: norms know nothing of them, and a count that is not
        their sum is refused (under `jit` it makes the state NaN). `curvature` is what that function
        returned.
        """
        count = jnp.asarray(_get(stats, "count"), jnp.float32)
        if self.across_steps:
            weight = (state.examples > 0).astype(jnp.float32)
            layers = self._from_two_steps(stats, state)
        else:
            weight = jnp.maximum(count - 1, 0)
            layers = by_layer(stats, self.where, example_weights=example_weights)
            if "" in layers and "" not in state.layers:
                raise ArgumentError("Monitor: ask for pg.Norm(by='leaf'), as monitor.stats does.")
        if layers.keys() != state.layers.keys():
            raise ArgumentError(
                f"Monitor: stats has the parameters {', '.join(layers)}, but the state was made for "
                f"{', '.join(state.layers)}. Make it from the parameters of the statistics:\n"
                "    state = monitor.init(params)"
            )

        def averaged(old: Any, new: Any, weight: Any = weight) -> Any:
            now = jax.tree.map(lambda x: jnp.where(weight > 0, weight * x, 0), new)
            return jax.tree.map(
                lambda a, b: (self.decay * a + (1 - self.decay) * b).astype(a.dtype), old, now
            )

        norms = None if self.across_steps else stats.get("norm")
        return NoiseState(
            weight=averaged(state.weight, jnp.ones(())),
            examples=count,
            layers=averaged(state.layers, layers),
            curvature=state.curvature if curvature is None else averaged(state.curvature, curvature),
            outliers=state.outliers
            if norms is None
            else averaged(state.outliers, _count_outliers(norms, example_weights), 1.0),
            sign_factor=averaged(state.sign_factor, self._sign_factors(stats)),
            sign_disagreement=averaged(state.sign_disagreement, self._disagreements(stats)),
            previous=stats["mean"] if self.across_steps else None,
        )

    def summary(self, state: NoiseState, *, layers: bool = False) -> dict[str, float | None]:
        """Plain numbers for a log: floats, and None for what is not known, as JSON has them.

        `signal` and `noise` are |mu|^2 and tr Sigma, `snr` the root of their ratio, `noise_scale` its
        inverse, `noise_share` that over the size of the last batch. `critical_batch_size` is there if
        `update` was given the curvature. None: nothing has been seen yet, or, for ratios, no signal.

        Args:
          state: what `update` returned.
          layers: the same for each parameter too, under names such as `noise_scale/block/kernel`.
        """
        state = jax.device_get(state)
        if not state.weight > 0:
            state = state._replace(layers=jax.tree.map(lambda x: math.nan * x, state.layers))
        out = self._numbers(total(state.layers), state)
        if state.curvature.noise != 0:
            out["critical_batch_size"] = state.curvature.noise_scale
        out["diversity"] = diversity(state.layers, state.examples)
        out["outliers"] = _ratio([state.outliers])
        out |= self._of_signs(state, list(state.sign_factor))
        for path, name in _slashed(list(state.layers)).items() if layers else ():
            own = self._numbers(state.layers[path], state) | self._of_signs(state, [path])
            out |= {f"{number}/{name}": x for number, x in own.items()}
        return {name: float(x) if math.isfinite(x) else None for name, x in out.items()}

    def _numbers(self, pair: SignalNoise, state: NoiseState) -> dict[str, Any]:
        level = 1 / state.weight if state.weight > 0 else math.nan
        return {
            "signal": pair.signal * level,
            "noise": pair.noise * level,
            "snr": pair.snr,
            "noise_scale": pair.noise_scale,
            "noise_share": pair.noise_scale / state.examples if state.examples > 0 else math.nan,
        }

    def _of_signs(self, state: NoiseState, paths: Sequence[str]) -> dict[str, Any]:
        if not self.signs:
            return {}
        return {
            "sign_factor": _ratio([state.sign_factor[path] for path in paths]),
            "sign_disagreement": _ratio([state.sign_disagreement[path] for path in paths]),
        }

    def _from_two_steps(self, stats: Stats, state: NoiseState) -> dict[str, SignalNoise]:
        # |mu|^2 = <gbar, gbar'>,  tr Sigma (1 / B + 1 / B') = E[||gbar - gbar'||^2]
        now, before = _flat(stats["mean"], self.where), _flat(state.previous, self.where)
        sizes = 1 / stats["count"] + 1 / jnp.maximum(state.examples, 1)

        def one(a: jax.Array, b: jax.Array) -> SignalNoise:
            return SignalNoise(jnp.sum(a * b), jnp.sum(jnp.square(a - b)) / sizes)

        return {k: one(wide(g), wide(before.get(k, g))) for k, g in now.items()}

    def _sign_factors(self, stats: Stats) -> dict[str, tuple[jax.Array, jax.Array]]:
        if not self.signs:
            return {}
        factors = _flat(_get(stats, "sign_factor"), self.where)
        known = {k: jnp.isfinite(x) for k, x in factors.items()}
        return {k: (jnp.sum(jnp.where(known[k], x, 0)), jnp.sum(known[k])) for k, x in factors.items()}

    def _disagreements(self, stats: Stats) -> dict[str, tuple[jax.Array, jax.Array]]:
        return sign_disagreement(stats, self.where) if self.signs else {}


def _coordinates(stats: Stats) -> Tree:
    """mu2 and sigma2 of each coordinate, as a tree of pairs like the parameters."""
    n = _get(stats, "count")
    return jax.tree.map(
        lambda g, s: SignalNoise(_moments.mean_square(wide(g), s, n), s),
        _get(stats, "mean"),
        _variance(stats),
    )


def _variance(stats: Stats) -> Tree:
    """sigma2 of each coordinate; never negative."""
    if "variance" in stats:
        return stats["variance"]
    n = _get(stats, "count")

    def one(g: jax.Array, q: jax.Array) -> jax.Array:
        return jnp.maximum(_moments.variance(wide(g), q, n), 0)

    return jax.tree.map(one, _get(stats, "mean"), _get(stats, "second_moment"))


def _get(stats: Stats, name: str) -> Any:
    if name not in stats:
        text = "pg.noise.SIGN_FACTOR" if name == "sign_factor" else source(name)
        raise missing("pergrad.noise", name, stats, text, "which Monitor.stats does, too.")
    return stats[name]


def _flat(tree: Tree, where: Where | None) -> dict[str, Any]:
    """The leaves by their path, those that `where` selects."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = {jax.tree_util.keystr(path): x for path, x in leaves}
    return {path: x for path, x in paths.items() if where is None or where(path)}


def _checked_count(count: Any, norm: Any, example_weights: Any) -> Any:
    """The count, if these are the weights that it is the sum of; NaN, where only the run can tell."""
    if norm is None:
        return count
    own = jnp.sum(jnp.asarray(example_weights)) if example_weights is not None else len(norm)
    differs = jnp.abs(own - count) > 1e-3 * count
    if isinstance(differs, Tracer):
        return jnp.where(differs, jnp.nan, count)
    if differs:
        raise ArgumentError(
            f"pergrad.noise: the statistics count {float(count):g} examples, but the norms of "
            f"{len(norm)} examples would count {float(own):g}. Norms know nothing of weights: hand on "
            "those that the statistics were made with,\n"
            "    stats_fn(params, batch, example_weights=w)\n"
            "    monitor.update(stats, state, example_weights=w)"
        )
    return count


def _slashed(paths: Sequence[str]) -> dict[str, str]:
    """Names for logs: `block/0/kernel` for `['block'][0].kernel`, or the path if two had one name."""
    names = {path: "/".join(re.findall(r"[^][.'\"]+", path)) or path for path in paths if path}
    taken = list(names.values())
    return {path: name if taken.count(name) == 1 else path for path, name in names.items()}


def _mean(x: jax.Array, example_weights: Any) -> jax.Array:
    """The mean over examples; those of weight 0 are not there, even if they are NaN."""
    w = jnp.ones(len(x), x.dtype) if example_weights is None else jnp.asarray(example_weights)
    return jnp.sum(weigh(x, w)) / jnp.sum(w)


def _count_outliers(norms: Tree, example_weights: Any) -> tuple[jax.Array, jax.Array]:
    """How many examples are outliers, and of how many."""
    norm = jnp.sqrt(added_up([jnp.square(x) for x in jax.tree.leaves(norms)]))
    if example_weights is not None:
        norm = jnp.where(jnp.asarray(example_weights) > 0, norm, jnp.nan)
    return jnp.sum(outliers(norm)), jnp.sum(~jnp.isnan(norm))


def _ratio(pairs: Any) -> float:
    """The ratio of two sums, NaN of nothing."""
    above, below = (math.fsum(map(float, side)) for side in zip(*pairs, strict=True))
    return above / below if below else math.nan


def _unseen(signal: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(signal), jnp.nan, jnp.inf)


def _is_pair(x: Any) -> bool:
    return isinstance(x, SignalNoise)
