"""metrics.jsonl: appended, never rewritten; the truth about the training curve.

One row per optimizer step (`train/...`) and per evaluation (`eval/...`). Every row holds
`train/global_step` (steps done) and `attempt`. After a resume the steps since the checkpoint are
done again: readers keep the highest attempt of each step.

What follows from the rows of metrics.jsonl: timing, rates, losses. Absent if not measured.

Errors for folders without runs.

Records and attempts on disk.
"""

import functools
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cattrs

from eke.common.errors import EkeError, Fix, Problem
from eke.common.files import (
    Refused,
    append_line,
    last_bytes,
    open_to_read,
    plain,
    read_json,
    read_text,
    write_json,
)
from eke.common.paths import RunPaths
from eke.common.text import closest_path
from eke.plan.record.record import (
    RECORD_LIMIT,
    RECORD_VERSION,
    Loss,
    Outcome,
    Record,
    Spread,
    Throughput,
    Timing,
)

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
"""Present and 1 on steps excluded from every timing: the first ones, and those that compiled."""
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
    """End a torn last line, so that the next row starts on a new line."""
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


def spread(values: Sequence[float]) -> Spread | None:
    """Median and the 10th and 90th percentile; None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), deciles[0], deciles[-1], len(values))


def is_steady(row: Row) -> bool:
    """Whether a step counts for timing."""
    return WARMUP not in row


def timing(rows: Sequence[Row]) -> Timing:
    """Seconds of steady steps, warm-up steps and phases."""
    steps = latest(rows, STEP_TIME)
    steady = [row for row in steps if is_steady(row)]
    phases = {p: spread([row[PHASE_KEYS[p]] for row in steady]) for p in PHASES}
    return Timing(
        train_s=sum(row[STEP_TIME] for row in steps) if steps else None,
        steady_step_s=spread([row[STEP_TIME] for row in steady]),
        warmup_steps_s=[row[STEP_TIME] for row in steps if not is_steady(row)],
        data_frac=waiting_frac(steady),
        phases={name: value for name, value in phases.items() if value},
    )


def waiting_frac(steady: Sequence[Row]) -> float | None:
    """Share of these steps' time in the phase `data`: no batch was there to compute with."""
    seconds = sum(row[STEP_TIME] for row in steady)
    waited = sum(row[PHASE_KEYS["data"]] for row in steady)
    return waited / seconds if seconds else None


def throughput(
    rows: Sequence[Row],
    flops_per_token: float | None,
    flops_formula: str,
    num_devices: int,
    peak_flops: float | None,
) -> Throughput:
    """Samples and tokens of the steady steps over their time.

    Args:
        rows: of metrics.jsonl.
        flops_per_token: model FLOPs, forward and backward, None when unknown; padding is none.
        flops_formula: how they were computed.
        num_devices: devices that share the work.
        peak_flops: datasheet peak of one device in FLOP/s, None when unknown.
    """
    steady = [row for row in latest(rows, STEP_TIME) if is_steady(row)]
    seconds = sum(row[STEP_TIME] for row in steady)
    if not seconds:
        return Throughput(flops_formula=flops_formula)
    tokens_per_s = sum(row[TOKENS] for row in steady) / seconds
    flops = None
    if flops_per_token is not None:
        flops = flops_per_token * tokens_per_s / num_devices
    return Throughput(
        samples_per_s=sum(row[SAMPLES] for row in steady) / seconds,
        tokens_per_s=tokens_per_s,
        model_flops_per_s=flops,
        mfu_frac=flops / peak_flops if flops is not None and peak_flops else None,
        flops_formula=flops_formula,
    )


def losses(rows: Sequence[Row]) -> Loss:
    """First and last losses; a value that is not finite stands in metrics.jsonl only."""
    steps = latest(rows, LOSS)
    evals = latest(rows, EVAL_LOSS)
    last = evals if len(evals) > 1 else []
    return Loss(
        train_first=_finite(steps[:1], LOSS),
        train_final=_finite(steps[-1:], LOSS),
        eval_start=_finite(evals[:1], EVAL_LOSS),
        eval_final=_finite(last[-1:], EVAL_LOSS),
        bits_per_byte_start=_finite(evals[:1], BITS_PER_BYTE),
        bits_per_byte_final=_finite(last[-1:], BITS_PER_BYTE),
    )


def _finite(rows: Sequence[Row], key: str) -> float | None:
    value = rows[0].get(key) if rows else None
    return float(value) if value is not None and math.isfinite(value) else None


def no_runs(
    folders: Sequence[Path], command: str, notes: Sequence[str] = (), usual: str = "runs"
) -> Problem:
    """What is said of them.

    Args:
        folders: as given; none of them contains a run.
        command: of eke, which accepts another folder: `status`.
        notes: what of them could not be read.
        usual: the folder to suggest where no neighbour has a similar name.
    """
    why, meant = "holds no run and no sweep that can be read", None
    if not any(folder.exists() for folder in folders):
        why = "there is no such folder"
        near = closest_path(folders[0]) if len(folders) == 1 else None
        meant = near if near is not None and _leads_to_runs(near) else None
    text = ", ".join(map(str, folders))
    return Problem(
        "DIR", text, "; ".join([why, *notes]), Fix(remark=f"eke {command} {meant or usual}")
    )


def _leads_to_runs(folder: Path) -> bool:
    """Whether it is a sweep or a run, or holds one: a name that is near may be anything's."""
    marks = ("sweep.json", "plan.json", "record.json")
    return any(any(folder.glob(f"{depth}{mark}")) for depth in ("", "*/") for mark in marks)


class UnreadableRecord(EkeError):
    """A record is there, but cannot be read: reported, never dropped."""


@functools.cache  # 20 ms, and a sweep reads and writes a thousand records; immutable
def _converter() -> cattrs.Converter:
    return cattrs.Converter(forbid_extra_keys=True)


def write_record(paths: RunPaths, record: Record) -> None:
    """Write `record.json` atomically."""
    write_json(paths.record, _converter().unstructure(record))


def read_record(paths: RunPaths) -> Record | None:
    """The record of a run; None when there is none yet.

    Raises:
        UnreadableRecord: it is torn, of another version, or not a record.
    """
    try:
        content = read_json(paths.record, RECORD_LIMIT)
        if not isinstance(content, dict):
            raise UnreadableRecord(f"{paths.record}: not a readable record (no object)")
        version = content.get("schema_version")
        if version != RECORD_VERSION:
            raise UnreadableRecord(
                f"{paths.record}: record version {version}, this eke reads {RECORD_VERSION}"
            )
        record = _converter().structure(content, Record)
        Outcome(record.outcome)  # a ValueError for a word that is none
        return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, cattrs.BaseValidationError) as error:
        raise UnreadableRecord(f"{paths.record}: not a readable record ({error})") from error


def missing_run(told: str, folder: Path) -> str:
    """What is said of a run that a sweep has seen end, and whose folder is not there.

    Args:
        told: the outcome in the sweep's file; empty where it has none.
        folder: of the run.

    Returns:
        Empty where nothing is missing.
    """
    if not told or folder.exists():
        return ""
    return f"{told} by its sweep's file, but {folder} is not there: moved, or not copied along?"


def start_attempt(paths: RunPaths, machine: dict[str, str]) -> int:
    """Note that a worker starts on this run; returns the attempt's number, from 0.

    Args:
        paths: the run folder.
        machine: fingerprint of what it was planned for.
    """
    attempt = len(read_attempts(paths))
    entry = {
        "attempt": attempt,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.time(),
        "machine": machine,
    }
    seal(paths.attempts)
    append_line(paths.attempts, json.dumps(entry))
    return attempt


def read_attempts(paths: RunPaths) -> list[dict[str, Any]]:
    """All attempts so far, oldest first; a torn line, and one that is no object, is skipped."""
    try:
        lines = read_text(paths.attempts, 4 * RECORD_LIMIT).splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries
