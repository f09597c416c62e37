"""What a report's first sentences claim, as values: `verdict` words them, tests check them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from eke.results.report.compare.comparison import Comparison, OneMachine, Row
from eke.results.report.compare.measures import PEAK, SAMPLES, Measure
from eke.results.report.compare.parity import Parity, is_another_training
from eke.results.report.compare.quiet import SPREAD, spread
from eke.results.report.compare.statistics import LEVEL, Decision, Ratio


class Kind(Enum):
    """What is said of a claim's rows."""

    nothing = "nothing has ended well yet"
    none_well = "no run ended well"
    only_one = "one configuration ended well"
    no_baseline = "nothing to compare with"
    no_speed = "no speed was measured"
    unquiet = "the baseline's repeats spread"
    few = "best value, of too few repeats"
    not_better = "best value, not shown to be better than the baseline"
    at_worse_loss = "better than the baseline, as are only rows of a higher loss"
    best = "shown to be better than the baseline, best value of those at no higher loss"
    ahead = "a better value than the best, but not shown to be better than the baseline"
    peers = "not told apart from the best"
    other = "another model, task or data: not compared"


@dataclass(frozen=True)
class Claim:
    """One claim."""

    kind: Kind
    part: OneMachine | None = None
    rows: tuple[Row, ...] = ()
    measure: Measure = SAMPLES
    value: float | None = None
    """Of the first row over the baseline; of `unquiet`, fastest over slowest repeat."""
    low: float | None = None
    high: float | None = None
    """The interval."""
    is_decided: bool = False
    """The row is shown to differ from the baseline."""
    is_limited: bool = False
    """Rows of a higher loss have a better value, and are left out."""
    is_first: bool = True
    """No other row of no higher loss has a better value."""

    @property
    def ratios(self) -> list[Ratio]:
        """Of the rows, over the baseline."""
        return [row.ratios[self.measure.key] for row in self.rows]


def claims(comparison: Comparison) -> list[Claim]:
    """All claims, machine by machine, in the order in which they are told."""
    found = [
        claim
        for part in comparison.machines
        for claim in _on(
            part, [r for r in comparison.rows if r.variant.machine == part.machine.letter]
        )
    ]
    return found or [Claim(Kind.nothing)]


def _on(part: OneMachine, rows: Sequence[Row]) -> list[Claim]:
    good = tuple(row for row in rows if row.variant.records)
    if not good or len(good) == 1:
        return [Claim(Kind.only_one if good else Kind.none_well, part, good)]
    if part.baseline is None:
        return [Claim(Kind.no_baseline, part)]
    found = []
    if (wide := spread(part.baseline)) > SPREAD:
        base = tuple(row for row in good if row.is_baseline)
        found.append(Claim(Kind.unquiet, part, base, value=wide))
    apart: list[Row] = []
    alike: list[Row] = []
    for row in good:
        if not row.is_baseline:
            (apart if is_another_training(part.baseline, row.variant) else alike).append(row)
    if alike:
        found += _best(part, alike, SAMPLES) or [Claim(Kind.no_speed, part)]
        found += _best(part, alike, PEAK)
    return [*found, Claim(Kind.other, part, tuple(apart))] if apart else found


def _best(part: OneMachine, rows: Sequence[Row], measure: Measure) -> list[Claim]:
    """What is best in one measure: highest in speed, lowest in memory."""
    better, sign = (Decision.lower, 1) if measure is PEAK else (Decision.higher, -1)
    ordered = sorted(
        (row for row in rows if measure.key in row.ratios),
        key=lambda row: sign * row.ratios[measure.key].value,
    )
    sound = [row for row in ordered if row.quality.parity is not Parity.worse]
    decisions = {id(row): row.ratios[measure.key].decision for row in ordered}
    shown = [row for row in ordered if decisions[id(row)] is better]
    if not ordered:
        return []
    if not shown:
        kind = Kind.few if set(decisions.values()) == {Decision.single} else Kind.not_better
        return [_claim(kind, part, ordered[0], measure)]
    top = next((row for row in sound if decisions[id(row)] is better), None)
    if top is None:
        return [_claim(Kind.at_worse_loss, part, shown[0], measure)]
    values = {id(row): sign * row.ratios[measure.key].value for row in ordered}
    above = [row for row in ordered if values[id(row)] < values[id(top)]]
    limited = any(row not in sound for row in above)
    ahead = tuple(row for row in above if row in sound)
    pairs = len(sound) * (len(sound) - 1) / 2  # the best of many is high by chance, too
    peers = [
        row for row in sound
        if row is not top and not _is_apart(part, top, row, measure, (1 - LEVEL) / pairs)
    ]  # fmt: skip
    best = _claim(Kind.best, part, top, measure)
    told = [replace(best, is_limited=limited, is_first=not ahead)]
    told += [Claim(Kind.ahead, part, ahead, measure)] if ahead else []
    return told + ([Claim(Kind.peers, part, tuple(peers), measure)] if peers else [])


def _claim(kind: Kind, part: OneMachine, row: Row, measure: Measure) -> Claim:
    ratio = row.ratios[measure.key]
    decided = ratio.decision in (Decision.higher, Decision.lower)
    return Claim(kind, part, (row,), measure, ratio.value, ratio.low, ratio.high, decided)


def _is_apart(part: OneMachine, one: Row, other: Row, measure: Measure, chance: float) -> bool:
    found = part.noise[measure.key].ratio((id(one.variant), id(other.variant)))
    return found is not None and found.p is not None and found.p <= chance
