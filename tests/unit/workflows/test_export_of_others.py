"""`eke export` of another user's run: its files are copied, the reader's own are not."""

import json
import os
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from two_users import ATTACKER, VICTIM, hand, machine, needs_root  # noqa: F401  # fixture that a test names
from unit.launch.scripted import record_for

from eke import cli
from eke.cli import models  # noqa: F401  # imported before the user changes, who may not read it
from eke.common.paths import CHECKPOINT_FILES, RunPaths
from eke.plan.record import write_record

NAME, CONTENT = "model.safetensors", b"years of work"


def make_run(folder: Path, planted, **values) -> RunPaths:
    """A finished run of the attacker, whose list knows what the victim's file holds."""
    paths = RunPaths(folder)
    source = paths.exported(7)
    source.parent.mkdir(parents=True)
    planted(source)
    write_record(paths, replace(record_for("run", "ok", 7), **values))
    listed = {f"model/{NAME}": (len(CONTENT), zlib.crc32(CONTENT))}
    (source.parent / CHECKPOINT_FILES).write_text(json.dumps(listed))
    hand(folder, ATTACKER)
    return paths


def own_file(source: Path, private: Path) -> None:
    source.mkdir()
    (source / NAME).write_bytes(CONTENT)


def linked_folder(source: Path, private: Path) -> None:
    source.symlink_to(private)


def linked_file(source: Path, private: Path) -> None:
    source.mkdir()
    (source / NAME).symlink_to(private / NAME)


def second_name(source: Path, private: Path) -> None:
    source.mkdir()
    os.link(private / NAME, source / NAME)


@needs_root
@pytest.mark.parametrize(
    ("plant", "refused"),
    [
        pytest.param(own_file, "", id="a file of theirs"),
        pytest.param(linked_folder, "model is a link that another user", id="a link to a folder"),
        pytest.param(linked_file, "is a link", id="a link to a file"),
        pytest.param(second_name, "has more than one hard link", id="a hard link"),
    ],
)
def test_links_to_private_files_are_not_exported(plant, refused, machine, capsys) -> None:  # noqa: F811  # the fixture by its name
    private = machine / "victim" / "private"
    private.mkdir()
    (private / NAME).write_bytes(CONTENT)
    hand(private, VICTIM, 0o700)
    run = make_run(machine / "attacker" / "run", lambda source: plant(source, private))
    out = machine / "victim" / "out"
    os.setegid(VICTIM)
    os.seteuid(VICTIM)
    try:
        code = cli.main(["export", str(run.folder), str(out)])
    finally:
        os.seteuid(0)
        os.setegid(0)
    told = capsys.readouterr()
    assert code == (1 if refused else 0), told
    assert refused in told.err
    assert out.exists() is not bool(refused)
    assert {p.name for p in out.parent.iterdir()} <= {"private", "out", "thesis.tex"}


@needs_root  # to hand it to another user
@pytest.mark.parametrize("values", [{"config": {"model": 3}}, {"environment": {"versions": [1]}}])
def test_malformed_record_is_one_message(values, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", lambda source: own_file(source, tmp_path), **values)
    assert cli.main(["export", str(run.folder), str(tmp_path / "out")]) == 1
    assert "record.json: does not describe" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
