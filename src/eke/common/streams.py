"""Standard output and error of every process of eke: nothing that happens to them ends it.

A reader may leave (`| head`), a disk fill up, the shell have closed a stream (`>&-`), and the
terminal's encoding may lack a sign. Entry points call `open_streams` before anything else.

Names, logs and records of other users reach the terminal without control characters: an escape
sequence could move the cursor, write into the clipboard or show another text than there is.

Lines for whoever started a command, who may no longer be there (see `eke.common.streams`).
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

from eke.common.errors import ConfigError, EkeError
from eke.common.masking import mask

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


GONE = (errno.EPIPE, errno.EIO)
"""Nobody reads the pipe any more (`| head`); the terminal was closed."""


COLOURS = re.compile(r"(\x1b\[[\d;]*m)")
"""Escape sequences that change nothing but how characters look (ECMA-48, SGR)."""

CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Control characters but tab and end of line, and those that turn the direction of text."""


def printable(text: str, colours: bool = True) -> str:
    """A text that can be shown: control characters become U+FFFD.

    Args:
        text: any.
        colours: keep the escape sequences of colours.
    """
    parts = COLOURS.split(text) if colours else [text]
    parts[::2] = [CONTROL.sub("\N{REPLACEMENT CHARACTER}", part) for part in parts[::2]]
    return "".join(parts)


class _Printable(io.TextIOWrapper):
    """A terminal, or what a command's output is sent to."""

    def write(self, text: str) -> int:
        return super().write(printable(text))


class _Unfiltered:
    """A stream of `_Printable` for code that moves the cursor itself."""

    def __init__(self, stream: _Printable) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def unfiltered(stream: TextIO) -> TextIO:
    """The stream for bars and tables that are redrawn, whose texts have been made `printable`."""
    return cast(TextIO, _Unfiltered(stream)) if isinstance(stream, _Printable) else stream


class _Output(io.FileIO):
    """A descriptor that takes everything; what could not be written is lost, once with a word."""

    error: OSError | None = None
    """The first."""

    def write(self, data: "ReadableBuffer") -> int:
        size = memoryview(data).nbytes
        try:
            # None: the pipe is full, and somebody has made it one that does not block.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
            return written
        except OSError as error:
            before, self.error = self.error, self.error or error
            if error.errno in GONE:  # then for native code and for children, too
                with contextlib.suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self.fileno())
                    os.close(nowhere)
            elif before is None and self.fileno() == 1 and sys.stderr:
                sys.stderr.write(f"standard output: {error.strerror}; the rest of it is lost\n")
            return size


def open_streams(encoding: str | None = None) -> None:
    """Replace a closed stream by nowhere, and errors of the others by `lost` and `is_heard`.

    A sign that an encoding lacks is written by its number, as Python does. Streams that a test or a
    notebook has put in place stay as they are.

    Args:
        encoding: of a process whose output is a file of eke's; None keeps the terminal's.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:  # the lowest number that is free is this one
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
    """Start again in Python's UTF-8 mode where a locale reads files and their names otherwise.

    Standard streams keep the locale's encoding. Python does so by itself for `LC_ALL=C`.
    """
    if sys.flags.utf8_mode or locale.getpreferredencoding(False).lower() in ("utf-8", "utf8"):
        return
    shown = next((s.encoding for s in (sys.stdout, sys.stderr) if s), "ascii")
    mode = {"PYTHONUTF8": "1", "PYTHONIOENCODING": shown}
    command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **mode})


def lost() -> bool:
    """Whether a part of standard output could not be written, though somebody may read it."""
    sys.stdout.flush()
    error = _error()
    return error is not None and error.errno not in GONE


def is_heard() -> bool:
    """Whether standard output still has a reader, as far as a write has shown."""
    error = _error()
    return error is None or error.errno not in GONE


def _error() -> OSError | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, _Output) else None


def speak_problems(error: EkeError) -> None:
    """Print the problems of an invalid configuration to standard output, as JSON for programs."""
    if isinstance(error, ConfigError):
        content = {"problems": [problem.as_json() for problem in error.problems]}
        speak(mask(json.dumps(content, indent=2)))


def speak(text: str, to: TextIO | None = None) -> None:
    """Print a line at once.

    Args:
        text: without its end of line.
        to: standard output, or standard error.
    """
    stream = to or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()
