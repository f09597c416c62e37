"""The cache folder, and hashes of files kept in it by path, size and times of change.

Looking at files once, while many configurations are planned together.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from eke.common.files import own_folder, read_text, write_atomic

CHUNK_BYTES = 1 << 20
"""Read at a time while hashing."""


def cache_folder() -> Path:
    """Where eke keeps what can be made again: `$XDG_CACHE_HOME/eke`, else `~/.cache/eke`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eke"


def stamp(path: Path | int) -> tuple[int, ...]:
    """What cannot stay as it is when a file's content changes.

    The time of its last change of any kind is among it: size and modification time are those of
    the file before where a copy keeps them (`cp -p`, archives with fixed times). So is its number:
    files of one size that were made in the same tick of the clock differ in nothing else.

    Raises:
        OSError: there is no such file.
    """
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def digest_once(listing: object, digits: int, compute: Callable[[], str]) -> str:
    """A hash of files, computed where none is kept; what is kept and is no hash does not count.

    Args:
        listing: which files, with the stamp of each; JSON-ready.
        digits: hex digits of the hash.
        compute: reads the files.
    """
    name = hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:32]
    cached = cache_folder() / "fingerprints" / name
    try:
        kept = read_text(cached)
    except (OSError, ValueError):
        kept = ""
    if re.fullmatch(f"[0-9a-f]{{{digits}}}", kept):
        return kept
    result = compute()[:digits]
    remember(cached, result)
    return result


def files_digest(files: Iterable[tuple[str, Path]]) -> str:
    """32 hex digits over names and contents of files, in their order.

    Args:
        files: the name that counts (not where it lies) and the file.

    Raises:
        OSError: a file cannot be read.
    """
    listed = list(files)
    listing = [[name, str(path.absolute()), *stamp(path)] for name, path in listed]
    return digest_once(listing, 32, lambda: _content_hash(listed))


def _content_hash(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def remember(path: Path, text: str) -> None:
    """Keep a text in the cache; one that cannot be written is done without."""
    try:
        own_folder(path.parent)
        write_atomic(path, text)
    except OSError:
        return


P = ParamSpec("P")
T = TypeVar("T")

_found: ContextVar[dict[Hashable, Any] | None] = ContextVar("found", default=None)


@contextmanager
def looking_once() -> Iterator[None]:
    """Context in which every text is as it was when it was first looked at.

    A thousand cells of a sweep would otherwise ask a thousand times for the size of each file.
    """
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def once(look: Callable[P, T]) -> Callable[P, T]:
    """The same function of hashable arguments, which within `looking_once` looks once at each."""

    @functools.wraps(look)
    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        found = _found.get()
        if found is None:
            return look(*args, **kwargs)
        key = (look, args, tuple(sorted(kwargs.items())))
        if key not in found:
            found[key] = look(*args, **kwargs)
        kept: T = found[key]
        return kept

    return answer
