"""Documents into a store: one stream of tokens per class and split."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from eke.common.errors import ConfigError, Problem
from eke.data.preparation.tokenizers import Encoded, Ends, Tokenizer, ends_of
from eke.data.preparation.writer import Writer
from eke.data.sources import Request, Stream

CHUNK_BYTES = 1 << 20
"""Read and tokenized at a time, up to the next end of a line."""

OVERLAPS = (1 << 12, 1 << 17)
"""Characters of the chunk before that are tokenized again; the second where the first have no place
at which both agree."""

RUN = 8
"""So many tokens on both sides of a place are the same there."""

REPLACEMENT = "\ufffd"
"""What Unicode puts in place of bytes that are no UTF-8."""


def fill_documents(request: Request, tokenizer: Tokenizer, writer: Writer) -> dict[str, Any]:
    """Tokenize every document; returns what the manifest says beside the arrays.

    Raises:
        ConfigError: a file cannot be read.
    """
    vocabulary = tokenizer.vocabulary
    # Other tasks put every window into a frame of its own.
    is_causal = request.task == "causal_lm"
    beginning = vocabulary.frame.prefix if is_causal else ()
    end = () if vocabulary.eos is None or not is_causal else (vocabulary.eos,)
    streams, replaced = [], 0
    ends: Ends = ((), ())
    writer.append("tokens", [])

    def texts(piece: tuple[str, int, int, str, bool]) -> Iterator[str]:
        nonlocal replaced
        for text, wrong in _texts(*piece[:3]):
            replaced += wrong
            yield text

    for evaluation in (False, True):
        for number, label in enumerate(request.labels):
            start = writer.counts["tokens"]
            for piece in request.pieces:
                if piece[3] == label and piece[4] is evaluation:
                    first = writer.counts["tokens"]
                    writer.append("tokens", list(beginning))
                    for ids in encode_stream(tokenizer, texts(piece)):
                        writer.append("tokens", ids)
                    writer.append("tokens", list(end))
                    if not any(ends):
                        ends = ends_of(tokenizer, writer.read("tokens")[first:])
            size = writer.counts["tokens"] - start
            streams.append(Stream(evaluation, number, start, size))
    writer.note(repr(streams))
    return {
        "num_rows": len(request.pieces),
        "num_replaced": replaced,
        "streams": tuple(streams),
        "first_row": ends,
    }


def encode_stream(tokenizer: Tokenizer, chunks: Iterable[str]) -> Iterator[np.ndarray]:
    """Ids of a text that comes in chunks: those of the whole, in the memory of two chunks.

    Each chunk is tokenized behind the end of the one before, and the two are joined where they
    agree. Tokenizers that do not know where tokens end get the whole text at once.
    """
    text = "" if tokenizer.knows_ends else "".join(chunks)
    pending = tokenizer.encode([text])[0]
    for chunk in chunks:
        for overlap in OVERLAPS:
            kept = text[-overlap:]
            found = tokenizer.encode([kept + chunk])[0]
            place = _agreement(pending, found, len(text) - len(kept), len(kept))
            if place is not None:
                break
        else:  # no token of a hundred thousand characters ends where it should
            place, kept, found = (len(pending.ids), 0), "", tokenizer.encode([chunk])[0]
        yield pending.ids[: place[0]]
        assert found.ends is not None, "this tokenizer knows them"
        pending, text = Encoded(found.ids[place[1] :], found.ends[place[1] :]), kept + chunk
    yield pending.ids


def _agreement(before: Encoded, after: Encoded, shift: int, size: int) -> tuple[int, int] | None:
    """Tokens of each that lie before a place from which on both are the same.

    Args:
        before: ends in characters, of a text whose last `size` characters `after` begins with.
        after: of these and of what follows.
        shift: where `after` begins in the text of `before`.
        size: characters that both have.
    """
    assert before.ends is not None
    assert after.ends is not None
    ends = before.ends - shift
    common, mine, others = np.intersect1d(ends, after.ends, return_indices=True)
    for number in np.argsort(abs(common - size // 2)):
        if not 0 < common[number] < size:
            continue
        i, j = int(mine[number]), int(others[number])
        here, there = slice(i - RUN, i + RUN), slice(j - RUN, j + RUN)
        if min(i, j) < RUN or i + RUN > len(ends):
            continue
        same_ids = np.array_equal(before.ids[here], after.ids[there])
        if same_ids and np.array_equal(ends[here], after.ends[there]):
            return i, j
    return None


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
