"""Streams of rows, read during training in order, through a shuffle buffer.

Each process makes the same draws among unparsed rows, and parses and tokenizes only its own.
"""

import os
import random
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np

from eke.common.errors import ChangedError, ConfigError, RunError
from eke.config.schema import Rows
from eke.data.preparation.chat import ChatRows
from eke.data.preparation.lines import BadRowError, Columns, Row, values_of
from eke.data.preparation.rows import Sequences, all_rows
from eke.data.preparation.tokenizers import load_request_tokenizer
from eke.data.sources import Store, mix_seed, request_of
from eke.plan.planner import Plan
from eke.plan.planner.samples import too_many_bad
from eke.training.batches.sampler import StoredRows, TokenRow

_StreamedRow = tuple[TokenRow, Any, int]
"""Tokens and label of a row, and the number of unusable rows before it."""


class StreamedRows:
    """Training rows by ascending number."""

    framed = True

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.store = plan, store
        self.first = StoredRows(store, "train", None)
        self._process = self._length = 0
        self._last: tuple[int, _StreamedRow] | None = None

    def __len__(self) -> int:
        return self.plan.steps.num_train_samples

    def row(self, index: int) -> TokenRow:
        """Return a row."""
        return self.read_row(index)[0]

    def label(self, index: int) -> Any:
        """Return the label of a row, as `StoredRows` does."""
        return self.read_row(index)[1]

    def read_row(self, index: int) -> _StreamedRow:
        """Return a row, or another of the buffer if it is unusable. Raise RunError without any."""
        try:
            if self._process != os.getpid():  # a fork must not share positions in files
                self._open()
            if self._last is None or index != self._last[0]:
                self._last = index, self._next_usable(index)
        except ConfigError as error:
            raise RunError(error.short()) from error
        return self._last[1]

    def _open(self) -> None:
        request, manifest = request_of(self.plan.config), self.store.manifest
        assert request is not None, "rows have a request"
        tokenizer = load_request_tokenizer(request)
        names = {name: number for number, name in enumerate(manifest.label_names)}
        self._columns = Columns(request, manifest.label_kind, names, are_all=True)
        self._sequences = Sequences(request, tokenizer)
        self._chat = ChatRows(request, tokenizer) if request.train_on else None
        self._seen = manifest  # counts of the first rows, continued below
        self._process, self._last = os.getpid(), None
        self._begin(0)

    def _next_usable(self, index: int) -> _StreamedRow:
        """Draw up to a row and return it, or the next usable row of the buffer.

        If all are unusable, return one of the rows that preparation has stored.
        """
        epoch = index // self._length if self._length else 0
        if index < self._next or epoch > self._epoch:
            self._begin(epoch)
        while self._next < index:
            self._draw()
        row, place = self._draw()
        # Another row has replaced it in the buffer, whose other rows have not moved.
        others = (self._buffer[n - len(self._buffer) + place] for n in range(len(self._buffer)))
        self._seen = replace(self._seen, num_rows=self._seen.num_rows + 1)
        for skipped, each in enumerate(chain([row], others)):
            try:
                if (used := self._used(each)) is not None:
                    return *used, skipped
            except BadRowError as bad:
                if not skipped:  # other rows are counted when they are drawn
                    bad_rows, count = (f"{row[0]} {bad}",), self._seen.num_bad + 1
                    self._seen = replace(self._seen, num_bad=count, bad_rows=bad_rows)
                    if problems := too_many_bad(self.plan.config, self._seen):
                        raise ConfigError(problems) from bad
        number = index % len(self.first)
        return self.first.row(number), self.first.label(number), 1

    def _begin(self, epoch: int) -> None:
        data, request = self.plan.config.data, request_of(self.plan.config)
        assert isinstance(data, Rows), "only rows are read during training"
        if request is None or request.key != self.store.manifest.key:
            raise ChangedError("the files of the stream have changed -> the same command again")
        self._epoch, self._next = epoch, epoch * self._length
        self._random = random.Random(mix_seed(self.plan.config.seed, epoch))
        rows = islice(all_rows(request, False, self._columns), self.store.manifest.num_held, None)
        self._rows = islice(filter(None, rows), data.num_samples)
        self._buffer = list(islice(self._rows, max(1, data.shuffle_buffer)))

    def _draw(self) -> tuple[Row, int]:
        """Return the next row and its former index in the buffer."""
        if not self._buffer:
            self._length = self._length or self._next
            self._begin(self._epoch + 1)
        buffer = self._buffer
        place = int(self._random.random() * len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        row = buffer.pop()
        buffer += islice(self._rows, 1)
        self._next += 1
        return row, place

    def _used(self, row: Row) -> tuple[TokenRow, Any] | None:
        """Return tokens and label of a row, None if it has no target."""
        fields = (self._chat or self._columns).take(values_of(row))
        if self._chat:
            return TokenRow(fields.ids, 0, fields.trained), 0
        made = self._sequences.of([fields])[0]
        label = list(fields.label) if isinstance(fields.label, tuple) else fields.label
        return made and (TokenRow(made[0].astype(np.int64), made[1]), label)
