"""Atomic writing of a store, and its split into training and evaluation rows."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import fsync_directory, make_private_dir, open_file, remove_tree
from eke.data.preparation.lines import Fields
from eke.data.sources import MANIFEST, Manifest, Vocabulary, array_dtype, cache_folder


def _disk_error(error: OSError) -> ConfigError:
    folder = cache_folder()
    why = f"the cache folder cannot be written: {error.strerror or error}"
    too_large = error.errno == errno.EFBIG  # another folder does not help
    other_folder = "export XDG_CACHE_HOME=FOLDER_WITH_SPACE"
    fix = Fix(remark="ulimit -f unlimited" if too_large else other_folder)
    return ConfigError(Problem("XDG_CACHE_HOME", str(folder), why, fix, "not_writable"))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a store. The system releases it when the process ends."""
    try:
        make_private_dir(folder.parent)
        place = folder.parent / f".{folder.name}.lock"
        lock = os.fdopen(open_file(place, os.O_WRONLY | os.O_CREAT), "ab")
    except OSError as error:
        raise _disk_error(error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def temporary(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that finally replaces the store, or is removed on errors."""
    # The caller holds the store's lock, so all older temporary folders are unused.
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        remove_tree(left)
    unfinished = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        unfinished.mkdir()
        yield unfinished
        fsync_directory(unfinished)
        remove_tree(folder)
        os.replace(unfinished, folder)
        fsync_directory(folder.parent)
    except OSError as error:
        raise _disk_error(error) from error
    finally:
        remove_tree(unfinished)


class Writer:
    """Writer of a store's arrays, one file each, with a hash of all arrays."""

    def __init__(self, folder: Path, vocabulary: Vocabulary) -> None:
        self.folder = folder
        self.vocabulary = vocabulary
        self.token_bytes = 2 if vocabulary.size <= 1 << 16 else 4
        self.counts: dict[str, int] = {}
        self._files: dict[str, BinaryIO] = {}
        self._digest = hashlib.sha256()
        # The meaning of the ids matters, but not the tokenizer's path.
        self.note(repr(replace(vocabulary, tokenizer="")))

    def dtype(self, name: str) -> "np.dtype[Any]":
        """Return the data type of an array."""
        return np.dtype(array_dtype(name, self.token_bytes))

    def note(self, text: str) -> None:
        """Add a text to the hash."""
        self._digest.update(text.encode(errors="surrogateescape"))

    def append(self, name: str, values: "np.ndarray | list[Any]") -> None:
        """Add elements to an array."""
        if name not in self._files:
            self._files[name] = open(self.folder / f"{name}.bin", "wb")  # noqa: SIM115  # close()
            self.counts[name] = 0
        data = np.asarray(values, self.dtype(name)).tobytes()
        self._files[name].write(data)
        self.counts[name] += len(values)
        self._digest.update(name.encode() + data)

    def replace(self, name: str, parts: Iterator[np.ndarray]) -> None:
        """Rewrite an array. `parts` may read the old array."""
        self._files.pop(name).close()
        count = 0
        with open(self.folder / f"{name}.new", "wb") as file:
            for part in parts:
                data = part.astype(self.dtype(name)).tobytes()
                file.write(data)
                self._digest.update(data)
                count += len(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.folder / f"{name}.new", self.folder / f"{name}.bin")
        self.counts[name] = count

    def read(self, name: str) -> np.ndarray:
        """Map the elements written so far."""
        if name in self._files:
            self._files[name].flush()
        if not self.counts.get(name):
            return np.zeros(0, self.dtype(name))
        return np.memmap(self.folder / f"{name}.bin", self.dtype(name), mode="r")

    def close(self) -> None:
        """Flush and fsync all files."""
        while self._files:
            _, file = self._files.popitem()
            with file:
                file.flush()
                os.fsync(file.fileno())

    def finish(self, key: str, **counted: Any) -> None:
        """Close all files and write the manifest."""
        self.close()
        manifest = Manifest(
            key=key,
            digest=self._digest.hexdigest()[:32],
            vocabulary=self.vocabulary,
            token_bytes=self.token_bytes,
            counts=dict(self.counts),
            **counted,
        )
        text = json.dumps(asdict(manifest), indent=1)
        (self.folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


@dataclass
class Splits:
    """Training and evaluation split by a hash of the texts, so that duplicates share a split."""

    writer: Writer
    eval_frac: float
    _hashes: "array[int]" = field(default_factory=lambda: array("Q"))
    """Hashes of all rows by number, until both splits have a row."""

    def add(self, rows: list[Fields], first: int, evaluation: bool | None) -> None:
        """Assign rows numbered from `first` to a split; `evaluation` None: by hash."""
        if evaluation is not None:
            numbers = list(range(first, first + len(rows)))
            self.writer.append("evaluation" if evaluation else "train", numbers)
            return
        counts = self.writer.counts
        is_incomplete = not (counts["train"] and counts["evaluation"])
        bound = int(self.eval_frac * 2**64)
        kept: tuple[list[int], list[int]] = ([], [])
        for number, row in enumerate(rows, first):
            digest = hashlib.blake2b(repr(row.texts).encode(), digest_size=8).digest()
            value = int.from_bytes(digest, "little")
            kept[value < bound].append(number)
            if is_incomplete:
                self._hashes.append(value)
        self.writer.append("train", kept[0])
        self.writer.append("evaluation", kept[1])

    def fill_empty_side(self) -> None:
        """Move one row to the empty split, with its duplicates unless these are all rows."""
        counts = self.writer.counts
        full, empty = ("train", "evaluation") if counts["train"] else ("evaluation", "train")
        hashes = np.asarray(self._hashes)
        crossing = hashes.min() if full == "train" else hashes.max()
        equal = np.flatnonzero(hashes == crossing)
        moved = equal if len(equal) < counts[full] else equal[:1]
        old = self.writer.read(full)
        self.writer.append(empty, moved)
        self.writer.replace(full, (part[~np.isin(part, moved)] for part in parts_of(old)))


def parts_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield parts of a million elements of an array that may exceed memory."""
    for start in range(0, len(array), 1 << 20):
        yield np.asarray(array[start : start + (1 << 20)])
