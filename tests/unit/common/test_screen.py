"""Width, wrapping and colours of text on a terminal."""

import io
import os
import pty

import pytest

from eke.common import screen


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_chosen", {"color": "auto"})
    monkeypatch.setattr(screen, "_verbosity", [0])
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "kept", "quiet", "verbose", "color"),
    [
        (["plan", "-v", "seed=1"], ["plan", "seed=1"], False, True, "auto"),
        (["plan", "--quiet"], ["plan"], True, False, "auto"),
        (["plan", "-q", "-v"], ["plan"], False, True, "auto"),
        (["--color", "never", "plan"], ["plan"], False, False, "never"),
        (["plan", "--color=always"], ["plan"], False, False, "always"),
        (["plan", "--color=red"], ["plan", "--color=red"], False, False, "auto"),
        (["plan", "--color"], ["plan", "--color="], False, False, "auto"),
        (["generate", "--", "-v", "--color"], ["generate", "--", "-v", "--color"], 0, 0, "auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flags_are_taken_from_every_command(
    typed: list[str], kept: list[str], quiet: bool, verbose: bool, color: str
) -> None:
    assert screen.take_flags(typed) == kept
    assert (screen.is_quiet(), screen.is_verbose()) == (quiet, verbose)
    assert screen._chosen["color"] == color


def test_a_terminal_has_colors_unless_they_are_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = _Terminal()
    assert screen.paint("no", "bold red", stream) == "\x1b[1;31mno\x1b[0m"
    assert screen.plain(screen.paint("no", "red", stream)) == "no"
    assert screen.paint("", "red", stream) == ""
    monkeypatch.setenv("NO_COLOR", "1")
    assert screen.paint("no", "red", stream) == "no"
    screen.take_flags(["--color=always"])
    assert screen.paint("no", "red", io.StringIO()) == "\x1b[31mno\x1b[0m"
    screen.take_flags(["--color=never"])
    monkeypatch.delenv("NO_COLOR")
    assert screen.paint("no", "red", stream) == "no"


def test_a_pipe_and_a_dumb_terminal_have_no_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not screen.has_color(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not screen.has_color(_Terminal())


def test_width_is_the_terminals_or_80(monkeypatch: pytest.MonkeyPatch) -> None:
    assert screen.width(io.StringIO()) == 80
    monkeypatch.setenv("COLUMNS", "61")
    assert screen.width(io.StringIO()) == 61
    monkeypatch.delenv("COLUMNS")
    leader, follower = pty.openpty()
    with os.fdopen(leader, "w"), os.fdopen(follower, "w") as terminal:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))
        assert screen.width(terminal) == 97


def test_wrapping_breaks_no_word_override_or_number_with_its_unit() -> None:
    long = "paths.runs=/a/very/long/path/that/exceeds-the-line"
    lines = screen.wrap(f"needs 24.1 GiB now, so type {long} or less", 18, "  why  ")
    assert lines == ["  why  needs", "       24.1 GiB", "       now, so", "       type",
                     f"       {long}", "       or less"]  # fmt: skip
    assert screen.wrap("", 20, "  ") == [""]
    first = screen.paint("  key  ", "red", _Terminal())
    assert screen.wrap("one two three four", 16, first, " ") == [f"{first}one two", " three four"]


def test_log_is_unchanged_up_to_its_long_lines() -> None:
    kept = ["  | step 0  eval", "", "a  b", "\tc"]
    wrapped = screen.wrap_log([*kept, "  | step 20  loss 5.1"], 16)
    assert wrapped == [*kept, "  | step 20", "    loss 5.1"]
