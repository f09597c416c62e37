"""What is typed for a benchmark, looked at before anything is measured, and a layout of tables.

A script may measure for a quarter of an hour before it writes. A file that cannot be written, and a
number of rounds of which nothing can be said, are told at once.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def at_least(least: int) -> Callable[[str], int]:
    """A type of argparse: whole numbers from this one on."""

    def number(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is no whole number") from None
        if found < least:
            raise argparse.ArgumentTypeError(f"{found} is too few: {least} or more")
        return found

    return number


def as_table(content: Mapping[str, Any], indent: str = "") -> str:
    """JSON with sorted keys, each table of plain values on one line."""
    if not any(isinstance(value, Mapping) for value in content.values()):
        return json.dumps(content, sort_keys=True)
    rows = (
        f"{indent} {json.dumps(k)}: {as_table(content[k], indent + ' ')}" for k in sorted(content)
    )
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def writable(parser: argparse.ArgumentParser, file: Path) -> Path:
    """The file, in a folder that is there now and takes files; else the script ends here.

    Args:
        parser: of the script, which says how it is used.
        file: what the script is going to write, perhaps again and again.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(0, "Is a directory")
        if file.exists() and not os.access(file, os.W_OK):
            raise PermissionError(0, "Permission denied")
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}."):
            pass
    except OSError as error:
        parser.error(f"{file} cannot be written: {error.strerror}; nothing was measured")
    return file
