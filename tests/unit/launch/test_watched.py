"""Who watches over a sweep is known for as long as its process lives."""

import errno
import os
import socket

import pytest

from eke.common.paths import SweepPaths
from eke.launch.processes.follow import Watcher, watchers_in, watchers_of, watching


@pytest.fixture
def sweep(tmp_path) -> SweepPaths:
    return SweepPaths(tmp_path / "runs" / "sweep-1")


def test_watcher_is_listed_while_it_runs(sweep) -> None:
    assert watchers_of(sweep) == []
    me = socket.gethostname(), os.getpid()
    with watching(sweep):
        expected = [Watcher(me[0], str(me[1]), sweep.watcher(*me))]
        assert watchers_of(sweep) == expected
        assert watchers_in(sweep.folder.parent) == expected
    assert watchers_of(sweep) == watchers_in(sweep.folder.parent) == []
    assert list(sweep.folder.iterdir()) == [], "nothing is left behind"


def test_several_watchers_are_listed_without_killed_watchers(sweep, monkeypatch) -> None:
    sweep.folder.mkdir(parents=True)
    sweep.watcher("a-host", 7).touch()
    assert watchers_of(sweep) == []
    with watching(sweep):
        monkeypatch.setattr(os, "getpid", lambda: 8)
        with watching(sweep):
            assert len(watchers_of(sweep)) == 2
        monkeypatch.undo()
        assert len(watchers_of(sweep)) == 1
        assert not sweep.watcher("a-host", 7).exists()
        sweep.watcher("a-host", 9).touch()  # killed while this one watched
    assert list(sweep.folder.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_folder_without_locks_does_not_stop_a_sweep(code, sweep, monkeypatch) -> None:
    def refuse(*_, **__) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", refuse)
        with watching(sweep):
            assert watchers_of(sweep) == []


def test_error_inside_a_watched_sweep_is_not_hidden(sweep) -> None:
    with pytest.raises(KeyboardInterrupt), watching(sweep):
        raise KeyboardInterrupt
    assert watchers_of(sweep) == []
