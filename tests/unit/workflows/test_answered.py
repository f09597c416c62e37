"""A full disk or memory that others hold keeps no finished run from answering."""

import json
import re

import pytest

from eke import workflows
from eke.common.paths import RunPaths
from eke.config.compose import compose
from eke.estimate.memory import trace_client
from eke.plan.planner import outline_record
from eke.plan.record import Outcome, write_record
from eke.rules import training
from eke.workflows.planning import plan_for

TYPED = ("data=synthetic", "data.seq_len=32", "data.num_samples=64", "train.steps=20")


@pytest.fixture
def typed(tmp_path):
    """How a run is typed that has ended."""
    command = [*TYPED, "tracker=none", "hardware=cpu", f"paths.runs={tmp_path}/runs"]
    plan = plan_for(compose(tuple(command)), planning=False)
    paths = RunPaths(tmp_path / "runs" / plan.run_id)
    paths.folder.mkdir(parents=True)
    write_record(paths, outline_record(plan, [], 0, Outcome.ok, None))
    return command


@pytest.fixture
def full_disk(monkeypatch) -> None:
    """Only a byte is left."""
    monkeypatch.setattr(training, "MIN_FREE_BYTES", 2**60)


@pytest.fixture
def full_memory(monkeypatch) -> None:
    """Others hold all of it, of a machine that the test says; formulas alone are asked."""
    monkeypatch.setattr(
        trace_client, "get_or_run_trace", lambda _: trace_client.TraceResult(None, "not here")
    )
    monkeypatch.setattr("eke.hardware.cpu.memory_limit", lambda: 8 * 2**30)
    monkeypatch.setattr("eke.hardware.cpu.memory_available", lambda: 0)


@pytest.mark.parametrize("trouble", ["full_disk", "full_memory"])
def test_finished_run_is_reused_on_a_full_disk(trouble, typed, capsys, request) -> None:
    request.getfixturevalue(trouble)
    assert workflows.main(typed) == 0
    assert "(recorded" in capsys.readouterr().out


def test_result_of_a_run_is_printed_as_json(typed, tmp_path, capsys) -> None:
    assert workflows.main([*typed, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["outcome"], record["config"]["data"]["option"]) == ("ok", "synthetic")
    assert workflows.main([*typed, "--json", "seed=x"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["key"], problem["value"]) == ("seed", "x")


@pytest.mark.parametrize("more", ["seed=5", "rerun=true"])
def test_run_that_must_write_does_not_start_on_a_full_disk(more, typed, full_disk, capsys) -> None:
    assert workflows.main([*typed, more]) == 1, "nothing is wrong with the command"
    told = capsys.readouterr().err
    assert told.startswith("error: 1 problem ")
    assert "-> paths.runs=" in told


def test_disk_problem_is_reported_with_other_problems(typed, full_disk, capsys) -> None:
    assert workflows.main([*typed, "precision=tf32"]) == 2, "that one is"
    told = capsys.readouterr().err
    assert "tf32" in told
    assert "-> paths.runs=" in told


@pytest.mark.parametrize("more", ["rerun=true", "batch=auto"])
def test_run_without_free_memory_is_rejected_for_now(more, typed, full_memory, capsys) -> None:
    assert workflows.main([*typed, more]) == 1, "nothing is wrong with the command"
    told = capsys.readouterr().err
    assert told.startswith("error: 1 problem ")
    assert "needs at least" in told
    assert "0 B " in told
    assert "ignore_forecast=true" in told


def test_planned_sweep_ignores_memory_of_other_processes(typed, full_memory, capsys) -> None:
    """Their turn comes later: they are weighed against all that the machine has."""
    assert workflows.main(["-m", *typed, "seed=5,6", "plan_only=true"]) == 0
    assert "refused" not in capsys.readouterr().out


def test_sweep_on_a_full_disk_keeps_finished_runs(typed, full_disk, tmp_path, capsys) -> None:
    assert workflows.main(["-m", *typed, "seed=0,5"]) == 1, "what is missing still has to run"
    (file,) = tmp_path.glob("runs/sweep-*/sweep.json")
    cells = json.loads(file.read_text())["cells"]
    assert [(cell["outcome"], cell["reused"]) for cell in cells] == [
        ("ok", True),
        ("crashed", False),
    ]
    assert "paths.runs=" in cells[1]["reason"]
    told = capsys.readouterr()
    assert "2 runs (2 seeds), 1 " in told.err
    assert re.search(rf"eke report \S*{file.parent.name}$", told.out.rstrip()), "the last line"
