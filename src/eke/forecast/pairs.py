"""Pairs of predicted and measured memory on disk: one file a group, a line a run.

Nothing here may stop a run or a plan: what cannot be written is lost, what cannot be read was not
there. Files are appended to by single writes, so that runs beside each other do not mix their
lines, and cut to their newest lines when they have grown to twice as many; a line that another run
appends in that instant is lost, which costs one observation.
"""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from eke.corpus import cache_folder
from eke.files import append_line, write_atomic
from eke.forecast.cache import key_of
from eke.forecast.calibration import Pair
from eke.forecast.notes import notes_of
from eke.hardware.fingerprint import installed_versions, package_folder, source_hash
from eke.identity import canonical
from eke.plan import Plan
from eke.record import Outcome, Record
from eke.record.metrics import seal

FOLDER = "EKE_CALIBRATION"
"""Environment variable: where the files lie, if not in the cache folder."""

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes")
"""Another version of one of them is another group."""

SHOWN = ("torch", "transformers")
"""Those that are named beside a correction."""

SOURCES = ("build", "forecast", "memory", "sizes")
"""Packages of eke that make a prediction, or what is measured: once they change, old pairs say
nothing."""

KEPT_LINES = 200
"""Newest runs of a group."""

KEPT_FILES = 200
"""Newest groups; 200 lines of 200 bytes each are 8 MB in all."""

LONGEST_FILE = 4 * 2**20
"""Bytes; a larger file was not written here."""

Group = dict[str, Any]

T = TypeVar("T")


def group_of(plan: Plan, method: str) -> Group:
    """What runs must have in common to say something of each other's forecasts.

    Args:
        plan: of the run.
        method: a value of `eke.forecast.Method`.
    """
    return {
        "device": plan.device.name,
        "kind": plan.device.kind,
        "method": method,
        "distributed": plan.config.distributed.option,
        "offload": plan.config.offload.option,
        "doubts": sorted(notes_of(plan)),
        **_software(),
    }


@cache
def _software() -> dict[str, str]:
    package = package_folder()
    hashes = [source_hash(package / name) for name in SOURCES]
    return {"formulas": " ".join(hashes), **installed_versions(LIBRARIES)}


def versions_of(group: Group) -> str:
    """The libraries that matter most, in words."""
    return ", ".join(f"{name} {group[name]}" for name in SHOWN if name in group)


def folder() -> Path:
    """Where the files lie."""
    own = os.environ.get(FOLDER)
    return Path(own) if own else cache_folder() / "calibration"


def path_of(group: Group) -> Path:
    """The file of a group."""
    return folder() / f"{hashlib.sha256(canonical(group).encode()).hexdigest()[:32]}.jsonl"


def read_pairs(group: Group) -> list[Pair]:
    """Pairs of a group, the newest last, one for each run; none where nothing readable is."""
    return list(read_with(path_of(group), _pairs_in))


def read_with(path: Path, parse: Callable[[Path, int, int], Sequence[T]]) -> Sequence[T]:
    """What a function finds in a group's file; nothing where there is nothing readable.

    Args:
        path: of the file.
        parse: also gets its time of change and size, to remember it by.
    """
    try:
        if not _is_readable(path):
            return []
        found = path.stat()
        return parse(path, found.st_mtime_ns, found.st_size)
    except (OSError, ValueError):
        return []


def _is_readable(path: Path) -> bool:
    """Whether it is a file of a size that is written here: a pipe would be waited for."""
    found = path.stat()
    return stat.S_ISREG(found.st_mode) and found.st_size <= LONGEST_FILE


@lru_cache(maxsize=64)  # a sweep asks for each of its cells
def _pairs_in(path: Path, changed_ns: int, size: int) -> tuple[Pair, ...]:
    lines = path.read_text(errors="replace").splitlines()
    pairs = [pair for line in lines if (pair := _parsed(line)) is not None]
    return tuple({pair.run_id: pair for pair in pairs}.values())[-KEPT_LINES:]


def _parsed(line: str) -> Pair | None:
    """The pair of a line; None for one that is torn or says what cannot be."""
    try:
        content = json.loads(line)
        pair = Pair(
            key=content["key"],
            run_id=content["run_id"],
            predicted=content["predicted"],
            measured=content["measured"],
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = (pair.predicted, pair.measured)
    if not all(type(number) is int for number in numbers):
        return None
    if not (isinstance(pair.key, str) and isinstance(pair.run_id, str)):
        return None
    return pair if pair.is_sane else None


def pair_of(plan: Plan, record: Record) -> Pair | None:
    """What a finished run adds; None where it measured nothing that was predicted.

    On a CPU sums of tensors; on a GPU what was reserved, with the driver's context as predicted,
    which no counter of PyTorch's has.
    """
    predicted, measured = record.memory.predicted, record.memory.measured
    if record.outcome != Outcome.ok.value or predicted is None or measured is None:
        return None
    if plan.device.kind == "cpu":
        if record.effective.get("skipped_steps"):  # the step looked at may have had no states
            return None
        expected, truth = predicted.allocated_bytes, measured.peak_allocated_bytes
    else:
        reserved = measured.peak_reserved_bytes
        context = predicted.components.get("context", 0)
        expected, truth = predicted.expected, None if reserved is None else reserved + context
    if not expected or not truth:
        return None
    pair = Pair(key_of(plan), record.run_id, expected, truth)
    return pair if pair.is_sane else None


def note_pair(plan: Plan, record: Record) -> None:
    """Keep what a finished run says of its forecast; nothing where that is not possible."""
    pair = pair_of(plan, record)
    if pair is None:
        return
    assert record.memory.predicted is not None
    group = group_of(plan, record.memory.predicted.method)
    add_line(path_of(group), json.dumps(dataclasses.asdict(pair)))


def add_line(path: Path, line: str) -> None:
    """Append to a group's file, and keep it and their number within bounds; lost if impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not _is_readable(path):
            return
        seal(path)
        append_line(path, line)
        _shorten(path)
        _forget_old(path.parent)
    except OSError:
        return


def _shorten(path: Path) -> None:
    """Keep the newest lines of a file that has twice as many."""
    lines = path.read_text(errors="replace").splitlines()
    if len(lines) > 2 * KEPT_LINES:
        write_atomic(path, "\n".join(lines[-KEPT_LINES:]) + "\n")


def _forget_old(within: Path) -> None:
    """Remove the files that were longest not written to, of groups beyond those that are kept."""
    files: Sequence[Path] = list(within.glob("*.jsonl"))
    if len(files) > KEPT_FILES:
        newest_last = sorted(files, key=lambda file: file.stat().st_mtime)
        for file in newest_last[:-KEPT_FILES]:
            file.unlink(missing_ok=True)
