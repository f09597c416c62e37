"""Claims of a report's verdict, as values; `sentences` words them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from eke.config.schema.fields import Affects
from eke.results.report.compare.comparison import Comparison, ComparisonRow, OneMachine
from eke.results.report.compare.curves import SPREAD, repeat_spread
from eke.results.report.compare.losses import Parity
from eke.results.report.compare.measures import PEAK, SAMPLES, Measure, is_better_lower, metric_of
from eke.results.report.compare.statistics import (
    ALPHA,
    SAME,
    Compared,
    Ratio,
    Significance,
)
from eke.results.report.compare.variants import training_key


class Kind(Enum):
    """Kind of claim about its rows, in its measure."""

    nothing = "no run has succeeded yet"
    none_well = "no run succeeded"
    only_one = "one configuration succeeded"
    no_baseline = "nothing to compare with"
    unquiet = "the baseline's repeats spread"
    unmeasured = "nothing comparable was measured"
    few = "best value, of too few repeats"
    not_better = "best value, not shown to be better than the baseline"
    same = "shown to be the same as the baseline"
    none_better = "shown to be worse than the baseline"
    best = "shown to be better than the baseline, best value of those at no higher loss"
    at_worse_loss = "shown to be better than the baseline, at a higher loss"
    ahead = "a better value than the best, but not shown to be better than the baseline"
    peers = "not distinguishable from the best"
    beside = "another measure of the configuration before"
    missing = "too few repeats to compare, unlike others"
    failed = "no repeat ended well"


@dataclass(frozen=True)
class Claim:
    """One claim."""

    kind: Kind
    part: OneMachine | None = None
    rows: tuple[ComparisonRow, ...] = ()
    measure: Measure = SAMPLES
    is_limited: bool = False
    """Whether rows with a better value were skipped for their higher loss."""

    @property
    def is_loss(self) -> bool:
        """Whether it is about a loss or a metric."""
        return self.measure is not PEAK and not self.measure.is_speed

    def numbers(self, row: ComparisonRow) -> dict[str, float | str | None]:
        """Value relative to the baseline's, unit, interval, and level of its test; empty if none.

        Ratios have the unit `x`; a loss has the unit of its comparison.
        """
        found = row.quality
        if self.is_loss and found.estimate is not None:
            value, unit = found.estimate, found.unit
            return {"value": value, "unit": unit, "low": found.low, "high": found.high,
                    "level": None if found.low is None else found.level}  # fmt: skip
        ratio = row.ratios.get(self.measure.key)
        if ratio is None:
            return {}
        level = None if ratio.low is None else ratio.level
        return {"value": ratio.value, "unit": "x", "low": ratio.low, "high": ratio.high,
                "level": level}  # fmt: skip


@lru_cache(maxsize=4)  # every format asks, and tests of peers take time
def find_claims(comparison: Comparison) -> tuple[Claim, ...]:
    """All claims, by group and machine, in reading order."""
    found = [claim for part in comparison.machines for claim in _on(comparison, part)]
    return tuple(found) or (Claim(Kind.nothing),)


def with_beside(claims: Sequence[Claim]) -> Iterator[Claim]:
    """Claims, each followed by those about the other measures of its first configuration."""
    for claim in claims:
        yield claim
        if claim.kind in (Kind.best, Kind.at_worse_loss, Kind.not_better, Kind.few) and claim.part:
            row = claim.rows[0]
            loss = [metric_of(row.quality.measure)] if row.quality.measure else []
            for measure in (claim.part.speed, PEAK, *loss):
                beside = Claim(Kind.beside, claim.part, (row,), measure)
                if measure != claim.measure and beside.numbers(row):
                    yield beside


def _on(comparison: Comparison, part: OneMachine) -> list[Claim]:
    rows = comparison.rows_of(part)
    good = tuple(row for row in rows if row.variant.records)
    failed = tuple(row for row in rows if not row.variant.records)
    ends = [Claim(Kind.failed, part, failed)] if failed else []
    if len(good) < 2:
        return [Claim(Kind.only_one if good else Kind.none_well, part, good), *ends]
    if part.baseline is None:
        return [Claim(Kind.no_baseline, part), *ends]
    others = [row for row in good if not row.is_baseline]
    losses = _losses(part, others)
    if part.focus is Affects.learning:
        return [*losses, *ends]
    speed, memory = _best(part, others, part.speed), _best(part, others, PEAK)
    if repeat_spread(part.baseline) > SPREAD:
        unquiet = Claim(Kind.unquiet, part, tuple(row for row in good if row.is_baseline))
        is_open = speed[0].kind in (Kind.not_better, Kind.same)
        speed = [unquiet] if is_open else [*speed, unquiet]
    ordered = [*speed, *memory]
    if comparison.metric or (part.focus is Affects.both and _is_lower(losses)):
        ordered = [*losses, *ordered]
    elif Kind.best not in {c.kind for c in speed} and memory and memory[0].kind is Kind.best:
        ordered = [*memory, *speed] if speed[0].kind is not Kind.unquiet else ordered
    lone = [row for row in comparison.rows if not row.variant.machine]
    never = [row for row in lone if row.variant.work == part.work]
    few = [row for row in others if not _is_tested(row, part.speed)]
    if len(few) < len(others) and (few or never):
        ends = [Claim(Kind.missing, part, (*few, *never), part.speed), *ends]
    return [*ordered, *ends]


def _is_lower(losses: Sequence[Claim]) -> bool:
    """Whether the best loss is better by more than the margin."""
    if not losses or losses[0].kind is not Kind.best:
        return False
    found = losses[0].rows[0].quality
    return abs(found.estimate or 0.0) > found.margin


def _is_tested(row: ComparisonRow, measure: Measure) -> bool:
    ratio = row.ratios.get(measure.key)
    return ratio is not None and ratio.decision is not Significance.single


def _best(part: OneMachine, rows: Sequence[ComparisonRow], measure: Measure) -> list[Claim]:
    """Claims about the best in one measure: highest speed, or lowest memory."""
    better, sign = (Significance.lower, 1) if measure is PEAK else (Significance.higher, -1)
    every = {row: row.ratios[measure.key] for row in rows if measure.key in row.ratios}
    ratios = {row: each for row, each in every.items() if _is_tested(row, measure)}
    ordered = sorted(ratios, key=lambda row: sign * ratios[row].value)
    shown = [row for row in ordered if ratios[row].decision is better]
    if not ordered:
        return _untested(part, every, measure)
    if not shown:
        return _none_better(part, ordered, ratios, measure)
    sound = [row for row in ordered if not row.quality.excludes]
    top = next((row for row in shown if row in sound), None)
    if top is None:
        return [Claim(Kind.at_worse_loss, part, tuple(shown), measure)]
    above = [row for row in ordered if sign * ratios[row].value < sign * ratios[top].value]
    pairs = len(sound) * (len(sound) - 1) / 2  # the best of many may be best by chance
    noise = part.noise[measure.key]

    def is_peer(row: ComparisonRow) -> bool:
        found = noise.difference((top.variant, row.variant))
        return found is None or found.p is None or found.p > ALPHA / pairs

    more = {
        Kind.at_worse_loss: [row for row in above if row in shown and row not in sound],
        Kind.ahead: [row for row in above if row in sound],
        Kind.peers: [row for row in sound if row is not top and is_peer(row)],
    }
    limited = any(row not in sound for row in above)
    found = [Claim(kind, part, tuple(those), measure) for kind, those in more.items() if those]
    return [Claim(Kind.best, part, (top,), measure, limited), *found]


def _untested(
    part: OneMachine, ratios: Mapping[ComparisonRow, Ratio], measure: Measure
) -> list[Claim]:
    """Claims about values of too few repeats."""
    if not ratios:
        return [] if measure is PEAK else [Claim(Kind.unmeasured, part, (), measure)]
    sign = 1 if measure is PEAK else -1
    top = min(ratios, key=lambda row: sign * ratios[row].value)
    if measure is PEAK and ratios[top].value > 1 - SAME:
        return []
    return [Claim(Kind.few, part, (top,), measure)]


def _none_better(
    part: OneMachine,
    ordered: Sequence[ComparisonRow],
    ratios: Mapping[ComparisonRow, Ratio],
    measure: Measure,
) -> list[Claim]:
    """Claims where nothing is shown to be better."""
    decisions = {ratios[row].decision for row in ordered}
    kind = Kind.not_better
    if decisions == {Significance.same}:
        kind = Kind.same
    elif decisions <= {Significance.higher, Significance.lower}:
        kind = Kind.none_better
    return [Claim(kind, part, tuple(ordered), measure)]


def _losses(part: OneMachine, rows: Sequence[ComparisonRow]) -> list[Claim]:
    """Claims about the best loss, or the best value of the metric of `--by`."""
    keys = [row.quality.measure for row in rows if row.quality.estimate is not None]
    if not keys:
        return [Claim(Kind.unmeasured, part, (), metric_of("loss.eval_final"))]
    key, measure = keys[0], metric_of(keys[0])
    sign = 1 if is_better_lower(key) else -1
    every = [row for row in rows if row.quality.measure == key]
    every = [row for row in every if row.quality.estimate is not None]
    every.sort(key=lambda row: sign * (row.quality.estimate or 0.0))
    tested = [row for row in every if row.quality.parity is not Parity.few]
    shown = [row for row in tested if row.quality.parity is Parity.better]
    if not tested:
        return [Claim(Kind.few, part, tuple(every), measure)]
    if not shown:
        parities = {row.quality.parity for row in tested}
        kinds = {Parity.worse: Kind.none_better, Parity.equal: Kind.same}
        kind = kinds.get(next(iter(parities)), Kind.not_better)
        kind = kind if len(parities) == 1 else Kind.not_better
        return [Claim(kind, part, tuple(tested), measure)]
    top = shown[0]
    more = {
        Kind.ahead: tested[: tested.index(top)],
        Kind.peers: _peers_of(top, [row for row in tested if row is not top], key),
    }
    found = [Claim(kind, part, tuple(those), measure) for kind, those in more.items() if those]
    return [Claim(Kind.best, part, (top,), measure), *found]


def _peers_of(top: ComparisonRow, rows: Sequence[ComparisonRow], key: str) -> list[ComparisonRow]:
    """Rows whose loss is not distinguishable from the best one; one row for each training."""
    trainings = {training_key(row.variant): row for row in reversed([top, *rows])}
    samples = {row.variant: row.variant.sample(key) for row in trainings.values()}
    is_log = all(value > 0 for sample in samples.values() for value in sample.values())
    compared, pairs = Compared(samples, is_log), len(samples) * (len(samples) - 1) / 2
    found = []
    for row in rows:
        same = trainings[training_key(row.variant)]
        each = compared.difference((top.variant, same.variant)) if same is not top else None
        if each is None or each.p is None or each.p > ALPHA / max(1.0, pairs):
            found.append(row)
    return found


def beyond(ratio: Ratio) -> float:
    """Half of a ratio's interval, as a fraction; 0 without one."""
    if ratio.low is None or ratio.high is None:
        return 0.0
    return math.sqrt(ratio.high / ratio.low) - 1
