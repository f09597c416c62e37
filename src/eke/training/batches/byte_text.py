"""The bytes of text files as one stream of tokens, without holding large texts in memory."""

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from eke.common.errors import ChangedError, of_system
from eke.common.tokens import BOS, NUM_SPECIAL_TOKENS
from eke.data.sources import Piece, read_piece, stamp

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


Check = Callable[[], None]
"""Raises ChangedError where the text is no longer what was planned."""


def unchecked() -> None:
    """For text without a plan."""


def byte_stream(
    pieces: tuple[Piece, ...], in_memory: int = IN_MEMORY_BYTES, check: Check = unchecked
) -> Stream:
    """The bytes of all pieces in their order, a BOS token after each.

    Args:
        pieces: the text.
        in_memory: bytes up to which it is read at once.
        check: called when a file that is read in place is not as it was when this was called.
    """
    if sum(piece.size for piece in pieces) > in_memory:
        return InPlace(pieces, check)
    parts = [np.zeros(0, np.uint16)]
    for piece in pieces:
        parts += [_tokens(read_piece(piece)), np.array([BOS], np.uint16)]
    return np.concatenate(parts)


class InPlace:
    """Reads each stretch from the files when it is asked for; the page cache does the rest."""

    def __init__(
        self,
        pieces: tuple[Piece, ...],
        check: Check = unchecked,
        stamps: dict[Path, tuple[int, ...]] | None = None,
    ) -> None:
        self.pieces, self.check = pieces, check
        self.ends = np.cumsum([piece.size + 1 for piece in pieces])
        self.stamps = stamps or {piece.path: stamp(piece.path) for piece in pieces}
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        """Tokens from `window.start` to `window.stop`, uint16.

        Raises:
            ChangedError: a file is not what it was, or is gone.
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
        descriptor = self._descriptor(piece.path)
        content = os.pread(descriptor, count, piece.start + offset)
        if (found := stamp(descriptor)) != self.stamps[piece.path]:
            if os.fstat(descriptor).st_nlink:  # a deleted file changes no more
                self.check()  # one that was only touched goes on
            self.stamps[piece.path] = found
        if len(content) < count:
            raise ChangedError(f"{piece.path} is shorter than when the run was planned")
        return _tokens(content)

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            try:
                self._open[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise ChangedError(of_system(error)) from error
        self._open.move_to_end(path)
        return self._open[path]

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Descriptors do not travel to other processes."""
        return InPlace, (self.pieces, self.check, self.stamps)

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def _tokens(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8).astype(np.uint16) + np.uint16(NUM_SPECIAL_TOKENS)
