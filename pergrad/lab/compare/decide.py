"""What a difference between runs says: the rule of decision, fixed before any run.

Methods are compared by the final loss of runs that differ in the seed, and both have the same seeds: a
seed fixes the initial weights and the order of the data, so that the difference of a pair is free of
what both share. Student's t interval of the mean difference decides, at 95% by default. The interval
assumes that the differences are about normal. Nobody can check that with 3 to 10 seeds, so an interval
that barely misses a bound says little.

    supported     the whole interval is where the claim says
    contradicted  the whole interval is where the claim says it is not
    not shown     anything else: the seeds do not tell. This is no evidence that there is no difference;
                  the rule `equivalent` looks for such evidence.

Fewer than 3 pairs show nothing. A run whose final loss is NaN or infinite has diverged. It is worse than
every finite loss, and a mean that contains it is infinite. So if only one method has runs that diverged,
even a single one, the other method ends below it. If both methods have such runs, the difference is
infinity minus infinity, and the answer is "not shown". The remaining pairs would compare the methods
where both went well, which is another question; and a test of signs alone never reaches 95% with 5
pairs, even if all signs agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pergrad.lab.errors import LabError

SUPPORTED, CONTRADICTED, NOT_SHOWN = ANSWERS = ("supported", "contradicted", "not shown")
FEWEST_PAIRS = 3


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds, and the interval from `low` to `high` that is to contain the true mean.

    The interval of one seed, which says nothing about the spread, is -inf to inf. If a run diverged, the
    mean is NaN.
    """

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "diverged"
        mean, low, high = _digits(self, self.mean, self.low, self.high)
        return f"{mean} ({low} to {high})" if self.n > 1 else f"{mean} (1 seed)"


@dataclass(frozen=True)
class Verdict:
    """What runs say about a claim. `answer` is one of `ANSWERS`; `why` a sentence with the numbers."""

    claim: str
    difference: Estimate
    answer: str
    why: str


def estimate(values: Sequence[float], level: float = 0.95) -> Estimate:
    """The mean of `values`, and Student's t interval: it contains the true mean in `level` of cases."""
    from scipy.stats import t

    if not 0 < level < 1:
        raise LabError(f"the level of an interval is between 0 and 1, not {level}")
    x = np.asarray(values, float)
    n = len(x)
    if not n:
        raise LabError("a mean needs at least one run, and there is none")
    if not np.isfinite(x).all():
        return Estimate(math.nan, -math.inf, math.inf, n)
    mean = float(x.mean())
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, n)
    half = float(t.ppf((1 + level) / 2, n - 1) * x.std(ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n)


def level_of_each(claims: int, level: float = 0.95) -> float:
    """The level at which to decide each of several claims, so that `level` is that of all together.

    Of twenty claims at 95% one would come true by luck. This is Bonferroni's rule: 1 - level is shared
    out among the claims. Holm's finds a little more, but its answers no longer agree with intervals that
    one can draw. The number of claims is fixed, like the rest, before any run.
    """
    if claims < 1:
        raise LabError(f"the level is shared by at least one claim, not {claims}")
    return 1 - (1 - level) / claims


def compare(
    claim: str,
    a: Mapping[int, float],
    b: Mapping[int, float],
    *,
    margin: float = 0.0,
    level: float = 0.95,
    names: tuple[str, str] = ("the first", "the second"),
) -> Verdict:
    """Decides the claim that `a` ends lower than `b` by more than `margin`; both are losses by seed.

    The claim is contradicted if the whole interval of a - b is above -margin; with a margin above 0, `a`
    may then still end lower, by less than the margin. `names` are the names of the methods in the
    reason.
    """
    if not 0 <= margin < math.inf:
        raise LabError(f"a margin is 0 or more, not {margin}")
    difference = estimate(_differences(a, b, names), level)
    if (fault := _no_interval(a, b, names)) is not None:
        lost_a, lost_b, why = fault
        answer = (
            SUPPORTED if lost_b and not lost_a else CONTRADICTED if lost_a and not lost_b else NOT_SHOWN
        )
        return Verdict(claim, difference, answer, why)
    words = _in_words(difference, level)
    beyond = f", by more than the margin {margin:g}" if margin else ""
    if difference.high < -margin:
        return Verdict(claim, difference, SUPPORTED, words + beyond)
    if difference.low > -margin:
        return Verdict(claim, difference, CONTRADICTED, words + (beyond and f", not{beyond[1:]}"))
    return Verdict(claim, difference, NOT_SHOWN, f"the interval contains {-margin or 0:g}: {words}")


def equivalent(
    claim: str,
    a: Mapping[int, float],
    b: Mapping[int, float],
    *,
    margin: float,
    level: float = 0.95,
    names: tuple[str, str] = ("the first", "the second"),
) -> Verdict:
    """Decides the claim that `a` and `b` end within `margin` of each other.

    These are two one-sided tests, each at (1 - level) / 2. The claim is supported if the interval of a -
    b lies between -margin and margin, and contradicted if it lies outside. It is also contradicted if
    runs of one method alone diverged.
    """
    if not 0 < margin < math.inf:
        raise LabError(f"a margin of equivalence is above 0, not {margin}")
    difference = estimate(_differences(a, b, names), level)
    if (fault := _no_interval(a, b, names)) is not None:
        lost_a, lost_b, why = fault
        return Verdict(claim, difference, CONTRADICTED if lost_a != lost_b else NOT_SHOWN, why)
    words = _in_words(difference, level)
    if -margin < difference.low and difference.high < margin:
        return Verdict(claim, difference, SUPPORTED, f"{words}, within the margin {margin:g}")
    if difference.high <= -margin or difference.low >= margin:
        return Verdict(claim, difference, CONTRADICTED, f"{words}, beyond the margin {margin:g}")
    return Verdict(claim, difference, NOT_SHOWN, f"the interval crosses the margin {margin:g}: {words}")


def _differences(a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str]) -> list[float]:
    alone = [(names[0], sorted(a.keys() - b.keys())), (names[1], sorted(b.keys() - a.keys()))]
    if a.keys() != b.keys():
        said = "; ".join(f"{name}: {', '.join(map(str, seeds))}" for name, seeds in alone if seeds)
        raise LabError(f"the methods are compared by the same seeds, and these are in one alone: {said}")
    return [float(a[seed]) - float(b[seed]) for seed in sorted(a)]


def _no_interval(
    a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str]
) -> tuple[bool, bool, str] | None:
    """Whether `a` and `b` diverged and a sentence on it, if no interval can decide; else None."""
    n = len(a)
    if n < FEWEST_PAIRS:
        return False, False, f"only {n} seed{'s' * (n > 1)}"
    lost = [sum(not math.isfinite(x) for x in runs.values()) for runs in (a, b)]
    if not any(lost):
        return None
    said = " and ".join(f"{k} of {n} runs of {name}" for k, name in zip(lost, names, strict=True) if k)
    rest = ": the others alone would be another question" if all(lost) else ""
    return lost[0] > 0, lost[1] > 0, f"{said} diverged{rest}"


def _in_words(d: Estimate, level: float) -> str:
    if d.high < 0:
        said, (mean, first, last) = "lower by", _digits(d, -d.mean, -d.high, -d.low)
    else:
        said, (mean, first, last) = (
            "higher by" if d.low > 0 else "a difference of",
            _digits(d, d.mean, d.low, d.high),
        )
    return f"{said} {mean} ({100 * level:.3g}%: {first} to {last}) in {d.n} paired seeds"


def _digits(e: Estimate, *values: float) -> list[str]:
    """Values in as many decimals as give two digits of the half-width of the interval."""
    half = (e.high - e.low) / 2
    decimals = 1 - math.floor(math.log10(half)) if 0 < half < math.inf else 99
    return [f"{v:z.{max(decimals, 0)}f}" if decimals <= 6 else f"{v:.4g}" for v in values]
