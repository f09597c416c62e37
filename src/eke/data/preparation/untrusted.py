"""Loader of untrusted tokenizers, configurations and models, and limits of their use.

Code in these files is not executed, except chat templates. Jinja's sandbox does not limit their
time and memory.
"""

import io
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from eke.common.errors import EkeError
from eke.common.text import GIB, first_line

RENDER_S = 5.0
"""Limit of processor time per rendering, s. Most renderings take less than 1 ms."""

RENDER_CHARACTERS = 1 << 24
"""Limit of a rendered text in characters, equal to the default of `data.max_row_bytes`."""


class LoadError(EkeError):
    """Files that a library cannot use. The library's exception is the cause."""

    id = "unreadable"
    exit_code = 2

    def __init__(self, source: object, error: BaseException) -> None:
        self.why = first_line(error).rstrip(".:")[:300]
        """Reason of the library in one line."""
        if "trust_remote_code" in str(error):
            self.why = "needs Python code from its own folder (auto_map), which eke does not run"
        super().__init__(f"{source}: cannot be used: {self.why}")


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Raise LoadError for every exception of a library that reads the files of `source`."""
    # An empty standard input ends questions of libraries.
    given, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    except EkeError:
        raise
    except BaseException as error:
        # Panics of Rust (safetensors, tokenizers) are no subclass of Exception.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise LoadError(source, error) from error
    finally:
        sys.stdin = given


def load(kind: Any, source: object, **options: Any) -> Any:
    """Return `kind.from_pretrained(source)`, for classes of transformers and PEFT."""
    with reading(source):
        # By default transformers 5.23 asks on the terminal whether to run a checkpoint's code.
        return kind.from_pretrained(source, trust_remote_code=False, **options)


@cache
def _used_memory(process: int) -> int:
    """Return the bytes of a process that RLIMIT_DATA limits; OSError without /proc."""
    with open(f"/proc/{process}/statm", "rb", buffering=0) as file:
        return int(file.read(99).split()[5]) * resource.getpagesize()


@contextmanager
def limited_memory(more: int = 2 * GIB, fresh: bool = True) -> Iterator[None]:
    """Raise MemoryError if the body adds more than `more` bytes to this process (RLIMIT_DATA)."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        if before[0] == resource.RLIM_INFINITY:
            if fresh:
                _used_memory.cache_clear()
            with suppress(OSError):
                most = _used_memory(os.getpid()) + more
                resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def limited(render: Callable[[], Any]) -> Any:
    """Render with limits: the kernel ends the process after RENDER_S; MemoryError above 1 GiB."""
    for last in (False, True):
        # There is no handler: one long call of C code (a large power) would not let it run.
        signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_S)
        try:
            # Reading the used memory takes a tenth of a rendering, so it is reread only on failure.
            with limited_memory(GIB, fresh=last):
                return render()
        except MemoryError:
            if last:
                raise
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def render_apart(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> str:
    """Render a conversation in a limited child process; ValueError if it exceeds a limit."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {"chat_template": tokenizer.get_chat_template(), **tokenizer.special_tokens_map}
    render = partial(render_jinja_template, [messages], add_generation_prompt=True, **given)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            (text,), _ = pool.submit(limited, render).result()
        except BrokenProcessPool:
            raise ValueError(f"takes more than {RENDER_S:g} s of processor time") from None
        except MemoryError:
            raise ValueError("takes more than 1 GiB of memory") from None
    if len(text) > RENDER_CHARACTERS:
        raise ValueError(f"makes a text of {len(text)} characters, limit {RENDER_CHARACTERS}")
    return str(text)
