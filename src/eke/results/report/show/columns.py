"""The columns of the main table, once for terminal, page and Markdown: numbers cannot disagree."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from eke.common.units import format_bytes, format_count, format_seconds
from eke.plan.record import Outcome
from eke.results.report.compare import Comparison, Row
from eke.results.report.compare.measures import (
    DEVICE_HOURS,
    EVAL_LOSS,
    MFU,
    PEAK,
    RESERVED,
    SAMPLES,
    STEP,
    TOKENS,
    TRAIN_LOSS,
    Measure,
)
from eke.results.report.compare.parity import Parity
from eke.results.report.compare.statistics import Ratio
from eke.results.report.compare.wording import mark, times

CHARS_FOR_NAMES = 60
"""A label longer than this is cut in tables; the page's tooltips and the files have it whole."""


FACTORS_IN_LABEL = 3
"""With more, a label is cut, and columns say the rest."""

MAX_LISTED = 6
"""Configurations named for one reason; the rest is counted."""


@dataclass(frozen=True)
class Column:
    """One quantity of every row, as text and as a number to sort by."""

    key: str
    title: str
    text: Callable[[Row], str]
    value: Callable[[Row], float | None]
    is_number: bool = True
    is_wide: bool = False
    """Left out where there is little room: in a terminal, and in Markdown."""
    help: str = ""
    brief: Callable[[Row], str] | None = None
    """A shorter text, where `text` has no room."""


def columns(comparison: Comparison, wide: bool = True, most: int = CHARS_FOR_NAMES) -> list[Column]:
    """Those in which at least one row has something to say.

    Args:
        comparison: what is shown.
        wide: there is room for all.
        most: characters of a label.
    """
    rows = comparison.rows
    found = [*_names(comparison, most), *_numbers(comparison), *_factors(comparison)]
    kept = [c for c in found if wide or not c.is_wide]
    return [c for c in kept if c.key in ("label", "outcome") or any(c.text(r) for r in rows)]


def _names(comparison: Comparison, most: int) -> list[Column]:
    several = len(comparison.machines) > 1
    whole = list(dict.fromkeys(row.variant.label for row in comparison.rows))
    title, told = _keys_apart(whole, most)
    short = dict(zip(whole, shortened(told, most), strict=True))

    def label(row: Row) -> str:
        cut = short[row.variant.label]
        return f"{cut} (baseline)" if row.is_baseline else cut

    names = [Column("label", title, label, _unsorted, False)]
    if several:
        names.append(Column("machine", "machine", lambda r: r.variant.machine, _unsorted, False))
    return names


def _keys_apart(labels: Sequence[str], most: int) -> tuple[str, Sequence[str]]:
    """Labels that are too long as values alone, and their keys as a title, if that is enough."""
    words = [[word.partition("=") for word in label.split(" ")] for label in labels]
    keys = list(dict.fromkeys(key for each in words for key, _, _ in each))
    found = [{key: value for key, _, value in each} for each in words]
    values = [" ".join(each.get(key) or "-" for key in keys) for each in found]
    title = ", ".join(key.rpartition(".")[2] for key in keys)
    is_typed = all(equals for each in words for _, equals, _ in each)
    if max(map(len, labels)) <= most or not is_typed or max(map(len, [title, *values])) > most:
        return "configuration", labels
    return title, values


def _factors(comparison: Comparison) -> list[Column]:
    """Behind the numbers, which are what is looked for first, also on a phone.

    A label that is made of the factors says them; a row's name does not.
    """
    has_rows = any(row.variant.row for row in comparison.rows)
    if not has_rows and len(comparison.factors) <= FACTORS_IN_LABEL:
        return []
    return [
        Column(f"factor {key}", key, _factor(key), _unsorted, False, is_wide=True)
        for key in comparison.factors
    ]


def _numbers(comparison: Comparison) -> list[Column]:
    return [
        Column("n", "n", lambda r: str(len(r.variant.records)), lambda r: len(r.variant.records),
               help="repeats that ended well"),
        Column("outcome", "outcome", outcome_text, _unsorted, False),
        _measure(SAMPLES, lambda v: f"{v:.4g}", help="over steady steps"),
        _ratio(SAMPLES, "x speed", "samples/s over the baseline's, with its 95 % interval"),
        _measure(PEAK, format_bytes, help="highest sum of tensors"),
        _ratio(PEAK, "x memory", "peak memory over the baseline's"),
        _measure(RESERVED, format_bytes, wide=True, help="what PyTorch holds of the device"),
        _measure(STEP, format_seconds, wide=True, help="median of an optimizer step after warm-up"),
        _measure(TOKENS, format_count, wide=True, help="tokens that are not padding"),
        _measure(MFU, lambda v: f"{v:.1%}", help="model FLOP/s over the device's datasheet peak"),
        _measure(EVAL_LOSS, lambda v: f"{v:.4f}"),
        *([] if _has(comparison, EVAL_LOSS) else [_measure(TRAIN_LOSS, lambda v: f"{v:.4f}")]),
        Column("parity", "loss", _parity, lambda r: r.quality.difference, False,
               help="beside the baseline's, at equal samples",
               brief=lambda r: _parity(r).partition(" (")[0]),
        Column("equal_time", "loss at equal time", _at_equal_time,
               lambda r: r.loss_at_equal_time, is_wide=True,
               help="training loss when the shortest run ended"),
        Column("prediction", "predicted memory", lambda r: _signed(r.prediction_error),
               lambda r: r.prediction_error, is_wide=True,
               help="predicted over measured peak of tensors, less one"),
        Column("step_prediction", "predicted step", lambda r: _signed(r.step_prediction_error),
               lambda r: r.step_prediction_error, is_wide=True,
               help="predicted over measured median of an optimizer step, less one"),
        _measure(DEVICE_HOURS, lambda v: f"{v:.3g}", wide=True, help="training steps only"),
        Column("front", "front", lambda r: "*" if r.on_front else "", lambda r: float(r.on_front),
               False, help="nothing else is both smaller and faster"),
    ]  # fmt: skip


def outcome_text(row: Row) -> str:
    """How the repeats ended: `ok`, or `2 ok, 1 oom`."""
    outcomes = row.variant.outcomes
    if len(outcomes) == 1:
        return next(iter(outcomes))
    return ", ".join(f"{count} {name}" for name, count in outcomes.items())


def reasons(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Outcome, configurations and why, of all that did not end well; one line for each reason."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for entry in row.variant.entries:
            if entry.outcome != Outcome.ok.name:
                found.setdefault((entry.outcome, entry.reason), {})[row.variant.label] = None
    return [(outcome, listed(list(labels)), why) for (outcome, why), labels in found.items()]


def listed(labels: Sequence[str]) -> str:
    """The first few configurations, and how many more there are."""
    more = f"; and {len(labels) - MAX_LISTED} more" if len(labels) > MAX_LISTED else ""
    return "; ".join(labels[:MAX_LISTED]) + more


def _unsorted(_: Row) -> None:
    """Sorted by its text."""


def shortened(labels: Sequence[str], most: int = CHARS_FOR_NAMES) -> list[str]:
    """Labels cut to a length; those that begin alike, from the word in which they differ.

    Args:
        labels: all different.
        most: characters of each.
    """
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(label[: most - 1], []).append(label)
    short: dict[str, str] = {}
    for alike in groups.values():
        short.update(zip(alike, _cut(alike, most), strict=True))
    told = Counter(short.values())
    for number, label in enumerate(labels, 1):
        if told[short[label]] > 1:  # what sets two groups apart was cut from both
            short[label] = f"{number}: {label}"[: most - 1] + "…"
    return [short[label] for label in labels]


def _cut(alike: Sequence[str], most: int) -> list[str]:
    """Labels whose first characters are the same."""
    if len(alike) == 1:
        (label,) = alike
        return [label if len(label) <= most else label[: most - 1] + "…"]
    common = next(n for n, seen in enumerate(zip_longest(*alike)) if len(set(seen)) > 1)
    start = alike[0][:common].rfind(" ") + 1
    if not start:  # one long word
        return [label if len(label) <= most else "…" + label[1 - most :] for label in alike]
    rests = shortened([label[start:] for label in alike], most)
    return ["… " + rest.removeprefix("… ") for rest in rests]


def _factor(key: str) -> Callable[[Row], str]:
    return lambda row: row.variant.factors.get(key, "")


def _measure(
    measure: Measure, text: Callable[[float], str], wide: bool = False, help: str = ""
) -> Column:
    def show(row: Row) -> str:
        found = row.estimates.get(measure.key)
        return text(found.value) if found else ""

    def value(row: Row) -> float | None:
        found = row.estimates.get(measure.key)
        return found.value if found else None

    return Column(measure.key, measure.title, show, value, True, wide, help or measure.unit)


def _ratio(measure: Measure, title: str, help: str) -> Column:
    def show(row: Row, brief: bool = False) -> str:
        found = row.ratios.get(measure.key)
        if found is None:
            return "1x" if row.is_baseline and measure.key in row.estimates else ""
        return told(found, brief)

    def shorter(row: Row) -> str:
        return show(row, brief=True)

    def value(row: Row) -> float | None:
        found = row.ratios.get(measure.key)
        return found.value if found else 1.0 if row.is_baseline else None

    return Column(f"ratio {measure.key}", title, show, value, True, False, help, shorter)


def told(ratio: Ratio | None, brief: bool = False) -> str:
    """A ratio and its sign, with its interval unless `brief`."""
    if ratio is None:
        return ""
    text = times(ratio).partition(" (")[0] if brief else times(ratio)
    return f"{text} {mark(ratio)}".rstrip()


def _parity(row: Row) -> str:
    quality = row.quality
    if quality.parity in (Parity.unknown, Parity.baseline):
        return ""
    if quality.difference is None or quality.parity is Parity.equal:
        return str(quality.parity.value)
    told = f"not compared: {quality.why}" if quality.why else quality.parity.value
    return f"{told} ({100 * quality.difference:+.2g} %)"


def _at_equal_time(row: Row) -> str:
    return "" if row.loss_at_equal_time is None else f"{row.loss_at_equal_time:.4f}"


def _signed(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def _has(comparison: Comparison, measure: Measure) -> bool:
    return any(measure.key in row.estimates for row in comparison.rows)
