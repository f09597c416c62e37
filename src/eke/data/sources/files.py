"""Local files of rows: which ones `data.path` means."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from eke.common.did_you_mean import closest_path
from eke.common.errors import ConfigError, Problem
from eke.common.paths import user_path
from eke.config.schema import ENDINGS


def find_files(option: str, key: str, typed: str, pattern: str | None) -> list[tuple[str, Path]]:
    """The files, each with its name below what was typed, in the order of their names.

    Args:
        option: `jsonl`, `csv` or `parquet`.
        key: key path it was typed for.
        typed: file, folder or glob.
        pattern: which files of a folder; None takes the endings of the format.

    Raises:
        ConfigError: nothing is there, nothing matches, a file is empty or cannot be read.
    """
    path = user_path(typed)
    if not typed or not _exists(path, key, typed):
        found = _globbed(path) if typed else []
        root = Path(os.path.commonpath([p.parent for p in found])) if found else path
    elif path.is_dir():
        found, root = _in_folder(path, option, pattern), path
    else:
        found, root = [path], path.parent
    if not found:
        raise ConfigError(_nothing(option, key, typed, path, pattern))
    for file in found:
        _check(file, key)
    # A table's reader takes a line of JSON for names of columns; the other readers find out.
    other = other_format(option, [file.name for file in found]) if option == "csv" else ""
    if other not in ("", "data=text"):
        why = "ends like a file of another format, and data=csv would read its lines as a table"
        raise ConfigError(Problem(key, typed, why, other))
    named = [(file.relative_to(root).as_posix(), file.absolute()) for file in found]
    return sorted(named, key=lambda pair: pair[0])


def other_format(option: str, files: Iterable[str]) -> str:
    """What to type for files that end like another format; empty where some end like this one.

    Args:
        option: the one that was typed: `jsonl`, `csv`, `parquet` or `text`.
        files: their names.
    """
    names = [name.lower() for name in files]
    if not names or any(name.endswith(ENDINGS.get(option, ())) for name in names):
        return ""
    others = [o for o, endings in ENDINGS.items() if names[0].endswith(endings)]
    rest = [] if option == "text" else ["text"]
    return "".join(f"data={other}" for other in [*others, *rest][:1])


def _exists(path: Path, key: str, typed: str) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, a null character
        why = f"is no path: {getattr(error, 'strerror', None) or error}"
        shown = typed if len(typed) <= 60 else typed[:57] + "..."
        raise ConfigError(Problem(key, shown, why, f"{key}=FILE_OR_FOLDER")) from error


def _globbed(path: Path) -> list[Path]:
    return [Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)]


def files_below(folder: Path, pattern: str, ending: str) -> list[Path]:
    """The files below a folder whose names match, in no order.

    Args:
        folder: searched to its depth.
        pattern: of file names, as `data.pattern` has it.
        ending: of an example for the error message.

    Raises:
        ConfigError: it is no pattern.
    """
    try:
        return [path for path in folder.rglob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError) as error:  # pathlib's, for "" and for "/etc/*"
        why = f"is no pattern of file names: {error}"
        fix = f"data.pattern='*{ending}'"
        raise ConfigError(Problem("data.pattern", pattern, why, fix)) from error


def _in_folder(folder: Path, option: str, pattern: str | None) -> list[Path]:
    paths = files_below(folder, "*" if pattern is None else pattern, ENDINGS[option][0])
    visible = [p for p in paths if not any(n.startswith(".") for n in p.relative_to(folder).parts)]
    if pattern is not None:
        return visible
    return [p for p in visible if p.name.lower().endswith(ENDINGS[option])]


def _nothing(option: str, key: str, typed: str, path: Path, pattern: str | None) -> Problem:
    if typed and path.is_dir():
        wanted = pattern or " or ".join(f"*{ending}" for ending in ENDINGS[option][:2])
        others = sorted({p.suffix for p in path.rglob("*") if p.is_file() and p.suffix})
        there = f"; there are files that end in {', '.join(others[:5])}" if others else ""
        why = f"no file of the folder matches {wanted}{there}"
        return Problem(key, typed, why, f"data.pattern='*{others[0] if others else '.txt'}'")
    meant = closest_path(path) if typed else None
    why = "there is no such file or folder"
    return Problem(key, typed, why, f"{key}={meant or 'FILE_OR_FOLDER'}")


def _check(file: Path, key: str) -> None:
    """One clear message for a file that cannot hold a single row.

    Raises:
        ConfigError: it is empty or cannot be read.
    """
    fix = f"{key}=FILE_OR_FOLDER"
    try:
        with open(file, "rb") as opened:
            if not opened.read(1):
                raise ConfigError(Problem(key, str(file), "the file is empty", fix))
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        raise ConfigError(Problem(key, str(file), why, fix)) from error
