"""Real runs where others may connect, and where files lie that must not be imported."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live import SHORT, record_of, single_runs
from support import PATIENCE_S, REPO, TINY, environment, last_wins

pytestmark = pytest.mark.slow

LISTENS = "0A"
"""Of a TCP socket in /proc/net/tcp (include/net/tcp_states.h)."""

HERE = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 there."""


def descendants(pid: int) -> list[int]:
    found = [pid]
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                found += [int(each) for each in task.read_text().split()]
            except OSError:
                continue
    return found


def open_to_others(pid: int) -> set[str]:
    """Addresses other than loopback at which a process and its descendants listen."""
    inodes: set[str] = set()
    rows = []
    for process in descendants(pid):
        try:
            links = [os.readlink(each) for each in Path(f"/proc/{process}/fd").iterdir()]
            for kind in ("tcp", "tcp6"):
                rows += Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]
        except OSError:  # it has just ended
            continue
        inodes |= {each[len("socket:[") : -1] for each in links if each.startswith("socket:[")}
    fields = [row.split() for row in rows]
    mine = [each for each in fields if each[3] == LISTENS and each[9] in inodes]
    return {each[1] for each in mine if each[1].partition(":")[0] not in HERE}


def own_address() -> str:
    """Of this machine on the network; one that leads nowhere if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "192.0.2.2"
        return str(asked.getsockname()[0])


def on_a_machine_called(name: str, hosts: Path, command: list[str]) -> list[str]:
    """A command whose host name resolves to the network; as it is where that takes rights."""
    hosts.write_text(f"127.0.0.1 localhost\n{own_address()} {name}\n")
    enter = f"hostname {name} && mount --bind {shlex.quote(str(hosts))} /etc/hosts"
    inside = ["unshare", "--uts", "--mount", "sh", "-c"]
    try:
        subprocess.run([*inside, enter], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return command
    return [*inside, f"{enter} && exec {shlex.join(command)}"]


@pytest.mark.parametrize("distributed", ["fsdp", "zero1"])
def test_no_process_of_a_run_listens_to_the_network(distributed, tmp_path) -> None:
    overrides = ["hardware=cpu", "data=synthetic", "train.steps=100000", *TINY,
                 f"distributed={distributed}", "distributed.num_processes=2"]  # fmt: skip
    command = [sys.executable, str(REPO / "train.py"), *overrides]
    typed = on_a_machine_called("elsewhere", tmp_path / "hosts", command)
    log = tmp_path / "out"
    with open(log, "wb") as out:
        run = subprocess.Popen(
            typed, cwd=tmp_path, env=environment(tmp_path), stdout=out, stderr=out,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    found: set[str] = set()
    try:
        deadline, steps = time.monotonic() + PATIENCE_S, 0
        while steps < 20 and run.poll() is None and time.monotonic() < deadline:
            found |= open_to_others(run.pid)
            files = (tmp_path / "runs").glob("*/metrics.jsonl")
            steps = sum(each.read_text().count("\n") for each in files)
            time.sleep(0.2)  # a look reads /proc for every process
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(PATIENCE_S)
    assert steps >= 20, log.read_text()[-3000:]
    assert not found


TRAP = "import os\nopen({proof!r}, 'a').write(str(os.getpid()) + '\\n')\nraise SystemExit(66)\n"
MODULES = ("torch", "datasets", "profile", "transformers", "numpy", "eke", "json", "sitecustomize")


@pytest.fixture
def traps(tmp_path) -> Path:
    """A folder with files whose names are those of modules; each says when it is executed."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(TRAP.format(proof=str(tmp_path / "executed")))
    return folder


PATHS = {"none": "", "empty first": ":/nowhere", "dot": ".", "relative": "../work", "two": "::"}

COMMANDS = {
    "one process": ["experiment=smoke", "hardware=cpu", "train.steps=2", "tracker=none"],
    "ranks": ["experiment=smoke", "hardware=cpu", "train.steps=2", "tracker=none",
              "distributed=ddp", "distributed.num_processes=2"],
    "sweep": ["-m", "experiment=smoke", "hardware=cpu", "train.steps=2", "tracker=none"],
    "prepared": ["hardware=cpu", "train.steps=2", "data=jsonl", "data.path=rows.jsonl",
                 "data.tokenizer=bytes", *TINY],
    "forecast": ["experiment=smoke", "hardware=h100", "plan_only=true", "tracker=none"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "path"),
    [("one process", "none"), ("ranks", "two"), ("sweep", "relative"), ("prepared", "dot"),
     ("forecast", "empty first")],
)  # fmt: skip
def test_no_file_of_the_current_folder_is_imported(what, path, traps, tmp_path) -> None:
    rows = "".join(json.dumps({"text": f"words {n} and more words"}) + "\n" for n in range(400))
    (traps / "rows.jsonl").write_text(rows)
    variables = environment(tmp_path)
    del variables["PYTHONPATH"]  # eke is installed; what a user sets is the case's
    # Set there, since the first Python reads it before any line of eke's.
    command = [sys.executable, "-P", "-c", DRIVE, PATHS[path], *COMMANDS[what]]
    done = subprocess.run(
        command, cwd=traps, env=variables, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert not (tmp_path / "executed").exists(), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


DRIVE = """
import os, sys
if sys.argv[1]:
    os.environ["PYTHONPATH"] = sys.argv[1]
from eke.cli import main
sys.exit(main(["train", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("command", [["doctor"], ["status", "."], ["train", "plan_only=true"]])
def test_python_m_eke_imports_no_file_of_the_current_folder(command, traps, tmp_path) -> None:
    (traps / "sitecustomize.py").unlink()
    (traps / "eke.py").unlink()  # `-m eke` looks for this one itself, before eke can say a word
    variables = environment(tmp_path)
    del variables["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "-m", "eke", *command],
        cwd=traps, env=variables, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert not (tmp_path / "executed").exists(), done.stdout + done.stderr


def test_shared_cpu_invalidates_speed_measurements(start, train_forked, tmp_path) -> None:
    """The first run begins alone and ends alone: it must learn of the second all the same."""
    first = start(*last_wins(*SHORT, "train.steps=100000", "seed=0"))
    first.wait_for_step(3)
    assert train_forked(*SHORT, "seed=1", "plan_only=true").code == 0
    failing = train_forked(*last_wins(*SHORT, "seed=1", "data=jsonl", "data.path=missing.jsonl"))
    assert failing.code == 2, "this one and the plan never train"
    second = train_forked(*last_wins(*SHORT, "train.steps=30", "seed=1"))
    assert second.code == 0, second.text
    first.wait_for_step(first.last_step() + 50)
    os.kill(first.worker_pid(), signal.SIGKILL)  # its rows say it, since it cannot
    first.finish()
    alone = train_forked(*last_wins(*SHORT, "train.steps=30", "seed=2"))
    assert alone.code == 0, alone.text
    shared = {
        record["config"]["seed"]: record["shared_device"]
        for record in map(record_of, single_runs(tmp_path))
    }
    assert shared == {0: True, 1: True, 2: False}
    lines = [f.read_text().splitlines() for f in (tmp_path / "calibration").glob("*.jsonl")]
    assert [len(each) for each in lines] == [1], "of the run that was alone"
