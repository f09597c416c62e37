"""`eke report DIR`: where its files go, and what is said where they cannot."""

import errno
import os

import pytest
from unit.results.report.made import Run, make_run

from eke import cli
from eke.cli import report


@pytest.fixture
def runs(tmp_path):
    """A folder with one run."""
    make_run(tmp_path / "runs" / "0123456789abcdef", Run())
    return tmp_path / "runs"


def test_a_folder_that_cannot_be_written_is_read_all_the_same(runs, monkeypatch, capsys) -> None:
    def write(path, _, **__) -> None:
        if path.parent == runs:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(report, "write_atomic", write)
    assert cli.main(["report", str(runs), "--formats", "md,json"]) == 1
    told = capsys.readouterr()
    assert "ok" in told.out, "the table"
    assert f"--output = {runs}" in told.err
    assert "Read-only file system" in told.err
    assert "-> --output FOLDER" in told.err
    elsewhere = str(runs.parent / "there")
    assert cli.main(["report", str(runs), "--formats", "md", "--output", elsewhere]) == 0


def test_so_is_a_place_that_cannot_be_a_folder(runs, capsys) -> None:
    (runs / "file").touch()
    assert cli.main(["report", str(runs), "--output", str(runs / "file" / "there")]) == 1
    assert "-> --output FOLDER" in capsys.readouterr().err
