"""Lines of local files with their numbers, none longer than is allowed; jsonl and csv on top.

Bytes reach Python one to one (latin-1), so that a line that is no UTF-8 is one bad row with its
number, and not the end of the file.
"""

import csv
import glob
import gzip
import io
import json
import lzma
import shlex
import zlib
from collections.abc import Iterator
from typing import Any

from eke.errors import ConfigError, Problem
from eke.prepare.columns import BadRowError, Columns

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
    fix = "data.path=FILE_OR_FOLDER"
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
    fix = f"data.path=NEW_FILE   (made by: iconv -f UTF-16 -t UTF-8 {shlex.quote(file)} > NEW_FILE)"
    return ConfigError(Problem("data.path", file, "is UTF-16, not UTF-8", fix))


def _too_long(file: str, number: int, limit: int) -> ConfigError:
    why = f"the row in line {number} of {file} is longer"
    fix = f"data.max_row_bytes={2 * limit}   (or more; a longer row takes memory)"
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
        raise ConfigError(Problem("data.path", file, why, "data.path=FILE_OR_FOLDER"))
    return names


def _refuse_other_separator(file: str, names: list[str], columns: Columns) -> None:
    """A single column that no one asks for, with what other programs write between columns."""
    separator = next((c for c in SEPARATORS if len(names) == 1 and c in names[0]), None)
    if not separator or names[0] in {column for _, column in columns.wanted}:
        return
    why = f"has {separator!r} between its columns, not a comma: {names[0][:60]!r}"
    turn = f"csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={separator!r}))"
    made = f'python -c "import csv, sys; {turn}" < {shlex.quote(file)} > NEW_FILE'
    raise ConfigError(Problem("data.path", file, why, f"data.path=NEW_FILE   (made by: {made})"))
