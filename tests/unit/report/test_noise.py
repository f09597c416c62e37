"""Variances moderated over a machine's rows; benchmarks/report_power.py has the full simulation."""

import math

import numpy as np
import pytest

from eke.report.compare.noise import compare, scatters
from eke.report.compare.statistics import Decision, correct, ratio

CLAIMS = (Decision.higher, Decision.lower)


def sweep(random, effects, sigma, rounds=3):
    """One sample of each row; the rows of a round share its part of the noise."""
    shared = 0.05 * random.normal(size=(rounds, 1))
    values = np.exp(np.array(effects) + shared + sigma * random.normal(size=(rounds, len(effects))))
    return [dict(enumerate(column)) for column in values.T.tolist()]


def shares(effects, sigma, trials=300, seed=1):
    """Of sweeps: with a false claim, and the last row named noisy; of differences: found."""
    random, false, found, named = np.random.default_rng(seed), 0, 0, 0
    for _ in range(trials):
        base, *others = sweep(random, effects, sigma)
        ratios, noisy = compare(base, others)
        decided = correct(dict(enumerate(ratios)))
        claims = [decided[n].decision in CLAIMS for n in range(len(others))]
        false += any(c and not e for c, e in zip(claims, effects[1:], strict=True))
        found += sum(c and e != 0 for c, e in zip(claims, effects[1:], strict=True))
        named += noisy[-1]
    planted = sum(e != 0 for e in effects) or 1
    return false / trials, found / planted / trials, named / trials


@pytest.mark.parametrize("rows", [4, 12])
def test_three_repeats_find_ten_per_cent_among_many(rows):
    effects = [0.0, *([math.log(1.1), 0.0, math.log(0.9), 0.0] * 8)][:rows]
    false, found, _ = shares(effects, 0.02)
    assert found >= 0.90
    assert false <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 300)


def test_a_noisy_row_is_named_and_the_others_are_not():
    sigma = np.array([0.02] * 11 + [0.1])
    assert shares([0.0] * 12, sigma)[2] >= 0.5
    assert shares([0.0] * 12, 0.02)[2] <= 0.03


def test_a_shared_drift_between_repeats_is_no_noise():
    random = np.random.default_rng(3)  # one row is noisy by chance
    rows = sweep(random, [0.0] * 6, 0.02)
    drifted = [{n: v * 1.5**n for n, v in row.items()} for row in rows]
    for plain, moved in zip(scatters(rows), scatters(drifted), strict=True):
        assert moved.variance == pytest.approx(plain.variance)
        assert moved.freedom == pytest.approx(plain.freedom)


def test_few_rows_and_rows_without_noise_are_compared_by_themselves():
    random = np.random.default_rng(4)
    base, *others = sweep(random, [0.0] * 3, 0.02)
    assert compare(base, others)[0] == [ratio(base, other) for other in others]
    exact = [dict.fromkeys(range(3), 100.0 + n) for n in range(6)]
    found = compare(exact[0], exact[1:])[0]
    assert [each.decision for each in found] == [ratio(exact[0], e).decision for e in exact[1:]]


def test_missing_repeats_and_rows_of_other_repeats_have_their_ratio():
    random = np.random.default_rng(5)
    base, *others = sweep(random, [0.0] * 6, 0.02)
    del others[0][0]
    others[1] = {n + 10: value for n, value in others[1].items()}
    found = compare(base, others)[0]
    assert found[0] == ratio(base, others[0])
    assert found[0].value == pytest.approx(math.prod(others[0][n] / base[n] for n in (1, 2)) ** 0.5)
    assert all(each is not None for each in found)


def test_shared_repeats_are_compared_where_one_side_has_few():
    """A sweep that was stopped: the machine drifted, the configurations are the same."""
    found = ratio({0: 100.0, 1: 500.0, 2: 600.0}, {0: 100.0, 1: 500.0})
    assert (found.value, found.n, found.decision) == (pytest.approx(1.0), 2, Decision.single)
