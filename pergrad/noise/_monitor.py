"""The diagnostics of a training run: moving averages over its steps, and their ratios for a log."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pergrad._errors import ArgumentError
from pergrad._ir import widen
from pergrad._moments import Stats, asked
from pergrad._statistics import Norm, Statistic, Where
from pergrad.noise._estimates import SignalNoise, by_layer, diversity, outliers, total
from pergrad.noise._read import flat, get
from pergrad.noise._signs import SIGN_FACTOR, sign_disagreement

Tree = Any


class NoiseState(NamedTuple):
    """What `Monitor` keeps: sums over all batches, with weights that decay.

    `weight` is the sum of the weights themselves. `examples` is the number of examples of the last
    batch, and `previous` is its mean gradient, if the monitor compares consecutive steps. Pairs hold a
    numerator and a denominator.
    """

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
      where: selects parameters by their path, as in `pg.Norm`. With `pg.noise.norm_layers` the monitor
        is nearly free, and `pg.noise.calibrate` goes from its noise scale to that of all parameters.
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
        """The statistics to ask `pg.value_and_stats` for.

        In place of `norm` there may be a `variance` or a `second_moment`, such as an optimizer asks for.
        Without norms the summary has no outliers.
        """
        stats = asked("mean", "count")
        if not self.across_steps:
            stats["norm"] = Norm(by="leaf", where=self.where)
        if self.signs:
            stats |= asked("sign", "second_moment") | {"sign_factor": SIGN_FACTOR}
        return stats

    def init(self, params: Tree) -> NoiseState:
        """The state before the first batch."""

        def zero() -> jax.Array:  # a buffer of its own, so that the state can be donated
            return jnp.zeros((), jnp.float32)

        paths = list(flat(params, self.where))
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

        Args:
          stats: the statistics of the batch.
          state: the state before it.
          example_weights: the weights that the statistics were computed with, if there were any. Norms
            do not depend on them. If the count in `stats` is not the sum of the weights, it is refused;
            under `jit` it makes the state NaN.
          curvature: the result of the function that `pg.noise.curvature` makes, if it was called.
        """
        count = jnp.asarray(get(stats, "count"), jnp.float32)
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
            previous=get(stats, "mean") if self.across_steps else None,
        )

    def summary(self, state: NoiseState, *, layers: bool = False) -> dict[str, float | None]:
        """Plain numbers for a log, as JSON has them: floats, and None for what is not known.

        `signal` and `noise` are |mu|^2 and tr Sigma. `snr` is the root of signal / noise, `noise_scale`
        is noise / signal, and `noise_share` is the noise scale over the size of the last batch.
        `critical_batch_size` is there if `update` was given a curvature. A number is None if nothing has
        been seen yet. If no signal has been seen, `snr` is 0 and its inverses are None.

        Args:
          state: what `update` returned.
          layers: whether the summary also has the numbers of each parameter, under names such as
            `noise_scale/block/kernel`.
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
        """The entries of the summary for the sums `pair`, of all parameters or of one."""
        scale = 1 / state.weight if state.weight > 0 else math.nan
        return {
            "signal": pair.signal * scale,
            "noise": pair.noise * scale,
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
        # |mu|^2 = E[<gbar, gbar'>],  tr Sigma (1 / B + 1 / B') = E[||gbar - gbar'||^2]
        now, before = flat(get(stats, "mean"), self.where), flat(state.previous, self.where)
        sizes = 1 / get(stats, "count") + 1 / jnp.maximum(state.examples, 1)

        def one(a: jax.Array, b: jax.Array) -> SignalNoise:
            return SignalNoise(jnp.sum(a * b), jnp.sum(jnp.square(a - b)) / sizes)

        return {k: one(widen(g), widen(before.get(k, g))) for k, g in now.items()}

    def _sign_factors(self, stats: Stats) -> dict[str, tuple[jax.Array, jax.Array]]:
        if not self.signs:
            return {}
        factors = flat(get(stats, "sign_factor"), self.where)
        known = {k: jnp.isfinite(x) for k, x in factors.items()}
        return {k: (jnp.sum(jnp.where(known[k], x, 0)), jnp.sum(known[k])) for k, x in factors.items()}

    def _disagreements(self, stats: Stats) -> dict[str, tuple[jax.Array, jax.Array]]:
        return sign_disagreement(stats, self.where) if self.signs else {}


def _slashed(paths: Sequence[str]) -> dict[str, str]:
    """Names for logs: `block/0/kernel` for `['block'][0].kernel`, or the path if two had one name."""
    names = {path: "/".join(re.findall(r"[^][.'\"]+", path)) or path for path in paths if path}
    taken = list(names.values())
    return {path: name if taken.count(name) == 1 else path for path, name in names.items()}


def _count_outliers(norms: Tree, example_weights: Any) -> tuple[jax.Array, jax.Array]:
    """How many examples are outliers, and of how many."""
    norm = jnp.sqrt(sum(jnp.square(x) for x in jax.tree.leaves(norms)))
    if example_weights is not None:
        norm = jnp.where(jnp.asarray(example_weights) > 0, norm, jnp.nan)
    return jnp.sum(outliers(norm)), jnp.sum(~jnp.isnan(norm))


def _ratio(pairs: Any) -> float:
    """The sum of the first numbers of the pairs over that of the second; NaN if there are none."""
    above, below = (math.fsum(map(float, side)) for side in zip(*pairs, strict=True))
    return above / below if below else math.nan
