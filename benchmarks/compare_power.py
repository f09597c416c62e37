"""Alarms of `eke compare` in simulated pairs of sides, for benchmarks/report_power.py.

An alarm is exit code 1. Noise is the standard deviation of one run's logarithm; `shared` that of a
round of one side, in all of its rows.
"""

import math

import numpy as np

from eke.results.report.compare.statistics import correct
from eke.results.report.compare.two import TURNS, differences, is_slowdown

NOISE = 0.02


def alarms(
    repeats: int,
    slower: float,
    rows: int = 1,
    rows_slower: int = 1,
    noise: float = NOISE,
    shared: float = 0.0,
    tolerance: float = TURNS,
    sweeps: int = 2000,
    seed: int = 47,
) -> float:
    """Share of comparisons with an alarm, where the first rows of B run at 1 - `slower`."""
    random = np.random.default_rng([seed, repeats, rows])
    effect = np.where(np.arange(rows) < rows_slower, math.log(1 - slower), 0.0)[:, None]
    found = 0
    for _ in range(sweeps):
        logs = noise * random.normal(size=(2, rows, repeats))
        a, b = np.exp(logs + shared * random.normal(size=(2, 1, repeats)) + [0 * effect, effect])
        tested = correct(differences(a.tolist(), b.tolist()))
        found += any(is_slowdown(each, tolerance) for each in tested.values())
    return found / sweeps
