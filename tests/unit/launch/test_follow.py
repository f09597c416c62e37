"""What is shown of a running worker: whole lines once, and the newest step."""

import math

import pytest
from unit.plan.record.samples import eval_row, step_row

from eke.launch.processes.follow import RunView, Tail, newest_step, open_view
from eke.plan.record import metrics


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
    with open_view(paths, 20) as view:
        assert view.bar is None


@pytest.fixture
def bar():
    """A progress bar that draws into a string."""
    import io

    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(file=io.StringIO(), width=100)
    return Progress(TextColumn("{task.fields[loss]}"), console=console, auto_refresh=False)


def test_bar_shows_the_newest_step_below_the_log(paths, bar) -> None:
    bar.add_task("run", total=20, loss="")
    view = RunView(paths, bar)
    append(paths.log, b"[red]not markup[/red]\n")
    metrics.append_rows(paths.metrics, [step_row(1), step_row(4), eval_row(4, 2.0)])
    view.update()
    assert bar.tasks[0].completed == 4
    assert bar.tasks[0].fields["loss"] == "loss 1.0000"
    assert "[red]not markup[/red]" in bar.console.file.getvalue()
    view.update()
    assert bar.tasks[0].completed == 4, "nothing new, nothing lost"


def test_non_finite_loss_is_shown(paths, bar) -> None:
    bar.add_task("run", total=20, loss="")
    view = RunView(paths, bar)
    metrics.append_rows(paths.metrics, [step_row(3, **{metrics.LOSS: math.nan})])
    view.update(last=True)
    assert bar.tasks[0].fields["loss"] == "loss nan"
