"""Readers of rows: jsonl, csv and parquet files, and datasets of the Hugging Face Hub."""

import contextlib
import csv
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import GIB, MIB, first_line, format_value, override, suggest_match
from eke.data.preparation.labels import VECTORS, is_decimal, matched, naming, whole
from eke.data.preparation.untrusted import limited_memory
from eke.data.sources import HubSource, PrepareRequest, other_format, unreadable

_MAX_NAMES = 10_000
"""Limit of distinct text labels of a class column."""

_PROMPTS = ("prompt", "instruction", "question", "query", "input", "source")
_ANSWERS = ("completion", "response", "answer", "output", "target", "chosen")
"""Common column names of prompts and of responses."""


class BadRowError(Exception):
    """A row that cannot be used. The message is the reason."""


class TooLongError(BadRowError):
    """A conversation with an answer beyond the length limit."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"has {num_tokens} tokens: an answer would be cut off at {limit}")
        self.num_tokens = num_tokens


@dataclass(frozen=True)
class Fields:
    """Texts and label of one row."""

    texts: tuple[str, ...]
    """One text, two texts, or prompt and response."""
    label: int | float | tuple[int, ...] = 0
    """Class number, index of a text label by first appearance, several of them, or a number."""
    ids: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int64))
    """Tokens of a conversation, int64, shape (tokens,)."""
    trained: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int64))
    """Mask of the trained tokens, bool, shape (tokens,)."""


@dataclass
class Columns:
    """Columns that a request reads, and the labels read so far."""

    request: PrepareRequest
    kind: str = ""
    """Reading of labels, from `reading_of`, else from the first row with a label."""
    names: dict[str, int] = field(default_factory=dict)
    """Text label -> index by first appearance."""
    given: dict[str, None] = field(default_factory=dict)
    """Names that the data gives its class numbers, by number."""
    are_all: bool = False
    """True if `names` is complete, so that other text labels are rejected."""
    largest: int = 0
    """Largest label out of range."""
    too_large: int = 0
    """Number of positive labels out of range."""
    suited: Counter[str] = field(default_factory=Counter)
    """Overrides that would make unusable labels usable, and number of such labels."""
    seen: dict[str, None] = field(default_factory=dict)
    """Columns of the rows read, in order, until all wanted columns are found."""
    first_table: str = ""
    """First file with all wanted columns in its header."""

    @cached_property
    def wanted(self) -> list[tuple[str, str]]:
        """Key path and column, text columns first."""
        keys = ("text", "text_pair", "prompt", "response", "label")
        pairs = [(f"data.{key}", getattr(self.request, key)) for key in keys]
        return [(key, column) for key, column in pairs if column is not None]

    @cached_property
    def names_wanted(self) -> list[str]:
        """Wanted columns without duplicates."""
        return list(dict.fromkeys(column for _, column in self.wanted))

    def take(self, row: Mapping[str, Any]) -> Fields:
        """Read the texts and the label of a row; BadRowError if it cannot be used."""
        if any(column not in self.seen for column in self.names_wanted):
            self.seen.update(dict.fromkeys(map(str, row)))
        texts = [self._text(row, c) for key, c in self.wanted if key != "data.label"]
        if self.request.label is None:
            return Fields(tuple(texts))
        return Fields(tuple(texts), self._label(_value(row, self.request.label)))

    def _text(self, row: Mapping[str, Any], column: str) -> str:
        value = _value(row, column)
        if not isinstance(value, str):
            raise BadRowError(f"{column} is {_kind(value)}, not text")
        check_unicode(value, column)
        return value

    def _label(self, value: Any) -> int | float | tuple[int, ...]:
        if self.request.problem == "regression":
            return self._number(value)
        if self.request.problem == "single":
            return self._class_number(self._checked(value))
        value = self.items(value)
        if not isinstance(value, list):
            single = "" if self.request.is_csv else "task.problem=single"
            raise self._unsuited(value, "not a list of classes", single)
        each = [self._checked(n) for n in self._positions(value)]
        if len(set(each)) < len(each):
            raise BadRowError(f"{self.request.label} has a class twice: {_shown(value)}")
        return tuple(sorted(map(self._class_number, each)))

    def items(self, value: Any) -> Any:
        """Return the list of classes in a text of csv, any other value unchanged."""
        several = self.request.problem == "multi_label" and self.request.is_csv
        if not several or not isinstance(value, str):
            return value
        if value.lstrip().startswith(("[", "(")):  # Python writes ['a', 'b'], numpy [0. 1.]
            return parse_list(value)
        spaced = value.split()
        if len(spaced) > 1 and all(whole(part) != part for part in spaced):  # 1 0 0
            return spaced
        return [part.strip() for part in re.split("[,;]", value) if part.strip()]

    def _positions(self, found: list[Any]) -> list[Any]:
        """Return the class numbers of a multi-hot list, any other list unchanged."""
        if self.kind != VECTORS:
            return found
        size, values = self.request.num_labels, list(map(whole, found))
        are_bits = all(value in (0, 1) for value in values)
        if are_bits and len(values) == size:
            return [number for number, value in enumerate(values) if value]
        # Count the lists that this override would make usable, to suggest it for most of the rows.
        self.suited[f"task.num_labels={len(values)}"] += are_bits and len(values) > 1
        raise BadRowError(f"{self.request.label} is {_shown(found)}, not {size} zeros and ones")

    def _number(self, value: Any) -> float:
        if isinstance(value, str) and self.request.is_csv:
            with contextlib.suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            kind = "multi_label" if isinstance(value, list) else "single"
            raise self._unsuited(value, "not a number", f"task.problem={kind}")
        if not abs(value) <= float(np.finfo(np.float32).max):
            raise BadRowError(f"{self.request.label} is {_shown(value)}, not a finite number")
        return float(value)

    def _unsuited(self, value: Any, wanted: str, override: str) -> BadRowError:
        if value == value and value not in (None, ""):  # no NaN
            self.suited[override] += bool(override)
        return BadRowError(f"{self.request.label} is {_kind(value)}, {wanted}")

    def _checked(self, value: Any) -> int | str:
        """Return a class number or name; BadRowError if out of range or of another kind."""
        column, single = self.request.label, self.request.problem == "single"
        if isinstance(value, str) and self.request.is_csv and self.kind != "name":
            value = whole(value) if single or not is_decimal(value) else value
        if isinstance(value, float) and value.is_integer() and single:
            value = int(value)
        if not isinstance(value, int | str) or value == "":
            other = {list: "multi_label", float: "regression"}.get(type(value), "")
            suits = f"task.problem={other}" if single and other else ""
            raise self._unsuited(value, "neither a whole number nor a text", suits)
        kind = {str: "name", bool: "truth value"}.get(type(value), "number")
        self.kind = self.kind or kind
        if self.kind not in (kind, VECTORS):
            raise BadRowError(f"{column} is {_shown(value)}, earlier rows have a {self.kind}")
        last = (len(self.request.class_names) or self.request.num_labels) - 1
        if isinstance(value, int) and not 0 <= value <= last:
            self.largest = max(self.largest, value)
            self.too_large += value > 0
            raise BadRowError(f"{column} is {value}, outside 0 to {last}")
        return value

    def _class_number(self, value: int | str) -> int:
        """Return the number of a class: a new one for a new name, unless `are_all`."""
        if isinstance(value, int) and not self.request.class_names:
            return int(value)  # a bool becomes 0 or 1
        name = self.request.class_names[value] if isinstance(value, int) else value
        if name in self.names:
            return self.names[name]
        if self.are_all:
            if not (found := matched([name], tuple(self.names))):  # ignores case
                raise BadRowError(f"{self.request.label} is {_shown(name)}, an unknown class")
            return found[name]
        if len(self.names) >= _MAX_NAMES:
            why = f"has more than {_MAX_NAMES} different texts, which is the limit for classes"
            fix = Fix("data.label=COLUMN")
            column = str(self.request.label)
            raise ConfigError(Problem("data.label", column, why, fix, "too_many_classes"))
        return self.names.setdefault(name, len(self.names))

    def require_in(self, names: list[str], file: str = "") -> None:
        """Raise ConfigError if a column is missing in a table, or in all rows without `file`."""
        missing = [(key, column) for key, column in self.wanted if column not in names]
        if not missing:
            self.first_table = self.first_table or file
        elif self.first_table:
            raise ConfigError(self._unlike_the_first(file, missing[0][1], names))
        else:
            raise ConfigError([self._missing_column(*each, names) for each in missing])

    def _unlike_the_first(self, file: str, column: str, names: list[str]) -> Problem:
        is_evaluation = any(file == path for _, path in self.request.evaluation)
        key = "data.eval_path" if is_evaluation else "data.path"
        why = f"lacks column {_shown(column)} of {self.first_table}. Columns: {_listed(names)}"
        fix = Fix("data.eval_path=FILE") if is_evaluation else Fix(override(key, self.first_table))
        return Problem(key, file, why, fix, "unknown_column")

    def _missing_column(self, key: str, column: str, there: list[str]) -> Problem:
        free = [name for name in there if name not in self.names_wanted]
        near = suggest_match(column, free) or (free[0] if len(free) == 1 else None)
        why = f"no such column. Columns: {_listed(there)}"
        fix = Fix(override(key, near)) if near else Fix(f"{key}=COLUMN")
        known = {name.lower(): name for name in there}
        pair = [next((known[n] for n in names if n in known), "") for names in (_PROMPTS, _ANSWERS)]
        if key == "data.text" and self.request.task == "causal_lm" and all(pair):
            fix = Fix(*map(override, ("data.prompt", "data.response"), pair))
        return Problem(key, column, why, fix, "unknown_column")


def check_unicode(text: str, place: str) -> None:
    """Raise BadRowError for unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(f"{place} is not UTF-8 (character {error.start + 1})") from error


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise BadRowError(f"has no {column}")
    return row[column]


def parse_list(value: Any) -> Any:
    """Return the list in a JSON text, any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return format_value(value)
    if isinstance(value, int | float):
        return f"the number {str(value)[:20]}"
    if isinstance(value, str):
        return f"the text {_shown(value)}" if value else "empty"
    kinds: dict[type, str] = {dict: "an object", list: "a list", tuple: "a list"}
    return kinds.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 30 else text[:27] + "..."


def _listed(names: list[str]) -> str:
    return ", ".join(map(_shown, names[:10])) or "none"


BATCH_ROWS = 1000
"""Rows per tokenizer call. The tokenizer uses several threads."""


Row = tuple[str, dict[str, Any] | BadRowError | Callable[[], dict[str, Any]]]
"""Location of a row (`name:line`), and its values, its error or a function that parses it."""


def values_of(row: Row) -> dict[str, Any]:
    """Return the values of a row, or raise its BadRowError."""
    if isinstance(row[1], BadRowError):
        raise row[1]
    return row[1]() if callable(row[1]) else row[1]


def lines(file: str, limit: int) -> Iterator[tuple[int, str]]:
    """Yield number and bytes (latin-1) of each line; ConfigError: damaged, UTF-16, too long."""
    try:
        for number, text in enumerate(_read_lines(file, limit + 1), 1):
            if number == 1 and text.startswith(("\xff\xfe", "\xfe\xff")):  # byte order marks
                made = f"iconv -f UTF-16 -t UTF-8 {shlex.quote(file)} > NEW_FILE"
                raise _needs_conversion(file, "is UTF-16, not UTF-8", made)
            if len(text) > limit:
                raise _too_long(f"the row in line {number} of {file}", limit)
            yield number, text.removeprefix("\xef\xbb\xbf") if number == 1 else text  # UTF-8's mark
    except ConfigError:
        raise
    except Exception as error:  # raised by a decompressor or the system
        raise unreadable(error, value=file) from error


def _needs_conversion(file: str, why: str, command: str) -> ConfigError:
    fix = Fix("data.path=NEW_FILE", remark=f"made by: {command}")
    return ConfigError(Problem("data.path", file, why, fix, "wrong_format"))


def _too_long(place: str, limit: int) -> ConfigError:
    why = f"{place} is longer"
    fix = Fix(f"data.max_row_bytes={2 * limit}", remark="or more, which takes memory")
    return ConfigError(Problem("data.max_row_bytes", str(limit), why, fix, "large_row"))


def _read_lines(file: str, most: int) -> Iterator[str]:
    """Yield lines, cut after `most` characters."""
    import fsspec

    is_compressed = file.endswith((".gz", ".bz2", ".xz", ".zst"))
    # latin-1 has one character per byte, so a line with invalid UTF-8 is one bad row and not the
    # end of the file. Line ends are chosen as in the datasets library.
    ends = "\n" if is_compressed else None
    with (
        fsspec.open(file, "rb", compression="infer") if is_compressed else open(file, "rb") as raw,
        io.TextIOWrapper(raw, encoding="latin-1", newline=ends) as opened,
    ):
        while text := opened.readline(most):
            yield text


def jsonl_rows(name: str, file: str, columns: Columns) -> Iterator[Row | None]:
    """Yield a parser of each line, None for a blank line."""
    for number, line in lines(file, columns.request.max_row_bytes):
        if number == 1 and line.startswith("["):
            turn = "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]"
            made = f'python -c "{turn}" < {shlex.quote(file)} > NEW_FILE'
            raise _needs_conversion(file, "is a list, not one object per line", made)
        yield (f"{name}:{number}", partial(_parse, line)) if line.strip() else None


def _parse(line: str) -> dict[str, Any]:
    try:
        text = line.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise BadRowError(f"is not UTF-8 (byte {error.start + 1})") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f" (character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
        raise BadRowError(f"is not JSON{where}") from error
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else "one value"
        raise BadRowError(f"is {what}, not an object with columns")
    return value


def csv_rows(name: str, file: str, columns: Columns) -> Iterator[Row | None]:
    """Yield the values of each record by column, None for a blank line."""
    limit = columns.request.max_row_bytes
    csv.field_size_limit(limit)  # a value may span many lines
    # Invalid UTF-8 becomes surrogates, which are reported with their column.
    texts = (
        line.encode("latin-1").decode(errors="surrogateescape") for _, line in lines(file, limit)
    )
    reader = csv.reader(texts, strict=True)
    header: list[str] | None = None
    while True:
        start = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if "field limit" in str(error):
                raise _too_long(f"the row in line {start} of {file}", limit) from error
            yield f"{name}:{start}", BadRowError(f"is not CSV: {error}")
            continue
        if not record:
            yield None
        elif header is None:
            header = _header(file, record, columns)
        elif len(record) != len(header):
            why = f"has {len(record)} values for {len(header)} columns"
            yield f"{name}:{start}", BadRowError(why)
        else:
            yield f"{name}:{start}", dict(zip(header, record, strict=True))


def _header(file: str, record: list[str], columns: Columns) -> list[str]:
    names = [name.strip() for name in record]
    wanted = columns.names_wanted
    separator = next((c for c in ";\t|" if len(names) == 1 and c in names[0]), None)
    if separator and names[0] not in wanted:
        why = f"separates columns by {separator!r}, not by commas: {names[0][:60]!r}"
        turn = f"csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={separator!r}))"
        made = f'python -c "import csv, sys; {turn}" < {shlex.quote(file)} > NEW_FILE'
        raise _needs_conversion(file, why, made)
    # This is plain text in most cases.
    if not set(wanted) & set(names) and (other := other_format("csv", [file])):
        why = f"has no column {_listed(wanted)}, and its name does not end in .csv"
        raise ConfigError(Problem("data.path", file, why, Fix(other), "wrong_format"))
    columns.require_in(names, file)
    if twice := [column for column in wanted if names.count(column) > 1]:
        why, fix = f"the first line names {twice[0]} twice", Fix("data.path=FILE_OR_FOLDER")
        raise ConfigError(Problem("data.path", file, why, fix, "duplicate_column"))
    return names


def parquet_rows(name: str, file: str, columns: Columns) -> Iterator[Row | None]:
    """Yield the wanted columns of each row of a parquet file."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        why, fix = "needs the package pyarrow", Fix(remark='pip install "eke[data]"')
        raise ConfigError(Problem("data.path", file, why, fix, "package_missing")) from error
    try:
        table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=MIB)
    except Exception as error:  # Arrow has several error classes
        why = f"is not a parquet file: {first_line(error)[:150]}"
        fix = Fix(other_format("parquet", [file]) or "data.path=FILE_OR_FOLDER")
        raise ConfigError(Problem("data.path", file, why, fix, "wrong_format")) from error
    columns.require_in(list(table.schema_arrow.names), file)
    named = naming(columns.request, table.schema_arrow.metadata, columns.given)
    limit, number = columns.request.max_row_bytes, 0
    try:
        for batch in _batches(table, file, columns):
            is_long = batch.nbytes > limit
            for place, row in enumerate(zip(*batch.columns, strict=True)):
                number += 1
                if is_long and batch.slice(place, 1).nbytes > limit:
                    raise _too_long(f"row {number} of {file}", limit)
                # Convert single rows: in Arrow many rows may share one text.
                values = (value.as_py() for value in row)
                found = dict(zip(batch.schema.names, values, strict=True))
                yield f"{name} row {number}", named(found)
    except (ConfigError, GeneratorExit):
        raise
    except MemoryError as error:
        why = f"row {number + 1} needs too much memory for a file of this size"
        fix = Fix("data=jsonl", "data.path=FILE", remark="or a file with smaller pages")
        raise ConfigError(Problem("data.path", file, why, fix, "large_row")) from error
    except Exception as error:  # a page that does not decompress
        raise unreadable(error, value=file) from error


def _batches(table: Any, file: str, columns: Columns) -> Iterator[Any]:
    """Yield batches of a parquet file; MemoryError: a row needs much more memory than the file."""
    limit, names = columns.request.max_row_bytes, columns.names_wanted or None
    # Entire pages are decompressed, and compression rarely exceeds a factor of eight.
    memory = 128 * MIB + 8 * Path(file).stat().st_size
    for number in range(table.num_row_groups):
        group, done = table.metadata.row_group(number), 0
        fitting = group.num_rows * limit // max(1, group.total_byte_size)
        # Many rows may share one text of the file. If they exceed the memory, read single rows.
        # More than 100 rows are hardly faster.
        for rows in (max(2, min(100, fitting)), 1):
            batches = table.iter_batches(rows, [number], names)
            try:
                for batch in islice(_limited(batches, memory), done // rows, None):
                    done += batch.num_rows
                    yield batch
                break
            except MemoryError:
                if rows == 1:
                    raise


def _limited(rows: Iterator[Any], memory: int = 2 * GIB) -> Iterator[Any]:
    """Yield rows, each read with limited memory, since libraries may decode thousands of rows."""
    while True:
        with limited_memory(memory):
            if (row := next(rows, None)) is None:
                return
        yield row


def hub_rows(source: HubSource, evaluation: bool, columns: Columns) -> Iterator[Row | None]:
    """Yield the rows of a split; ConfigError if the dataset, the split or a column is missing."""
    split = source.eval_split if evaluation else source.split
    assert split is not None
    loaded = _load_dataset(source)
    if split not in loaded:
        key, there = "data.eval_split" if evaluation else "data.split", list(map(str, loaded))
        close = suggest_match(split, there) or there[0]
        why = f"no such split. Splits: {', '.join(there)}"
        raise ConfigError(Problem(key, split, why, Fix(override(key, close)), "unknown_split"))
    rows = loaded[split]
    if rows.column_names is not None:
        columns.require_in(list(rows.column_names))
        rows = rows.select_columns(columns.names_wanted or rows.column_names)
    schema = rows.features.arrow_schema.metadata if rows.features else None
    named = naming(columns.request, schema, columns.given)
    try:
        for number, row in enumerate(_limited(iter(rows)) if source.streaming else rows, 1):
            yield f"{split} row {number}", named(row)
    except Exception as error:  # a lost connection or a damaged file
        raise _unavailable(source, error) from error


def _load_dataset(source: HubSource) -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    options = {"name": source.config_name, "streaming": source.streaming}
    try:
        try:
            if Path(source.name, "state.json").is_file():  # written by Dataset.save_to_disk
                rows = datasets.load_from_disk(source.name)
                return {"train": rows.to_iterable_dataset() if source.streaming else rows}
            with limited_memory():
                return datasets.load_dataset(source.name, revision=source.revision, **options)
        except Exception:  # from huggingface_hub, the connection or datasets
            if (folder := _downloaded_folder(source)) is None:
                raise
            return datasets.load_dataset(folder, **options)
    except Exception as error:  # for example a copy without the files of a split
        raise _unavailable(source, error) from error


def _downloaded_folder(source: HubSource) -> str | None:
    """Return the folder made by `hf download`, None without it. `datasets` does not search it."""
    from huggingface_hub import snapshot_download

    if Path(source.name).is_dir():
        return None
    options: dict[str, Any] = {"repo_type": "dataset", "revision": source.revision}
    try:
        return str(snapshot_download(source.name, local_files_only=True, **options))
    except Exception:  # not cached, or not a valid name
        return None


def _unavailable(source: HubSource, error: Exception) -> ConfigError:
    text, line = str(error), first_line(error.__cause__ or error)[:200]
    if "onfig name is missing" in text or "BuilderConfig" in text:
        names = text.partition("[")[2].partition("]")[0].replace("'", "").split(", ")
        why = f"must be one of: {', '.join(names)[:200]}"
        key, name = "data.config_name", source.config_name or "null"
        return ConfigError(Problem(key, name, why, Fix(override(key, names[0])), "unknown_subset"))
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"DatasetNotFoundError", "OfflineModeIsEnabled", "ConnectionError",
                "LocalEntryNotFoundError", "RepositoryNotFoundError"}:  # fmt: skip
        why = f"is neither in the local cache nor available from the Hub ({line})"
        download = f"hf download --repo-type dataset {source.name}"
        other = f"or data.name=FOLDER, or with a connection: {download}"
        fix = Fix("data=jsonl", "data.path=FILE", remark=other)
        return ConfigError(Problem("data.name", source.name, why, fix, "no_dataset"))
    why = f"cannot be loaded by the datasets library: {line}"
    fix = Fix("data=jsonl", "data.path=FILE")
    return ConfigError(Problem("data.name", source.name, why, fix, "unreadable"))
