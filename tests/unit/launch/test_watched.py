"""Who watches over a sweep is known for as long as its process lives."""

import errno
import os
import socket

import pytest

from eke.launch.watched import is_watched, watched_sweeps, watcher_of, watching
from eke.paths import SweepPaths


@pytest.fixture
def sweep(tmp_path) -> SweepPaths:
    return SweepPaths(tmp_path / "runs" / "sweep-1")


def test_it_is_known_while_it_watches(sweep, tmp_path) -> None:
    assert not is_watched(sweep)
    with watching(sweep):
        assert is_watched(sweep)
        assert watcher_of(sweep) == (socket.gethostname(), str(os.getpid()))
        assert watched_sweeps(sweep.folder.parent) == [sweep]
    assert not is_watched(sweep)
    assert watched_sweeps(sweep.folder.parent) == []


def test_of_two_the_first_is_known(sweep) -> None:
    with watching(sweep):
        sweep.lock.write_text("process 1 on there\n")
        with watching(sweep):
            assert watcher_of(sweep) == ("there", "1")
        assert is_watched(sweep)


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_takes_no_lock_stops_no_sweep(code, sweep, monkeypatch) -> None:
    def refuse(*_) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", refuse)
        with watching(sweep):
            assert not is_watched(sweep)
    assert watcher_of(sweep) == (socket.gethostname(), "")


def test_what_goes_wrong_in_a_sweep_is_its_own(sweep) -> None:
    with pytest.raises(KeyboardInterrupt), watching(sweep):
        raise KeyboardInterrupt
    assert not is_watched(sweep)
