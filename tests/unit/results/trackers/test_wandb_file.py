"""The reader of W&B's files, on files made here frame by frame."""

import struct
import zlib
from pathlib import Path

import pytest
from wandb.proto.wandb_internal_pb2 import Record
from wandb_reader import read_wandb_file

from eke.results.trackers.wandb import count_rows

HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)


def make_history(step: int, padding: int = 0) -> bytes:
    record = Record()
    record.history.item.add(key="train/global_step", value_json=str(step))
    record.history.item.add(nested_key=["text"], value_json='"' + "x" * padding + '"')
    return bytes(record.SerializeToString())


def make_frames(contents: list[bytes]) -> bytes:
    """A LevelDB log: frames that never cross a block of 32 KiB."""
    data = HEADER
    for content in contents:
        kinds, left = [], content
        while left or not kinds:
            room = 32768 - len(data) % 32768
            if room < 7:
                data += b"\0" * room
                room = 32768
            body, left = left[: room - 7], left[room - 7 :]
            kinds.append(bool(left))
            kind = (2 if left else 1) if len(kinds) == 1 else (3 if left else 4)
            crc = zlib.crc32(bytes([kind]) + body)
            data += struct.pack("<IHB", crc, len(body), kind) + body
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run-x.wandb"


@pytest.mark.parametrize("padding", [0, 32761, 100_000], ids=str)
def test_records_of_any_length_are_read(path, padding):
    path.write_bytes(make_frames([make_history(step, padding) for step in range(50)]))
    read = read_wandb_file(path)
    assert [row["train/global_step"] for row in read.rows] == list(range(50))
    assert {len(row["text"]) for row in read.rows} == {padding}
    assert (read.safe_length, read.is_torn) == (path.stat().st_size, False)
    assert count_rows(path) == 50


@pytest.mark.parametrize("missing", [1, 7, 8, 29])
def test_torn_tail_loses_only_the_torn_record(path, missing):
    whole = make_frames([make_history(1), make_history(2)])
    tail = make_frames([make_history(1), make_history(2), make_history(3)])
    assert len(tail) - len(whole) > 30
    path.write_bytes(tail[:-missing])
    read = read_wandb_file(path)
    assert [row["train/global_step"] for row in read.rows] == [1, 2]
    assert (read.safe_length, read.is_torn) == (len(whole), True)
    path.write_bytes(path.read_bytes()[: read.safe_length])
    assert not read_wandb_file(path).is_torn


def test_damaged_record_ends_reading(path):
    first = len(make_frames([make_history(1)]))
    data = bytearray(make_frames([make_history(1), make_history(2), make_history(3)]))
    data[first + 10] ^= 1
    path.write_bytes(data)
    assert count_rows(path) == 1
    assert read_wandb_file(path).safe_length == first


def test_wandb_file_with_only_a_header_is_empty(path):
    path.write_bytes(HEADER)
    read = read_wandb_file(path)
    assert (read.rows, read.exit_code, read.is_torn) == ([], None, False)


@pytest.mark.parametrize("content", [b"", b":W&", b"PK\x03\x04 some other file"], ids=repr)
def test_other_file_format_is_rejected(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"not a \.wandb file"):
        read_wandb_file(path)
