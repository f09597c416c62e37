"""The smaller tables of a report, as plain text cells: one source for all formats."""

from collections.abc import Sequence
from dataclasses import dataclass

from eke.common.paths import program
from eke.common.units import format_bytes, format_number
from eke.plan.record import Record
from eke.results.report.compare import Comparison, OneMachine
from eke.results.report.compare.load_records import NOT_RUN
from eke.results.report.compare.measures import PEAK, SAMPLES, measured
from eke.results.report.compare.published_effects import Beside
from eke.results.report.compare.wording import times
from eke.results.report.show.columns import listed, reasons, told


@dataclass(frozen=True)
class Section:
    """A titled table of text."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


MAX_REASONS = 100
"""Listed one by one; a report of thousands counts the rest."""


WITHOUT_REASON = {NOT_RUN: "the same command runs what is missing"}


def sections(comparison: Comparison, repeats: bool = False, brief: bool = False) -> list[Section]:
    """All of them that have something to say; `brief`: ratios without intervals."""
    found = [_outcomes(comparison), _unmeasured(comparison)]
    for part in comparison.machines:
        found += [make(comparison, part, brief) for make in (_effects, _alone, _ladder)]
        found += [_beside(each, comparison, part) for each in part.beside]
    found += [_runs(comparison)] if repeats else []
    return [section for section in found if section.rows]


def provenance(comparison: Comparison) -> Section:
    """Where the numbers come from."""
    rows = [("command", f"{_program(c)} {' '.join(c)}") for c in comparison.commands]
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


def _program(command: tuple[str, ...]) -> str:
    """Of `eke fit` the trials are a sweep, too."""
    return "eke" if command[0] == "fit" else program()


def _environment(comparison: Comparison, part: OneMachine) -> dict[str, str]:
    """Times, commits and drivers of a machine's runs."""
    records = [
        entry.record
        for row in comparison.rows
        if row.variant.machine == part.machine.letter
        for entry in row.variant.entries
        if entry.record
    ]
    times_run = sorted(str(r.environment.get("time", "")) for r in records)
    facts = {"measured": f"{times_run[0]} to {times_run[-1]}" if times_run else ""}
    commits = {str((r.environment.get("git") or {}).get("commit", ""))[:12] for r in records}
    dirty = any((r.environment.get("git") or {}).get("dirty") for r in records)
    facts["commit"] = ", ".join(sorted(filter(None, commits))) + (" (changed)" if dirty else "")
    drivers = {str(r.environment.get("driver", "")) for r in records}
    facts["driver"] = ", ".join(sorted(filter(None, drivers)))
    return {key: value for key, value in facts.items() if value}


def _outcomes(comparison: Comparison) -> Section:
    found = reasons(comparison.rows)
    rows = [(outcome, who, why or WITHOUT_REASON.get(outcome, "")) for outcome, who, why in found]
    shown = rows[:MAX_REASONS]
    if len(rows) > MAX_REASONS:
        shown.append(("...", f"{len(rows) - MAX_REASONS} more reasons", "report.json has all"))
    head = ("outcome", "configurations", "why")
    return Section("What did not end well", "", head, tuple(shown))


def _unmeasured(comparison: Comparison) -> Section:
    """Why a configuration that ended well has no speed."""
    found: dict[str, dict[str, None]] = {}
    for row in comparison.rows:
        if row.variant.records and SAMPLES.key not in row.estimates:
            found.setdefault(_no_speed(row.variant.records[0]), {})[row.variant.label] = None
    rows = tuple((listed(list(labels)), why) for why, labels in found.items())
    return Section("No speed", "", ("configurations", "why"), rows)


def _no_speed(record: Record) -> str:
    if record.shared_device:
        return "another process used its device meanwhile"
    warm_up = record.config.get("train", {}).get("timing_warmup_steps", "?")
    return (
        f"none of {record.steps_done} steps was timed: the first {warm_up} of each attempt are "
        "warm-up (train.timing_warmup_steps)"
    )


def _effects(comparison: Comparison, part: OneMachine, brief: bool) -> Section:
    rows = [
        (
            f"{each.factor}={each.value}",
            f"{each.factor}={each.reference}" if each.reference else "without",
            str(each.pairs),
            told(each.ratios.get(SAMPLES.key), brief),
            told(each.ratios.get(PEAK.key), brief),
        )
        for each in part.effects
    ]
    note = (
        "Geometric mean over all pairs that differ in nothing else. The interval of three pairs "
        "and more holds how much the effect varies between them."
    )
    head = ("technique", "instead of", "pairs", "x speed", "x memory")
    return Section(_title("What each technique does", comparison, part), note, head, tuple(rows))


def _alone(comparison: Comparison, part: OneMachine, brief: bool) -> Section:
    by_variant = {id(row.variant): row for row in comparison.rows}
    rows: list[tuple[str, ...]] = []
    for variant, change in part.alone:
        ratios = by_variant[id(variant)].ratios
        cells = (told(ratios.get(SAMPLES.key), brief), told(ratios.get(PEAK.key), brief))
        rows.append((variant.row or change, change, *cells))
    head: tuple[str, ...] = ("alone", "changes", "x speed", "x memory")
    if all(name == change for name, change, *_ in rows):
        head, rows = (head[0], *head[2:]), [(name, *rest) for name, _, *rest in rows]
    title = _title("Each technique alone", comparison, part)
    # Where only one factor differs, the main table says the same.
    return Section(title, "", head, tuple(rows) if len(comparison.factors) > 1 else ())


def _ladder(comparison: Comparison, part: OneMachine, brief: bool) -> Section:
    rows = [
        (rung.variant.label, f"+ {rung.added}", told(rung.ratios.get(SAMPLES.key), brief),
         told(rung.ratios.get(PEAK.key), brief))
        for rung in part.ladder
    ]  # fmt: skip
    head = ("cumulative", "adds", "x speed", "x memory")
    return Section(_title("One upon another", comparison, part), "", head, tuple(rows))


def _beside(each: Beside, comparison: Comparison, part: OneMachine) -> Section:
    rows = [
        (row.row, times(row.speed) if row.speed else "", _times(row.published_speed),
         times(row.memory) if row.memory else "", _times(row.published_memory))
        for row in each.rows
    ]  # fmt: skip
    table = each.table
    title = _title(f"Beside what others measured: {table.title}", comparison, part)
    note = f"Published: {table.hardware}, {table.date}. {table.notes} {table.source}"
    head = (
        f"row, times {table.baseline}",
        "x speed here",
        "published",
        "x memory here",
        "published",
    )
    return Section(title, note, head, tuple(rows))


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _runs(comparison: Comparison) -> Section:
    rows = []
    for row in comparison.rows:
        for entry in row.variant.entries:
            values = measured(entry.record) if entry.record else {}
            seed, repeat = entry.repeat
            speed, peak = values.get(SAMPLES.key), values.get(PEAK.key)
            rows.append(
                (
                    row.variant.label, str(seed), str(repeat), entry.outcome,
                    f"{speed:.4g}" if speed else "", format_bytes(peak) if peak else "",
                    entry.folder.name if entry.folder else "",
                )
            )  # fmt: skip
    head = ("configuration", "seed", "repeat", "outcome", "samples/s", "peak memory", "run")
    return Section("Every run", format_number(len(rows), "run"), head, tuple(rows))


def _title(text: str, comparison: Comparison, part: OneMachine) -> str:
    return f"{text} [{part.machine.letter}]" if len(comparison.machines) > 1 else text


def counts(comparison: Comparison) -> str:
    """How many runs, of how many configurations, ended how."""
    totals: dict[str, int] = {}
    for row in comparison.rows:
        for outcome, count in row.variant.outcomes.items():
            totals[outcome] = totals.get(outcome, 0) + count
    parts: Sequence[str] = [f"{count} {name}" for name, count in totals.items()]
    runs = format_number(sum(totals.values()), "run")
    return f"{runs} of {format_number(len(comparison.rows), 'configuration')}: {', '.join(parts)}"
