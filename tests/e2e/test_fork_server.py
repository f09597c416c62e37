"""Runs forked from one process: the same as runs of their own, and none is lost with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live import SHORT, attempts, curve, record_of, run_folders
from support import PATIENCE_S, REPO, environment, last_wins

pytestmark = pytest.mark.slow  # importing torch takes seconds

FORKING = "launcher.fork_server=true"

OTHERS = ("timing", "throughput", "command", "overrides", "name", "plan")
"""Parts of a record that no two runs have in common, or that have what was typed."""


WAITED = "waiting for data"
"""Of a warning that is a matter of time."""


def runs_of(folder: Path) -> list[Path]:
    """Run folders, by their names."""
    return sorted(f for f in run_folders(folder) if not f.name.startswith("sweep-"))


def processes_of(folder: Path) -> list[str]:
    """How the process of each attempt was made."""
    return [each.get("process", "") for run in runs_of(folder) for each in attempts(run)]


def timeless(record: dict) -> dict:
    """What must be the same whoever starts a run; of memory what tensors take."""
    kept = {name: value for name, value in record.items() if name not in OTHERS}
    kept["config"] = {key: each for key, each in record["config"].items() if key != "launcher"}
    kept["environment"] = {k: v for k, v in record["environment"].items() if k != "time"}
    measured = record["memory"]["measured"]
    kept["memory"] = (measured["basis"], measured["peak_allocated_bytes"])
    # On a busy machine any run may have waited for its data.
    kept["warnings"] = [text for text in record["warnings"] if WAITED not in text]
    if record["config"]["dataloader"]["workers"]:
        del kept["memory"]  # how many micro-batches lie ready is a matter of time
    return kept


def lines_of(run: Path) -> int:
    """How many lines its log has, but for that warning."""
    return sum(WAITED not in line for line in (run / "train.log").read_text().splitlines())


def test_a_run_is_the_same_to_the_last_bit(train_py, tmp_path) -> None:
    sweep = last_wins(*SHORT, "model.dropout=0.1", "seed=0,1", "dataloader.workers=0,2")
    for folder, how in (("own", []), ("forked", [FORKING])):
        done = train_py("-m", *sweep, *how)
        assert done.code == 0, done.text
        (tmp_path / folder).mkdir()
        (tmp_path / "runs").rename(tmp_path / folder / "runs")
    own, forked = runs_of(tmp_path / "own"), runs_of(tmp_path / "forked")
    assert [run.name for run in own] == [run.name for run in forked]
    assert processes_of(tmp_path / "own") == [""] * 4
    assert processes_of(tmp_path / "forked") == ["forked"] * 4
    for one, other in zip(own, forked, strict=True):
        assert curve(one) == curve(other)
        assert timeless(record_of(one)) == timeless(record_of(other))
        assert lines_of(one) == lines_of(other)
    startups = [[record_of(f)["timing"]["startup_s"] for f in runs] for runs in (own, forked)]
    assert max(startups[1]) < min(startups[0])


def forked_processes(folder: Path) -> list[int]:
    """The server and its workers, which have its command line."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            here = os.readlink(f"/proc/{name}/cwd") == str(folder)
        except OSError:
            continue
        if here and b"eke.training.loop.fork_server" in words:
            found.append(int(name))
    return found


LONG = last_wins(*SHORT, "seed=0,1,2", "train.steps=150", "train.log_every=5", FORKING)


def test_a_killed_server_loses_no_run(start, tmp_path) -> None:
    live = start("-m", *LONG)
    live.wait_for_step(20)
    (server,) = set(forked_processes(tmp_path)) - {live.worker_pid()}
    os.kill(server, signal.SIGKILL)
    out = live.finish()
    assert live.process.returncode == 0, out
    assert out.count("the fork server is lost") == 1
    assert sorted(process[:6] for process in processes_of(tmp_path)) == ["forked"] + ["fresh:"] * 2


def test_interrupted_killed_and_finished_by_typing_it_again(start, train_py, tmp_path) -> None:
    live = start("-m", *LONG)
    live.wait_for_step(30)
    live.signal(signal.SIGTERM)
    assert live.finish()
    assert live.process.returncode == 75
    (first,) = runs_of(tmp_path)
    assert record_of(first)["outcome"] == "preempted"
    again = start("-m", *LONG)
    again.wait_for_step(60)
    again.process.kill()  # nobody is asked: the kernel tells the worker, and the server
    again.finish()
    deadline = time.monotonic() + PATIENCE_S
    while forked_processes(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert record_of(first)["outcome"] == "preempted"
    os_killed = start("-m", *LONG)
    os_killed.wait_for_step(90)
    while len(attempts(first)) < 3:
        time.sleep(0.02)
    os.kill(attempts(first)[-1]["pid"], signal.SIGKILL)
    out = os_killed.finish()
    assert os_killed.process.returncode == 0, out
    assert {record_of(run)["outcome"] for run in runs_of(tmp_path)} == {"ok"}
    assert set(processes_of(tmp_path)) == {"forked"}
    undisturbed = train_py(*[w for w in LONG if w not in (FORKING, "seed=0,1,2")], "seed=0",
                           "paths.runs=own/runs")  # fmt: skip
    assert undisturbed.code == 0, undisturbed.text
    assert curve(runs_of(tmp_path / "own")[0]) == curve(first)


def test_who_needs_a_process_of_its_own_gets_one(train_py, tmp_path) -> None:
    bad = "optimizer.lr:100,optimizer.weight_decay:100"
    rows = f"{{a:{{}},bad:{{{bad}}},pair:{{distributed:ddp,distributed.num_processes:2}}}}"
    steady = ("optimizer=sgd", "schedule=constant", "train.max_grad_norm=null")
    extra = (*steady, f"sweep.rows={rows}", FORKING)
    done = train_py("-m", *last_wins(*SHORT, *extra))
    assert done.code == 1, done.text
    found = {
        tuple(record_of(run)["plan"]["overrides"])[-1]: (
            record_of(run)["outcome"], attempts(run)[-1]["process"]
        )
        for run in runs_of(tmp_path)
    }  # fmt: skip
    ends = sorted(found.values())
    assert ends == [
        ("diverged", "forked"),
        ("ok", "forked"),
        ("ok", "fresh: it has 2 processes, which their agent starts"),
    ]
    assert "fork server" not in done.out


def test_status_cancel_and_a_tracker(start, tmp_path) -> None:
    live = start("-m", *last_wins(*LONG, "tracker=wandb", "seed=0,1", "train.steps=400"))
    live.wait_for_step(20)
    (sweep,) = tmp_path.glob("runs/sweep-*")
    assert "running" in eke(tmp_path, "status", str(sweep))
    eke(tmp_path, "cancel", str(sweep))
    out = live.finish()
    assert live.process.returncode == 75, out
    assert processes_of(tmp_path)[0] == "forked"
    assert list(tmp_path.glob("runs/*/wandb/offline-run-*/*.wandb"))
    assert not record_of(runs_of(tmp_path)[0])["warnings"]
    assert "cancelled" in eke(tmp_path, "status", str(sweep))


def eke(folder: Path, *words: str) -> str:
    """What a command of eke's says."""
    done = subprocess.run(
        [sys.executable, "-m", "eke.cli", *words],
        cwd=folder,
        env={**environment(folder), "PYTHONPATH": str(REPO / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_hydras_own_launchers_have_none(train_py) -> None:
    done = train_py("-m", "hydra/launcher=basic", "hydra/sweeper=basic", *SHORT, "seed=1", FORKING)
    assert done.code == 2, done.text
    assert "launcher.fork_server=false" in done.text
    assert "Traceback" not in done.text
