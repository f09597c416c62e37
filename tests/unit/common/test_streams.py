"""Nothing that happens to standard output ends a command."""

import fcntl
import os
import subprocess
import sys
import time

import pytest
from python_server import run
from support import environment
from unit.results.report.made import Run, make_sweep

from eke.common.output import CONTROL

SETUP = "import os, subprocess, sys; from eke.common.output import *; use_utf8(); open_streams()\n"
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def python(code: str, tmp_path, shell: str = "", **variables: str) -> subprocess.CompletedProcess:
    """Some code in a process of its own, with a shell's redirections."""
    command = ["sh", "-c", f'"$@" {shell}', "sh", sys.executable, "-c", SETUP + code]
    return subprocess.run(
        command, env={**environment(tmp_path), **variables}, capture_output=True, check=False
    )


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "好 é odd\\udcff\n".encode()),
        ("ascii:strict", b"\\u597d \\xe9 odd\\udcff\n"),
    ],
)
def test_unencodable_characters_are_escaped(encoding, shown, tmp_path) -> None:
    code = "text = '\\u597d \\xe9 ' + os.fsdecode(b'odd\\xff')\n"
    code += "print(text); print(text, file=sys.stderr)"
    done = python(code, tmp_path, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, shown)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-", "2>&-"])
def test_closed_stream_descriptor_is_not_reused(closed, tmp_path) -> None:
    code = (
        "print('lost'); print('lost', file=sys.stderr)\n"
        "file = open('mine', 'w'); file.write(str(file.fileno())); file.flush()\n"
        "subprocess.run(['sh', '-c', 'echo of a child'])\n"
    )
    done = python(f"os.chdir({str(tmp_path)!r})\n{code}", tmp_path, closed)
    assert done.returncode == 0
    assert int((tmp_path / "mine").read_text()) > 2
    assert b"Traceback" not in done.stderr


def test_full_disk_is_reported_once_without_a_crash(tmp_path) -> None:
    code = "print('a' * 9999, flush=True); print('b', flush=True); sys.exit(5 + output_was_lost())"
    done = python(code, tmp_path, "> /dev/full")
    assert done.returncode == 6
    assert done.stderr.decode() == "standard output: No space left on device. The rest is lost\n"
    assert python(code.replace("print(", "sys.stderr.write("), tmp_path, "2> /dev/full").returncode


def test_closed_reader_is_not_reported_as_lost_output(tmp_path) -> None:
    code = (
        "heard = has_reader()\nfor _ in range(9): print('a' * 99999, flush=True)\n"
        "sys.stderr.write(str((heard, has_reader(), output_was_lost())))"
    )
    done = python(code, tmp_path, "| head -c 1")
    assert (done.stdout, done.stderr) == (b"a", b"(True, False, False)")


def test_full_non_blocking_pipe_loses_no_output(tmp_path) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
    command = [sys.executable, "-c", SETUP + "print('a' * 999_999)"]
    with subprocess.Popen(command, env=environment(tmp_path), stdout=writing) as writer:
        os.close(writing)
        time.sleep(0.3)
        with os.fdopen(reading, "rb") as file:
            assert len(file.read()) == 1_000_000
        assert writer.wait() == 0


def test_foreign_locale_reads_files_as_utf8(tmp_path) -> None:
    code = (
        "open(sys.argv[1], 'w').write('\\u597d')\n"
        "print(sys.flags.utf8_mode, sys.stdout.encoding, '\\u597d')\n"
    )
    command = [sys.executable, "-c", SETUP + code, str(tmp_path / "名")]
    done = subprocess.run(
        command, env={**environment(tmp_path), **C_LOCALE}, capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"1 ascii \\u597d\n", b"")
    assert (tmp_path / "名").read_bytes() == "好".encode()


EKE = "from eke import cli\nsys.exit(cli.main(sys.argv[1:]))"


@pytest.mark.parametrize("way", ["C", "closed", "full"])
def test_report_survives_a_full_output(way, tmp_path) -> None:
    runs = [Run({"precision": p}, keys={"data.label": "好" * 50}) for p in ("fp32", "bf16")]
    folder = make_sweep(tmp_path, runs)
    variables = environment(tmp_path)
    if way == "C":
        command = [sys.executable, "-m", "eke", "report", str(folder)]
        started = subprocess.run(command, env={**variables, **C_LOCALE}, capture_output=True)
        code, told = started.returncode, started.stderr.decode()
    else:
        begin = "os.close(1); os.close(2)\n" if way == "closed" else ""
        out = "/dev/full" if way == "full" else ""
        done = run(0, begin + EKE, "report", folder, cwd=tmp_path, environment=variables, out=out)
        code, told = done.code, done.text
    assert (code, "Traceback" in told) == (way == "full", False)
    assert (folder / "report.html").exists()


ESCAPES = {
    "clear the screen": "\x1b[2J",
    "move up": "\x1b[1A",
    "title": "\x1b]0;mine\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "8-bit": "\x9b2J",
    "right to left": "\u202etxt.exe",
    "isolate": "\u2066a\u2069",
    "overwrite the line": "ok\rbad",
}


def test_control_characters_in_output_are_escaped(tmp_path) -> None:
    code = f"for text in {[*ESCAPES.values()]!r}: print(text, file=sys.stderr); print(text)"
    done = python(code, tmp_path)
    for told in (done.stdout.decode(), done.stderr.decode()):
        lines = told.removesuffix("\n").split("\n")
        assert [
            name for name, line in zip(ESCAPES, lines, strict=True) if CONTROL.search(line)
        ] == []
        assert lines[-1] == "ok\ufffdbad"


def test_own_colours_tabs_and_bars_are_kept(tmp_path) -> None:
    code = "print('\\x1b[1;31mred\\x1b[0m\\tx'); raw_stream(sys.stdout).write('\\r50 %\\x1b[K\\n')"
    done = python(code, tmp_path)
    assert done.stdout == b"\x1b[1;31mred\x1b[0m\tx\n\r50 %\x1b[K\n"


def test_status_escapes_names_of_another_user(tmp_path) -> None:
    sweep = make_sweep(tmp_path, [Run(overrides=("seed=\x1b]0;mine\x07\x1b[2J\u202e",))])
    done = run(0, EKE, "status", sweep, cwd=tmp_path, environment=environment(tmp_path))
    assert (done.code, done.err) == (0, "")
    assert not CONTROL.search(done.out)
