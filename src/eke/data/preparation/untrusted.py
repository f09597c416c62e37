"""Files of others: the only loader of their tokenizers, configurations and models, and limits.

None of their code runs, except chat templates in jinja's sandbox, which sets no limits.
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
    """Raise LoadError for whatever a library raises about the files of `source`."""
    # Libraries that ask a question on standard input read its end.
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


@cache
def _used_memory(process: int) -> int:
    """Bytes of this process that RLIMIT_DATA limits; OSError where there is no /proc."""
    with open(f"/proc/{process}/statm", "rb", buffering=0) as file:
        return int(file.read(99).split()[5]) * resource.getpagesize()


@contextmanager
def limited_memory(more: int = 2 * GIB, fresh: bool = True) -> Iterator[None]:
    """Limit the bytes that a body adds to this process, except mapped files, by MemoryError."""
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
    """One rendering: the kernel ends the process after RENDER_S; MemoryError above 1 GiB more."""
    for last in (False, True):
        # No handler: a single call of C code, as of a large power, would never get to it.
        signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_S)
        try:
            # Reading what is used takes a tenth of a rendering: again where that was too little.
            with limited_memory(GIB, fresh=last):
                return render()
        except MemoryError:
            if last:
                raise
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def render_apart(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> str:
    """Render a conversation in a process that limits may end: ValueError, or the template's."""
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
        raise ValueError(f"makes a text of {len(text)} characters")
    return str(text)
