"""Limits for chat templates, which are programs of others: of each rendering, not of all rows."""

import json
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import FrameType

from eke.common.text import GIB, first_line

RENDER_S = 5.0
"""Processor time of one rendering, s; a usual one takes less than 1 ms."""

RENDER_BYTES = GIB
"""Memory that one rendering may add; a row has 16 MiB (`data.max_row_bytes`)."""

RENDER_CHARACTERS = 1 << 24
"""Length of a rendered text: as many as the bytes of such a row."""

HARD_SIGNAL = signal.SIGVTALRM
"""Ends the process at twice the time: a single call of C code answers no other signal."""

FRESH_S = 0.05
"""For how long the size of the process is taken as known, s: to read it takes 6 us, and filling the
limit's memory would take longer than this."""


class TemplateLimitError(ValueError):
    """A rendering was stopped; the message says which limit it reached."""

    def __init__(self, limit: str = f"{RENDER_S:g} s of processor time") -> None:
        super().__init__(f"rendering one conversation takes more than {limit}")


def _stop(*_: int | FrameType | None) -> None:
    raise TemplateLimitError


@cache
def _handle_signal() -> bool:
    """Whether this thread can be stopped: signals reach the main one alone."""
    if threading.current_thread() is not threading.main_thread():
        return False
    signal.signal(signal.SIGPROF, _stop)
    return True


@lru_cache(maxsize=1)
def _process_bytes(moment: int) -> int | None:
    """Address space of this process at a `moment`; None if unknown."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # not Linux
        return None
    with open(statm, "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@contextmanager
def limits() -> Iterator[None]:
    """Raise TemplateLimitError from a body that takes too long or too much memory."""
    if not _handle_signal():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        # Timers repeat: an exception inside of a destructor is lost.
        signal.setitimer(signal.ITIMER_PROF, RENDER_S, RENDER_S)
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * RENDER_S)  # its signal ends the process
        used = _process_bytes(int(time.monotonic() / FRESH_S))
        if used is not None and before[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (used + RENDER_BYTES, before[1]))
        yield
    except MemoryError as error:
        raise TemplateLimitError(f"{RENDER_BYTES >> 30} GiB of memory") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def render_apart(render: Callable[[], str]) -> str:
    """The text of one rendering, made in a forked process: only that ends, whatever happens.

    TemplateLimitError, or ValueError with what the template says.
    """
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads, whose locks a template does not take.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(ours)
        _answer(render, theirs)
    os.close(theirs)
    with open(ours, "rb") as answer:
        content = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -HARD_SIGNAL:
        raise TemplateLimitError
    if code or not content:
        raise ValueError(f"the process that renders the chat template ended with code {code}")
    text, error = json.loads(content)
    if error:
        raise ValueError(error)
    return str(text)


def _answer(render: Callable[[], str], to: int) -> None:
    """Write the text and the error of a rendering, and end the process."""
    found: tuple[str, str]
    try:
        with limits():
            found = render(), ""
        if len(found[0]) > RENDER_CHARACTERS:
            found = "", f"makes a text of {len(found[0])} characters"
    except BaseException as error:
        found = "", first_line(error)[:200]
    try:
        with open(to, "w", encoding="ascii") as file:
            json.dump(found, file)
    finally:
        os._exit(0)
