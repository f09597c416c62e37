"""Claims of a report's opening, as values, and their sentences (`verdict_lines`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from eke.common.paths import program
from eke.common.text import format_number
from eke.results.report.compare.comparison import (
    Comparison,
    ComparisonRow,
    OneMachine,
    in_words,
    loss_words,
    times,
)
from eke.results.report.compare.curves import SPREAD, repeat_spread
from eke.results.report.compare.losses import ANOTHER_TRAINING, Parity, is_another_training
from eke.results.report.compare.measures import METRIC, PEAK, SAMPLES, Measure
from eke.results.report.compare.statistics import ALPHA, MIN_REPEATS, Ratio, Significance


class Kind(Enum):
    """Kind of claim about its rows."""

    nothing = "no run has succeeded yet"
    none_well = "no run succeeded"
    only_one = "one configuration succeeded"
    no_baseline = "nothing to compare with"
    no_speed = "no speed was measured"
    unquiet = "the baseline's repeats spread"
    few = "best value, of too few repeats"
    not_better = "best value, not shown to be better than the baseline"
    at_worse_loss = "better than the baseline, as are only rows of a higher loss"
    best = "shown to be better than the baseline, best value of those at no higher loss"
    ahead = "a better value than the best, but not shown to be better than the baseline"
    peers = "not distinguishable from the best"
    other = "another model, task or data: not compared"


@dataclass(frozen=True)
class Claim:
    """One claim."""

    kind: Kind
    part: OneMachine | None = None
    rows: tuple[ComparisonRow, ...] = ()
    measure: Measure = SAMPLES
    is_limited: bool = False
    """Whether rows with a better value were skipped for their higher loss."""
    is_first: bool = True
    """Whether no other row without a higher loss has a better value."""

    @property
    def ratios(self) -> list[Ratio]:
        """Ratios of the rows to the baseline."""
        return [row.ratios[self.measure.key] for row in self.rows]


def find_claims(comparison: Comparison) -> list[Claim]:
    """All claims by machine, in reading order."""
    found = [claim for part in comparison.machines for claim in _on(part, comparison.rows_of(part))]
    return found or [Claim(Kind.nothing)]


def _on(part: OneMachine, rows: Sequence[ComparisonRow]) -> list[Claim]:
    good = tuple(row for row in rows if row.variant.records)
    if not good or len(good) == 1:
        return [Claim(Kind.only_one if good else Kind.none_well, part, good)]
    if part.baseline is None:
        return [Claim(Kind.no_baseline, part)]
    found = []
    if repeat_spread(part.baseline) > SPREAD:
        found.append(Claim(Kind.unquiet, part, tuple(row for row in good if row.is_baseline)))
    others = [row for row in good if not row.is_baseline]
    apart = [row for row in others if is_another_training(part.baseline, row.variant)]
    alike = [row for row in others if row not in apart]
    if alike:
        found += _best(part, alike, SAMPLES) or [Claim(Kind.no_speed, part)]
        found += _best(part, alike, PEAK)
    return [*found, Claim(Kind.other, part, tuple(apart))] if apart else found


def _best(part: OneMachine, rows: Sequence[ComparisonRow], measure: Measure) -> list[Claim]:
    """Claims about the best in one measure: highest speed, or lowest memory."""
    better, sign = (Significance.lower, 1) if measure is PEAK else (Significance.higher, -1)
    ratios = {row: row.ratios[measure.key] for row in rows if measure.key in row.ratios}
    ordered = sorted(ratios, key=lambda row: sign * ratios[row].value)
    sound = [row for row in ordered if not row.quality.excludes]
    shown = [row for row in ordered if ratios[row].decision is better]
    if not ordered:
        return []
    if not shown:
        few = all(each.decision is Significance.single for each in ratios.values())
        return [Claim(Kind.few if few else Kind.not_better, part, (ordered[0],), measure)]
    top = next((row for row in shown if row in sound), None)
    if top is None:
        return [Claim(Kind.at_worse_loss, part, (shown[0],), measure)]
    above = [row for row in ordered if sign * ratios[row].value < sign * ratios[top].value]
    limited = any(row not in sound for row in above)
    ahead = tuple(row for row in above if row in sound)
    pairs = len(sound) * (len(sound) - 1) / 2  # the best of many may be best by chance

    def is_peer(row: ComparisonRow) -> bool:
        found = part.noise[measure.key].difference((top.variant, row.variant))
        return found is None or found.p is None or found.p > ALPHA / pairs

    peers = tuple(row for row in sound if row is not top and is_peer(row))
    best = Claim(Kind.best, part, (top,), measure, is_limited=limited, is_first=not ahead)
    more = ((Kind.ahead, ahead), (Kind.peers, peers))
    return [best, *(Claim(kind, part, rows, measure) for kind, rows in more if rows)]


NAMED = 3
"""Configurations named in a sentence."""


def verdict_lines(comparison: Comparison) -> list[str]:
    """Sentences of all claims, one line each; additions follow in the same line."""
    # Single runs and `eke fit` reject `sweep.repeats`.
    more_repeats = f"{program()} -m with sweep.repeats={MIN_REPEATS} runs each {MIN_REPEATS} times"
    if any(command[0] != "fit" for command in comparison.commands):
        more_repeats = f"sweep.repeats={MIN_REPEATS} and the same command measures the missing ones"
    lines: list[str] = []
    for claim in find_claims(comparison):
        text = claim_sentence(claim, more_repeats)
        if claim.kind in (Kind.ahead, Kind.peers):
            lines[-1] += f" {text}"
        elif claim.part is not None and len(comparison.machines) > 1:
            lines.append(f"Machine {claim.part.machine.letter}: {text}")
        else:
            lines.append(text)
    return lines


def claim_sentence(claim: Claim, more_repeats: str) -> str:
    """Sentence for a claim; `more_repeats` is advice on getting more of them."""
    names = [row.variant.label for row in claim.rows]
    baseline = claim.part.baseline if claim.part else None
    base, spread = (baseline.label, repeat_spread(baseline)) if baseline else ("", 1.0)
    first = _first_of(names)
    texts = {
        Kind.nothing: "No run has succeeded yet: there is nothing to compare.",
        Kind.none_well: "No run succeeded: there is nothing to compare.",
        Kind.only_one: f"Only one configuration succeeded ({first}): nothing to compare.",
        Kind.no_baseline: "There is no baseline to compare with; choose one with --baseline.",
        Kind.no_speed: "No comparable speed was measured.",
        Kind.unquiet: f"Measurements are noisy: speeds of {base}'s repeats differ by "
        f"{spread:.2f}x; use more repeats on an idle machine.",
        Kind.other: f"Not compared with {base}: {first} ({ANOTHER_TRAINING}); eke report SWEEP "
        "reads a single sweep, --baseline chooses another baseline.",
        Kind.peers: f"Not distinguishable from it: {first}.",
    }
    if text := texts.get(claim.kind):
        return text
    if claim.measure is PEAK:
        return _of_memory(claim, base)
    return _of_speed(claim, base, more_repeats)


def _of_speed(claim: Claim, base: str, more_repeats: str) -> str:
    row, ratio = claim.rows[0], claim.ratios[0]
    name = row.variant.label
    if claim.kind is Kind.few:
        what = f"none was faster than {base}"
        if ratio.value > 1:
            what = f"highest: {name} with {times(ratio)} the speed of {base}"
            what += f", {loss_words(row.quality)}" if row.quality.parity is Parity.other else ""
        return f"Too few repeats to separate differences from chance ({what}); {more_repeats}."
    if claim.kind is Kind.not_better:
        other = f"the fastest other is {name}, {in_words(ratio)}"
        return f"Nothing is significantly faster than {base}; {other}."
    if claim.kind is Kind.at_worse_loss:
        speed = f"{name} has {times(ratio)} its speed, and {loss_words(row.quality)}"
        return f"Nothing is significantly faster than {base} without a {_cost(claim)}: {speed}."
    if claim.kind is Kind.ahead:
        return f"Higher, but not significantly faster than {base}: {_with_values(claim)}."
    which = "fastest" if claim.is_first else "the fastest with a significant difference"
    text = f"{name} is {which}{_among(claim)}: {times(ratio)} the samples/s of {base}"
    if PEAK.key in row.ratios:
        text += f" at {times(row.ratios[PEAK.key])} its peak memory"
    return f"{text}; {loss_words(row.quality)}."


def _of_memory(claim: Claim, base: str) -> str:
    row, ratio = claim.rows[0], claim.ratios[0]
    name = row.variant.label
    if claim.kind is Kind.ahead:
        return f"Lower, but not significantly less than {base}: {_with_values(claim)}."
    if claim.kind is Kind.not_better:
        other = f"the lowest other peak is that of {name}, {in_words(ratio)}"
        return f"Nothing takes significantly less memory than {base}; {other}."
    if claim.kind is Kind.few and ratio.value >= 1:
        return f"No configuration has a lower peak memory than {base}."
    which = {
        Kind.few: "has the lowest measured peak memory",
        Kind.at_worse_loss: f"takes less memory, but has a {_cost(claim)}, as all that do",
        Kind.best: f"takes the least memory{_among(claim)}"
        + ("" if claim.is_first else " with a significant difference"),
    }[claim.kind]
    text = f"{name} {which}: {times(ratio)} the peak of the baseline"
    if SAMPLES.key in row.ratios:
        text += f", at {times(row.ratios[SAMPLES.key])} its speed"
    return f"{text} ({format_number(ratio.n, 'repeat')}; {loss_words(row.quality)})."


def _cost(claim: Claim) -> str:
    """What is compared, if it is worse."""
    found = claim.rows[0].quality
    return f"worse {found.name}" if found.measure.startswith(METRIC) else "higher loss"


def _among(claim: Claim) -> str:
    return f" among those without a significantly {_cost(claim)}" if claim.is_limited else ""


def _with_values(claim: Claim) -> str:
    named = zip(claim.rows, claim.ratios, strict=True)
    return _first_of([f"{row.variant.label} with {times(ratio)}" for row, ratio in named])


def _first_of(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    return f"{', '.join(labels[:NAMED])}{more}"
