"""Intervals and decisions, against scipy's own tests."""

import math

import pytest
from scipy import stats

from eke.results.report.compare.statistics import (
    MIN_REPEATS,
    Compared,
    Significance,
    correct,
    estimate,
    mean_difference,
    ratio_of,
)

BASE = {0: 100.0, 1: 103.0, 2: 98.0, 3: 101.0}
OTHER = {0: 110.0, 1: 114.0, 2: 106.0, 3: 112.0}


def logs(sample):
    return [math.log(value) for value in sample.values()]


def ratio(base, other):
    """Of a comparison by itself."""
    found = Compared({"base": base, "other": other}).difference(("base", "other"))
    return found and ratio_of(found)


def of_logs(values):
    return ratio_of(mean_difference(values))


def test_ratio_is_a_geometric_mean():
    assert estimate(BASE).value == pytest.approx(stats.gmean(list(BASE.values())))
    assert estimate(BASE).n == 4


@pytest.mark.parametrize("count", range(1, MIN_REPEATS))
def test_few_repeats_give_no_interval(count):
    few = dict(list(BASE.items())[:count])
    assert estimate(few).n == count
    found = ratio(few, OTHER)
    assert (found.low, found.p, found.decision) == (None, None, Significance.single)
    assert found.value > 1
    assert estimate({}) is ratio({}, BASE) is ratio(BASE, {}) is None


def test_matching_repeats_are_paired():
    found = ratio(BASE, OTHER)
    paired = stats.ttest_rel(logs(OTHER), logs(BASE))
    low, high = paired.confidence_interval(0.95)
    assert found.p == pytest.approx(paired.pvalue)
    assert (found.low, found.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
    assert (found.decision, found.n) == (Significance.higher, 4)


def test_unpaired_repeats_use_welch():
    other = {key + 10: value for key, value in OTHER.items()} | {99: 119.0}
    found = ratio(BASE, other)
    welch = stats.ttest_ind(logs(other), logs(BASE), equal_var=False)
    low, high = welch.confidence_interval(0.95)
    assert found.p == pytest.approx(welch.pvalue)
    assert (found.low, found.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
    assert found.n == 4


def test_constant_values_have_an_exact_ratio():
    bytes_before, bytes_after = dict.fromkeys(range(3), 100.0), dict.fromkeys(range(3), 80.0)
    found = ratio(bytes_before, bytes_after)
    assert (found.low, found.high, found.decision) == (
        pytest.approx(0.8),
        pytest.approx(0.8),
        Significance.lower,
    )
    same = ratio(bytes_before, bytes_before)
    assert (same.value, same.decision) == (1.0, Significance.same)
    apart = ratio(bytes_before, {key + 5: 80.0 for key in range(3)})
    assert apart.decision is Significance.lower


@pytest.mark.parametrize(
    ("values", "decision"),
    [
        ([0.001, 0.002, 0.0], Significance.same),
        ([0.5, -0.5, 0.1], Significance.unresolved),
        ([0.2, 0.21, 0.19], Significance.higher),
        ([-0.2, -0.21, -0.19], Significance.lower),
        ([0.2, 0.3], Significance.single),
    ],
)
def test_significance_of_intervals(values, decision):
    assert of_logs(values).decision is decision


NEAR = [0.05, 0.06, 0.085]
"""p = 0.026: enough alone, not among twelve."""


def noise(count):
    return {n: mean_difference([0.3 * (-1) ** n, -0.2 * (-1) ** n, 0.01 * n]) for n in range(count)}


def test_many_comparisons_widen_intervals():
    alone = correct({"only": mean_difference(NEAR)})["only"]
    assert alone == ratio_of(mean_difference(NEAR))
    assert alone.decision is Significance.higher
    among = correct({"near": mean_difference(NEAR), **noise(11)})["near"]
    assert (among.decision, among.level) == (Significance.unresolved, 0.05 / 12)
    sure = mean_difference([0.5, 0.5001, 0.4999])
    found = correct({"sure": sure, "near": mean_difference(NEAR), **noise(11)})
    assert found["sure"].decision is Significance.higher
    assert found["near"].decision is Significance.unresolved


@pytest.mark.parametrize("level", [0.05, 0.015])
def test_interval_matches_the_holm_test(level):
    """Of four with p = 0.0001, 0.015, and two of noise: at 1/4, 1/3, and twice 1/2 of the level."""
    first, second = [0.1, 0.11, 0.09, 0.1], [0.05, 0.06, 0.09, 0.03, 0.02]
    differences = {"first": mean_difference(first), "second": mean_difference(second), **noise(2)}
    found = correct(differences, level)
    shares = [4, 3, 2, 2] if level == 0.05 else [4, 3, 3, 3]  # the second holds at 5 % alone
    assert [each.level for each in found.values()] == [level / share for share in shares]
    for key, each in found.items():
        values = {"first": first, "second": second}.get(key)
        if values:
            ends = stats.ttest_1samp(values, 0.0).confidence_interval(1 - each.level)
            assert (math.log(each.low), math.log(each.high)) == pytest.approx(tuple(ends))
        is_shown = each.decision in (Significance.higher, Significance.lower)
        assert is_shown == (each.low > 1 or each.high < 1) == (each.p <= each.level)


def test_untested_rows_do_not_affect_corrections():
    """Bytes that never vary, and a row of one repeat."""
    exact, once = mean_difference([0.1] * 3), mean_difference([0.1])
    found = correct({"exact": exact, "same": mean_difference([0.0] * 3), "once": once,
                     "near": mean_difference(NEAR)})  # fmt: skip
    assert found["near"] == ratio_of(mean_difference(NEAR))
    assert found["exact"].decision is Significance.higher
    assert found["exact"].low == pytest.approx(found["exact"].high)
    assert (found["once"].decision, found["once"].low) == (Significance.single, None)


def test_rounding_is_the_minimum_noise():
    """Three equal accuracies of 20 samples: 5 points between them are no certainty."""
    floor = 2 * 5.0**2 / 12
    found = mean_difference([5.0] * 3, floor)
    by_hand = 2 * stats.t.sf(5.0 / math.sqrt(floor / 3), 2)
    assert found.p == pytest.approx(by_hand)
    assert mean_difference([5.0] * 3).p == 0.0


@pytest.mark.parametrize(("mean", "margin"), [(0.01, 0.05), (-0.01, 0.05), (0.06, 0.05)])
def test_equality_uses_two_one_sided_tests(mean, margin):
    values = [mean - 0.01, mean, mean + 0.02]
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    assert mean_difference(values).p_same(margin) == pytest.approx(max(below, above))
    assert mean_difference([0.1]).p_same(margin) is None


def test_required_repeats_follow_the_normal_rule():
    found = mean_difference([0.03, 0.05, 0.07])
    z = stats.norm.isf(0.005 / 2) + stats.norm.isf(0.2)
    assert found.repeats_needed(0.005) == pytest.approx(max(3, (z * 0.02 / 0.05) ** 2))
    near = mean_difference([-0.03, 0.05, 0.01])
    direction, same = ((z * 0.04 / far) ** 2 for far in (0.01, 0.04))
    assert near.repeats_needed(0.005) == pytest.approx(direction)
    assert near.repeats_needed(0.005, same=0.05) == pytest.approx(same)
    assert mean_difference([0.1]).repeats_needed(0.05) is None
