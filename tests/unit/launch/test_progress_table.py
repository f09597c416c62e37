"""A sweep while it runs: a view that is redrawn on a terminal, lines in a pipe, nothing with -q."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import sys
import termios
from types import SimpleNamespace

import pytest
from unit.launch.scripted import record_for

from eke.common import screen
from eke.common.paths import SweepPaths
from eke.common.screen import plain
from eke.launch.processes.follow import open_live
from eke.launch.processes.progress_table import open_board
from eke.launch.processes.sweep import SweepFile, SweepRun
from eke.plan.record import Outcome


@pytest.fixture
def sweep(make_jobs, tmp_path):
    """Four runs: one ended, one failed, one runs, one waits."""
    jobs = make_jobs(1, 1, 1, 1)
    cells = []
    for number, job in enumerate(jobs):
        job.folder = str(tmp_path / job.plan.run_id)
        os.mkdir(job.folder)
        typed = (f"optimizer={'adamw' if number % 2 else 'adafactor'}", f"seed={number // 2}")
        cells.append(SweepRun(("model=tiny", *typed)))
    jobs[0].outcome, jobs[1].outcome = Outcome.ok, Outcome.oom
    jobs[0].record, jobs[1].record = (record_for("a", each, 20) for each in ("ok", "oom"))
    jobs[2].live, jobs[2].where = SimpleNamespace(), "CUDA 1"
    row = {"train/global_step": 5, "train/loss": 2.5, "train/step_time_s": 0.25}
    (tmp_path / "c" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return SweepFile(SweepPaths(tmp_path / "sweep-1"), ["-m"], cells), jobs


def _shown(leader: int) -> str:
    """Read until the terminal is quiet: a busy machine delivers a text in parts."""
    found = b""
    while select.select([leader], [], [], 0.2)[0]:
        found += os.read(leader, 1 << 16)
    return found.decode()


@pytest.fixture
def terminal(monkeypatch):
    """Standard error on a terminal of 60 columns. Returns a reader of what it shows."""
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(screen, "_chosen", {"color": "auto"})
    monkeypatch.setattr(screen, "_verbosity", [0])
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    os.set_blocking(leader, False)
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        yield stream, lambda: _shown(leader)
    os.close(leader)


def test_terminal_shows_all_runs_in_one_table(sweep, terminal, monkeypatch) -> None:
    (file, jobs), (stream, read) = sweep, terminal
    monkeypatch.setattr(sys, "stderr", stream)  # pytest replaces it after fixtures
    with open_board(file) as board:
        board.started(jobs[2])
        board.ended(jobs[0])
        board.update(jobs)
        shown = read()
        board.shown = 0.0
        board.update(jobs)
        assert re.match(r"\r\x1b\[\d+A\x1b\[J", read()), "the view is redrawn in place"
    assert "\x1b[36m" in shown, "the running run has a colour"
    progress, _, header, *rows = [
        line.rstrip() for line in plain(shown).removeprefix("\r\x1b[J").split("\r\n")
    ]
    assert (
        "1 oom, 1 ok, 1 running, 1 waiting" in progress.partition("\x1b")[0] or len(progress) < 60
    )
    assert "started on" not in shown
    table = [line for line in (header, *rows) if line.startswith("  ")]
    assert max(map(len, table)) <= 60
    words = [line.split() for line in table]
    assert words[0][:4] == ["optimizer", "seed", "step", "loss"]
    assert words[1][:5] == ["adafactor", "1", "5/20", "2.5000", "250"]
    assert [row[2] for row in words[2:]] == ["oom", "ok", "waiting"]


def test_long_lines_are_whole_below_what_is_printed_meanwhile(terminal, monkeypatch) -> None:
    stream, read = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    path = "x" * 100  # two rows of this terminal
    with open_live(stream) as live:
        live.draw(f"one\n{path}")
        assert read() == f"\r\x1b[Jone\r\n{path}"
        print("said", file=sys.stderr, flush=True)
        assert read() == "\r\x1b[2A\x1b[Jsaid\r\n"
        live.draw("two")
        live.draw("two")
        assert read() == "\r\x1b[Jtwo"
        live.draw("\n".join("line" for _ in range(30)))
        assert read().count("line") == live.height - 1, "the terminal has 24 rows"
    assert read() == "\r\x1b[22A\x1b[J"


def test_pipe_has_a_line_for_each_event(sweep, capsys) -> None:
    file, jobs = sweep
    with open_board(file) as board:
        board.started(jobs[2])
        board.ended(jobs[1])
        board.update(jobs)
        board.shown -= board.pause_s
        board.update(jobs)
    out, err = capsys.readouterr()
    assert not out, "progress is no result"
    assert "\x1b" not in err
    first, second, third = err.splitlines()
    assert first.startswith("[3/4] started on CUDA 1: ")
    assert second == f"[2/4] oom: {jobs[1].label}"
    assert third == "[3/4] step 5/20, loss 2.5000, 250 ms/step, 3.75 s left"


def test_quiet_sweep_shows_no_progress(sweep, monkeypatch, terminal) -> None:
    monkeypatch.setattr(screen, "_verbosity", [-1])
    (file, jobs), (stream, read) = sweep, terminal
    monkeypatch.setattr(sys, "stderr", stream)  # pytest replaces it after fixtures
    with open_board(file) as board:
        board.started(jobs[2])
        board.ended(jobs[1])
        board.note("about the sweep")
    sys.stderr.write("end")
    sys.stderr.flush()
    assert read() == "end"
