"""Claims of a report's verdict, as values. `sentences` words them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from eke.config.schema.fields import Affects
from eke.results.report.compare.comparison import Comparison, ComparisonRow, MachineComparison
from eke.results.report.compare.curves import SPREAD, repeat_spread
from eke.results.report.compare.losses import Parity
from eke.results.report.compare.measures import (
    EVAL_LOSS,
    PEAK,
    SAMPLE_SPEED,
    Measure,
    is_better_lower,
    metric_of,
)
from eke.results.report.compare.statistics import ALPHA, Compared, Significance
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
    open = "not decided by repeats until decided"
    missing = "too few repeats to compare, unlike others"
    failed = "no repeat ended well"


@dataclass(frozen=True)
class Claim:
    """Claim about some rows, the best first."""

    kind: Kind
    part: MachineComparison | None = None
    rows: tuple[ComparisonRow, ...] = ()
    measure: Measure = SAMPLE_SPEED
    is_limited: bool = False
    """True if rows with a better value were skipped for their higher loss."""

    def numbers(self, row: ComparisonRow) -> dict[str, float | str | None]:
        """Return value relative to the baseline's, unit, interval, and level, or empty if none.

        Ratios have the unit `x`. A loss has the unit of its comparison.
        """
        found, ratio = row.quality, row.ratios.get(self.measure.key)
        if self.measure.is_loss and found.estimate is not None:
            numbers = found.estimate, found.unit, found.low, found.high, found.level
        elif ratio is not None:
            numbers = ratio.value, "x", ratio.low, ratio.high, ratio.level
        else:
            return {}
        named = dict(zip(("value", "unit", "low", "high", "level"), numbers, strict=True))
        return named if named["low"] is not None else {**named, "level": None}


@lru_cache(maxsize=4)  # every format needs them, and tests of peers take time
def find_claims(comparison: Comparison) -> tuple[Claim, ...]:
    """Return all claims, by group and machine, in reading order."""
    found = [claim for part in comparison.machines for claim in _claims_on(comparison, part)]
    return tuple(found) or (Claim(Kind.nothing),)


def with_beside(claims: Sequence[Claim]) -> Iterator[Claim]:
    """Yield claims, each followed by the other measures of its first configuration."""
    for claim in claims:
        yield claim
        if claim.kind in (Kind.best, Kind.at_worse_loss, Kind.not_better, Kind.few) and claim.part:
            row = claim.rows[0]
            loss = [metric_of(row.quality.measure)] if row.quality.measure else []
            for measure in (claim.part.speed, PEAK, *loss):
                beside = Claim(Kind.beside, claim.part, (row,), measure)
                if measure != claim.measure and beside.numbers(row):
                    yield beside


def _claims_on(comparison: Comparison, part: MachineComparison) -> list[Claim]:
    good = [row for row in part.rows if row.variant.records]
    ends = _claims_of(
        part, {Kind.failed: [row for row in part.rows if row not in good]}, part.speed
    )
    if len(good) < 2:
        return [Claim(Kind.only_one if good else Kind.none_well, part, tuple(good)), *ends]
    if part.baseline is None:
        return [Claim(Kind.no_baseline, part), *ends]
    others = [row for row in good if not row.is_baseline]
    keys = (row.quality.measure for row in others if row.quality.estimate is not None)
    losses = _best(part, others, metric_of(next(keys, EVAL_LOSS.key)))
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
        is_later = is_later and not comparison.metric
        ordered = [*ordered, *losses] if is_later else [*losses, *speed, *memory]
    states = {row: (_compared_value(row, part.speed) or (0.0, "few"))[1] for row in others}
    few = [row for row in others if states[row] == "few"]
    never = [r for r in comparison.rows if (r.variant.machine, r.variant.work) == ("", part.work)]
    is_auto = part.level < ALPHA  # of `sweep.repeats=auto`
    more = {
        Kind.open: [row for row in others if is_auto and states[row] == "open"],
        Kind.missing: [*few, *never] if len(few) < len(others) else [],
    }
    return [*ordered, *_claims_of(part, more, part.speed), *ends]


def _claims_of(
    part: MachineComparison, rows: dict[Kind, list[ComparisonRow]], measure: Measure
) -> list[Claim]:
    """Return claims of the kinds that have rows."""
    return [Claim(kind, part, tuple(found), measure) for kind, found in rows.items() if found]


_STATES: Mapping[Enum, str] = {
    Parity.better: "better", Parity.worse: "worse", Parity.equal: "same", Parity.few: "few",
    Significance.same: "same", Significance.unresolved: "open", Significance.single: "few",
}  # fmt: skip


def _compared_value(row: ComparisonRow, measure: Measure) -> tuple[float, str] | None:
    """Return a value of which less is better, and its decision. None: not compared.

    The decision is better, worse, same, open, or few for too few repeats.
    """
    quality, ratio = row.quality, row.ratios.get(measure.key)
    if measure.is_loss:
        if quality.estimate is None or quality.measure != measure.key:
            return None
        sign = 1 if is_better_lower(measure.key) else -1
        return sign * quality.estimate, _STATES.get(quality.parity, "open")
    if ratio is None:
        return None
    better, sign = (Significance.lower, 1) if measure is PEAK else (Significance.higher, -1)
    state = "better" if ratio.decision is better else _STATES.get(ratio.decision, "worse")
    return sign * ratio.value, state


def _best(part: MachineComparison, rows: Sequence[ComparisonRow], measure: Measure) -> list[Claim]:
    """Return claims about the best in one measure: speed, memory, a loss or a metric."""
    judged = {row: found for row in rows if (found := _compared_value(row, measure))}
    # Equal values, as of one training or of bytes: the faster row first, or with less memory.
    other = PEAK if measure.is_speed else part.speed
    also = {row: (_compared_value(row, other) or (0.0, ""))[0] for row in judged}
    every = sorted(judged, key=lambda row: (round(judged[row][0], 9), also[row]))
    tested = [row for row in every if judged[row][1] != "few"]
    states = {judged[row][1] for row in tested}
    if not tested:
        kind = Kind.few if every else Kind.unmeasured
        return [] if measure is PEAK else [Claim(kind, part, tuple(every[:1]), measure)]
    if "better" not in states:
        kinds = {"worse": Kind.none_better, "same": Kind.same}
        kind = kinds.get("".join(states), Kind.not_better)
        return [Claim(kind, part, tuple(tested), measure)]
    shown = [row for row in tested if judged[row][1] == "better"]
    sound = [row for row in tested if measure.is_loss or not row.quality.excludes]
    top = next((row for row in shown if row in sound), None)
    if top is None:
        return [Claim(Kind.at_worse_loss, part, tuple(shown), measure)]
    above = [row for row in tested if judged[row][0] < judged[top][0]]
    best = Claim(Kind.best, part, (top,), measure, any(row not in sound for row in above))
    more = {
        Kind.at_worse_loss: [row for row in above if row in shown and row not in sound],
        Kind.ahead: [row for row in above if row in sound],
        Kind.peers: _peers_of(part, top, sound, measure),
    }
    return [best, *_claims_of(part, more, measure)]


def _peers_of(
    part: MachineComparison, top: ComparisonRow, rows: Sequence[ComparisonRow], measure: Measure
) -> list[ComparisonRow]:
    """Return the rows that are not distinguishable from the best one."""
    if measure.is_loss:  # one row stands for its training
        first = {training_key(row.variant): row.variant for row in reversed(rows)}
        tested = {row: first[training_key(row.variant)] for row in rows}
        samples = {variant: variant.sample(measure.key) for variant in first.values()}
        is_log = all(value > 0 for sample in samples.values() for value in sample.values())
        noise = Compared(samples, is_log)
    else:
        tested, noise = {row: row.variant for row in rows}, part.noise[measure.key]
    count = len(set(tested.values()))
    level = part.level / max(1.0, count * (count - 1) / 2)  # best of many may be best by chance
    peers = []
    for row, variant in tested.items():
        found = noise.difference((tested[top], variant)) if row is not top else None
        if row is not top and not (found and (found.p is None or found.p <= level)):
            peers.append(row)
    return peers
