"""sweeps/optuna: ask and tell around train.py, with pruning by what metrics.jsonl says."""

import fcntl
import importlib.util
import json
import os
import sys

import optuna
import pytest
from live import SHORT, run_in
from support import REPO, last_wins

SCRIPT = REPO / "sweeps" / "optuna" / "search.py"
WORK = last_wins(*SHORT, "train.steps=12", "train.eval_every=4")


@pytest.fixture
def search(tmp_path):
    """The script as typed, in a folder of its own."""
    return lambda *arguments: run_in(tmp_path, [sys.executable, str(SCRIPT), *arguments])


def study_of(tmp_path):
    return optuna.load_study(study_name="eke", storage=f"sqlite:///{tmp_path}/runs/optuna.db")


@pytest.fixture
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("search", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        '\n{"train/global_step": 0, "eval/loss": 5.5}\n\n{"tra\n3\n[]\n{"eval/loss": 1}\n'
        '{"train/global_step": 4, "eval/loss": "nan"}\n{"train/global_step": 8, "eva',
        '{"train/global_step": 0, "eval/loss": 5.5}\n{"train/global_step": 2, "train/loss": 5.0}\n'
        '{"train/global_step": 4, "eval/loss": "nan"}\n',
    ],
    ids=["damaged", "good"],
)
def test_invalid_metrics_line_is_skipped(text, script, tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    found = list(script.Curve(tmp_path / "metrics.jsonl").new())
    assert str(found) == "[(0, 5.5), (4, nan)]"


def test_interrupted_trial_is_repeated(script, tmp_path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/optuna.db")
    killed = study.ask()
    point = script.suggest(killed)
    with open(tmp_path / "lock", "w") as lock, open(tmp_path / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # another search, which may be at it
        script.take_up(study, lock)
        assert [trial.state.name for trial in study.trials] == ["RUNNING"]
        fcntl.flock(other, fcntl.LOCK_UN)
        script.take_up(study, lock)
    assert script.num_tried(study) == 0
    again = study.ask()
    assert script.suggest(again) == point
    study.tell(again, 1.0)
    assert script.num_tried(study) == 1
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


def test_orphaned_run_of_a_search_is_awaited(script, tmp_path, monkeypatch) -> None:
    lines = (
        "import sys, pathlib",
        "count = pathlib.Path(sys.argv[1])",
        "count.write_text(count.read_text() + 'x')",
        "sys.exit(0 if count.stat().st_size == 3 else 16)",
    )
    (tmp_path / "train.py").write_text("\n".join(lines))
    (tmp_path / "count").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"train/global_step": 4, "eval/loss": 2.5}\n')
    monkeypatch.setattr(script, "TRAIN", tmp_path / "train.py")
    monkeypatch.setattr(script, "folder_of", lambda _: tmp_path)
    monkeypatch.setattr(script, "BUSY_S", 0.0)
    monkeypatch.setattr(script, "POLL_S", 0.01)
    trial = optuna.create_study().ask()
    ended = script.run(trial, [str(tmp_path / "count")])
    assert ended == (optuna.trial.TrialState.COMPLETE, 2.5)
    assert (tmp_path / "count").read_text() == "xxx"


@pytest.mark.slow
def test_trials_are_runs_and_the_search_resumes(search, tmp_path) -> None:
    first = search("--trials", "1", *WORK)
    assert first.code == 0, first.text
    again = search("--trials", "2", *WORK)
    assert again.code == 0, again.text
    trials = study_of(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2
    assert [sorted(trial.intermediate_values) for trial in trials] == [[0, 4, 8, 12]] * 2
    assert all(trial.value == trial.intermediate_values[12] for trial in trials)
    assert len(list(tmp_path.glob("runs/*/record.json"))) == 2
    best = next(line for line in again.out.splitlines() if line.startswith("best: loss "))
    command = best.partition(": python train.py ")[2].split()
    ran = [json.loads(f.read_text())["overrides"] for f in tmp_path.glob("runs/*/record.json")]
    assert sorted(command) in [sorted(overrides) for overrides in ran]
    other = search("--trials", "3", *last_wins(*WORK, "train.steps=16"))
    assert other.code == 1
    assert "study eke has other overrides: " in other.err
    assert "-> --study NAME" in other.err
    assert len(study_of(tmp_path).trials) == 2


@pytest.mark.slow
def test_bad_trial_is_pruned(search, tmp_path) -> None:
    """Earlier trials that nothing can match: the pruner's median is out of reach."""
    os.makedirs(tmp_path / "runs")
    study = optuna.create_study(
        study_name="eke", storage=f"sqlite:///{tmp_path}/runs/optuna.db", direction="minimize"
    )
    for _ in range(3):
        trial = study.ask()
        for step in range(0, 2001, 4):
            trial.report(0.0, step)
        study.tell(trial, 0.0)
    done = search("--trials", "4", *last_wins(*WORK, "train.steps=2000"))
    assert done.code == 0, done.text
    last = study_of(tmp_path).trials[-1]
    assert last.state is optuna.trial.TrialState.PRUNED
    assert max(last.intermediate_values) < 2000


@pytest.mark.slow
def test_rejected_command_is_reported_without_losing_a_trial(search, tmp_path) -> None:
    done = search("--trials", "1", *last_wins(*WORK, "precision=tf32"))
    assert done.code == 1
    assert "precision=fp32" in done.text
    assert "Traceback" not in done.text
