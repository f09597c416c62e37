"""`eke sync RUNS...`: send runs to W&B and print the result of each run."""

import argparse
import json
import sys
from collections.abc import Sequence

from eke.cli import make_parser, whole_number
from eke.common.output import write_line
from eke.common.paths import short_path
from eke.common.screen import is_quiet, width, wrap
from eke.common.text import format_number
from eke.plan.record import EXIT_FAILED, EXIT_OK
from eke.results.trackers.sync import FAILURES, Options, Report, SyncOutcome, find_runs, sync

_DESCRIPTION = """\
Sends offline runs and missing parts of online runs to Weights & Biases. Every run is rebuilt from
its metrics.jsonl and record.json, sent under its own id, and verified with the server. Repeat the
command to send only the missing runs.
"""


def main(arguments: Sequence[str]) -> int:
    """Parse, send and print. Return 0, 1 if runs failed, or 2 for invalid arguments."""
    options = _parse(arguments)
    reports: list[Report] = []
    wanted = Options(
        options.project, options.entity, options.dry_run, options.again, options.timeout
    )
    try:
        for report in sync(find_runs(options.runs), wanted):
            reports.append(report)
            if not options.json and not is_quiet():
                write_line(_run_line(report))
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted. Repeat the command to send the rest\n")
        raise
    finally:
        if options.json:
            write_line(json.dumps([_report_as_json(report) for report in reports], indent=2))
        elif reports:
            write_line(ending(reports))
    return EXIT_FAILED if any(report.verdict in FAILURES for report in reports) else EXIT_OK


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("sync", _DESCRIPTION)
    about = "run folders, a folder of runs, or a sweep's folder"
    parser.add_argument("runs", nargs="+", metavar="RUNS", help=about)
    parser.add_argument("--project", help="default: tracker.project of each run")
    parser.add_argument("--entity", help="default: tracker.entity of each run")
    parser.add_argument("--dry-run", action="store_true", help="only print the runs to send")
    parser.add_argument("--again", action="store_true", help="also send existing runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout", type=whole_number(1), default=Options.timeout_s, metavar="SECONDS",
        help="time limit of a run, plus 1 s per 100 rows (default: 60)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def _report_as_json(report: Report) -> dict[str, object]:
    known = {"rows": report.num_rows, "url": report.url, "note": report.note}
    return {"folder": str(report.folder), "outcome": report.verdict.value, **known}


def _run_line(report: Report) -> str:
    rows = "" if report.num_rows is None else format_number(report.num_rows, "row")
    name = " ".join(report.folder.name.split())  # always on one line
    words = (f"{report.verdict.value:<13}", name, rows, report.url)
    return "  ".join(filter(None, words))


def ending(reports: Sequence[Report]) -> str:
    """Format each failure reason once, then the counts."""
    lines: list[str] = []
    reasons: dict[tuple[SyncOutcome, str], list[str]] = {}
    for report in reports:
        if report.note:
            reasons.setdefault((report.verdict, report.note), []).append(short_path(report.folder))
    for (verdict, note), folders in reasons.items():
        others = f" and {format_number(len(folders) - 1, 'other')}" if len(folders) > 1 else ""
        lines += ["", f"{verdict.value}: {folders[0]}{others}"]
        lines += wrap(" ".join(note.split()), width(), "  ")
    counts = {v: sum(report.verdict is v for report in reports) for v in SyncOutcome}
    lines += ["", ", ".join(f"{count} {v.value}" for v, count in counts.items() if count)]
    return "\n".join(lines)
