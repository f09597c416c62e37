"""The cache folder, and hashes of files kept in it by path, size and modification time."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from eke.files import write_atomic

CHUNK_BYTES = 1 << 20
"""Read at a time while hashing."""


def cache_folder() -> Path:
    """Where eke keeps what can be made again: `$XDG_CACHE_HOME/eke`, else `~/.cache/eke`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eke"


def files_digest(files: Iterable[tuple[str, Path]]) -> str:
    """32 hex digits over names and contents of files, in their order.

    Args:
        files: the name that counts (not where it lies) and the file.

    Raises:
        OSError: a file cannot be read.
    """
    listed = list(files)
    stats = [(name, path, path.stat()) for name, path in listed]
    listing = json.dumps([[n, str(p.absolute()), s.st_size, s.st_mtime_ns] for n, p, s in stats])
    cached = cache_folder() / "fingerprints" / hashlib.sha256(listing.encode()).hexdigest()[:32]
    try:
        return cached.read_text()
    except (OSError, ValueError):
        pass
    digest = hashlib.sha256()
    for name, path in listed:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    result = digest.hexdigest()[:32]
    remember(cached, result)
    return result


def remember(path: Path, text: str) -> None:
    """Keep a text in the cache; one that cannot be written is done without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError:
        return
