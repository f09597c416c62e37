"""Decisions after each round of `sweep.repeats=auto`: which configurations need more repeats.

Several looks at 5 % claim too much: 4 to 10 % of sweeps with a false claim from 2 % noise on. All
looks of a sweep have one level, smaller for more looks (Pocock 1977,
https://doi.org/10.1093/biomet/64.2.191). A decision stays, and its configuration leaves Holm's
count (Maurer & Bretz 2013). benchmarks/report_power_auto.py measures errors, power and repeats.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from eke.results.report.compare.statistics import (
    MIN_REPEATS,
    Compared,
    Difference,
    K,
    Sample,
    holm_levels,
    ratio_of,
)

_LEVELS = {
    3: 0.05, 4: 0.033, 5: 0.027, 6: 0.022, 8: 0.017, 10: 0.015, 15: 0.011, 20: 0.009, 30: 0.0075,
    50: 0.006, 100: 0.0045,
}  # fmt: skip
"""Most repeats -> level of each look after 3, 4, ... rounds, 5 % together, with normal noise
(200,000 random walks)."""

FUTILE_FROM, FUTILE = 4, 2.0
"""Repeats from which a forecast counts, and the multiple of `sweep.max_repeats` above which a row
stops. Chosen by simulation: at 5 % noise 85 instead of 95 % of differences of 10 % are found, with
4.8 instead of 8.3 repeats."""


class State(Enum):
    """State of one configuration."""

    higher = "higher"
    lower = "lower"
    same = "same"  # the difference is shown to be smaller than `sweep.resolve`
    futile = "futile"  # needs more than twice `sweep.max_repeats`
    failed = "failed"
    open = "open"

    @property
    def is_decided(self) -> bool:
        """True if it is an answer, which further looks do not change."""
        return self in (State.higher, State.lower, State.same)


@dataclass(frozen=True)
class StoppingRule:
    """Rule of a sweep: the keys `sweep.max_repeats` and `sweep.resolve`."""

    max_repeats: int = 10
    resolve: float = 0.05

    @property
    def level(self) -> float:
        """Level of each look: the level of the next larger number in LEVELS."""
        return next((v for n, v in _LEVELS.items() if n >= self.max_repeats), min(_LEVELS.values()))


@dataclass(frozen=True)
class RowDecision:
    """State of one configuration after a look, with the ratio and interval of this look."""

    state: State = State.open
    repeats: int = 0
    """Repeats in pairs with the baseline's."""
    value: float | None = None
    """Ratio to the baseline, or None with too few repeats."""
    low: float | None = None
    high: float | None = None
    level: float | None = None
    """Level of Holm's test, and of the interval."""
    forecast: int | None = None
    """Total repeats that would decide an open configuration."""
    name: str = ""
    baseline: tuple[str, ...] = ()
    """Configuration with which it is compared."""
    stopped: int | None = None
    """Rounds after which it stopped, or None while it continues."""

    def plain(self, key: tuple[str, ...]) -> dict[str, Any]:
        """Return the entry of sweep.json, with the overrides of its configuration."""
        return {"overrides": key, **vars(self), "state": self.state.name}


def decision_of(plain: Mapping[str, Any]) -> tuple[tuple[str, ...], RowDecision]:
    """Return an entry of sweep.json. Raise KeyError or TypeError if it is none."""
    known: dict[str, Any] = {name: plain[name] for name in RowDecision.__dataclass_fields__}
    known |= {"state": State[plain["state"]], "baseline": tuple(plain["baseline"])}
    return tuple(plain["overrides"]), RowDecision(**known)


def decide(
    samples: Mapping[K, Sample], baseline: K, rule: StoppingRule, known: Mapping[K, RowDecision]
) -> dict[K, RowDecision]:
    """Return the state of every configuration of a family but the baseline, after one look.

    `samples` are configuration -> repeat or seed -> speed or loss. `known` are failures and
    decisions of earlier looks, which stay.
    """
    if any(value <= 0 for sample in samples.values() for value in sample.values()):
        undecided = RowDecision(State.futile)  # a loss that has no ratios
        return {key: known.get(key, undecided) for key in samples if key != baseline}
    compared, margin = Compared(samples), math.log1p(rule.resolve)
    pairs = {key: compared.difference((baseline, key)) for key in samples if key != baseline}
    found = {key: each for key, each in pairs.items() if each}
    stopped = {key for key, each in known.items() if each.state is not State.open}
    resolved = {key for key in stopped if known[key].state in (State.higher, State.lower)}
    # A configuration that stopped as the same still counts, and is not tested again.
    tested = {
        key: replace(each, mean=0.0) if key in stopped else each
        for key, each in found.items() if key not in resolved
    }  # fmt: skip
    levels = holm_levels(tested, rule.level)
    decided = {
        key: _decide(found[key], levels[key], margin, rule, len(found))
        for key in found.keys() - stopped
    }
    return {key: known.get(key, RowDecision()) for key in pairs} | decided


def _decide(
    each: Difference, level: float, margin: float, rule: StoppingRule, number: int
) -> RowDecision:
    """Decide one of `number` configurations, which Holm's method tests at this level."""
    ratio, p_same = ratio_of(each, level), each.p_same(margin)
    if each.p is None or p_same is None or each.n < MIN_REPEATS:
        return RowDecision(State.open, each.n, ratio.value)
    at = RowDecision(State.open, each.n, ratio.value, ratio.low, ratio.high, level)
    if each.p <= level and each.mean:
        return replace(at, state=State.higher if each.mean > 0 else State.lower)
    if p_same <= rule.level / number:
        return replace(at, state=State.same)
    needed = each.repeats_needed(level, margin)
    if needed is None or not math.isfinite(needed):
        return at
    is_futile = each.n >= FUTILE_FROM and needed > FUTILE * rule.max_repeats
    state = State.futile if is_futile else State.open
    return replace(at, state=state, forecast=max(each.n + 1, math.ceil(needed)))
