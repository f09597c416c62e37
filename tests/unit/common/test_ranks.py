"""Several processes of one run that somebody else started: who speaks, who waits."""

import pytest
from support import started_by_torchrun

from eke import workflows
from eke.plan.record import EXIT_RESUMABLE, EXIT_USER


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """How long this process was made to wait, s."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def set_by_torchrun(monkeypatch, rank: str, world: str) -> None:
    """The variables of one process among several."""
    for name, value in started_by_torchrun(int(rank), int(world)).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("rank", "world", "speaks", "waited"),
    [("0", "2", True, 0), ("1", "2", False, 1), ("", "", True, 0)],
)
def test_only_rank_0_reports_an_invalid_command(
    rank, world, speaks, waited, waits, monkeypatch, capsys
) -> None:
    """The launcher kills the others when one leaves: a rank that left first would take the message
    with it."""
    if world:
        set_by_torchrun(monkeypatch, rank, world)
    assert workflows.main(["optimizer=nonsense"]) == EXIT_USER
    assert ("nonsense" in capsys.readouterr().err) is speaks
    assert len(waits) == waited


def test_interrupted_rank_exits_immediately(waits, monkeypatch, capsys) -> None:
    set_by_torchrun(monkeypatch, "1", "2")
    assert workflows.report_failure("interrupted", EXIT_RESUMABLE) == EXIT_RESUMABLE
    assert not waits
    assert not capsys.readouterr().err
