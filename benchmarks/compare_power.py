"""Alarms of `eke compare` in simulated pairs of sides, for benchmarks/report_power.py.

`alarm` is the share of comparisons that end with exit code 1. Noise is the standard deviation of
one run's logarithm; `shared` that of what all rows of a round of one side share.
"""

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
    effect = np.where(np.arange(rows) < rows_slower, np.log(1 - slower), 0.0)
    found = 0
    for _ in range(sweeps):
        a, b = (
            np.exp(
                noise * random.normal(size=(rows, repeats))
                + shared * random.normal(size=repeats)
                + side * effect[:, None]
            )
            for side in (0, 1)
        )
        tested = correct(differences(a.tolist(), b.tolist()))
        found += any(is_slowdown(each, tolerance) for each in tested.values())
    return found / sweeps


def measure_compare(sweeps: int = 2000) -> dict[str, dict[str, float]]:
    """Repeats -> alarms of equal sides, and of one row 10 and 5 % slower; 12 rows as well."""
    return {
        str(repeats): {
            "equal": alarms(repeats, 0.0, sweeps=sweeps),
            "10 % slower": alarms(repeats, 0.1, sweeps=sweeps),
            "5 % slower": alarms(repeats, 0.05, sweeps=sweeps),
            "12 rows, equal": alarms(repeats, 0.0, 12, 0, sweeps=sweeps // 4),
            "12 rows, equal, rounds differ by 2 %": alarms(
                repeats, 0.0, 12, 0, shared=NOISE, sweeps=sweeps // 4
            ),
            "12 rows, one 10 % slower": alarms(repeats, 0.1, 12, 1, sweeps=sweeps // 4),
        }
        for repeats in (3, 5)
    }
