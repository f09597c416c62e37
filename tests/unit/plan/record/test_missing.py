"""What is said of folders that lead to no run."""

from pathlib import Path

import pytest

from eke.plan.record import no_runs


@pytest.mark.parametrize(
    ("typed", "why", "fix"),
    [
        pytest.param("run", "no such folder", "eke sync {}/runs", id="misspelt"),
        pytest.param("nowhere", "no such folder", "eke sync runs", id="nothing like it"),
        pytest.param("runs", "contains no readable run", "eke sync runs", id="empty"),
    ],
)
def test_missing_runs_are_answered_with_a_command(typed, why, fix, tmp_path) -> None:
    (tmp_path / "nowhat").mkdir()  # near, and nobody's runs
    (tmp_path / "runs").mkdir()
    if typed != "runs":
        (tmp_path / "runs" / "1").mkdir()
        (tmp_path / "runs" / "1" / "plan.json").touch()
    problem = no_runs([tmp_path / typed], "sync")
    assert problem.why.startswith(why)
    assert (problem.key, str(problem.fix)) == ("DIR", fix.format(tmp_path))


def test_command_that_failed_is_not_its_own_fix(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "eke status" not in str(no_runs([Path("runs")], "status").fix)
    assert str(no_runs([Path("run")], "status").fix) == "eke status runs"


def test_several_folders_give_one_problem(tmp_path) -> None:
    problem = no_runs([tmp_path, tmp_path / "b"], "report", ["x: unreadable"])
    assert problem.value == f"{tmp_path}, {tmp_path / 'b'}"
    assert problem.why == "contains no readable run or sweep; x: unreadable"
