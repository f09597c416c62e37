"""Files of a data source: discovery, evaluation split, number of samples, content hash.

Plans need only names, sizes and the content hash. `eke.training.batches.dataset` reads the text.
"""

import glob
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import user_path
from eke.common.text import closest_path, first_line, override
from eke.config.schema import ENDINGS, Config, PythonSource, Text
from eke.data.sources.content_hash import content_hash, digest_once, file_signature, memoized


def find_files(option: str, key: str, typed: str, pattern: str | None) -> list[tuple[str, Path]]:
    """Return the files of a path as pairs of relative name and absolute path, sorted by name.

    `typed` is the value of `key`: a file, folder or glob. `pattern` selects files in a folder by
    name; None: the format's suffixes. ConfigError if no file matches, or a file is unusable.
    """
    path = user_path(typed)
    if not typed or not os.path.exists(path):  # also False for a null character
        matches = glob.glob(str(path), recursive=True) if typed else []
        found = [Path(p) for p in matches if os.path.isfile(p)]
        root = Path(os.path.commonpath([p.parent for p in found])) if found else path
    elif path.is_dir():
        found, root = _in_folder(path, option, pattern), path
    else:
        found, root = [path], path.parent
    if not found:
        raise ConfigError(_no_files(option, key, typed, path, pattern))
    for file in found:
        _check(file, key)
    strange = [f for f in found if f.suffix and not f.name.lower().endswith(ENDINGS[option])]
    if pattern is not None and 0 < len(strange) < len(found):
        why = f"also matches files without the ending {ENDINGS[option][0]}: {strange[0].name}"
        fix = Fix("data.pattern=null")
        raise ConfigError(Problem("data.pattern", pattern, why, fix, "wrong_format"))
    # The CSV reader accepts JSON as a header. The other readers detect a wrong format.
    other = other_format(option, [file.name for file in found]) if option == "csv" else ""
    if other not in ("", "data=text"):
        why = "has the ending of another format, which data=csv would read as a table"
        raise ConfigError(Problem(key, typed, why, Fix(other), "wrong_format"))
    named = [(file.relative_to(root).as_posix(), file.absolute()) for file in found]
    return sorted(named, key=lambda pair: pair[0])


def other_format(option: str, files: Iterable[str]) -> str:
    """Return the override for files with another format's suffix, "" if one has this format's."""
    names = [name.lower() for name in files]
    if not names or any(name.endswith(ENDINGS.get(option, ())) for name in names):
        return ""
    others = [o for o, endings in ENDINGS.items() if names[0].endswith(endings)]
    rest = [] if option == "text" else ["text"]
    return "".join(f"data={other}" for other in [*others, *rest][:1])


def _files_below(folder: Path, pattern: str, ending: str) -> list[Path]:
    """Return the files below a folder whose names match a pattern, unsorted."""
    try:
        return [path for path in folder.rglob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError) as error:  # raised by pathlib for "" and "/etc/*"
        why, fix = f"invalid file name pattern: {error}", Fix(f"data.pattern=*{ending}")
        raise ConfigError(Problem("data.pattern", pattern, why, fix, "invalid_pattern")) from error


def _in_folder(folder: Path, option: str, pattern: str | None) -> list[Path]:
    paths = _files_below(folder, "*" if pattern is None else pattern, ENDINGS[option][0])
    visible = [p for p in paths if not any(n.startswith(".") for n in p.relative_to(folder).parts)]
    if pattern is not None:
        return visible
    return [p for p in visible if p.name.lower().endswith(ENDINGS[option])]


def _no_files(option: str, key: str, typed: str, path: Path, pattern: str | None) -> Problem:
    if typed and os.path.isdir(path):
        wanted = pattern or " or ".join(f"*{ending}" for ending in ENDINGS[option][:2])
        others = sorted({p.suffix for p in path.rglob("*") if p.is_file() and p.suffix})
        there = f". Endings in the folder: {', '.join(others[:5])}" if others else ""
        why = f"no file in the folder matches {wanted}{there}"
        fix = Fix(override("data.pattern", f"*{[*others, '.txt'][0]}"))
        return Problem(key, typed, why, fix, "missing_file")
    meant = closest_path(path) if typed else None
    why, fix = "no such file or folder", Fix(override(key, str(meant or "FILE_OR_FOLDER")))
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", typed) and not path.parent.exists()
    if key == "data.path" and is_name and option != "text":
        hub = "chat_hub" if option == "chat" else "hub"
        why += f". data={hub} reads datasets of the Hub"
        fix = Fix(f"data={hub}", override("data.name", typed))
    return Problem(key, typed, why, fix, "missing_file")


def _check(file: Path, key: str) -> None:
    fix = Fix(f"{key}=FILE_OR_FOLDER")
    if not file.is_file():  # a FIFO would block and can be read only once
        raise ConfigError(Problem(key, str(file), "is not a regular file", fix, "unreadable"))
    try:
        with open(file, "rb") as opened:
            if not opened.read(1):
                raise ConfigError(Problem(key, str(file), "is empty", fix, "empty_file"))
    except OSError as error:
        raise unreadable(error, key, str(file)) from error


def unreadable(
    error: Exception, key: str = "data.path", value: str = "", instead: str = "FILE_OR_FOLDER"
) -> ConfigError:
    """Return the error for a file that the system, a decompressor or a library cannot read."""
    why = f"cannot be read: {getattr(error, 'strerror', None) or first_line(error)}"
    value = value or str(getattr(error, "filename", ""))
    return ConfigError(Problem(key, value, why, Fix(f"{key}={instead}"), "unreadable"))


_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders of third-party packages and of tests (a third of the bytes, much of it data)."""


@dataclass(frozen=True)
class FileRange:
    """Byte range of one file."""

    path: Path
    start: int
    size: int
    label: str = ""
    """Class of the text: the name of its top-level folder, empty without one."""


@dataclass(frozen=True)
class TextSource:
    """Text source with its training and evaluation split."""

    train: tuple[FileRange, ...]
    evaluation: tuple[FileRange, ...]

    def pieces(self) -> tuple[FileRange, ...]:
        """Return the byte ranges of both splits."""
        return self.train + self.evaluation


def open_corpus(config: Config) -> TextSource | None:
    """Return the text source of `config.data`, None if it is not text; ConfigError if empty."""
    if isinstance(config.data, PythonSource):
        corpus = standard_library()
    elif isinstance(config.data, Text):
        corpus = text_files(user_path(config.data.path), config.data.pattern, config.data.eval_frac)
    else:
        return None
    if num_labels := config.targets.num_labels:
        return _classes(corpus, config.data, num_labels)
    return corpus


def _classes(corpus: TextSource, data: PythonSource | Text, num_labels: int) -> TextSource:
    """Restrict a corpus to its `num_labels` largest classes; ConfigError if there are fewer."""
    labels = largest_labels(corpus, num_labels)
    if (count := len(labels)) < num_labels:
        why = f"only {count} folders (classes) have files for both training and evaluation"
        fewer = f"task.num_labels={count}" if count > 1 else "data.path=FOLDER_OF_FOLDERS"
        fix = _more_classes_fix(corpus, data, num_labels) or Fix(fewer)
        raise ConfigError(Problem("task.num_labels", str(num_labels), why, fix, "too_few_classes"))
    parts = (corpus.train, corpus.evaluation)
    return TextSource(*(tuple(piece for piece in part if piece.label in labels) for part in parts))


def _more_classes_fix(corpus: TextSource, data: PythonSource | Text, num_labels: int) -> Fix:
    """Return overrides that yield as many of the requested classes as exist."""
    wanted = min(num_labels, len({piece.label for piece in corpus.pieces()} - {""}))
    fewer = [f"task.num_labels={wanted}"] if wanted < num_labels else []
    if not isinstance(data, Text) or wanted < 2:
        return Fix()
    for share in (data.eval_frac, 0.2, 0.3, 0.4, 0.5):
        files = text_files(user_path(data.path), data.pattern, share)
        if len(largest_labels(files, wanted)) == wanted:
            return Fix(*fewer, *([f"data.eval_frac={share:g}"] if share != data.eval_frac else []))
    return Fix()


@cache  # two thousand files that do not change while Python runs
def standard_library() -> TextSource:
    """Return the source of the standard library, split by a hash of the file names."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        paths += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return _split(root, paths, eval_frac=0.1)


@memoized
def text_files(path: Path, pattern: str, eval_frac: float) -> TextSource:
    """Split a file (its end is held out) or a folder (some files are); ConfigError: no text."""
    if path.is_file() and (rows := other_format("text", [path.name])):
        why = "has rows, but data=text trains on the raw file, including markup and column names."
        why += f" If intended: data.path={path.parent} data.pattern='{path.name}'"
        raise ConfigError(Problem("data.path", str(path), why, Fix(rows), "wrong_format"))
    paths = sorted(_files_below(path, pattern, ".txt")) if path.is_dir() else [path]
    paths = [p for p in paths if p.is_file() and p.stat().st_size > 0]
    if not paths:
        why = f"no file that matches {pattern!r} contains text" if path.is_dir() else "no text"
        fix = Fix("data.path=FILE_OR_FOLDER")
        raise ConfigError(Problem("data.path", str(path), why, fix, "empty_file"))
    if eval_frac == 1:  # both splits are the entire source
        root = path if path.is_dir() else path.parent
        every = tuple(_whole_file(p, p.relative_to(root).as_posix()) for p in paths)
        return TextSource(every, every)
    if len(paths) > 1:
        return _split(path, paths, eval_frac)
    size = paths[0].stat().st_size
    cut = size - max(1, round(size * eval_frac))
    return TextSource((FileRange(paths[0], 0, cut),), (FileRange(paths[0], cut, size - cut),))


def _split(root: Path, paths: list[Path], eval_frac: float) -> TextSource:
    """Hold out the files with the lowest name hashes, so that added files move no other file."""
    names = {path: path.relative_to(root).as_posix() for path in paths}
    ranked = sorted(paths, key=lambda path: hashlib.sha256(os.fsencode(names[path])).digest())
    num_kept = min(max(1, round(len(paths) * eval_frac)), len(paths) - 1)
    kept = set(ranked[:num_kept])

    def pieces(chosen: bool) -> tuple[FileRange, ...]:
        found = (_whole_file(path, names[path]) for path in paths if (path in kept) is chosen)
        return tuple(piece for piece in found if piece.size > 0)

    return TextSource(pieces(False), pieces(True))


def _whole_file(path: Path, name: str) -> FileRange:
    """Return a file with the top-level folder of its name as label. Invalid UTF-8 is escaped."""
    label = name.split("/", 1)[0] if "/" in name else ""
    escaped = os.fsencode(label).decode(errors="backslashreplace")
    return FileRange(path, 0, path.stat().st_size, escaped)


def largest_labels(corpus: TextSource, num_labels: int) -> list[str]:
    """Return the classes in both splits with the most training bytes, largest first."""
    seen = {piece.label for piece in corpus.evaluation if piece.label}
    sizes: Counter[str] = Counter()
    for piece in corpus.train:
        if piece.label in seen:
            sizes[piece.label] += piece.size
    return [label for label, _ in sizes.most_common(num_labels)]


def labels_of(config: Config, corpus: TextSource) -> list[str]:
    """Return the labels of a corpus by number: the classes, else all folders."""
    if num_labels := config.targets.num_labels:
        return largest_labels(corpus, num_labels)
    return sorted({piece.label for piece in corpus.pieces()})


def window_length(config: Config) -> int:
    """Return the tokens of text per sample; in seq2seq, source and target together."""
    return config.data.seq_len + config.target_len


def count_windows(pieces: Iterable[FileRange], length: int) -> int:
    """Count the samples of `length` tokens. Classes are cut separately, with separators."""
    return sum(count // length for count in _tokens(pieces).values())


def longest_window(pieces: Iterable[FileRange]) -> int:
    """Return the largest `length` for which `count_windows` is not zero."""
    return max(_tokens(pieces).values(), default=0)


def _tokens(pieces: Iterable[FileRange]) -> Counter[str]:
    """Count the tokens of each class: bytes, and one separator per byte range."""
    tokens: Counter[str] = Counter()
    for piece in pieces:
        tokens[piece.label] += piece.size + 1
    return tokens


@memoized
def fingerprint(corpus: TextSource) -> str:
    """Hash the names, bounds and contents of a corpus to 16 hex digits."""
    pieces = corpus.pieces()
    parts = [
        (f"{p.path.name}\0{p.start}\0{p.size}\0{p.label}\0", p.path, p.start, p.size)
        for p in pieces
    ]
    try:
        # Cached by path and stamp: hashing the standard library takes about a second.
        listing = [[str(p.path), p.start, p.size, *file_signature(p.path)] for p in pieces]
        return digest_once(listing, 16, lambda: content_hash(parts))
    except OSError as error:
        raise unreadable(error) from error


def read_piece(piece: FileRange) -> bytes:
    """Read the bytes of a piece."""
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        return file.read(piece.size)
