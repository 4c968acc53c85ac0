"""Learning-rate rules for a change of batch size.

When the batch grows by a factor kappa, the mean gradient's noise sigma^2 / B shrinks by it, and a run
over the same examples takes kappa times fewer steps. What the learning rate eta should become depends on
the optimizer:

    linear   kappa eta         The step is eta times the gradient, or times the gradient over something
                               that does not depend on B (SGD, MicroAdam, MicroAdamVar): kappa times
                               fewer steps, each kappa times as long.
    sqrt     sqrt(kappa) eta   The gradient is divided by the root of its own mean square
                               (Adam, SignSGD), which is sigma / sqrt(B) where noise dominates: that
                               alone makes steps sqrt(kappa) times as long.
    sde      sqrt(kappa) eta   The same, with decays and eps that keep the same memory in examples:
                               beta becomes 1 - kappa (1 - beta) and eps becomes eps / sqrt(kappa)
                               (Malladi et al. 2022).
    peak     sqrt(kappa) eta   for batches far below the noise scale Bn, 1 / sqrt(kappa) far above it:
                               eta(B) = eta_max / ((sqrt(Bn / B) + sqrt(B / Bn)) / 2), largest at B = Bn
                               (Li et al. 2024).
    adascale r eta             SGD, with AdaScale's gain r in the place of kappa everywhere: a larger
                               batch is worth r steps of the old one, each of the old length (Johnson et
                               al. 2020). With tr Sigma / B the noise of the old batch,
                               r = (tr Sigma / B + |mu|^2) / (tr Sigma / (kappa B) + |mu|^2).

In the last two the noise scale Bn = tr Sigma / |mu|^2 is all that counts. With B' = kappa B, both are
what holds without a signal, sqrt(kappa) and kappa, times (Bn + B) / (Bn + B').

Decoupled weight decay multiplies parameters by 1 - eta lambda in every step. So that it shrinks them as
much per example as before, lambda becomes lambda kappa eta / eta', with eta' the new learning rate. None
of the rules contains this change; it is ours.

`batch_size` lets the batch grow with the noise scale while a run goes on, and moves the learning rate
with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from pergrad._errors import ArgumentError

Rule = Literal["sqrt", "sde", "linear", "peak", "adascale"]
RULES: tuple[Rule, ...] = get_args(Rule)


def sqrt(learning_rate: float, kappa: float) -> float:
    """The learning rate for batches `kappa` times as large, by the square-root rule.

    >>> pg.scaling.sqrt(1e-3, 4)
    0.002
    """
    return learning_rate * math.sqrt(_checked("kappa", kappa))


def linear(learning_rate: float, kappa: float) -> float:
    """The learning rate for batches `kappa` times as large, by the linear rule.

    >>> pg.scaling.linear(1e-3, 4)
    0.004
    """
    return learning_rate * _checked("kappa", kappa)


def peak(learning_rate: float, batch_size: float, new_batch_size: float, noise_scale: float) -> float:
    """The learning rate for `new_batch_size`, by the rule with a peak at the noise scale.

    >>> round(pg.scaling.peak(1e-3, 64, 512, noise_scale=128), 6)
    0.000849
    """
    kappa = _kappa(batch_size, new_batch_size)
    return learning_rate * math.sqrt(kappa) * _beyond_noise(batch_size, new_batch_size, noise_scale)


def gain(batch_size: float, new_batch_size: float, noise_scale: float) -> float:
    """AdaScale's gain: how many steps with `batch_size` one step with `new_batch_size` is worth.

    It is close to `new_batch_size / batch_size` for batches far below the noise scale, and close to 1
    for batches far above it. A run takes steps of `gain` times the learning rate, and goes on in its
    learning-rate schedule by `gain` steps at each.

    >>> pg.scaling.gain(64, 256, noise_scale=128)
    2.0
    """
    kappa = _kappa(batch_size, new_batch_size)
    return kappa * _beyond_noise(batch_size, new_batch_size, noise_scale)


def decay(beta: float, kappa: float) -> float:
    """The decay of a moving average that remembers as many examples: `1 - kappa (1 - beta)`.

    >>> pg.scaling.decay(0.999, 4)
    0.996
    """
    new = round(1 - _checked("kappa", kappa) * (1 - beta), 12)
    if new < 0:
        raise ArgumentError(
            f"A decay of {beta:g} remembers {1 / (1 - beta):.3g} steps; with batches {kappa:g} times as "
            "large that is less than one. The rule ends there: move by a smaller factor, or use the "
            "rule 'sqrt', which leaves decays alone."
        )
    return new + 0.0  # not -0


@dataclasses.dataclass(frozen=True)
class Change:
    """One entry of a configuration, before and after, and why."""

    name: str
    old: Any
    new: Any
    reason: str


@dataclasses.dataclass(frozen=True)
class Move:
    """A configuration for another batch size. Printed, it shows what was changed and why."""

    config: dict[str, Any]
    changes: tuple[Change, ...]
    title: str
    batch_size: int

    def __str__(self) -> str:
        rows = [("", "before", "after", "why")]
        rows += [(c.name, _shown(c.old), _shown(c.new), c.reason) for c in self.changes]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines])


def move(
    config: Mapping[str, Any],
    batch_size: int,
    new_batch_size: int,
    rule: Rule = "sqrt",
    *,
    noise_scale: float | None = None,
) -> Move:
    """Moves an optimizer's keyword arguments from one batch size to another, and says what it did.

    Args:
      config: keyword arguments by name. `learning_rate` and `weight_decay` (numbers or schedules over
        steps), `b1`, `b2`, `eps`, `eps_root` and numbers of steps (`steps`, `warmup_steps`, ...) are
        understood; everything else is handed on as it is.
      batch_size: the size that `config` was tuned for.
      new_batch_size: the size to move to.
      rule: `"sqrt"`, `"sde"`, `"linear"`, `"peak"` or `"adascale"`: see the docstring of this module.
      noise_scale: the noise scale Bn, which the rules `"peak"` and `"adascale"` need. It may be
        infinite, if no signal has been seen.

    >>> print(pg.scaling.move({"learning_rate": 1e-3, "b2": 0.999, "steps": 1000}, 64, 256, "sde"))
    batch size 64 -> 256, kappa = 4, rule sde
                   before  after  why
    learning_rate  0.001   0.002  times sqrt(kappa): the gradient is divided by its own noise
    b2             0.999   0.996  1 - kappa (1 - beta): the same memory in examples
    steps          1000    250    divided by kappa: the same number of examples
    """
    _check_move(config, rule, noise_scale)
    kappa = _kappa(batch_size, new_batch_size)
    title = f"batch size {batch_size} -> {new_batch_size}, kappa = {kappa:g}, rule {rule}"
    if rule == "adascale" and noise_scale is not None:
        kappa = gain(batch_size, new_batch_size, noise_scale)
        title += f", the gain {kappa:.4g} in the place of kappa"
    factor, reason = {
        "sqrt": (sqrt(1.0, kappa), "times sqrt(kappa): the gradient is divided by its own noise"),
        "sde": (sqrt(1.0, kappa), "times sqrt(kappa): the gradient is divided by its own noise"),
        "linear": (linear(1.0, kappa), "times kappa: fewer steps, each kappa times as long"),
        "adascale": (linear(1.0, kappa), "times kappa: fewer steps, each kappa times as long"),
        "peak": (
            1.0 if noise_scale is None else peak(1.0, batch_size, new_batch_size, noise_scale),
            f"the peak is at the noise scale, {noise_scale}",
        ),
    }[rule]

    def moved(name: str, old: Any) -> tuple[Any, str]:
        if old is None:
            return old, "left as it is"
        if name == "learning_rate":
            return _times(old, factor, kappa, reason)
        if name == "weight_decay":
            why = "times kappa / the change of the learning rate: as much per example"
            return _times(old, kappa / factor, kappa, why)
        if name == "steps" or name.endswith("_steps"):
            same = "progress" if rule == "adascale" else "number of examples"
            return max(1, round(old / kappa)), f"divided by kappa: the same {same}"
        if rule == "sde" and name in ("b1", "b2"):
            return decay(old, kappa), "1 - kappa (1 - beta): the same memory in examples"
        if rule == "sde" and name == "eps":
            return old / math.sqrt(kappa), "divided by sqrt(kappa), as the root of the second moment"
        if rule == "sde" and name == "eps_root":
            return old / kappa, "divided by kappa, as the second moment"
        return old, "left as it is"

    news = {name: moved(name, old) for name, old in config.items()}
    return Move(
        {name: new for name, (new, _) in news.items()},
        tuple(Change(name, config[name], new, why) for name, (new, why) in news.items()),
        title,
        new_batch_size,
    )


def batch_size(
    config: Mapping[str, Any],
    batch_size: int,
    sizes: Sequence[int],
    rule: Rule = "sqrt",
    *,
    fraction: float = 1.0,
) -> Callable[..., Move]:
    """A schedule of batch sizes that follows the noise scale: a function `(noise_scale, now) -> Move`.

    It takes the noise scale that was measured and the size of the batches `now`. The batch size of the
    result is the largest of `sizes` that is at most `fraction` times the noise scale, and not less than
    `now`. Its `config` is that of `move`, from `batch_size` to the new size. If the noise scale is not
    known (None, NaN or infinite), the size stays, and the rules take it to be infinite.

    A batch of the noise scale has as much noise as signal: it takes about twice as many examples as
    small batches and about twice as many steps as large ones. Small fractions save examples, large
    ones steps. `jit` compiles a program for every size, so few sizes are better than many.

    Args:
      config: keyword arguments as for `move`, with a number as `learning_rate`, not a schedule: the
        batch size changes on the way, so multiply by a schedule over examples yourself.
      batch_size: the size that `config` was tuned for.
      sizes: the sizes to choose from.
      rule: as in `move`; `"adascale"` multiplies the learning rate by AdaScale's gain.
      fraction: the batch size, as a fraction of the noise scale.

    >>> schedule = pg.scaling.batch_size({"learning_rate": 1e-3}, 16, [16, 64, 256])
    >>> for noise_scale in (9.0, 100.0, 70.0, None):
    ...     move = schedule(noise_scale, now=16 if noise_scale == 9 else move.batch_size)
    ...     print(move.batch_size, move.config)
    16 {'learning_rate': 0.001}
    64 {'learning_rate': 0.002}
    64 {'learning_rate': 0.002}
    64 {'learning_rate': 0.002}
    """
    _check_move(config, rule, math.inf)
    _checked("fraction", fraction)
    if not sizes:
        raise ArgumentError("batch_size: sizes is empty; give the sizes to choose from.")
    for name in ("learning_rate", "weight_decay"):
        if callable(config.get(name)):
            raise ArgumentError(
                f"batch_size: {name} is a schedule over steps, but a step has more and more examples. "
                "Give a number, and multiply the updates by a schedule over examples."
            )
    ordered = sorted(round(_checked("sizes", size)) for size in sizes)

    def follow(noise_scale: float | None, now: int | None = None) -> Move:
        if noise_scale is None or not 0 < noise_scale < math.inf:
            size = ordered[0] if now is None else now
            return move(config, batch_size, size, rule, noise_scale=math.inf)
        fitting = [size for size in ordered if size <= fraction * noise_scale]
        size = max([ordered[0] if now is None else now, *fitting])
        return move(config, batch_size, size, rule, noise_scale=noise_scale)

    return follow


def _times(old: Any, factor: float, kappa: float, reason: str) -> tuple[Any, str]:
    """A number or a schedule times the factor, and why.

    One step of the new schedule has the examples of kappa steps of the old one.
    """
    if callable(old):
        schedule: Callable[[Any], Any] = old
        new = lambda step: factor * schedule(step * kappa)  # noqa: E731
        return new, f"{reason}; over steps of kappa times as many examples"
    return old * factor, reason


def _check_move(config: Mapping[str, Any], rule: str, noise_scale: float | None) -> None:
    if rule not in RULES:
        raise ArgumentError(f"move: rule must be one of {RULES}, not {rule!r}.")
    if "learning_rate" not in config:
        raise ArgumentError(f"move: config has no learning_rate, only {sorted(config)}.")
    for name in ("b1", "b2", "eps", "eps_root"):
        if callable(config.get(name)):
            raise ArgumentError(f"move: {name} is a schedule; move the numbers that it is made of.")
    if rule in ("peak", "adascale") and noise_scale is None:
        instead = "sqrt" if rule == "peak" else "linear"
        raise ArgumentError(
            f"move: the rule {rule!r} needs noise_scale=, which pergrad.noise measures. Or use "
            f"{instead!r}."
        )


def _kappa(batch_size: float, new_batch_size: float) -> float:
    return _checked("new_batch_size", new_batch_size) / _checked("batch_size", batch_size)


def _beyond_noise(batch_size: float, new_batch_size: float, noise_scale: float) -> float:
    """(Bn + B) / (Bn + B'), which is 1 if there is no signal."""
    if noise_scale == math.inf:
        return 1.0
    _checked("noise_scale", noise_scale)
    return (noise_scale + batch_size) / (noise_scale + new_batch_size)


def _checked(name: str, number: float) -> float:
    if not 0 < number < math.inf:
        raise ArgumentError(f"{name} must be a positive, finite number, not {number!r}.")
    return number


def _shown(x: Any) -> str:
    return "schedule" if callable(x) else f"{x:.4g}" if isinstance(x, float) else str(x)
