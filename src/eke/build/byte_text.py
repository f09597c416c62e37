"""The bytes of text files as one stream of tokens, without holding large texts in memory."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import numpy as np

from eke.corpus import Piece, read_piece
from eke.errors import RunError
from eke.tokens import BOS, NUM_SPECIAL_TOKENS

IN_MEMORY_BYTES = 256 * 2**20
"""Texts up to this size are kept in memory, as tokens of two bytes; larger ones are read in place.
The standard library's source, with its thousands of small files, has a tenth of it."""

OPEN_FILES = 64
"""Files kept open at a time; a process may often have 1024."""


class Stream(Protocol):
    """Tokens by position."""

    def __len__(self) -> int:
        """Number of tokens."""
        ...

    def __getitem__(self, window: slice) -> np.ndarray:
        """A stretch of tokens, unsigned integers."""
        ...


def byte_stream(pieces: tuple[Piece, ...], in_memory: int = IN_MEMORY_BYTES) -> Stream:
    """The bytes of all pieces in their order, a BOS token after each.

    Args:
        pieces: the text.
        in_memory: bytes up to which it is read at once.
    """
    if sum(piece.size for piece in pieces) > in_memory:
        return InPlace(pieces)
    parts = [np.zeros(0, np.uint16)]
    for piece in pieces:
        parts += [_tokens(read_piece(piece)), np.array([BOS], np.uint16)]
    return np.concatenate(parts)


class InPlace:
    """Reads each stretch from the files when it is asked for; the page cache does the rest."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        self.pieces = pieces
        self.ends = np.cumsum([piece.size + 1 for piece in pieces])
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        """Tokens from `window.start` to `window.stop`, uint16.

        Raises:
            RunError: a file is shorter than it was.
        """
        start, stop, _ = window.indices(len(self))
        found = np.full(max(0, stop - start), BOS, np.uint16)
        number = int(np.searchsorted(self.ends, start, side="right"))
        at = start
        while at < stop:
            piece, end = self.pieces[number], int(self.ends[number])
            begin = end - piece.size - 1
            last = min(stop, end - 1)  # the token after a piece is there already
            if at < last:
                found[at - start : last - start] = self._read(piece, at - begin, last - at)
            at, number = end, number + 1
        return found

    def _read(self, piece: Piece, offset: int, count: int) -> np.ndarray:
        content = os.pread(self._descriptor(piece.path), count, piece.start + offset)
        if len(content) < count:
            raise RunError(f"{piece.path} is shorter than when the run was planned")
        return _tokens(content)

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY)
        self._open.move_to_end(path)
        return self._open[path]

    def __getstate__(self) -> tuple[Piece, ...]:
        """Descriptors do not travel to other processes."""
        return self.pieces

    def __setstate__(self, pieces: tuple[Piece, ...]) -> None:
        self.__init__(pieces)  # type: ignore[misc]  # mypy 2.4 allows no second __init__

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def _tokens(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8).astype(np.uint16) + np.uint16(NUM_SPECIAL_TOKENS)
