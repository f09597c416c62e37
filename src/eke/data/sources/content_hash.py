"""Cache folder, cached file hashes and memoized file access."""

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import (
    UntrustedPathError,
    make_private_dir,
    open_trusted_dir,
    read_text,
    write_atomic,
)
from eke.common.paths import home_folder

CHUNK_BYTES = 1 << 20
"""Bytes read at a time."""


def cache_folder() -> Path:
    """Return the folder for reproducible files: `$XDG_CACHE_HOME/eke`, else `~/.cache/eke`."""
    return _check_owner(Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "eke")


@functools.cache
def _check_owner(folder: Path) -> Path:
    """Raise ConfigError if another user owns the cache folder."""
    try:
        with open_trusted_dir(folder), open_trusted_dir(folder.resolve(), own=True):
            return folder
    except UntrustedPathError as error:
        why = f"{error.strerror}. Prepared tokens are read from this folder"
        fix = Fix(remark="export XDG_CACHE_HOME=FOLDER_OF_YOURS")
        problem = Problem("XDG_CACHE_HOME", str(folder), why, fix, "untrusted_file")
        raise ConfigError(problem) from error
    except OSError:  # missing or unreadable
        return folder


def file_signature(path: Path | int) -> tuple[int, ...]:
    """Return size, mtime, ctime and inode of a file, which change with its content."""
    # Size and mtime do not suffice: `cp -p` and archives preserve them. Two files of the same size
    # from the same clock tick differ only in their inode.
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def digest_once(listing: object, digits: int, compute: Callable[[], str]) -> str:
    """Return the hash cached for `listing` (files and their stamps), or compute and cache it."""
    name = hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:32]
    cached = cache_folder() / "fingerprints" / name
    try:
        kept = read_text(cached)
    except (OSError, ValueError):
        kept = ""
    if re.fullmatch(f"[0-9a-f]{{{digits}}}", kept):
        return kept
    result = compute()[:digits]
    with suppress(OSError):
        make_private_dir(cached.parent)
        write_atomic(cached, result)
    return result


def files_digest(files: Iterable[tuple[str, Path]]) -> str:
    """Hash the names (not locations) and contents of files, in order, to 32 hex digits."""
    stamps = [(name, path, file_signature(path)) for name, path in files]
    listing = [[name, str(path.absolute()), *found] for name, path, found in stamps]
    parts = [(f"{name}\0{size}\0", path, 0, size) for name, path, (size, *_) in stamps]
    return digest_once(listing, 32, lambda: content_hash(parts))


def content_hash(parts: Iterable[tuple[str, Path, int, int]]) -> str:
    """Return the SHA-256 of byte ranges (heading, file, first byte, bytes) and their headings."""
    digest = hashlib.sha256()
    for heading, path, start, size in parts:
        digest.update(os.fsencode(heading))
        with open(path, "rb") as file:
            file.seek(start)
            while size and (chunk := file.read(min(size, CHUNK_BYTES))):
                digest.update(chunk)
                size -= len(chunk)
    return digest.hexdigest()


_P = ParamSpec("_P")
_T = TypeVar("_T")

_found: ContextVar[dict[Hashable, Any] | None] = ContextVar("found", default=None)


@contextmanager
def memoize_file_reads() -> Iterator[None]:
    """Cache the results of `memoized` functions while the context is open."""
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def memoized(look: Callable[_P, _T]) -> Callable[_P, _T]:
    """Memoize a function of hashable arguments inside `memoize_file_reads`."""

    @functools.wraps(look)
    def answer(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if (found := _found.get()) is None:
            return look(*args, **kwargs)
        if look not in found:
            found[look] = functools.cache(look)
        kept: _T = found[look](*args, **kwargs)
        return kept

    return answer
