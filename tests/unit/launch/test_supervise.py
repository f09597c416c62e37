"""A worker watched to its end: signals go on, nothing it started outlives it."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support import PATIENCE_S

from eke.launch.processes import sweep, worker_process
from eke.launch.processes.follow import RunView
from eke.launch.processes.worker_process import Worker, worker_command, worker_environment

READY = "open(sys.argv[1] + '/ready', 'w').close()"


class SilentView:
    """Shows nothing; counts looks."""

    def __init__(self) -> None:
        self.looks = []

    def update(self, last: bool = False) -> None:
        self.looks.append(last)


@pytest.fixture
def run(paths, monkeypatch):
    """Supervise a piece of Python in place of the worker."""
    monkeypatch.setattr(sweep, "POLL_S", 0.01)

    def run(code: str, view=None) -> int:
        command = [sys.executable, "-c", f"import os, signal, sys, time\n{code}", str(paths.folder)]
        monkeypatch.setattr(worker_process, "worker_command", lambda *_: command)
        shown = view or SilentView()
        worker = Worker(paths)
        try:
            sweep.show_until_over(worker, shown)
        finally:
            ended = worker.finish()
        shown.update(last=True)
        return ended

    return run


def heard_by_us(file) -> bool:
    """Whether the worker has come so far, and signals to us are listened to."""
    return file.exists() and signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None)


def when(condition, action) -> threading.Thread:
    """Do something from another thread as soon as a condition holds."""

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_exit_code_matches_subprocess(run) -> None:
    assert run("sys.exit(75)") == 75
    assert run("os.kill(os.getpid(), signal.SIGKILL)") == -signal.SIGKILL


def test_worker_output_goes_to_the_log(run, paths, capsys) -> None:
    paths.log.write_text("earlier\n")
    run("print('out'); sys.stderr.write('err\\n')", RunView(paths))
    assert paths.log.read_text() == "earlier\nout\nerr\n"
    assert capsys.readouterr().err == "out\nerr\n"


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_child_processes_end_with_the_worker(run, paths) -> None:
    """A loader process or a tracker's service that ignores everything but SIGKILL."""
    child = (
        "import signal, time\n"
        "for n in (signal.SIGTERM, signal.SIGHUP): signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(600)"
    )
    code = (
        "import subprocess\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "open(sys.argv[1] + '/child', 'w').write(str(child.pid))\n"
    )
    assert run(code) == 0
    pid = int((paths.folder / "child").read_text())
    deadline = time.monotonic() + PATIENCE_S
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel takes a moment to end it
    assert not alive(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_first_signal_is_forwarded(number, run, paths, capsys) -> None:
    code = (
        f"def stop(n, _): sys.exit(75 if n == {int(number)} else 1)\n"
        "signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)\n"
        f"{READY}\ntime.sleep(600)"
    )
    before = signal.getsignal(number)
    thread = when(lambda: heard_by_us(paths.folder / "ready"), lambda: os.kill(os.getpid(), number))
    assert run(code) == 75
    thread.join()
    assert "again to kill" in capsys.readouterr().err
    assert signal.getsignal(number) is before, "the handlers are put back"


def test_second_signal_kills_the_group(run, paths, capsys) -> None:
    code = (
        "asked = lambda n, _: open(sys.argv[1] + '/asked', 'w').close()\n"
        "signal.signal(signal.SIGINT, asked)\n"
        f"{READY}\n"
        "while True: time.sleep(600)"
    )

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    threads = [
        when(lambda: heard_by_us(paths.folder / "ready"), interrupt),
        when((paths.folder / "asked").exists, interrupt),
    ]
    assert run(code) == -signal.SIGKILL
    for thread in threads:
        thread.join()
    assert capsys.readouterr().err.count("again to kill") == 1


def test_worker_has_its_own_process_group(run, paths) -> None:
    """Ctrl-C at a terminal reaches the supervisor alone, which decides."""
    run("open(sys.argv[1] + '/group', 'w').write(f'{os.getpid()} {os.getpgid(0)} {os.getsid(0)}')")
    pid, group, session = (paths.folder / "group").read_text().split()
    assert pid == group == session
    assert int(group) != os.getpgid(0)


def test_worker_receives_eke_path_and_supervisor(paths, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    variables = worker_environment()
    assert variables["EKE_SUPERVISOR"] == str(os.getpid())
    assert variables["PYTHONPATH"].endswith(f"{os.pathsep}/somewhere")
    assert worker_command(paths)[1:] == ["-P", "-m", "eke.training.loop.worker", str(paths.folder)]
    found = subprocess.run(
        [sys.executable, "-c", "import eke; print(eke.__file__)"],
        env=variables,
        cwd=paths.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    import eke

    assert found.stdout.strip() == eke.__file__
