"""What was sent already, kept in the run folder; and who may send now."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eke.files import open_file, read_json, write_json
from eke.locks import try_lock
from eke.paths import RunPaths

RECEIPT_VERSION = 1


@dataclass(frozen=True)
class Receipt:
    """One run at one place."""

    server: str
    entity: str
    project: str
    digest: str
    """Of the files that were sent; another one means that the run has gone on since."""
    num_rows: int
    url: str
    is_verified: bool
    """The server was asked afterwards, and has them."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def place(self) -> tuple[str, str, str]:
        """Where it was sent to."""
        return (self.server, self.entity, self.project)


def read_receipts(paths: RunPaths) -> list[Receipt]:
    """All receipts; none where the file is missing or broken: then the run is sent again."""
    try:
        content: Any = read_json(paths.receipt)
        return [Receipt(**entry) for entry in content["sent"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def add_receipt(paths: RunPaths, receipt: Receipt) -> None:
    """Write a receipt in the place of an older one for the same place.

    Raises:
        OSError: the folder cannot be written.
    """
    others = [other for other in read_receipts(paths) if other.place != receipt.place]
    entries = [asdict(entry) for entry in (*others, receipt)]
    write_json(paths.receipt, {"schema_version": RECEIPT_VERSION, "sent": entries})


@contextmanager
def sole_sender(paths: RunPaths) -> Iterator[bool]:
    """Whether no other `eke sync` sends this run; the claim lasts as long as the block.

    A folder that cannot be written cannot be claimed; sending a run twice does no harm.
    """
    descriptor = _open_lock(paths.sync_lock)
    try:
        yield descriptor is None or _claim(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open_lock(path: Path) -> int | None:
    try:
        return open_file(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        return None


def _claim(descriptor: int) -> bool:
    try:
        return try_lock(descriptor)
    except OSError:  # a file system without locks
        return True
