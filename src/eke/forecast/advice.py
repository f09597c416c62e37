"""What would make a run fit: each proposal checked by the rules and by its own forecast."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from eke.check import Facts, check
from eke.errors import ConfigError
from eke.forecast.predict import forecast
from eke.forecast.savers import SAVERS, Change, Saver
from eke.forecast.values import Forecast, Verdict
from eke.plan import Plan, replan

UNKNOWN_SLOWDOWN = 2.0
"""Rank of a change whose cost depends on the machine: behind all that are known."""


@dataclass(frozen=True)
class Advice:
    """One set of overrides that makes room."""

    overrides: tuple[str, ...]
    forecast: Forecast
    """With them."""
    slowdown: float | None
    """Time of a step over what it is now; None where it is not known."""
    reasons: tuple[str, ...]
    """Where the slowdown of each change is known from."""
    keeps: bool
    """The training computes the same, but for rounding."""

    @property
    def rank(self) -> tuple[bool, float, int]:
        """What fits with room to spare first, then what costs least, then what is short."""
        slowdown = UNKNOWN_SLOWDOWN if self.slowdown is None else self.slowdown
        tight = self.forecast.verdict is not Verdict.fits
        return tight, slowdown, len(self.overrides)


def advise(plan: Plan, count: int = 5) -> list[Advice]:
    """Overrides with which the plan's expected peak has room, the cheapest first.

    Single changes, and pairs of changes of which neither is enough alone.

    Args:
        plan: what does not fit, or only just.
        count: proposals at most.
    """
    tried = [_first_with_room(plan, saver) for saver in SAVERS]
    singles = [found for found in tried if isinstance(found, Advice)]
    if len(singles) < count:
        too_little = [s for s, found in zip(SAVERS, tried, strict=True) if found is None]
        singles += _pairs(plan, too_little)
    return sorted(singles, key=lambda advice: advice.rank)[:count]


def first_advice(plan: Plan) -> Advice | None:
    """The mildest single change with room, else the best pair: quick, for many plans."""
    for saver in SAVERS:
        found = _first_with_room(plan, saver)
        if found is not None:
            return found
    pairs = _pairs(plan, SAVERS)
    return min(pairs, key=lambda advice: advice.rank, default=None)


def _first_with_room(plan: Plan, saver: Saver) -> Advice | None:
    """The mildest change of one saver that is enough by itself."""
    return _mildest(_tried(plan, (change,)) for change in saver(plan))


def _mildest(tried: Iterable[Advice | None]) -> Advice | None:
    """The first that fits with room to spare; where none does, the first that is tight."""
    tight = None
    for advice in tried:
        if advice is not None and advice.forecast.verdict is Verdict.fits:
            return advice
        tight = tight or advice
    return tight


def _pairs(plan: Plan, savers: Sequence[Saver]) -> list[Advice]:
    """Of any two savers the first changes that are enough together."""
    found = []
    for one, other in combinations(savers, 2):
        advice = _mildest(_each_pair(plan, one, other))
        if advice is not None:
            found.append(advice)
    return found


def _each_pair(plan: Plan, one: Saver, other: Saver) -> Iterator[Advice | None]:
    for first in one(plan):
        changed = _replanned(plan, first)
        if changed is not None:
            yield from (_tried(plan, (first, second)) for second in other(changed))


def _replanned(plan: Plan, change: Change) -> Plan | None:
    """The plan with a change; None where a rule refuses it."""
    refused, _ = check(Facts(change.config, plan.device, planning=True))
    if refused:
        return None
    try:
        return replan(plan, change.config)
    except ConfigError:
        return None


def _tried(plan: Plan, changes: tuple[Change, ...]) -> Advice | None:
    """Advice where the last of the changes, which holds them all, has room."""
    changed = _replanned(plan, changes[-1])
    if changed is None:
        return None
    found = forecast(changed)
    if found.verdict not in (Verdict.fits, Verdict.tight):
        return None
    known = [change.slowdown for change in changes if change.slowdown is not None]
    slowdown = prod(known) if len(known) == len(changes) else None
    return Advice(
        overrides=tuple(text for change in changes for text in change.overrides),
        forecast=found,
        slowdown=slowdown,
        reasons=tuple(change.reason for change in changes),
        keeps=all(change.keeps for change in changes),
    )
