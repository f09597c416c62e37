"""The rows in W&B's transaction log, `run-<id>.wandb`: what an offline run left, torn or not.

The file is a LevelDB log (blocks of 32 KiB, records cut into frames) of protobuf messages, with two
differences: a header of 7 bytes, and plain CRC-32 where LevelDB has CRC-32C. Reference: leveldb's
doc/log_format.md; seen with wandb 0.31.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES, BLOCK_BYTES = 7, 32 * 1024
MAGIC, VERSION = b":W&B", 0xBEE1
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def count_rows(path: str | Path) -> int:
    """Rows of history in the file, up to the first torn or damaged record.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no file of W&B's.
    """
    found = records(Path(path).read_bytes())
    return sum(record.HasField("history") for _, record in found)


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(end offset, content) of every complete record; stops at the first torn or damaged one."""
    at, parts = HEADER_BYTES, list[bytes]()
    while at + HEADER_BYTES <= len(data):
        room = BLOCK_BYTES - at % BLOCK_BYTES
        if room < HEADER_BYTES:  # a frame's header is never split: the rest of the block is padding
            at += room
            continue
        checksum, size, kind = struct.unpack_from("<IHB", data, at)
        start, at = at + HEADER_BYTES, at + HEADER_BYTES + size
        body = data[start:at]
        is_known = kind in (FULL, FIRST, MIDDLE, LAST) and len(body) == size
        if not is_known or zlib.crc32(body, zlib.crc32(bytes([kind]))) != checksum:
            return
        parts = [body] if kind in (FULL, FIRST) else [*parts, body]
        if kind in (FULL, LAST):
            yield at, b"".join(parts)


def records(data: bytes) -> Iterator[tuple[int, Any]]:
    """(end offset, protobuf message) of every complete record.

    Args:
        data: the whole file.

    Raises:
        ValueError: it is no file of W&B's.
    """
    # wandb 0.31 ships this generated module without type stubs.
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # wandb 0.31

    if struct.unpack("<4sH", data[:6].ljust(6, b"\0")) != (MAGIC, VERSION):
        raise ValueError("not a .wandb file: it does not begin with W&B's header")
    for end, content in _frames(data):
        yield end, Record.FromString(content)
