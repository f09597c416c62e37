"""Flags of a command of `eke` that were misspelt."""

import json
from contextlib import suppress
from typing import Any

import pytest

from eke.cli import main, models
from eke.cli.plan import FLAGS
from eke.common.errors import BusyError, ChangedError, EkeError, RunError
from eke.common.screen import is_quiet, take_flags


def shown(command: str, flag: str, capsys) -> str:
    with suppress(SystemExit):  # argparse's way out; anything it complains of is in stderr
        assert main([command, flag]) == 0
    told = capsys.readouterr()
    assert not told.err
    return told.out


@pytest.mark.parametrize(
    "command",
    [
        "fit",
        "data",
        "schema",
        "doctor",
        "status",
        "logs",
        "cancel",
        "retry",
        "report",
        "compare",
        "sync",
    ],
)
def test_every_command_has_help(command: str, capsys) -> None:
    assert shown(command, "--help", capsys).startswith(f"usage: eke {command} ")


def test_plan_help_lists_flags_and_groups(capsys) -> None:
    told = shown("plan", "-h", capsys)
    assert told.startswith("usage: eke plan ")
    for word in (*FLAGS, "-m", "hardware=all", "--config-dir", "eke train --help"):
        assert word in told
    assert len(told.splitlines()) <= 30


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        pytest.param(["Plan", "model=a b"], "eke plan 'model=a b'", id="case and quotes"),
        pytest.param(["model=tiny", "seed=1"], "eke train model=tiny seed=1", id="no command"),
    ],
)
def test_similar_command_is_proposed(typed: list[str], meant: str, capsys) -> None:
    assert main(typed) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: 1 problem in this command\n  eke {typed[0]}\n")
    assert told.endswith(f"    -> {meant}\n")


def test_evaluate_warns_about_replaced_values(monkeypatch, capsys) -> None:
    def evaluate(_: str, overrides: list[str], trust: bool) -> None:
        raise EkeError(" ".join(overrides))

    monkeypatch.setattr(models, "evaluate_run", evaluate)
    assert main(["evaluate", "run", "data.path=a", "precision=bf16", "data.path=b"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "warning: data.path=a has no effect. A later override replaces it: data.path=b",
        "error: precision=bf16 data.path=b",
    ]


def test_invalid_seconds_are_rejected(capsys) -> None:
    assert main(["sync", "runs", "--timeout", "0"]) == 2
    assert "  --timeout\n    0 " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        pytest.param(
            ["train", "seed=1", "plan_only=true", "--quick", "lr=2"],
            "--quick\n    is a flag of eke plan\n    -> eke plan --quick seed=1 lr=2\n",
            id="of another command",
        ),
        pytest.param(
            ["plan", "--why", "-m", "seed=1,2"],
            "-> --why with one of them\n",
            id="of one plan",
        ),
        pytest.param(["plan", "hardware=a100"], "a100_40, a100_80, ", id="begun"),
        pytest.param(
            ["plan", "experiment=zzz"],
            "--config-dir FOLDER\n",
            id="perhaps one's own",
        ),
    ],
)
def test_misspelt_flag_has_a_fix(typed: list[str], fix: str, capsys) -> None:
    assert main(typed) == 2
    assert fix in capsys.readouterr().err


def problems_in_json(typed: list[str], capsys) -> list[dict[str, Any]]:
    assert main(typed) == 2
    printed = capsys.readouterr()
    found: list[dict[str, Any]] = json.loads(printed.out)["problems"]
    assert f"{len(found)} problem" in printed.err
    assert {"id", "key", "value", "why", "overrides"} <= set(found[0])
    return found


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        pytest.param(
            ["train.steps=0", "optimizer.beta2=1", "hardware=cpu"],
            [
                ("limit", "optimizer.beta2", ["optimizer.beta2=0.999"]),
                ("limit", "train.steps", ["train.steps=null"]),
            ],
            id="rules",
        ),
        pytest.param(
            ["model=a,gpt2"],
            [("unknown_option", "model", []), ("several_values", "model", [])],
            id="no override",
        ),
        pytest.param(
            ["seed=1,2"],
            [("several_values", "seed", ["-m", "seed=1,2", "plan_only=true"])],
            id="a sweep, as words to execute",
        ),
        pytest.param(
            ["data=text", "hardware=cpu"],
            [("missing_value", "data.path", [])],
            id="only the user knows",
        ),
    ],
)
def test_rejected_plan_prints_problems_as_json(typed, expected, capsys) -> None:
    found = problems_in_json(["plan", "--json", *typed], capsys)
    assert [(p["id"], p["key"], p["overrides"]) for p in found] == expected


def test_proposed_overrides_are_valid(capsys) -> None:
    typed = ["optimizer.beta2=1", "precison=bf16", "train.steps=0", "hardware=cpu"]
    found = problems_in_json(["plan", "--json", *typed], capsys)
    fixed = [word for each in found for word in each["overrides"]]
    found = problems_in_json(["plan", "--json", *typed[:1], *fixed, *typed[2:]], capsys)
    fixed += [word for each in found for word in each["overrides"]]
    assert main(["plan", "--json", "--quick", *fixed, "hardware=cpu"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["choices"]["precision"] == "bf16"


def test_status_without_runs_prints_its_problem_as_json(tmp_path, capsys) -> None:
    (problem,) = problems_in_json(["status", str(tmp_path / "none"), "--json"], capsys)
    assert (problem["key"], problem["value"]) == ("DIR", str(tmp_path / "none"))
    assert problem["remark"].startswith("eke status ")


@pytest.mark.parametrize(
    ("error", "identifier"),
    [
        pytest.param(BusyError("run abc is in use"), "busy", id="busy"),
        pytest.param(RunError("crashed (log)"), "failed_run", id="failed run"),
        pytest.param(ChangedError("the data changed"), "changed_input", id="changed input"),
    ],
)
def test_error_of_a_run_is_printed_as_json(error, identifier, monkeypatch, capsys) -> None:
    def fail(*_: Any) -> int:
        raise error

    monkeypatch.setattr("eke.cli.run_commands.main", fail)
    assert main(["status", "--json"]) == error.exit_code
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["id"], problem["why"]) == (identifier, str(error))


@pytest.mark.parametrize("turn", [1, 2])
def test_quiet_flag_ends_with_its_test(turn: int) -> None:
    """Of tests/conftest.py. A later test in this process would lack part of its output."""
    assert not is_quiet()
    take_flags(["-q"])
    assert is_quiet()
