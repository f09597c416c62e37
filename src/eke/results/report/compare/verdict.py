"""The answer in a sentence: what pays most, by how much, at what cost, and how sure that is."""

from collections.abc import Sequence

from eke.common.paths import program
from eke.common.units import format_number
from eke.results.report.compare.claims import Claim, Kind, claims
from eke.results.report.compare.comparison import Comparison
from eke.results.report.compare.measures import PEAK, SAMPLES
from eke.results.report.compare.parity import ANOTHER_TRAINING, Parity
from eke.results.report.compare.statistics import MIN_REPEATS
from eke.results.report.compare.wording import in_words, loss_words, times

NAMED = 3
"""Configurations whose names a sentence holds."""

OF_SOUND = " of those whose loss is not shown to be higher"


def verdict(comparison: Comparison) -> list[str]:
    """Every claim in words; those that add to another one follow it in its line."""
    lines: list[str] = []
    for claim in claims(comparison):
        text = told(claim, _more_repeats(comparison))
        if claim.kind in (Kind.ahead, Kind.peers):
            lines[-1] += f" {text}"
        elif claim.part is not None and len(comparison.machines) > 1:
            lines.append(f"Machine {claim.part.machine.letter}: {text}")
        else:
            lines.append(text)
    return lines


def _more_repeats(comparison: Comparison) -> str:
    """How to come by more of them: runs typed alone and `eke fit` refuse `sweep.repeats`."""
    repeats = f"sweep.repeats={MIN_REPEATS}"
    if any(command[0] != "fit" for command in comparison.commands):
        return f"{repeats} and the same command measures what is missing"
    return f"{program()} -m with {repeats} runs each {MIN_REPEATS} times"


def told(claim: Claim, more_repeats: str) -> str:
    """A claim in words.

    Args:
        claim: what is claimed.
        more_repeats: how to have them measured.
    """
    names = [row.variant.label for row in claim.rows]
    base = claim.part.baseline.label if claim.part and claim.part.baseline else ""
    if claim.kind is Kind.nothing:
        return "Nothing has ended well yet: there is nothing to compare."
    if claim.kind is Kind.none_well:
        return "No run ended well: there is nothing to compare."
    if claim.kind is Kind.only_one:
        return f"One configuration ended well ({names[0]}): nothing to compare."
    if claim.kind is Kind.no_baseline:
        return "Without a baseline there is nothing to compare with; --baseline names one."
    if claim.kind is Kind.no_speed:
        return "No speed was measured that could be compared."
    if claim.kind is Kind.unquiet:
        return (
            f"The machine was not quiet: speeds of {base}'s own repeats differ by "
            f"{claim.value:.2f}x; more repeats on a quiet machine say more."
        )
    if claim.kind is Kind.other:
        return (
            f"Not compared with {base}: {_first_of(names)} ({ANOTHER_TRAINING}); eke report SWEEP "
            "reads one sweep alone, --baseline compares with another."
        )
    if claim.kind is Kind.peers:
        return f"Not told apart from it: {_first_of(names)}."
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
        return f"Too few repeats to tell differences from chance ({what}); {more_repeats}."
    if claim.kind is Kind.not_better:
        return (
            f"Nothing is shown to be faster than {base}: the highest speed of the others is "
            f"that of {name}, {in_words(ratio)}."
        )
    if claim.kind is Kind.at_worse_loss:
        return (
            f"Nothing is shown to be faster than {base} at no worse a loss: {name} has "
            f"{times(ratio)} its speed, and {loss_words(row.quality)}."
        )
    if claim.kind is Kind.ahead:
        return f"Higher, but not shown to be faster than {base}: {_with_values(claim)}."
    which = "fastest" if claim.is_first else "the fastest that is shown to be faster"
    text = f"{name} is {which}{_among(claim)}: {times(ratio)} the samples/s of {base}"
    if PEAK.key in row.ratios:
        text += f" at {times(row.ratios[PEAK.key])} its peak memory"
    return f"{text}; {loss_words(row.quality)}."


def _of_memory(claim: Claim, base: str) -> str:
    row, ratio = claim.rows[0], claim.ratios[0]
    name = row.variant.label
    if claim.kind is Kind.ahead:
        return f"Lower, but not shown to take less than {base}: {_with_values(claim)}."
    if claim.kind is Kind.not_better:
        return (
            f"Nothing is shown to take less memory than {base}: the lowest peak of the "
            f"others is that of {name}, {in_words(ratio)}."
        )
    if claim.kind is Kind.few and ratio.value >= 1:
        return f"No lower peak of memory than that of {base} was measured."
    which = {
        Kind.few: "has the lowest peak of memory measured",
        Kind.at_worse_loss: "takes less memory, as nothing does at no worse a loss",
        Kind.best: f"takes least memory{'' if claim.is_first else ' that is shown'}{_among(claim)}",
    }[claim.kind]
    text = f"{name} {which}: {times(ratio)} the peak of the baseline"
    if SAMPLES.key in row.ratios:
        text += f", at {times(row.ratios[SAMPLES.key])} its speed"
    return f"{text} ({format_number(ratio.n, 'repeat')}; {loss_words(row.quality)})."


def _among(claim: Claim) -> str:
    return OF_SOUND if claim.is_limited else ""


def _with_values(claim: Claim) -> str:
    named = zip(claim.rows, claim.ratios, strict=True)
    return _first_of([f"{row.variant.label} with {times(ratio)}" for row, ratio in named])


def _first_of(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    return f"{', '.join(labels[:NAMED])}{more}"
