"""Screens of real commands on real terminals, and in a pipe."""

import re
import sys
from pathlib import Path

import pytest
from prepared import write_jsonl
from support import REPO, TINY
from terminals import WIDTHS, too_wide, typed, words

from eke.common.screen import plain

pytestmark = pytest.mark.slow  # it trains, and starts a hundred processes

TRAIN = (sys.executable, str(REPO / "train.py"))
EKE = (sys.executable, "-m", "eke")
SHORT = ("experiment=smoke", *TINY, "train.steps=8")
SWEPT = ("optimizer=adamw,adafactor", "memory=none,checkpointing_selective")
PROGRESS = re.compile("composed |checked |trac")
LONG = f"{'long-name-' * 9}.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations and the runs of a sweep, made in a pipe."""
    made = tmp_path_factory.mktemp("screens")
    rows = [{"text": f"internationalization of words, row {n}. " * 4} for n in range(40)]
    write_jsonl(made / "rows.jsonl", rows)
    for name in ("rows.txt", LONG):
        (made / name).write_text("\n\n".join(row["text"] for row in rows))
    code, text = typed([*TRAIN, "-m", *SHORT, *SWEPT], 0, made)
    assert code == 0, text
    return made


def check(seen: dict[int, str], numbers: bool = True) -> None:
    """No line of a terminal is too wide, and no word of it is unknown to the pipe's text."""
    assert "\x1b" not in seen[0]
    assert "Traceback" not in seen[0]
    whole = words(seen[0]) | words(plain(seen[200])) | {"-v"}
    for columns, text in seen.items():
        if columns:
            assert not too_wide(plain(text), columns), text
            broken = words(plain(text)) - whole
            broken = {word for word in broken if numbers or not re.search(r"\d", word)}
            assert not broken, f"at {columns} columns: {text}"


COMMANDS = {
    "help": "train --help", "help of a group": "train --help data",
    "help of a key": "train --help optimizer.lr", "all keys": "train --help all",
    "plan": "plan --quick model=llama_1b hardware=rtx3090 precision=bf16 --why",
    "plan of a sweep": "plan --quick -m hardware=rtx3090 model=llama_1b "
    "precision=bf16,fp8 memory=none,checkpointing_selective",
    "status": "status SWEEP", "status of all": "status runs", "live": "status --live SWEEP",
    "errors": "train optimzr=adamw precision=fp8x train.stepz=3", "wrong command": "foo",
    "wrong flag": "report --nope", "report": "report SWEEP --formats none",
    "report of a run": "report RUN --formats none", "provenance": "report runs --provenance",
    "show": "show RUN", "show a key": "show optimizer.lr", "show a group": "show attention",
    "doctor": "doctor", "logs": "logs RUN", "compare": "compare RUN RUN2",
    "data": "data show data=jsonl data.path=rows.jsonl", "fit": "fit --help",
}  # fmt: skip
"""Screen -> arguments of `eke`."""


@pytest.mark.parametrize("name", COMMANDS)
def test_command_fits_every_terminal(name: str, folder: Path) -> None:
    (sweep,) = (folder / "runs").glob("sweep-*")
    places = sorted(path.parent for path in (folder / "runs").glob("*/record.json"))
    known = {"SWEEP": sweep, "RUN": places[0], "RUN2": places[1]}
    argv = [str(known[w].relative_to(folder)) if w in known else w for w in COMMANDS[name].split()]
    command = [*(TRAIN if argv[0] == "train" else EKE), *argv[argv[0] == "train" :]]
    seen = {columns: typed(command, columns, folder)[1] for columns in (0, *WIDTHS)}
    check(seen, numbers=name != "doctor")
    if name.startswith("plan"):
        lines = (line for line in plain(seen[60]).splitlines() if line.strip())
        first = next(line for line in lines if not PROGRESS.match(line))
        assert re.match(r"does not fit|\d runs? (fits?|tight)", first)
    _, plain_text = typed(command, 80, folder, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*m", plain_text)
    if name not in ("doctor", "data"):  # data: trained tokens have brackets there
        assert set(plain_text.split()) == set(plain(seen[80]).split())


def test_run_fits_every_terminal(folder: Path) -> None:
    """Start, progress and end: at most 12 lines before the first step, 24 after the last."""
    seen = {
        columns: typed([*TRAIN, *SHORT, f"seed={columns}"], columns, folder)[1]
        for columns in (0, *WIDTHS)
    }
    check(seen, numbers=False)
    for columns in WIDTHS:
        text = plain(seen[columns])
        assert "8/8" in text, "the live line"
        start, _, rest = text.partition("details: ")
        assert start.lstrip("\n").startswith("run ")
        assert len(start.splitlines()) < 12
        end = rest[rest.index("\nok  ") :]
        assert len(end.strip().splitlines()) <= 24


@pytest.mark.parametrize("columns", [60, 80])
def test_sweep_fits_every_terminal(columns: int, folder: Path) -> None:
    """The live view, with an override that is longer than a line, and the end."""
    swept = ("data=text", f"data.path=rows.txt,{LONG}", "optimizer=adamw,adafactor")
    code, text = typed([*TRAIN, "-m", *SHORT, *swept, f"seed={columns}"], columns, folder)
    assert code == 0, text
    text = plain(text)
    assert not too_wide(text, columns)
    assert re.search(r"\b\d ok, 1 running", text), "the live view"
    lines = [line.strip() for line in text.splitlines() if "long-name" in line]
    assert len(lines) > 3
    assert {line.removeprefix("data.path=") for line in lines} == {LONG}, "whole"
    assert text.rstrip().splitlines()[-1].startswith("next: eke report ")
