"""`eke status --live`: what is shown, and when it ends."""

import io
from pathlib import Path

from rich.console import Console

from eke.cli import main, run_commands
from eke.cli.run_commands import render_runs, summary_line, watch
from eke.common.paths import RunPaths
from eke.launch.processes.status import RunStatus


def standing(name, state, step=0, **more):
    label = f"-m precision=bf16 seed={name}"
    return RunStatus(RunPaths(Path(name)), label, state, step, 100, **more)


def shown(standings, height=24, width=120):
    stream = io.StringIO()
    Console(file=stream, width=width).print(render_runs(standings, height))
    return stream.getvalue()


RUNS = [
    standing("1", "ok", 100),
    standing("2", "running", 40, loss=2.5, step_s=0.5),
    standing("3", "oom", 3),
    standing("4", "not started"),
    standing("5", "running", 90, loss=None, step_s=None),
]


def test_running_runs_are_listed_first():
    lines = [line for line in shown(RUNS).splitlines() if "seed=" in line]
    assert [line.split()[0] for line in lines] == ["running", "running", "oom", "ok", "not"]
    assert "40/100" in lines[0]
    assert "2.5000" in lines[0]
    assert "500 ms" in lines[0]
    assert "30 s" in lines[0]
    assert "precision=bf16" not in lines[0], "what all have says nothing"


def test_summary_line_counts_runs_and_gives_time_left():
    assert summary_line(RUNS) == ("5 runs: 2 running, 1 ok, 1 oom, 1 not started (30 s left)")


def test_small_window_shows_running_runs_and_counts_the_others():
    text = shown(RUNS, height=9)
    assert "... and 2 more" in text
    assert text.count("running") == 3


def test_narrow_terminal_shortens_only_overrides():
    long = standing(" ".join("abcdefgh" * 2), "running", 40, loss=2.5, step_s=95.0)
    whole, counted, *_, row = shown([long], width=80).splitlines()
    assert set(whole.strip()) <= set("━╸╺ "), "a bar has its own line"
    assert counted.startswith("1 run: 1 running (1 h 35 m left)")
    assert "40/100  2.5000  1 m 35 s  1 h 35 m" in row
    assert row.count("…") == 1
    assert row.rstrip().endswith("…")


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
    assert "2 runs: 1 ok, 1 crashed" in capsys.readouterr().out


def test_json_and_live_are_exclusive(tmp_path, capsys):
    assert main(["status", "--live", "--json", str(tmp_path)]) == 2
    assert "wrong_argument" in capsys.readouterr().out
