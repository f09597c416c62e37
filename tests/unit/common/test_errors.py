"""Errors say what, why and how to mend it, all at once."""

import os

import pytest

from eke.common.errors import (
    BusyError,
    ChangedError,
    ConfigError,
    EkeError,
    Problem,
    RunError,
    format_os_error,
)
from eke.config.compose import compose


def test_problem_renders_key_reason_and_fix() -> None:
    problem = Problem("batch.target", "12", "is not a multiple of 8", "batch.target=16")
    assert problem.render() == (
        "  batch.target = 12\n      is not a multiple of 8\n      -> batch.target=16"
    )


def test_empty_value_and_fix_are_omitted() -> None:
    assert Problem("data.path", "", "needs a value").render() == "  data.path\n      needs a value"


def test_all_problems_are_listed() -> None:
    problems = [Problem("seed", "-1", "at least 0", "seed=0"), Problem("train.steps", "0", "why")]
    error = ConfigError(problems)
    assert error.problems == problems
    text = str(error)
    assert text.startswith("2 problems in this configuration:\n")
    assert text.index("seed = -1") < text.index("train.steps = 0")


def test_passing_problem_has_exit_code_1() -> None:
    short, wrong = Problem("a", "1", "why", passing=True), Problem("b", "2", "why")
    error = ConfigError(short)
    assert str(error).startswith("1 problem on this machine at the moment:")
    assert (error.exit_code, ConfigError([short, wrong]).exit_code) == (1, 2)


def test_every_error_has_exit_code_and_plain_text() -> None:
    for error, code in ((EkeError, 1), (ChangedError, 2), (BusyError, 16), (RunError, 1)):
        assert error("words").exit_code == code, error
        assert str(error("no such file")) == "no such file"


FULL = "No space left on device. The disk is full: free some space and run again"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(28, "No space left on device", "/runs/a"), f"/runs/a: {FULL}"),
        (OSError(28, "No space left on device"), f"a file: {FULL}"),
        (OSError("datasets' own words"), "a file: datasets' own words"),
    ],
    ids=["with its file", "without", "a library's"],
)
def test_system_error_names_the_file(error, text) -> None:
    assert format_os_error(error) == text


def test_system_error_without_file_names_the_operation(tmp_path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as failed:
        os.fsync(10**6)
    assert format_os_error(failed.value).startswith(
        "test_system_error_without_file_names_the_operation, os.fsync(10**6): "
    )


def test_deleted_current_folder_is_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with pytest.raises(OSError, match="No such file") as failed:
        os.getcwd()
    with pytest.raises(ConfigError) as refused:
        compose(["model=tiny"])
    assert "current folder" in format_os_error(failed.value)
    assert refused.value.rule == "missing_folder"
