"""`eke compare A B`: report whether B is slower than A. `--again` measures both."""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eke.cli import make_parser
from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import json_safe, read_json
from eke.common.output import printable
from eke.common.screen import table_width, width, wrap
from eke.common.table import Column, render_table
from eke.common.text import format_number, override
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_USER
from eke.results.report.compare.comparison import loss_words, times
from eke.results.report.compare.load_records import Entry, gather
from eke.results.report.compare.statistics import Ratio, Significance
from eke.results.report.compare.two import (
    Side,
    TwoSides,
    compare_sides,
    is_slowdown,
    open_sides,
    overrides_of,
)

_DESCRIPTION = """\
Report whether B is slower than A: their differences, then speed, memory and loss of every
configuration that both have, and the mean over them. A and B are runs, sweeps, folders of runs, or
parts of one:

  eke compare runs/sweep-1a2b runs/sweep-3c4d
  eke compare runs@4e5de70a runs@changed              two commits of eke; uncommitted changes
  eke compare runs/sweep-1a2b@adamw runs/sweep-1a2b@optimizer=lion     a row, and settings
  eke compare runs --by torch                         two versions of a library

Exit codes: 0 no slowdown beyond the tolerance is shown, 1 one is shown (a chance of 2.5 % at most
if there is none), 2 not comparable, or fewer than three repeats.
"""

_REPEATS = 5
"""Repeats of --again: 5 % less speed is found in 92 % of comparisons at 2 % noise (simulated)."""

_WORDS = {
    Significance.higher: "faster", Significance.lower: "slower, tolerated",
    Significance.same: "same within 2 %", Significance.unresolved: "not decided",
}  # fmt: skip
_OWN = ("rerun", "paths.runs")
"""Keys that --again sets for all runs."""

_HEADER = {
    "speed": 0, "decision": 0, "memory": 2, "repeats": 3, "configuration": 0, "loss": 1,
}  # fmt: skip
"""Column -> rank (`Column.rank`)."""


def main(arguments: Sequence[str]) -> int:
    """Parse the arguments, print the comparison and return the exit code."""
    options = _parse(arguments)
    found = compare_sides(open_sides(options.sides, options.by), options.tolerance)
    if options.again:
        found = compare_sides(_measure(found), options.tolerance)
    speeds = [found.mean, *(row.speed for row in found.rows)]
    is_slower = any(is_slowdown(each, found.tolerance) for each in speeds if each)
    code = EXIT_FAILED if is_slower else EXIT_USER if found.problem else EXIT_OK
    text = (
        json.dumps(json_safe(_as_plain(found, code)), indent=1) if options.json else _render(found)
    )
    sys.stdout.write(printable(f"{text}\n"))
    if found.problem and not options.json:
        sys.stderr.write(f"{ConfigError(found.problem).screen(sys.stderr)}\n")
    return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("compare", _DESCRIPTION)
    parser.add_argument("sides", nargs="+", metavar="A B", help="FOLDER or FOLDER@WHICH")
    about = "split one folder by a library, commit, driver, host or key; NAME=OLD,NEW of several"
    parser.add_argument("--by", default="", metavar="NAME", help=about)
    about = "tolerated slowdown (default: 3 if measured in turns, else 5)"
    parser.add_argument("--tolerance", type=_per_cent, metavar="PERCENT", help=about)
    about = f"measure both now, in turns, {_REPEATS} times; repeat the command to resume"
    parser.add_argument("--again", action="store_true", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if len(options.sides) != (1 if options.by else 2):
        parser.error("two sides are compared: A B, or FOLDER --by NAME")
    return options


def _per_cent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not (value == 0 or 0.1 <= value < 100):
        raise argparse.ArgumentTypeError(f"{text}: must be 0, or from 0.1 to below 100: 3 for 3 %")
    return value / 100


def _measure(found: TwoSides) -> list[Side]:
    """Run all rows of A and B in the rounds of one sweep, next to A's runs, and return them."""
    from eke import workflows  # here: it composes configurations, with Hydra

    if not found.is_measurable:
        why = "this installation cannot measure both: versions differ, or no configuration does"
        problem = Problem("--again", "", why, Fix(remark=found.measuring), "not_measurable")
        raise ConfigError(problem)
    # Sorted, and of the oldest runs: the same sweep until it is finished.
    texts = sorted([_as_row(each) for each in row.oldest] for row in found.rows)
    rows = [f"A{n}:{a},B{n}:{b}" for n, (a, b) in enumerate(texts)]
    seeds = {entry.repeat[0] for row in found.rows for side in row.runs for entry in side}
    seed = "sweep.seeds=per_repeat" if len(seeds) > 1 else f"seed={min(seeds, default=0)}"
    runs = (found.rows[0].oldest[0].folder or Path("runs/RUN")).parent
    words = ["-m", "rerun=true", f"sweep.rows={{{','.join(rows)}}}", f"sweep.repeats={_REPEATS}"]
    words += [seed, override("paths.runs", str(runs))]
    with contextlib.redirect_stdout(sys.stderr):
        code = workflows.main(words)
    if code not in (EXIT_OK, EXIT_FAILED):
        raise SystemExit(code)
    files = sorted(runs.glob("sweep-*/sweep.json"), key=os.path.getmtime, reverse=True)
    folder = next(each.parent for each in files if read_json(each).get("command") == words)
    entries = gather([folder]).entries
    return [
        Side(f"{side.name}, now", [replace(e, rows=()) for e in entries if e.row[0] == letter])
        for side, letter in zip(found.sides, "AB", strict=True)
    ]


def _as_row(entry: Entry) -> str:
    """Return the overrides of a run as a row of a sweep."""
    pairs = (text.partition("=")[::2] for text in overrides_of(entry))
    return f"{{{','.join(f'{key}:{value}' for key, value in pairs if key not in _OWN)}}}"


def _render(found: TwoSides) -> str:
    pairs = {**found.keys, **found.facts}.items()
    changes = ", ".join(f"{key} {a or 'none'} -> {b or 'none'}" for key, (a, b) in pairs)
    sides = [f"{s.name} ({format_number(len(s.entries), 'run')})" for s in found.sides]
    rows = []
    for row in found.rows:
        memory = f"{row.memory:.2f}x" if row.memory else ""
        speed, decision = times(row.speed) if row.speed else "", _decision(found, row.speed)
        rows.append((speed, decision, memory, row.repeats, row.label, loss_words(row.loss)))
    tested = sum(bool(row[0]) for row in rows)
    if found.mean:
        decision = _decision(found, found.mean)
        rows.append((times(found.mean), decision, "", "", f"mean of {tested} rows", ""))
    limit = f"{100 * found.tolerance:g} %"
    slower = ", ".join(row[4] for row in rows if row[1] == "slower")
    verdict = f"No slowdown beyond {limit} is shown." if tested else ""
    verdict = f"Slower by more than {limit}: {slower}." if slower else verdict
    lines = [f"A -> B: {changes or 'nothing differs'}", f"A: {sides[0]}", f"B: {sides[1]}"]
    shown = [
        Column(title, [row[n] for row in rows], rank=rank)
        for n, (title, rank) in enumerate(_HEADER.items())
    ]
    prose = [line for text in lines for line in wrap(text, width(), "", "   ")]
    notes = [line for text in (verdict, *found.notes) for line in wrap(text, width())]
    return "\n".join([*prose, "", *render_table(shown, table_width()), "", *notes]).rstrip()


def _decision(found: TwoSides, speed: Ratio | None) -> str:
    if speed is None:
        return "too few repeats"
    return "slower" if is_slowdown(speed, found.tolerance) else _WORDS[speed.decision]


def _as_plain(found: TwoSides, code: int) -> dict[str, Any]:
    """Return the comparison as JSON values. A claim has the fields of claims in report.json."""
    claims = [([row.label], row.speed) for row in found.rows]
    claims.append(([label for (label,), speed in claims if speed], found.mean))
    return {
        "sides": [{"name": each.name, "runs": len(each.entries)} for each in found.sides],
        "differing": {**found.keys, **found.facts},
        "claims": [
            {"kind": _decision(found, each), "measure": found.measure.key, "rows": rows,
             "value": each.value, "unit": "x", "low": each.low, "high": each.high,
             "level": each.level}
            for rows, each in claims if each
        ],
        "rows": [
            {"configuration": row.label, "factors": row.variants[1].factors,
             "repeats": [len(side) for side in row.runs], "memory": row.memory,
             "loss": loss_words(row.loss)}
            for row in found.rows
        ],
        "tolerance": found.tolerance, "in_turns": found.in_turns, "notes": found.notes,
        "problem": found.problem and found.problem.as_json(), "exit_code": code,
    }  # fmt: skip
