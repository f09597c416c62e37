"""metrics.jsonl: appended, never rewritten; the truth about the training curve.

One row per optimizer step (`train/...`) and per evaluation (`eval/...`). Every row holds
`train/global_step` (steps done) and `attempt`. After a resume the steps since the checkpoint are
done again: readers keep the highest attempt of each step.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eke.common.files import Refused, append_line, last_bytes, open_to_read, plain

Row = dict[str, Any]

METRICS_LIMIT = 1 << 30
"""Largest file that is read, bytes: three million steps."""

LINE_LIMIT = 1 << 20
"""Longest line that is read as a row, bytes; a row has some 350."""

STEP = "train/global_step"
ATTEMPT = "attempt"
LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
EVAL_LOSS = "eval/loss"
BITS_PER_BYTE = "eval/bits_per_byte"
STEP_TIME = "train/step_time_s"
WARMUP = "train/warmup"
"""Present and 1 on steps left out of every timing: the first ones, and those that compiled."""
SAMPLES = "train/samples"
TOKENS = "train/tokens"
"""Of this step, padding not counted."""
PHASES = ("data", "forward", "backward", "optimizer")


PHASE_KEYS = {phase: f"train/{phase}_time_s" for phase in PHASES}
"""Phase -> row key of the seconds a step spent in it."""

_ENCODER = json.JSONEncoder(allow_nan=False)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows with one unbuffered write.

    Raises:
        OSError: the disk is full.
    """
    lines = [_line(row) for row in rows]
    if lines:
        append_line(path, "\n".join(lines))


def _line(row: Mapping[str, Any]) -> str:
    try:
        return _ENCODER.encode(dict(row))
    except ValueError:  # a number that JSON cannot say
        return _ENCODER.encode(plain(dict(row)))


def seal(path: Path) -> None:
    """End a torn last line, so that the next row starts on a line of its own."""
    if path.exists() and not last_bytes(path, 1).endswith(b"\n"):
        append_line(path, "")


def read_rows(path: Path) -> tuple[list[Row], int]:
    """All rows in file order, and how many lines could not be read (a torn last line after a kill).

    Text that stands for a non-finite number (`"nan"`, `"inf"`) is turned back into it.

    Raises:
        OSError: the file cannot be read, or has more than `METRICS_LIMIT` bytes.
    """
    rows: list[Row] = []
    unreadable = 0
    try:
        descriptor = open_to_read(path)
    except FileNotFoundError:
        return [], 0
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > METRICS_LIMIT:
            raise Refused(f"has more than {METRICS_LIMIT >> 20} MiB", path)
        while line := file.readline(LINE_LIMIT):
            row = parse_row(line.decode(errors="replace"))
            if row is None:
                unreadable += bool(line.strip())
            else:
                rows.append(row)
    return rows, unreadable


def parse_row(line: str) -> Row | None:
    """One line as a row; None when it is torn, or holds anything but numbers: no row of ours."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    row = {key: _number(value) for key, value in found.items()}
    if not all(isinstance(value, int | float) for value in row.values()):
        return None
    return row if math.isfinite(row.get(STEP, 0)) else None


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def latest(rows: Iterable[Row], key: str) -> list[Row]:
    """Rows that have `key`, one per step: the highest attempt's, in step order."""
    best: dict[int, Row] = {}
    for row in rows:
        if key in row and STEP in row:
            step = int(row[STEP])
            if step not in best or row.get(ATTEMPT, 0) >= best[step].get(ATTEMPT, 0):
                best[step] = row
    return [best[step] for step in sorted(best)]


def num_missing(path: Path, until: int) -> int:
    """How many of the first `until` steps have no row with a loss."""
    rows, _ = read_rows(path)
    there = {int(row[STEP]) for row in latest(rows, LOSS)}
    return until - len(there & set(range(1, until + 1)))
