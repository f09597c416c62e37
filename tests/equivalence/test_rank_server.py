"""The server that forks these tests' ranks: it tells how they ended, and leaves none behind."""

import os
import subprocess
import sys
import time

import pytest
from rank_server import RankServer
from support import PATIENCE_S, REPO, TINY, environment

from eke.common.paths import RunPaths
from eke.plan.planner import write_plan

pytestmark = pytest.mark.slow  # importing torch takes seconds

ENDLESS = (*TINY, "data=synthetic", "data.num_samples=64", "train.steps=1000000")
"""A run that ends in no test."""


def group_of(pid: int) -> list[int]:
    """The processes that were started, or forked, in the session of this one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(name)) == pid:
                found.append(int(name))
        except ProcessLookupError:
            continue
    return found


def test_rank_server_ends_failed_and_hung_ranks(tmp_path, make_plan) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    server = RankServer(tmp_path)
    try:
        # Without a plan, one rank fails at once; the other waits for it, and is ended after it.
        failed = server.train(paths, 2, environment(tmp_path))
        assert failed[0] == 1, paths.log.read_text()
        assert failed[1] != 0
        write_plan(paths, make_plan(*ENDLESS))
        assert server.train(paths, 1, environment(tmp_path), timeout=1.0) == [-9]
        session = server.process.pid
        wait_until(lambda: group_of(session) == [session])  # the kernel takes a moment
        server.process.kill()
        with pytest.raises((RuntimeError, BrokenPipeError)):
            server.train(paths, 1, environment(tmp_path))
        assert server.process is None
    finally:
        server.close()


ASKER = """
import sys, pathlib
from eke.common.paths import RunPaths
from rank_server import RankServer
from support import environment
folder = pathlib.Path(sys.argv[1])
server = RankServer(folder)
server.process = server._start(environment(folder))
print(server.process.pid, flush=True)
server.train(RunPaths(folder), 2, environment(folder))
"""


def test_ranks_end_with_their_client(tmp_path, make_plan) -> None:
    """As when pytest is killed in the middle of a test: while ranks train, or hang."""
    # Ranks that fail may be gone before anybody has looked: one that is asked to stop before it
    # listens is gone at once.
    write_plan(RunPaths(tmp_path), make_plan(*ENDLESS, "distributed=ddp"))
    found = {**environment(tmp_path), "PYTHONPATH": f"{REPO / 'src'}:{REPO / 'tests'}"}
    with subprocess.Popen(
        [sys.executable, "-c", ASKER, str(tmp_path)], env=found, stdout=subprocess.PIPE, text=True
    ) as asker:
        assert asker.stdout
        session = int(asker.stdout.readline())
        wait_until(lambda: len(group_of(session)) == 4)  # the server, its store, its ranks
        asker.kill()
    wait_until(lambda: not group_of(session))


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
