"""The table of configurations that every format shows."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eke.common.text import format_bytes, format_count, format_seconds
from eke.plan.record import Outcome
from eke.results.report.compare import Comparison, ComparisonRow, MachineComparison
from eke.results.report.compare.claims import Kind, find_claims
from eke.results.report.compare.comparison import times
from eke.results.report.compare.losses import Parity
from eke.results.report.compare.measures import (
    DEVICE_HOURS,
    EVAL_LOSS,
    METRIC,
    MFU,
    PEAK,
    RESERVED,
    SAMPLE_SPEED,
    STEP_TIME,
    TOKEN_SPEED,
    TRAIN_LOSS,
    Measure,
    metric_of,
)
from eke.results.report.compare.statistics import Ratio, Significance

CHARS_FOR_NAMES = 60
"""Maximum length of a label in tables. Tooltips and files have the full label."""

_Number = Callable[[ComparisonRow], float | None]


@dataclass(frozen=True)
class Cell:
    """One cell: a ratio or difference with its word, its interval, and the value itself."""

    text: str = ""
    interval: str = ""
    value: str = ""
    tone: str = ""
    """Color: good, bad or empty."""

    def line(self, level: int = 2) -> str:
        """Return the cell in one line. Level 1 omits the value, level 0 also the interval."""
        text = f"{self.text} ({self.interval})" if level and self.interval else self.text
        return ", ".join(filter(None, [self.value if level > 1 else "", text]))


@dataclass(frozen=True)
class Column:
    """One column: cell and sort key of every row."""

    key: str
    title: str
    cell: Callable[[ComparisonRow], Cell]
    value: _Number | None = None
    """Sort key, None for columns sorted by text."""
    help: str = ""
    is_main: bool = False
    """True if every format shows the column."""


@dataclass(frozen=True)
class _Group:
    """The configurations of one table."""

    heading: str
    """Group and machine, empty for a single table."""
    rows: Sequence[ComparisonRow]
    part: MachineComparison | None
    """None for configurations that never ran."""


def ranked(comparison: Comparison, rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return rows in their order, or if there are many: baseline, best, Pareto front, others."""
    best = {claim.rows[0] for claim in find_claims(comparison) if claim.kind is Kind.best}

    def rank(row: ComparisonRow) -> tuple[bool, bool, bool, float]:
        speed = row.ratios.get(row.speed.key)
        value = -speed.value if speed else 0.0
        return not row.is_baseline, row not in best, not row.on_front, value

    return sorted(rows, key=rank) if len(rows) > 8 else list(rows)  # page.js hides more


def groups(comparison: Comparison) -> list[_Group]:
    """Return one group per machine and task. Several groups have one more for unstarted runs."""
    parts = comparison.machines
    if len(parts) < 2:
        return [_Group("", ranked(comparison, comparison.rows), next(iter(parts), None))]
    letters = {part.machine.letter for part in parts}
    found = []
    for part in parts:
        device = f"machine {part.machine.letter}: {part.machine.facts.get('device', '?')}"
        heading = ", ".join(filter(None, [part.work, device if len(letters) > 1 else ""]))
        found.append(_Group(heading, ranked(comparison, part.rows), part))
    rest = [row for row in comparison.rows if not row.variant.machine]
    return [*found, _Group("never started", rest, None)] if rest else found


def columns(
    comparison: Comparison,
    rows: Sequence[ComparisonRow],
    most: int = CHARS_FOR_NAMES,
    with_all: bool = False,
) -> list[Column]:
    """Return the main or all columns that have a value, with labels up to `most` characters."""
    found = _main(comparison, rows, most)
    if with_all:
        found += _numbers(rows)
        found += map(_factor, comparison.factors)
    return [c for c in found if c.key == "label" or any(c.cell(row).line() for row in rows)]


def _main(comparison: Comparison, rows: Sequence[ComparisonRow], most: int) -> list[Column]:
    whole = list(dict.fromkeys(row.variant.label for row in rows))
    short = dict(zip(whole, shortened(whole, most), strict=True))
    decided = _decisions(comparison)
    judged = next((row.quality for row in rows if row.quality.measure), None)
    keys = [judged.measure] if judged else [EVAL_LOSS.key, TRAIN_LOSS.key]

    def label(row: ComparisonRow) -> Cell:
        cut = short[row.variant.label]
        return Cell(f"{cut} (baseline)" if row.is_baseline else cut)

    def decision(row: ComparisonRow) -> Cell:
        found = decided.get(row, "")
        return Cell(found, tone="good" if found and row.quality.parity is not Parity.worse else "")

    loss = Column("loss", judged.name if judged else "loss", lambda row: _loss(keys, row),
                  lambda row: row.quality.estimate, "relative to the baseline, at equal samples",
                  True)  # fmt: skip
    speed = [_compared("speed", lambda row: row.speed), _compared("memory", lambda _: PEAK)]
    is_ratio = any(row.ratios for row in rows)
    return [
        Column("label", "configuration", label, is_main=True),
        *([*speed, loss] if is_ratio else [loss, *speed]),
        Column("decision", "decision", decision, None, "front: the Pareto front", True),
        Column("n", "repeats", _repeats, lambda row: len(row.variant.records),
               "successful repeats", True),
    ]  # fmt: skip


def _decisions(comparison: Comparison) -> dict[ComparisonRow, str]:
    """Return the verdict's and the Pareto front's words about each row."""
    found: dict[ComparisonRow, list[str]] = {row: [] for row in comparison.rows}
    for claim in find_claims(comparison):
        if claim.kind is Kind.best:
            word = "fastest" if claim.measure.is_speed else f"best {claim.measure.title}"
            found[claim.rows[0]].append("least memory" if claim.measure is PEAK else word)
    for row, words in found.items():
        if row.quality.parity is Parity.worse:
            words.append(f"{row.quality.word} {row.quality.name}")
        elif row.on_front and not words:
            words.append("on the front")
    return {row: ", ".join(words) for row, words in found.items()}


def _factor(key: str) -> Column:
    return Column(key, key, lambda row: Cell(row.variant.factors.get(key, "")))


def _numbers(rows: Sequence[ComparisonRow]) -> list[Column]:
    metrics = dict.fromkeys(k for row in rows for k in row.estimates if METRIC in k)
    loss = "{:.4f}".format
    return [
        _measure(SAMPLE_SPEED, "{:.4g}".format, "over steady steps"),
        _measure(STEP_TIME, format_seconds, "median of an optimizer step after warm-up"),
        _measure(TOKEN_SPEED, format_count, "tokens without padding"),
        _measure(MFU, "{:.1%}".format, "model FLOP/s over the device's datasheet peak"),
        _measure(PEAK, format_bytes, "highest sum of tensors"),
        _measure(RESERVED, format_bytes, "device memory reserved by PyTorch"),
        *(_measure(each, loss) for each in (EVAL_LOSS, TRAIN_LOSS, *map(metric_of, metrics))),
        _number("equal_time", "loss at equal time", lambda r: r.loss_at_equal_time, loss,
                "training loss at the end of the shortest run"),
        _number("prediction", "predicted memory", lambda r: r.prediction_error, _signed,
                "predicted over measured peak of tensors, minus 1"),
        _number("step_prediction", "predicted step", lambda r: r.step_prediction_error, _signed,
                "predicted over measured median of an optimizer step, minus 1"),
        _measure(DEVICE_HOURS, "{:.3g}".format, "training steps only"),
    ]  # fmt: skip


def _number(
    key: str, title: str, value: _Number, text: Callable[[float], str], help: str
) -> Column:
    def show(row: ComparisonRow) -> Cell:
        found = value(row)
        return Cell() if found is None else Cell(text(found))

    return Column(key, title, show, value, help)


def _measure(measure: Measure, text: Callable[[float], str], help: str = "") -> Column:
    def value(row: ComparisonRow) -> float | None:
        found = row.estimates.get(measure.key)
        return found.value if found else None

    return _number(measure.key, measure.title, value, text, help or measure.unit)


def _compared(title: str, measure_of: Callable[[ComparisonRow], Measure]) -> Column:
    """Return a column of ratios to the baseline, with the baseline's own value."""

    def show(row: ComparisonRow) -> Cell:
        measure = measure_of(row)
        found, ratio = row.estimates.get(measure.key), row.ratios.get(measure.key)
        value = ""
        if found and measure is PEAK:
            value = format_bytes(found.value)
        elif found:
            rate = f"{found.value:,.0f}" if found.value >= 1000 else f"{found.value:.4g}"
            value = f"{rate} {measure.title}"
        return _ratio_cell(ratio, measure, value) if ratio else Cell(value)

    def value(row: ComparisonRow) -> float | None:
        found = row.ratios.get(measure_of(row).key)
        return found.value if found else 1.0 if row.is_baseline else None

    return Column(f"ratio {title}", title, show, value, "relative to the baseline", True)


_WORDS = {
    Significance.higher: ("faster", "more"), Significance.lower: ("slower", "less"),
    Significance.same: ("same within 2 %",) * 2,
    Significance.unresolved: ("not decided",) * 2, Significance.single: ("too few repeats",) * 2,
}  # fmt: skip
"""Decision -> word about a speed, and about a memory."""


def _ratio_cell(ratio: Ratio, measure: Measure, value: str = "") -> Cell:
    if measure is PEAK and abs(ratio.value - 1) < 1e-9:  # rounding of the mean of equal bytes
        return Cell("equal", value=value)
    number, _, interval = times(ratio).partition(" (")
    word = _WORDS[ratio.decision][measure is PEAK]
    tone = {"faster": "good", "less": "good", "slower": "bad", "more": "bad"}.get(word, "")
    return Cell(f"{number} {word}".rstrip(), interval.rstrip(")"), value, tone)


def ratio_cells(ratios: Mapping[str, Ratio]) -> list[str]:
    """Return the cells of speed and memory in a table of techniques."""
    speed = SAMPLE_SPEED if SAMPLE_SPEED.key in ratios else TOKEN_SPEED  # of packed rows
    both = [(ratios.get(measure.key), measure) for measure in (speed, PEAK)]
    return [_ratio_cell(ratio, measure).line() if ratio else "" for ratio, measure in both]


def _loss(keys: Sequence[str], row: ComparisonRow) -> Cell:
    """Return the cell of the first measured loss or metric, with its difference."""
    quality = row.quality
    found = next((row.estimates[key] for key in keys if key in row.estimates), None)
    value = f"{found.value:.4g}" if found else ""
    if quality.parity in (Parity.unknown, Parity.baseline):
        return Cell(value)
    tone = {Parity.worse: "bad", Parity.better: "good"}.get(quality.parity, "")
    change = [f"{abs(quality.estimate or 0.0):.2g} {quality.unit}".rstrip()] if tone else []
    return Cell(" ".join([*change, quality.word]), quality.interval, value, tone)


def _repeats(row: ComparisonRow) -> Cell:
    """Return the number of successful repeats, and other outcomes: `3`, or `2, 1 oom`."""
    outcomes = row.variant.outcomes
    others = [f"{n} {name}" for name, n in outcomes.items() if name != Outcome.ok.name]
    ok = [str(outcomes[Outcome.ok.name])] if Outcome.ok.name in outcomes else []
    single = list(outcomes) if len(outcomes) == 1 and not ok else [*ok, *others]
    return Cell(", ".join(single), tone="bad" if others else "")


def _signed(error: float) -> str:
    return f"{100 * error:+.1f} %"


def shortened(labels: Sequence[str], most: int = CHARS_FOR_NAMES) -> list[str]:
    """Cut long labels in their middle, and number labels that become equal."""
    half = most // 2
    cut = [each if len(each) <= most else f"{each[: half - 1]}…{each[-half:]}" for each in labels]
    counts = Counter(cut)
    return [f"{number}: {text}" if counts[text] > 1 else text for number, text in enumerate(cut, 1)]
