"""Flags of a command of `eke` that were misspelt."""

from contextlib import suppress

import pytest

from eke.cli import main
from eke.cli.plan import FLAGS


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        pytest.param(["plan", "--whyy", "model=tiny"], "-> --why\n", id="plan"),
        pytest.param(["fit", "--nmae", "x"], "-> --name x\n", id="fit"),
    ],
)
def test_the_commands_own_flag_is_proposed(argv: list[str], fix: str, capsys) -> None:
    assert main(argv) == 2
    assert fix in capsys.readouterr().err


def shown(command: str, flag: str, capsys) -> str:
    with suppress(SystemExit):  # argparse's way out; anything it complains of is in stderr
        assert main([command, flag]) == 0
    told = capsys.readouterr()
    assert not told.err
    return told.out


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize(
    "command",
    ["plan", "fit", "schema", "doctor", "status", "logs", "cancel", "retry", "report", "sync"],
)
def test_every_command_has_a_help_of_its_own(command: str, flag: str, capsys) -> None:
    assert shown(command, flag, capsys).startswith(f"usage: eke {command} ")


def test_the_help_of_a_plan_names_its_flags_and_where_groups_are_listed(capsys) -> None:
    told = shown("plan", "--help", capsys)
    for word in (*FLAGS, "-m", "hardware=all", "--config-dir", "eke train --help"):
        assert word in told
    assert len(told.splitlines()) <= 30


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        pytest.param(["stattus", "runs"], "eke status runs", id="misspelt"),
        pytest.param(["Plan", "model=a b"], "eke plan 'model=a b'", id="case and quotes"),
        pytest.param(["model=tiny", "seed=1"], "eke train model=tiny seed=1", id="no command"),
    ],
)
def test_the_command_that_was_meant_is_proposed(typed: list[str], meant: str, capsys) -> None:
    assert main(typed) == 2
    assert capsys.readouterr().err == f"eke: no command {typed[0]!r}\n  -> {meant}\n"


def test_seconds_that_are_none(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["sync", "runs", "--timeout", "x"])
    assert "x is no number of seconds above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        pytest.param(
            ["train", "seed=1", "plan_only=true", "--quick", "lr=2"],
            "--quick\n      is a flag of eke plan\n      -> eke plan --quick seed=1 lr=2\n",
            id="of another command",
        ),
        pytest.param(
            ["plan", "--why", "-m", "seed=1,2"],
            "-> eke plan -m seed=1,2   (or --why with one of them)\n",
            id="of one plan",
        ),
        pytest.param(
            ["plan", "model=runs/1/model"],
            "-> model=pretrained model.name_or_path=runs/1/model\n",
            id="a checkpoint",
        ),
        pytest.param(
            ["plan", "hardware=a100"], "not an option of hardware: a100_40, a100_80", id="begun"
        ),
        pytest.param(
            ["plan", "experiment=zzz"],
            "smoke; an option of your own is found by --config-dir FOLDER\n",
            id="perhaps one's own",
        ),
    ],
)
def test_what_is_proposed_leads_on(typed: list[str], fix: str, capsys) -> None:
    assert main(typed) == 2
    assert fix in capsys.readouterr().err
