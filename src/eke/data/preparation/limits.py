"""Limits for files of others: memory while they are read, processor time of a chat template."""

import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from eke.common.text import GIB, first_line

RENDER_S = 5.0
"""Processor time of one rendering, s; a usual one takes less than 1 ms."""

RENDER_CHARACTERS = 1 << 24
"""Length of a rendered text: as many as a row has bytes (`data.max_row_bytes`)."""


class TemplateLimitError(ValueError):
    """A rendering was stopped; the message says which limit it reached."""

    def __init__(self, limit: str = f"{RENDER_S:g} s of processor time") -> None:
        super().__init__(f"rendering one conversation takes more than {limit}")


@contextmanager
def limited_memory(more: int = 2 * GIB) -> Iterator[None]:
    """A body that may add so many bytes to this process, mapped files apart; else MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            used = int(file.read(99).split()[5]) * resource.getpagesize()
    except OSError:  # not Linux
        used = resource.RLIM_INFINITY
    try:
        if before[0] == resource.RLIM_INFINITY != used:
            resource.setrlimit(resource.RLIMIT_DATA, (used + more, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Raise TemplateLimitError from a rendering that takes too long or too much memory."""
    has_signals = threading.current_thread() is threading.main_thread()
    try:
        with limited_memory(GIB):
            if has_signals:
                signal.signal(signal.SIGPROF, _stop)
                # Repeated: an exception inside of a destructor is lost.
                signal.setitimer(signal.ITIMER_PROF, RENDER_S, RENDER_S)
                # Ends the process: a single call of C code answers no other signal.
                signal.setitimer(signal.ITIMER_VIRTUAL, 2 * RENDER_S)
            yield
    except MemoryError as error:
        raise TemplateLimitError("1 GiB of memory") from error
    finally:
        if has_signals:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _stop(*_: int | FrameType | None) -> NoReturn:
    raise TemplateLimitError


def render_apart(render: Callable[[], Any]) -> str:
    """The text of one rendering, made in a forked process: only that ends, whatever happens.

    ValueError: what the template says, or the limit that it reached.
    """
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        _answer(render, theirs)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    if not content:  # ended by the timer
        raise TemplateLimitError
    text, error = json.loads(content)
    if error or len(text) > RENDER_CHARACTERS:
        raise ValueError(error or f"makes a text of {len(text)} characters")
    return str(text)


def _answer(render: Callable[[], Any], to: int) -> NoReturn:
    """Write the text and the error of a rendering, and end the process."""
    try:
        with limited_rendering():
            found = json.dumps([render(), ""])
    except BaseException as error:
        found = json.dumps(["", first_line(error)[:200]])
    try:
        with open(to, "w", encoding="ascii") as pipe:
            pipe.write(found)
    finally:
        os._exit(0)
