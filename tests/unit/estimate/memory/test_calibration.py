"""Corrections: what pairs say, how sure they are, and what they never touch."""

import math
import random
from dataclasses import replace

import pytest
from unit.plan.cases import SYNTHETIC, plan_of

from eke.estimate.memory import Method, Range, forecast
from eke.estimate.memory.calibration import (
    NEEDED,
    Correction,
    Pair,
    calibrate,
    corrected,
    correction_of,
    median_interval,
    t_quantile,
)


def pairs(*ratios: float, predicted: int = 10**9) -> list[Pair]:
    """One configuration each; measured is so many times what was predicted."""
    return [
        Pair(f"key{n}", f"run{n}", predicted, round(predicted * ratio))
        for n, ratio in enumerate(ratios)
    ]


@pytest.mark.parametrize(
    ("degrees", "exact"), [(4, 2.7764), (5, 2.5706), (9, 2.2622), (29, 2.0452), (199, 1.9720)]
)
def test_students_quantiles_are_those_of_the_tables(degrees, exact) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(("count", "cut"), [(5, 0), (6, 0), (9, 1), (20, 5), (30, 9)])
def test_the_median_lies_between_the_ranks_of_the_sign_tests_tables(count, cut) -> None:
    """Conover 1999, table A3, and `scipy.stats.binom`: ranks cut + 1 and count - cut."""
    assert median_interval(range(count)) == (cut, count - 1 - cut)


def test_nothing_is_said_of_too_few_runs() -> None:
    assert correction_of(pairs(*[1.1] * (NEEDED - 1))) is None
    assert correction_of(pairs(*[1.1] * NEEDED)) is not None


def test_repetitions_of_one_configuration_are_one_observation_the_newest() -> None:
    same = [Pair("key", f"run{n}", 1000, 1100 + n) for n in range(100)]
    assert correction_of(same) is None
    found = correction_of([*same, *pairs(1.1, 1.1, 1.1, 1.1)])
    assert found is not None
    assert found.num_runs == 5
    assert found.within >= math.log(1.199 / 1.1) * 0.99, "the newest of them is 1.199"


def test_a_bias_is_taken_out_and_the_spread_is_told() -> None:
    found = correction_of(pairs(1.10, 1.09, 1.11, 1.10, 1.12, 1.08))
    assert found is not None
    assert found.factor == pytest.approx(1.10, rel=1e-3)
    assert math.log(1.12 / 1.10) < found.within < 0.05


def test_what_chance_can_do_corrects_nothing() -> None:
    found = correction_of(pairs(1.2, 0.9, 1.1, 0.95, 1.05))
    assert found is not None
    assert found.factor == 1.0
    assert found.within > math.log(1.2)


def test_what_is_right_already_stays_right() -> None:
    """Traces on a CPU: most to the byte, a few off by a ten-thousandth, upwards."""
    ratios = [1.0] * 12 + [1.00004, 1.0002, 1.00085]
    found = correction_of(pairs(*ratios))
    assert found is not None
    assert found.factor == 1.0
    assert math.log(1.00085) * 0.999 < found.within < 0.001


def test_the_interval_holds_one_more_run_as_often_as_it_says() -> None:
    rng = random.Random(3)
    inside = 0
    for _ in range(2000):
        drawn = [math.exp(rng.gauss(0.05, 0.03)) for _ in range(9)]
        found = correction_of(pairs(*drawn[:8]))
        assert found is not None
        inside += abs(math.log(drawn[8] / found.factor)) <= found.within
    assert inside / 2000 >= 0.945


def test_the_low_end_stays_whatever_was_measured() -> None:
    found = Range(90, 100, 200)
    assert corrected(found, Correction(9, 1.5, 0.1)) == Range(90, 150, 166)
    assert corrected(found, Correction(9, 0.5, 0.1)) == Range(90, 90, 100)
    assert corrected(found, Correction(9, 1.0, 2.0)).high > 700, "never narrower than the spread"


def test_a_forecasts_own_numbers_stay_beside_the_corrected_ones() -> None:
    found = forecast(plan_of(*SYNTHETIC))
    better = calibrate(found, pairs(*[1.1] * 6), "torch 2")
    assert replace(better, calibrated=None) == found
    assert better.calibrated is not None
    assert better.calibrated.peak is not None
    assert better.best == better.calibrated.peak
    assert better.best.expected == pytest.approx(1.1 * found.peak.expected, rel=1e-6)
    assert better.best.low == found.peak.low
    assert better.best.high < found.peak.high
    few = calibrate(found, pairs(1.1, 1.1), "torch 2")
    assert few.calibrated is not None
    assert (few.calibrated.num_runs, few.calibrated.needed) == (2, NEEDED)
    assert few.best == found.peak
    assert found.method is Method.closed_form
