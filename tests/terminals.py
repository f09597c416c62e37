"""What a terminal of some width shows of code, which runs in a fork of the test's process."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from support import environment

from eke.common import errors, screen

WIDTHS = (60, 80, 120, 200)
_END = "\f"


def shown(call: Callable[[], object], widths: Sequence[int] = (0, *WIDTHS)) -> dict[int, str]:
    """Width -> both streams of a call on such a terminal, with colours. Width 0: a pipe.

    The call is made at all widths by one fork, whose caches make the later ones fast.
    """
    piped = {0: _output(call, [0])[0]} if 0 in widths else {}
    terminals = [columns for columns in widths if columns]
    return piped | dict(zip(terminals, _output(call, terminals) if terminals else [], strict=True))


def _output(call: Callable[[], object], widths: Sequence[int]) -> list[str]:
    leader, follower = pty.openpty() if any(widths) else os.pipe()
    if (child := os.fork()) == 0:
        _run(call, follower, widths)
    os.close(follower)
    content = b""
    with open(leader, "rb", buffering=0) as stream:
        try:
            while part := stream.read(1 << 16):
                content += part
        except OSError:  # the child has closed the terminal
            pass
    assert os.waitpid(child, 0)[1] == 0, content.decode()
    text = re.sub(r"\x1b\[2?[KJ]", "", content.decode().replace("\r\n", "\n"))
    return [re.sub(r"[^\n]*\r", "", each) for each in text.split(_END)[:-1]]  # overwritten lines


def _run(call: Callable[[], object], follower: int, widths: Sequence[int]) -> None:
    """Call in the fork, and end it."""
    code = 1
    try:
        for descriptor in (1, 2):
            os.dup2(follower, descriptor)
        how: Any = {"buffering": 1, "encoding": "utf-8", "closefd": False}
        sys.stdout = open(1, "w", **how)  # noqa: SIM115  # the process ends with it
        sys.stderr = open(2, "w", **how)  # noqa: SIM115  # the process ends with it
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        os.environ["TERM"] = "xterm-256color"
        errors.width = screen.width  # tests have unwrapped messages
        for columns in widths:
            if columns:
                fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            screen.take_flags([])
            call()
            print(_END, end="", flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def typed(command: Sequence[str], columns: int, folder: Path, **variables: str) -> tuple[int, str]:
    """Exit code and both streams of a command on a terminal, with all that it overwrites.

    Without columns: in a pipe. Cursor movements begin a new line, colours are kept.
    """
    kept = {k: v for k, v in environment(folder).items() if k not in ("COLUMNS", "NO_COLOR")}
    leader, follower = pty.openpty() if columns else os.pipe()
    if columns:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(
        command, env={**kept, "TERM": "xterm-256color", **variables}, cwd=folder,
        stdin=subprocess.DEVNULL, stdout=follower, stderr=follower,
    ) as process:  # fmt: skip
        os.close(follower)
        content = b""
        with open(leader, "rb", buffering=0) as stream, suppress(OSError):  # it has been closed
            while part := stream.read(1 << 16):
                content += part
    text = content.decode().replace("\r\n", "\n")
    return process.returncode, re.sub(r"\r|\x1b\[\d*[A-HJK]", "\n", text)


_WHOLE = re.compile(r" *(?:(?:next|details):|->|\w+ =)? *(?:(?:python train\.py|eke) .*|\S+)")
"""A command, override or path alone on a line, perhaps with its name."""


def too_wide(text: str, columns: int) -> list[str]:
    """The lines beyond the width that are not a single override, path or command."""
    lines = (line.rstrip() for line in text.split("\n"))
    return [line for line in lines if len(line) > columns and not _WHOLE.fullmatch(line)]


def words(text: str) -> set[str]:
    """The words and numbers of a text."""
    return {word for word in re.split(r"[\s=:]+", text) if re.search(r"[^\W_]", word)}
