"""`eke status|logs`: what they print of runs, and how often they ask."""

import json
import subprocess
import sys

import pytest
from support import environment

from eke import cli
from eke.cli import run_commands
from eke.launch.processes.runs_table import RunStatus
from eke.launch.slurm.submission_file import JobEntry, write_ticket

# --- status ---------------------------------------------------------------------------------------


def test_status_table_shows_differing_overrides(make_run, runs, capsys) -> None:
    make_run("1", "ok")
    make_run("2")
    assert cli.main(["status", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["runs: 1 ok, 1 not started", "shared: optimizer=sgd"]
    assert lines[2].split() == ["run", "seed", "state", "step"]
    assert lines[3].split() == ["1", "1", "ok", "7/300"]
    assert lines[4].split() == ["2", "2", "not", "started", "0/20"]
    assert "eke logs runs" in lines[-1]
    assert cli.main(["status", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["state"], found["step"], found["loss"]) == ("ok", 7, None)
    assert found["folder"] == str(runs / "1")


def test_rejected_run_is_listed_by_its_overrides(runs, capsys) -> None:
    folder = runs / "sweep-1"
    folder.mkdir(parents=True)
    more = {"run_id": "", "folder": "", "outcome": "refused", "reason": "too large"}
    cells = [{"overrides": ["a=1", f"b={n}"], **more} for n in (1, 2)]
    (folder / "sweep.json").write_text(json.dumps({"cells": cells}))
    assert cli.main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["1"]
    assert lines[6:8] == ["  refused  b=1 and 1 other", "    too large"]


def test_ids_are_cut_where_unique_and_found_by_their_beginning(make_run, capsys) -> None:
    names = ("18468d6c11112222", "18468d6c33334444", "9dfebed7d5fce6b0")
    for name in names:
        make_run(name, "ok")
    assert cli.main(["status", "runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:6]] == [*names[:2], names[2][:8]]
    assert cli.main(["status", "9dfe"]) == 0
    assert capsys.readouterr().out.startswith(f"runs/{names[2]}: 1 ok\n")
    assert cli.main(["status", "1846"]) == 2
    assert all(name in capsys.readouterr().err for name in names[:1])


def test_quiet_status_counts_the_runs(make_run, capsys) -> None:
    make_run("1", "ok")
    make_run("2", "oom")
    assert cli.main(["status", "runs", "-q"]) == 0
    assert capsys.readouterr().out == "runs: 1 oom, 1 ok\n"


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_folder_without_runs_is_an_error(command, tmp_path, capsys) -> None:
    assert cli.main([command, str(tmp_path)]) == 2
    assert "contains no readable run" in capsys.readouterr().err


# --- logs -----------------------------------------------------------------------------------------

LOG = "".join(f"line {n}\n" for n in range(30))


@pytest.mark.parametrize(("options", "first"), [([], 10), (["-n", "0"], 0)])
def test_logs_shows_the_end_of_one_log(options, first, make_run, capsys) -> None:
    paths = make_run("1", "ok", LOG)
    assert cli.main(["logs", str(paths.folder), *options]) == 0
    assert capsys.readouterr().out.splitlines() == [f"line {n}" for n in range(first, 30)]


def test_logs_as_json_have_the_lines_of_each_log(make_run, capsys) -> None:
    paths = make_run("1", "ok", LOG)
    assert cli.main(["logs", "runs/1", "-n", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["log"]) == (
        "ok",
        str(paths.log.relative_to(paths.log.parents[2])),
    )
    assert found["lines"] == ["line 28", "line 29"]


def test_logs_shows_failed_runs_of_several(make_run, runs, capsys) -> None:
    make_run("1", "ok", "fine\n")
    make_run("4", "ok", "fine\n")
    assert cli.main(["logs", str(runs)]) == 0
    assert capsys.readouterr().out == "no run is running or has failed\n"
    make_run("2", "crashed", "Traceback\n")
    make_run("3", "oom")
    assert cli.main(["logs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "==> runs/2/train.log (crashed)\nTraceback\n" in out
    assert "==> " in out.split("Traceback")[1]
    assert "(no log yet)" in out
    assert "fine" not in out


def test_follow_shows_the_last_line_and_polls_rarely(make_run, monkeypatch, capsys) -> None:
    paths = make_run("1", log="first\n")
    asked, now = [], [0.0]

    def find(folder):
        asked.append(now[0])
        return [RunStatus(paths, "", "running" if now[0] < 25 else "ok")]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] in (1.0, 29.5):
            with open(paths.log, "a") as file:
                file.write(f"at {now[0]:g}\n" if now[0] < 2 else "the end")

    monkeypatch.setattr(run_commands, "find_statuses", find)
    monkeypatch.setattr(run_commands.time, "sleep", sleep)
    monkeypatch.setattr(run_commands.time, "monotonic", lambda: now[0])
    assert cli.main(["logs", "-f", str(paths.folder)]) == 0
    assert capsys.readouterr().out.splitlines() == ["first", "at 1", "the end"]
    assert asked == [0, 10, 20, 30]


def test_follow_includes_runs_that_start_later(make_run, monkeypatch, capsys) -> None:
    """A sweep of short runs: one that has begun and ended between two looks, one that is new."""
    made = [make_run("1", log="first\n"), make_run("2", log="of an earlier attempt\n")]
    states = [("running", "waiting"), ("ok", "ok", "running"), ("ok", "ok", "ok")]
    now = [0.0]

    def find(folder):
        found = states[min(int(now[0] // 10), 2)]
        return [RunStatus(p, "", state) for p, state in zip(made, found, strict=False)]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] == 5:
            made[1].log.write_text(made[1].log.read_text() + "second\n")
            made.append(make_run("3", log="third\n"))

    monkeypatch.setattr(run_commands, "find_statuses", find)
    monkeypatch.setattr(run_commands.time, "sleep", sleep)
    monkeypatch.setattr(run_commands.time, "monotonic", lambda: now[0])
    assert cli.main(["logs", "-f", "runs"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "first",
        "==> runs/2/train.log (ok)",
        "second",
        "==> runs/3/train.log (running)",
        "third",
    ]


def test_job_log_is_shown_if_no_worker_started(make_run, tmp_path, capsys) -> None:
    paths = make_run("1", "crashed")
    write_ticket(paths, JobEntry(str(tmp_path / "eke-s-1.json"), 1))
    (tmp_path / "5_1.log").write_text("of another job\n")
    (tmp_path / "eke-s-1_1.log").write_text("module: command not found\n")
    assert cli.main(["logs", str(paths.folder)]) == 0
    assert capsys.readouterr().out == "module: command not found\n"
    paths.log.write_text("step 1\n")
    assert cli.main(["logs", str(paths.folder)]) == 0
    assert capsys.readouterr().out == "step 1\n"


@pytest.mark.slow
def test_closed_pipe_is_not_an_error(make_run, tmp_path) -> None:
    paths = make_run("1", "ok", "x" * 100 + "\n" * 100_000)
    shell = f"{sys.executable} -m eke logs -n 0 {paths.folder} | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
