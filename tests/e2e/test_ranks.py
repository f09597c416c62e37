"""Several processes of one run: stopped, killed, hung, and started by somebody else's launcher."""

import os
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from listening import on_a_machine_called, open_to_others
from live import Live, attempts, record_of, rows_of, run_folders, run_in
from support import (
    PATIENCE_S,
    REPO,
    TINY,
    Finished,
    environment,
    last_wins,
    started_by_torchrun,
)
from trained_ranks import train_in_ranks

LONG = last_wins(
    *TINY,
    "experiment=smoke",
    "data=synthetic",
    "data.num_samples=64",
    "batch.per_device=4",
    "distributed=ddp",
    "train.steps=100000",
    "train.checkpoint_every=20",
    "hardware=cpu",
)
SHORT = last_wins(*LONG, "train.steps=12", "train.checkpoint_every=null")


def processes_of(folder: Path, module: str) -> list[int]:
    """Process ids of the run's workers or of its agent, in the order of starting."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            # The same run may be running for a test beside this one, in another folder.
            if module in words and folder in [entry.joinpath("cwd").resolve() / w for w in words]:
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def rank_of(pid: int) -> int:
    """A worker's rank, from its environment."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return int(dict(e.split("=", 1) for e in entries if "=" in e)["RANK"])


def worker(folder: Path, rank: int) -> int:
    """Process id of one rank."""
    return next(p for p in processes_of(folder, "eke.training.loop.worker") if rank_of(p) == rank)


def wait_until_gone(folder: Path) -> None:
    """Until no process of the run is left."""
    deadline = time.monotonic() + PATIENCE_S
    while processes_of(folder, "eke.training.loop.worker") or processes_of(
        folder, "eke.training.loop.agent"
    ):
        assert time.monotonic() < deadline, "processes are left behind"
        time.sleep(0.05)


@pytest.fixture
def going(tmp_path):
    """Starts a run of two ranks, or goes on with it; it comes back some steps later."""
    started = []

    def go(*command: str, **options) -> tuple[Live, Path]:
        live = Live(tmp_path, command, **options)
        started.append(live)
        live.wait_for_more(25)
        (folder,) = run_folders(tmp_path)
        return live, folder

    yield go
    for live in started:
        live.process.kill()
        live.process.communicate()


def kill_rank_0(live: Live, folder: Path) -> None:
    """It is named. Rank 1: test_oom_on_one_rank_is_reported_by_that_rank."""
    os.kill(worker(folder, 0), signal.SIGKILL)
    out = live.finish()
    assert live.process.returncode == 1, out
    record = record_of(folder)
    assert record["outcome"] == "crashed"
    assert "process 0 of this run: killed by SIGKILL" in record["failure"]["message"]
    assert "process 0 of this run: killed by SIGKILL" in out
    assert "Traceback" not in out.replace(record["failure"]["traceback"], "")


def kill_agent(live: Live, folder: Path) -> None:
    """It takes its ranks along."""
    (agent,) = processes_of(folder, "eke.training.loop.agent")
    os.kill(agent, signal.SIGKILL)
    live.finish()
    assert live.process.returncode == 1
    assert "killed by SIGKILL" in record_of(folder)["failure"]["message"]


def kill_supervisor(live: Live, folder: Path) -> None:
    """It leaves a checkpoint and no orphan."""
    live.process.kill()
    live.process.wait()
    wait_until_gone(folder)
    assert record_of(folder)["outcome"] == "preempted"


def signal_supervisor(live: Live, folder: Path) -> None:
    """The ranks agree on the step to stop after."""
    live.signal(signal.SIGINT)
    out = live.finish()
    assert live.process.returncode == 75, out
    record = record_of(folder)
    assert record["outcome"] == "cancelled"
    assert f"after step {record['steps_done']}; checkpoint saved" in record["failure"]["message"]
    assert (folder / "checkpoints" / f"step-{record['steps_done']:08d}" / "manifest.json").exists()


def signal_one_rank(live: Live, folder: Path) -> None:
    """A cluster may tell the processes one by one: all stop."""
    os.kill(worker(folder, 1), signal.SIGTERM)
    live.finish()
    assert live.process.returncode == 75
    assert record_of(folder)["outcome"] == "preempted"


WAYS = {
    "ddp": (kill_rank_0, signal_one_rank),
    "fsdp": (kill_agent, kill_supervisor, signal_supervisor),
}
"""How runs of a strategy are ended, one after the other."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", WAYS)
def test_two_ranks_resume_the_same_curve_after_any_end(
    strategy, going, tmp_path, train_ranks
) -> None:
    """Dropout differs between ranks, so each rank's random state must come back, too.

    No process of the first attempt listens to the network.
    """
    more = ("model.dropout=0.1", "train.log_every=1", f"distributed={strategy}")
    case = last_wins(*LONG, *more, "schedule=constant", "schedule.warmup_steps=1")
    elsewhere = partial(on_a_machine_called, "elsewhere", tmp_path / "hosts")
    for number, end in enumerate(WAYS[strategy]):
        live, folder = going(*case, within=list if number else elsewhere)
        assert number or not open_to_others(live.process.pid)
        end(live, folder)
        wait_until_gone(folder)
    rows = [row for row in rows_of(folder) if "train/loss" in row]
    first = {row["attempt"]: row["train/global_step"] for row in reversed(rows)}
    assert sorted(first) == list(range(len(WAYS[strategy])))
    assert min(step for attempt, step in first.items() if attempt) > 20, "it started over"
    found = curve(folder)
    assert found == curve(train_ranks(*case, f"train.steps={len(found)}"))


@pytest.mark.slow
def test_named_run_resumes_with_another_rank_count(going, train_py, tmp_path, train_ranks) -> None:
    """Two ranks, stopped; then one to the end: the curve of one that nothing disturbed."""
    case = last_wins(
        *LONG, "train.steps=150", "train.log_every=1", "optimizer.lr=1e-5", "train.eval_every=null"
    )
    live, folder = going(*case, "distributed=fsdp")
    signal_supervisor(live, folder)
    rest = f"train.resume={folder}", "distributed=none", "batch.per_device=2"
    done = train_py(*rest, "batch.accumulation=4")
    assert done.code == 0, done.text
    record, steps = record_of(folder), record_of(folder)["steps_done"]
    assert run_folders(tmp_path) == [folder]
    assert (record["run_id"], steps, record["attempt"]) == (folder.name, 150, 1)
    assert (record["timing"]["steady_step_s"], record["memory"]["measured"]) == (None, None)
    first, second = record["effective"]["cuts"]
    assert first["distributed"]["num_processes"] == 2
    assert first["steps"] + second["steps"] == 150
    assert second["steady_step_s"]["median"] > 0
    again = train_py(*rest, "batch.accumulation=4")
    assert "(recorded " in again.out
    assert len(attempts(folder)) == 2
    other = train_ranks(*case, "distributed=none", "batch.per_device=8")
    for step, (loss, norm) in curve(other).items():
        # Losses are near 5, where float32 has steps of 5e-7.
        assert curve(folder)[step] == (pytest.approx(loss, abs=2e-6), pytest.approx(norm, rel=1e-5))


@pytest.mark.slow  # torch's agent gives a process that does not answer 30 s before it kills it
def test_hung_rank_times_out(tmp_path) -> None:
    live = Live(tmp_path, (*LONG, "distributed.timeout_s=3"))
    live.wait_for_step(5)
    (folder,) = run_folders(tmp_path)
    os.kill(worker(folder, 1), signal.SIGSTOP)
    live.finish()
    assert live.process.returncode == 1
    assert "another process" in record_of(folder)["failure"]["message"]
    wait_until_gone(folder)


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, the latest attempt's."""
    rows = [row for row in rows_of(folder) if "train/loss" in row]
    return {r["train/global_step"]: (r["train/loss"], r["train/grad_norm"]) for r in rows}


def launched(tmp: Path, launcher: list[str], *overrides: str) -> Finished:
    """`torchrun ... train.py overrides`, typed by hand."""
    return run_in(tmp, [sys.executable, "-m", *launcher, str(REPO / "train.py"), *overrides])


TORCHRUN = ["torch.distributed.run", "--nproc-per-node=2"]
ACCELERATE = ["accelerate.commands.launch", "--cpu", "--num_processes=2", "--mixed_precision=bf16"]


@pytest.mark.slow
def test_torchrun_trains_the_same_run(tmp_path, make_plan, rank_server) -> None:
    ours, _, codes = train_in_ranks(
        rank_server, make_plan(*SHORT), tmp_path / "ours", environment(tmp_path)
    )
    assert codes == [0, 0]
    for launcher in (TORCHRUN, ACCELERATE):
        place = tmp_path / launcher[0]
        place.mkdir()
        done = launched(place, launcher, *SHORT)
        assert done.code == 0, done.text
        assert done.out.count("eke show ") == 1, "rank 0 alone speaks"
        (folder,) = run_folders(place)
        assert (folder / "rank_1.log").exists()
        formats = record_of(folder)["effective"]["matmul_dtypes"]
        assert formats == ["float32"], "the launcher's bf16"
        assert (ours.name, curve(ours)) == (folder.name, curve(folder)), launcher
    assert "(recorded " in launched(tmp_path / TORCHRUN[0], TORCHRUN, *SHORT).out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (tuple(o for o in SHORT if not o.startswith("distributed")),
         "-> distributed=ddp distributed.num_processes=2"),
        (("-m", *SHORT), "A sweep starts its own"),
    ],
    ids=["wrong process count", "sweep"],
)  # fmt: skip
def test_launcher_is_rejected_once(typed, said, train_main, monkeypatch, tmp_path) -> None:
    told = ""
    for rank in (0, 1):
        for name, value in started_by_torchrun(rank, 2).items():
            monkeypatch.setenv(name, value)
        done = train_main(*typed)
        assert done.code != 0
        told += done.err
    assert told.count(said) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_full_disk_on_rank_0_ends_both_ranks(tmp_path) -> None:
    """Rank 0 alone writes; the other one must not wait for it for ever."""
    script = tmp_path / "limited.sh"
    script.write_text(f'ulimit -f 200\nexec {sys.executable} {REPO / "train.py"} "$@"\n')
    done = run_in(tmp_path, ["bash", str(script), *last_wins(*LONG, "model.hidden_size=64")])
    assert done.code == 1, done.text
    (folder,) = run_folders(tmp_path)
    assert "Files are limited to" in record_of(folder)["failure"]["message"]
    wait_until_gone(folder)


@pytest.mark.slow
def test_oom_on_one_rank_is_reported_by_that_rank(tmp_path) -> None:
    """Its address space is cut while it trains; logits of 42 MiB are always mapped anew."""
    large = ("model.vocab_size=4096", "data.seq_len=128", "batch.per_device=20")
    live = Live(tmp_path, last_wins(*LONG, *large, "train.log_every=1"))
    live.wait_for_step(3)
    (folder,) = run_folders(tmp_path)
    resource.prlimit(worker(folder, 1), resource.RLIMIT_AS, (2**20, 2**20))
    out = live.finish()
    assert live.process.returncode == 1, out
    record = record_of(folder)
    assert record["outcome"] == "oom", record["failure"]
    assert record["failure"]["message"].startswith("process 1 of this run: out of memory in ")
    wait_until_gone(folder)
