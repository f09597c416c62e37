"""sweeps/optuna: ask and tell around train.py, with pruning by what metrics.jsonl says."""

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


@pytest.mark.slow
def test_trials_are_runs_and_the_same_command_goes_on(search, tmp_path) -> None:
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
    assert "study eke is of other runs: " in other.err
    assert "-> --study NAME" in other.err
    assert len(study_of(tmp_path).trials) == 2


@pytest.mark.slow
def test_what_learns_badly_is_ended_early(search, tmp_path) -> None:
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
def test_a_refused_command_is_told_and_no_trial_is_lost(search, tmp_path) -> None:
    done = search("--trials", "1", *last_wins(*WORK, "precision=tf32"))
    assert done.code == 1
    assert "precision=fp32" in done.text
    assert "Traceback" not in done.text
