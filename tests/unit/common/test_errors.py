"""Errors say what, why and how to mend it, all at once."""

import io
import json
import os

import pytest

from eke.cli import main
from eke.common.errors import (
    BusyError,
    ChangedError,
    ConfigError,
    EkeError,
    Fix,
    Problem,
    RunError,
    format_os_error,
)
from eke.common.screen import plain, take_flags
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


WRONG = ("tracke=none", "model=tiny", "precision=fp8x", "train.stepz=3")


def screen(error: EkeError, columns: int, monkeypatch, *typed: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    return error.screen(io.StringIO(), typed)


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_error_fits_the_terminal(columns, monkeypatch) -> None:
    with pytest.raises(ConfigError) as refused:
        compose([*WRONG, "optimizer=nope", "sweep.exclude=[a"])
    text = screen(refused.value, columns, monkeypatch)
    assert all(len(line) <= columns or "->" in line for line in text.splitlines())
    assert {word for word in str(refused.value).split() if word != "configuration:"} <= set(
        text.split()
    )


def test_error_ends_with_the_command_with_all_fixes(monkeypatch) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(WRONG)
    text = screen(refused.value, 60, monkeypatch, "eke", "train", *WRONG)
    command = text.partition("with all fixes:\n")[2]
    assert all(len(line) <= 60 for line in command.splitlines())
    words = command.replace("\\\n", " ").split()
    assert words[:3] == ["eke", "train", "model=tiny"]
    assert set(words[3:]) == {"tracker=none", "precision=fp8", "train.steps=3"}
    compose([word for word in words[2:] if word != "precision=fp8"])


@pytest.mark.parametrize(
    ("typed", "more"),
    [
        (["tracke=none"], "one problem"),
        (["tracke=none", "sweep=xyz"], "no fix for the second one"),
        (["tracke=none", "seed=1,2"], "a sweep"),
        (["tracke=none", "seed", "=", "3"], "spaces"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_incomplete_command_is_not_suggested(typed, more, monkeypatch) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(typed)
    assert "with all fixes" not in screen(refused.value, 80, monkeypatch, "eke", "train", *typed)


@pytest.mark.parametrize(
    ("keys", "heading"),
    [
        (["seed"], "1 problem in this configuration"),
        (["seed", "--by"], "2 problems in this configuration"),
        (["--by", "DIR"], "2 problems in this command"),
        (["RUN"], "1 problem with RUN"),
        (["eke foo"], "1 problem in this command"),
        (["my/rows.jsonl:3"], "1 problem in my/rows.jsonl, line 3"),
    ],
)
def test_heading_fits_the_problems(keys, heading, monkeypatch) -> None:
    error = ConfigError([Problem(key, "", "why") for key in keys])
    assert screen(error, 80, monkeypatch).splitlines()[0] == f"error: {heading}"


def test_colours_are_only_on_the_screen(monkeypatch) -> None:
    error = ConfigError(Problem("seed", "x", "must be a number", Fix("seed=0", remark="default")))
    without = screen(error, 80, monkeypatch)
    take_flags(["--color=always"])
    try:
        colored = screen(error, 80, monkeypatch)
        assert "\x1b" not in f"{error}{error.short()}"
    finally:
        take_flags([])
    assert plain(colored) == without
    assert "\x1b[31mseed = x\x1b[0m" in colored
    assert "\x1b[32m-> seed=0\x1b[0m" in colored


@pytest.mark.parametrize(
    ("typed", "id_", "key"),
    [
        (["foo"], "unknown_command", "eke foo"),
        (["fit", "--objective", "x"], "wrong_value", "--objective"),
        (["status", "--nope", "."], "unknown_flag", "--nope"),
        (["status", "/no/where"], "no_runs", "DIR"),
        (["--color", "blue", "status", "."], "wrong_argument", "--color"),
        (["report"], "missing_argument", "DIR"),
        (["show", "nothing_like_it"], "unknown_name", "WHAT"),
        (["plan", "sweep=nope"], "unknown_option", "sweep"),
    ],
)
def test_errors_of_all_commands_look_alike(typed, id_, key, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main([*typed, "--json"]) == 2
    told = capsys.readouterr()
    (problem,) = json.loads(told.out)["problems"]
    assert (problem["id"], problem["key"]) == (id_, key)
    assert problem["overrides"] == []
    lines = told.err.splitlines()
    assert lines[0].startswith("error: 1 problem ")
    assert lines[1].startswith(f"  {key}")
    assert all(len(line) <= 60 or "->" in line for line in lines)
