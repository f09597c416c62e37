"""A sweep on one machine: planned whole, run on its devices, finished by typing it again."""

import fcntl
import json
import os
import signal
import time

import pytest
from live import SHORT, attempts, record_of, rows_of, run_folders, single_runs
from support import DIVERGES, PATIENCE_S, last_wins

from eke.results.report.compare.comparison import find_families
from eke.results.report.compare.load_records import gather, key_of
from eke.results.report.compare.measures import SAMPLE_SPEED
from eke.results.report.compare.until_decided import RowDecision, StoppingRule, decide

SWEEP = last_wins(*SHORT, *DIVERGES, "precision=fp32,tf32", "optimizer.lr=100,1e-3")
"""Of four cells one diverges and two are refused."""


def sweep_of(tmp_path):
    (file,) = tmp_path.glob("runs/sweep-*/sweep.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_rejected_and_failing_runs_do_not_stop_a_sweep(train_forked, tmp_path) -> None:
    done = train_forked("-m", *SWEEP)
    assert done.code == 1, done.text
    assert "the loss is" in done.out
    assert "train.log" in done.out
    cells = sweep_of(tmp_path)["cells"]
    assert [c["outcome"] for c in cells] == ["diverged", "refused", "ok", "refused"]
    assert all("precision=fp32" in c["reason"] for c in cells[1::2]), "the fix is named"
    assert [c["rule"] for c in cells[1:]] == ["tf32_needs_ampere", "", "tf32_needs_ampere"]
    assert {(c["row"], c["round"]) for c in cells} == {("", 0)}
    runs = single_runs(tmp_path)
    assert len(runs) == 2
    again = train_forked("-m", *SWEEP)
    assert again.code == 1
    assert again.err.count("answered from its record") == 2
    assert [len(attempts(run)) for run in runs] == [1, 1]


@pytest.mark.slow
def test_closed_stdout_does_not_stop_a_sweep(start, tmp_path) -> None:
    """As behind `| head`, or when the other end of a pipe is killed; a single run: test_run.py."""
    going = start("-m", "seed=0", *SHORT)
    going.process.stdout.close()
    assert going.process.wait(PATIENCE_S) == 0
    assert [record_of(run)["outcome"] for run in single_runs(tmp_path)] == ["ok"]


@pytest.mark.slow
def test_repeated_command_finishes_an_interrupted_sweep(start, tmp_path) -> None:
    sweep = last_wins(*SHORT, "seed=0,1", "train.steps=400", "train.log_every=5")

    def going():
        live = start("-m", *sweep)
        live.wait_for_more(15)
        return live

    for number in (signal.SIGINT, signal.SIGTERM):
        live = going()
        live.signal(number)
        out = live.finish()
        assert live.process.returncode == 75, out
        assert not sweep_of(tmp_path)["cells"][1]["outcome"], "the next cell was started"
    live = going()
    worker = live.worker_pid()
    live.process.kill()
    live.finish()
    wait_for(lambda: not os.path.exists(f"/proc/{worker}"))  # it saves a checkpoint and leaves
    (first,) = single_runs(tmp_path)
    record = record_of(first)
    assert record["outcome"] == "preempted"
    steps = [row["train/global_step"] for row in rows_of(first) if "train/loss" in row]
    assert steps == list(range(1, record["steps_done"] + 1)), "no step twice, none missing"
    live = going()
    os.kill(live.worker_pid(), signal.SIGKILL)
    out = live.finish()
    assert live.process.returncode == 0, out
    assert "trying again" in out
    assert [c["outcome"] for c in sweep_of(tmp_path)["cells"]] == ["ok", "ok"]
    assert [record_of(f)["attempt"] for f in single_runs(tmp_path)] == [4, 0]


def wait_for(happened, patience_s: float = PATIENCE_S) -> None:
    """Until something is so."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


MANY_RUNS_S = 4 * PATIENCE_S

AUTO = (
    *SHORT, "train.steps=10", "optimizer=adamw,adafactor", "memory=none,checkpointing",
    "sweep.repeats=auto", "sweep.max_repeats=4", "sweep.seeds=per_repeat",
)  # fmt: skip


@pytest.mark.slow
def test_auto_repeats_resume_after_a_kill(start, tmp_path) -> None:
    live = start("-m", *last_wins(*AUTO), forked=True)
    wait_for(lambda: len(list(tmp_path.glob("runs/*/record.json"))) > 8, MANY_RUNS_S)
    live.process.kill()
    live.finish()
    (sweep,) = tmp_path.glob("runs/sweep-*")
    before = sweep_of(tmp_path)["repeats"]
    assert before["rounds"] == 2
    ended = [run for run in single_runs(tmp_path) if record_of(run)["outcome"] == "ok"]
    live = start("-m", *last_wins(*AUTO), forked=True)
    out = live.finish(MANY_RUNS_S)
    assert live.process.returncode == 0, out
    found = sweep_of(tmp_path)["repeats"]
    assert (found["rounds"], found["level"]) in ((3, 0.033), (4, 0.033))
    assert [len(attempts(run)) for run in ended] == [1] * len(ended)
    assert len(single_runs(tmp_path)) == len(sweep_of(tmp_path)["cells"]) <= 16
    assert " of 3 decided after " in out
    told = {tuple(row["overrides"]): (row["state"], row["value"]) for row in found["rows"]}
    assert told == replayed(sweep, found["rounds"])


def replayed(sweep, rounds: int) -> dict[tuple[str, ...], tuple[str, float | None]]:
    """What the rule says of the records after each round."""
    known: dict[tuple[str, ...], RowDecision] = {}
    entries = gather([sweep]).entries
    for number in range(3, rounds + 1):
        (family,) = find_families([entry for entry in entries if entry.repeat[1] < number])
        keys = {v: key_of(v.first.overrides) for v in family.members if v.first}
        samples = {key: v.sample(SAMPLE_SPEED.key) for v, key in keys.items()}
        known = decide(samples, keys[family.baseline], StoppingRule(4), known)
    return {key: (each.state.name, each.value) for key, each in known.items()}


@pytest.mark.slow
def test_runs_sharing_a_cpu_are_concurrent_and_not_timed(train_forked, tmp_path) -> None:
    done = train_forked("-m", *last_wins(*SHORT, "seed=0,1", "launcher.cpu_slots=2"))
    assert done.code == 0, done.text
    records = [record_of(folder) for folder in single_runs(tmp_path)]
    assert [record["shared_device"] for record in records] == [True, True]
    (start, end), (other_start, other_end) = spans(tmp_path)
    assert max(start, other_start) < min(end, other_end), "they ran side by side"
    assert "started on CPU 0" in done.err
    assert "started on CPU 1" in done.err
    assert done.out.startswith("2 ok ")
    assert "eval loss" in done.out
    assert "samples/s" not in done.out, "nothing unmeasured is shown"


@pytest.mark.slow
def test_two_concurrent_sweeps_share_a_leased_cpu_and_their_runs(start, tmp_path) -> None:
    (tmp_path / "leases").mkdir()
    with open(tmp_path / "leases" / "cpu-0.lock", "w") as lease:
        lease.write("process 4242\n")
        lease.flush()
        fcntl.flock(lease, fcntl.LOCK_EX)
        both = [start("-m", *SHORT, "seed=0,1") for _ in range(2)]
        wait_for(lambda: list(tmp_path.glob("runs/sweep-*/sweep.json")))
        time.sleep(1.5)
        assert not list(tmp_path.glob("runs/*/attempts.jsonl")), "nothing runs beside it"
    outs = [each.finish() for each in both]
    assert [each.process.returncode for each in both] == [0, 0], outs
    assert any("waiting: CPU is leased by process 4242" in out for out in outs)
    assert [len(attempts(run)) for run in single_runs(tmp_path)] == [1, 1], "each was done once"
    (_, end), (start_of_other, _) = spans(tmp_path)
    assert end <= start_of_other + 0.5


def spans(tmp_path) -> list[tuple[float, float]]:
    """When each run was started, and when its record was written."""
    runs = single_runs(tmp_path)
    ends = [(run / "record.json").stat().st_mtime for run in runs]
    return sorted((attempts(run)[0]["started"], end) for run, end in zip(runs, ends, strict=True))


@pytest.mark.parametrize("typed", ["launcher.cpu_slots=2", "launcher.runs_per_device=2"])
def test_single_run_rejects_a_launcher(typed, train_main) -> None:
    done = train_main(typed, "plan_only=true")
    assert done.code == 2
    assert f"python train.py -m {typed} plan_only=true" in done.text


def test_unknown_launcher_is_rejected(train_main) -> None:
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
    assert "48 runs" in done.out
    assert "4 excluded by row=tf32 or row=bf16" in done.out
    assert "all_adafactor" in done.out


@pytest.mark.slow
def test_strict_sweep_with_a_rejected_run_starts_no_run(train_main, tmp_path) -> None:
    done = train_main("-m", *SWEEP, "sweep.strict=true")
    assert done.code == 2, done.text
    assert "sweep.strict=false" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_sweepers_and_launchers_of_hydra_work(train_forked, tmp_path) -> None:
    typed = ["-m", "hydra/sweeper=basic", "hydra/launcher=basic", *SHORT]
    done = train_forked(*typed, "seed=1,2")
    assert done.code == 0, done.text
    assert [record_of(f)["outcome"] for f in run_folders(tmp_path)] == ["ok", "ok"]
    failed = train_forked(*typed, "precision=tf32,fp32")
    assert failed.code == 2, "a rule refuses the first"
    assert "Traceback" not in failed.text


def test_missing_hydra_plugin_is_reported(train_main) -> None:
    done = train_main("-m", "seed=1,2", "hydra/sweeper=optuna")
    assert done.code == 2
    assert "pip install optuna && pip install --no-deps hydra-optuna-sweeper" in done.err
