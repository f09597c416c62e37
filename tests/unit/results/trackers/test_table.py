"""Options and trackers are the same set, and choosing one never raises."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from eke.common.paths import conf_folder
from eke.config import schema
from eke.results.trackers import TRACKERS, TrackedRun, build_tracker

from .conftest import child_environment, find_wandb_files, rows


def test_options_are_the_trackers() -> None:
    options = {file.stem for file in (conf_folder() / "tracker").glob("*.yaml")}
    assert options == set(TRACKERS)


def test_none_writes_nothing(make_run: Callable[..., TrackedRun]) -> None:
    run = make_run(settings=schema.Tracker(option="none"))
    tracker = build_tracker(run)
    tracker.log(rows(1))
    tracker.summary({"loss": 1.0})
    tracker.finish(0)
    assert tracker.problem == ""
    assert list(run.directory.iterdir()) == []


def test_an_unknown_option_is_named(make_run: Callable[..., TrackedRun]) -> None:
    tracker = build_tracker(make_run(settings=schema.Tracker(option="aim")))
    tracker.log(rows(1))
    tracker.finish(0)
    known = "mlflow, none, tensorboard, trackio, wandb"
    assert tracker.problem == f"tracker.option = aim: not one of {known} -> tracker=none"


def test_a_missing_package_is_named(
    make_run: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = make_run()
    tracker = build_tracker(run)
    tracker.log(rows(1))
    tracker.finish(0)
    assert "pip install wandb" in tracker.problem
    assert find_wandb_files(run.directory) == []


def test_importing_the_package_loads_neither_wandb_nor_torch() -> None:
    code = (
        "import sys, eke.results.trackers; "
        "print({'wandb', 'torch', 'transformers'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert answer.stdout.strip() == "set()", answer.stderr
