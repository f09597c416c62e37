"""Text of a report that all formats share: title, smaller tables and provenance."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from eke.common.paths import program
from eke.common.text import format_bytes, format_count, format_number
from eke.plan.record import Outcome, Record, table
from eke.results.report.compare import Comparison, ComparisonRow, MachineComparison
from eke.results.report.compare.claims import Kind, find_claims
from eke.results.report.compare.comparison import times
from eke.results.report.compare.effects import PublishedMatch
from eke.results.report.compare.load_records import NOT_RUN
from eke.results.report.compare.measures import PEAK, SAMPLE_SPEED
from eke.results.report.compare.variants import Machine
from eke.results.report.show.table import ratio_cells

Lines = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A titled table of text."""

    title: str
    head: tuple[str, ...]
    rows: Lines
    note: str = ""


def report_title(comparison: Comparison) -> str:
    """Return the compared models, data and devices, and the number of configurations."""
    counts = [len(row.variant.records) for row in comparison.rows if row.variant.records]
    rows = format_number(len(comparison.rows), "configuration")
    if not counts:
        return rows
    records = [row.variant.records[0] for row in comparison.rows if row.variant.records]
    devices = [f"{m.facts.get('device_count', 1)} x {m.facts.get('device', '?')}"
               for m in _machines(comparison)]  # fmt: skip
    facts = [
        _joined(_name(each, "model", "num_parameters", "parameters") for each in records),
        _joined(_name(each, "data", "seq_len", "tokens") for each in records),
        _joined(devices),
    ]
    repeats = " to ".join(dict.fromkeys(map(str, (min(counts), max(counts)))))
    return f"{', '.join(filter(None, facts))}: {rows} x {repeats}"


def _joined(texts: Iterable[str]) -> str:
    """Join the different texts, or the first two of more than three."""
    found = list(dict.fromkeys(texts))
    return " / ".join(found if len(found) < 4 else [*found[:2], "..."])


def _name(record: Record, group: str, size: str, unit: str) -> str:
    """Return the name of the model or data with its size. A path is cut to its last part."""
    keys = table(record.config, group)
    names = ("name_or_path", "path", "name", "target", "option")
    named = next((keys[key] for key in names if keys.get(key)), "?")
    count = keys.get(size) or table(record.plan, "size").get(size)
    if group == "data" and "target" in keys:  # samples of own code have no tokens
        count = None
    end = str(named).rstrip("/").rpartition("/")[2] or str(named)
    return f"{end} ({format_count(count)} {unit})" if isinstance(count, int) else end


def measured(comparison: Comparison) -> str:
    """Return dates, versions and outcomes: `2026-11-28, torch 2.13.0, commit 1a2b, 12 runs`."""
    machines = _machines(comparison)
    found = [_environment(comparison, machine) for machine in machines]
    versions = [
        _joined(f"{name} {machine.facts[name]}" for machine in machines if name in machine.facts)
        for name in ("torch", "transformers")
    ]
    commit = _joined(f"commit {each['commit']}" for each in found if "commit" in each)
    days = _joined(each["measured"][:10] for each in found if "measured" in each)
    return ", ".join(filter(None, [days, *versions, commit, count_outcomes(comparison)]))


def count_outcomes(comparison: Comparison) -> str:
    """Return the number of runs by outcome, and of configurations."""
    totals: Counter[str] = Counter()
    for row in comparison.rows:
        totals.update(row.variant.outcomes)
    parts = ", ".join(f"{count} {name}" for name, count in totals.items())
    runs = format_number(totals.total(), "run")
    return f"{runs} of {format_number(len(comparison.rows), 'configuration')}: {parts}"


def winner_command(comparison: Comparison) -> str:
    """Return the command of the best configuration, "" if there is none."""
    best = (claim.rows[0] for claim in find_claims(comparison) if claim.kind is Kind.best)
    if (row := next(best, None)) is None:
        return ""
    typed = row.variant.records[0].overrides
    kept = [each for each in typed if not each.startswith(("seed=", "repeat="))]
    return f"{program()} {shlex.join(kept)}".rstrip()


def sections(comparison: Comparison, repeats: bool = False) -> list[Section]:
    """Return all sections with rows except `problems`. `repeats` adds every run."""
    found = []
    for part in comparison.machines:
        own = [_techniques(part), *map(_published, part.published)]
        where = comparison.suffix(part)
        found += [replace(section, title=f"{section.title}{where}") for section in own]
    first = [row for row in comparison.rows if row.variant.records][:6]
    found += [*map(_classes, first), *map(_sources, first)]
    found += [_runs(comparison)] if repeats else []
    return [section for section in found if section.rows]


def problems(comparison: Comparison) -> list[Section]:
    """Return the sections about failed runs, and runs without a speed, that have rows."""
    failed = _group_by_reason(
        ((entry.outcome, entry.reason), row.variant.label)
        for row in comparison.rows
        for entry in row.variant.entries
        if entry.outcome != Outcome.ok.name
    )
    unmeasured = _group_by_reason(
        ((_no_speed(row.variant.records[0]),), row.variant.label)
        for row in comparison.rows
        if row.variant.records and SAMPLE_SPEED.key not in row.estimates
    )
    missing = {NOT_RUN: "repeat the command to start missing runs"}
    rows = [(how, who, why or missing.get(how, "")) for (how, why), who in failed.items()]
    if len(rows) > 100:
        rows[100:] = [("...", f"{len(rows) - 100} more reasons", "report.json has all")]
    slow = [(who, *why) for why, who in unmeasured.items()]
    found = [
        Section("Unsuccessful runs", ("outcome", "configurations", "reason"), rows),
        Section("No speed", ("configurations", "reason"), slow),
    ]
    return [section for section in found if section.rows]


def provenance(comparison: Comparison) -> Section:
    """Return the section about commands, machines and versions."""
    # The trials of `eke fit` are also a sweep.
    rows = [
        ("command", " ".join(["eke" if command[0] == "fit" else program(), *command]))
        for command in comparison.commands
    ]
    for machine in _machines(comparison):
        facts = dict(machine.facts)
        where = f"machine {machine.letter}"
        device = f"{facts.pop('device_count', '1')} x {facts.pop('device', '?')}"
        facts.pop("eke_source", None)
        rows.append((where, f"{device}; {', '.join(machine.hosts)}"))
        rows.append((f"{where}: software", ", ".join(f"{k} {v}" for k, v in facts.items())))
        rows += [(f"{where}: {k}", v) for k, v in _environment(comparison, machine).items()]
    shared = " ".join(f"{key}={value}" for key, value in comparison.shared.items())
    rows += [("shared keys", shared)] if shared else []
    rows.append(("records", ", ".join(comparison.folders)))
    return Section("Provenance", ("fact", "value"), rows)


def _machines(comparison: Comparison) -> list[Machine]:
    """Return each kind of machine once."""
    return list({part.machine.letter: part.machine for part in comparison.machines}.values())


def _environment(comparison: Comparison, machine: Machine) -> dict[str, str]:
    rows = [row for row in comparison.rows if row.variant.machine == machine.letter]
    entries = [entry for row in rows for entry in row.variant.entries]
    found = [entry.record.environment for entry in entries if entry.record]
    stamps = sorted(str(each.get("time", "")) for each in found)
    states = [table(each, "git") for each in found]
    commits = {str(state.get("commit", ""))[:12] for state in states} - {""}
    dirty = " (changed)" if any(state.get("dirty") for state in states) else ""
    drivers = {str(each.get("driver", "")) for each in found} - {""}
    facts = {
        "measured": f"{stamps[0]} to {stamps[-1]}" if stamps else "",
        "commit": ", ".join(sorted(commits)) + dirty,
        "driver": ", ".join(sorted(drivers)),
    }
    return {key: value for key, value in facts.items() if value}


def _group_by_reason(found: Iterable[tuple[tuple[str, ...], str]]) -> dict[tuple[str, ...], str]:
    """Return reason -> at most six configurations, and the number of the others."""
    labels: dict[tuple[str, ...], dict[str, None]] = {}
    for reason, label in found:
        labels.setdefault(reason, {})[label] = None
    more = {key: [f"and {len(each) - 6} more"] for key, each in labels.items() if len(each) > 6}
    return {key: "; ".join([*list(each)[:6], *more.get(key, [])]) for key, each in labels.items()}


def _no_speed(record: Record) -> str:
    if "cuts" in record.effective:
        return "its ranks or micro-batches changed"
    if record.shared_device:
        return "another process used its device"
    warm_up = table(record.config, "train").get("timing_warmup_steps", "?")
    why = f"the first {warm_up} of each attempt are warm-up (train.timing_warmup_steps)"
    return f"none of {record.steps_done} steps was timed: {why}"


def _techniques(part: MachineComparison) -> Section:
    """Return each technique's effect alone, over all pairs, and added to others."""
    alone = {change: ratio_cells(row.ratios) for row, change in part.alone}
    pairs = {f"{each.factor}={each.value}": each for each in part.effects}
    rungs = {added: ratio_cells(row.ratios) for row, added in part.ladder}
    rows, empty = [], ("", "")
    for name in dict.fromkeys((*pairs, *alone, *rungs)):
        over = pairs.get(name)
        told = [*ratio_cells(over.ratios), str(over.pairs)] if over else [*empty, ""]
        instead = f" for {over.reference}" if over and over.reference else ""
        before, after = alone.get(name, empty), rungs.get(name, empty)
        rows.append((f"{name}{instead}", *before, *told, *after))
    is_one = len({each.factor for each in part.effects}) < len(part.keys)  # of --by
    # Up to two techniques, the main table has the same values.
    few = len(part.rows) <= 4 or not any(e.pairs > 1 for e in part.effects)
    if few and not is_one and len(part.ladder) < 3:
        rows = []
    head = ("technique", "alone: speed", "memory", "over pairs: speed", "memory", "pairs",
            "cumulative: speed", "memory")  # fmt: skip
    kept = [n for n in range(len(head)) if n == 0 or any(row[n] for row in rows)]
    note = "Ratios to the baseline. Pairs differ only in the technique (geometric mean). From "
    note += "three pairs on, the interval includes the variation of the effect between pairs."
    shown = [tuple(row[n] for n in kept) for row in rows]
    return Section("Effect of each technique", tuple(head[n] for n in kept), shown, note)


def _published(each: PublishedMatch) -> Section:
    rows = []
    for row in each.rows:
        cells = [row.row]
        for key in (SAMPLE_SPEED.key, PEAK.key):
            here, there = row.measured[key], row.published[key]
            cells += [times(here) if here else "", "" if there is None else f"{there:.2f}x"]
        rows.append(cells)
    found = each.table
    note = f"Published: {found.hardware}, {found.date}. {found.notes} {found.source}"
    head = (f"row, relative to {found.baseline}", "speed here", "published", "memory here",
            "published")  # fmt: skip
    return Section(f"Comparison with published results: {found.title}", head, rows, note)


def _classes(row: ComparisonRow) -> Section:
    """Return the predictions of a classifier's first run for each class, of at most 12 classes."""
    title, found = f"Classes: {row.variant.label}", row.variant.records[0].classes
    scores = ("precision", "recall", "f1")
    try:
        names, matrix = found["names"], found.get("confusion")  # sets of classes have no matrix
        head = ("true class", *(f"predicted {name}" for name in names if matrix), *scores)
        rows = [
            (str(names[n]), *map(str, each), *(f"{found[score][n]:.4f}" for score in scores))
            for n, each in enumerate(matrix or [()] * len(names))
        ]
    except (TypeError, ValueError, LookupError):  # none, another version's, or another user's
        return Section(title, (), ())
    shown = rows if len(rows) <= 12 and all(len(r) == len(head) for r in rows) else ()
    return Section(title, head, shown, "samples by predicted class, final evaluation")


def _sources(row: ComparisonRow) -> Section:
    """Return the samples that a configuration's first run used of each source of a mix."""
    keys = ("samples", "epochs", "train_loss", "eval_loss")
    rows = [
        (name, *(f"{found.get(key, math.nan):.5g}" for key in keys))
        for name, found in row.variant.records[0].sources.items()
    ]
    head = ("source", "samples", "epochs", "training loss", "evaluation loss")
    note = "trained samples, and losses of the last step and evaluation"
    return Section(f"Sources: {row.variant.label}", head, rows, note)


def _runs(comparison: Comparison) -> Section:
    rows = []
    for row, entry in ((each, entry) for each in comparison.rows for entry in each.variant.entries):
        speed, peak = entry.measures.get(SAMPLE_SPEED.key), entry.measures.get(PEAK.key)
        numbers = f"{speed:.4g}" if speed else "", format_bytes(peak) if peak else ""
        folder = entry.folder.name if entry.folder else ""
        rows.append((row.variant.label, *map(str, entry.repeat), entry.outcome, *numbers, folder))
    head = ("configuration", "seed", "repeat", "outcome", "samples/s", "peak memory", "run")
    return Section("Every run", head, rows, format_number(len(rows), "run"))


METHOD = (
    "Speeds exclude warm-up, compilation, evaluation and checkpoints. A value is the geometric "
    "mean over repeats, and values are compared on a log scale. Runs of one repeat and seed are "
    "compared in pairs, so that a drift of the machine cancels. With up to three rows, an interval "
    "is Student's t of the compared rows' repeats. From four rows on, the variance of each row has "
    "a prior from the other rows of the machine (moderated noise, Smyth 2004). With fewer than "
    "three repeats there is no interval and no claim. Intervals have the level at which Holm's "
    "method, over all comparisons with one baseline, tested the row. Losses are compared by seed "
    "at equal samples, with a margin of 1 %. Rows that differ only in rounding are one training. "
    "Values that were not measured are omitted."
)
"""The method, in the words of notes/report_statistics.md."""
