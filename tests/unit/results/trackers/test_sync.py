"""`eke sync` with the real SDK against a loopback server; the server's rows are the judge."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S

from eke.cli import main
from eke.cli.sync import result_table
from eke.common.files import read_json
from eke.common.paths import RunPaths
from eke.launch.processes.run_dir import claim
from eke.plan.planner import write_plan
from eke.plan.record import metrics
from eke.results.trackers.sync import Report, SyncOutcome
from eke.results.trackers.sync.account import sole_sender

from .conftest import RUN_ID, child_environment, find_wandb_files, make_folder, rows, wait_until
from .stub import Server

OTHER = "fedcba9876543210"


def steps_of(server: Server, run_id: str = RUN_ID) -> list[int]:
    return [row["train/global_step"] for row in server.rows.get(run_id, [])]


def test_a_run_arrives_whole(online, tmp_path, capsys):
    evaluation = {"train/global_step": 3, "eval/loss": 0.25, "attempt": 0}
    paths = make_folder(tmp_path, rows(1, 2, 3), [evaluation])
    assert main(["sync", str(paths.folder)]) == 0
    assert [(r["_step"], r["train/loss"]) for r in online.rows[RUN_ID]] == [
        (1, 1.0), (2, 0.5), (3, 1 / 3)
    ]  # fmt: skip
    assert online.rows[RUN_ID][-1]["eval/loss"] == 0.25
    config = json.loads(online.runs[RUN_ID]["config"])
    assert config["precision"]["value"] == "bf16"
    assert config["cfg"]["value"]["seed"] == 7
    assert online.runs[RUN_ID]["groupName"] == "g"
    assert online.runs[RUN_ID]["displayName"] == "precision=bf16"
    assert online.runs[RUN_ID]["tags"] == ["cpu"]
    assert online.runs[RUN_ID]["notes"] == "python train.py"
    assert online.summaries[RUN_ID]["eval_final"] == 0.1 + 0.2
    assert online.exit_codes == {RUN_ID: 0}
    out = capsys.readouterr().out
    assert f"{RUN_ID}  3     sent" in out
    assert f"/me/eke/runs/{RUN_ID}" in out
    assert find_wandb_files(paths.folder) == []


def test_the_same_command_again_sends_nothing(online, tmp_path):
    paths = make_folder(tmp_path)
    assert main(["sync", str(paths.folder)]) == 0
    (receipt,) = read_json(paths.receipt)["sent"]
    assert (receipt["num_rows"], receipt["is_verified"], receipt["entity"]) == (3, True, "me")
    online.requests.clear()
    assert main(["sync", str(paths.folder)]) == 0
    assert {path for path in online.requests if "graphql" not in path} == set()
    assert "UpsertBucket" not in online.operations[online.operations.index("Run") + 3 :]


def test_without_a_receipt_the_server_is_asked(online, tmp_path, capsys):
    paths = make_folder(tmp_path)
    main(["sync", str(paths.folder)])
    paths.receipt.unlink()
    online.requests.clear()
    assert main(["sync", str(paths.folder)]) == 0
    assert [path for path in online.requests if "file_stream" in path] == []
    assert "there already" in capsys.readouterr().out
    assert paths.receipt.exists()


def test_again_sends_the_same_rows_to_the_same_places(online, tmp_path):
    paths = make_folder(tmp_path)
    main(["sync", str(paths.folder)])
    online.requests.clear()
    assert main(["sync", "--again", str(paths.folder)]) == 0
    assert [path for path in online.requests if "file_stream" in path] != []
    assert steps_of(online) == [1, 2, 3]


def test_a_run_that_went_on_is_sent_again(online, tmp_path):
    paths = make_folder(tmp_path)
    main(["sync", str(paths.folder)])
    metrics.append_rows(paths.metrics, rows(3, 4, attempt=1))
    assert main(["sync", str(paths.folder)]) == 0
    assert steps_of(online) == [1, 2, 3, 4]
    assert [row["attempt"] for row in online.rows[RUN_ID]] == [0, 0, 1, 1]


def test_the_missing_part_of_an_online_run(online, tmp_path):
    # What an online run left that lost its server after the second row.
    paths = make_folder(tmp_path, rows(1, 2, 3, 4))
    online.runs[RUN_ID] = {"name": RUN_ID}
    online.rows[RUN_ID] = [{"train/global_step": step, "_step": step} for step in (1, 2)]
    assert main(["sync", str(paths.folder)]) == 0
    assert steps_of(online) == [1, 2, 3, 4]


def test_torn_and_foreign_lines_are_left_out_and_named(online, tmp_path, capsys):
    paths = make_folder(tmp_path)
    with open(paths.metrics, "a") as file:
        file.write('{"train/global_step": "4"}\n[]\n\0\xff\n{"train/global_step": 5, "train/lo')
    assert main(["sync", str(paths.folder)]) == 0
    assert steps_of(online) == [1, 2, 3]
    assert "4 unreadable lines skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("outcome", "code"), [("oom", 1), ("crashed", 1), ("preempted", 75), ("diverged", 1)]
)
def test_a_run_that_did_not_end_well_is_sent_with_its_exit_code(outcome, code, online, tmp_path):
    nan = [{"train/global_step": 3, "train/loss": float("nan"), "attempt": 0}]
    make_folder(tmp_path, rows(1, 2), nan, outcome=outcome, exit_code=code)
    assert main(["sync", str(tmp_path)]) == 0
    assert online.exit_codes == {RUN_ID: code}
    assert online.summaries[RUN_ID]["outcome"] == outcome
    assert str(online.rows[RUN_ID][-1]["train/loss"]).lower() == "nan"


def test_a_run_without_rows_is_sent_for_its_outcome(online, tmp_path):
    paths = make_folder(tmp_path, outcome="oom", exit_code=1)
    paths.metrics.unlink()
    assert main(["sync", str(tmp_path)]) == 0
    assert (steps_of(online), online.exit_codes) == ([], {RUN_ID: 1})


def test_project_and_entity_of_the_command_line(online, tmp_path):
    paths = make_folder(tmp_path)
    assert main(["sync", str(tmp_path), "--project", "papers", "--entity", "team"]) == 0
    assert any("/files/team/papers/" in path for path in online.requests)
    (receipt,) = read_json(paths.receipt)["sent"]
    assert (receipt["entity"], receipt["project"]) == ("team", "papers")
    online.runs.clear()
    assert main(["sync", str(tmp_path)]) == 0  # another place: a receipt there says nothing here
    assert any("/files/me/eke/" in path for path in online.requests)
    assert len(read_json(paths.receipt)["sent"]) == 2


def test_a_dry_run_needs_no_account_and_asks_nobody(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    paths = make_folder(tmp_path)
    assert main(["sync", "--dry-run", str(tmp_path)]) == 0
    assert "would be sent" in capsys.readouterr().out
    assert server.requests == []
    assert not paths.receipt.exists()


class TestManyFolders:
    """One command over a folder with everything that a folder of runs can hold."""

    @pytest.fixture
    def runs(self, tmp_path: Path) -> Path:
        runs = tmp_path / "runs"
        make_folder(runs)
        make_folder(runs, name=OTHER)
        untracked = make_folder(runs, name="a" * 16)
        change_record(untracked, config={"tracker": {"option": "none"}})
        (make_folder(runs, name="b" * 16).record).write_text("{")
        (runs / "notes").mkdir()
        (runs / "sweep-0123").mkdir()
        (runs / "sweep-0123" / "sweep.json").write_text(
            json.dumps({"cells": [{"folder": f"runs/{OTHER}"}, {"folder": ""}]})
        )
        return runs

    def test_each_is_named_and_the_good_ones_arrive(self, online, runs, capsys):
        assert main(["sync", str(runs)]) == 1
        out = capsys.readouterr().out
        assert set(online.rows) == {RUN_ID, OTHER}
        assert "not a readable record" in out
        assert "tracker=none; name the folder itself to send it" in out
        assert "no record.json and no plan.json: not a run" in out
        assert out.rstrip().endswith("2 sent, 1 skipped, 1 not a run, 1 failed")

    def test_a_sweep_is_the_runs_beside_it(self, online, runs):
        assert main(["sync", str(runs / "sweep-0123")]) == 0
        assert set(online.rows) == {OTHER}

    def test_what_is_not_tracked_is_sent_when_it_is_named(self, online, runs):
        assert main(["sync", str(runs / ("a" * 16))]) == 0
        assert set(online.rows) == {"a" * 16}

    def test_a_run_that_is_given_twice_is_sent_once(self, online, runs, capsys):
        assert main(["sync", str(runs / RUN_ID), str(runs / RUN_ID / "record.json")]) == 0
        assert "1 sent" in capsys.readouterr().out

    def test_a_copy_of_a_run_is_not_sent_over_it(self, online, runs, capsys):
        shutil.copytree(runs / RUN_ID, runs / "copy")
        assert main(["sync", str(runs / RUN_ID), str(runs / "copy")]) == 1
        assert "the same run as" in capsys.readouterr().out


def change_record(paths: RunPaths, **changes: object) -> None:
    paths.record.write_text(json.dumps({**read_json(paths.record), **changes}))


def test_a_live_run_is_left_alone(online, tmp_path, capsys):
    paths = make_folder(tmp_path)
    with claim(paths):
        assert main(["sync", str(paths.folder)]) == 0
    assert "running" in capsys.readouterr().out
    assert online.rows == {}
    assert not paths.receipt.exists()
    assert main(["sync", str(paths.folder)]) == 0
    assert steps_of(online) == [1, 2, 3]


def test_a_run_that_another_sync_sends_is_left_to_it(online, tmp_path, capsys):
    paths = make_folder(tmp_path)
    with sole_sender(paths) as is_sole:
        assert is_sole
        assert main(["sync", str(paths.folder)]) == 1
    assert "another eke sync is sending it" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written(online, tmp_path, capsys, monkeypatch):
    # Permissions do not bind root, so the system's answer is replaced.
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    paths = make_folder(tmp_path)
    monkeypatch.setattr("eke.results.trackers.sync.account.write_json", refuse)
    monkeypatch.setattr("eke.results.trackers.sync.account.open_file", refuse)
    before = sorted(path.name for path in paths.folder.iterdir())
    assert main(["sync", str(paths.folder)]) == 0
    assert "no receipt kept (Read-only file system)" in capsys.readouterr().out
    assert sorted(path.name for path in paths.folder.iterdir()) == before
    assert main(["sync", str(paths.folder)]) == 0
    assert "there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        pytest.param("nowhere", "there is no such folder", id="missing"),
        pytest.param("empty", "holds no run", id="empty"),
        pytest.param("sweep", "is not a sweep's", id="broken sweep"),
        pytest.param("file.txt", "holds no run", id="file"),
    ],
)
def test_arguments_that_lead_to_no_run(argument, why, online, tmp_path, capsys):
    place = tmp_path / "here"
    good = make_folder(tmp_path)
    (place / "empty").mkdir(parents=True)
    (place / "sweep").mkdir()
    (place / "sweep" / "sweep.json").write_text("[1, 2]")
    (place / "file.txt").write_text("text")
    assert main(["sync", str(good.folder), str(place / argument)]) == 2
    error = capsys.readouterr().err
    assert f"DIR = {place / argument}\n" in error
    assert why in error
    assert "-> eke sync runs" in error
    assert online.requests == []


def test_without_a_key_nothing_is_sent(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path)
    assert main(["sync", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no API key for W&B -> wandb login" in error
    assert server.requests == []


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_the_server_refuses(status, online, tmp_path, capsys):
    make_folder(tmp_path)
    online.refusals = {"Viewer": status}
    assert main(["sync", str(tmp_path)]) == 2
    assert "-> wandb login" in capsys.readouterr().err
    assert online.rows == {}


def sync_apart(folder: Path) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, with little patience: wandb-core may get killed."""
    command = [sys.executable, "-m", "eke", "sync", "--timeout", "3", str(folder)]
    return subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=60
    )


@pytest.mark.slow
class TestServersThatFail:
    """Never a hang, never success; the same command later finishes."""

    @pytest.fixture
    def paths(self, tmp_path: Path) -> RunPaths:
        return make_folder(tmp_path)

    @pytest.mark.parametrize(
        ("trouble", "said"),
        [
            *(
                ({"refusals": {what: status}}, "1 failed")
                for what in ("file_stream", "UpsertBucket")
                for status in (404, 503)
            ),
            ({"swallows_rows": True}, "0 of 3 rows arrived"),
            ({"rows_until_silent": 1}, "1 failed"),
            ({"silent_about": "Viewer"}, "did not answer within 3 s"),
        ],
        ids=str,
    )
    def test_it_refuses_forgets_or_falls_silent(self, trouble, said, online, paths):
        for name, value in trouble.items():
            setattr(online, name, value)
        done = sync_apart(paths.folder)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)
        assert said in done.stdout + done.stderr
        assert not paths.receipt.exists()
        online.refusals, online.swallows_rows, online.rows_until_silent = {}, False, None
        online.silent_about = None
        online.answers.set()
        assert main(["sync", str(paths.folder)]) == 0
        assert steps_of(online) == [1, 2, 3]

    def test_it_cannot_be_asked_back(self, online, paths):
        # An account that may write and not read: the client's acknowledgements have to do.
        online.refusals = {"Run": 404}
        done = sync_apart(paths.folder)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False)
        assert "could not be read back" in done.stdout
        assert steps_of(online) == [1, 2, 3]
        (receipt,) = read_json(paths.receipt)["sent"]
        assert receipt["is_verified"] is False


@pytest.mark.slow
def test_nobody_listens(server, online, tmp_path):
    server.server_close()
    make_folder(tmp_path)
    done = sync_apart(tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert done.stderr.strip() != ""


def test_a_run_whose_processes_were_all_killed_is_sent_from_its_plan(online, tmp_path, make_plan):
    plan = make_plan("train.steps=20", "tracker=wandb")
    paths = make_folder(tmp_path, rows(1, 2), name=plan.run_id)
    paths.record.unlink()
    write_plan(paths, plan)
    assert main(["sync", str(tmp_path)]) == 0
    assert steps_of(online, plan.run_id) == [1, 2]
    assert online.summaries[plan.run_id]["outcome"] == "crashed"


@pytest.mark.slow
def test_interrupting_keeps_what_was_sent_and_ends_at_once(online, tmp_path):
    first, second = make_folder(tmp_path), make_folder(tmp_path, name=OTHER)
    online.silent_about = OTHER
    command = [sys.executable, "-m", "eke", "sync", str(tmp_path)]
    child = subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: not online.answers.is_set(), limit_s=PATIENCE_S)
    assert first.receipt.exists()
    child.send_signal(signal.SIGINT)
    out, error = child.communicate(timeout=120)
    assert child.returncode == 75
    assert "the same command sends the rest" in error
    assert "Traceback" not in error
    assert "1 sent" in out
    assert not second.receipt.exists()
    online.silent_about = None
    online.answers.set()
    assert main(["sync", str(tmp_path)]) == 0
    assert (steps_of(online), steps_of(online, OTHER)) == ([1, 2, 3], [1, 2, 3])


def test_a_reason_of_many_runs_is_told_once(tmp_path):
    reports = [
        Report(tmp_path / str(n), SyncOutcome.skipped, note="tracker=none") for n in range(3)
    ]
    text = result_table(reports)
    assert text.count("tracker=none") == 1
    assert f"skipped: {tmp_path / '0'} and 2 others" in text
