"""Real runs where others may connect, and where files lie that must not be imported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from listening import on_a_machine_called, open_to_others
from live import SHORT, record_of, single_runs
from support import PATIENCE_S, REPO, TINY, environment, last_wins

pytestmark = pytest.mark.slow


def test_no_process_of_a_run_listens_to_the_network(tmp_path) -> None:
    """ZeRO joins its ranks itself; for ddp and fsdp see test_ranks.py."""
    overrides = ["hardware=cpu", "data=synthetic", "train.steps=100000", *TINY,
                 "distributed=zero1", "distributed.num_processes=2"]  # fmt: skip
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
