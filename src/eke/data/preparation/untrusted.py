"""Files of others: the only loader of their tokenizers, configurations and models, and limits.

None of their code runs, but for chat templates in jinja's sandbox, which has no limits of its own.
"""

import io
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from eke.common.errors import EkeError
from eke.common.text import GIB, first_line

RENDER_S = 5.0
"""Processor time of one rendering, s; a usual one takes less than 1 ms."""

RENDER_CHARACTERS = 1 << 24
"""Length of a rendered text: as many as a row has bytes (`data.max_row_bytes`)."""


class LoadError(EkeError):
    """Files of others that a library cannot use; its exception is the cause."""

    exit_code = 2

    def __init__(self, source: object, error: BaseException) -> None:
        self.why = first_line(error).rstrip(".:")[:300]
        """The library's reason, in one line."""
        if "trust_remote_code" in str(error):
            self.why = "needs Python code from its own folder (auto_map), which eke never runs"
        super().__init__(f"{source}: cannot be used: {self.why}")


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Raise LoadError for whatever a library raises about the files of `source`.

    Libraries that ask a question on standard input read its end.
    """
    given, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    except EkeError:
        raise
    except BaseException as error:
        # A panic of Rust (safetensors, tokenizers) is no Exception; Ctrl-C is none either.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise LoadError(source, error) from error
    finally:
        sys.stdin = given


def load(kind: Any, source: object, **options: Any) -> Any:
    """`kind.from_pretrained(source)` of a class of transformers or PEFT; LoadError if unusable."""
    with reading(source):
        # Without the option, transformers 5.23 asks whether to run the code of a checkpoint.
        return kind.from_pretrained(source, trust_remote_code=False, **options)


class TemplateLimitError(ValueError):
    """A rendering reached this limit."""

    def __str__(self) -> str:
        limit = next(iter(self.args), f"{RENDER_S:g} s of processor time")
        return f"rendering one conversation takes more than {limit}"


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
        try:
            with limited_rendering():
                found = json.dumps([render(), ""])
        except BaseException as error:
            found = json.dumps(["", first_line(error)[:200]])
        try:
            with open(theirs, "w", encoding="ascii") as pipe:
                pipe.write(found)
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as answer:
        content = answer.read()
    os.waitpid(child, 0)
    if not content:  # ended by the timer
        raise TemplateLimitError
    text, why = json.loads(content)
    if why or len(text) > RENDER_CHARACTERS:
        raise ValueError(why or f"makes a text of {len(text)} characters")
    return str(text)
