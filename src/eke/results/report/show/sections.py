"""Text of a report that all formats share: title, smaller tables and provenance."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from eke.common.paths import program
from eke.common.text import format_bytes, format_count, format_number
from eke.plan.record import Outcome, Record, table
from eke.results.report.compare import Comparison, ComparisonRow, OneMachine
from eke.results.report.compare.claims import Kind, find_claims
from eke.results.report.compare.comparison import times
from eke.results.report.compare.effects import PublishedMatch
from eke.results.report.compare.load_records import NOT_RUN
from eke.results.report.compare.measures import PEAK, SAMPLES
from eke.results.report.compare.variants import Machine
from eke.results.report.show.table import ratio_cells

MAX_LISTED = 6
"""Configurations listed per reason; the others are counted."""


def title(comparison: Comparison) -> str:
    """What was compared: `tiny (845 k parameters), python_source (64 tokens), GPU: 4 ... x 3`."""
    records = [row.variant.records[0] for row in comparison.rows if row.variant.records]
    machines = [machine.facts for machine in _machines(comparison)]
    facts = [
        _joined(_name(each, "model", "num_parameters", "parameters") for each in records),
        _joined(_name(each, "data", "seq_len", "tokens") for each in records),
        _joined(f"{m.get('device_count', 1)} x {m.get('device', '?')}" for m in machines),
    ]
    counts = [len(row.variant.records) for row in comparison.rows if row.variant.records]
    rows = format_number(len(comparison.rows), "configuration")
    if not counts:
        return rows
    repeats = " to ".join(dict.fromkeys(map(str, (min(counts), max(counts)))))
    return f"{', '.join(filter(None, facts))}: {rows} x {repeats}"


def _joined(texts: Iterable[str]) -> str:
    """Different texts, two of many."""
    found = list(dict.fromkeys(texts))
    return " / ".join(found if len(found) < 4 else [*found[:2], "..."])


def _name(record: Record, group: str, size: str, unit: str) -> str:
    """Model or data, the end of its path, with its size."""
    keys = table(record.config, group)
    named = next((keys[k] for k in ("name_or_path", "path", "name", "option") if keys.get(k)), "?")
    count = keys.get(size) or table(record.plan, "size").get(size)
    end = str(named).rstrip("/").rpartition("/")[2] or str(named)
    return f"{end} ({format_count(count)} {unit})" if isinstance(count, int) else end


def measured(comparison: Comparison) -> str:
    """When, with which versions, how often: `2026-11-28, torch 2.13.0, commit 1a2b, 12 runs`."""
    machines = _machines(comparison)
    facts = [machine.facts for machine in machines]
    versions = [_joined(f"{k} {each[k]}" for each in facts if k in each) for k in VERSIONS]
    found = [_environment(comparison, machine) for machine in machines]
    commit = _joined(f"commit {each['commit']}" for each in found if "commit" in each)
    days = _joined(each["measured"][:10] for each in found if "measured" in each)
    return ", ".join(filter(None, [days, *versions, commit, count_outcomes(comparison)]))


VERSIONS = ("torch", "transformers")


def winner_command(comparison: Comparison) -> str:
    """Command of the configuration that the verdict names first; empty without one."""
    best = (claim.rows[0] for claim in find_claims(comparison) if claim.kind is Kind.best)
    if (row := next(best, None)) is None:
        return ""
    typed = row.variant.records[0].overrides
    kept = [each for each in typed if not each.startswith(("seed=", "repeat="))]
    return f"{program()} {shlex.join(kept)}".rstrip()


def _by_reason(found: Iterable[tuple[tuple[str, ...], str]]) -> dict[tuple[str, ...], str]:
    labels: dict[tuple[str, ...], dict[str, None]] = {}
    for reason, label in found:
        labels.setdefault(reason, {})[label] = None
    named = {}
    for reason, each in labels.items():
        more = [f"and {len(each) - MAX_LISTED} more"] if len(each) > MAX_LISTED else []
        named[reason] = "; ".join([*list(each)[:MAX_LISTED], *more])
    return named


@dataclass(frozen=True)
class Section:
    """A titled table of text."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


MAX_REASONS = 100
"""Maximum runs listed individually."""


def sections(comparison: Comparison, repeats: bool = False) -> list[Section]:
    """All sections with content but `problems`; `repeats` lists every run."""
    found = []
    for part in comparison.machines:
        own = [_techniques(comparison, part), *map(_published, part.published)]
        where = comparison.suffix(part)
        found += [replace(section, title=f"{section.title}{where}") for section in own]
    found += [_classes(row) for row in comparison.rows if row.variant.records][:MOST_MATRICES]
    found += [_sources(row) for row in comparison.rows if row.variant.records][:MOST_MATRICES]
    found += [_runs(comparison)] if repeats else []
    return [section for section in found if section.rows]


def problems(comparison: Comparison) -> list[Section]:
    """Runs that failed, and those without a speed, with reasons."""
    return [each for each in (_outcomes(comparison), _unmeasured(comparison)) if each.rows]


def provenance(comparison: Comparison) -> Section:
    """Provenance: commands, machines and versions."""
    # The trials of `eke fit` are a sweep, too.
    programs = ["eke" if command[0] == "fit" else program() for command in comparison.commands]
    rows = [
        ("command", " ".join([name, *command]))
        for name, command in zip(programs, comparison.commands, strict=True)
    ]
    for machine in _machines(comparison):
        facts = dict(machine.facts)
        where = f"machine {machine.letter}"
        device = f"{facts.pop('device_count', '1')} x {facts.pop('device', '?')}"
        rows.append((where, f"{device}; {', '.join(machine.hosts)}"))
        facts.pop("eke_source", None)
        rows.append((f"{where}: software", ", ".join(f"{k} {v}" for k, v in facts.items())))
        rows += [(f"{where}: {k}", v) for k, v in _environment(comparison, machine).items()]
    shared = " ".join(f"{key}={value}" for key, value in comparison.shared.items())
    rows += [("all have", shared)] if shared else []
    rows.append(("records", ", ".join(comparison.folders)))
    return Section("Where this comes from", "", ("what", "which"), tuple(rows))


def _machines(comparison: Comparison) -> list[Machine]:
    """Kinds of machines, each once, also with several groups."""
    return list({part.machine.letter: part.machine for part in comparison.machines}.values())


def _environment(comparison: Comparison, machine: Machine) -> dict[str, str]:
    rows = [row for row in comparison.rows if row.variant.machine == machine.letter]
    entries = [entry for row in rows for entry in row.variant.entries]
    records = [entry.record for entry in entries if entry.record]
    stamps = sorted(str(r.environment.get("time", "")) for r in records)
    states = [table(r.environment, "git") for r in records]
    commits = {str(state.get("commit", ""))[:12] for state in states} - {""}
    dirty = " (changed)" if any(state.get("dirty") for state in states) else ""
    drivers = {str(r.environment.get("driver", "")) for r in records} - {""}
    facts = {
        "measured": f"{stamps[0]} to {stamps[-1]}" if stamps else "",
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


def _techniques(comparison: Comparison, part: OneMachine) -> Section:
    """Each technique alone, over all pairs, and on top of others; empty if the rows say it all."""
    alone = {change: ratio_cells(row.ratios) for row, change in part.alone}
    pairs = {f"{each.factor}={each.value}": each for each in part.effects}
    rungs = {added: ratio_cells(row.ratios) for row, added in part.ladder}
    rows = []
    for name in dict.fromkeys((*pairs, *alone, *rungs)):
        over = pairs.get(name)
        told = [*ratio_cells(over.ratios), str(over.pairs)] if over else [""] * 3
        instead = f" for {over.reference}" if over and over.reference else ""
        rows.append((f"{name}{instead}", *alone.get(name, _NO), *told, *rungs.get(name, _NO)))
    is_one = len({each.factor for each in part.effects}) < len(part.keys)  # of --by
    few = len(comparison.rows_of(part)) <= FEW_ROWS or not any(e.pairs > 1 for e in part.effects)
    if few and not is_one and len(part.ladder) < FEW_ROWS - 1:
        rows = []
    head = ("technique", "alone: speed", "memory", "over pairs: speed", "memory", "pairs",
            "after those above: speed", "memory")  # fmt: skip
    kept = [n for n in range(len(head)) if n == 0 or any(row[n] for row in rows)]
    note = "Times the baseline. Pairs differ in nothing else (geometric mean). The interval of "
    note += "three pairs and more holds how much the effect varies between them."
    shown = tuple(tuple(row[n] for n in kept) for row in rows)
    return Section("What each technique does", note, tuple(head[n] for n in kept), shown)


_NO = ("", "")

FEW_ROWS = 4
"""The main table of up to two techniques says the same as theirs."""


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


METHOD = (
    "Speeds leave out warm-up, compiling, evaluation and checkpoints. A value is the geometric "
    "mean over repeats, and is compared on logarithms. Runs of one repeat and seed are compared in "
    "pairs, so that a drift of the machine cancels. Up to three rows, an interval is Student's t "
    "of the compared rows' repeats. From four rows on, the variance of each row has a prior from "
    "the other rows of the machine (moderated noise, Smyth 2004). With fewer than three repeats "
    "there is no interval and no claim. An interval is the one at the level at which Holm's "
    "method, over all comparisons with one baseline, tested the row. Losses are compared by seed "
    "at equal samples, with a margin of 1 %. Rows that differ in rounding only are one training. "
    "What was not measured is absent."
)
"""The method, in the words of docs/how-to/report.md."""
