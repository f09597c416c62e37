"""What finished runs have taught, on disk: one file a group of runs that compare, a line a run.

Memory (`eke.estimate.memory.memory_history`) and time (`eke.estimate.time.time_history`) keep
theirs here. Nothing here may stop a run or a plan: what cannot be written is lost, what cannot be
read was not there. Files are appended to by single writes, so that runs beside each other do not
mix their lines, and cut to their newest lines when they have grown to twice as many; a line that
another run appends in that instant is lost, which costs one observation.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from eke.common.files import append_line, own_folder, read_text, write_atomic
from eke.data.sources import cache_folder
from eke.hardware.fingerprint import LIBRARIES, installed_versions, package_folder, source_hash
from eke.plan.identity import canonical
from eke.plan.record.metrics import seal

FOLDER = "EKE_CALIBRATION"
"""Environment variable: where the files lie, if not in the cache folder."""

SHOWN = ("torch", "transformers")
"""Those that are named beside a correction."""

KEPT_LINES = 200
"""Newest runs of a group."""

KEPT_FILES = 200
"""Newest groups; 200 lines of 200 bytes each are 8 MB in all."""

LONGEST_FILE = 4 * 2**20
"""Bytes; a larger file was not written here."""

Group = dict[str, Any]

T = TypeVar("T")


@cache
def software(*packages: str) -> dict[str, str]:
    """What a group has in common besides its runs' own facts: eke's formulas, and libraries.

    Args:
        packages: of eke, that make a prediction or what is measured: once they change, old lines
            say nothing.
    """
    hashes = [source_hash(package_folder() / name) for name in packages]
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


def read_lines(
    path: Path, parse: Callable[[str], T | None], key: Callable[[T], str]
) -> tuple[T, ...]:
    """What the lines of a group's file say, the newest last; nothing where nothing is readable.

    Args:
        path: of the file.
        parse: what a line says; None for one that is torn or says what cannot be.
        key: of what was said; of those with the same one the newest counts, in the oldest's place.
    """
    try:
        if not _is_readable(path):
            return ()
        found = path.stat()
        return _parsed(path, found.st_mtime_ns, found.st_size, parse, key)
    except (OSError, ValueError):
        return ()


@lru_cache(maxsize=64)  # a sweep asks for each of its cells
def _parsed(
    path: Path,
    changed_ns: int,
    size: int,
    parse: Callable[[str], Any],
    key: Callable[[Any], str],
) -> tuple[Any, ...]:
    """The lines of a file, remembered until its time of change or size are others."""
    lines = read_text(path, LONGEST_FILE).splitlines()
    found = [each for line in lines if (each := parse(line)) is not None]
    return tuple({key(each): each for each in found}.values())[-KEPT_LINES:]


def _is_readable(path: Path) -> bool:
    """Whether it is a file of a size that is written here: a pipe would be waited for."""
    found = path.stat()
    return stat.S_ISREG(found.st_mode) and found.st_size <= LONGEST_FILE


def add_line(path: Path, line: str) -> None:
    """Append to a group's file, and keep it and their number within bounds; lost if impossible."""
    try:
        own_folder(path.parent)
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
    lines = read_text(path, LONGEST_FILE).splitlines()
    if len(lines) > 2 * KEPT_LINES:
        write_atomic(path, "\n".join(lines[-KEPT_LINES:]) + "\n")


def _forget_old(within: Path) -> None:
    """Remove the files that were longest not written to, of groups beyond those that are kept."""
    files: Sequence[Path] = list(within.glob("*.jsonl"))
    if len(files) > KEPT_FILES:
        newest_last = sorted(files, key=lambda file: file.stat().st_mtime)
        for file in newest_last[:-KEPT_FILES]:
            file.unlink(missing_ok=True)
