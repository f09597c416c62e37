"""`eke sync` with the real SDK against a loopback server; the server's rows are the judge."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eke.cli import main
from eke.cli.sync import ending
from eke.common.errors import ConfigError
from eke.common.files import read_json
from eke.common.paths import RunPaths
from eke.launch.processes.run_dir import lock_run_folder
from eke.plan.planner import write_plan
from eke.plan.record import metrics
from eke.results.trackers.sync import Report, SyncOutcome, find_runs
from eke.results.trackers.sync.account import Receipt, add_receipt, lock_for_sync, read_content

from .conftest import RUN_ID, child_environment, find_wandb_files, make_folder, rows, wait_until
from .stub import Server

OTHER = "fedcba9876543210"


def steps_of(server: Server, run_id: str = RUN_ID) -> list[int]:
    return [row["train/global_step"] for row in server.rows.get(run_id, [])]


def arrived(server: Server, paths: RunPaths) -> None:
    """The server has all of a run, as if it had been sent."""
    content = read_content(paths, None, None)
    server.runs[RUN_ID] = {"name": RUN_ID}
    server.rows[RUN_ID] = [{**row, "_step": row["train/global_step"]} for row in content.rows]
    server.summaries[RUN_ID] = dict(content.summary)
    server.exit_codes[RUN_ID] = content.exit_code


def keep_receipt(server: Server, paths: RunPaths, project: str) -> None:
    digest = read_content(paths, None, None).digest
    add_receipt(paths, Receipt(server.url, "me", project, digest, "url"))


def test_sync_again_sends_all_rows_of_an_existing_run(online, tmp_path, capsys):
    evaluation = {"train/global_step": 3, "eval/loss": 0.25, "attempt": 0}
    paths = make_folder(tmp_path, rows(1, 2, 3), [evaluation])
    with open(paths.metrics, "a") as file:
        file.write('{"train/global_step": "4"}\n[]\n\0\xff\n{"train/global_step": 5, "train/lo')
    arrived(online, paths)
    keep_receipt(online, paths, "eke")
    online.rows[RUN_ID][0]["train/loss"] = 99.0
    assert main(["sync", "--again", str(paths.folder)]) == 0
    assert [(r["_step"], r["train/loss"]) for r in online.rows[RUN_ID]] == [
        (1, 1.0), (2, 0.5), (3, 1 / 3)
    ]  # fmt: skip
    assert online.rows[RUN_ID][-1]["eval/loss"] == 0.25
    run = online.runs[RUN_ID]
    config = json.loads(run["config"])
    assert (config["precision"]["value"], config["cfg"]["value"]["seed"]) == ("bf16", 7)
    assert (run["groupName"], run["displayName"]) == ("g", "precision=bf16")
    assert (run["tags"], run["notes"]) == (["cpu"], "python train.py")
    assert online.summaries[RUN_ID]["eval_final"] == 0.1 + 0.2
    assert online.exit_codes == {RUN_ID: 0}
    out = capsys.readouterr().out
    assert f"{RUN_ID}  3 rows" in out
    assert out.count(RUN_ID) == 3  # its line, and its address there and in the reason
    assert f"/me/eke/runs/{RUN_ID}" in out
    assert "4 unreadable lines skipped" in out
    assert find_wandb_files(paths.folder) == []


def uploads(server: Server) -> list[str]:
    return [path for path in server.requests if "file_stream" in path]


def test_sync_sends_a_run_only_if_it_advanced(online, tmp_path, capsys):
    paths = make_folder(tmp_path)
    arrived(online, paths)
    keep_receipt(online, paths, "other")  # another place: it says nothing of this one
    assert main(["sync", str(paths.folder)]) == 0
    assert "there already" in capsys.readouterr().out
    assert "Run" in online.operations
    _, receipt = read_json(paths.receipt)["sent"]
    assert (receipt["entity"], receipt["project"]) == ("me", "eke")
    online.operations.clear()
    assert main(["sync", str(paths.folder)]) == 0
    assert "Run" not in online.operations, "with a receipt the server is not asked"
    assert uploads(online) == []
    metrics.append_rows(paths.metrics, rows(3, 4, attempt=1))
    assert main(["sync", str(paths.folder)]) == 0
    assert steps_of(online) == [1, 2, 3, 4]
    assert not any("attempt" in row for row in online.rows[RUN_ID])


def test_unwritable_folder_keeps_no_receipt(online, tmp_path, capsys, monkeypatch):
    # Permissions do not bind root, so the system's answer is replaced.
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    paths = make_folder(tmp_path)
    arrived(online, paths)
    monkeypatch.setattr("eke.results.trackers.sync.account.write_json", refuse)
    monkeypatch.setattr("eke.results.trackers.sync.account.open_file", refuse)
    before = sorted(path.name for path in paths.folder.iterdir())
    assert main(["sync", str(paths.folder)]) == 0
    assert "(Read-only file system)" in capsys.readouterr().out
    assert sorted(path.name for path in paths.folder.iterdir()) == before


def test_failed_runs_are_sent_with_exit_codes(online, tmp_path, capsys):
    """The second one lost its server after two rows; another sync is sending the third."""
    nan = [{"train/global_step": 3, "train/loss": float("nan"), "attempt": 0}]
    make_folder(tmp_path, rows(1, 2), nan, outcome="diverged", exit_code=1)
    make_folder(tmp_path, name=OTHER, outcome="preempted", exit_code=75)
    online.runs[OTHER] = {"name": OTHER}
    online.rows[OTHER] = [{"train/global_step": step, "_step": step} for step in (1, 2)]
    with lock_for_sync(make_folder(tmp_path, name="a" * 16)) as is_sole:
        assert is_sole
        assert main(["sync", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "another eke sync is sending it" in out
    assert "2 sent" in out
    assert online.exit_codes == {RUN_ID: 1, OTHER: 75}
    assert online.summaries[RUN_ID]["outcome"] == "diverged"
    assert str(online.rows[RUN_ID][-1]["train/loss"]).lower() == "nan"
    assert steps_of(online, OTHER) == [1, 2, 3]


def test_run_without_rows_is_sent_with_its_outcome(tmp_path):
    paths = make_folder(tmp_path, outcome="oom", exit_code=1)
    paths.metrics.unlink()
    content = read_content(paths, None, None)
    assert (content.steps, content.exit_code, content.summary["outcome"]) == ([], 1, "oom")


def test_killed_run_is_sent_from_its_plan(tmp_path, make_plan):
    plan = make_plan("train.steps=20", "tracker=wandb")
    paths = make_folder(tmp_path, rows(1, 2), name=plan.run_id)
    paths.record.unlink()
    write_plan(paths, plan)
    content = read_content(paths, None, None)
    assert (content.run.run_id, content.steps) == (plan.run_id, [1, 2])
    assert content.summary["outcome"] == "crashed"


def test_sync_dry_run_needs_no_account(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    paths = make_folder(tmp_path)
    typed = ["sync", "--dry-run", str(tmp_path)]
    assert main([*typed, "--project", "papers", "--entity", "team"]) == 0
    out = capsys.readouterr().out
    assert "would be sent" in out
    assert f"team/papers/{RUN_ID}" in out
    with lock_run_folder(paths):
        assert main(typed) == 0
    out = capsys.readouterr().out
    assert "running" in out
    assert "would be sent" not in out
    assert server.requests == []
    assert not paths.receipt.exists()


class TestManyFolders:
    """One command over a folder with everything that a folder of runs can hold."""

    @pytest.fixture
    def told(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        runs = tmp_path / "runs"
        make_folder(runs)
        make_folder(runs, name=OTHER)
        change_record(make_folder(runs, name="a" * 16), config={"tracker": {"option": "none"}})
        (make_folder(runs, name="b" * 16).record).write_text("{")
        (runs / "notes").mkdir()
        (runs / "sweep-0123").mkdir()
        cells = [{"folder": f"runs/{OTHER}"}, {"folder": ""}]
        (runs / "sweep-0123" / "sweep.json").write_text(json.dumps({"cells": cells}))

        def dry_run(*names: str) -> tuple[int, str]:
            code = main(["sync", "--dry-run", *(str(runs / name) for name in names)])
            return code, capsys.readouterr().out

        return dry_run

    def test_every_skipped_run_has_a_reason(self, told):
        code, out = told("")
        assert code == 1
        assert "not a readable record" in out
        assert "tracker=none; name the folder itself to send it" in out
        assert "no record.json and no plan.json: not a run" in out
        assert out.rstrip().endswith("2 would be sent, 1 skipped, 1 not a run, 1 failed")

    @pytest.mark.parametrize(
        ("names", "found"),
        [
            pytest.param(["sweep-0123"], OTHER, id="a sweep is the runs beside it"),
            pytest.param(["a" * 16], "a" * 16, id="named, though not tracked"),
            pytest.param([RUN_ID, f"{RUN_ID}/record.json"], RUN_ID, id="given twice"),
        ],
    )
    def test_selected_runs_are_sent(self, names, found, told):
        code, out = told(*names)
        assert code == 0
        assert [line for line in out.splitlines() if found in line] == out.splitlines()[:1]
        assert out.rstrip().endswith("\n1 would be sent")

    def test_copied_run_does_not_overwrite_the_original(self, told, tmp_path):
        shutil.copytree(tmp_path / "runs" / RUN_ID, tmp_path / "runs" / "copy")
        code, out = told(RUN_ID, "copy")
        assert code == 1
        assert "the same run as" in out


def change_record(paths: RunPaths, **changes: object) -> None:
    paths.record.write_text(json.dumps({**read_json(paths.record), **changes}))


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        pytest.param("nowhere", "no such folder", id="missing"),
        pytest.param("empty", "no readable run", id="empty"),
        pytest.param("sweep", "is not the file of a sweep", id="broken sweep"),
        pytest.param("file.txt", "no readable run", id="file"),
    ],
)
def test_invalid_arguments_are_rejected(argument, why, online, tmp_path, capsys):
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


def test_fix_of_a_denied_folder_grants_access(tmp_path, monkeypatch):
    def deny(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", deny)
    with pytest.raises(ConfigError) as raised:
        find_runs([str(tmp_path)])
    assert raised.value.problems[0].remark.startswith(f"chmod -R u+rwX {tmp_path}")


def test_sync_without_a_key_sends_no_data(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path)
    assert main(["sync", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "-> wandb login" in error
    assert server.requests == []


@pytest.mark.parametrize("status", [401, 403])
def test_rejected_api_key_is_reported(status, online, tmp_path, capsys):
    make_folder(tmp_path)
    online.refusals = {"Viewer": status}
    assert main(["sync", str(tmp_path)]) == 2
    assert "-> wandb login" in capsys.readouterr().err
    assert online.rows == {}


SYNCS = """
import contextlib, io, json, os, sys
from eke.cli import main
import wandb.apis.public  # slow: no part of what a server may take to answer
for line in sys.stdin:
    request, out = json.loads(line), io.StringIO()
    os.environ.update(request["environment"])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(request["command"])
    print(json.dumps([code, out.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[..., tuple[int, str]]]:
    """`eke sync` in a process whose wandb-core may get killed: exit code and what was said."""
    child = subprocess.Popen(
        [sys.executable, "-c", SYNCS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )

    def sync(server: Server, *words: str) -> tuple[int, str]:
        assert child.stdin is not None
        assert child.stdout is not None
        environment = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "ab" * 20}
        request = {"command": ["sync", *words], "environment": environment}
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        code, said = json.loads(child.stdout.readline())
        return code, said

    yield sync
    _, error = child.communicate(timeout=60)
    assert (child.returncode, "Traceback" in error) == (0, False), error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"refusals": {"file_stream": 404}}, "1 failed"),
        ({"refusals": {"UpsertBucket": 503}}, "1 failed"),
        ({"swallows_rows": True}, "0 of 3 rows arrived"),
        ({"rows_until_silent": 1}, "1 failed"),
        ({"silent_about": "Viewer"}, "did not answer within 3 s"),
    ],
    ids=str,
)
def test_sync_recovers_from_failing_servers(trouble, said, server, apart, tmp_path):
    """Never a hang, never success; the same command later finishes."""
    paths = make_folder(tmp_path)
    for name, value in trouble.items():
        setattr(server, name, value)
    code, told = apart(server, "--timeout", "3", str(paths.folder))
    assert (code, "Traceback" in told) == (1, False)
    assert said in told
    assert not paths.receipt.exists()
    server.refusals, server.swallows_rows, server.rows_until_silent = {}, False, None
    server.silent_about = None
    server.answers.set()
    assert apart(server, str(paths.folder))[0] == 0
    assert steps_of(server) == [1, 2, 3]


@pytest.mark.slow
def test_sync_without_read_access_still_sends(online, tmp_path, capsys):
    # An account that may write and not read: the client's acknowledgements have to do.
    paths = make_folder(tmp_path)
    online.refusals = {"Run": 404}
    assert main(["sync", str(paths.folder)]) == 0
    assert "could not be read back" in capsys.readouterr().out
    assert steps_of(online) == [1, 2, 3]
    assert paths.receipt.exists()


@pytest.mark.slow
def test_sync_to_an_unreachable_server_fails(server, online, tmp_path):
    server.server_close()
    make_folder(tmp_path)
    command = [sys.executable, "-m", "eke", "sync", "--timeout", "3", str(tmp_path)]
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert done.stderr.strip() != ""


@pytest.mark.slow
def test_interrupted_sync_keeps_finished_uploads(online, tmp_path):
    first, second = make_folder(tmp_path), make_folder(tmp_path, name=OTHER)
    online.silent_about = OTHER
    command = [sys.executable, "-m", "eke", "sync", str(tmp_path)]
    child = subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: not online.answers.is_set())
    assert first.receipt.exists()
    child.send_signal(signal.SIGINT)
    out, error = child.communicate(timeout=120)
    assert child.returncode == 75
    assert "Repeat the command to send the rest" in error
    assert "Traceback" not in error
    assert "1 sent" in out
    assert not second.receipt.exists()
    online.silent_about = None
    online.answers.set()
    assert main(["sync", str(tmp_path)]) == 0
    assert (steps_of(online), steps_of(online, OTHER)) == ([1, 2, 3], [1, 2, 3])


def test_shared_skip_reason_is_printed_once(tmp_path):
    reports = [
        Report(tmp_path / str(n), SyncOutcome.skipped, note="tracker=none") for n in range(3)
    ]
    text = ending(reports)
    assert text.count("tracker=none") == 1
    assert f"skipped: {tmp_path / '0'} and 2 others" in text
