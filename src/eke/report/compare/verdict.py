"""The answer in a sentence: what pays most, by how much, at what cost, and how sure that is."""

from collections.abc import Sequence

from eke.paths import program
from eke.report.compare.comparison import Comparison, OneMachine, Row
from eke.report.compare.measures import PEAK, SAMPLES
from eke.report.compare.parity import ANOTHER_TRAINING, Parity, is_another_training
from eke.report.compare.statistics import MIN_REPEATS, Decision, Ratio, ratio
from eke.report.compare.variants import Variant
from eke.report.compare.wording import in_words, loss_words, times
from eke.units import format_number

NAMED = 3
"""Configurations whose names a sentence holds."""


def verdict(comparison: Comparison) -> list[str]:
    """One sentence for each kind of machine, and one for what needs least memory."""
    lines: list[str] = []
    for part in comparison.machines:
        where = f"Machine {part.machine.letter}: " if len(comparison.machines) > 1 else ""
        rows = [r for r in comparison.rows if r.variant.machine == part.machine.letter]
        lines += [where + line for line in _on(part, rows, _more_repeats(comparison))]
    return lines or ["Nothing has ended well yet: there is nothing to compare."]


def _more_repeats(comparison: Comparison) -> str:
    """How to come by more of them: runs typed alone and `eke fit` refuse `sweep.repeats`."""
    repeats = f"sweep.repeats={MIN_REPEATS}"
    if any(command[0] != "fit" for command in comparison.commands):
        return f"{repeats} and the same command measures what is missing"
    return f"{program()} -m with {repeats} runs each {MIN_REPEATS} times"


def _on(part: OneMachine, rows: Sequence[Row], more_repeats: str) -> list[str]:
    good = [row for row in rows if row.variant.records]
    if not good:
        return ["No run ended well: there is nothing to compare."]
    if len(good) == 1:
        return [f"One configuration ended well ({good[0].variant.label}): nothing to compare."]
    if part.baseline is None:
        return ["Without a baseline there is nothing to compare with; --baseline names one."]
    others = [row for row in good if not row.is_baseline]
    apart: list[Row] = []
    alike: list[Row] = []
    for row in others:
        (apart if is_another_training(part.baseline, row.variant) else alike).append(row)
    told = [_fastest(part, alike, more_repeats), _smallest(part, alike)] if alike else []
    return [line for line in (*told, _not_compared(part.baseline, apart)) if line]


def _not_compared(base: Variant, apart: Sequence[Row]) -> str:
    """What is left out of the sentences above, and how to have it compared."""
    if not apart:
        return ""
    return (
        f"Not compared with {base.label}: {_first_of([row.variant.label for row in apart])} "
        f"({ANOTHER_TRAINING}); eke report SWEEP reads one sweep alone, --baseline compares with "
        "another."
    )


def _first_of(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    return f"{', '.join(labels[:NAMED])}{more}"


def _fastest(part: OneMachine, others: Sequence[Row], more_repeats: str) -> str:
    speeds = [row for row in others if SAMPLES.key in row.ratios]
    if not speeds or part.baseline is None:
        return "No speed was measured that could be compared."
    base = part.baseline.label
    best = max(speeds, key=lambda row: row.ratios[SAMPLES.key].value)
    if all(row.ratios[SAMPLES.key].decision is Decision.single for row in speeds):
        found = best.ratios[SAMPLES.key]
        what = f"none was faster than {base}"
        if found.value > 1:
            what = f"highest: {best.variant.label} with {times(found)} the speed of {base}"
            other = best.quality.parity is Parity.other
            what += f", {loss_words(best.quality)}" if other else ""
        return f"Too few repeats to tell differences from chance ({what}); {more_repeats}."
    faster = [r for r in speeds if r.ratios[SAMPLES.key].decision is Decision.higher]
    sound = [r for r in faster if r.quality.parity is not Parity.worse]
    if not faster:
        highest = in_words(best.ratios[SAMPLES.key])
        return (
            f"Nothing is shown to be faster than {base}: "
            f"the highest speed is that of {best.variant.label}, {highest}."
        )
    if not sound:
        top = max(faster, key=lambda row: row.ratios[SAMPLES.key].value)
        return (
            f"Nothing is faster than {base} at no worse a loss: {top.variant.label} has "
            f"{times(top.ratios[SAMPLES.key])} its speed, and {loss_words(top.quality)}."
        )
    top = max(sound, key=lambda row: row.ratios[SAMPLES.key].value)
    value = top.ratios[SAMPLES.key].value
    higher = [r for r in speeds if r not in faster and r.ratios[SAMPLES.key].value > value]
    return _praise(top, sound, higher, base)


def _praise(top: Row, sound: Sequence[Row], undecided: Sequence[Row], base: str) -> str:
    which = "the fastest that is resolved" if undecided else "fastest"
    speed = times(top.ratios[SAMPLES.key])
    text = f"{top.variant.label} is {which}: {speed} the samples/s of {base}"
    if PEAK.key in top.ratios:
        text += f" at {times(top.ratios[PEAK.key])} its peak memory"
    text += f"; {loss_words(top.quality)}."
    peers = [row.variant.label for row in sound if row is not top and not _beats(top, row)]
    if peers:
        text += f" Not told apart from it: {_first_of(peers)}."
    if undecided:
        text += f" Higher, but not resolved: {_first_of([r.variant.label for r in undecided])}."
    return text


def _beats(top: Row, other: Row) -> bool:
    found = ratio(other.variant.sample(SAMPLES.key), top.variant.sample(SAMPLES.key))
    return found is not None and found.decision is Decision.higher


def _smallest(part: OneMachine, others: Sequence[Row]) -> str:
    known = [
        row for row in others if PEAK.key in row.ratios and row.quality.parity is not Parity.worse
    ]
    if not known or part.baseline is None:
        return ""
    least = min(known, key=lambda row: row.ratios[PEAK.key].value)
    memory = least.ratios[PEAK.key]
    if memory.value >= 1:
        return f"Nothing takes less memory than {part.baseline.label}."
    text = f"{least.variant.label} takes least memory: {times(memory)} the peak of the baseline"
    speed: Ratio | None = least.ratios.get(SAMPLES.key)
    if speed is not None:
        text += f", at {times(speed)} its speed"
    repeats = format_number(memory.n, "repeat")
    return f"{text} ({repeats}; {loss_words(least.quality)})."
