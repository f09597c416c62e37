"""Reads W&B's transaction log, `run-<id>.wandb`: what an offline run left, torn tails included.

The file is a LevelDB log (blocks of 32 KiB, records cut into frames) of protobuf messages, with two
differences: a header of 7 bytes, and plain CRC-32 where LevelDB has CRC-32C. Reference: leveldb's
doc/log_format.md; seen with wandb 0.31.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER_BYTES, BLOCK_BYTES = 7, 32 * 1024
MAGIC, VERSION = b":W&B", 0xBEE1
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class WandbFile:
    """What could be read of one file."""

    run_id: str = ""
    group: str = ""
    resumed: bool = False
    """Written by a later attempt, which the server is asked to append."""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    step_metric: str = ""
    """The metric that is every chart's x axis."""
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    """None for a run that was killed."""
    safe_length: int = 0
    """Bytes up to the end of the last complete record; `wandb sync` refuses what lies behind."""
    length: int = 0
    """Bytes of the file."""

    @property
    def is_torn(self) -> bool:
        """Whether the file ends inside a record."""
        return self.safe_length < self.length


def read_wandb_file(path: str | Path) -> WandbFile:
    """Everything up to the first torn or damaged record.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no file of W&B's.
    """
    data = Path(path).read_bytes()
    result = WandbFile(length=len(data), safe_length=min(len(data), HEADER_BYTES))
    for end, record in _records(data):
        result.safe_length = end
        _add(result, record)
    return result


def count_rows(path: str | Path) -> int:
    """Rows of history in the file; raises as `read_wandb_file` does."""
    records = _records(Path(path).read_bytes())
    return sum(record.HasField("history") for _, record in records)


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


def _records(data: bytes) -> Iterator[tuple[int, Any]]:
    """(end offset, protobuf message) of every complete record."""
    # wandb 0.31 ships this generated module without type stubs.
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # wandb 0.31

    if struct.unpack("<4sH", data[:6].ljust(6, b"\0")) != (MAGIC, VERSION):
        raise ValueError("not a .wandb file: it does not begin with W&B's header")
    for end, content in _frames(data):
        yield end, Record.FromString(content)


def _add(result: WandbFile, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        result.run_id, result.group = record.run.run_id, record.run.run_group
        result.tags = list(record.run.tags)
        result.resumed = result.resumed or record.run.resume
        _update(result.config, record.run.config.update)
    elif kind == "config":
        _update(result.config, record.config.update)
    elif kind == "history":
        row: dict[str, Any] = {}
        _update(row, record.history.item)
        result.rows.append(row)
    elif kind == "summary":
        _update(result.summary, record.summary.update)
    elif kind == "metric" and record.metric.glob_name == "*":
        result.step_metric = record.metric.step_metric
    elif kind == "exit":
        result.exit_code = record.exit.exit_code


def _update(tree: dict[str, Any], items: Iterable[Any]) -> None:
    """Set items, each under its key or its path of keys."""
    for item in items:
        *parents, name = list(item.nested_key) or [item.key]
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = json.loads(item.value_json)
