"""A sweep's file, its identity, and what its cells amount to."""

import dataclasses
import errno
import json
import os
import time

import pytest
from unit.launch.scripted import QuietBoard, QuietLedger, record_for

import eke.launch.processes.sweep
from eke.common.errors import ConfigError, EkeError, Problem
from eke.config.compose import compose
from eke.launch.processes.sweep import (
    WRITE_S,
    SweepFile,
    SweepRun,
    merge_duplicates,
    sweep_exit_code,
    sweep_id,
    sweep_paths,
)
from eke.launch.processes.sweep_scheduler import SweepState
from eke.plan.record import Outcome

CELLS = [("precision=bf16",), ("precision=fp16", "seed=1")]


def test_sweep_id_follows_the_command() -> None:
    assert sweep_id(CELLS) == sweep_id(list(CELLS))
    others = [CELLS[::-1], CELLS[:1], [("precision=bf16", "precision=fp16"), ("seed=1",)]]
    assert len({sweep_id(cells) for cells in (CELLS, *others)}) == 4
    assert sweep_id(CELLS) == sweep_id(CELLS, rule=()) == "f3e3859c34a2", "as of all versions"
    assert len({sweep_id(CELLS, rule=r) for r in ((), ("auto", "0.05"), ("auto", "0.02"))}) == 3


@pytest.mark.slow
def test_user_options_change_the_sweep_id(tmp_path) -> None:
    """The same words mean something else where the folder of own options has other files."""
    found = {}
    for name, width in (("a", 64), ("b", 96), ("again", 64)):
        file = tmp_path / name / "model" / "mine.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"defaults: [tiny, _self_]\noption: tiny\nhidden_size: {width}\n")
        composed = compose(["model=mine"], tmp_path / name)
        found[name] = sweep_id([composed.overrides], [composed.config])
    assert found["a"] == found["again"] != found["b"]


def test_sweep_file_holds_every_run(tmp_path) -> None:
    paths = sweep_paths(str(tmp_path / "runs"), "abc")
    assert paths.sweep == tmp_path / "runs" / "sweep-abc" / "sweep.json"
    cells = [
        SweepRun(CELLS[0], run_id="1", folder="runs/1", outcome="ok", reused=True),
        SweepRun(CELLS[1], outcome="refused", reason="needs Ampere", row="fast", round=2),
    ]
    SweepFile(paths, ["python", "train.py", "-m"], cells, "precision_ladder").flush()
    content = json.loads(paths.sweep.read_text())
    assert content["command"] == ["python", "train.py", "-m"]
    assert [c["overrides"] for c in content["cells"]] == [list(cell) for cell in CELLS]
    assert [c["outcome"] for c in content["cells"]] == ["ok", "refused"]
    assert content["cells"][1]["reason"] == "needs Ampere"
    assert [(c["row"], c["round"]) for c in content["cells"]] == [("", 0), ("fast", 2)]
    assert content["name"] == "precision_ladder"


def test_temporarily_full_disk_does_not_end_a_sweep(tmp_path, monkeypatch) -> None:
    cell = SweepRun(CELLS[0])
    file = SweepFile(sweep_paths(str(tmp_path), "abc"), ["-m"], [cell])
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with monkeypatch.context() as full:
        full.setattr(eke.launch.processes.sweep, "write_json", no_space)
        for at_once in (True, False):
            file.flush(at_once)
            now[0] += WRITE_S
        assert file.problem == os.strerror(errno.ENOSPC)
        file.flush()
    assert not file.paths.sweep.exists()
    now[0] += WRITE_S / 2
    file.flush()
    assert not file.paths.sweep.exists(), "not at every look"
    now[0] += WRITE_S
    file.flush()
    assert json.loads(file.paths.sweep.read_text())["cells"][0]["overrides"] == list(CELLS[0])
    assert file.problem == ""


def no_space(*_) -> None:
    """A full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("rules", "kept"),
    [(["bf16_needs_ampere"], "bf16_needs_ampere"), (["second", "third"], "second")],
    ids=["one", "the first"],
)
def test_rejected_run_keeps_its_rule(rules, kept) -> None:
    cell = SweepRun(CELLS[0], run_id="1")
    cell.reject(ConfigError([Problem("precision", "bf16", "why", "", rule) for rule in rules]))
    assert (cell.outcome, cell.rule, cell.run_id) == ("refused", kept, "")
    assert "precision = bf16 why" in cell.reason


def test_duplicate_runs_are_merged(plan) -> None:
    other = dataclasses.replace(plan, run_id="f" * 16)
    assert merge_duplicates([plan, None, other, plan, None, other, plan]) == {3: 0, 5: 2, 6: 0}
    assert merge_duplicates([]) == {}


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["ok", "ok"], 0),
        (["ok", "refused", "skipped"], 0),
        (["ok", "oom"], 1),
        (["ok", "crashed"], 1),
        (["oom", "preempted"], 75),
        (["ok", ""], 75),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_sweep_exit_code_follows_outcomes(outcomes, code) -> None:
    assert sweep_exit_code([SweepRun((), outcome=outcome) for outcome in outcomes]) == code


@pytest.mark.parametrize("rule", ["runs_has_space", "runs_writable", "as_planned"])
def test_sweep_with_unstarted_runs_has_not_succeeded(rule) -> None:
    missing = SweepRun((), outcome="refused", rule=rule)
    assert sweep_exit_code([SweepRun((), outcome="ok"), missing]) == 1
    assert sweep_exit_code([missing]) == 2
    assert sweep_exit_code([SweepRun((), outcome="cancelled"), missing]) == 75


@pytest.mark.parametrize(
    ("passing", "outcome"), [([True], "crashed"), ([False], "refused"), ([True, False], "refused")]
)
def test_temporary_shortage_is_not_a_rejection(passing, outcome) -> None:
    cell = SweepRun(())
    problems = [Problem("a", "1", "no", id=f"r{n}", passing=p) for n, p in enumerate(passing)]
    cell.reject(ConfigError(problems))
    assert (cell.outcome, cell.rule) == (outcome, "r0")


def test_missing_log_is_not_named(make_jobs, tmp_path) -> None:
    (job,) = make_jobs(1)
    job.folder = str(tmp_path)
    job.settle(record_for("a", "crashed"))
    job.end(Outcome.crashed, "it broke")
    cell = SweepRun(())
    cell.take(job)
    assert cell.reason == "it broke"
    (tmp_path / "train.log").touch()
    cell.take(job)
    assert cell.reason == f"it broke ({tmp_path}/train.log)"


def test_run_that_could_not_start_keeps_its_rule(make_jobs, tmp_path) -> None:
    (job,) = make_jobs(1)
    books, cell = SweepState([job], QuietBoard(), QuietLedger()), SweepRun(())
    books.fail(job, ConfigError(Problem("batch.per_device", "8", "no room", "", "does_not_fit")))
    cell.take(job)
    assert (cell.outcome, cell.rule) == ("crashed", "does_not_fit")
    books.fail(job, EkeError("its folder is gone"))
    cell.take(job)
    assert (cell.outcome, cell.rule, cell.reason) == ("crashed", "", "its folder is gone")
