"""Rows that are read while training: in the order of their files, through a shuffle buffer.

Which row comes when depends on the seed, the buffer's size and the rows' order alone. Each process
makes the same draws among rows that are not parsed, and parses and tokenizes those it is asked for.
"""

import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from eke.common.errors import EkeError, RunError
from eke.data.preparation.chat import ChatRows
from eke.data.preparation.lines import (
    BadRowError,
    Columns,
    Fields,
    Unparsed,
    jsonl_rows,
    parsed,
    unparsed_rows,
)
from eke.data.preparation.rows import Sequences, reader_of
from eke.data.preparation.tokenizers import load_request_tokenizer
from eke.data.sources import Manifest, PrepareRequest, mix_seed


@dataclass(frozen=True)
class Taken:
    """A row of a stream, as a store has it."""

    fields: Fields
    tokens: np.ndarray
    cut: int
    skipped: int = 0
    """Rows before it that cannot be used."""


class Rows:
    """Reader of single rows; counts those that cannot be used."""

    def __init__(self, request: PrepareRequest, manifest: Manifest, max_bad_frac: float) -> None:
        tokenizer = load_request_tokenizer(request)
        names = {name: number for number, name in enumerate(manifest.label_names)}
        kind = "name" if names else "number"
        self.columns = Columns(request, kind, names, are_all=True)
        self.sequences = Sequences(request, tokenizer)
        self.chat = ChatRows(request, tokenizer) if request.train_on else None
        self.max_bad_frac = max_bad_frac
        self.seen, self.bad = manifest.num_rows, manifest.num_bad

    def used(self, row: Unparsed) -> Taken | None:
        """The tokens of a row; None if it cannot be used.

        Raises:
            RunError: too many rows are bad.
        """
        place, values = parsed(row, self.columns.names_wanted)
        self.seen += 1
        try:
            if isinstance(values, BadRowError):
                raise values
            fields = (self.chat or self.columns).take(values)
        except BadRowError as bad:
            self.bad += 1
            self._check(f"{place} {bad}")
            return None
        made = (fields.ids, 0) if self.chat else self.sequences.of([fields])[0]
        return None if made is None else Taken(fields, *made)

    def _check(self, last: str) -> None:
        if self.bad > self.max_bad_frac * self.seen:
            more = min(1.0, math.ceil(2000 * self.bad / self.seen) / 1000)
            fix = "data.bad_rows=skip" if self.chat else f"data.max_bad_frac={more:g}"
            why = f"{self.bad} of {self.seen} rows so far cannot be used"
            raise RunError(f"{last}; {why} -> {fix}, and the run goes on from its checkpoint")


@dataclass
class RowStream:
    """The rows to train on, by their numbers, which ascend."""

    request: PrepareRequest
    manifest: Manifest
    """Of the store with the evaluation and the first rows."""
    buffer_size: int
    seed: int
    epoch_size: int | None
    """Rows of the files that an epoch takes; None takes all."""
    max_bad_frac: float
    check: Callable[[], None]
    """Raises if the files have changed; called when they are opened."""
    _process: int = 0
    _epoch: int = 0
    _length: int = 0
    """Rows of an epoch; 0 until the first one is over."""
    _next: int = 0
    _buffer: list[Unparsed] = field(default_factory=list)

    def take(self, number: int) -> Taken | None:
        """A row; where it cannot be used, another one of the buffer, which comes again later.

        Returns:
            None if no row of the buffer can be used.

        Raises:
            RunError: a file has changed or cannot be read, or too many rows are bad.
        """
        try:
            row, place = self._advance(number)
            if (taken := self._rows.used(row)) is not None:
                return taken
            # The one that is now in its place, and those behind: nothing moves in the buffer.
            for skipped, other in enumerate(self._buffer[place:] + self._buffer[:place], 1):
                if (taken := self._rows.used(other)) is not None:
                    return replace(taken, skipped=skipped)
            return None
        except RunError:
            raise
        except EkeError as error:
            raise RunError(error.short()) from error

    def _advance(self, number: int) -> tuple[Unparsed, int]:
        if self._process != os.getpid():  # a fork would share the files' positions
            self._process, self._next = os.getpid(), number + 1
            self._rows = Rows(self.request, self.manifest, self.max_bad_frac)
        if number < self._next:
            self._begin(0)
        if self._length and number // self._length > self._epoch:
            self._begin(number // self._length)
        while self._next < number:
            self._draw()
        return self._draw()

    def _begin(self, epoch: int) -> None:
        self.check()
        self._epoch, self._next = epoch, epoch * self._length
        self._random = random.Random(mix_seed(self.seed, epoch))
        rows = (row for row in islice(self._read(), self.manifest.num_held, None) if row)
        self._source = islice(rows, self.epoch_size)
        self._buffer = list(islice(self._source, max(1, self.buffer_size)))

    def _read(self) -> Iterator[Unparsed | None]:
        for name, file in self.request.train:
            reader = reader_of(self.request.option, file)
            # Lines that another process is asked for, or that came before a stop, are not parsed.
            unparsed = unparsed_rows if reader is jsonl_rows else reader
            yield from unparsed(name, file, self._rows.columns)

    def _draw(self) -> tuple[Unparsed, int]:
        """The next row, and where it lay in the buffer."""
        buffer = self._buffer
        if not buffer:
            self._length = self._length or self._next
            self._begin(self._epoch + 1)
            buffer = self._buffer
        place = int(self._random.random() * len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        row = buffer.pop()
        buffer += islice(self._source, 1)
        self._next += 1
        return row, place
