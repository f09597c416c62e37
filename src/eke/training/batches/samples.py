"""Samples by number: windows of a text, prepared rows, or random ones; whoever asks, the same.

A sample depends on its index, the epoch and the seeds alone, never on batch size, rank or worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from eke.config.schema import Synthetic
from eke.data.sources import Packs, Piece, Store, mix_seed, synthetic_length
from eke.training.batches.byte_text import Check, Stream, byte_stream, unchecked


@dataclass(frozen=True)
class Row:
    """One sequence of tokens."""

    tokens: np.ndarray
    """int64 token ids, shape (length,); the caller's own, to be written into."""
    cut: int = 0
    """Tokens at the beginning that are not predicted: a prompt, or a source."""


class Source(Protocol):
    """Sequences by number."""

    @property
    def framed(self) -> bool:
        """Sequences begin and end as their task needs, and know where source meets target.

        Otherwise they are stretches of one long text.
        """
        ...

    def __len__(self) -> int:
        """Number of sequences."""
        ...

    def row(self, index: int) -> Row:
        """One sequence."""
        ...

    def label(self, index: int) -> int:
        """Class of the sequence."""
        ...

    def lengths(self) -> np.ndarray:
        """Tokens of every sequence, shape (sequences,)."""
        ...


def seeded(*parts: int) -> torch.Generator:
    """A generator of its own for what these numbers name."""
    return torch.Generator().manual_seed(mix_seed(*parts))


@dataclass(frozen=True)
class Windows:
    """Equal windows over packed text, each class packed on its own."""

    streams: tuple[Stream, ...]
    """Tokens of each class, unsigned."""
    starts: np.ndarray
    """Class and offset of each window, shape (windows, 2)."""
    length: int
    framed: bool = False

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, index: int) -> Row:
        """One window."""
        stream, start = self.starts[index]
        window = self.streams[stream][start : start + self.length]
        return Row(window.astype(np.int64))

    def label(self, index: int) -> int:
        """Class of the text."""
        return int(self.starts[index][0])

    def lengths(self) -> np.ndarray:
        """All the same."""
        return np.full(len(self), self.length)


def cut_windows(streams: Sequence[Stream], length: int, keep: int | None = None) -> Windows:
    """Cut windows of `length` tokens out of one stream per class.

    Args:
        streams: tokens of each class.
        length: tokens per window.
        keep: take this many windows, spread evenly over the text; None takes all.
    """
    starts = []
    for number, stream in enumerate(streams):
        offsets = np.arange(len(stream) // length) * length
        starts.append(np.stack([np.full_like(offsets, number), offsets], axis=1))
    windows = np.concatenate(starts)
    return Windows(tuple(streams), windows[spread(len(windows), keep)], length)


def spread(count: int, keep: int | None) -> np.ndarray:
    """`keep` of `count` numbers, evenly spaced; all of them when there are no more."""
    if keep is None or keep >= count:
        return np.arange(count)
    return np.arange(keep) * count // keep


def pack_windows(
    pieces: tuple[Piece, ...],
    length: int,
    labels: list[str],
    keep: int | None = None,
    check: Check = unchecked,
) -> Windows:
    """Pack the bytes of pieces class by class, a BOS token after each, and cut windows.

    Args:
        pieces: the text.
        length: tokens per window.
        labels: classes in the order of their numbers.
        keep: take this many windows, spread evenly over the text; None takes all.
        check: see `byte_stream`.
    """
    parts = [tuple(p for p in pieces if p.label == label) for label in labels]
    streams = [byte_stream(part, check=check) for part in parts]
    return cut_windows(streams, length, keep)


def stored_windows(store: Store, evaluation: bool, length: int, keep: int) -> Windows:
    """Windows over the documents of a store, memory-mapped."""
    tokens = store.array("tokens")
    streams = [
        tokens[s.start : s.start + s.size]
        for s in sorted(store.manifest.streams, key=lambda s: s.label)
        if s.evaluation is evaluation
    ]
    return cut_windows(streams, length, keep)


@dataclass(frozen=True)
class StoredRows:
    """Prepared rows, memory-mapped."""

    tokens_of_all: np.ndarray
    offsets: np.ndarray
    cuts: np.ndarray
    labels: np.ndarray | None
    chosen: np.ndarray
    """Row of the store behind each sample."""
    framed: bool = True

    def __len__(self) -> int:
        return len(self.chosen)

    def row(self, index: int) -> Row:
        """One row."""
        number = self.chosen[index]
        tokens = self.tokens_of_all[self.offsets[number] : self.offsets[number + 1]]
        return Row(tokens.astype(np.int64), int(self.cuts[number]))

    def label(self, index: int) -> int:
        """Class of the row; 0 where there are none."""
        return 0 if self.labels is None else int(self.labels[self.chosen[index]])

    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return np.asarray(self.offsets[self.chosen + 1] - self.offsets[self.chosen])


def stored_rows(store: Store, split: str, keep: int | None) -> StoredRows:
    """The rows of one split (`train` or `evaluation`)."""
    rows = store.array(split)
    return StoredRows(
        tokens_of_all=store.array("tokens"),
        offsets=store.array("offsets"),
        cuts=store.array("cuts"),
        labels=store.array("labels") if store.has("labels") else None,
        chosen=rows[spread(len(rows), keep)],
    )


def stored_packs(store: Store, split: str) -> Packs:
    """Which rows of one split share a packed row."""
    return Packs(store.array(f"{split}_members"), store.array(f"{split}_offsets"))


@dataclass(frozen=True)
class RandomTokens:
    """The guides' dummy data: uniform token ids, uniform labels, nothing to learn."""

    data: Synthetic
    length: int
    """Tokens of the longest sequence."""
    vocab_size: int
    num_labels: int
    count: int
    split: int
    """0 training, 1 evaluation: different samples."""
    framed: bool = False

    def __len__(self) -> int:
        return self.count

    def _generator(self, index: int, purpose: int) -> torch.Generator:
        return seeded(self.data.data_seed, self.split, index, purpose)

    def row(self, index: int) -> Row:
        """Random ids, fewer when lengths are ragged."""
        length = synthetic_length(self.data, self.length, self.split, index)
        high = min(self.data.max_token, self.vocab_size)
        generator = self._generator(index, 0)
        tokens = torch.randint(self.data.min_token, high, (length,), generator=generator)
        return Row(tokens.numpy())

    def label(self, index: int) -> int:
        """Uniform over the classes (the guides' `randint(0, 1)` gives class 0 only)."""
        return int(torch.randint(self.num_labels, (1,), generator=self._generator(index, 1)))

    def lengths(self) -> np.ndarray:
        """Tokens of each sample."""
        found = (synthetic_length(self.data, self.length, self.split, i) for i in range(self.count))
        return np.fromiter(found, np.int64, self.count)
