"""Preparation of a store of rows or documents: truncation, counts, splits."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_number
from eke.config.schema import ENDINGS
from eke.data import sources
from eke.data.preparation import lines, tokenizers
from eke.data.preparation.chat import ChatRows
from eke.data.preparation.conversations import without_nulls
from eke.data.preparation.labels import numbered, reading_of
from eke.data.preparation.lines import BadRowError, Columns, Fields, Row
from eke.data.preparation.tokenizers import Tokenizer, is_doubled, is_too_short, truncate_text
from eke.data.preparation.writer import Splits, Writer, locked, parts_of, temporary
from eke.data.sources import PrepareRequest

_NONE = np.zeros(0, np.int64)

_REPLACEMENT = "\ufffd"
"""Unicode's replacement for invalid UTF-8."""


def _fill_documents(
    request: PrepareRequest, tokenizer: Tokenizer, writer: Writer
) -> dict[str, Any]:
    """Tokenize every document and return the manifest's counts."""
    assert request.corpus is not None
    is_causal = request.task == "causal_lm"  # other tasks add special tokens to each window
    streams, replaced, doubled, last = [], 0, 0, ""
    ends: tokenizers.RowEnds = ((), ())
    writer.append("tokens", [])

    def texts(piece: sources.FileRange) -> Iterator[str]:
        nonlocal replaced, last
        last = ""
        for text, wrong in _texts(piece):
            replaced += wrong
            last = text if text.strip() else last
            yield text

    for evaluation, pieces in ((False, request.corpus.train), (True, request.corpus.evaluation)):
        for number, label in enumerate(request.labels):
            start = writer.counts["tokens"]
            for piece in pieces:
                if piece.label == label:
                    first = writer.counts["tokens"]
                    beginning = tokenizer.beginning if is_causal else _NONE
                    writer.append("tokens", beginning)
                    for ids in tokenizers.encode_stream(tokenizer, texts(piece)):
                        if len(beginning) and len(ids):
                            ids, beginning = tokenizer.begun(ids)[len(beginning) :], _NONE
                        writer.append("tokens", ids)
                    writer.append("tokens", tokenizer.ended(_NONE, last) if is_causal else _NONE)
                    document = writer.read("tokens")[first:]
                    doubled += is_doubled(document, tokenizer.vocabulary.special)
                    ends = ends if any(ends) else tokenizers.ends_of(tokenizer, document)
            size = writer.counts["tokens"] - start
            streams.append(sources.TokenStream(evaluation, number, start, size))
    writer.note(repr(streams))
    return {
        "num_rows": len(request.corpus.pieces()),
        "num_replaced": replaced,
        "num_doubled": doubled,
        "streams": tuple(streams),
        "first_row": ends,
    }


def _texts(piece: sources.FileRange) -> Iterator[tuple[str, int]]:
    """Yield a document in chunks of complete lines, and the number of replaced characters."""
    continuation = bytes(range(0x80, 0xC0))  # of a character in UTF-8, at most three bytes
    try:
        with open(piece.path, "rb") as file:
            file.seek(piece.start)
            end = piece.start + piece.size
            while (place := file.tell()) < end:
                if not (data := file.read(min(sources.CHUNK_BYTES, end - place))):
                    return
                data += file.readline(min(sources.CHUNK_BYTES, end - file.tell()))
                ahead = file.read(3)  # do not end a chunk inside a character
                data += ahead[: len(ahead) - len(ahead.lstrip(continuation))]
                file.seek(-len(ahead.lstrip(continuation)), 1)
                # A character that crosses two pieces of a file belongs to the first.
                if 0 < place == piece.start:
                    data = data.lstrip(continuation)
                text = data.decode(errors="replace")
                before = data.count(_REPLACEMENT.encode())
                yield text, text.count(_REPLACEMENT) - before
    except OSError as error:
        raise sources.unreadable(error, value=str(piece.path)) from error


_Sequence = tuple[np.ndarray, int]
"""Tokens, and the number of tokens of the first text, the prompt or the source."""


@dataclass
class Sequences:
    """Tokenizer of rows, with counts of truncated rows."""

    request: PrepareRequest
    tokenizer: Tokenizer
    counts: Counter[str] = field(default_factory=Counter)
    """Counts by name in the manifest."""

    def of(self, batch: list[Fields]) -> list[_Sequence | None]:
        """Return the sequence of each row, None without a token to train on."""
        if self.request.task != "causal_lm":
            return self._framed(batch)
        if self.request.response is None:
            return self._texts([row.texts[0] for row in batch])
        return self._answers(batch)

    def _framed(self, batch: list[Fields]) -> list[_Sequence | None]:
        """Return sequences with the tokenizer's special tokens; in seq2seq, source then target."""
        request, rows = self.request, self.tokenizer.rows
        made = [rows([row.texts[0] for row in batch], request.seq_len)]
        if request.text_pair is not None:
            made = [self.tokenizer.pair([row.texts for row in batch], request.seq_len)]
        if request.response is not None:
            made.append(rows([row.texts[1] for row in batch], request.target_len, target=True))
        found: list[_Sequence | None] = []
        for parts in zip(*made, strict=True):
            useful = all(part.is_useful for part in parts)
            self.counts["num_truncated"] += useful and any(part.is_cut for part in parts)
            tokens = np.concatenate([part.ids for part in parts])
            cut = len(parts[0].ids) if len(parts) > 1 else parts[0].cut
            found.append((tokens, cut) if useful else None)
        return found

    def _texts(self, texts: list[str]) -> list[_Sequence | None]:
        """Return texts with the tokenizer's prefix, and with EOS if they are not truncated."""
        limit = self.request.seq_len
        found: list[_Sequence | None] = []
        parts = tokenizers.tokenize_truncated(texts, limit, self.tokenizer.encode)
        for text, (_, encoded) in zip(texts, parts, strict=True):
            tokens = self.tokenizer.ended(self.tokenizer.begun(encoded.ids), text)
            useful = len(encoded.ids) > 0
            self.counts["num_truncated"] += useful and len(tokens) > limit
            tokens = tokens[:limit]
            # One token has no target.
            found.append((tokens, 0) if useful and len(tokens) > 1 else None)
        return found

    def _separator(self, prompt: str, response: str) -> str:
        """Return the separator, "" if white space or a special token is at the boundary."""
        if self.request.separator is not None:
            return self.request.separator
        special = self.tokenizer.special_texts
        rendered = prompt.startswith(special) or prompt.rstrip().endswith(special)
        spaced = not prompt or prompt[-1].isspace() or response[:1].isspace()
        return "" if rendered or spaced else "\n"

    def _answers(self, batch: list[Fields]) -> list[_Sequence | None]:
        """Join prompt and response; only the response's tokens are trained.

        A token across the boundary belongs to the response. If both together are too long, each may
        keep half: the beginning of the prompt and the end of the response (with EOS) are cut.
        """
        pairs = [(p + self._separator(p, r), r) for p, r in (row.texts for row in batch)]
        limit, encode = self.request.seq_len, self.tokenizer.encode
        parts = [(truncate_text(p, limit, True), truncate_text(r, limit)) for p, r in pairs]
        joined, alone = encode([p + r for p, r in parts]), encode([p for p, _ in parts])
        found: list[_Sequence | None] = []
        for pair, (prompt, response), both, first in zip(pairs, parts, joined, alone, strict=True):
            cut = _first_token_after(both, first, len(prompt))
            while is_too_short(pair[0], prompt, cut, limit) or is_too_short(
                pair[1], response, len(both.ids) - cut, limit
            ):
                prompt = truncate_text(pair[0], len(prompt), True)
                response = truncate_text(pair[1], len(response))
                both, first = encode([prompt + response, prompt])
                cut = _first_token_after(both, first, len(prompt))
            asked, answer = both.ids[:cut], both.ids[cut:]
            if len(prompt) == len(pair[0]):
                is_other = not np.array_equal(both.ids[: len(first.ids)], first.ids)
                self.counts["num_other_prompts"] += is_other
                asked = self.tokenizer.begun(asked)[len(self.tokenizer.beginning) :]
            found.append(self._cut(asked, answer, self.tokenizer.ended(answer, pair[1])))
        return found

    def _cut(self, asked: np.ndarray, answer: np.ndarray, ended: np.ndarray) -> _Sequence | None:
        beginning = self.tokenizer.beginning
        room = self.request.seq_len - len(beginning)
        kept = ended[: max(room - len(asked), (room + 1) // 2)]
        start = np.concatenate([beginning, asked[max(0, len(asked) + len(kept) - room) :]])
        tokens = np.concatenate([start, kept])
        if not len(answer) or len(tokens) < 2:
            return None
        self.counts["num_truncated"] += len(tokens) < len(beginning) + len(asked) + len(ended)
        return tokens, len(start)


def _first_token_after(both: tokenizers.Encoded, first: tokenizers.Encoded, place: int) -> int:
    """Return the index of the first token that ends after a position of the text."""
    if both.ends is not None:
        behind = both.ends > place
        return int(behind.argmax()) if behind.any() else len(both.ids)
    size = min(len(both.ids), len(first.ids))
    differs = both.ids[:size] != first.ids[:size]
    return int(differs.argmax()) if differs.any() else size


_READERS = {"jsonl": lines.jsonl_rows, "csv": lines.csv_rows, "parquet": lines.parquet_rows}
"""`data` option -> reader."""

NUM_PREVIEW_ROWS = 1000
"""Training rows of a stream that are read before training."""


def all_rows(request: PrepareRequest, evaluation: bool, columns: Columns) -> Iterator[Row | None]:
    """Yield the rows of local files or of a dataset of the Hub."""
    if request.hub is not None:
        yield from _drop_nulls(request, lines.hub_rows(request.hub, evaluation, columns))
    # A chat file may have any of the formats, known by the ending of its name.
    endings = ENDINGS if request.option == "chat" else {}
    for name, file in request.evaluation if evaluation else request.train:
        kinds = [kind for kind in _READERS if file.lower().endswith(endings.get(kind, ()))]
        reader = _READERS[kinds[0]] if kinds else _READERS.get(request.option, lines.jsonl_rows)
        found = reader(name, file, columns)
        yield from _drop_nulls(request, found) if reader is lines.parquet_rows else found


def _drop_nulls(request: PrepareRequest, rows: Iterator[Row | None]) -> Iterator[Row | None]:
    return ((row[0], without_nulls(row[1])) if row and request.train_on else row for row in rows)


class _RowStore:
    """Builder of a store from rows."""

    def __init__(self, request: PrepareRequest, tokenizer: Tokenizer, writer: Writer) -> None:
        self.request, self.tokenizer, self.writer = request, tokenizer, writer
        self.counts, self.columns = Counter[str](), Columns(request)
        self.bad_rows: list[str] = []
        self.first_row: tokenizers.RowEnds = ((), ())
        self.sequences = Sequences(request, tokenizer, self.counts)
        self.splits = Splits(writer, request.eval_frac)
        self.chat = ChatRows(request, tokenizer) if request.train_on else None
        self.too_long: list[int] = []  # tokens of conversations that were too long

    def fill(self) -> dict[str, object]:
        """Read all rows and return the manifest's counts."""
        for name in ("tokens", "offsets", "cuts", "train", "evaluation"):
            self.writer.append(name, [0] if name == "offsets" else [])
        if several := self.request.problem == "multi_label":
            self.writer.append("labels", [])
            self.writer.append("label_offsets", [0])
        split = self._has_eval_source()
        is_csv = self.request.is_csv and self.request.problem != "regression"
        # CSV has only text: whether "1" is a class or a number depends on all rows.
        if self.request.label is not None and (several or is_csv):
            self.columns.kind = reading_of(self.request, self._labels())
        rows, held = (all_rows(self.request, each, self.columns) for each in (False, True))
        if self.request.streamed:
            self._read_beginning(rows, held if split else rows)
        else:
            self._read(rows, False if split else None)
            if split:
                self._read(held, True)
        self._check_usable()
        self._ensure_both_splits()
        label_names = self._number_labels()
        self._check_classes(label_names)
        if self.request.packing:
            self._pack("train")
            self._pack("evaluation")
        return {
            **self.counts,
            "bad_rows": self.bad_rows,
            "first_row": self.first_row,
            "bad_fix": self._bad_fix(),
            "label_names": label_names,
            "label_kind": self.columns.kind,
            "given_names": tuple(self.columns.given),
            **(self.chat.found() if self.chat else {}),
        }

    def _labels(self) -> Iterator[Any]:
        """Yield the labels of all rows; of a stream, only from the first rows."""
        columns, streamed = Columns(self.request), self.request.streamed
        most = streamed + NUM_PREVIEW_ROWS if streamed else None
        for held in (False, True)[: 1 + self._has_eval_source()]:
            for row in filter(None, islice(all_rows(self.request, held, columns), most)):
                with contextlib.suppress(BadRowError, LookupError):
                    yield columns.items(lines.values_of(row)[str(self.request.label)])

    def _read_beginning(self, rows: Iterator[Row | None], held: Iterator[Row | None]) -> None:
        self.writer.note(self.request.content)  # represents the rows that are not read here
        self._read(self._until(held, "evaluation", self.request.streamed), True)
        self.counts["num_held"] = self.counts["num_rows"] if held is rows else 0
        self._read(self._until(rows, "train", NUM_PREVIEW_ROWS), False)

    def _until(self, rows: Iterator[Row | None], part: str, count: int) -> Iterator[Row | None]:
        for row in rows:
            yield row
            if self.writer.counts[part] >= count:
                return

    def _has_eval_source(self) -> bool:
        hub = self.request.hub
        return bool(self.request.evaluation) or (hub is not None and hub.eval_split is not None)

    def _read(self, rows: Iterator[Row | None], evaluation: bool | None) -> None:
        """Store the rows of one source; `evaluation` None: split them by hash."""
        most = 1 if self.request.streamed else lines.BATCH_ROWS  # a stream must not read ahead
        counts, characters = self.counts, 0
        batch: list[Fields] = []
        for row in rows:
            counts["num_rows"] += 1
            if row is None:
                counts["num_empty"] += 1
                continue
            try:
                fields = (self.chat or self.columns).take(lines.values_of(row))
            except BadRowError as bad:
                self._count_bad(row[0], bad)
                continue
            batch.append(fields)
            characters += sum(map(len, fields.texts))
            if len(batch) >= most or characters >= 1 << 22:  # bounds memory for long texts
                self._write(batch, evaluation)
                batch, characters = [], 0
        self._write(batch, evaluation)

    def _count_bad(self, place: str, bad: BadRowError) -> None:
        counts = self.counts
        counts["num_bad"] += 1
        if len(self.bad_rows) < 5:  # listed in the manifest
            self.bad_rows.append(f"{place} {bad}")
        if isinstance(bad, lines.TooLongError):
            self.too_long.append(bad.num_tokens)
        is_hopeless = counts["num_bad"] + counts["num_empty"] == counts["num_rows"]
        if counts["num_bad"] >= 1000 and is_hopeless:
            self._check_usable()

    def _check_usable(self) -> None:
        """Raise ConfigError if no row is usable, for the missing column if there is one."""
        if self.writer.counts["train"] + self.writer.counts["evaluation"]:
            return
        if self.columns.seen:
            self.columns.require_in(list(self.columns.seen))
        num_rows = self.counts["num_rows"]
        why = f"all of {num_rows} rows are empty" if num_rows else "has no rows"
        if self.bad_rows:
            why = f"all of {num_rows} rows are unusable: {'; '.join(self.bad_rows)}"
        files = [name for name, _ in self.request.train]
        other = sources.other_format(self.request.option, files)  # empty for the Hub
        key, fix = "data.path", self._bad_fix() or other or "data.path=FILE_OR_FOLDER"
        if self.request.hub is not None:
            key, fix = "data.name", "data.split=SPLIT"
        raise ConfigError(Problem(key, self.request.path, why, Fix(fix), "no_rows"))

    def _bad_fix(self) -> str:
        """Return the override that makes most bad rows usable, "" without one."""
        num_bad = self.counts["num_bad"]
        if self.too_long and len(self.too_long) * 2 >= num_bad:
            return f"data.seq_len={max(self.too_long)}"
        for override, count in self.columns.suited.most_common(1):
            if count * 2 > self.counts["num_rows"]:
                return override
        largest = self.columns.largest
        most = self.columns.too_large * 2 >= num_bad
        helps = most and largest >= self.request.num_labels > 0
        return f"task.num_labels={largest + 1}" if helps else ""

    def _write(self, batch: list[Fields], evaluation: bool | None) -> None:
        if not batch:
            return
        made = [(row.ids, 0) for row in batch] if self.chat else self.sequences.of(batch)
        kept = [(row, *m) for row, m in zip(batch, made, strict=True) if m is not None]
        self.counts["num_empty"] += len(batch) - len(kept)
        if not kept:
            return
        if not any(self.first_row):
            self.first_row = tokenizers.ends_of(self.tokenizer, kept[0][1])
        special = self.tokenizer.vocabulary.special
        self.counts["num_doubled"] += sum(is_doubled(tokens, special) for _, tokens, _ in kept)
        first, start = self.writer.counts["cuts"], self.writer.counts["tokens"]
        sizes = np.array([len(tokens) for _, tokens, _ in kept], np.int64)
        self.writer.append("tokens", np.concatenate([tokens for _, tokens, _ in kept]))
        self.writer.append("offsets", start + np.cumsum(sizes))
        self.writer.append("cuts", [cut for _, _, cut in kept])
        if self.chat:
            self.writer.append("trained", np.concatenate([row.trained for row, _, _ in kept]))
        if self.request.label is not None:
            self._write_labels([row.label for row, _, _ in kept])
        self.splits.add([row for row, _, _ in kept], first, evaluation)

    def _write_labels(self, labels: list[Any]) -> None:
        if self.request.problem == "multi_label":
            ends = self.writer.counts["labels"] + np.cumsum([len(classes) for classes in labels])
            self.writer.append("label_offsets", ends)
            labels = [number for classes in labels for number in classes]
        self.writer.append("values" if self.request.problem == "regression" else "labels", labels)

    def _ensure_both_splits(self) -> None:
        """Move a row to an empty split if both have one source; ConfigError if it stays empty."""
        counts = self.writer.counts
        if counts["train"] and counts["evaluation"]:
            return
        separate = self.request.streamed or self._has_eval_source()
        if not separate and counts["train"] + counts["evaluation"] > 1:
            self.splits.fill_empty_side()
            return
        part = "evaluate" if counts["train"] else "train"
        why = f"no usable row to {part} on ({counts['cuts']} in total)"
        key = "data.eval_path" if self.request.evaluation and part == "evaluate" else "data.path"
        fix = Fix(f"{key}=FILE_WITH_MORE_ROWS")
        raise ConfigError(Problem(key, self.request.path, why, fix, "no_rows"))

    def _number_labels(self) -> tuple[str, ...]:
        if not (found := self.columns.names):
            return ()
        names, classes = numbered(self.request, self.columns.given, set(found))
        table = np.array([classes[name] for name in found], np.int32)
        old = self.writer.read("labels")
        self.writer.replace("labels", (table[part] for part in parts_of(old)))
        self.writer.note(repr(names))
        return names

    def _check_classes(self, names: tuple[str, ...]) -> None:
        """Raise ConfigError if all training rows have the same label."""
        train = self.writer.read("train")
        if self.request.label is None or len(train) < 2 or self.request.only_evaluates:
            return
        several = self.request.problem == "multi_label"
        labels = self.writer.read("values" if self.request.problem == "regression" else "labels")
        parts = parts_of(labels) if several else (labels[part] for part in parts_of(train))
        seen = {label for part in parts for label in np.unique(part)[:2].tolist()}
        if len(seen) > 1 or (several and seen):
            return
        name = next((str(names[n] if names else n) for n in seen), "none")
        why = f"all {format_number(len(train), 'training row')} have the label {name}"
        if self.bad_rows:
            why += f". Unusable rows: {'; '.join(self.bad_rows)}"
        # Files are often sorted by class, and of a stream only the beginning is read here.
        other = "data.streaming=false" if self.request.streamed else "data.label=COLUMN"
        fix = Fix(self._bad_fix() or other)
        raise ConfigError(Problem("data.label", self.request.label, why, fix, "too_few_classes"))

    def _pack(self, split: str) -> None:
        offsets, rows = self.writer.read("offsets"), self.writer.read(split)
        lengths = np.concatenate([offsets[part + 1] - offsets[part] for part in parts_of(rows)])
        packs = sources.first_fit(lengths, self.request.seq_len)
        self.writer.append(f"{split}_members", packs.members)
        self.writer.append(f"{split}_offsets", packs.offsets)


def prepare_store(request: PrepareRequest) -> Path:
    """Prepare the store of a request unless it exists, and return its folder."""
    folder = sources.store_folder(request.key)
    with locked(folder):
        if sources.read_manifest(folder) is not None:
            return folder
        tokenizer = tokenizers.load_request_tokenizer(request)
        with temporary(folder) as unfinished:
            writer = Writer(unfinished, tokenizer.vocabulary)
            try:
                if request.corpus:
                    counted = _fill_documents(request, tokenizer, writer)
                else:
                    counted = _RowStore(request, tokenizer, writer).fill()
                writer.finish(request.key, **counted)
            finally:
                writer.close()
    return folder
