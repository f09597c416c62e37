"""How ratios and losses are told: one wording for terminal, page, Markdown and W&B."""

from eke.results.report.compare.parity import MARGIN, Parity, Quality
from eke.results.report.compare.statistics import SAME, Decision, Ratio

PERCENT = f"{100 * MARGIN:.0f} %"
"""The margin of losses, in words."""


def times(ratio: Ratio) -> str:
    """`2.31x (2.27 to 2.35)`; without an interval where there are too few repeats."""
    text = f"{_digits(ratio.value)}x"
    if ratio.low is None or ratio.high is None:
        return text
    low, high = _digits(ratio.low), _digits(ratio.high)
    return text if low == high else f"{text} ({low} to {high})"


def in_words(ratio: Ratio) -> str:
    """A ratio with what it says: `not resolved: 1.03x (0.99 to 1.07)`."""
    text = times(ratio)
    if ratio.decision is Decision.same:
        return f"the same within {100 * SAME:.0f} %: {text}"
    if ratio.decision is Decision.hint:
        return f"a hint, not resolved among so many comparisons: {text}"
    if ratio.decision in (Decision.higher, Decision.lower):
        return text
    return f"{ratio.decision.value}: {text}"


def mark(ratio: Ratio) -> str:
    """The decision as a sign beside a number."""
    return {
        Decision.higher: "+",
        Decision.lower: "-",
        Decision.same: "=",
        Decision.hint: "?",
        Decision.unresolved: "~",
        Decision.single: "",
    }[ratio.decision]


MARKS = (
    "+ higher, - lower, = the same within 2 %, ~ not resolved, "
    "? a hint that does not hold among so many comparisons, no sign: too few repeats"
)


def loss_words(quality: Quality) -> str:
    """The loss beside the baseline's, as the end of a sentence."""
    which = "eval loss" if quality.measure.startswith("loss.eval") else "train loss"
    if quality.parity is Parity.unknown:
        return "no loss to compare"
    if quality.parity is Parity.other:
        return f"losses not comparable ({quality.why})"
    if quality.parity is Parity.baseline:
        return "the baseline"
    change = f"{100 * (quality.difference or 0.0):+.2g} %"
    if quality.parity is Parity.equal:
        return f"{which} equal"
    if quality.parity is Parity.within:
        return f"{which} within {PERCENT} ({change})"
    if quality.parity is Parity.unresolved and quality.why:
        return f"{which} not compared: {quality.why} ({change})"
    if quality.parity is Parity.unresolved:
        return f"{which} not resolved within {PERCENT} ({change})"
    return f"{which} {quality.parity.value} ({change})"


def _digits(value: float) -> str:
    """Three digits that count, and never an exponent in the usual range."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"
