"""A forked process is the one that would have been started; without a server runs go on."""

import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import PATIENCE_S, REPO

from eke.common.process_env import module_command
from eke.launch.processes import fork_server, worker_process
from eke.launch.processes.fork_server import ForkServer
from eke.launch.processes.worker_process import Worker, spawn

HERE = Path(__file__).parent

FACTS = """
import json, os, sys, signal, random
import numpy.random
facts = {
    "pid is group and session": os.getpid() == os.getpgid(0) == os.getsid(0),
    "parent": os.getppid(),
    "supervisor": os.environ["EKE_SUPERVISOR"],
    "environment": {k: v for k, v in os.environ.items() if k != "EKE_PROCESS"},
    "directory": os.getcwd(),
    "cores": sorted(os.sched_getaffinity(0)),
    "arguments": sys.argv,
    "path": sys.path,
    "main": [sys.modules["__main__"].__spec__.name, sys.modules["__main__"].__file__],
    "name": __name__,
    "stdin": os.readlink("/proc/self/fd/0"),
    "signals": {n.name: str(signal.getsignal(n)) for n in signal.valid_signals()
                if isinstance(n, signal.Signals)},
    "masked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "open": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0]
                   for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "handed on": [os.path.basename(os.readlink(f"/proc/self/fd/{n}"))
                  for n in map(int, os.listdir("/proc/self/fd"))
                  if os.path.exists(f"/proc/self/fd/{n}") and n > 2 and os.get_inheritable(n)],
    "threads": len(os.listdir("/proc/self/task")),
    "unbuffered": sys.stdout.write_through,
}
print(json.dumps(facts))
"""


class Forked:
    """Workers of a server that imports nothing, and of one that is not there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.said, self.servers = folder, [], []
        path = os.pathsep.join([str(HERE), str(REPO / "src")])
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setattr(fork_server, "MODULE", "light_server")
        monkeypatch.setattr(
            worker_process,
            "worker_command",
            lambda paths, *_: module_command("stand_in_worker", str(paths.folder)),
        )

    def server(self, *words: str, wait: bool = True, **common: str) -> ForkServer:
        """One that is ready, or lost."""
        made = ForkServer(self.folder / "fork_server.log", words, self.said.append, common)
        self.servers.append(made)
        deadline = time.monotonic() + PATIENCE_S
        while wait and not made.is_ready():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return made

    def close(self) -> None:
        """End them all."""
        for made in self.servers:
            made.close()


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """See Forked."""
    made = Forked(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def work(paths, plan):
    """Server and script -> its worker; without a server, a fresh one."""

    def start(script: str, made: ForkServer | None, **more) -> Worker:
        (paths.folder / "script.py").write_text(script)
        begin = spawn if made is None else lambda order: made.start(plan, order)
        return Worker(paths, start=begin, **more)

    return start


def last_line(paths):
    return json.loads(paths.log.read_text().splitlines()[-1])


def test_it_finds_what_a_fresh_process_finds(forked, work, paths, monkeypatch) -> None:
    made = forked.server()
    monkeypatch.chdir(paths.folder)
    with open(paths.lock, "w") as lock:
        seen = []
        for each in (None, made):
            live = work(FACTS, each, environment={"EKE_OWN": "1"}, descriptors=[lock.fileno()])
            assert wait(live) == 0, paths.log.read_text()
            seen.append(last_line(paths))
    fresh, own = seen
    assert own == fresh
    assert own["parent"] == os.getpid() == int(own["supervisor"])
    assert own["pid is group and session"]
    assert str(paths.lock) in own["open"]
    assert own["handed on"] == [paths.lock.name]
    assert own["directory"] == str(paths.folder)
    assert own["threads"] == 1
    assert forked.said == []


@pytest.mark.parametrize("code", [0, 75, 3])
@pytest.mark.parametrize("leave", ["sys.exit", "os._exit"])
def test_exit_codes(code, leave, forked, work) -> None:
    assert wait(work(f"import os; {leave}({code})", forked.server())) == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_an_end_by_a_signal(number, forked, work) -> None:
    live = work(f"import os; os.kill(os.getpid(), {int(number)})", forked.server())
    assert wait(live) == -number


def wait(live: Worker) -> int:
    """Its own code; `finish` would kill what is still there."""
    wait_until(live.is_over)
    return live.finish()


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_exception_is_in_its_log(forked, work, paths) -> None:
    assert wait(work("raise ValueError('of the run')", forked.server())) == 1
    assert "ValueError: of the run" in paths.log.read_text()


LISTENS = """
import signal, time, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(sys.argv[1] + "/ready", "w").close()
while True: time.sleep(600)
"""


def test_signals_reach_it_and_a_kill_ends_its_group(forked, work, paths) -> None:
    made, ready = forked.server(), paths.folder / "ready"
    live = work(LISTENS, made)
    wait_until(ready.exists)
    assert not live.is_over()
    live.ask(signal.SIGTERM)
    assert wait(live) == 75
    ready.unlink()
    child = "import subprocess\nsubprocess.Popen(['sleep', '600'])\n" + LISTENS
    live = work(child, made)
    wait_until(ready.exists)
    assert len(group_of(live.process.pid)) == 2
    assert live.finish() == -signal.SIGKILL
    wait_until(lambda: group_of(live.process.pid) == [])


def group_of(pid: int) -> list[int]:
    """Processes of this session that run."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if os.getsid(int(name)) == pid and state != "Z":
                found.append(int(name))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return found


def test_a_lock_is_held_until_its_worker_is_gone(forked, work, paths) -> None:
    made = forked.server()
    with open(paths.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        live = work(LISTENS, made, descriptors=[lock.fileno()])
    with open(paths.lock) as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        live.finish()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the server does not hold it either


def test_random_numbers_differ(forked, work, paths) -> None:
    made = forked.server()
    script = "import random, numpy.random, json\nprint(json.dumps([random.random(), "
    script += "numpy.random.random()]))"
    drawn = []
    for _ in range(2):
        assert wait(work(script, made)) == 0
        drawn.append(last_line(paths))
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


def test_killing_the_server_harms_no_run_and_the_next_is_fresh(forked, work, paths) -> None:
    made, ready = forked.server(), paths.folder / "ready"
    live = work(LISTENS, made)
    wait_until(ready.exists)
    os.kill(made.pid, signal.SIGKILL)
    assert made.is_ready(), "nobody waits for another one"
    after = work("import os; print(os.environ['EKE_PROCESS'])", made)
    assert wait(after) == 0
    assert paths.log.read_text().splitlines()[-1].startswith("fresh: the fork server is lost")
    assert wait(work("pass", made)) == 0
    assert len(forked.said) == 1
    assert forked.said[0].endswith("; runs get fresh processes")
    assert not live.is_over()
    live.ask(signal.SIGTERM)
    assert wait(live) == 75


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("unfit", "unfit, says the test"),
        ("die", "it ended before it was ready"),
        ("cannot-fork", "it is gone, or could not fork"),
    ],
)
def test_without_a_server_that_works(word, why, forked, work, paths) -> None:
    made = forked.server(word)
    assert wait(work("import os; print(os.environ['EKE_PROCESS'])", made)) == 0
    assert why in paths.log.read_text()
    assert len(forked.said) == 1
    assert why in forked.said[0]
    assert made.pid is None


@pytest.mark.parametrize("limit", ["IMPORT_LIMIT_S", "ANSWER_LIMIT_S"])
def test_a_server_that_hangs_is_given_up(limit, forked, work, paths, monkeypatch) -> None:
    monkeypatch.setattr(fork_server, limit, 0.2)
    made = forked.server(*(["hang"] if limit == "IMPORT_LIMIT_S" else []))
    if made.pid:
        os.kill(made.pid, signal.SIGSTOP)
    assert wait(work("import os; print(os.environ['EKE_PROCESS'])", made)) == 0
    assert "fresh: " in paths.log.read_text()
    assert len(forked.said) == 1


def test_other_variables_give_it_a_fresh_process_and_the_server_goes_on(
    forked, work, paths
) -> None:
    made = forked.server(OMP_NUM_THREADS="1")
    script = "import os; print(os.environ['EKE_PROCESS'])"
    for threads, expected in (("1", "forked"), ("2", "fresh: OMP_NUM_THREADS is not"),
                              ("1", "forked")):  # fmt: skip
        assert wait(work(script, made, environment={"OMP_NUM_THREADS": threads})) == 0
        assert paths.log.read_text().splitlines()[-1].startswith(expected)
    assert forked.said == []


def test_it_ends_with_its_pool_and_leaves_no_child(forked, work) -> None:
    before = children()
    made = forked.server()
    assert wait(work("pass", made)) == 0
    process = made._process
    made._control.close()  # as when the pool is gone
    assert process.wait(PATIENCE_S) == 0
    forked.close()
    assert children() == before


def test_only_workers_are_adopted(forked, work, paths) -> None:
    """Orphans of others would stay zombies for as long as the pool lives."""
    assert wait(work("pass", forked.server())) == 0
    left = paths.folder / "left"
    subprocess.run(["sh", "-c", f"sleep 600 & echo $! > {left}"], check=True)
    orphan = int(left.read_text())
    try:
        assert orphan not in children()
    finally:
        os.kill(orphan, signal.SIGKILL)


def children() -> list[int]:
    """Of this process."""
    found = []
    for task in os.listdir("/proc/self/task"):
        found += Path(f"/proc/self/task/{task}/children").read_text().split()
    return sorted(map(int, found))
