"""Rows into a store: tokenized, cut, counted, split into training and evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from eke.common.errors import ConfigError, Problem
from eke.common.units import format_number
from eke.data.preparation.columns import BadRowError, Columns, Fields
from eke.data.preparation.lines import Row, csv_rows, jsonl_rows
from eke.data.preparation.sequences import Sequences
from eke.data.preparation.splits import Splits, parts_of
from eke.data.preparation.tables import hub_rows, parquet_rows
from eke.data.preparation.tokenizers import Ends, Tokenizer, ends_of, is_doubled
from eke.data.preparation.writer import Writer
from eke.data.sources import HubSource, Request, first_fit, other_format

BATCH_ROWS = 1000
"""Rows tokenized at a time: the tokenizer's threads share them."""

BATCH_CHARACTERS = 1 << 22
"""A batch ends here, too, so that long texts need no more memory than short ones."""

NUM_NAMED = 5
"""Bad rows whose place and reason is kept."""

HOPELESS_ROWS = 1000
"""When none of the first rows can be used, nobody has to wait for the rest of the file."""

READERS = {"jsonl": jsonl_rows, "csv": csv_rows, "parquet": parquet_rows}
"""Option of the group `data` -> its reader."""


@dataclass
class Counts:
    """What became of the rows."""

    num_rows: int = 0
    num_bad: int = 0
    num_empty: int = 0
    bad_rows: list[str] = field(default_factory=list)

    def bad(self, place: str, reason: str) -> None:
        """A row that cannot be used."""
        self.num_bad += 1
        if len(self.bad_rows) < NUM_NAMED:
            self.bad_rows.append(f"{place} {reason}")


@dataclass
class RowStore:
    """A store that is being filled with rows."""

    request: Request
    tokenizer: Tokenizer
    writer: Writer
    cache: str
    """Where the datasets library may put files of its own."""
    counts: Counts = field(default_factory=Counts)
    columns: Columns = field(init=False)
    sequences: Sequences = field(init=False)
    splits: Splits = field(init=False)
    num_doubled: int = 0
    first_row: Ends = ((), ())
    _end: int = 0

    def __post_init__(self) -> None:
        self.columns = Columns(self.request)
        self.sequences = Sequences(self.request, self.tokenizer)
        self.splits = Splits(self.writer, self.request.eval_frac)

    def fill(self) -> dict[str, object]:
        """Read everything; returns what the manifest says beside the arrays.

        Raises:
            ConfigError: a file is damaged, a column is missing, no row can be used.
        """
        for name in ("tokens", "offsets", "cuts", "train", "evaluation"):
            self.writer.append(name, [0] if name == "offsets" else [])
        split = self._has_eval_source()
        self._read(self._rows(evaluation=False), None if not split else False)
        if split:
            self._read(self._rows(evaluation=True), True)
        self._check_usable()
        self._ensure_both_splits()
        label_names = self._number_labels()
        self._check_classes(label_names)
        if self.request.packing:
            self._pack("train")
            self._pack("evaluation")
        counts = self.counts
        return {
            "num_rows": counts.num_rows,
            "num_bad": counts.num_bad,
            "num_truncated": self.sequences.num_truncated,
            "num_other_prompts": self.sequences.num_other_prompts,
            "num_doubled": self.num_doubled,
            "first_row": self.first_row,
            "num_empty": counts.num_empty,
            "bad_rows": tuple(counts.bad_rows),
            "bad_fix": self._bad_fix(),
            "label_names": label_names,
        }

    def _has_eval_source(self) -> bool:
        hub = self.request.hub
        return bool(self.request.evaluation) or (hub is not None and hub.eval_split is not None)

    def _rows(self, evaluation: bool) -> Iterator[Row | None]:
        if self.request.hub is not None:
            yield from self._first(self.request.hub, evaluation)
            return
        reader = READERS[self.request.option]
        files = self.request.evaluation if evaluation else self.request.train
        for name, file in files:
            yield from reader(name, file, self.cache, self.columns)

    def _first(self, hub: HubSource, evaluation: bool) -> Iterator[Row | None]:
        """Rows until there are as many samples as were asked for, when streaming."""
        for row in hub_rows(hub, evaluation, self.columns):
            if hub.streaming and self._enough(hub, evaluation):
                return
            yield row

    def _enough(self, hub: HubSource, evaluation: bool) -> bool:
        if evaluation:
            return self.writer.counts["evaluation"] >= hub.num_eval_samples
        enough = self.writer.counts["train"] >= (hub.num_samples or 0)
        return enough and (hub.eval_split is not None or self.writer.counts["evaluation"] > 0)

    def _read(self, rows: Iterator[Row | None], evaluation: bool | None) -> None:
        """Rows of one source; `evaluation` None splits them by their hash."""
        streaming = self.request.hub is not None and self.request.hub.streaming
        most = 1 if streaming else BATCH_ROWS  # not one row more than is needed
        batch: list[Fields] = []
        characters = 0
        for row in rows:
            self.counts.num_rows += 1
            if row is None:
                self.counts.num_empty += 1
                continue
            fields = self._fields(row)
            if fields is None:
                self._give_up_early()
                continue
            batch.append(fields)
            characters += sum(map(len, fields.texts))
            if len(batch) >= most or characters >= BATCH_CHARACTERS:
                self._write(batch, evaluation)
                batch, characters = [], 0
        self._write(batch, evaluation)

    def _fields(self, row: Row) -> Fields | None:
        place, values = row
        try:
            if isinstance(values, BadRowError):
                raise values
            return self.columns.take(values)
        except BadRowError as bad:
            self.counts.bad(place, str(bad))
            return None

    def _give_up_early(self) -> None:
        counts = self.counts
        if counts.num_bad >= HOPELESS_ROWS and counts.num_bad + counts.num_empty == counts.num_rows:
            self._check_usable()

    def _check_usable(self) -> None:
        """Some row can be used.

        Raises:
            ConfigError: none can; a column that no row has is named instead.
        """
        if self.writer.counts["train"] + self.writer.counts["evaluation"]:
            return
        counts = self.counts
        if self.columns.seen:
            self.columns.require()
        if counts.num_bad:
            why = f"none of {counts.num_rows} rows can be used: {'; '.join(counts.bad_rows)}"
        else:
            why = f"all of {counts.num_rows} rows are empty" if counts.num_rows else "has no rows"
        files = [name for name, _ in self.request.train]
        other = other_format(self.request.option, files)  # the hub's have none
        fix = self._bad_fix() or other or "data.path=FILE_OR_FOLDER"
        if self.request.hub is not None:
            raise ConfigError(Problem("data.name", self.request.path, why, "data.split=SPLIT"))
        raise ConfigError(Problem("data.path", self.request.path, why, fix))

    def _bad_fix(self) -> str:
        """The number of classes that most bad rows want; empty where they want something else."""
        largest = self.columns.largest
        most = self.columns.too_large * 2 >= self.counts.num_bad
        helps = most and largest >= self.request.num_labels > 0
        return f"task.num_labels={largest + 1}" if helps else ""

    def _write(self, batch: list[Fields], evaluation: bool | None) -> None:
        if not batch:
            return
        made = self.sequences.of(batch)
        kept = [(row, *m) for row, m in zip(batch, made, strict=True) if m is not None]
        self.counts.num_empty += len(batch) - len(kept)
        if not kept:
            return
        self.first_row = (
            self.first_row if any(self.first_row) else ends_of(self.tokenizer, kept[0][1])
        )
        special = self.tokenizer.vocabulary.special
        self.num_doubled += sum(is_doubled(tokens, special) for _, tokens, _ in kept)
        first = self.writer.counts["cuts"]
        sizes = np.array([len(tokens) for _, tokens, _ in kept], np.int64)
        self.writer.append("tokens", np.concatenate([tokens for _, tokens, _ in kept]))
        self.writer.append("offsets", self._end + np.cumsum(sizes))
        self.writer.append("cuts", [cut for _, _, cut in kept])
        self._end += int(sizes.sum())
        if self.request.label is not None:
            self.writer.append("labels", [row.label for row, _, _ in kept])
        self.splits.add([row for row, _, _ in kept], first, evaluation)

    def _ensure_both_splits(self) -> None:
        """There are rows to train on and rows to evaluate on.

        Raises:
            ConfigError: there is one row only, or none in a source of its own.
        """
        counts = self.writer.counts
        if counts["train"] and counts["evaluation"]:
            return
        if not self._has_eval_source() and counts["train"] + counts["evaluation"] > 1:
            self.splits.fill_empty_side()
            return
        part = "evaluate" if counts["train"] else "train"
        why = f"no usable row is left to {part} on: there are {counts['cuts']} in all"
        key = "data.eval_path" if self.request.evaluation and part == "evaluate" else "data.path"
        raise ConfigError(Problem(key, self.request.path, why, f"{key}=FILE_WITH_MORE_ROWS"))

    def _number_labels(self) -> tuple[str, ...]:
        if self.request.label is None or self.columns.kind != "name":
            return ()
        names, classes = self.columns.numbered()
        table = np.array([classes[number] for number in range(len(classes))], np.int32)
        old = self.writer.read("labels")
        self.writer.replace("labels", (table[part] for part in parts_of(old)))
        self.writer.note(repr(names))
        return names

    def _check_classes(self, names: tuple[str, ...]) -> None:
        """There are two classes to tell apart.

        Raises:
            ConfigError: all rows to train on are of one class.
        """
        train = self.writer.read("train")
        if self.request.label is None or self.request.num_labels < 2 or len(train) < 2:
            return
        labels = self.writer.read("labels")
        seen = {int(c) for part in parts_of(train) for c in np.unique(labels[part])}
        if len(seen) > 1:
            return
        (only,) = seen
        why = (
            f"{format_number(len(train), 'row')} to train on, of one class only: "
            f"{names[only] if names else only}"
        )
        if self.counts.num_bad:
            why += f"; rows that cannot be used: {'; '.join(self.counts.bad_rows)}"
        hub = self.request.hub
        # A stream begins at the beginning, and files are often sorted by class.
        other = "data.streaming=false" if hub and hub.streaming else "data.label=COLUMN"
        fix = self._bad_fix() or other
        raise ConfigError(Problem("data.label", self.request.label, why, fix))

    def _pack(self, split: str) -> None:
        offsets, rows = self.writer.read("offsets"), self.writer.read(split)
        lengths = np.concatenate([offsets[part + 1] - offsets[part] for part in parts_of(rows)])
        packs = first_fit(lengths, self.request.seq_len)
        self.writer.append(f"{split}_members", packs.members)
        self.writer.append(f"{split}_offsets", packs.offsets)
