"""Width, wrapping and colours of text on a terminal.

Everything works without rich, whose import takes 0.05 s.
"""

import os
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

_NARROWEST = 20
"""Columns that a text needs next to its name. It is otherwise below."""

DEFAULT_WIDTH = 80
"""Columns of prose in a pipe or a file."""

COLOR_CHOICES = ("auto", "always", "never")

_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
"""Style -> parameter of its escape sequence (ECMA-48, SGR)."""

_ESCAPE = re.compile(r"\x1b\[[\d;]*m")

_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|[num]?s|min|[mhdkBMGTE%])(?![\w]))")
"""Space between a number and its unit."""

_chosen = {"color": "auto"}
_verbosity = [0]


def take_flags(arguments: list[str]) -> list[str]:
    """Apply `-q`, `-v` and `--color WHEN`, and return the arguments without them.

    Arguments after `--` are kept. An unknown value of `--color` is kept, for the command to reject.
    """
    _chosen["color"], _verbosity[0] = "auto", 0
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if word == "--":
            return [*rest, word, *words]
        if word in ("-q", "--quiet", "-v", "--verbose"):
            _verbosity[0] = -1 if word in ("-q", "--quiet") else 1
        elif name == "--color":
            value = value if has_value else next(words, "")
            if value not in COLOR_CHOICES:
                rest.append(f"--color={value}")
                continue
            _chosen["color"] = value
        else:
            rest.append(word)
    return rest


def is_quiet() -> bool:
    """Return whether only results are shown (`-q`)."""
    return _verbosity[0] < 0


def is_verbose() -> bool:
    """Return whether all derived values are shown, with their reasons (`-v`)."""
    return _verbosity[0] > 0


def width(stream: TextIO | None = None) -> int:
    """Return the columns of a stream (default: standard output): COLUMNS, else its terminal's."""
    stream = stream or sys.stdout
    typed = os.environ.get("COLUMNS", "")
    if typed.isdecimal() and int(typed):
        return int(typed)
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError, AttributeError):  # a pipe, a closed stream, a test's stream
        return DEFAULT_WIDTH


def has_color(stream: TextIO | None = None) -> bool:
    """Return whether a stream shows colours (https://no-color.org)."""
    if _chosen["color"] != "auto":
        return _chosen["color"] == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return (stream or sys.stdout).isatty()
    except ValueError:  # a closed stream
        return False


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """Add a style to text: "red", or several as "bold red". Without colours, return the text."""
    if not text or not has_color(stream):
        return text
    codes = ";".join(str(_STYLES[name]) for name in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m"


def plain(text: str) -> str:
    """Remove colours."""
    return _ESCAPE.sub("", text)


def wrap(text: str, columns: int, first: str = "", other: str | None = None) -> list[str]:
    """Wrap a paragraph between words. `first` and `other` precede the first and other lines.

    A number stays with its unit. A word that is longer than the line stands alone, unbroken.
    """
    margin = " " * len(plain(first))
    wrapper = textwrap.TextWrapper(
        columns, initial_indent=margin, subsequent_indent=margin if other is None else other,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    # Not a no-break space, which would remain in a copied text.
    lines = [line.replace("\0", " ") for line in wrapper.wrap(_UNIT.sub("\0", text))]
    return [first + lines[0][len(margin) :], *lines[1:]] if lines else [first.rstrip()]


def wrap_log(lines: Iterable[str], columns: int) -> list[str]:
    """Wrap the lines of a log that are too long, below their own indentation."""
    shown = list[str]()
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        shown += [line] if len(line) <= columns else wrap(line, columns, other=f"{indent}  ")
    return shown


def fields(
    rows: Iterable[tuple[str, str]], columns: int, indent: int = 0, at: int = 0
) -> list[str]:
    """Return names with their wrapped texts in column `at`, two after the longest name by default.

    A text is below a longer name, or if its longest word does not fit. It may have no name.
    """
    rows, lines = list(rows), list[str]()
    at = at or indent + 2 + max((len(plain(name)) for name, _ in rows), default=0)
    for name, text in rows:
        first = " " * indent + name
        fits = at + max(_NARROWEST, *map(len, ["", *text.split()])) <= columns
        below = " " * (at if fits else indent + 2)
        if text and fits and len(plain(first)) + 2 <= at:
            lines += wrap(text, columns, first + " " * (at - len(plain(first))), below)
        else:
            lines += [first.rstrip(), *(wrap(text, columns, below) if text else [])]
    return lines


def table_width(stream: TextIO | None = None) -> int:
    """Return the columns of tables: `width`, but in a pipe rows are as long as they need."""
    stream = stream or sys.stdout
    try:
        is_terminal = stream.isatty()
    except ValueError:
        is_terminal = False
    return width(stream) if is_terminal or "COLUMNS" in os.environ else 10_000
