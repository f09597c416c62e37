"""Alarms of `eke compare` in simulated pairs of sides: a row of benchmarks/report_power.py.

An alarm is exit code 1. Noise is the standard deviation of one run's logarithm, 2 %; where rounds
differ, all rows of a round of one side share as much again.
"""

import math
from collections.abc import Iterator

import numpy as np
from report_power_lines import Line, Random, percent

from eke.results.report.compare.statistics import correct
from eke.results.report.compare.two import TURNS, differences, is_slowdown

NOISE, MANY = 0.02, 12


def alarms(
    random: Random, sweeps: int, repeats: int, slower: float, rows: int = 1, shared: float = 0.0
) -> float:
    """Comparisons with an alarm, in per cent; the first row of B runs at 1 - `slower`."""
    effect = np.where(np.arange(rows) == 0, math.log(1 - slower), 0.0)[:, None]
    found = 0
    for _ in range(sweeps):
        noise = NOISE * random.normal(size=(2, rows, repeats))
        a, b = np.exp(noise + shared * random.normal(size=(2, 1, repeats)) + [0 * effect, effect])
        tested = correct(differences(a.tolist(), b.tolist()))
        found += any(is_slowdown(each, TURNS) for each in tested.values())
    return percent(found, sweeps)


def compare_alarms(sweeps: int, random: Random) -> Iterator[Line]:
    """Equal sides, and one row that is 10 or 5 % slower; twelve rows in a fourth of the sweeps."""
    few = max(1, sweeps // 4)
    for repeats, least in ((3, 60.0), (5, 90.0)):
        cases = [
            ("alarm, equal", 2.0, False, sweeps, 0.0, 1, 0.0),
            ("10 % slower, found", 99.0, True, sweeps, 0.1, 1, 0.0),
            ("5 % slower, found", least, True, sweeps, 0.05, 1, 0.0),
            ("alarm, 12 equal rows", 2.5, False, few, 0.0, MANY, 0.0),
            ("alarm, 12 equal rows, rounds differ by 2 %", 2.5, False, few, 0.0, MANY, NOISE),
            ("one of 12 rows 10 % slower, found", 90.0, True, few, 0.1, MANY, 0.0),
        ]
        for what, bound, is_least, number, slower, rows, shared in cases:
            value = alarms(random, number, repeats, slower, rows, shared)
            text = f"compare, tolerance 3 %, one occasion: {what}"
            yield Line("compare_alarms", text, f"{repeats} repeats", value, bound, is_least)
