"""Overrides and flags of a command line."""

import os
from pathlib import Path

import pytest

from eke.common.errors import ConfigError
from eke.config.compose import Arguments, split_arguments

CASES = [
    pytest.param([], Arguments(), id="nothing"),
    pytest.param(["--help", "a=1"], Arguments(("a=1",), help=""), id="help"),
    pytest.param(["--help", "model", "a=1"], Arguments(("a=1",), help="model"), id="a group"),
    pytest.param(["a=1", "-m", "b=2"], Arguments(("a=1", "b=2"), multirun=True), id="multirun"),
    pytest.param(["--multirun"], Arguments(multirun=True), id="multirun, long"),
    pytest.param(["--version"], Arguments(version=True), id="version"),
    pytest.param(["-cd", "x", "a=1"], Arguments(("a=1",), config_dir=Path("x")), id="folder"),
    pytest.param(["--config-dir=x"], Arguments(config_dir=Path("x")), id="folder with equals"),
    pytest.param(["--cfg", "job"], Arguments(hydra_flags=("--cfg", "job")), id="cfg"),
    pytest.param(
        ["-p", "a.b", "--resolve"], Arguments(hydra_flags=("-p", "a.b", "--resolve")), id="package"
    ),
    pytest.param(["--info", "a=1"], Arguments(("a=1",), hydra_flags=("--info",)), id="info alone"),
    pytest.param(
        ["-sc", "install=bash"], Arguments(("install=bash",), hydra_flags=("-sc",)), id="completion"
    ),
    pytest.param(["--", "a=1"], Arguments(("a=1",)), id="separator"),
    pytest.param(["~a", "+b=1"], Arguments(("~a", "+b=1")), id="not a flag"),
]


@pytest.mark.parametrize(("argv", "expected"), CASES)
def test_arguments_are_sorted(argv: list[str], expected: Arguments) -> None:
    assert split_arguments(argv) == expected


def test_all_unknown_flags_are_reported_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        split_arguments(["--precision", "bf16", "--lr=0.1", "seed=1", "--bf16"])
    fixes = [str(problem.fix) for problem in caught.value.problems]
    assert fixes == ["precision=bf16", "optimizer.lr=0.1", "precision=bf16"]


@pytest.mark.parametrize("flag", ["--config-dir", "--cfg", "-p"])
def test_flag_without_value_has_a_fix(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} needs a value"):
        split_arguments([flag])


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        pytest.param(["--whyy"], "--why", id="a flag of the command"),
        pytest.param(["--why=yes"], "--why", id="a value where none follows"),
        pytest.param(["--nmae", "x"], "--name x", id="before data.name, which is a setting"),
        pytest.param(["--multrun"], "--multirun", id="a flag of all"),
        pytest.param(["--precison", "bf16"], "precision=bf16", id="a setting"),
    ],
)
def test_flag_of_the_command_that_was_misspelt_is_proposed(argv: list[str], fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_arguments(argv, {"--why": 0, "--name": 1})
    assert str(caught.value.problems[0].fix) == fix


@pytest.mark.parametrize("key", ["data.path=", "", "+my.key="])
def test_override_with_invalid_bytes_is_rejected(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_arguments([key + os.fsdecode(b"odd\xff.txt")])
    (problem,) = caught.value.problems
    assert problem.value == f"{key}odd\\xff.txt"
    problem.render().encode()
