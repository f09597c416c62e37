"""Noise of all rows of a machine together; benchmarks/report_power.py has the full simulation."""

import math

import numpy as np
import pytest

from eke.results.report.compare.statistics import (
    Compared,
    Noise,
    Significance,
    ratio_of,
)

TRIALS = 400
ALLOWED = 0.05 + 2 * math.sqrt(0.05 * 0.95 / TRIALS)


def sweeps(effects, sigma, trials=TRIALS, seed=1):
    """Logarithms of three repeats, which share a part of the noise."""
    random = np.random.default_rng(seed)
    shape = (trials, 3, len(effects))
    return effects + 0.05 * random.normal(size=(trials, 3, 1)) + sigma * random.normal(size=shape)


def shares(effects, sigma):
    """Of sweeps: with a false claim (Bonferroni's); of differences: found; the noise itself."""
    effects = np.array(effects)
    logs = sweeps(effects, sigma)
    noise, found = Noise(logs), []
    for n in range(1, len(effects)):
        distance = (logs[..., n] - logs[..., 0]).mean(1)
        found.append(noise.error([0, n], 3).beyond(distance))
    claimed = np.stack(found, 1) < 0.05 / (len(effects) - 1)
    differs = effects[1:] != 0
    return claimed[:, ~differs].any(1).mean(), claimed[:, differs | ~differs.any()].mean(), noise


@pytest.mark.parametrize("rows", [4, 12])
def test_three_repeats_detect_ten_percent(rows):
    effects = [0.0, *([math.log(1.1), 0.0, math.log(0.9), 0.0] * 8)][:rows]
    false, found, _ = shares(effects, 0.02)
    assert found >= 0.78  # by Bonferroni; Holm finds more
    assert false <= ALLOWED


@pytest.mark.parametrize(("rows", "pooled"), [(4, 0.34), (12, 0.66)])
def test_noisy_row_hides_no_more_than_pooled_noise(rows, pooled):
    effects = [0.0, *([math.log(1.1), 0.0, math.log(0.9), 0.0] * 8)][:rows]
    effects[-1] = 0.0
    false, found, noise = shares(effects, np.array([0.02] * (rows - 1) + [0.1]))
    assert found >= pooled  # of Bonferroni's correction, too
    assert false <= ALLOWED
    assert noise.is_noisy(rows - 1).mean() >= 0.45
    assert np.stack([noise.is_noisy(n) for n in range(rows - 1)]).any(0).mean() <= ALLOWED


@pytest.mark.slow
def test_unequal_noise_adds_no_false_claims():
    for rows in (4, 30):
        sigma = 0.02 * np.exp(0.5 * np.random.default_rng(3).normal(size=(TRIALS, 1, rows)))
        assert shares([0.0] * rows, sigma)[0] <= ALLOWED


def compared(logs):
    return Compared(
        {n: dict(enumerate(np.exp(column).tolist())) for n, column in enumerate(logs.T)}
    )


def ratio(each, *pairs):
    """Of a comparison by itself."""
    return ratio_of(each.difference(*pairs))


def test_shared_drift_is_not_noise():
    logs = sweeps(np.zeros(6), 0.02, trials=1)[0]
    plain, moved = compared(logs), compared(logs + np.array([[0.0], [0.4], [0.8]]))
    for n in range(1, 6):
        one, other = ratio(plain, (0, n)), ratio(moved, (0, n))
        assert (one.low, one.p) == pytest.approx((other.low, other.p))


def test_interval_excludes_one_at_its_level():
    logs = sweeps(np.array([0.0, 0.01, 0.03, 0.04, 0.06, 0.1]), 0.02, trials=20)
    for each in map(compared, logs):
        for n in range(1, 6):
            found = ratio(each, (0, n))
            assert (found.low > 1 or found.high < 1) == (found.p < 0.05)
            back = ratio(each, (n, 0))
            assert (back.low, back.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_two_pairs_have_half_the_variance_of_one():
    """With the same noise everywhere, by Student's t of many degrees of freedom."""
    logs = sweeps(np.zeros(40), 0.02, trials=1, seed=7)[0]
    each = compared(logs)
    one, two = ratio(each, (0, 1)), ratio(each, (0, 1), (2, 3))
    assert two.value == pytest.approx(math.sqrt(one.value * ratio(each, (2, 3)).value))
    widths = [math.log(found.high / found.low) for found in (one, two)]
    assert widths[0] / widths[1] == pytest.approx(math.sqrt(2), rel=0.1)
    assert widths[0] == pytest.approx(2 * 1.99 * 0.02 * math.sqrt(2 / 3), rel=0.25)


def alone(base, other):
    return ratio(Compared({0: base, 1: other}), (0, 1))


def test_few_or_noiseless_rows_are_compared_without_pooling():
    three = [dict(enumerate(c)) for c in np.exp(sweeps(np.zeros(3), 0.02, 1)[0]).T.tolist()]
    exact = [dict.fromkeys(range(3), 100.0 + n) for n in range(6)]
    for samples in (three, exact):
        each = Compared(dict(enumerate(samples)))
        for n in range(1, len(samples)):
            assert ratio(each, (0, n)) == alone(samples[0], samples[n])


def test_missing_and_unshared_repeats_have_a_ratio():
    columns = np.exp(sweeps(np.zeros(7), 0.02, 1)[0]).T.tolist()
    samples = dict(enumerate(dict(enumerate(column)) for column in columns))
    del samples[1][0]
    samples[2] = {n + 10: value for n, value in samples[2].items()}
    each = Compared(samples)
    assert ratio(each, (0, 1)) == alone(samples[0], samples[1])
    by_hand = math.prod(samples[1][n] / samples[0][n] for n in (1, 2)) ** 0.5
    assert ratio(each, (0, 1)).value == pytest.approx(by_hand)
    assert ratio(each, (0, 2)) == alone(samples[0], samples[2])
    assert ratio(each, (0, 3)).low is not None


def test_shared_repeats_are_paired_if_one_side_has_few():
    """A sweep that was stopped: the machine drifted, the configurations are the same."""
    found = alone({0: 100.0, 1: 500.0, 2: 600.0}, {0: 100.0, 1: 500.0})
    assert (found.value, found.n, found.decision) == (pytest.approx(1.0), 2, Significance.single)
