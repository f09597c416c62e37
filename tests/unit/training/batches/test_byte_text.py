"""Text as tokens: in memory or read in place, the same."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.common.errors import ChangedError, RunError
from eke.common.text import BOS, NUM_SPECIAL_TOKENS
from eke.data.sources import FileRange
from eke.training.batches.sampler import OPEN_FILES, InPlace, byte_stream


def files(folder, *contents: bytes) -> tuple[FileRange, ...]:
    """One piece per content, with other bytes around it in its file."""
    pieces = []
    for number, content in enumerate(contents):
        path = folder / f"{number}.txt"
        path.write_bytes(b"before" + content + b"after")
        pieces.append(FileRange(path, 6, len(content)))
    return tuple(pieces)


def test_stream_separates_texts(tmp_path, monkeypatch) -> None:
    pieces = files(tmp_path, b"ab", b"", bytes([0, 255]))
    expected = [97 + 8, 98 + 8, BOS, BOS, 8, 263, BOS]
    assert NUM_SPECIAL_TOKENS == 8
    for in_memory in (0, 100):
        monkeypatch.setattr("eke.training.batches.sampler._IN_MEMORY_BYTES", in_memory)
        stream = byte_stream(pieces)
        assert isinstance(stream, InPlace) == (in_memory == 0)
        assert len(stream) == 7
        assert stream[0:7].tolist() == expected


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=9), min_size=1, max_size=6), st.data())
def test_every_slice_is_equal_in_memory_and_in_place(tmp_path_factory, contents, data) -> None:
    pieces = files(tmp_path_factory.mktemp("text"), *contents)
    kept, in_place = byte_stream(pieces), InPlace(pieces)
    start = data.draw(st.integers(0, len(kept)))
    stop = data.draw(st.integers(start, len(kept) + 3))
    assert len(in_place) == len(kept)
    found = in_place[start:stop]
    assert found.dtype == np.uint16
    assert found.tolist() == kept[start:stop].tolist()


def test_few_files_are_open_at_a_time(tmp_path) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    stream = InPlace(files(tmp_path, *[b"text"] * (3 * OPEN_FILES)))
    assert len(stream[0 : len(stream)]) == 15 * OPEN_FILES
    assert num_open() == before + OPEN_FILES
    del stream
    assert num_open() == before


def test_truncated_file_is_an_error(tmp_path) -> None:
    stream = InPlace(files(tmp_path, b"some text"))
    (tmp_path / "0.txt").write_bytes(b"short")
    with pytest.raises(RunError, match="shorter than when the run was planned"):
        stream[0:9]


@pytest.mark.slow
def test_large_text_is_not_held_in_memory(tmp_path) -> None:
    """Windows over 1.5 GB, a sparse file: most of it is holes, which take no disk either."""
    import resource

    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        file.truncate(1_500_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = byte_stream((FileRange(path, 0, 1_500_000_000),))
    for start in range(0, 1_500_000_000, 50_000_000):
        assert stream[start : start + 256].tolist() == [NUM_SPECIAL_TOKENS] * 256
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "KiB"


def watched(pieces) -> tuple[InPlace, list[str]]:
    """A stream, and what is written down at each check: the content of its first file."""
    seen: list[str] = []
    return InPlace(pieces, lambda: seen.append(pieces[0].path.read_text())), seen


def test_file_edited_in_place_is_checked_against_the_plan(tmp_path) -> None:
    path = tmp_path / "0.txt"
    stream, seen = watched(files(tmp_path, b"some text"))
    whole = stream[0:10].tolist()
    os.utime(path)
    assert stream[0:10].tolist() == whole
    assert seen == ["beforesome textafter"], "asked once: it was only touched"
    assert stream[0:10].tolist() == whole
    assert len(seen) == 1
    path.write_text("beforeOTHERTEXTafter")
    stream[0:3]
    assert seen[1:] == ["beforeOTHERTEXTafter"]


def test_replaced_file_is_read_from_its_open_handle(tmp_path) -> None:
    stream, seen = watched(files(tmp_path, b"some text"))
    whole = stream[0:10].tolist()
    (tmp_path / "new").write_text("beforeOTHERTEXTafter")
    os.replace(tmp_path / "new", tmp_path / "0.txt")
    assert stream[0:10].tolist() == whole
    assert not seen
    again = pickle.loads(pickle.dumps(InPlace(stream.pieces, stamps=stream.stamps)))
    (tmp_path / "0.txt").unlink()
    with pytest.raises(ChangedError, match=r"0\.txt: "):
        again[0:10]
