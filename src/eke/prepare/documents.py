"""Documents into a store: one stream of tokens per class and split, an end after each document."""

from collections.abc import Iterator
from typing import Any

from eke.corpus import Request, Stream
from eke.errors import ConfigError, Problem
from eke.prepare.tokenizers import Tokenizer
from eke.prepare.writer import Writer

CHUNK_BYTES = 1 << 20
"""Read and tokenized at a time, up to the next end of a line."""

REPLACEMENT = "\ufffd"
"""What Unicode puts in place of bytes that are no UTF-8."""


def fill_documents(request: Request, tokenizer: Tokenizer, writer: Writer) -> dict[str, Any]:
    """Tokenize every document; returns what the manifest says beside the arrays.

    Raises:
        ConfigError: a file cannot be read.
    """
    end = tokenizer.vocabulary.eos if tokenizer.vocabulary.eos is not None else (
        tokenizer.vocabulary.bos
    )  # fmt: skip
    separator = [] if end is None else [end]
    streams, replaced = [], 0
    writer.append("tokens", [])
    for evaluation in (False, True):
        for number, label in enumerate(request.labels):
            start = writer.counts["tokens"]
            for piece in request.pieces:
                if piece[3] == label and piece[4] is evaluation:
                    for text, wrong in _texts(*piece[:3]):
                        replaced += wrong
                        writer.append("tokens", tokenizer.encode([text])[0])
                    writer.append("tokens", separator)
            size = writer.counts["tokens"] - start
            streams.append(Stream(evaluation, number, start, size))
    writer.note(repr(streams))
    return {"num_rows": len(request.pieces), "num_replaced": replaced, "streams": tuple(streams)}


def _texts(path: str, start: int, size: int) -> Iterator[tuple[str, int]]:
    """A document in chunks of whole lines, and how many characters had to be replaced.

    A piece of a file may begin and end inside a character: that one belongs to the piece before.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start)
            left = size
            first = True
            while left > 0:
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    return
                left -= len(chunk)
                line = file.readline(min(left, CHUNK_BYTES)) if left > 0 else b""
                left -= len(line)
                # Nor may a chunk end inside a character.
                tail = _continuation(file)
                left -= len(tail)
                data = chunk + line + tail
                if first and start > 0:
                    data = data.lstrip(_CONTINUATION) if data[:1] in _SINGLES else data
                first = False
                text = data.decode(errors="replace")
                before = data.count(REPLACEMENT.encode())
                yield text, text.count(REPLACEMENT) - before
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        fix = "data.path=FILE_OR_FOLDER"
        raise ConfigError(Problem("data.path", path, why, fix)) from error


_CONTINUATION = bytes(range(0x80, 0xC0))
"""Second and later bytes of a character in UTF-8."""

_SINGLES = {bytes([value]) for value in _CONTINUATION}


def _continuation(file: Any) -> bytes:
    """The rest of a character that was cut, at most three bytes."""
    found = b""
    while len(found) < 3:
        byte = file.read(1)
        if byte not in _SINGLES:
            file.seek(-len(byte), 1)
            break
        found += byte
    return found
