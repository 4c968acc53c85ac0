"""The rule of decision, on made-up results whose answer is known."""

import math

import numpy as np
import pytest
from scipy.stats import binom, wilcoxon

from pergrad.lab.compare import decide
from pergrad.lab.compare.decide import by_ranks, compare, equivalent, estimate, level_of_each
from pergrad.lab.errors import LabError

BAD = (math.nan, math.inf)
NAMES = ("SignEMA", "SignSGD")


def runs(*losses):
    return dict(enumerate(losses))


def at_most(count, n, probability):
    """Whether luck may make `count` of `n` with this `probability`, more than once in a million."""
    return count <= binom.ppf(1 - 1e-6, n, probability)


def two_methods(rng, difference, seeds=5):
    """Losses whose seeds matter more than the method, as they do in training."""
    shared = rng.normal(3, 0.5, seeds)
    return runs(*shared + difference + rng.normal(0, 0.05, seeds)), runs(*shared)


# The interval.


def test_interval_by_hand():
    # The mean of 1, 2, 3 is 2, its error 1 / sqrt 3, and Student's t at 97.5% with 2 degrees is 4.3027.
    e = estimate([1.0, 2.0, 3.0])
    assert (e.mean, e.n) == (2.0, 3)
    assert e.high - 2 == pytest.approx(2 - e.low) == pytest.approx(4.302653 / math.sqrt(3))


@pytest.mark.parametrize("n", [2, 3, 5, 20])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_coverage(n, level):
    rng = np.random.default_rng(n)
    simulations = 1000
    found = [estimate(x, level) for x in rng.normal(1.5, 2.0, (simulations, n))]
    missed = sum(not e.low < 1.5 < e.high for e in found)
    assert at_most(missed, simulations, 1 - level)
    assert at_most(simulations - missed, simulations, level)


def test_one_value_says_nothing_of_the_spread():
    e = estimate([2.5])
    assert (e.mean, e.low, e.high, e.n) == (2.5, -math.inf, math.inf, 1)


@pytest.mark.parametrize("bad", [*BAD, -math.inf])
def test_no_mean_of_what_diverged(bad):
    e = estimate([1.0, bad, 2.0])
    assert math.isnan(e.mean)
    assert (e.low, e.high, e.n) == (-math.inf, math.inf, 3)


def test_wrong_arguments():
    with pytest.raises(LabError, match="at least one run"):
        estimate([])
    for level in (0.0, 1.0, 95.0, math.nan):
        with pytest.raises(LabError, match="between 0 and 1"):
            estimate([1.0, 2.0], level)


def test_numbers_have_the_digits_that_are_known():
    assert str(estimate([2.31, 2.35, 2.27])) == "2.310 (2.211 to 2.409)"
    assert str(estimate([1000.0, 2000.0, 3000.0])) == "2000 (-484 to 4484)"
    assert str(estimate([2.5])) == "2.5 (1 seed)"
    assert str(estimate([2.5, 2.5])) == "2.5 (2.5 to 2.5)"
    assert str(estimate([2.5, math.nan])) == "diverged"


# A claim that one is lower.


def test_a_true_difference_is_found():
    rng = np.random.default_rng(0)
    answers = [compare("", *two_methods(rng, -0.3)).answer for _ in range(200)]
    assert answers.count("supported") >= 198  # unpaired, the seeds would hide it
    answers = [compare("", *two_methods(rng, 0.3)).answer for _ in range(200)]
    assert answers.count("contradicted") >= 198


@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_no_difference_is_rarely_one(margin):
    rng = np.random.default_rng(1)
    n = 1000
    answers = [compare("", *two_methods(rng, -margin), margin=margin).answer for _ in range(n)]
    assert at_most(answers.count("supported"), n, 0.025)
    assert at_most(answers.count("contradicted"), n, 0.025)


def test_what_a_verdict_says():
    a, b = runs(1.0, 1.1, 1.2, 1.3, 1.4), runs(1.11, 1.22, 1.32, 1.43, 1.52)
    v = compare("SignEMA ends below SignSGD", a, b)
    assert (v.claim, v.answer) == ("SignEMA ends below SignSGD", "supported")
    assert v.why == "lower by 0.1200 (95%: 0.1112 to 0.1288) in 5 paired seeds"
    assert v.difference == estimate([a[i] - b[i] for i in range(5)])
    assert compare("", b, a).why == "higher by 0.1200 (95%: 0.1112 to 0.1288) in 5 paired seeds"
    v = compare("", runs(1.0, 2.0, 3.0), runs(1.1, 1.9, 3.0))
    assert v.answer == "not shown"
    assert (
        v.why == "the interval contains 0: a difference of 0.00 (95%: -0.25 to 0.25) in 3 paired seeds"
    )


def test_pairs_are_those_of_a_seed():
    a = {7: 1.0, 3: 2.0, 5: 3.0}
    b = {3: 2.1, 5: 3.1, 7: 1.1}
    assert compare("", a, b).answer == "supported"


def test_margins():
    a, b = runs(1.0, 1.1, 1.2, 1.3), runs(1.11, 1.2, 1.31, 1.4)
    assert compare("", a, b, margin=0.05).answer == "supported"
    assert compare("", a, b, margin=0.1).answer == "not shown"
    v = compare("", a, b, margin=0.3)
    assert v.answer == "contradicted"
    assert v.why.startswith("lower by 0.1") and v.why.endswith(", not by more than the margin 0.3")
    for margin in (-0.1, math.nan, math.inf):
        with pytest.raises(LabError, match="margin"):
            compare("", a, b, margin=margin)


def test_the_same_program_twice():
    a = runs(1.0, 1.1, 1.2)
    assert compare("", a, dict(a)).answer == "not shown"
    assert equivalent("", a, dict(a), margin=0.01).answer == "supported"


@pytest.mark.parametrize("rule", [compare, by_ranks, lambda *args: equivalent(*args, margin=1.0)])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("loss", [1.0, *BAD])
def test_few_seeds_show_nothing(rule, n, loss):
    v = rule("", runs(*[loss] * n), runs(*[2.0] * n))
    assert v.answer == "not shown"
    assert v.why == ("only 1 seed" if n == 1 else "only 2 seeds")


def test_seeds_without_a_pair():
    with pytest.raises(LabError) as error:
        compare("", {0: 1.0, 1: 1.0, 2: 1.0, 5: 1.0}, {0: 1.0, 1: 1.0, 9: 1.0}, names=NAMES)
    assert "SignEMA: 2, 5; SignSGD: 9" in str(error.value)
    with pytest.raises(LabError, match="the second: 0"):
        equivalent("", {}, {0: 1.0}, margin=1.0)
    with pytest.raises(LabError, match="there is none"):
        compare("", {}, {})


# Runs that diverged, and counts.


@pytest.mark.parametrize("bad", BAD)
def test_one_run_that_diverged_decides_nothing(bad):
    good, lost = runs(*[5.0] * 8), runs(*[4.0] * 7, bad)
    v = compare("", lost, good, names=NAMES)
    assert v.answer == "not shown" and math.isnan(v.difference.mean)
    assert v.why.startswith("1 of 8 runs of SignEMA diverged, and signed ranks have p = ")
    both = compare("", runs(*[bad] * 8), runs(*[bad] * 8))
    assert both.answer == "not shown" and "p = 1," in both.why
    assert both.why.startswith("8 of 8 runs of the first and 8 of 8 runs of the second diverged, ")


@pytest.mark.parametrize("bad", BAD)
def test_many_runs_that_diverged_decide(bad):
    """All of 8 pairs have one sign: p = 2 / 2^8."""
    good, lost = runs(*[5.0] * 8), runs(*[6.0] * 4, *[bad] * 4)
    v = compare("", good, lost, names=NAMES)
    assert v.answer == "supported"
    assert v.why == (
        "4 of 8 runs of SignSGD diverged, and signed ranks have p = 0.0078, with 0.05 as the limit, "
        "in 8 pairs"
    )
    assert compare("", lost, good).answer == "contradicted"
    assert compare("", good, lost, level=0.995).answer == "not shown"
    assert compare("", good, lost, margin=2.0).answer == "not shown"  # the finite ones are within it


def test_signed_ranks_are_those_of_scipy():
    """Where there are no ties, and nothing diverged."""
    rng = np.random.default_rng(6)
    for n in (3, 6, 11):
        a, b = rng.normal(0.4, 1, n), rng.normal(0, 1, n)
        p, total = decide._signed_ranks(list(a - b))
        assert p == pytest.approx(wilcoxon(a, b, method="exact").pvalue)
        ranks = 1 + np.argsort(np.argsort(abs(a - b)))
        assert total == np.sum(np.sign(a - b) * ranks)


def test_equal_rates_of_divergence_are_rarely_a_difference():
    """Two methods of which each run diverges with the probability 5% or 30%, and which are the same."""
    rng = np.random.default_rng(7)
    n = 2000
    for rate in (0.05, 0.3):
        pairs = rng.normal(size=(n, 2, 8))
        pairs[rng.random(pairs.shape) < rate] = math.inf
        answers = [compare("", runs(*a), runs(*b)).answer for a, b in pairs]
        assert at_most(n - answers.count("not shown"), n, 0.05)


def test_counts_are_compared_by_ranks():
    few, many = runs(0, 0, 1, 0, 0, 0), runs(2, 3, 2, 4, 1, 2)
    v = by_ranks("Adam has fewer", few, many)
    assert v.answer == "supported"
    assert v.why == "signed ranks have p = 0.031, with 0.05 as the limit, in 6 pairs"
    assert by_ranks("", many, few).answer == "contradicted"
    assert by_ranks("", few, dict(few)).answer == "not shown"


# A claim that two are the same.


def test_equivalence():
    rng = np.random.default_rng(2)
    near = [equivalent("", *two_methods(rng, 0.0), margin=0.2).answer for _ in range(200)]
    assert near.count("supported") >= 190
    far = [
        equivalent("", *two_methods(rng, s * 0.5), margin=0.2).answer
        for s in (-1, 1)
        for _ in range(100)
    ]
    assert far.count("contradicted") >= 190
    few = equivalent("", runs(1.0, 2.0, 3.0), runs(1.5, 1.6, 2.9), margin=0.2)
    assert few.answer == "not shown"
    assert few.why.startswith("the interval crosses the margin 0.2: a difference of ")


@pytest.mark.parametrize("difference", [-0.1, 0.1])
def test_a_difference_of_the_margin_is_rarely_none(difference):
    rng = np.random.default_rng(3)
    n = 500
    answers = [equivalent("", *two_methods(rng, difference), margin=0.1).answer for _ in range(n)]
    assert at_most(answers.count("supported"), n, 0.025)
    assert at_most(answers.count("contradicted"), n, 0.025)


def test_equivalence_and_divergence():
    good, lost = runs(*[1.0] * 8), runs(*[1.0] * 7, math.nan)
    assert equivalent("", lost, good, margin=1.0).answer == "not shown"
    assert equivalent("", lost, lost, margin=1.0).answer == "not shown"
    all_lost = runs(*[math.inf] * 8)
    assert equivalent("", all_lost, good, margin=1.0).answer == "contradicted"
    assert equivalent("", good, all_lost, margin=1.0).answer == "contradicted"


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan, math.inf])
def test_equivalence_needs_a_margin(margin):
    with pytest.raises(LabError, match="above 0"):
        equivalent("", runs(1.0), runs(1.0), margin=margin)


# Several claims.


def test_level_of_each():
    assert level_of_each(1) == pytest.approx(0.95)
    assert level_of_each(5) == pytest.approx(0.99)
    assert level_of_each(2, 0.9) == pytest.approx(0.95)
    with pytest.raises(LabError, match="at least one claim"):
        level_of_each(0)


def test_of_many_false_claims_none_is_supported():
    rng = np.random.default_rng(4)
    studies, claims = 300, 10

    def by_luck(level):
        return sum(
            any(
                [
                    compare("", *two_methods(rng, 0.0), level=level).answer != "not shown"
                    for _ in range(claims)
                ]
            )
            for _ in range(studies)
        )

    assert at_most(by_luck(level_of_each(claims)), studies, 0.05)
    assert by_luck(0.95) > 0.3 * studies  # 1 - 0.95 ** 10 is 0.4


def test_the_level_is_said():
    v = compare("", runs(1.0, 1.1, 1.2), runs(2.0, 2.2, 2.2), level=level_of_each(6))
    assert "(99.2%: " in v.why
