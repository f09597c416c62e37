"""Result of a sweep: failures and their fixes, then means over repeats."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from eke.common.errors import fix_lines
from eke.common.screen import paint, table_width, width, wrap
from eke.common.table import Column, render_table
from eke.common.text import format_bytes, format_count, format_number, format_seconds
from eke.plan.record import Outcome, Record
from eke.results.report.compare.load_records import RunKey, key_of
from eke.results.report.summary import factor_columns
from eke.results.trackers.tracker import summary_values


class Failed(NamedTuple):
    """A run that failed or did not start."""

    name: str
    """What differs from the other runs."""
    outcome: str
    reason: str
    fix: str = ""
    """Overrides or command. Empty if the reason contains it."""


def failure_lines(failed: Sequence[Failed]) -> list[str]:
    """Return each reason once: the runs, the reason and the fix."""
    alike: dict[tuple[str, str], list[Failed]] = {}
    for each in failed:
        alike.setdefault((each.outcome, each.reason), []).append(each)
    lines, most = list[str](), 5  # different failures
    for (outcome, reason), runs in list(alike.items())[:most]:
        why, arrow, fix = reason.partition(" -> ")
        if not arrow or " -> " in fix:  # of several problems, each has its fix
            why, fix = reason, runs[0].fix
        others = f" and {format_number(len(runs) - 1, 'other')}" if len(runs) > 1 else ""
        lines += wrap(f"{runs[0].name}{others}", width(), f"  {paint(outcome, 'red')}  ", "    ")
        lines += wrap(" ".join(why.split()), width(), "    ")
        lines += fix_lines(fix, width(), sys.stdout) if fix else []
    rest = sum(map(len, [*alike.values()][most:]))
    return lines + ([f"  ... and {format_number(rest, 'more failure')}"] if rest else [])


class SweepCellResult(NamedTuple):
    """A run of a sweep that has ended or was rejected."""

    overrides: tuple[str, ...]
    row: str
    """Name of its row in the sweep's definition. Empty without rows."""
    outcome: str
    record: Record | None


_MEANS: dict[str, tuple[str, int, Callable[[float], str]]] = {
    "samples_per_s": ("samples/s", 1, "{:.4g}".format),
    "tokens_per_s": ("tokens/s", 0, format_count),
    "peak_allocated_bytes": ("memory", 2, format_bytes),
    "eval_final": ("eval loss", 0, "{:.4f}".format),
}
"""Number of a run -> title of its column, rank and format."""


def means_over_repeats(cells: Sequence[SweepCellResult]) -> list[dict[str, Any]]:
    """Return one entry per configuration: overrides, row, number of runs, and means.

    A mean is over the runs that ended well and have this number. None without such a run.
    """
    groups: dict[tuple[str, RunKey], list[SweepCellResult]] = {}
    for cell in cells:
        groups.setdefault((cell.row, key_of(cell.overrides)), []).append(cell)
    found = []
    for (row, key), runs in groups.items():
        ok = [run.record for run in runs if run.outcome == Outcome.ok.name and run.record]
        values = [summary_values(record) for record in ok]
        measured = {name: [each[name] for each in values if name in each] for name in _MEANS}
        means = {name: fmean(map(float, some)) if some else None for name, some in measured.items()}
        found.append({"overrides": [*key], "row": row, "runs": len(runs), "ok": len(ok), **means})
    return found


def result_table(means: Sequence[dict[str, Any]]) -> list[str]:
    """Return the configurations, fastest first. tokens/s only if samples differ in length."""
    ordered = sorted(means, key=lambda each: -(each["samples_per_s"] or 0))
    pairs = [(each["samples_per_s"], each["tokens_per_s"]) for each in ordered]
    lengths = {f"{tokens / samples:.3g}" for samples, tokens in pairs if samples and tokens}
    factors = factor_columns([tuple(m["overrides"]) for m in ordered], [m["row"] for m in ordered])
    runs = [str(m["ok"]) if m["ok"] == m["runs"] else f"{m['ok']} of {m['runs']}" for m in ordered]
    numbers = [
        Column(title, ["" if m[key] is None else text(m[key]) for m in ordered], True, rank)
        for key, (title, rank, text) in _MEANS.items()
        if key != "tokens_per_s" or len(lengths) > 1
    ]
    lines = render_table([*factors, Column("runs", runs, True, 3), *numbers], table_width())
    return [paint(line, "bold") if line is lines[0] else line for line in lines]


def outcome_line(outcomes: Sequence[str], seconds: float | None) -> str:
    """Return the number of runs by outcome, failures first: `1 oom, 7 ok  in 1 m 11 s`."""
    numbers = Counter(outcome or "not run" for outcome in outcomes)
    states = sorted(numbers, key=lambda state: state == Outcome.ok.name)
    texts = [
        paint(f"{numbers[state]} {state}", "bold green" if state == Outcome.ok.name else "bold red")
        for state in states
    ]
    return ", ".join(texts) + (f"  in {format_seconds(seconds)}" if seconds else "")
