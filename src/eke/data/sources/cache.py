"""Cache folder, cached file hashes, and memoized file access."""

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

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import Refused, hold_folder, own_folder, read_text, write_atomic

CHUNK_BYTES = 1 << 20
"""Bytes read at a time while hashing."""


def cache_folder() -> Path:
    """The folder for reproducible files: `$XDG_CACHE_HOME/eke`, else `~/.cache/eke`."""
    return _checked(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eke")


@functools.cache
def _checked(folder: Path) -> Path:
    """Check that no other user made the folder, from which tokens and reports' scripts come.

    Raises:
        ConfigError: another user did.
    """
    try:
        with hold_folder(folder), hold_folder(folder.resolve(), own=True):
            return folder
    except Refused as error:
        why = f"{error.strerror}; what lies there would be trained on"
        fix = Fix(remark="export XDG_CACHE_HOME=FOLDER_OF_YOURS")
        raise ConfigError(Problem("XDG_CACHE_HOME", str(folder), why, fix)) from error
    except OSError:  # it is not there yet, or nothing can be read in it
        return folder


def stamp(path: Path | int) -> tuple[int, ...]:
    """Size, mtime, ctime and inode of a file: values that change with its content.

    Size and mtime are not enough: `cp -p` and archives preserve them, and files of one size made in
    the same clock tick differ only in their inode.

    Raises:
        OSError: the file does not exist.
    """
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def digest_once(listing: object, digits: int, compute: Callable[[], str]) -> str:
    """Return a cached hash of files, or compute it; invalid cache entries are ignored.

    Args:
        listing: the files and their stamps; JSON-ready.
        digits: hex digits of the hash.
        compute: reads the files and hashes them.
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
    """Hash names (not locations) and contents of files in their order: 32 hex digits.

    Raises:
        OSError: a file cannot be read.
    """
    listed = list(files)
    listing = [[name, str(path.absolute()), *stamp(path)] for name, path in listed]

    def compute() -> str:
        sizes = [path.stat().st_size for _, path in listed]
        return content_hash(
            (f"{name}\0{size}\0", path, 0, size)
            for (name, path), size in zip(listed, sizes, strict=True)
        )

    return digest_once(listing, 32, compute)


def content_hash(parts: Iterable[tuple[str, Path, int, int]]) -> str:
    """SHA-256 of byte ranges (heading, file, first byte, bytes), each after its heading."""
    digest = hashlib.sha256()
    for heading, path, start, size in parts:
        digest.update(os.fsencode(heading))
        with open(path, "rb") as file:
            file.seek(start)
            while size and (chunk := file.read(min(size, CHUNK_BYTES))):
                digest.update(chunk)
                size -= len(chunk)
    return digest.hexdigest()


def remember(path: Path, text: str) -> None:
    """Write a text to the cache; errors are ignored."""
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
    """Cache the results of `once` functions within this context.

    Planning a sweep of a thousand runs then reads the size of each file once.
    """
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def once(look: Callable[P, T]) -> Callable[P, T]:
    """Memoize a function of hashable arguments within `looking_once`."""

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
