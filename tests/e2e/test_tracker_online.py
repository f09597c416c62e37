"""Real trainings mirrored to a server that works, fails or is missing; then `eke sync`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import SHORT, record_of, run_folders, run_in
from support import REPO, Finished, last_wins
from unit.results.trackers.stub import Server, serving

pytestmark = pytest.mark.slow

KEY = "ab" * 20
ONLINE = last_wins(*SHORT, "tracker=wandb", "tracker.mode=online")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def call(tmp_path: Path, *words: str, **variables: str) -> Finished:
    return run_in(tmp_path, [sys.executable, *words], HOME=str(tmp_path), **variables)


def train(tmp_path: Path, *overrides: str, **variables: str) -> Finished:
    return call(tmp_path, str(REPO / "train.py"), *overrides, **variables)


def eke(tmp_path: Path, server: Server, *words: str) -> Finished:
    return call(tmp_path, "-m", "eke", *words, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)


def steps_of(server: Server, folder: Path) -> list[int]:
    return [row["_step"] for row in server.rows.get(folder.name, [])]


def test_online_run_needs_no_sync(server: Server, tmp_path: Path) -> None:
    done = train(tmp_path, *ONLINE, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    assert done.code == 0, done.text
    (folder,) = run_folders(tmp_path)
    assert not [w for w in record_of(folder)["warnings"] if "tracker" in w]
    assert steps_of(server, folder) == list(range(21))
    assert server.exit_codes == {folder.name: 0}
    server.requests.clear()
    said = eke(tmp_path, server, "sync", "runs")
    assert (said.code, "1 there already" in said.out) == (0, True), said.out
    assert [path for path in server.requests if "file_stream" in path] == []


@pytest.mark.slow
def test_offline_sweep_is_synced_and_reported(server: Server, tmp_path: Path) -> None:
    offline = last_wins(*SHORT, "tracker=wandb", "train.steps=6")
    assert train(tmp_path, "-m", *offline, "seed=0,1").code == 0
    assert server.requests == []
    (sweep,) = (tmp_path / "runs").glob("sweep-*")
    said = eke(tmp_path, server, "sync", str(sweep))
    assert said.code == 0, said.text
    folders = [folder for folder in run_folders(tmp_path) if folder != sweep]
    assert [steps_of(server, folder) for folder in folders] == [list(range(7))] * 2
    assert {run["groupName"] for run in server.runs.values()} == {sweep.name}
    said = eke(tmp_path, server, "report", str(sweep), "--quiet", "--formats=none", "--publish")
    assert (said.code, said.err) == (0, f"W&B's server: {server.url}\n")
    (view,) = server.views.values()
    (grid,) = [b["metadata"] for b in json.loads(view["spec"])["blocks"] if "metadata" in b]
    (chosen,) = grid["runSets"][0]["filters"]["filters"]
    assert (chosen["key"]["name"], chosen["value"]) == ("group", sweep.name)


def test_other_tracker_gives_no_warning(tmp_path: Path) -> None:
    """The others: tests/unit/results/trackers/test_accelerate.py."""
    done = train(tmp_path, *last_wins(*SHORT, "tracker=tensorboard", "train.steps=6"))
    assert done.code == 0, done.text
    (folder,) = run_folders(tmp_path)
    assert not [w for w in record_of(folder)["warnings"] if "tracker" in w]
    assert list((folder / "tensorboard").iterdir())
