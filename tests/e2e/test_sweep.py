"""A sweep on one machine: planned whole, run on its devices, finished by typing it again."""

import fcntl
import itertools
import json
import os
import signal
import time

import pytest
from live import SHORT, record_of, rows_of, run_folders, single_runs
from support import DIVERGES, PATIENCE_S, last_wins

SWEEP = last_wins(*SHORT, "precision=fp32,tf32", "optimizer=sgd,adamw,adamw_fused")


def sweep_of(tmp_path):
    (file,) = tmp_path.glob("runs/sweep-*/sweep.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_refused_cells_do_not_stop_the_others(train_py, tmp_path) -> None:
    done = train_py("-m", *SWEEP)
    assert done.code == 0, done.text
    cells = sweep_of(tmp_path)["cells"]
    assert len(cells) == 6
    assert [c["outcome"] for c in cells] == ["ok"] * 3 + ["refused"] * 3
    assert all("precision=fp32" in c["reason"] for c in cells[3:]), "the fix is named"
    assert [c["rule"] for c in cells] == [""] * 3 + ["tf32_needs_ampere"] * 3
    assert {(c["row"], c["round"]) for c in cells} == {("", 0)}
    runs = single_runs(tmp_path)
    # adamw resolves to the fused implementation but is another option: three runs
    assert len(runs) == 3
    attempts = [len((f / "attempts.jsonl").read_text().splitlines()) for f in runs]
    again = train_py("-m", *SWEEP)
    assert again.code == 0
    assert again.out.count("answered from its record") == 3
    assert attempts == [len((f / "attempts.jsonl").read_text().splitlines()) for f in runs]


@pytest.mark.slow
@pytest.mark.parametrize("typed", [("-m", "seed=0,1"), ("seed=0",)], ids=["sweep", "run"])
def test_what_is_started_ends_well_when_nobody_reads_its_lines(typed, start, tmp_path) -> None:
    """As behind `| head`, or when the other end of a pipe is killed."""
    going = start(*typed, *SHORT)
    going.process.stdout.close()
    assert going.process.wait(PATIENCE_S) == 0
    runs = single_runs(tmp_path)
    assert [record_of(run)["outcome"] for run in runs] == ["ok"] * (2 if "-m" in typed else 1)


@pytest.mark.slow
def test_a_failing_cell_is_told_and_the_rest_runs(train_py, tmp_path) -> None:
    done = train_py(
        "-m",
        *last_wins(*SHORT, *DIVERGES, "optimizer.lr=100,1e-3"),
    )
    assert done.code == 1
    assert [c["outcome"] for c in sweep_of(tmp_path)["cells"]] == ["diverged", "ok"]
    assert "the loss is" in done.out
    assert "train.log" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_interrupted_and_finished_by_typing_it_again(number, start, train_py, tmp_path) -> None:
    sweep = last_wins(*SHORT, "seed=0,1", "train.steps=200", "train.log_every=5")
    live = start("-m", *sweep)
    live.wait_for_step(30)
    live.signal(number)
    out = live.finish()
    assert live.process.returncode == 75, out
    assert not sweep_of(tmp_path)["cells"][1]["outcome"], "the next cell was started"
    done = train_py("-m", *sweep)
    assert done.code == 0, done.text
    runs = single_runs(tmp_path)
    assert {record_of(f)["outcome"] for f in runs} == {"ok"}
    assert [record_of(f)["attempt"] for f in runs] == [1, 0]


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_ends_nothing_else(start, tmp_path) -> None:
    live = start("-m", *last_wins(*SHORT, "seed=0,1", "train.steps=100", "train.log_every=5"))
    live.wait_for_step(20)
    os.kill(live.worker_pid(), signal.SIGKILL)
    out = live.finish()
    assert live.process.returncode == 0, out
    assert "tried again" in out
    assert [c["outcome"] for c in sweep_of(tmp_path)["cells"]] == ["ok", "ok"]
    assert [record_of(f)["attempt"] for f in single_runs(tmp_path)] == [1, 0]


@pytest.mark.slow
def test_runs_that_share_a_cpu_run_at_once_and_claim_no_speed(train_py, tmp_path) -> None:
    done = train_py("-m", *last_wins(*SHORT, "seed=0,1", "launcher.cpu_slots=2"))
    assert done.code == 0, done.text
    records = [record_of(folder) for folder in single_runs(tmp_path)]
    assert [record["shared_device"] for record in records] == [True, True]
    starts = [
        json.loads((f / "attempts.jsonl").read_text())["started"] for f in single_runs(tmp_path)
    ]
    ends = [(f / "record.json").stat().st_mtime for f in single_runs(tmp_path)]
    assert max(starts) < min(ends), "they ran side by side"
    assert "started on CPU 0" in done.out
    assert "started on CPU 1" in done.out
    lines = [line for line in done.out.splitlines() if line.startswith("ok  ")]
    assert [len(line.split()) for line in lines] == [5, 5], "no samples/s, no step time"


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_work_and_the_cpu(start, tmp_path) -> None:
    sweep = last_wins(*SHORT, "seed=0,1,2")
    one, other = start("-m", *sweep), start("-m", *sweep)
    outs = [one.finish(), other.finish()]
    assert (one.process.returncode, other.process.returncode) == (0, 0), outs
    folders = single_runs(tmp_path)
    assert len(folders) == 3
    attempts = [len((f / "attempts.jsonl").read_text().splitlines()) for f in folders]
    assert attempts == [1, 1, 1], "each run was done once"
    spans = sorted(
        (
            json.loads((f / "attempts.jsonl").read_text())["started"],
            (f / "record.json").stat().st_mtime,
        )
        for f in folders
    )
    assert all(end <= start + 0.5 for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.slow
def test_a_device_that_another_sweep_holds_is_waited_for(start, tmp_path) -> None:
    (tmp_path / "leases").mkdir()
    with open(tmp_path / "leases" / "cpu-0.lock", "w") as lease:
        lease.write("process 4242\n")
        lease.flush()
        fcntl.flock(lease, fcntl.LOCK_EX)
        live = start("-m", *last_wins(*SHORT, "seed=0,1"))
        deadline = time.monotonic() + 60
        while not (sweeps := list(tmp_path.glob("runs/sweep-*/sweep.json"))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.5)
        assert sweeps
        assert not list(tmp_path.glob("runs/*/attempts.jsonl")), "nothing runs beside it"
    out = live.finish()
    assert live.process.returncode == 0, out
    assert "waits: CPU is leased by process 4242" in out


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_orphan_and_continues(start, train_py, tmp_path) -> None:
    sweep = last_wins(*SHORT, "seed=0,1", "train.steps=400", "train.log_every=5")
    live = start("-m", *sweep)
    live.wait_for_step(30)
    worker = live.worker_pid()
    live.process.kill()
    live.finish()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}"), "it saved a checkpoint and left"
    assert record_of(single_runs(tmp_path)[0])["outcome"] == "preempted"
    done = train_py("-m", *sweep)
    assert done.code == 0, done.text
    first, second = single_runs(tmp_path)
    assert [record_of(f)["attempt"] for f in (first, second)] == [1, 0]
    steps = [row["train/global_step"] for row in rows_of(first) if "train/loss" in row]
    assert steps == list(range(1, 401)), "no step twice, none missing"


@pytest.mark.parametrize("typed", ["launcher.cpu_slots=2", "launcher.runs_per_device=2"])
def test_a_single_run_has_no_launcher(typed, train_main) -> None:
    done = train_main(typed, "plan_only=true")
    assert done.code == 2
    assert f"python train.py -m {typed} plan_only=true" in done.text


def test_another_launcher_is_not_silently_ignored(train_main) -> None:
    done = train_main("-m", "seed=1,2", "hydra/launcher=joblib")
    assert done.code == 2
    assert "hydra/launcher" in done.text


@pytest.mark.slow
def test_rows_rounds_and_exclusion_are_shown(train_main) -> None:
    done = train_main(
        "-m", "sweep=guide_table", "model=tiny_bert", "hardware=v100_16", "plan_only=true",
        "sweep.repeats=2", "sweep.exclude=[row=tf32 or row=bf16]",
    )  # fmt: skip
    assert done.code == 0, done.text
    assert "48 cells" in done.out
    assert "4 excluded by row=tf32 or row=bf16" in done.out
    assert "all_adafactor: " in done.out


@pytest.mark.slow
def test_strict_starts_nothing(train_main, tmp_path) -> None:
    done = train_main("-m", *SWEEP, "sweep.strict=true")
    assert done.code == 2, done.text
    assert "sweep.strict=false" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_hydras_own_sweeper_and_launcher(train_py, tmp_path) -> None:
    typed = ["-m", "hydra/sweeper=basic", "hydra/launcher=basic", *SHORT]
    done = train_py(*typed, "seed=1,2")
    assert done.code == 0, done.text
    assert [record_of(f)["outcome"] for f in run_folders(tmp_path)] == ["ok", "ok"]
    failed = train_py(*typed, "precision=fp32,tf32")
    assert failed.code == 2, "a rule refuses the second"
    assert "Traceback" not in failed.text


def test_a_plugin_that_is_not_installed(train_main) -> None:
    done = train_main("-m", "seed=1,2", "hydra/sweeper=optuna")
    assert done.code == 2
    assert "pip install hydra-optuna-sweeper" in done.err
