"""TensorBoard, MLflow and Trackio: what their own readers find, and what a broken one costs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eke.config import schema
from eke.results.trackers import build_tracker

from .conftest import CHILD, child_environment, rows, track
from .stub import Server

OPTIONS = ("tensorboard", "mlflow", "trackio")


class Forks:
    """Attempts and readers in processes of their own, of accelerate_child.py."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.server = subprocess.Popen(
            [sys.executable, str(CHILD.with_name("accelerate_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )

    def call(self, name: str, *words: Any, limit: int | None = None, **environment: str) -> str:
        """What the call printed."""
        request = {"call": name, "words": words, "limit": limit, "output": str(self.output)}
        request["environment"] = child_environment(**environment)
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(request, default=str) + "\n")
        self.server.stdin.flush()
        code, said = self.server.stdout.readline(), self.output.read_text()
        assert code == "0\n", said
        return said

    def attempt(self, option: str, folder: Path, number: int, code: int, *steps: int, **more: Any):
        return self.call("attempt", option, folder, number, code, *steps, **more)

    def read(self, option: str, folder: Path) -> dict[str, Any]:
        return json.loads(self.call("read", option, folder).splitlines()[-1])


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    found = Forks(tmp_path_factory.mktemp("forks") / "output")
    yield found
    found.server.communicate()


@pytest.fixture(scope="module")
def empty_store(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database as MLflow makes it, without a run: its migrations take half a minute."""
    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    forks.call("migrate", file, MLFLOW_DISABLE_TELEMETRY="true")
    return file


def place_store(option: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """MLflow finds a database; tests/e2e/test_tracker_online.py has it make its own."""
    if option == "mlflow":
        shutil.copy(request.getfixturevalue("empty_store"), folder.parent)


@pytest.mark.parametrize(
    "option",
    ["tensorboard", *(pytest.param(o, marks=pytest.mark.slow) for o in ("mlflow", "trackio"))],
)
def test_two_attempts_form_one_complete_run(option, forks, tmp_path, request):
    """Five steps and a checkpoint at the third; then from there to the sixth."""
    folder = tmp_path / "run"
    folder.mkdir()
    place_store(option, folder, request)
    server = Server()  # bound and never served: whoever connects would be noticed as a hang
    outside = {"HOME": str(tmp_path), "MLFLOW_RUN_ID": "another", "TRACKIO_SPACE_ID": "me/space"}
    outside |= dict.fromkeys(("http_proxy", "https_proxy"), server.url)
    said = forks.attempt(option, folder, 0, 75, 1, 2, 3, -3, 4, 5, **outside)
    if option == "mlflow":
        assert forks.read(option, folder)["status"] == "KILLED"
    said += forks.attempt(option, folder, 1, 0, 4, 5, 6, -6, **outside)
    server.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.socket.accept()
    server.server_close()
    assert said.count("problem: \n") == 2
    assert "WARNING" not in said
    found = forks.read(option, folder)
    assert found["runs"] == 1
    scalars, config, words = found["scalars"], found["config"], found["words"]
    assert scalars["train/loss"] == [[step, pytest.approx(1 / step)] for step in range(1, 7)]
    assert scalars["eval/loss"] == [[3, 0.25], [6, 0.25]]
    assert config["precision"] == "bf16"
    if option == "tensorboard":
        assert config == {"precision": "bf16", "optimizer.lr": 1e-3}
        assert found["metrics"] == ["summary/tokens_per_s"]
    else:
        assert float(config["cfg.optimizer.lr"]) == 1e-3
        assert (config["cfg.path"], config["cfg.list"]) == ("null", "[1, 2]")
    assert "attempt" not in scalars
    assert scalars["summary/tokens_per_s"][-1] == [6, 12.5]
    assert "ok" in (words.get("summary/outcome"), words.get("eke.outcome"))
    assert found.get("status", "FINISHED") == "FINISHED"
    shared = {"mlflow": {"mlflow.db"}, "trackio": {"trackio"}}.get(option, set())
    own = set() if option == "trackio" else {option}
    assert {path.name for path in folder.iterdir()} == {*own, "metrics.jsonl"}
    assert {p.name for p in tmp_path.iterdir() if p.name[0] != "."} == {"run", *shared}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["mlflow", "trackio"])
def test_lost_rows_are_sent_by_the_next_attempt(option, forks, tmp_path, request):
    folder = tmp_path / "run"
    folder.mkdir()
    place_store(option, folder, request)
    forks.attempt(option, folder, 0, 1, 1, 2, 3, -3, 4)
    for file in (
        (tmp_path / "trackio").iterdir() if option == "trackio" else [*tmp_path.glob("mlflow*")]
    ):
        file.unlink()
    place_store(option, folder, request)
    forks.attempt(option, folder, 1, 1, 4, 5)
    found = forks.read(option, folder)
    assert [step for step, _ in found["scalars"]["train/loss"]] == [1, 2, 3, 4, 5]
    assert found["scalars"]["eval/loss"] == [[3, 0.25]]
    assert found.get("status", "FAILED") == "FAILED"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["mlflow", "trackio"])
def test_runs_of_a_folder_share_a_store(option, forks, tmp_path, request):
    names = ("0" * 16, "f" * 16)
    for name in names:
        (tmp_path / name).mkdir()
    place_store(option, tmp_path / names[0], request)
    for name in names:
        forks.attempt(option, tmp_path / name, 0, 0, 1, 2)
    assert forks.read(option, tmp_path / names[0])["runs"] == 2


@pytest.mark.parametrize("option", OPTIONS)
def test_missing_package_is_named(option, make_run, monkeypatch):
    monkeypatch.setitem(sys.modules, option, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    tracker = track(make_run(settings=schema.Tracker(option=option)), rows(1))
    assert f'pip install "eke[{option}]"' in tracker.problem
    assert "1 row not mirrored" in tracker.problem


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_unwritable_store_is_reported(option, forks, tmp_path):
    # A folder where a file belongs, or the other way round.
    folder = tmp_path / "run"
    (folder / "tensorboard").mkdir(parents=True)
    if option == "tensorboard":
        (folder / option / "0123456789abcdef").write_text("in the way")
    else:
        place = {"mlflow": "mlflow.db", "trackio": "trackio/eke.db"}[option]
        (tmp_path / place).mkdir(parents=True)
    said = forks.attempt(option, folder, 0, 0, 1, 2, 3)
    assert "rows not mirrored (metrics.jsonl has every row)" in said
    assert said.count("training goes on") == 1


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_full_disk_is_reported(option, forks, tmp_path, request):
    folder = tmp_path / "run"
    folder.mkdir()
    place_store(option, folder, request)
    limit = {"tensorboard": 20_000, "mlflow": 1_000_000, "trackio": 100_000}[option]
    said = forks.attempt(option, folder, 0, 0, *range(1, 2000), limit=limit)
    assert "problem: " in said
    assert "problem: \n" not in said


def test_run_that_ended_before_its_first_step_is_reported(make_run, monkeypatch):
    # Other tests of this process may have made Accelerate's state, as the worker does.
    monkeypatch.setattr("accelerate.state.is_initialized", lambda: False)
    tracker = build_tracker(make_run(settings=schema.Tracker(option="tensorboard")))
    tracker.finish(1)
    assert "the run ended before its first step" in tracker.problem
