"""Table of a sweep's runs: `eke status`, its live view, and when that ends."""

import io
import re
from pathlib import Path

import pytest

from eke.cli import main, run_commands
from eke.cli.run_commands import watch
from eke.common.paths import RunPaths
from eke.common.screen import plain
from eke.launch.processes.runs_table import RunStatus, progress_lines, render_runs


def standing(name, state, step=0, **more):
    words = ("precision=bf16", f"seed={name}")
    return RunStatus(
        RunPaths(Path(name)), " ".join(words), state, step, 100, overrides=words, **more
    )


def shown(standings, live=20, fold=True):
    return "\n".join(render_runs(standings, live, fold, io.StringIO()))


RUNS = [
    standing("1", "ok", 100),
    standing("2", "running", 40, loss=2.5, step_s=0.5),
    standing("3", "oom", 3),
    standing("4", "not started"),
    standing("5", "running", 90, loss=None, step_s=None),
]


def test_running_and_failed_runs_are_listed_first():
    header, *lines = shown(RUNS).splitlines()
    assert header.split() == ["seed", "step", "loss", "ms/step", "left"]
    assert [line.split(maxsplit=1)[0] for line in lines] == ["2", "5", "3", "1", "4"]
    assert lines[0].split() == ["2", "40/100", "2.5000", "500", "30", "s"]
    assert [line.split(maxsplit=1)[1] for line in lines[2:]] == ["oom", "ok", "not started"]


def test_progress_counts_failures_first_and_adds_the_time_left():
    (line,) = progress_lines(RUNS, 5.0, io.StringIO())
    assert re.fullmatch(r"━+─+  1 oom, 1 ok, 2 running, 1 not started   5 s, 30 s left", line)


def test_time_left_is_that_of_waiting_runs_on_the_used_devices():
    done = standing("1", "ok", 100, lasted_s=20.0)
    waiting = [standing(str(n), "waiting") for n in (3, 4, 5)]
    (line,) = progress_lines([done, RUNS[1], *waiting], stream=io.StringIO())
    assert line.endswith("   1 m 30 s left"), "30 s and three times 20 s on one device"


def test_small_window_shows_running_runs_and_counts_the_others():
    text = shown(RUNS, live=3)
    assert [line.split()[0] for line in text.splitlines()] == ["seed", "2", "5", "3", "..."]
    assert text.endswith("1 ok, 1 not started")


def test_small_window_counts_the_lines_of_rows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    long = [standing(f"{n}{'x' * 30}", "running", 40) for n in range(4)]
    lines = shown(long, live=4).splitlines()
    assert len(lines) == 1 + 4 + 1, "two rows, each with its seed on a line below"
    assert lines[-1].split() == ["...", "and", "2", "running"]


def test_finished_runs_fold_after_ten():
    many = [standing(str(n), "ok", 100) for n in range(12)] + [standing("a", "oom")]
    lines = shown(many, live=0).splitlines()
    assert len(lines) == 1 + 1 + 10 + 1
    assert lines[1].split()[:2] == ["a", "a"], "the failed run is first"
    assert lines[-1].split() == ["...", "and", "2", "ok"]
    assert len(shown(many, live=0, fold=False).splitlines()) == 14


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("live", [0, 20], ids=["folder", "live"])
def test_no_line_is_wider_than_the_terminal(columns, live, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    long = [
        RunStatus(RunPaths(Path(f"{n}" * 16)), "", "running", 40, 1000, 2.5, step_s=95.0,
                  where=f"job 12345_{n}: AssocGrpGRES", job="1", overrides=(
                      f"data.path=/data/{'very' * 20}/{n}.jsonl", f"optimizer={'x' * n}adamw"))
        for n in range(4)
    ]  # fmt: skip
    stream = io.StringIO()
    rows = render_runs(long, live, stream=stream) + progress_lines(long, 5.0, stream)
    lines = "\n".join(rows).splitlines()
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)
    assert all("40/1000" in row and f"{n}.jsonl" in row for n, row in enumerate(rows[1:5]))


def test_rows_are_unbroken_in_a_pipe(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    long = [standing("x" * 300, "ok"), standing("y", "ok")]
    assert "x" * 300 in shown(long)


def test_live_status_ends_with_the_last_active_run(monkeypatch, capsys):
    looks = [RUNS, RUNS, [standing("2", "ok", 100), standing("5", "crashed", 95)]]
    waited = []

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_commands, "find_statuses", lambda _: RUNS)
    monkeypatch.setattr(run_commands.time, "sleep", interrupt)
    assert watch(Path("runs")) == 0, "Ctrl-C ends the looking alone"
    capsys.readouterr()
    monkeypatch.setattr(run_commands, "find_statuses", lambda _: looks[len(waited)])
    monkeypatch.setattr(run_commands.time, "sleep", waited.append)
    assert watch(Path("runs")) == 0
    assert len(waited) == 2
    assert "runs: 1 crashed, 1 ok" in plain(capsys.readouterr().out)


@pytest.mark.parametrize("typed", [["status", "--live"], ["logs", "-f"]], ids=" ".join)
def test_json_and_live_views_are_exclusive(typed, tmp_path, capsys):
    assert main([*typed, "--json", str(tmp_path)]) == 2
    assert "wrong_argument" in capsys.readouterr().out
