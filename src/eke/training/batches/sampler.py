"""Sources of samples by index: windows of text, prepared rows, or random tokens."""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eke.common.errors import ChangedError, format_os_error
from eke.common.text import BOS, NUM_SPECIAL_TOKENS
from eke.config.schema import ProblemType, Synthetic, Task
from eke.data.sources import (
    FileRange,
    Store,
    file_signature,
    mix_seed,
    read_piece,
    synthetic_length,
)

_IN_MEMORY_BYTES = 256 * 2**20
"""Largest text kept in memory, as tokens of two bytes. Larger texts are read on demand."""

OPEN_FILES = 64
"""Most files kept open at a time. The usual limit of a process is 1024."""

_Check = Callable[[], None]
"""Function that raises ChangedError if the text differs from the plan."""


def _unchecked() -> None:
    """Accept any text, if there is no plan."""


def byte_stream(pieces: tuple[FileRange, ...], check: _Check = _unchecked) -> "_TokenSource":
    """Return the bytes of several ranges, each followed by BOS. `check` runs after file changes."""
    if sum(piece.size for piece in pieces) > _IN_MEMORY_BYTES:
        return InPlace(pieces, check)
    parts = [np.zeros(0, np.uint16)]
    for piece in pieces:
        parts += [_tokens(read_piece(piece)), np.array([BOS], np.uint16)]
    return np.concatenate(parts)


class InPlace:
    """Stream that reads files on demand and relies on the page cache."""

    def __init__(
        self,
        pieces: tuple[FileRange, ...],
        check: _Check = _unchecked,
        stamps: dict[Path, tuple[int, ...]] | None = None,
    ) -> None:
        self.pieces, self.check = pieces, check
        self.ends = np.cumsum([piece.size + 1 for piece in pieces])
        self.stamps = stamps or {piece.path: file_signature(piece.path) for piece in pieces}
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        """Return the tokens of a slice, uint16. ChangedError: A file was changed or deleted."""
        start, stop, _ = window.indices(len(self))
        found = np.full(max(0, stop - start), BOS, np.uint16)
        first, last = np.searchsorted(self.ends, (start, stop - 1), side="right").tolist()
        read = slice(first, last + 1)
        for piece, end in zip(self.pieces[read], self.ends[read].tolist(), strict=True):
            begin = end - piece.size - 1
            at, last = max(start, begin), min(stop, end - 1)  # `found` already contains BOS
            if at < last:
                found[at - start : last - start] = self._read(piece, at - begin, last - at)
        return found

    def _read(self, piece: FileRange, offset: int, count: int) -> np.ndarray:
        descriptor = self._descriptor(piece.path)
        content = os.pread(descriptor, count, piece.start + offset)
        if (found := file_signature(descriptor)) != self.stamps[piece.path]:
            if os.fstat(descriptor).st_nlink:  # a deleted file cannot change
                self.check()  # does not raise if only the modification time changed
            self.stamps[piece.path] = found
        if len(content) < count:
            raise ChangedError(f"{piece.path} is shorter than when the run was planned")
        return _tokens(content)

    def _descriptor(self, path: Path) -> int:
        """Return the descriptor of a file, which stays readable if it is replaced or deleted."""
        if path not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            try:
                self._open[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise ChangedError(format_os_error(error)) from error
        self._open.move_to_end(path)
        return self._open[path]

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return InPlace, (self.pieces, self.check, self.stamps)

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


_TokenSource = np.ndarray | InPlace
"""Tokens by position, unsigned integers."""


def _tokens(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8).astype(np.uint16) + np.uint16(NUM_SPECIAL_TOKENS)


@dataclass(frozen=True)
class TokenRow:
    """One sequence of tokens."""

    tokens: np.ndarray
    """Token ids, int64 `[length]`. The caller owns them and may modify them."""
    cut: int = 0
    """Leading tokens without loss (prompt or source), or tokens of the first text of a pair."""
    trained: np.ndarray | None = None
    """Tokens with loss of a conversation, bool `[length]`. None: all tokens after the cut."""


def as_label(targets: Task, value: Any) -> np.ndarray:
    """Return a class (int64 `[]`), a number (float32 `[]`) or classes (multi-hot `[classes]`)."""
    if targets.problem is not ProblemType.multi_label:
        return np.asarray(value, np.int64 if targets.problem is ProblemType.single else np.float32)
    has = np.zeros(targets.num_labels, np.float32)
    has[value] = 1
    return has


def seeded(*parts: int) -> torch.Generator:
    """Return a generator seeded by several numbers."""
    return torch.Generator().manual_seed(mix_seed(*parts))


@dataclass(frozen=True)
class Windows:
    """Equal windows of text, by class."""

    streams: tuple[_TokenSource, ...]
    """Tokens of each class, unsigned integers."""
    starts: np.ndarray
    """Class and offset of each window, `[windows, 2]`."""
    length: int
    framed: bool = False

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, index: int) -> TokenRow:
        """Return a window."""
        stream, start = self.starts[index]
        window = self.streams[stream][start : start + self.length]
        return TokenRow(window.astype(np.int64))

    def label(self, index: int) -> int:
        """Return the class of a window."""
        return int(self.starts[index][0])

    def lengths(self) -> np.ndarray:
        """Return equal lengths, `[windows]`."""
        return np.full(len(self), self.length)


def _cut_windows(streams: Sequence[_TokenSource], length: int, keep: int | None = None) -> Windows:
    """Cut one stream per class into windows of `length` tokens: all, or `keep` evenly spaced."""
    offsets = [np.arange(len(stream) // length) * length for stream in streams]
    numbers = np.repeat(np.arange(len(streams)), [len(each) for each in offsets])
    windows = np.stack([numbers, np.concatenate(offsets)], axis=1)
    return Windows(tuple(streams), windows[evenly_spaced(len(windows), keep)], length)


def evenly_spaced(count: int, keep: int | None) -> np.ndarray:
    """Return `keep` evenly spaced indices below `count`, at most all."""
    if keep is None or keep >= count:
        return np.arange(count)
    return np.arange(keep) * count // keep


def pack_windows(
    pieces: tuple[FileRange, ...],
    length: int,
    labels: list[str],
    keep: int | None = None,
    check: _Check = _unchecked,
) -> Windows:
    """Concatenate byte ranges by class, each followed by BOS, and cut them into windows."""
    parts = [tuple(p for p in pieces if p.label == label) for label in labels]
    return _cut_windows([byte_stream(part, check) for part in parts], length, keep)


def stored_windows(store: Store, evaluation: bool, length: int, keep: int) -> Windows:
    """Return windows over the documents of a store, memory-mapped."""
    tokens = store.array("tokens")
    streams = [
        tokens[s.start : s.start + s.size]
        for s in sorted(store.manifest.streams, key=lambda s: s.label)
        if s.evaluation is evaluation
    ]
    return _cut_windows(streams, length, keep)


class StoredRows:
    """Prepared rows of a split (`train` or `evaluation`), memory-mapped."""

    framed = True

    def __init__(self, store: Store, split: str, keep: int | None) -> None:
        self.tokens, self.offsets = store.array("tokens"), store.array("offsets")
        self.cuts = store.array("cuts")
        optional = ("labels", "values", "label_offsets", "trained")
        held = {name: store.array(name) for name in optional if store.has(name)}
        self.labels, self.trained = held.get("labels", held.get("values")), held.get("trained")
        self.label_offsets = held.get("label_offsets")
        rows = store.array(split)
        self.chosen = rows[evenly_spaced(len(rows), keep)]

    def __len__(self) -> int:
        return len(self.chosen)

    def row(self, index: int) -> TokenRow:
        """Return a row."""
        number = self.chosen[index]
        held = slice(self.offsets[number], self.offsets[number + 1])
        trained = None if self.trained is None else self.trained[held].astype(bool)
        return TokenRow(self.tokens[held].astype(np.int64), int(self.cuts[number]), trained)

    def label(self, index: int) -> Any:
        """Return the class of the row (0 without classes), its classes, or its number."""
        number = self.chosen[index]
        if self.labels is not None and self.label_offsets is not None:
            return self.labels[slice(*self.label_offsets[number : number + 2])]
        return 0 if self.labels is None else self.labels[number]

    def lengths(self) -> np.ndarray:
        """Return the tokens of each row."""
        return np.asarray(self.offsets[self.chosen + 1] - self.offsets[self.chosen])


@dataclass(frozen=True)
class RandomTokens:
    """Dummy data as in the guides: uniform token ids and labels."""

    data: Synthetic
    length: int
    vocab_size: int
    num_labels: int
    count: int
    split: int
    """0 for training, 1 for evaluation, which have different samples."""
    problem: ProblemType = ProblemType.single
    framed: bool = False

    def __len__(self) -> int:
        return self.count

    def row(self, index: int) -> TokenRow:
        """Return random ids, fewer if lengths are ragged."""
        length = synthetic_length(self.data, self.length, self.split, index)
        high = min(self.data.max_token, self.vocab_size or self.data.max_token)
        generator = seeded(self.data.data_seed, self.split, index, 0)
        tokens = torch.randint(self.data.min_token, high, (length,), generator=generator)
        return TokenRow(tokens.numpy())

    def label(self, index: int) -> Any:
        """Return a uniform class, a set of classes, or a number."""
        generator = seeded(self.data.data_seed, self.split, index, 1)
        if self.problem is ProblemType.regression:
            return float(torch.randn(1, generator=generator))
        if self.problem is ProblemType.multi_label:
            return torch.rand(self.num_labels, generator=generator).numpy() < 0.5
        return int(torch.randint(self.num_labels, (1,), generator=generator))

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sample."""
        found = (synthetic_length(self.data, self.length, self.split, i) for i in range(self.count))
        return np.fromiter(found, np.int64, self.count)
