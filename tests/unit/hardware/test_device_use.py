"""Two runs at the same time on one device both learn of each other, whoever began."""

import os
import subprocess
import sys
from contextlib import closing

import pytest

from eke.hardware.device_use import DeviceUse, cpu_cores, lease_folder

FIRST, BOTH, SECOND = ({"a"}, {"a", "b"}, {"b"})


def use(run, devices, shared=None) -> closing[DeviceUse]:
    return closing(DeviceUse(run, frozenset(devices), shared))


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [(FIRST, FIRST, True), (FIRST, BOTH, True), (FIRST, SECOND, False)],
    ids=["one device", "overlap", "disjoint cores"],
)
def test_overlapping_runs_are_shared(first, second, meet) -> None:
    with use("one", first) as one:
        assert one.is_shared() is False
        with use("two", second) as two:
            assert bool(two.is_shared()) is meet
        assert one.is_shared() is meet, "also of the run that began alone, once the other has left"
    assert one.is_shared() is meet
    assert list(lease_folder().iterdir()) == []


def test_ranks_of_one_run_are_one_run() -> None:
    with use("one", FIRST) as one, use("one", FIRST) as other:
        assert (one.is_shared(), other.is_shared()) == (False, False)


def test_consecutive_runs_are_not_shared() -> None:
    for run in ("one", "two"):
        with use(run, FIRST) as alone:
            assert alone.is_shared() is False


def test_failed_run_leaves_no_registration() -> None:
    with pytest.raises(MemoryError), use("one", FIRST):
        raise MemoryError
    with use("two", FIRST) as two:
        assert two.is_shared() is False


@pytest.mark.parametrize("shared", [True, False, None])
def test_shared_use_is_recorded_from_the_start(shared) -> None:
    with use("one", FIRST, shared) as one:
        assert one.is_shared() is bool(shared)


KILLED = """
import os, signal
from eke.hardware.device_use import DeviceUse
use = DeviceUse("killed", frozenset({"a"}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_registration_of_a_killed_run_is_removed() -> None:
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert len(list(lease_folder().iterdir())) == 1
    with use("two", FIRST) as two:
        assert two.is_shared() is False
        assert len(list(lease_folder().iterdir())) == 1, "its own"


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "content",
    ["", "two", "\0\xff"],
    ids=["empty", "no devices", "bytes"],
)
def test_locked_foreign_file_is_not_a_run(content) -> None:
    file = lease_folder() / "training-0"
    file.write_text(content, encoding="latin-1")
    command = [sys.executable, "-S", "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with use("one", FIRST) as one:
            assert one.is_shared() is False
        assert file.exists(), "it is somebody's while it is locked"
        holder.communicate()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_planted_link_is_not_followed(kind, tmp_path) -> None:
    file, thesis = lease_folder() / "training-0", tmp_path / "thesis"
    thesis.write_text("x a")
    {
        "link": lambda: file.symlink_to(thesis),
        "fifo": lambda: os.mkfifo(file),
        "folder": file.mkdir,
    }[kind]()
    with use("one", FIRST) as one:
        assert one.is_shared() is False
    assert thesis.read_text() == "x a"


def test_unusable_folder_gives_unknown(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EKE_LEASES", str(tmp_path / "file" / "leases"))
    with use("one", FIRST) as one:
        assert one.is_shared() is None


def test_missing_locks_give_unknown(monkeypatch) -> None:
    def no_locks(_: int) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("eke.hardware.device_use.try_lock", no_locks)
    with use("one", FIRST) as one:
        assert one.is_shared() is None
    assert list(lease_folder().iterdir()) == []


def test_cpu_cores_follow_process_affinity(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    ours = set(cpu_cores())
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3})
    assert len(ours) == 2
    assert ours.isdisjoint(cpu_cores()), "jobs with cores of their own"


def test_another_user_can_register() -> None:
    with use("one", FIRST):
        (file,) = lease_folder().iterdir()
        assert file.stat().st_mode & 0o777 == 0o666
