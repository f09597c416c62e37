"""Rows into a store: tokenized, cut, counted, split into training and evaluation."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from eke.corpus import HubSource, Request, first_fit, other_format
from eke.errors import ConfigError, Problem
from eke.prepare.columns import BadRowError, Columns, Fields
from eke.prepare.lines import Row, csv_rows, jsonl_rows
from eke.prepare.tables import hub_rows, parquet_rows
from eke.prepare.tokenizers import Tokenizer, clipped
from eke.prepare.writer import Writer

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
    num_truncated: int = 0
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
    _end: int = 0
    _lowest: tuple[int, list[int]] | None = None
    """Hash and numbers of the equal rows that are first to be evaluated on."""
    _highest: tuple[int, list[int]] | None = None

    def __post_init__(self) -> None:
        self.columns = Columns(self.request)

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
            "num_truncated": counts.num_truncated,
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
        largest, few = self.columns.largest, self.columns.too_large * 2 < self.counts.num_bad
        enough = few or not largest >= self.request.num_labels > 0
        return "" if enough else f"task.num_labels={largest + 1}"

    def _write(self, batch: list[Fields], evaluation: bool | None) -> None:
        if not batch:
            return
        made = self._tokens(batch)
        kept = [(row, *m) for row, m in zip(batch, made, strict=True) if m is not None]
        self.counts.num_empty += len(batch) - len(kept)
        if not kept:
            return
        first = self.writer.counts["cuts"]
        sizes = np.array([len(tokens) for _, tokens, _ in kept], np.int64)
        self.writer.append("tokens", np.concatenate([tokens for _, tokens, _ in kept]))
        self.writer.append("offsets", self._end + np.cumsum(sizes))
        self.writer.append("cuts", [cut for _, _, cut in kept])
        self._end += int(sizes.sum())
        if self.request.label is not None:
            self.writer.append("labels", [row.label for row, _, _ in kept])
        self._split([row for row, _, _ in kept], first, evaluation)

    def _tokens(self, batch: list[Fields]) -> list[tuple[np.ndarray, int] | None]:
        if self.request.response is not None:
            if self.request.task == "seq2seq_lm":
                return self._sources_and_targets(batch)
            return self._prompts_and_responses(batch)
        prefix, suffix = self.tokenizer.prefix, self.tokenizer.suffix
        room = self.request.seq_len - len(prefix) - len(suffix)
        found: list[tuple[np.ndarray, int] | None] = []
        for ids, long in clipped(self.tokenizer.encode, [row.texts[0] for row in batch], room):
            tokens = _joined(prefix, ids, suffix)
            # One token predicts nothing.
            useful = len(ids) > 0 and not (self.request.task == "causal_lm" and len(tokens) < 2)
            self.counts.num_truncated += long and useful
            found.append((tokens, 0) if useful else None)
        return found

    def _prompts_and_responses(self, batch: list[Fields]) -> list[tuple[np.ndarray, int] | None]:
        """One sequence of both; where they are too long together, each may keep half of the row.

        A prompt loses its beginning, a response its end.
        """
        encode, prefix, suffix = self.tokenizer.encode, self.tokenizer.prefix, self.tokenizer.suffix
        room = self.request.seq_len - len(prefix) - len(suffix)
        prompts = clipped(encode, [row.texts[0] for row in batch], room, keep_end=True)
        responses = clipped(encode, [row.texts[1] for row in batch], room)
        found: list[tuple[np.ndarray, int] | None] = []
        for (prompt, long), (response, longer) in zip(prompts, responses, strict=True):
            answer = response[: max(room - len(prompt), (room + 1) // 2)]
            asked = prompt[max(0, len(prompt) + len(answer) - room) :]
            start = _joined(prefix, asked, ())
            tokens = _joined((), np.concatenate([start, answer]), suffix)
            useful = len(answer) > 0 and len(tokens) >= 2
            shorter = len(asked) < len(prompt) or len(answer) < len(response)
            self.counts.num_truncated += useful and (long or longer or shorter)
            found.append((tokens, len(start)) if useful else None)
        return found

    def _sources_and_targets(self, batch: list[Fields]) -> list[tuple[np.ndarray, int] | None]:
        prefix, suffix = self.tokenizer.prefix, self.tokenizer.suffix
        frame = len(prefix) + len(suffix)
        encode, request = self.tokenizer.encode, self.request
        sources = clipped(encode, [row.texts[0] for row in batch], request.seq_len - frame)
        targets = clipped(encode, [row.texts[1] for row in batch], request.target_len - len(suffix))
        found: list[tuple[np.ndarray, int] | None] = []
        for (source, long), (target, longer) in zip(sources, targets, strict=True):
            useful = len(source) > 0 and len(target) > 0
            self.counts.num_truncated += useful and (long or longer)
            whole = _joined(prefix, source, suffix)
            tokens = np.concatenate([whole, _joined((), target, suffix)])
            found.append((tokens, len(whole)) if useful else None)
        return found

    def _split(self, rows: list[Fields], first: int, evaluation: bool | None) -> None:
        if evaluation is not None:
            numbers = list(range(first, first + len(rows)))
            self.writer.append("evaluation" if evaluation else "train", numbers)
            return
        bound = int(self.request.eval_frac * 2**64)
        kept: tuple[list[int], list[int]] = ([], [])
        for number, row in enumerate(rows, first):
            digest = hashlib.blake2b(repr(row.texts).encode(), digest_size=8).digest()
            value = int.from_bytes(digest, "little")
            kept[value < bound].append(number)
            self._lowest = _outermost(self._lowest, value, number, -1)
            self._highest = _outermost(self._highest, value, number, 1)
        self.writer.append("train", kept[0])
        self.writer.append("evaluation", kept[1])

    def _ensure_both_splits(self) -> None:
        """Few rows may all have fallen to one side: one row crosses, with those that equal it.

        Where all are equal, or nearly, it crosses alone.

        Raises:
            ConfigError: there is one row only.
        """
        counts = self.writer.counts
        if counts["train"] and counts["evaluation"]:
            return
        if self._has_eval_source() or counts["train"] + counts["evaluation"] < 2:
            part = "evaluate" if counts["train"] else "train"
            why = f"no usable row is left to {part} on: there are {counts['cuts']} in all"
            key = (
                "data.eval_path" if self.request.evaluation and part == "evaluate" else "data.path"
            )
            raise ConfigError(Problem(key, self.request.path, why, f"{key}=FILE_WITH_MORE_ROWS"))
        full, empty = ("train", "evaluation") if counts["train"] else ("evaluation", "train")
        crossing = self._lowest if full == "train" else self._highest
        assert crossing is not None
        equal = crossing[1]
        moved = equal if len(equal) < min(counts[full], MOST_EQUAL) else equal[:1]
        old = self.writer.read(full)
        self.writer.append(empty, moved)
        self.writer.replace(full, _without(old, moved))

    def _number_labels(self) -> tuple[str, ...]:
        if self.request.label is None or self.columns.kind != "name":
            return ()
        names, classes = self.columns.numbered()
        table = np.array([classes[number] for number in range(len(classes))], np.int32)
        old = self.writer.read("labels")
        self.writer.replace("labels", (table[part] for part in _parts(old)))
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
        seen = {int(c) for part in _parts(train) for c in np.unique(labels[part])}
        if len(seen) > 1:
            return
        (only,) = seen
        why = (
            f"all {len(train)} rows to train on are of one class, {names[only] if names else only}"
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
        lengths = np.concatenate([offsets[part + 1] - offsets[part] for part in _parts(rows)])
        packs = first_fit(lengths, self.request.seq_len)
        self.writer.append(f"{split}_members", packs.members)
        self.writer.append(f"{split}_offsets", packs.offsets)


def _joined(prefix: tuple[int, ...], ids: np.ndarray, suffix: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([np.array(prefix, np.int64), ids, np.array(suffix, np.int64)])


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(array), 1 << 20):
        yield np.asarray(array[start : start + (1 << 20)])


def _without(array: np.ndarray, numbers: list[int]) -> Iterator[np.ndarray]:
    for part in _parts(array):
        yield part[~np.isin(part, numbers)]


MOST_EQUAL = 100_000
"""Equal rows remembered, 4 MB of numbers: a table of nothing else crosses by one row anyway."""


def _outermost(
    so_far: tuple[int, list[int]] | None, value: int, number: int, sign: int
) -> tuple[int, list[int]]:
    """The hash that is largest (`sign` 1) or smallest (-1), and the rows that have it."""
    if so_far is None or value * sign > so_far[0] * sign:
        return value, [number]
    if value == so_far[0] and len(so_far[1]) < MOST_EQUAL:
        so_far[1].append(number)
    return so_far
