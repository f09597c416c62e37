"""What `sweep.repeats=auto` claims, finds and costs in simulated sweeps, and what outliers hide.

Rows of benchmarks/report_power.py: `python benchmarks/report_power.py --only auto_alike auto_found
outliers_found auto_forecasts`. Twelve configurations, at most ten repeats, every other round
reversed. Mixed effects: three equal the baseline, the others differ by +-3, +-5, +-10, +20 and +30
%. All is decided by eke's own functions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from report_power_lines import Array, Line, Random, percent

from eke.results.report.compare.statistics import ALPHA, Compared, correct, find_outliers
from eke.results.report.compare.until_decided import RowDecision, State, StoppingRule, decide

CONFIGURATIONS, MOST, FIRST = 12, 10, 3
MIXED = np.log([1, 1, 1, 1, 1.03, 0.97, 1.05, 0.95, 1.1, 0.9, 1.2, 1.3])
NULL = 0 * MIXED
TEN = math.log(1.09)
"""Differences above it count as 10 % and more."""

Seen = dict[int, dict[int, float]]
"""Configuration -> repeat -> speed; 0 is the baseline."""


def world(
    random: Random, effects: Array, noise: float, kind: str, most: int = MOST
) -> tuple[Array, Array]:
    """True and measured logarithms of one sweep, (configurations) and (repeats, configurations)."""
    deviations = np.full(CONFIGURATIONS, noise)
    if kind == "unequal":
        deviations = deviations * np.exp(0.5 * random.normal(size=CONFIGURATIONS))
    truth = np.concatenate([[0.0], random.permutation(effects[1:])])
    logs = truth + deviations * random.normal(size=(most, CONFIGURATIONS))
    if kind == "drift 15 %":  # over 36 runs, linear
        for repeat in range(most):
            places = np.arange(CONFIGURATIONS)
            order = places if repeat % 2 == 0 else places[::-1]
            logs[repeat] -= 0.15 / 36 * (repeat * CONFIGURATIONS + order)
    if kind == "outliers 4 %":
        slow = np.log(1 - random.choice([0.3, 0.5, 0.7], size=logs.shape))
        logs += np.where(random.random(logs.shape) < 0.04, slow, 0.0)
    return truth, logs


def tested(seen: Seen) -> Seen:
    """The speeds that are tested: without excluded runs."""
    out = find_outliers(seen)
    return {k: {r: v for r, v in row.items() if out.get(k) != r} for k, row in seen.items()}


def until_decided(logs: Array, rule: StoppingRule) -> tuple[list[dict[int, RowDecision]], Seen]:
    """Decisions after each look, and the speeds that were measured."""
    seen: Seen = {key: {} for key in range(CONFIGURATIONS)}
    known: dict[int, RowDecision] = {}
    looks = []
    for repeat in range(rule.max_repeats):
        others = range(1, CONFIGURATIONS)
        due = [k for k in others if k not in known or known[k].state is State.open]
        if not due:
            break
        for key in (0, *due):
            seen[key][repeat] = math.exp(logs[repeat, key])
        if repeat + 1 >= FIRST:
            known = decide(tested(seen), 0, rule, known)
            looks.append(known)
    return looks, seen


def by_looks(looks: list[dict[int, RowDecision]]) -> Array:
    """Direction of each configuration but the baseline: -1, 0 or 1."""
    sign = {State.higher: 1, State.lower: -1}
    return np.array([sign.get(looks[-1][k].state, 0) for k in range(1, CONFIGURATIONS)])


def by_report(seen: Seen, level: float) -> Array:
    """The same by the report's test at this level."""
    compared, sign = Compared(seen), {"higher": 1, "lower": -1}
    found = {k: compared.difference((0, k)) for k in range(1, CONFIGURATIONS)}
    ratios = correct({k: each for k, each in found.items() if each}, level)
    return np.array([sign.get(each.decision.name, 0) for each in ratios.values()])


@dataclass
class Tally:
    """Counts over sweeps."""

    sweeps: int = 0
    false: int = 0
    large: int = 0
    found: int = 0
    runs: int = 0
    found_by_ten: int = 0

    def add(self, truth: Array, logs: Array, with_fixed: bool = False) -> None:
        """One sweep; `with_fixed`: also all ten repeats, tested at once."""
        looks, seen = until_decided(logs, StoppingRule(MOST))
        last, true = by_looks(looks), np.sign(truth[1:])
        is_large = np.abs(truth[1:]) > TEN
        self.sweeps += 1
        self.false += bool(((last != 0) & (last != true)).any())
        self.large += int(is_large.sum())
        self.found += int((last == true)[is_large].sum())
        self.runs += sum(map(len, seen.values()))
        if with_fixed:
            whole = {k: dict(enumerate(np.exp(logs[:, k]))) for k in range(CONFIGURATIONS)}
            right = by_report(tested(whole), ALPHA) == true
            self.found_by_ten += int(right[is_large].sum())

    @property
    def repeats(self) -> float:
        """Mean repeats of a configuration."""
        return self.runs / self.sweeps / CONFIGURATIONS


def tally(sweeps: int, random: Random, effects: Array, noise: float, kind: str) -> Tally:
    """Count what happens in one kind of sweep."""
    found = Tally()
    for _ in range(sweeps):
        found.add(*world(random, effects, noise, kind), with_fixed=kind == "outliers 4 %")
    return found


def auto_alike(sweeps: int, random: Random) -> Iterator[Line]:
    """Nothing differs."""
    what = "`sweep.repeats=auto`, nothing differs: false *faster* or *slower*"
    kinds = [("equal", noise) for noise in (0.01, 0.02, 0.05)]
    kinds += [(kind, 0.02) for kind in ("unequal", "drift 15 %", "outliers 4 %")]
    for kind, noise in kinds:
        found = tally(sweeps, random, NULL, noise, kind)
        setting = f"{kind}, {noise:.0%}, {found.repeats:.1f} repeats"
        yield Line("auto_alike", what, setting, percent(found.false, found.sweeps), 5.0)


def auto_found(sweeps: int, random: Random) -> Iterator[Line]:
    """Mixed effects: found differences of 10 % and more, and the mean repeats."""
    bounds = {0.01: (99.0, 3.7), 0.02: (99.0, 5.5), 0.05: (80.0, 5.5)}
    for noise, (least, most) in bounds.items():
        found, name = tally(sweeps, random, MIXED, noise, "equal"), f"noise {noise:.0%}"
        what = f"`auto`, {name}: differences of 10 % and more found"
        value = percent(found.found, found.large)
        yield Line("auto_found", what, name, value, least, is_least=True)
        what = f"`auto`, {name}: mean repeats, at most 10"
        yield Line("auto_found", what, name, found.repeats, most, unit="")


def outliers_found(sweeps: int, random: Random) -> Iterator[Line]:
    """4 % of runs are 30 to 70 % slow."""
    found = tally(sweeps, random, MIXED, 0.02, "outliers 4 %")
    for name, number, least in (
        ("ten repeats", found.found_by_ten, 88.0), ("`auto`", found.found, 95.0),
    ):  # fmt: skip
        what = f"4 % of runs 30 to 70 % slow, {name}: differences of 10 % and more found"
        value = percent(number, found.large)
        yield Line("outliers_found", what, "noise 2 %", value, least, is_least=True)


def auto_forecasts(sweeps: int, random: Random) -> Iterator[Line]:
    """Open configurations whose forecast is at most 16 repeats, after four."""
    rule, number, kept = StoppingRule(24), 0, 0
    for _ in range(sweeps):
        _, logs = world(random, MIXED, 0.02, "equal", rule.max_repeats)
        looks, _ = until_decided(logs, rule)
        for key, first in looks[1].items():
            if first.state is State.open and first.forecast and first.forecast <= 16:
                by = looks[min(first.forecast - FIRST, len(looks) - 1)]
                number, kept = number + 1, kept + by[key].state.is_decided
    what = "`auto`: decided by the forecast of repeats"
    value = percent(kept, number)
    yield Line("auto_forecasts", what, "forecasts up to 16", value, 70.0, is_least=True)
