"""Samples by number: token windows of a text, or random ones; deterministic, whoever asks.

A sample depends on its index, the epoch and the seeds alone, never on batch size, rank or worker.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eke.corpus import Piece, read_piece
from eke.schema import Lengths, Synthetic
from eke.tokens import BOS, NUM_SPECIAL_TOKENS


class Source(Protocol):
    """Token sequences by number."""

    def __len__(self) -> int:
        """Number of sequences."""
        ...

    def tokens(self, index: int) -> Tensor:
        """int64 token ids, shape (length,)."""
        ...

    def label(self, index: int) -> int:
        """Class of the sequence."""
        ...


def mix_seed(*parts: int) -> int:
    """One 63-bit seed from several numbers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Windows:
    """Equal windows over packed text, each class packed on its own."""

    streams: tuple[np.ndarray, ...]
    """Tokens of each class, uint16."""
    starts: np.ndarray
    """Class and offset of each window, shape (windows, 2)."""
    length: int

    def __len__(self) -> int:
        return len(self.starts)

    def tokens(self, index: int) -> Tensor:
        """int64 token ids, shape (length,)."""
        stream, start = self.starts[index]
        window = self.streams[stream][start : start + self.length]
        return torch.from_numpy(window.astype(np.int64))

    def label(self, index: int) -> int:
        """Class of the text."""
        return int(self.starts[index][0])


def pack_windows(
    pieces: tuple[Piece, ...], length: int, labels: list[str], keep: int | None = None
) -> Windows:
    """Pack pieces class by class, a BOS token after each, and cut windows of `length` tokens.

    Args:
        pieces: the text.
        length: tokens per window.
        labels: classes in the order of their numbers.
        keep: take this many windows, spread evenly over the text; None takes all.
    """
    streams, starts = [], []
    for number, label in enumerate(labels):
        parts = []
        for piece in pieces:
            if piece.label == label:
                parts.append(np.frombuffer(read_piece(piece), np.uint8).astype(np.uint16))
                parts[-1] += NUM_SPECIAL_TOKENS
                parts.append(np.array([BOS], np.uint16))
        stream = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
        streams.append(stream)
        offsets = np.arange(len(stream) // length) * length
        starts.append(np.stack([np.full_like(offsets, number), offsets], axis=1))
    windows = np.concatenate(starts)
    if keep is not None and keep < len(windows):
        windows = windows[np.arange(keep) * len(windows) // keep]
    return Windows(tuple(streams), windows, length)


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

    def __len__(self) -> int:
        return self.count

    def _generator(self, index: int, purpose: int) -> torch.Generator:
        seed = mix_seed(self.data.data_seed, self.split, index, purpose)
        return torch.Generator().manual_seed(seed)

    def tokens(self, index: int) -> Tensor:
        """int64 token ids, shape (length,), shorter when lengths are ragged."""
        generator = self._generator(index, 0)
        length = self.length
        if self.data.lengths is Lengths.uniform:
            shortest = self.data.min_len or max(2, self.data.seq_len // 2)
            length = int(torch.randint(shortest, self.length + 1, (1,), generator=generator))
        high = min(self.data.max_token, self.vocab_size)
        return torch.randint(self.data.min_token, high, (length,), generator=generator)

    def label(self, index: int) -> int:
        """Uniform over the classes (the guides' `randint(0, 1)` gives class 0 only)."""
        return int(torch.randint(self.num_labels, (1,), generator=self._generator(index, 1)))
