"""Files: the old content or the new, never half of it."""

import errno
import json
import math
import os
import stat
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import environment

from eke.common.files import (
    append_line,
    json_safe,
    read_json,
    terminate_last_line,
    who_has_open,
    write_atomic,
    write_json,
)


def test_text_and_bytes_are_written(tmp_path) -> None:
    write_atomic(tmp_path / "a", "ä\n")
    assert (tmp_path / "a").read_bytes() == "ä\n".encode()
    write_atomic(tmp_path / "a", b"\x00\xff")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["a"], "no temporary is left"


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("before", [b"old", None], ids=["over a file", "new"])
def test_full_disk_keeps_the_old_file(call, before, tmp_path, monkeypatch) -> None:
    path = tmp_path / "a"
    if before is not None:
        path.write_bytes(before)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(path, "new")
    assert caught.value.filename == str(path)
    assert (path.read_bytes() if path.exists() else None) == before
    assert len(os.listdir(tmp_path)) == (before is not None), "a temporary is left"


def test_content_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch) -> None:
    """A power cut leaves the old file or the new one: file, rename and folder in this order."""
    done = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def renamed(*args, **kwargs):
        done.append("rename")
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_atomic(tmp_path / "a", "new")
    assert done == ["file", "rename", "folder"]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from eke.common.files import append_line
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    append_line(Path(sys.argv[1]), "x" * 1000)
except OSError as error:
    print(type(error).__name__, error.errno, error.filename)
"""


def test_partial_append_is_an_error(tmp_path) -> None:
    """The system takes a part of the line without an error; only the rest shows it."""
    path, command = tmp_path / "a", [sys.executable, "-c", LIMITED, str(tmp_path / "a")]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, check=True)
    assert done.stdout.decode() == f"OSError {errno.EFBIG} {path}\n"
    assert path.read_text() == "x" * 100


def test_append_is_a_single_write(tmp_path, monkeypatch) -> None:
    written = []
    true_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(data) or true_write(fd, data))
    append_line(tmp_path / "a", "one\ntwo")
    append_line(tmp_path / "a", "ü" * 100_000)
    assert written == [b"one\ntwo\n", "ü".encode() * 100_000 + b"\n"]
    assert (tmp_path / "a").read_bytes() == b"".join(written)


def test_two_processes_append_complete_lines(tmp_path) -> None:
    code = (
        "import sys; from pathlib import Path; from eke.common.files import append_line\n"
        "for _ in range(50): append_line(Path(sys.argv[1]), sys.argv[2] * 3000)"
    )
    path = tmp_path / "a"
    writers = [
        subprocess.Popen([sys.executable, "-c", code, path, c], env=environment(tmp_path))
        for c in "ab"
    ]
    assert [w.wait() for w in writers] == [0, 0]
    assert sorted(path.read_text().split()) == ["a" * 3000] * 50 + ["b" * 3000] * 50


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(deadline=None)
@given(values)
def test_plain_values_are_strict_json(value) -> None:
    def unspeakable(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = json.dumps(json_safe(value), allow_nan=False)
    assert json_safe(json.loads(text, parse_constant=unspeakable)) == json_safe(value)


def test_non_finite_numbers_are_written_as_strings(tmp_path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": [math.nan, (math.inf, -math.inf)], 1: 0.5})
    assert read_json(path) == {"a": ["nan", ["inf", "-inf"]], "1": 0.5}


def test_invalid_json_is_an_error(tmp_path) -> None:
    (tmp_path / "a").write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        read_json(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "b")


def test_processes_with_an_open_file_are_found(tmp_path) -> None:
    path = tmp_path / "lock"
    path.write_text("")
    assert who_has_open(path) == {}
    with open(path), open(tmp_path / "other", "w"):
        assert who_has_open(path) == {os.getpid(): str(os.getpid())}
    with pytest.raises(FileNotFoundError):
        who_has_open(tmp_path / "nothing")


def test_processes_in_another_pid_namespace_are_found(tmp_path) -> None:
    path = tmp_path / "lock"
    path.write_text("")
    script = f"exec 3< {path}; echo ready; read end"
    command = ["unshare", "-pf", "--kill-child", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if process.stdout.readline() != b"ready\n":
            pytest.skip("unshare -p needs root")
        ((number, own),) = who_has_open(path).items()
        assert (number > 1, own) == (True, "1")
        process.kill()


@pytest.mark.parametrize(("left", "sealed"), [("", ""), ("{}\n", "{}\n"), ("{", "{\n")])
def test_only_torn_lines_are_terminated(left, sealed, tmp_path) -> None:
    """A disk that was full before the first row leaves an empty file."""
    (tmp_path / "rows").write_text(left)
    terminate_last_line(tmp_path / "rows")
    assert (tmp_path / "rows").read_text() == sealed


def test_text_with_surrogate_escapes_is_written(tmp_path) -> None:
    write_atomic(tmp_path / "a", f"in {os.fsdecode(b'odd-%s' % bytes([255]))}")
    assert (tmp_path / "a").read_text() == "in odd-\\udcff"
