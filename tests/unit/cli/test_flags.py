"""Flags of a command of `eke` that were misspelt."""

import pytest

from eke.cli import main


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
