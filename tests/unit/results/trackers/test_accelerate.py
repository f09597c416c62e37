"""TensorBoard, MLflow and Trackio: what their own readers find, and what a broken one costs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eke.config import schema
from eke.results.trackers import build_tracker

from .conftest import CHILD, child_environment, rows, track
from .stub import Server

OPTIONS = ("tensorboard", "mlflow", "trackio")
WRITER = CHILD.with_name("accelerate_child.py")
READER = CHILD.with_name("accelerate_read.py")

LIMITED = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0})); "
    "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""A limit on the size of files, as a full disk; exec keeps it."""


def attempt(option, folder, number, code, *steps, **environment):
    """Runs an attempt in a process of its own; what it printed."""
    done = python(WRITER, option, folder, number, code, *steps, **environment)
    return done.stdout + done.stderr


def read(option, folder):
    return json.loads(python(READER, option, folder).stdout.splitlines()[-1])


def python(*words, **environment):
    command = [sys.executable, *map(str, words)]
    found = child_environment(**environment)
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


MIGRATED = """
import sys, mlflow
mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}")
mlflow.search_experiments()
"""


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database as MLflow makes it, without a run: its migrations take half a minute."""
    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    python("-c", MIGRATED, file, MLFLOW_DISABLE_TELEMETRY="true")
    return file


def place_store(option: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """MLflow finds a database that has seen its migrations; TestResumed has it make its own."""
    if option == "mlflow":
        (folder / option).mkdir(exist_ok=True)
        shutil.copy(request.getfixturevalue("empty_store"), folder / option)


class Resumed:
    """Two attempts: five steps and a checkpoint at the third; then from there to the sixth."""

    def __init__(self, option: str, home: Path) -> None:
        self.option, self.folder = option, home / "run"
        self.folder.mkdir()
        server = Server()  # bound and never served: whoever connects would be noticed as a hang
        outside = {"HOME": str(home), "MLFLOW_RUN_ID": "another", "http_proxy": server.url}
        outside = {**outside, "https_proxy": server.url, "TRACKIO_SPACE_ID": "me/space"}
        self.first = attempt(option, self.folder, 0, 75, 1, 2, 3, -3, 4, 5, **outside)
        self.second = attempt(option, self.folder, 1, 0, 4, 5, 6, -6, **outside)
        server.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.socket.accept()
        server.server_close()
        self.home, self.found = home, read(option, self.folder)


@pytest.fixture(
    scope="module",
    params=[
        "tensorboard",
        *(pytest.param(o, marks=pytest.mark.slow) for o in ("mlflow", "trackio")),
    ],
)
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    return Resumed(request.param, tmp_path_factory.mktemp(request.param))


class TestResumed:
    """Looked at from every side. That nobody was connected to is asserted while it is made."""

    @pytest.mark.slow
    def test_no_problem(self, resumed):
        assert resumed.first.count("problem: \n") == resumed.second.count("problem: \n") == 1
        assert "WARNING" not in resumed.first + resumed.second

    @pytest.mark.slow
    def test_it_is_one_run(self, resumed):
        assert resumed.found["runs"] == 1

    def test_every_step_comes_back_once(self, resumed):
        losses = resumed.found["scalars"]["train/loss"]
        assert losses == [[step, pytest.approx(1 / step)] for step in range(1, 7)]
        assert resumed.found["scalars"]["eval/loss"] == [[3, 0.25], [6, 0.25]]

    def test_factors_and_configuration_come_back(self, resumed):
        config = resumed.found["config"]
        assert config["precision"] == "bf16"
        assert float(config["cfg.optimizer.lr"]) == 1e-3
        assert (config["cfg.path"], config["cfg.list"]) == ("null", "[1, 2]")

    def test_the_summary_comes_back(self, resumed):
        assert resumed.found["scalars"]["summary/tokens_per_s"][-1] == [6, 12.5]
        words = resumed.found["words"]
        assert "ok" in (words.get("summary/outcome"), words.get("eke.outcome"))
        assert resumed.found.get("status", "FINISHED") == "FINISHED"

    def test_everything_lies_in_the_run_folder(self, resumed):
        assert {path.name for path in resumed.folder.iterdir()} == {resumed.option, "metrics.jsonl"}
        assert [p.name for p in resumed.home.iterdir() if not p.name.startswith(".")] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["mlflow", "trackio"])
def test_rows_that_were_lost_are_sent_by_the_next_attempt(option, tmp_path, request):
    place_store(option, tmp_path, request)
    attempt(option, tmp_path, 0, 1, 1, 2, 3, -3, 4)
    for file in (tmp_path / option).iterdir():
        file.unlink()
    place_store(option, tmp_path, request)
    attempt(option, tmp_path, 1, 0, 4, 5)
    found = read(option, tmp_path)["scalars"]
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5]
    assert found["eval/loss"] == [[3, 0.25]]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "status"), [(1, "FAILED"), (75, "KILLED")], ids=str)
def test_how_a_run_ended_is_mlflows_status(code, status, tmp_path, request):
    place_store("mlflow", tmp_path, request)
    attempt("mlflow", tmp_path, 0, code, 1)
    assert read("mlflow", tmp_path)["status"] == status


@pytest.mark.parametrize("option", OPTIONS)
def test_a_missing_package_is_named(option, make_run, monkeypatch):
    monkeypatch.setitem(sys.modules, option, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    tracker = track(make_run(settings=schema.Tracker(option=option)), rows(1))
    assert f'pip install "eke[{option}]"' in tracker.problem
    assert "1 row not mirrored" in tracker.problem


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["tensorboard", "trackio", pytest.param("mlflow", marks=pytest.mark.slow)]
)
def test_a_store_that_cannot_be_written(option, tmp_path):
    # A folder where a file belongs, or the other way round.
    name = {"tensorboard": "0123456789abcdef", "mlflow": "mlflow.db", "trackio": "eke.db"}[option]
    (tmp_path / option).mkdir()
    if option == "tensorboard":
        (tmp_path / option / name).write_text("in the way")
    else:
        (tmp_path / option / name).mkdir()
    said = attempt(option, tmp_path, 0, 0, 1, 2, 3)
    assert "rows not mirrored (metrics.jsonl has every row)" in said
    assert said.count("training goes on") == 1


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_a_full_disk_is_noticed(option, tmp_path, request):
    place_store(option, tmp_path, request)
    limit = {"tensorboard": 20_000, "mlflow": 1_000_000, "trackio": 100_000}[option]
    words = (WRITER, option, tmp_path, 0, 0, *range(1, 2000))
    done = python("-c", LIMITED.format(limit), *words)
    assert "problem: \n" not in done.stdout


def test_a_run_that_ended_before_its_first_step(make_run, monkeypatch):
    # Other tests of this process may have made Accelerate's state, as the worker does.
    monkeypatch.setattr("accelerate.state.is_initialized", lambda: False)
    tracker = build_tracker(make_run(settings=schema.Tracker(option="tensorboard")))
    tracker.finish(1)
    assert "the run ended before its first step" in tracker.problem
