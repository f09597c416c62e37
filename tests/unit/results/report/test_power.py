"""How often equal things are called different, and how often a planted difference is found.

Simulated sweeps: rounds of repeats on a machine that drifts by several per cent while they last.
The shares are those of seeded random numbers; docs/how-to/report.md quotes them.
"""

import numpy as np
import pytest

from eke.results.report.compare.statistics import Compared, Significance, correct, ratio_of

TRIALS = 1000
NOISE = 0.02
"""Standard deviation of a run's logarithm: as of steady steps on a quiet machine."""
DRIFT = 0.10
"""Over a whole sweep: a laptop that warms up."""

CLAIMS = (Significance.higher, Significance.lower)


def sweeps(effects, rounds, seed, trials=TRIALS, heavy=False):
    """Simulated samples of a baseline and others, one of each configuration per round."""
    random = np.random.default_rng(seed)
    for _ in range(trials):
        count = len(effects) + 1
        drift = np.linspace(0, DRIFT * random.normal(), rounds * count).reshape(rounds, count)
        drift[1::2] = drift[1::2, ::-1]  # every other round is the other way round
        noise = random.standard_t(3, (rounds, count)) if heavy else random.normal(size=drift.shape)
        values = np.exp(drift + NOISE * noise + np.log([1.0, *effects]))
        yield [dict(enumerate(values[:, n])) for n in range(count)]


def differences(base, others):
    compared = Compared({"base": base, **dict(enumerate(others))})
    return {n: compared.difference(("base", n)) for n in range(len(others))}


def share_of_claims(effects, rounds, seed, **kind):
    """Of the trials, those with a claim about any of the others."""
    claimed = 0
    for base, *others in sweeps(effects, rounds, seed, **kind):
        found = correct(differences(base, others))
        claimed += any(each.decision in CLAIMS for each in found.values())
    return claimed / TRIALS


@pytest.mark.parametrize("rounds", [3, 8])
def test_the_same_configuration_twice_is_no_difference(rounds):
    assert share_of_claims([1.0], rounds, seed=1) <= 0.065  # 0.05 and two standard errors of TRIALS


def test_nor_are_twelve_of_them():
    assert share_of_claims([1.0] * 11, 3, seed=3) <= 0.065


def test_nor_with_outliers():
    assert share_of_claims([1.0], 5, seed=4, heavy=True) <= 0.065


@pytest.mark.parametrize(
    ("effect", "rounds", "power"),
    [(1.20, 3, 0.90), (1.10, 4, 0.90), (1.05, 6, 0.80), (1.05, 8, 0.90)],
)
def test_a_planted_difference_is_found(effect, rounds, power):
    assert share_of_claims([effect], rounds, seed=5) >= power


def test_intervals_hold_the_truth():
    held = 0
    for base, other in sweeps([1.1], 4, seed=6):
        found = ratio_of(differences(base, [other])[0])
        # In a round the drift moves on from the baseline to the other by a part of it.
        held += found.low <= 1.1 * np.exp(0.01) and found.high >= 1.1 * np.exp(-0.01)
    assert held / TRIALS >= 0.94


def test_without_rounds_drift_would_be_taken_for_a_difference():
    """Why sweeps measure in rounds: all repeats of one configuration after the other's."""
    random = np.random.default_rng(7)
    wrong = 0
    for _ in range(TRIALS):
        drift = np.linspace(0, DRIFT * random.normal(), 10)
        values = np.exp(drift + NOISE * random.normal(size=10))
        base, other = (dict(enumerate(part)) for part in (values[:5], values[5:]))
        wrong += ratio_of(differences(base, [other])[0]).decision in CLAIMS
    assert wrong / TRIALS > 0.3
