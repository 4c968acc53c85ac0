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
every finite loss, and no mean can contain it, so there is no interval. An exact test of signed ranks
(`by_ranks`) decides in its place, at the same level. So a single run that diverged decides nothing: it
may be luck.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from pergrad.lab.errors import LabError

SUPPORTED, CONTRADICTED, NOT_SHOWN = ANSWERS = ("supported", "contradicted", "not shown")
FEWEST_PAIRS = 3


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
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
    reason. If runs diverged, `by_ranks` decides.
    """
    if not 0 <= margin < math.inf:
        raise LabError(f"a margin is 0 or more, not {margin}")
    difference = estimate(_differences(a, b, names), level)
    if len(a) < FEWEST_PAIRS or not math.isfinite(difference.mean):
        shifted = {seed: loss + margin for seed, loss in a.items()}
        found = by_ranks(claim, shifted, b, level=level, names=names)
        return dataclasses.replace(found, difference=difference)
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
    b lies between -margin and margin, and contradicted if it lies outside. If runs diverged, it is
    contradicted if `by_ranks` finds a difference, and otherwise not shown.
    """
    if not 0 < margin < math.inf:
        raise LabError(f"a margin of equivalence is above 0, not {margin}")
    difference = estimate(_differences(a, b, names), level)
    if len(a) < FEWEST_PAIRS or not math.isfinite(difference.mean):
        found = by_ranks(claim, a, b, level=level, names=names)
        return found if found.answer == NOT_SHOWN else dataclasses.replace(found, answer=CONTRADICTED)
    words = _in_words(difference, level)
    if -margin < difference.low and difference.high < margin:
        return Verdict(claim, difference, SUPPORTED, f"{words}, within the margin {margin:g}")
    if difference.high <= -margin or difference.low >= margin:
        return Verdict(claim, difference, CONTRADICTED, f"{words}, beyond the margin {margin:g}")
    return Verdict(claim, difference, NOT_SHOWN, f"the interval crosses the margin {margin:g}: {words}")


def by_ranks(
    claim: str,
    a: Mapping[int, float],
    b: Mapping[int, float],
    *,
    level: float = 0.95,
    names: tuple[str, str] = ("the first", "the second"),
) -> Verdict:
    """Decides the claim that `a` is lower than `b` by an exact test of signed ranks.

    It is for runs that diverged, and for counts, of which there is no mean or no interval. Pairs are
    ranked by the size of their difference. A pair of which one run diverged has the largest difference,
    and a pair of which both did has none. If neither method were better, every difference could as well
    have the other sign. The p-value is the share of all 2^n choices of signs for which the sum of the
    signed ranks is at least as far from 0. No p-value is below 2 / 2^n, so 5 pairs never reach 95%.
    """
    differences = _differences(a, b, names)
    difference = estimate(differences, level)
    n = len(a)
    if n < FEWEST_PAIRS:
        return Verdict(claim, difference, NOT_SHOWN, f"only {n} seed{'s' * (n > 1)}")
    p, total = _signed_ranks([_loss(a[seed]) - _loss(b[seed]) for seed in sorted(a)])
    answer = NOT_SHOWN if p > 1 - level else SUPPORTED if total < 0 else CONTRADICTED
    lost = _said_of_lost(a, b, names)
    why = f"{lost}and signed ranks have p = {p:.2g}, with {1 - level:.2g} as the limit, in {n} pairs"
    return Verdict(claim, difference, answer, why if lost else why.removeprefix("and "))


def _loss(x: float) -> float:
    """A loss; infinite if the run diverged."""
    return float(x) if math.isfinite(x) else math.inf


def _signed_ranks(differences: Sequence[float]) -> tuple[float, float]:
    """The two-sided p-value of the sum of signed ranks, and that sum."""
    from scipy.stats import rankdata

    d = np.array([x for x in differences if x and not math.isnan(x)])
    ranks = np.rint(2 * rankdata(np.abs(d))).astype(int)  # twice the ranks: those of ties may be halves
    choices = np.ones(1)  # [k]: how many choices of signs give the positive ranks the sum k
    for rank in ranks:
        choices = np.pad(choices, (0, rank)) + np.pad(choices, (rank, 0))
    sums = 2 * np.arange(len(choices)) - ranks.sum()
    total = int(np.sum(np.sign(d) * ranks))
    return float(choices[abs(sums) >= abs(total)].sum() / choices.sum()), total / 2


def _differences(a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str]) -> list[float]:
    alone = [(names[0], sorted(a.keys() - b.keys())), (names[1], sorted(b.keys() - a.keys()))]
    if a.keys() != b.keys():
        said = "; ".join(f"{name}: {', '.join(map(str, seeds))}" for name, seeds in alone if seeds)
        raise LabError(f"the methods are compared by the same seeds, and these are in one alone: {said}")
    return [float(a[seed]) - float(b[seed]) for seed in sorted(a)]


def _said_of_lost(a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str]) -> str:
    """Words on how many runs of each method diverged, with a comma after them; empty if none did."""
    lost = [sum(not math.isfinite(x) for x in runs.values()) for runs in (a, b)]
    said = [f"{k} of {len(a)} runs of {name}" for k, name in zip(lost, names, strict=True) if k]
    return f"{' and '.join(said)} diverged, " if said else ""


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
