"""Standard output and error that do not end the process if writing fails.

A reader may exit (`| head`), a disk may fill up, the shell may close a stream (`>&-`), or the
terminal's encoding may lack a character. Entry points call `open_streams` first. Control characters
of other users' texts are replaced: they could move the cursor or write to the clipboard.
"""

import contextlib
import errno
import io
import json
import locale
import os
import re
import select
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

from eke.common.errors import ConfigError, EkeError, Problem
from eke.common.masking import mask

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_CLOSED_PIPE_ERRNOS = (errno.EPIPE, errno.EIO)
"""Errors of a pipe without a reader (`| head`) and of a closed terminal."""

_COLOURS = re.compile(r"(\x1b\[[\d;]*m)")
"""Escape sequences that only style characters (ECMA-48, SGR)."""

CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Control characters except tab and newline, and those that change the text direction."""


def printable(text: str, colours: bool = True) -> str:
    """Replace control characters by U+FFFD. `colours` keeps the escape sequences of colours."""
    parts = _COLOURS.split(text) if colours else [text]
    parts[::2] = [CONTROL.sub("\N{REPLACEMENT CHARACTER}", part) for part in parts[::2]]
    return "".join(parts)


_MARKUP = re.compile(r"[\\`*\[\]|$~]|^[#+=-]+(?= |$)|(?<!\w)_+|_+(?!\w)")
"""Pattern of characters with a meaning in Markdown. `$` begins a formula."""


def escape(text: str) -> str:
    """Escape text for Markdown and HTML, on one line."""
    flat = " ".join(printable_line(text).split())
    flat = _MARKUP.sub(lambda signs: "".join(f"\\{sign}" for sign in signs[0]), flat)
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def printable_line(text: str) -> str:
    """Replace surrogates and control characters, which servers reject."""
    whole = text.encode(errors="replace").decode()
    return "".join(sign if sign.isprintable() else " " for sign in whole)


class _Printable(io.TextIOWrapper):
    """Terminal or redirected output with control characters replaced."""

    def write(self, text: str) -> int:
        return super().write(printable(text))


class _Unfiltered:
    """Raw stream of `_Printable` for code that moves the cursor."""

    def __init__(self, stream: _Printable) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the raw stream for redrawn bars and tables, whose texts are already `printable`."""
    return cast(TextIO, _Unfiltered(stream)) if isinstance(stream, _Printable) else stream


class _Output(io.FileIO):
    """Descriptor that accepts each write and reports lost output once."""

    error: OSError | None = None

    def write(self, data: "ReadableBuffer") -> int:
        size = memoryview(data).nbytes
        try:
            # None: the pipe is full, and another process made it non-blocking.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
            return written
        except OSError as error:
            before, self.error = self.error, self.error or error
            if error.errno in _CLOSED_PIPE_ERRNOS:  # also for native code and children
                with contextlib.suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self.fileno())
                    os.close(nowhere)
            elif before is None and self.fileno() == 1 and sys.stderr:
                sys.stderr.write(f"standard output: {error.strerror}. The rest is lost\n")
            return size


def open_streams(encoding: str | None = None) -> None:
    """Replace closed streams by the null device, and record write errors.

    Streams replaced by a test or a notebook are kept. `encoding` is for writing to a file of eke.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:  # opens this descriptor, the lowest free one
            os.set_inheritable(os.open(os.devnull, mode), True)
    for number, name in [(1, "stdout"), (2, "stderr")]:
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
        raw = _Output(number, "wb", closefd=False)
        shown = encoding or (stream.encoding if stream else "utf-8")
        now = number == 2 or raw.isatty() or getattr(stream, "write_through", False)  # python -u
        kind = io.TextIOWrapper if encoding else _Printable
        text = kind(io.BufferedWriter(raw), shown, "backslashreplace", line_buffering=now)
        setattr(sys, name, text)


def use_utf8() -> None:
    """Restart in UTF-8 mode, except for standard streams, if the locale has another encoding."""
    if sys.flags.utf8_mode or locale.getpreferredencoding(False).lower() in ("utf-8", "utf8"):
        return
    shown = next((s.encoding for s in (sys.stdout, sys.stderr) if s), "ascii")
    mode = {"PYTHONUTF8": "1", "PYTHONIOENCODING": shown}
    command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **mode})


def output_was_lost() -> bool:
    """Return whether standard output was lost although it may have a reader."""
    sys.stdout.flush()
    return _errno() is not None and has_reader()


def has_reader() -> bool:
    """Return whether standard output still has a reader, judged by past writes."""
    return _errno() not in _CLOSED_PIPE_ERRNOS


def _errno() -> int | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error.errno if isinstance(raw, _Output) and raw.error else None


def print_problems_json(error: EkeError) -> None:
    """Print the problems of an error as JSON to standard output."""
    one = [Problem("", "", str(error), id=error.id)]
    problems = error.problems if isinstance(error, ConfigError) else one
    content = {"problems": [problem.as_json() for problem in problems]}
    write_line(mask(json.dumps(content, indent=2)))


def write_line(text: str, to: TextIO | None = None) -> None:
    """Print a line to standard output, or to another stream, and flush."""
    stream = to or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()
