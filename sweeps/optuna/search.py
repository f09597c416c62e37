"""Search learning rate, warm-up and schedule with Optuna, and prune bad trials.

    pip install optuna
    python sweeps/optuna/search.py --trials 20 model=tiny train.steps=300 train.eval_every=50

All other arguments are passed to train.py. A trial is an ordinary run under `runs/`. The search
reads its losses from `metrics.jsonl` during training, and a median pruner stops bad trials. The
study is stored in `runs/optuna.db`. Repeat the command to continue it and to retry interrupted
trials. Edit `suggest` to change the search space.

Source: https://optuna.readthedocs.io/en/stable/tutorial/20_recipes/009_ask_and_tell.html
"""

import argparse
import dataclasses
import fcntl
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

import optuna

from eke.common.errors import BusyError, EkeError
from eke.config.schema.codec import make_converter
from eke.launch.processes.run_dir import find_place
from eke.plan.planner import Plan
from eke.plan.record.metrics import EVAL_LOSS, STEP, parse_row

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
POLL_S = 0.2
"""Seconds between two reads of a run's metrics."""

BUSY_S = 2.0
"""Seconds before the restart of a run that another process is running."""

FINISHED, RESUMABLE, BUSY = 0, 75, BusyError.exit_code
"""Exit codes of train.py: run finished, run stopped by a signal, run active in another process."""

AGAIN = "again"
"""User attribute of a trial: number of the interrupted trial that it repeats."""


def suggest(trial: optuna.Trial) -> list[str]:
    """Return a point of the search space as overrides."""
    return [
        f"optimizer.lr={trial.suggest_float('optimizer.lr', 1e-4, 1e-2, log=True):.3g}",
        f"schedule.warmup_frac={trial.suggest_float('schedule.warmup_frac', 0.0, 0.2):.2f}",
        f"schedule={trial.suggest_categorical('schedule', ['cosine', 'linear', 'wsd'])}",
    ]


def folder_of(overrides: Sequence[str]) -> Path:
    """Return the folder of a run. Exit if train.py rejects the overrides."""
    command = [sys.executable, str(TRAIN), *overrides, "plan_only=true"]
    eke = [sys.executable, "-m", "eke", "plan", "--json", "--quick", *overrides]
    plan = subprocess.run(eke, capture_output=True, text=True, check=False)
    if plan.returncode:
        sys.exit(plan.stderr or f"{' '.join(command)} is rejected")
    content = json.loads(plan.stdout)
    fields = {field.name: content[field.name] for field in dataclasses.fields(Plan)}
    try:
        return find_place(make_converter().structure(fields, Plan)).paths.folder
    except EkeError:  # train.py reports the unreadable record
        return Path(content["config"]["paths"]["runs"]) / content["run_id"]


class Curve:
    """Evaluation losses of a running run."""

    def __init__(self, metrics: Path) -> None:
        self.metrics, self.position, self.last = metrics, 0, math.nan

    def new(self) -> Iterator[tuple[int, float]]:
        """Yield step and loss of each evaluation since the last call."""
        if not self.metrics.exists():
            return
        with self.metrics.open("rb") as file:
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self.position += len(line)
                row = parse_row(line.decode(errors="replace"))  # None for a torn or empty line
                if row and EVAL_LOSS in row and STEP in row:
                    self.last = float(row[EVAL_LOSS])
                    yield int(row[STEP]), self.last


def run(trial: optuna.Trial, overrides: Sequence[str]) -> tuple[optuna.trial.TrialState, float]:
    """Train one point and return its final state and last evaluation loss.

    If the run is still active after an interrupted search, wait for its end.
    """
    curve = Curve(folder_of(overrides) / "metrics.jsonl")
    while (ended := run_once(trial, overrides, curve)) is None:
        time.sleep(BUSY_S)
    return ended, curve.last


def run_once(
    trial: optuna.Trial, overrides: Sequence[str], curve: Curve
) -> optuna.trial.TrialState | None:
    """Start the run once and return its final state, or None if another process is running it."""
    process = subprocess.Popen([sys.executable, str(TRAIN), *overrides])
    pruned = False
    try:
        ended = False
        while not ended:
            ended = process.poll() is not None
            for step, loss in curve.new():
                trial.report(loss, step)
            if not (ended or pruned) and trial.should_prune():
                process.send_signal(signal.SIGTERM)  # saves a checkpoint and exits
                pruned = True
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode == BUSY:
        return None
    if pruned:
        return optuna.trial.TrialState.PRUNED
    if process.returncode == RESUMABLE:
        raise KeyboardInterrupt
    good = process.returncode == FINISHED and math.isfinite(curve.last)
    return optuna.trial.TrialState.COMPLETE if good else optuna.trial.TrialState.FAIL


def take_up(study: optuna.Study, lock: TextIO) -> None:
    """Enqueue the points of interrupted trials again.

    Searches of a study share a lock. A trial in state RUNNING is only known to be interrupted if no
    other search holds the lock.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params, user_attrs={AGAIN: trial.number})
    except BlockingIOError:
        pass
    finally:
        fcntl.flock(lock, fcntl.LOCK_SH)


def num_tried(study: optuna.Study) -> int:
    """Return the number of finished trials without interrupted trials."""
    repeats = sum(AGAIN in trial.user_attrs for trial in study.trials)
    return sum(trial.state.is_finished() for trial in study.trials) - repeats


def refuse_other_runs(study: optuna.Study, overrides: Sequence[str]) -> None:
    """Exit if the study has other overrides: losses of other models or data are not comparable."""
    typed = sorted(overrides)
    earlier = study.user_attrs.get("overrides", typed)
    if earlier != typed:
        sys.exit(
            f"study {study.study_name} has other overrides: {' '.join(earlier)}\n"
            "  -> --study NAME for a new study"
        )
    study.set_user_attr("overrides", typed)


def main() -> None:
    """Run trials until the study has the requested number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trials", type=int, default=20, help="trials of the study, including earlier ones"
    )
    parser.add_argument("--study", default="eke", help="name of the study")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler")
    options, overrides = parser.parse_known_args()
    Path("runs").mkdir(exist_ok=True)
    study = optuna.create_study(
        study_name=options.study,
        storage="sqlite:///runs/optuna.db",
        load_if_exists=True,
        direction="minimize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    refuse_other_runs(study, overrides)
    # The storage does not keep the sampler's state. The same seed would repeat its points.
    study.sampler = optuna.samplers.TPESampler(seed=options.seed + len(study.trials))
    with open(f"runs/.optuna-{quote(options.study, safe='')}.lock", "w") as lock:
        take_up(study, lock)
        while num_tried(study) < options.trials:
            trial = study.ask()
            point = suggest(trial)
            trial.set_user_attr("overrides", point)
            state, loss = run(trial, [*overrides, *point])
            told = loss if state is optuna.trial.TrialState.COMPLETE else None
            study.tell(trial, told, state=state)
            print(f"trial {trial.number}: {state.name.lower()}, loss {loss:.4f}: {' '.join(point)}")
            take_up(study, lock)
    done = [t for t in study.trials if t.state is optuna.trial.TrialState.COMPLETE]
    if not done:
        sys.exit("no trial finished. See the logs of the runs")
    best = study.best_trial.user_attrs.get("overrides", [])  # rounded as in the run
    print(f"best: loss {study.best_value:.4f}: python train.py {' '.join([*overrides, *best])}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Repeat the command to continue the study.")
