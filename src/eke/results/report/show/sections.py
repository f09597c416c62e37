"""Tables of a report as plain text, shared by all formats.

The columns of the main table, once for terminal, page and Markdown: numbers cannot disagree.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from eke.common.paths import program
from eke.common.text import format_bytes, format_count, format_number, format_seconds
from eke.plan.record import Outcome, Record, table
from eke.results.report.compare import Comparison, ComparisonRow, OneMachine
from eke.results.report.compare.comparison import SIGNS, times
from eke.results.report.compare.effects import PublishedMatch
from eke.results.report.compare.load_records import NOT_RUN
from eke.results.report.compare.losses import Parity
from eke.results.report.compare.measures import (
    DEVICE_HOURS,
    EVAL_LOSS,
    METRIC,
    MFU,
    PEAK,
    RESERVED,
    SAMPLES,
    SHOWN_METRICS,
    STEP,
    TOKENS,
    TRAIN_LOSS,
    Measure,
    metric_of,
)
from eke.results.report.compare.statistics import Ratio

CHARS_FOR_NAMES = 60
"""Maximum length of a label in tables; tooltips and files have the full label."""

FACTORS_IN_LABEL = 3
"""Limit above which a label is cut and columns show the rest."""

MAX_LISTED = 6
"""Configurations listed per reason; the others are counted."""


@dataclass(frozen=True)
class Column:
    """One column: text and sort key of every row."""

    key: str
    title: str
    text: Callable[[ComparisonRow], str]
    value: Callable[[ComparisonRow], float | None] = lambda _: None
    """None for columns sorted by text."""
    is_number: bool = False
    is_wide: bool = False
    """Whether narrow formats (terminal, Markdown) omit it."""
    help: str = ""


def columns(comparison: Comparison, wide: bool = True, most: int = CHARS_FOR_NAMES) -> list[Column]:
    """Columns with a value in at least one row; a label has at most `most` characters."""
    rows = comparison.rows
    found = [*_names(comparison, most), *_numbers(comparison), *_factors(comparison)]
    kept = [c for c in found if wide or not c.is_wide]
    return [c for c in kept if c.key in ("label", "outcome") or any(c.text(r) for r in rows)]


def _names(comparison: Comparison, most: int) -> list[Column]:
    whole = list(dict.fromkeys(row.variant.label for row in comparison.rows))
    title, values = _keys_apart(whole, most)
    short = dict(zip(whole, shortened(values, most), strict=True))

    def label(row: ComparisonRow) -> str:
        cut = short[row.variant.label]
        return f"{cut} (baseline)" if row.is_baseline else cut

    names = [Column("label", title, label)]
    if len(comparison.machines) > 1:
        names.append(Column("machine", "machine", lambda r: r.variant.machine))
    return names


def _keys_apart(labels: Sequence[str], most: int) -> tuple[str, Sequence[str]]:
    """Replace long labels by their values, with the keys as title, if that is short enough."""
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
    """Columns of factors, after the numbers, which matter most.

    A label that is made of the factors says them; a row's name does not.
    """
    has_rows = any(row.variant.row for row in comparison.rows)
    if not has_rows and len(comparison.factors) <= FACTORS_IN_LABEL:
        return []
    return [
        Column(f"factor {key}", key, partial(_factor, key), is_wide=True)
        for key in comparison.factors
    ]


def _factor(key: str, row: ComparisonRow) -> str:
    return row.variant.factors.get(key, "")


def _numbers(comparison: Comparison) -> list[Column]:
    has_eval = any(EVAL_LOSS.key in row.estimates for row in comparison.rows)
    return [
        _number("n", "n", lambda r: len(r.variant.records), str, help="repeats that ended well"),
        Column("outcome", "outcome", outcome_text),
        _measure(SAMPLES, lambda v: f"{v:.4g}", help="over steady steps"),
        _ratio(SAMPLES, "x speed", "samples/s over the baseline's, with its interval"),
        _measure(PEAK, format_bytes, help="highest sum of tensors"),
        _ratio(PEAK, "x memory", "peak memory over the baseline's"),
        _measure(RESERVED, format_bytes, wide=True, help="what PyTorch holds of the device"),
        _measure(STEP, format_seconds, wide=True, help="median of an optimizer step after warm-up"),
        _measure(TOKENS, format_count, wide=True, help="tokens that are not padding"),
        _measure(MFU, lambda v: f"{v:.1%}", help="model FLOP/s over the device's datasheet peak"),
        _measure(EVAL_LOSS, lambda v: f"{v:.4f}"),
        *_metrics(comparison),
        *([] if has_eval else [_measure(TRAIN_LOSS, lambda v: f"{v:.4f}")]),
        Column("parity", comparison.metric or "loss", _parity, lambda r: r.quality.estimate,
               help="relative to the baseline, at equal samples"),
        _number("equal_time", "loss at equal time", lambda r: r.loss_at_equal_time,
                lambda v: f"{v:.4f}", True, "training loss when the shortest run ended"),
        _number("prediction", "predicted memory", lambda r: r.prediction_error, _signed, True,
                "predicted over measured peak of tensors, less one"),
        _number("step_prediction", "predicted step", lambda r: r.step_prediction_error, _signed,
                True, "predicted over measured median of an optimizer step, less one"),
        _measure(DEVICE_HOURS, lambda v: f"{v:.3g}", wide=True, help="training steps only"),
        Column("front", "front", lambda r: "*" if r.on_front else "", lambda r: float(r.on_front),
               help="nothing else is both smaller and faster"),
    ]  # fmt: skip


def _metrics(comparison: Comparison) -> list[Column]:
    """Of every metric that a run has; narrow terminals have room for few."""
    keys = dict.fromkeys(k for row in comparison.rows for k in row.estimates if METRIC in k)
    shown = {f"{METRIC}{name}" for name in (*SHOWN_METRICS, comparison.metric)}
    text = "{:.4f}".format
    return [_measure(metric_of(key), text, wide=key not in shown) for key in keys]


def outcome_text(row: ComparisonRow) -> str:
    """Outcomes of the repeats: `ok`, or `2 ok, 1 oom`."""
    outcomes = row.variant.outcomes
    counted = [f"{count} {name}" for name, count in outcomes.items()]
    return ", ".join(outcomes if len(outcomes) == 1 else counted)


def _by_reason(found: Iterable[tuple[tuple[str, ...], str]]) -> dict[tuple[str, ...], str]:
    labels: dict[tuple[str, ...], dict[str, None]] = {}
    for reason, label in found:
        labels.setdefault(reason, {})[label] = None
    named = {}
    for reason, each in labels.items():
        more = [f"and {len(each) - MAX_LISTED} more"] if len(each) > MAX_LISTED else []
        named[reason] = "; ".join([*list(each)[:MAX_LISTED], *more])
    return named


def shortened(labels: Sequence[str], most: int = CHARS_FOR_NAMES) -> list[str]:
    """Shorten different labels; those that begin alike start at the first differing word."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(label[: most - 1], []).append(label)
    short: dict[str, str] = {}
    for alike in groups.values():
        short.update(zip(alike, _cut(alike, most), strict=True))
    counts = Counter(short.values())
    for number, label in enumerate(labels, 1):
        if counts[short[label]] > 1:  # the difference was cut
            short[label] = f"{number}: {label}"[: most - 1] + "…"
    return [short[label] for label in labels]


def _cut(alike: Sequence[str], most: int) -> list[str]:
    """Shorten labels with a common beginning."""
    if len(alike) == 1:
        (label,) = alike
        return [label if len(label) <= most else label[: most - 1] + "…"]
    common = next(n for n, seen in enumerate(zip_longest(*alike)) if len(set(seen)) > 1)
    start = alike[0][:common].rfind(" ") + 1
    if not start:  # one long word
        return [label if len(label) <= most else "…" + label[1 - most :] for label in alike]
    rests = shortened([label[start:] for label in alike], most)
    return ["… " + rest.removeprefix("… ") for rest in rests]


def _number(
    key: str,
    title: str,
    value: Callable[[ComparisonRow], float | None],
    text: Callable[[float], str],
    wide: bool = False,
    help: str = "",
) -> Column:
    def show(row: ComparisonRow) -> str:
        found = value(row)
        return "" if found is None else text(found)

    return Column(key, title, show, value, True, wide, help)


def _measure(
    measure: Measure, text: Callable[[float], str], wide: bool = False, help: str = ""
) -> Column:
    def value(row: ComparisonRow) -> float | None:
        found = row.estimates.get(measure.key)
        return found.value if found else None

    return _number(measure.key, measure.title, value, text, wide, help or measure.unit)


def _ratio(measure: Measure, title: str, help: str) -> Column:
    def show(row: ComparisonRow) -> str:
        is_base = row.is_baseline and measure.key in row.estimates
        return "1x" if is_base else ratio_text(row.ratios.get(measure.key))

    def value(row: ComparisonRow) -> float | None:
        found = row.ratios.get(measure.key)
        return found.value if found else 1.0 if row.is_baseline else None

    return Column(f"ratio {measure.key}", title, show, value, True, False, help)


def ratio_text(ratio: Ratio | None) -> str:
    """Ratio with its interval and sign."""
    return f"{times(ratio)} {SIGNS[ratio.decision]}".rstrip() if ratio else ""


def shorter(text: str) -> str:
    """A number without its interval or difference, which is in parentheses."""
    return re.sub(r" \(.*?\)", "", text)


def _parity(row: ComparisonRow) -> str:
    quality = row.quality
    if quality.parity in (Parity.unknown, Parity.baseline):
        return ""
    shown = "" if quality.parity is Parity.equal else quality.change
    return f"{quality.word} ({shown})" if shown else quality.word


def _signed(error: float) -> str:
    return f"{100 * error:+.1f} %"


@dataclass(frozen=True)
class Section:
    """A titled table of text."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


MAX_REASONS = 100
"""Maximum runs listed individually."""


def sections(comparison: Comparison, repeats: bool = False, brief: bool = False) -> list[Section]:
    """All sections with content; `brief`: ratios without intervals."""
    found = [_outcomes(comparison), _unmeasured(comparison)]
    for part in comparison.machines:
        where = comparison.suffix(part)
        own = [_effects(part), _alone(comparison, part), _ladder(part)]
        if brief:  # the last two are the ratios
            own = [
                replace(s, rows=tuple((*r[:-2], *map(shorter, r[-2:])) for r in s.rows))
                for s in own
            ]
        own += map(_published, part.published)
        found += [replace(section, title=f"{section.title}{where}") for section in own]
    found += [_classes(row) for row in comparison.rows if row.variant.records][:MOST_MATRICES]
    found += [_sources(row) for row in comparison.rows if row.variant.records][:MOST_MATRICES]
    found += [_runs(comparison)] if repeats else []
    return [section for section in found if section.rows]


def provenance(comparison: Comparison) -> Section:
    """Provenance: commands, machines and versions."""
    # The trials of `eke fit` are a sweep, too.
    programs = ["eke" if command[0] == "fit" else program() for command in comparison.commands]
    rows = [
        ("command", " ".join([name, *command]))
        for name, command in zip(programs, comparison.commands, strict=True)
    ]
    for part in comparison.machines:
        facts = dict(part.machine.facts)
        where = f"machine {part.machine.letter}"
        device = f"{facts.pop('device_count', '1')} x {facts.pop('device', '?')}"
        rows.append((where, f"{device}; {', '.join(part.machine.hosts)}"))
        facts.pop("eke_source", None)
        rows.append((f"{where}: software", ", ".join(f"{k} {v}" for k, v in facts.items())))
        rows += [(f"{where}: {k}", v) for k, v in _environment(comparison, part).items()]
    shared = " ".join(f"{key}={value}" for key, value in comparison.shared.items())
    rows += [("all have", shared)] if shared else []
    rows.append(("records", ", ".join(comparison.folders)))
    return Section("Where this comes from", "", ("what", "which"), tuple(rows))


def _environment(comparison: Comparison, part: OneMachine) -> dict[str, str]:
    entries = [entry for row in comparison.rows_of(part) for entry in row.variant.entries]
    records = [entry.record for entry in entries if entry.record]
    times_run = sorted(str(r.environment.get("time", "")) for r in records)
    states = [table(r.environment, "git") for r in records]
    commits = {str(state.get("commit", ""))[:12] for state in states} - {""}
    dirty = " (changed)" if any(state.get("dirty") for state in states) else ""
    drivers = {str(r.environment.get("driver", "")) for r in records} - {""}
    facts = {
        "measured": f"{times_run[0]} to {times_run[-1]}" if times_run else "",
        "commit": ", ".join(sorted(commits)) + dirty,
        "driver": ", ".join(sorted(drivers)),
    }
    return {key: value for key, value in facts.items() if value}


def _outcomes(comparison: Comparison) -> Section:
    found = _by_reason(
        ((entry.outcome, entry.reason), row.variant.label)
        for row in comparison.rows
        for entry in row.variant.entries
        if entry.outcome != Outcome.ok.name
    )
    missing = {NOT_RUN: "the same command runs what is missing"}
    rows = [(how, who, why or missing.get(how, "")) for (how, why), who in found.items()]
    shown = rows[:MAX_REASONS]
    if len(rows) > MAX_REASONS:
        shown.append(("...", f"{len(rows) - MAX_REASONS} more reasons", "report.json has all"))
    head = ("outcome", "configurations", "why")
    return Section("What did not end well", "", head, tuple(shown))


def _unmeasured(comparison: Comparison) -> Section:
    found = _by_reason(
        ((_no_speed(row.variant.records[0]),), row.variant.label)
        for row in comparison.rows
        if row.variant.records and SAMPLES.key not in row.estimates
    )
    rows = tuple((who, *why) for why, who in found.items())
    return Section("No speed", "", ("configurations", "why"), rows)


def _no_speed(record: Record) -> str:
    if "cuts" in record.effective:
        return "its ranks or micro-batches changed"
    if record.shared_device:
        return "another process used its device meanwhile"
    warm_up = table(record.config, "train").get("timing_warmup_steps", "?")
    why = f"the first {warm_up} of each attempt are warm-up (train.timing_warmup_steps)"
    return f"none of {record.steps_done} steps was timed: {why}"


def _speed_and_memory(ratios: Mapping[str, Ratio]) -> tuple[str, str]:
    return ratio_text(ratios.get(SAMPLES.key)), ratio_text(ratios.get(PEAK.key))


def _effects(part: OneMachine) -> Section:
    rows = tuple(
        (
            f"{each.factor}={each.value}",
            f"{each.factor}={each.reference}" if each.reference else "without",
            str(each.pairs),
            *_speed_and_memory(each.ratios),
        )
        for each in part.effects
    )
    note = "Geometric mean over all pairs that differ in nothing else. The interval of three "
    note += "pairs and more holds how much the effect varies between them."
    head = ("technique", "instead of", "pairs", "x speed", "x memory")
    return Section("What each technique does", note, head, rows)


def _alone(comparison: Comparison, part: OneMachine) -> Section:
    rows: list[tuple[str, ...]] = [
        (row.variant.row or change, change, *_speed_and_memory(row.ratios))
        for row, change in part.alone
    ]
    head: tuple[str, ...] = ("alone", "changes", "x speed", "x memory")
    if all(name == change for name, change, *_ in rows):
        head, rows = (head[0], *head[2:]), [(name, *rest) for name, _, *rest in rows]
    # With a single factor, the main table shows the same.
    shown = tuple(rows) if len(comparison.factors) > 1 else ()
    return Section("Each technique alone", "", head, shown)


def _ladder(part: OneMachine) -> Section:
    rows = tuple(
        (row.variant.label, f"+ {added}", *_speed_and_memory(row.ratios))
        for row, added in part.ladder
    )
    return Section("One upon another", "", ("cumulative", "adds", "x speed", "x memory"), rows)


def _published(each: PublishedMatch) -> Section:
    rows = []
    for row in each.rows:
        cells = [row.row]
        for key in (SAMPLES.key, PEAK.key):
            here, there = row.measured[key], row.published[key]
            cells += [times(here) if here else "", "" if there is None else f"{there:.2f}x"]
        rows.append(tuple(cells))
    table = each.table
    note = f"Published: {table.hardware}, {table.date}. {table.notes} {table.source}"
    head = (f"row, times {table.baseline}", "x speed here", "published", "x memory here",
            "published")  # fmt: skip
    return Section(f"Compared with published results: {table.title}", note, head, tuple(rows))


MOST_MATRICES, MOST_CLASSES = 6, 12
"""Configurations with a confusion matrix, and classes of one, that a report shows."""


def _classes(row: ComparisonRow) -> Section:
    """What a classifier's first run predicted for the samples of each class."""
    title = f"Classes: {row.variant.label}"
    try:
        head, rows = _confusion(row.variant.records[0].classes)
    except (TypeError, ValueError, LookupError):  # none, another version's, or another user's
        return Section(title, "", (), ())
    shown = rows if len(rows) <= MOST_CLASSES and all(len(r) == len(head) for r in rows) else ()
    note = "of the evaluation of the run's model; samples by predicted class"
    return Section(title, note, head, shown)


def _confusion(found: dict[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    names, matrix = found["names"], found.get("confusion")  # sets of classes have no matrix
    head = ("right class", *(f"as {name}" for name in names if matrix), *_OF_A_CLASS)
    rows = [
        (str(names[n]), *map(str, counts), *(f"{found[k][n]:.4f}" for k in _OF_A_CLASS))
        for n, counts in enumerate(matrix or [()] * len(names))
    ]
    return head, tuple(rows)


_OF_A_CLASS = ("precision", "recall", "f1")


def _sources(row: ComparisonRow) -> Section:
    """What the first run of a configuration drew from each source of a mix."""
    head, rows = ("source", "samples", "epochs", "training loss", "evaluation loss"), []
    for name, found in row.variant.records[0].sources.items():
        keys = ("samples", "epochs", "train_loss", "eval_loss")
        values = (found.get(key, math.nan) for key in keys)
        rows.append((name, *(f"{value:.5g}" for value in values)))
    note = "samples trained, the last step and the evaluation"
    return Section(f"Sources: {row.variant.label}", note, head, tuple(rows))


def _runs(comparison: Comparison) -> Section:
    rows = []
    for row, entry in ((each, entry) for each in comparison.rows for entry in each.variant.entries):
        speed, peak = entry.measures.get(SAMPLES.key), entry.measures.get(PEAK.key)
        numbers = f"{speed:.4g}" if speed else "", format_bytes(peak) if peak else ""
        folder = entry.folder.name if entry.folder else ""
        rows.append((row.variant.label, *map(str, entry.repeat), entry.outcome, *numbers, folder))
    head = ("configuration", "seed", "repeat", "outcome", "samples/s", "peak memory", "run")
    return Section("Every run", format_number(len(rows), "run"), head, tuple(rows))


def count_outcomes(comparison: Comparison) -> str:
    """Number of runs and configurations by outcome."""
    totals: Counter[str] = Counter()
    for row in comparison.rows:
        totals.update(row.variant.outcomes)
    parts = ", ".join(f"{count} {name}" for name, count in totals.items())
    runs = format_number(totals.total(), "run")
    return f"{runs} of {format_number(len(comparison.rows), 'configuration')}: {parts}"
