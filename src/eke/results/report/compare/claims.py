"""Claims of a report's verdict, as values; `sentences` words them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from eke.config.schema.fields import Affects
from eke.results.report.compare.comparison import Comparison, ComparisonRow, OneMachine
from eke.results.report.compare.curves import SPREAD, repeat_spread
from eke.results.report.compare.losses import Parity
from eke.results.report.compare.measures import PEAK, SAMPLES, Measure, is_better_lower, metric_of
from eke.results.report.compare.statistics import ALPHA, Compared, Significance
from eke.results.report.compare.variants import training_key


class Kind(Enum):
    """Kind of claim about its rows, in its measure."""

    nothing = "no run has succeeded yet"
    none_well = "no run succeeded"
    only_one = "one configuration succeeded"
    no_baseline = "nothing to compare with"
    unquiet = "the baseline's repeats spread"
    unmeasured = "no comparable speed was measured"
    few = "best value, of too few repeats"
    not_better = "best value, not shown to be better than the baseline"
    same = "shown to be the same as the baseline"
    none_better = "shown to be worse than the baseline"
    best = "shown to be better than the baseline, best value of those at no higher loss"
    at_worse_loss = "shown to be better than the baseline, at a higher loss"
    ahead = "a better value than the best, but not shown to be better than the baseline"
    peers = "not distinguishable from the best"
    beside = "another measure of the configuration before"
    open = "not decided by repeats until decided"
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
        found, ratio = row.quality, row.ratios.get(self.measure.key)
        if self.is_loss and found.estimate is not None:
            numbers = found.estimate, found.unit, found.low, found.high, found.level
        elif ratio is not None:
            numbers = ratio.value, "x", ratio.low, ratio.high, ratio.level
        else:
            return {}
        told = dict(zip(("value", "unit", "low", "high", "level"), numbers, strict=True))
        return told if told["low"] is not None else {**told, "level": None}


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
    good = [row for row in rows if row.variant.records]
    ends = _some(part, {Kind.failed: [row for row in rows if row not in good]}, part.speed)
    if len(good) < 2:
        return [Claim(Kind.only_one if good else Kind.none_well, part, tuple(good)), *ends]
    if part.baseline is None:
        return [Claim(Kind.no_baseline, part), *ends]
    others = [row for row in good if not row.is_baseline]
    losses = _losses(part, others)
    if part.focus is Affects.learning:
        return [*losses, *ends]
    speed, memory = _best(part, others, part.speed), _best(part, others, PEAK)
    finds = [found for found in (speed, memory) if found and found[0].kind is Kind.best]
    if repeat_spread(part.baseline) > SPREAD:
        unquiet = Claim(Kind.unquiet, part, tuple(row for row in good if row.is_baseline))
        is_open = speed[0].kind in (Kind.not_better, Kind.same)
        speed = [unquiet] if is_open else [*speed, unquiet]
    is_memory = finds == [memory] and speed[0].kind is not Kind.unquiet
    ordered = [*memory, *speed] if is_memory else [*speed, *memory]
    is_lower = part.focus is Affects.both and losses[0].kind is Kind.best
    if comparison.metric or is_lower:
        lower = losses[0].rows[0].quality if is_lower else None
        is_later = lower and finds and abs(lower.estimate or 0.0) <= lower.margin
        speed = [*speed, *memory]
        ordered = [*ordered, *losses] if is_later and not comparison.metric else [*losses, *speed]
    few = [row for row in others if not _is_tested(row, part.speed)]
    never = [r for r in comparison.rows if (r.variant.machine, r.variant.work) == ("", part.work)]
    more = {
        Kind.open: [row for row in others if _is_open(row, part)],
        Kind.missing: [*few, *never] if len(few) < len(others) else [],
    }
    return [*ordered, *_some(part, more, part.speed), *ends]


def _some(part: OneMachine, rows: dict[Kind, list[ComparisonRow]], measure: Measure) -> list[Claim]:
    """Claims of the kinds that have rows."""
    return [Claim(kind, part, tuple(found), measure) for kind, found in rows.items() if found]


def _is_open(row: ComparisonRow, part: OneMachine) -> bool:
    """Whether a sweep with `sweep.repeats=auto`, whose level is smaller, left it undecided."""
    ratio = row.ratios.get(part.speed.key)
    is_open = ratio is not None and ratio.decision is Significance.unresolved
    return part.level < ALPHA and is_open


def _is_tested(row: ComparisonRow, measure: Measure) -> bool:
    ratio = row.ratios.get(measure.key)
    return ratio is not None and ratio.decision is not Significance.single


def _best(part: OneMachine, rows: Sequence[ComparisonRow], measure: Measure) -> list[Claim]:
    """Claims about the best in one measure: highest speed, or lowest memory."""
    better, sign = (Significance.lower, 1) if measure is PEAK else (Significance.higher, -1)
    found = {row: row.ratios[measure.key] for row in rows if measure.key in row.ratios}
    every = sorted(found, key=lambda row: sign * found[row].value)
    ordered = [row for row in every if _is_tested(row, measure)]
    shown = [row for row in ordered if found[row].decision is better]
    if not ordered:
        kind = Kind.few if every else Kind.unmeasured
        return [] if measure is PEAK else [Claim(kind, part, tuple(every[:1]), measure)]
    if not shown:
        decisions = {found[row].decision for row in ordered}
        is_worse = decisions <= {Significance.higher, Significance.lower}
        kind = Kind.none_better if is_worse else Kind.not_better
        kind = Kind.same if decisions == {Significance.same} else kind
        return [Claim(kind, part, tuple(ordered), measure)]
    sound = [row for row in ordered if not row.quality.excludes]
    top = next((row for row in shown if row in sound), None)
    if top is None:
        return [Claim(Kind.at_worse_loss, part, tuple(shown), measure)]
    above = [row for row in ordered if sign * found[row].value < sign * found[top].value]
    samples = part.noise[measure.key]
    best = Claim(Kind.best, part, (top,), measure, any(row not in sound for row in above))
    more = {
        Kind.at_worse_loss: [row for row in above if row in shown and row not in sound],
        Kind.ahead: [row for row in above if row in sound],
        Kind.peers: _peers_of(part, top, {row: row for row in sound}, samples),
    }
    return [best, *_some(part, more, measure)]


def _losses(part: OneMachine, rows: Sequence[ComparisonRow]) -> list[Claim]:
    """Claims about the best loss, or the best value of the metric of `--by`."""
    every = [row for row in rows if row.quality.estimate is not None]
    if not every:
        return [Claim(Kind.unmeasured, part)]
    key = every[0].quality.measure
    sign, measure = 1 if is_better_lower(key) else -1, metric_of(key)
    every = [row for row in every if row.quality.measure == key]
    every.sort(key=lambda row: sign * (row.quality.estimate or 0.0))
    tested = [row for row in every if row.quality.parity is not Parity.few]
    parities = {row.quality.parity for row in tested}
    if Parity.better not in parities:
        kinds = {Parity.worse: Kind.none_better, Parity.equal: Kind.same}
        kind = kinds.get(next(iter(parities), Parity.few), Kind.not_better)
        kind = Kind.not_better if len(parities) > 1 else kind
        return [Claim(kind if tested else Kind.few, part, tuple(tested or every), measure)]
    top = next(row for row in tested if row.quality.parity is Parity.better)
    trainings = {training_key(row.variant): row for row in reversed(tested)}
    samples = {row.variant: row.variant.sample(key) for row in trainings.values()}
    is_log = all(value > 0 for sample in samples.values() for value in sample.values())
    same = {row: trainings[training_key(row.variant)] for row in tested}
    more = {
        Kind.ahead: tested[: tested.index(top)],
        Kind.peers: _peers_of(part, top, same, Compared(samples, is_log)),
    }
    return [Claim(Kind.best, part, (top,), measure), *_some(part, more, measure)]


def _peers_of(
    part: OneMachine,
    top: ComparisonRow,
    tested: dict[ComparisonRow, ComparisonRow],
    noise: Compared,
) -> list[ComparisonRow]:
    """Rows that are not distinguishable from the best one.

    `tested`: each row -> the one of its training that stands for it.
    """
    count = len(set(tested.values()))
    level = part.level / max(1.0, count * (count - 1) / 2)  # best of many may be best by chance
    peers = []
    for row, other in tested.items():
        found = noise.difference((tested[top].variant, other.variant)) if row is not top else None
        if row is not top and not (found and (found.p is None or found.p <= level)):
            peers.append(row)
    return peers
