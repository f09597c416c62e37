"""The line that says how far planning has come: on a terminal and in a log."""

import io
import re

from eke.results.report.summary import PlanningLine


class Terminal(io.StringIO):
    """Lines overwrite each other."""

    def isatty(self) -> bool:
        return True


def counted(stream: io.StringIO, *moments: float) -> str:
    """What is written of counts to ten, each at its moment."""
    now = iter([0.0, *moments])
    line = PlanningLine(stream, lambda: next(now))
    count = line.counter("checked", "set")
    for done, _ in enumerate(moments, start=1):
        count(done, len(moments))
    line.close()
    return stream.getvalue()


def test_log_has_a_count_every_ten_seconds():
    found = counted(io.StringIO(), 1.0, 3.0, 4.0, 13.0)
    assert re.findall(r"\d", found) == ["2", "4", "4", "4"]


def test_short_planning_prints_no_progress():
    assert counted(io.StringIO(), 0.5, 1.0) == ""


def test_wait_is_named_in_a_terminal_only():
    for stream, told in ((Terminal(), "\rtracing\r       \r"), (io.StringIO(), "")):
        line = PlanningLine(stream)
        line.begin("tracing")
        line.close()
        assert stream.getvalue() == told


def test_progress_line_is_erased_in_a_terminal():
    found = counted(Terminal(), 3.0, 3.1)
    assert found.startswith("\rchecked 1 of 2 sets\r ")
    assert found.endswith(" \r")
    assert "2 of 2" not in found
