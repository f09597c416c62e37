"""Lines of local files with their numbers, none longer than is allowed; jsonl and csv on top.

Bytes reach Python one to one (latin-1), so that a line that is no UTF-8 is one bad row with its
number, and not the end of the file.

From a row's named values to the texts and the label a sample is made of, or why not.

Rows of parquet files and of the hub's data sets.
"""

import csv
import difflib
import glob
import gzip
import io
import json
import lzma
import shlex
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import closest
from eke.data.sources import HubSource, Request, other_format

MAX_NAMES = 10_000
"""More different text labels than this are no classes."""

PROMPTS = ("prompt", "instruction", "question", "query", "input", "source")
ANSWERS = ("completion", "response", "answer", "output", "target", "chosen")
"""Usual names of columns with what is read, and with what is predicted."""


class BadRowError(Exception):
    """A row that cannot be used, with the reason."""


@dataclass(frozen=True)
class Fields:
    """What is used of one row."""

    texts: tuple[str, ...]
    """One text, or prompt and response."""
    label: int = 0
    """Class, or the number of a text label in order of appearance."""


@dataclass
class Columns:
    """The columns a request reads, and the labels seen so far."""

    request: Request
    kind: str = ""
    """number or name, decided by the first row that has a label."""
    names: dict[str, int] = field(default_factory=dict)
    """Text labels by number, in order of appearance."""
    largest: int = 0
    """Largest label that was too large."""
    too_large: int = 0
    """Rows with such a label."""
    seen: Counter[str] = field(default_factory=Counter)
    """Columns of the rows, as far as they were looked at."""
    found: set[str] = field(default_factory=set)
    """Wanted columns that some row had."""
    first_table: str = ""
    """The first file whose head has all wanted columns."""

    @property
    def wanted(self) -> list[tuple[str, str]]:
        """Key path and column, texts first."""
        request = self.request
        pairs = [("text", request.text), ("prompt", request.prompt),
                 ("response", request.response), ("label", request.label)]  # fmt: skip
        return [(f"data.{key}", column) for key, column in pairs if column is not None]

    def take(self, row: Mapping[str, Any]) -> Fields:
        """The texts and the label of a row.

        Raises:
            BadRowError: a column is missing, empty of a value, or of the wrong type.
        """
        if len(self.found) < len(self.wanted):
            self.seen.update(str(name) for name in row)
            self.found.update(column for _, column in self.wanted if column in row)
        texts = [self._text(row, c) for key, c in self.wanted if key != "data.label"]
        label = 0
        if self.request.label is not None:
            label = self._label(_value(row, self.request.label))
        return Fields(tuple(texts), label)

    def _text(self, row: Mapping[str, Any], column: str) -> str:
        value = _value(row, column)
        if not isinstance(value, str):
            raise BadRowError(f"{column} is {_kind(value)}, not text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRowError(f"{column} is not UTF-8 (character {error.start + 1})") from error
        return value

    def _label(self, value: Any) -> int:
        column = self.request.label
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str) and self.request.option == "csv" and self.kind != "name":
            digits = value.strip()
            value = int(digits) if digits.removeprefix("-").isdecimal() else value
        if not isinstance(value, int | str) or value == "":
            raise BadRowError(f"{column} is {_kind(value)}, neither a whole number nor a text")
        kind = "name" if isinstance(value, str) else "number"
        self.kind = self.kind or kind
        if kind != self.kind:
            raise BadRowError(
                f"{column} is {_shown(value)}, where rows before it had a {self.kind}"
            )
        return self._name(value) if isinstance(value, str) else self._number(int(value))

    def _number(self, value: int) -> int:
        if not 0 <= value < self.request.num_labels:
            self.largest = max(self.largest, value)
            self.too_large += value > 0
            raise BadRowError(
                f"{self.request.label} is {value}, outside 0 to {self.request.num_labels - 1}"
            )
        return value

    def _name(self, value: str) -> int:
        if len(self.names) >= MAX_NAMES and value not in self.names:
            why = f"has more than {MAX_NAMES} different texts: these are no classes"
            raise ConfigError(
                Problem("data.label", str(self.request.label), why, Fix("data.label=COLUMN"))
            )
        return self.names.setdefault(value, len(self.names))

    def require(self) -> None:
        """All wanted columns exist in some row so far.

        Raises:
            ConfigError: some do not, each with the column that was probably meant.
        """
        missing = [(key, column) for key, column in self.wanted if column not in self.found]
        if missing:
            raise ConfigError(
                [self._absent(key, column, list(self.seen)) for key, column in missing]
            )

    def require_in(self, names: list[str], file: str = "") -> None:
        """All wanted columns exist in a table.

        Args:
            names: the table's columns.
            file: where it lies; empty for the hub's.

        Raises:
            ConfigError: some do not, each with the column that was probably meant; or they are in
                the files before this one.
        """
        missing = [(key, column) for key, column in self.wanted if column not in names]
        if not missing:
            self.first_table = self.first_table or file
        elif self.first_table:
            raise ConfigError(self._unlike_the_first(file, missing[0][1], names))
        else:
            raise ConfigError([self._absent(key, column, names) for key, column in missing])

    def _unlike_the_first(self, file: str, column: str, names: list[str]) -> Problem:
        is_evaluation = any(file == path for _, path in self.request.evaluation)
        key = "data.eval_path" if is_evaluation else "data.path"
        why = (
            f"{self.first_table} has a column {_shown(column)}, and this file has none; it has: "
            f"{_listed(names)}"
        )
        fix = (
            Fix("data.eval_path=FILE")
            if is_evaluation
            else _override("data.path", self.first_table)
        )
        return Problem(key, file, why, fix)

    def _absent(self, key: str, column: str, there: list[str]) -> Problem:
        pair = self._pair(there) if key == "data.text" else ()
        used = {c for _, c in self.wanted}
        free = [name for name in there if name not in used]
        only = free if len(free) == 1 else []
        near = closest(column, free)
        close = [near] if near else only
        why = f"there is no such column; there are: {_listed(there)}"
        fix = _override(key, close[0]) if close else Fix(f"{key}=COLUMN")
        if pair:
            both = map(_override, ("data.prompt", "data.response"), pair)
            fix = Fix(*(word for each in both for word in each.words))
        return Problem(key, column, why, fix)

    def _pair(self, there: list[str]) -> tuple[str, ...]:
        """The columns of a prompt and its answer, by the names that such columns have."""
        known = {name.lower(): name for name in there}
        pair = [next((known[n] for n in names if n in known), "") for names in (PROMPTS, ANSWERS)]
        return tuple(pair) if all(pair) and self.request.task == "causal_lm" else ()

    def numbered(self) -> tuple[tuple[str, ...], dict[int, int]]:
        """Text labels by class, and the class of each number in order of appearance.

        Where the checkpoint's head knows all of them, or transformers' own `LABEL_0` and the like
        are they, they have these numbers; else those of their sorted order.

        Raises:
            ConfigError: there are more of them than classes.
        """
        plain = tuple(f"LABEL_{number}" for number in range(self.request.num_labels))
        choices = (self.request.head_labels, plain, tuple(sorted(self.names)))
        names = next(names for names in choices if set(self.names) <= set(names))
        if len(names) > self.request.num_labels:
            listed = ", ".join(_shown(name) for name in names[:10])
            why = f"column {self.request.label} has {len(names)} different labels: {listed}"
            fix = Fix(f"task.num_labels={len(names)}")
            raise ConfigError(Problem("task.num_labels", str(self.request.num_labels), why, fix))
        known = [(number, name) for number, name in enumerate(names) if name in self.names]
        return names, {self.names[name]: number for number, name in known}


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise BadRowError(f"there is no {column}")
    return row[column]


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {str(value)[:20]}"
    return "empty" if value == "" else type(value).__name__


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 30 else text[:27] + "..."


def _listed(names: list[str]) -> str:
    return ", ".join(map(_shown, names[:10])) or "none"


def _override(key: str, value: str) -> Fix:
    """The override in Hydra's grammar, for any characters in the value."""
    from eke.config.sweep.definition import value_text  # Hydra, for a mistake alone

    return Fix(f"{key}={value_text(value)}")


COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

BOM = "\xef\xbb\xbf"
"""UTF-8's byte order mark, read as latin-1."""

UTF_16 = ("\xff\xfe", "\xfe\xff")
"""UTF-16's byte order marks, which begin no text in UTF-8."""

SEPARATORS = ";\t|"
"""What some programs write in the place of commas."""

Row = tuple[str, dict[str, Any] | BadRowError]
"""Where a row is (`name:line`), and its values, or why it has none."""


def streamed(builder: str, file: str, cache: str, **options: Any) -> Any:
    """A streaming data set over one local file."""
    import datasets

    return datasets.load_dataset(
        builder,
        # The library takes names for patterns.
        data_files=glob.escape(file),
        split="train",
        streaming=True,
        cache_dir=cache,
        **options,
    )


def unreadable(file: str, error: Exception) -> ConfigError:
    """One clear message for a file that cannot be read to its end."""
    fix = Fix("data.path=FILE_OR_FOLDER")
    damaged = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
    words = str(error).lower()
    if isinstance(error, damaged) or "compressed" in words or "zstd" in type(error).__module__:
        why = f"the compressed file is cut short or damaged: {error}"
    else:
        why = f"cannot be read: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}"
    return ConfigError(Problem("data.path", file, why, fix))


def lines(file: str, limit: int) -> Iterator[tuple[int, str]]:
    """Number and bytes (as latin-1) of each line, its end included.

    Raises:
        ConfigError: the file cannot be read, its compression is damaged, it is UTF-16, or a line
            has more than `limit` bytes, of which no more are read.
    """
    texts = _texts(file, limit + 1)
    number = 0
    while True:
        try:
            text = next(texts)
        except StopIteration:
            return
        except Exception as error:  # Arrow's, the decompressors' and the system's
            raise unreadable(file, error) from error
        number += 1
        if number == 1 and text.startswith(UTF_16):
            raise _utf_16(file)
        if len(text) > limit:
            raise _too_long(file, number, limit)
        yield number, text.removeprefix(BOM) if number == 1 else text


def _utf_16(file: str) -> ConfigError:
    fix = Fix(
        "data.path=NEW_FILE",
        remark=f"made by: iconv -f UTF-16 -t UTF-8 {shlex.quote(file)} > NEW_FILE",
    )
    return ConfigError(Problem("data.path", file, "is UTF-16, not UTF-8", fix))


def _too_long(file: str, number: int, limit: int) -> ConfigError:
    why = f"the row in line {number} of {file} is longer"
    fix = Fix(f"data.max_row_bytes={2 * limit}", remark="or more; a longer row takes memory")
    return ConfigError(Problem("data.max_row_bytes", str(limit), why, fix))


def _texts(file: str, most: int) -> Iterator[str]:
    """Lines, or the first `most` characters of longer ones."""
    import fsspec

    is_compressed = file.endswith(COMPRESSED)
    # Ends of lines as the datasets library reads them: prepared tokens stay the same.
    ends = "\n" if is_compressed else None
    with (
        fsspec.open(file, "rb", compression="infer") if is_compressed else open(file, "rb") as raw,
        io.TextIOWrapper(raw, encoding="latin-1", newline=ends) as opened,
    ):
        while text := opened.readline(most):
            yield text


def jsonl_rows(name: str, file: str, _: str, columns: Columns) -> Iterator[Row | None]:
    """Each line as an object; None for a blank line."""
    wanted = {column for _, column in columns.wanted}
    for number, line in lines(file, columns.request.max_row_bytes):
        if not line.strip():
            yield None
            continue
        try:
            yield f"{name}:{number}", _parse(line, wanted)
        except BadRowError as bad:
            yield f"{name}:{number}", bad


def _parse(line: str, wanted: set[str]) -> dict[str, Any]:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(found)
        if len(values) < len(found):
            names = [key for key, _ in found]
            twice = [key for key in names if key in wanted and names.count(key) > 1]
            if twice:
                raise BadRowError(f"{twice[0]} is there twice")
        return values

    try:
        text = line.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise BadRowError(f"is not UTF-8 (byte {error.start + 1})") from error
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        where = f" (character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
        raise BadRowError(f"is not JSON{where}") from error
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else "one value"
        raise BadRowError(f"is {what}, not an object with columns")
    return value


def csv_rows(name: str, file: str, _: str, columns: Columns) -> Iterator[Row | None]:
    """Each record by the names in the first one; None for a blank line.

    Raises:
        ConfigError: a wanted column is not among them, or a record is too long.
    """
    csv.field_size_limit(2**31 - 1)
    limit, start, size = columns.request.max_row_bytes, 1, 0

    def texts() -> Iterator[str]:
        nonlocal size
        for _, line in lines(file, limit):
            size += len(line)  # a value may have many lines
            if size > limit:
                raise _too_long(file, start, limit)
            # What is no UTF-8 survives as half surrogates, and is found in the column it is in.
            yield line.encode("latin-1").decode(errors="surrogateescape")

    reader = csv.reader(texts(), strict=True)
    header: list[str] | None = None
    while True:
        start, size = reader.line_num + 1, 0
        try:
            record = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield f"{name}:{start}", BadRowError(f"is not CSV: {error}")
            continue
        if not record:
            yield None
        elif header is None:
            header = _header(file, record, columns)
        elif len(record) != len(header):
            counts = f"{len(record)} values, and the first line names {len(header)} columns"
            yield f"{name}:{start}", BadRowError(f"has {counts}")
        else:
            yield f"{name}:{start}", dict(zip(header, record, strict=True))


def _header(file: str, record: list[str], columns: Columns) -> list[str]:
    names = [name.strip() for name in record]
    _refuse_other_separator(file, names, columns)
    columns.require_in(names, file)
    twice = [column for _, column in columns.wanted if names.count(column) > 1]
    if twice:
        why = f"the first line names {twice[0]} twice"
        raise ConfigError(Problem("data.path", file, why, Fix("data.path=FILE_OR_FOLDER")))
    return names


def _refuse_other_separator(file: str, names: list[str], columns: Columns) -> None:
    """A single column that no one asks for, with what other programs write between columns."""
    separator = next((c for c in SEPARATORS if len(names) == 1 and c in names[0]), None)
    if not separator or names[0] in {column for _, column in columns.wanted}:
        return
    why = f"has {separator!r} between its columns, not a comma: {names[0][:60]!r}"
    turn = f"csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={separator!r}))"
    made = f'python -c "import csv, sys; {turn}" < {shlex.quote(file)} > NEW_FILE'
    fix = Fix("data.path=NEW_FILE", remark=f"made by: {made}")
    raise ConfigError(Problem("data.path", file, why, fix))


def parquet_rows(name: str, file: str, cache: str, columns: Columns) -> Iterator[Row | None]:
    """Each row of a parquet file, with the columns that are read.

    Raises:
        ConfigError: it is no parquet file, or a wanted column is not there.
    """
    import pyarrow.parquet

    try:
        found = pyarrow.parquet.read_metadata(file)
        names = list(found.schema.to_arrow_schema().names)
    except Exception as error:  # Arrow's own tree of errors
        why = f"is no parquet file: {str(error).splitlines()[0][:150]}"
        fix = Fix(other_format("parquet", [file]) or "data.path=FILE_OR_FOLDER")
        raise ConfigError(Problem("data.path", file, why, fix)) from error
    columns.require_in(names, file)
    if not found.num_rows:
        return  # the library stumbles over it
    wanted = [column for _, column in columns.wanted]
    try:
        rows = iter(streamed("parquet", file, cache, columns=list(dict.fromkeys(wanted))))
    except Exception as error:  # datasets' and Arrow's
        raise unreadable(file, error) from error
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # a page that does not decompress
            raise unreadable(file, error) from error
        number += 1
        yield f"{name} row {number}", row


def hub_rows(source: HubSource, evaluation: bool, columns: Columns) -> Iterator[Row | None]:
    """Each row of one split.

    Raises:
        ConfigError: the data set, its configuration, its split or a column is not there.
    """
    split = source.eval_split if evaluation else source.split
    assert split is not None
    rows = iter(_load(source, split, "data.eval_split" if evaluation else "data.split", columns))
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the connection, or a damaged file
            raise _unavailable(source, error) from error
        number += 1
        yield f"{split} row {number}", row


def _load(source: HubSource, split: str, key: str, columns: Columns) -> Any:
    loaded = _loaded(source)
    if split not in loaded:
        there = [str(name) for name in loaded]
        close = difflib.get_close_matches(split, there, 1) or there
        why = f"there is no such split; there are: {', '.join(there)}"
        raise ConfigError(Problem(key, split, why, Fix(f"{key}={close[0]}")))
    chosen = loaded[split]
    if chosen.column_names is not None:
        columns.require_in(list(chosen.column_names))
        chosen = chosen.select_columns(list(dict.fromkeys(c for _, c in columns.wanted)))
    return chosen


def _loaded(source: HubSource) -> Any:
    """All splits, from the hub or its cache."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    options = {"name": source.config_name, "streaming": source.streaming}
    try:
        return datasets.load_dataset(source.name, revision=source.revision, **options)
    except Exception as error:  # huggingface_hub's, the connection's, datasets'
        folder = _cached_copy(source)
        if folder is None:
            raise _unavailable(source, error) from error
    try:
        return datasets.load_dataset(folder, **options)
    except Exception as error:  # a copy without the files of a split
        raise _unavailable(source, error) from error


def _cached_copy(source: HubSource) -> str | None:
    """Where `hf download` has put a copy; without a connection the library itself does not look."""
    from huggingface_hub import snapshot_download

    if Path(source.name).is_dir():
        return None
    try:
        return str(
            snapshot_download(
                source.name, repo_type="dataset", revision=source.revision, local_files_only=True
            )
        )
    except Exception:  # not cached, or not a name at all
        return None


def _unavailable(source: HubSource, error: Exception) -> ConfigError:
    """What the datasets library raised, in eke's words."""
    text = str(error).strip() or repr(error)
    line = text.splitlines()[0][:200]
    if "onfig name is missing" in text or "BuilderConfig" in text:
        names = text.partition("[")[2].partition("]")[0].replace("'", "").split(", ")
        what = "there are" if source.config_name else "one must be chosen"
        why = f"{what}: {', '.join(names)[:200]}"
        value = source.config_name or "null"
        return ConfigError(
            Problem("data.config_name", value, why, Fix(f"data.config_name={names[0]}"))
        )
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"DatasetNotFoundError", "OfflineModeIsEnabled", "ConnectionError",
                "LocalEntryNotFoundError", "RepositoryNotFoundError"}:  # fmt: skip
        why = (
            f"is neither in the cache of this machine nor to be had from the hub ({line}); fetch "
            f"it where there is a connection: hf download --repo-type dataset {source.name}"
        )
        fix = Fix(
            "data=jsonl",
            "data.path=FILE",
            remark="or the folder it was fetched into: data.name=FOLDER",
        )
        return ConfigError(Problem("data.name", source.name, why, fix))
    why = f"the datasets library cannot load it: {line}"
    return ConfigError(Problem("data.name", source.name, why, Fix("data=jsonl", "data.path=FILE")))
