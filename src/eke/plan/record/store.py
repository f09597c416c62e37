"""Records and attempts on disk."""

import functools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import cattrs

from eke.common.errors import EkeError
from eke.common.files import append_line, read_json, read_text, write_json
from eke.common.paths import RunPaths
from eke.plan.record import metrics
from eke.plan.record.outcome import Outcome
from eke.plan.record.record import RECORD_LIMIT, RECORD_VERSION, Record


class UnreadableRecord(EkeError):
    """A record is there, but cannot be read: reported, never dropped."""


@functools.cache  # 20 ms, and a sweep reads and writes a thousand records; nobody changes it
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
        told: the outcome by the sweep's file; empty where it knows none.
        folder: of the run.

    Returns:
        Empty where nothing is missing.
    """
    if not told or folder.exists():
        return ""
    return f"{told} by its sweep's file, but {folder} is not there: moved, or not copied along?"


def start_attempt(paths: RunPaths, machine: dict[str, str], process: str = "") -> int:
    """Note that a worker starts on this run; returns the attempt's number, from 0.

    Args:
        paths: the run folder.
        machine: fingerprint of what it was planned for.
        process: how this one was made, where that is a choice.
    """
    attempt = len(read_attempts(paths))
    entry = {
        "attempt": attempt,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.time(),
        "machine": machine,
        **({"process": process} if process else {}),
    }
    metrics.seal(paths.attempts)
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
