"""Launchers that start each run behind a command: eke's own, and one that another package adds."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live import SHORT, Live, attempts, curve, record_of, run_in, single_runs
from support import PATIENCE_S, Finished, last_wins

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("nsenter")
        or subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True
        ).returncode,
        reason="PID namespaces need Linux, util-linux and root",
    ),
]

LONG = last_wins(*SHORT, "hardware=cpu", "train.steps=4000", "train.checkpoint_every=20")

OUTSIDE = """\
import os

from eke.launch.command import CommandLauncher


class Container(CommandLauncher):
    name = "container"

    def prefixes(self, config):
        return [os.environ["CONTAINER"]]
"""


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


ENTER = """\
import os, sys
os.closerange(3, 256)
os.execvp("nsenter", ["nsenter", "--target", sys.argv[1], "--pid", "--mount", "--", *sys.argv[2:]])
"""


@pytest.fixture
def container(tmp_path):
    """A prefix into a PID namespace of its own: as `docker exec`, it hands on no signal or lock."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen([*unshare, "sleep", "infinity"]) as outer:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := children_of(outer.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        enter = tmp_path / "enter.py"
        enter.write_text(ENTER)
        yield f"{sys.executable} {enter} {found[0]}"
        outer.kill()


@pytest.fixture
def launcher(container) -> tuple[str, ...]:
    """eke's own, by its key."""
    return ("hydra/launcher=command", f"launcher.prefix=['{container}']")


@pytest.fixture
def of_another_package(container, tmp_path, monkeypatch) -> tuple[str, ...]:
    """One that is found by its entry point."""
    site = tmp_path / "site"
    info = site / "outside-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "outside.py").write_text(OUTSIDE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[eke.launchers]\ncontainer = outside:Container\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("CONTAINER", container)
    return ("hydra/launcher=container",)


def eke(tmp_path, *arguments: str) -> Finished:
    return run_in(tmp_path, [sys.executable, "-m", "eke", *arguments])


def states(tmp_path) -> list[str]:
    shown = eke(tmp_path, "status", "--json", "runs")
    assert shown.code == 0, shown.err
    return [each["state"] for each in json.loads(shown.out)]


def only_run(tmp_path):
    (folder,) = single_runs(tmp_path)
    return folder


def test_sweep_runs_with_a_foreign_launch_command(of_another_package, train_py, tmp_path) -> None:
    typed = ("-m", *of_another_package, *SHORT, "hardware=cpu", "seed=0,1")
    done = train_py(*typed)
    assert done.code == 0, done.text
    runs = single_runs(tmp_path)
    assert [record_of(run)["outcome"] for run in runs] == ["ok", "ok"]
    pids = [attempts(run)[-1]["pid"] for run in runs]
    assert max(pids) < 1000, "numbers of a namespace that had no process before"
    assert not list(tmp_path.glob("runs/*/co*.json")), "nothing is left to look for"
    assert train_py(*typed).err.count("answered from its record") == 2


def test_orphaned_run_is_ended_or_cancelled(launcher, start, tmp_path) -> None:
    """Killed with its prefix, it says nothing on the far side: there the worker trains on."""
    live: Live = start("-m", *launcher, *LONG, "seed=0")
    live.wait_for_step(30)
    folder = only_run(tmp_path)
    assert states(tmp_path) == ["running"]
    for process in [live.process.pid, *children_of(live.process.pid)]:
        os.kill(process, signal.SIGKILL)
    live.finish()
    assert states(tmp_path) == ["queued"], "it is alive, and nobody waits for it"
    again: Live = start("-m", *launcher, *LONG, "seed=0")
    deadline = time.monotonic() + PATIENCE_S
    while len(attempts(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    again.wait_for_more(10)
    cancelled = eke(tmp_path, "cancel", "runs")
    assert (cancelled.code, cancelled.out) == (0, "asked 1 run to save and end\n")
    out = again.finish()
    record = record_of(folder)
    assert (record["outcome"], record["attempt"]) == ("cancelled", 1), out
    assert record["steps_done"] < 4000
    assert states(tmp_path) == ["cancelled"]
    steps = [step for step, _ in enumerate(curve(folder))]
    assert len(steps) == record["steps_done"] >= 30, "no step is missing, and none is another's"
