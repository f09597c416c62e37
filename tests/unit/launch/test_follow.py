"""What is shown of a running worker: whole lines once, and the newest step."""

import math

import pytest
from unit.plan.record.samples import eval_row, step_row

from eke.common.screen import plain, take_flags
from eke.launch.processes.follow import RunView, Tail, newest_step, open_view
from eke.plan.record import IN_LOG, metrics


def append(path, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content)


def test_complete_lines_are_shown_once(tmp_path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.lines() == [], "not there yet"
    append(path, b"one\ntw")
    assert tail.lines() == ["one"]
    assert tail.lines() == []
    append(path, b"o\nthree\n")
    assert tail.lines() == ["two", "three"]


def test_tail_skips_earlier_output_and_tolerates_invalid_utf8(
    tmp_path,
) -> None:
    append(tmp_path / "log", b"earlier\n")
    tail = Tail(tmp_path / "log")
    append(tmp_path / "log", b"\xff\xfe\nnow\ntorn")
    assert tail.lines()[1:] == ["now"]
    assert tail.lines(last=True) == ["torn"]


def test_read_boundaries_do_not_change_lines(tmp_path) -> None:
    content = "one\n\ntwo ü\nthree\n".encode()
    for cut in range(len(content) + 1):
        path = tmp_path / str(cut)
        tail = Tail(path)
        append(path, content[:cut])
        seen = tail.lines()
        append(path, content[cut:])
        assert seen + tail.lines(last=True) == ["one", "", "two ü", "three"]


def test_newest_step_is_the_last_complete_training_row(paths) -> None:
    assert newest_step(paths).step == 0
    metrics.append_rows(paths.metrics, [eval_row(2, 3.0)])
    assert newest_step(paths).step == 0
    metrics.append_rows(paths.metrics, [step_row(1), step_row(2), eval_row(2, 3.0)])
    append(paths.metrics, b'{"train/loss": 1')
    assert newest_step(paths).step == 2


def test_lines_go_to_stderr(paths, capsys) -> None:
    view = RunView(paths)
    append(paths.log, b"step 1\nste")
    view.update()
    view.update()
    assert capsys.readouterr() == ("", "step 1\n")
    view.update(last=True)
    assert capsys.readouterr().err == "ste\n"


def test_bar_needs_a_terminal(paths, capsys) -> None:
    with open_view(paths, 20, 10) as view:
        assert view.bar is None


def seen(paths, total: int = 20, log_every: int = 10) -> RunView:
    view = RunView(paths, total, log_every)
    rows = [step_row(n, **({metrics.WARMUP: 1} if n <= 5 else {})) for n in range(1, total + 1)]
    metrics.append_rows(paths.metrics, rows)
    view.update()
    return view


def test_pipe_gets_a_line_per_log_every_steps(paths, capsys) -> None:
    view = seen(paths, 22)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split()[1] for line in err.splitlines()] == ["10/22", "20/22", "22/22"]
    assert all("tokens/s" in line for line in err.splitlines())
    view.update(last=True)
    assert capsys.readouterr().err == ""


def test_rates_exclude_warm_up(paths, capsys) -> None:
    view = RunView(paths, 4, 2)
    slow = {metrics.WARMUP: 1, metrics.STEP_TIME: 9.0}
    rows = [step_row(1, **slow), step_row(2, **slow), step_row(3, **slow)]
    times = {metrics.STEP_TIME: 0.5, metrics.TOKENS: 100}
    metrics.append_rows(paths.metrics, [*rows, step_row(4, **times)])
    view.update()
    first, second = capsys.readouterr().err.splitlines()
    assert "tokens/s" not in first
    assert "500 ms/step  200 tokens/s" in second


def test_evaluation_has_its_own_line(paths, capsys) -> None:
    view = RunView(paths, 4, 2)
    metrics.append_rows(paths.metrics, [eval_row(4, 2.0, **{metrics.PERPLEXITY: 7.389})])
    append(paths.log, f"{IN_LOG}10:00:00 step 4/4  loss 1.0\n10:00:00 saved\n".encode())
    view.update()
    shown = "10:00:00 saved\neval  step 4  loss 2.0000  perplexity 7.389\n"
    assert capsys.readouterr().err == shown


def test_quiet_run_shows_nothing(paths, capsys) -> None:
    take_flags(["-q"])
    try:
        seen(paths)
    finally:
        take_flags([])
    assert capsys.readouterr() == ("", "")


def on_terminal(paths, columns: int, code: str) -> list[str]:
    """Lines of a terminal after Python code has written to it, with all that was overwritten."""
    import os
    import pty
    import subprocess
    import sys

    first, second = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": ""}
    command = [sys.executable, "-c", code, str(paths.folder)]
    subprocess.run(command, stderr=second, env=environment, check=True)
    os.close(second)
    content = b""
    with open(first, "rb", buffering=0) as screen:
        try:
            while part := screen.read(4096):
                content += part
        except OSError:  # the other end is closed
            pass
    return content.decode().replace("\x1b[J", "").replace("\r\n", "\n\r").split("\r")


DRAWN = """
import sys
from pathlib import Path
from eke.common.paths import RunPaths
from eke.common.screen import plain, take_flags
from eke.launch.processes.follow import open_view
paths = RunPaths(Path(sys.argv[1]))
content = paths.metrics.read_bytes()
paths.metrics.write_bytes(b"")
with open_view(paths, 20000, 2) as view:
    view.update()
    paths.metrics.write_bytes(content)
    view.update()
"""


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_bar_fits_the_terminal(columns, paths) -> None:
    rows = [step_row(9999), step_row(10000), eval_row(2, 2.0, **{metrics.PERPLEXITY: 7.389})]
    metrics.append_rows(paths.metrics, rows)
    shown = on_terminal(paths, columns, DRAWN)
    bars = [plain(text) for text in shown if plain(text).startswith("train ")]
    assert len(bars) == 2
    assert "10000/20000" in bars[-1]
    assert "left" in bars[-1]
    assert max(len(plain(text).rstrip("\n")) for text in shown) < columns
    assert any(text != plain(text) for text in shown), "colours"
    assert [plain(text).strip() for text in shown if "eval" in text] == [
        "eval  step 2  loss 2.0000  perplexity 7.389"
    ]


def test_non_finite_loss_is_shown(paths, capsys) -> None:
    view = RunView(paths, 3)
    metrics.append_rows(paths.metrics, [step_row(3, **{metrics.LOSS: math.nan})])
    view.update(last=True)
    assert "loss nan" in capsys.readouterr().err
