"""Intervals and decisions, against scipy's own tests."""

import math

import pytest
from scipy import stats

from eke.results.report.compare.statistics import (
    MIN_REPEATS,
    Significance,
    correct,
    estimate,
    of_logs,
    ratio,
)

BASE = {0: 100.0, 1: 103.0, 2: 98.0, 3: 101.0}
OTHER = {0: 110.0, 1: 114.0, 2: 106.0, 3: 112.0}


def logs(sample):
    return [math.log(value) for value in sample.values()]


def test_a_value_is_the_geometric_mean_with_students_interval():
    found = estimate(BASE)
    low, high = stats.t.interval(0.95, 3, loc=sum(logs(BASE)) / 4, scale=stats.sem(logs(BASE)))
    assert found.value == pytest.approx(stats.gmean(list(BASE.values())))
    assert (found.low, found.high) == (
        pytest.approx(math.exp(low)),
        pytest.approx(math.exp(high)),
    )


@pytest.mark.parametrize("count", range(1, MIN_REPEATS))
def test_with_few_repeats_there_is_a_value_and_no_interval(count):
    few = dict(list(BASE.items())[:count])
    assert estimate(few).low is None
    found = ratio(few, OTHER)
    assert (found.low, found.p, found.decision) == (None, None, Significance.single)
    assert found.value > 1
    assert estimate({}) is ratio({}, BASE) is ratio(BASE, {}) is None


def test_repeats_that_belong_together_are_compared_in_pairs():
    found = ratio(BASE, OTHER)
    paired = stats.ttest_rel(logs(OTHER), logs(BASE))
    low, high = paired.confidence_interval(0.95)
    assert found.p == pytest.approx(paired.pvalue)
    assert (found.low, found.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
    assert (found.decision, found.n) == (Significance.higher, 4)


def test_others_by_welch():
    other = {key + 10: value for key, value in OTHER.items()} | {99: 119.0}
    found = ratio(BASE, other)
    welch = stats.ttest_ind(logs(other), logs(BASE), equal_var=False)
    low, high = welch.confidence_interval(0.95)
    assert found.p == pytest.approx(welch.pvalue)
    assert (found.low, found.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
    assert found.n == 4


def test_what_never_varies_is_known_exactly():
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
def test_decisions(values, decision):
    assert of_logs(values).decision is decision


def test_many_comparisons_ask_for_more_each():
    near = [0.05, 0.06, 0.085]  # p = 0.026: enough alone, not among twelve
    alone = correct({"only": of_logs(near)})
    assert alone["only"].decision is Significance.higher
    many = {n: of_logs([0.3 * (-1) ** n, -0.2 * (-1) ** n, 0.01 * n]) for n in range(11)}
    among = correct({"near": of_logs(near), **many})
    assert among["near"].decision is Significance.hint
    assert among["near"].low == of_logs(near).low, "the interval is of the comparison by itself"
    sure = correct({"sure": of_logs([0.5, 0.5001, 0.4999]), "near": of_logs(near), **many})
    assert (sure["sure"].decision, sure["near"].decision) == (
        Significance.higher,
        Significance.hint,
    )


def test_holm_asks_less_of_the_second_than_of_the_first():
    """p = 0.0001 and 0.015 of four: 0.05 / 4 and 0.05 / 3; Bonferroni would refuse the second."""
    first, second = of_logs([0.1, 0.11, 0.09, 0.1]), of_logs([0.05, 0.06, 0.09, 0.03, 0.02])
    assert 0.05 / 4 < second.p < 0.05 / 3
    assert first.p < 0.05 / 4
    noise = {n: of_logs([0.3, -0.2, 0.01 * n]) for n in range(2)}
    decided = correct({"first": first, "second": second, **noise})
    assert decided["second"].decision is Significance.higher
