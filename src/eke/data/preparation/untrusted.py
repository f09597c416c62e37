"""The only loader of tokenizers, configurations and models of others; none of their code runs."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eke.common.errors import EkeError
from eke.common.text import first_line


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
