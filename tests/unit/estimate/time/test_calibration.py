"""Corrections: what errors of finished runs say of the next one, and how sure they are."""

import math
import random

import pytest

from eke.estimate.time.rate_regression import correction_of, median_interval


@pytest.mark.parametrize(("count", "cut"), [(5, 0), (6, 0), (9, 1), (20, 5), (30, 9)])
def test_median_interval_matches_sign_test_tables(count, cut) -> None:
    """Conover 1999, table A3, and `scipy.stats.binom`: ranks cut + 1 and count - cut."""
    assert median_interval(range(count)) == (cut, count - 1 - cut)


def test_bias_is_corrected_and_spread_is_reported() -> None:
    found = correction_of([1.10, 1.09, 1.11, 1.10, 1.12, 1.08])
    assert found.factor == pytest.approx(1.10, rel=1e-3)
    assert math.log(1.12 / 1.10) < found.within < 0.05


def test_bias_within_chance_is_not_corrected() -> None:
    found = correction_of([1.2, 0.9, 1.1, 0.95, 1.05])
    assert found.factor == 1.0
    assert found.within > math.log(1.2)


def test_exact_estimate_is_not_corrected() -> None:
    found = correction_of([1.0] * 12 + [1.00004, 1.0002, 1.00085])
    assert found.factor == 1.0
    assert math.log(1.00085) * 0.999 < found.within < 0.001


def test_interval_is_a_student_prediction_interval() -> None:
    """t(0.975, 4) = 2.7764 by the tables; the standard deviation about 0 of the logarithms."""
    logs = [-0.02, -0.01, 0.0, 0.01, 0.02]
    found = correction_of([math.exp(each) for each in logs])
    assert found.within == pytest.approx(2.7764 * math.sqrt(0.001 / 4) * math.sqrt(1.2), rel=1e-4)


def test_prediction_interval_has_its_stated_coverage() -> None:
    rng = random.Random(3)
    inside = 0
    for _ in range(2000):
        drawn = [math.exp(rng.gauss(0.05, 0.03)) for _ in range(9)]
        found = correction_of(drawn[:8])
        inside += abs(math.log(drawn[8] / found.factor)) <= found.within
    assert inside / 2000 >= 0.945
