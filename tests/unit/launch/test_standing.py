"""How far runs are, by what lies in their folders and in the queue."""

import json
import os
from pathlib import Path

import pytest
from unit.launch.scripted import record_for
from unit.plan.record.samples import step_row

from eke.common.errors import ConfigError, EkeError
from eke.common.paths import RunPaths, SweepPaths
from eke.launch.processes.follow import watching
from eke.launch.processes.run_dir import lock_run_folder
from eke.launch.processes.status import find_statuses, is_active
from eke.launch.slurm import scheduler
from eke.launch.slurm.scheduler import Element
from eke.launch.slurm.submission_file import JobEntry, write_ticket
from eke.plan.planner import read_plan, write_plan
from eke.plan.record import Failure, start_attempt, write_record


class Queue(dict):
    """The user's jobs, and how often they were asked for."""

    asked = 0
    down = ""

    def put(self, number: str, state: str, node: str, reason: str, name: str = "eke-s-1") -> None:
        """A job of this submission in this state."""
        key = f"{name}_{number.partition('_')[2]}"
        self[key] = Element(state, node, name, reason, (number,))

    def __call__(self):
        """What squeue says."""
        self.asked += 1
        if self.down:
            raise EkeError(self.down)
        return scheduler._joined(self.values())


@pytest.fixture
def queue(monkeypatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(scheduler, "queue", made)
    return made


@pytest.fixture
def run(tmp_path, plan, queue):
    """A run folder with its plan; with an element, also a ticket of job 5."""

    def make(name: str = "a", element: int | None = None, planned: bool = True) -> RunPaths:
        paths = RunPaths(tmp_path / "runs" / name)
        paths.folder.mkdir(parents=True)
        if planned:
            write_plan(paths, plan)
            paths.config.write_text("# seed=3 optimizer=sgd\nmodel: {}\n")
        if element is not None:
            write_ticket(paths, JobEntry(str(tmp_path / "eke-s-1.json"), element))
        return paths

    return make


def leave(paths: RunPaths, outcome: str, steps: int = 0, message: str = "") -> None:
    record = record_for(read_plan(paths).run_id, outcome, steps)
    record.failure = Failure("forward", message) if message else None
    record.loss.train_final = 2.5
    write_record(paths, record)


def only(folder):
    (found,) = find_statuses(folder)
    return found


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["ok", "crashed", "preempted"])
def test_finished_run_has_its_outcome(outcome, run) -> None:
    paths = run()
    leave(paths, outcome, 7, "it broke")
    found = only(paths.folder)
    assert (found.state, found.step, found.total, found.note) == (outcome, 7, 300, "it broke")
    assert found.loss == 2.5
    assert found.label == "seed=3 optimizer=sgd"
    assert not found.is_active


def test_run_is_not_started_or_starting(run) -> None:
    paths = run()
    found = only(paths.folder)
    assert (found.state, found.step, found.total) == ("not started", 0, 20)
    with lock_run_folder(paths):
        found = only(paths.folder)
    assert (found.state, found.where) == ("running", "starting")


def test_killed_run_is_interrupted(run) -> None:
    paths = run()
    start_attempt(paths, {})
    paths.metrics.write_text("".join(json.dumps(step_row(n)) + "\n" for n in (1, 2)))
    found = only(paths.folder)
    assert (found.state, found.step, found.loss) == ("interrupted", 2, 2.0)


@pytest.mark.parametrize("before", ["", "preempted"])
def test_local_run_is_running(before, run) -> None:
    paths = run()
    start_attempt(paths, {})
    if before:
        leave(paths, before, 1)
    paths.metrics.write_text("".join(json.dumps(step_row(n)) + "\n" for n in (1, 2)) + '{"train')
    with lock_run_folder(paths):
        found = only(paths.folder)
    assert (found.state, found.step, found.total, found.loss) == ("running", 2, found.total, 2.0)
    assert found.where.startswith(f"process {os.getpid()} on ")
    assert (found.is_active, found.job) == (True, "")


def test_remote_run_is_running_with_its_job(run, queue) -> None:
    paths = run(element=2)
    queue.put("5_2", "RUNNING", "n1", "None")
    with lock_run_folder(paths):
        found = only(paths.folder)
    assert (found.state, found.where, found.job) == ("running", "n1, job 5_2", "eke-s-1_2")


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "NEW_IN_26"])
def test_queued_run_shows_its_reason(state, run, queue) -> None:
    paths = run(element=2)
    leave(paths, "preempted", 3)
    queue.put("5_2", state, "", "Priority")
    found = only(paths.folder)
    assert (found.state, found.step, found.where) == ("queued", 3, "job 5_2: Priority")
    assert (found.note, found.job) == ("", "eke-s-1_2")
    assert found.is_active


@pytest.mark.parametrize(
    ("left", "queued", "state"),
    [("ok", "COMPLETING", "ok"), (None, "CANCELLED", "not started")],
    ids=["a final record is stronger than the queue", "a job that is over is not queued"],
)
def test_run_missing_from_the_queue_has_a_state(left, queued, state, run, queue) -> None:
    paths = run(element=2)
    if left:
        leave(paths, left, 20)
    queue.put("5_2", queued, "", "None")
    assert only(paths.folder).state == state


def test_unanswered_queue_gives_unknown_state(run, queue) -> None:
    paths = run(element=2)
    assert only(paths.folder).state == "not started"
    queue.put("5_2", "PENDING", "", "Priority")
    found = only(paths.folder)
    assert (found.state, found.where, found.job) == ("queued", "job 5_2: Priority", "eke-s-1_2")
    queue.down = "squeue: no controller"
    found = only(paths.folder)
    assert (found.state, found.where) == ("unknown", "job eke-s-1_2")
    assert (found.silent, found.is_active) == ("squeue: no controller", False)


@pytest.mark.parametrize("text", ["{", '{"outcome": "splendid"}'])
def test_unreadable_record_is_reported(text, run, queue) -> None:
    paths = run(element=2)
    paths.record.write_text(text)
    found = only(paths.folder)
    assert (found.state, found.total, found.is_active) == ("unreadable", 20, False)
    assert found.note.startswith(f"{paths.record}: ")
    assert "eke retry" in found.note
    queue.put("5_2", "PENDING", "", "Priority")
    assert only(paths.folder).state == "queued"
    with lock_run_folder(paths):
        assert only(paths.folder).state == "running"


# --- folders --------------------------------------------------------------------------------------


def write_cells(tmp_path, *cells) -> SweepPaths:
    sweep = SweepPaths(tmp_path / "runs" / "sweep-1")
    sweep.folder.mkdir(parents=True)
    plain = [{"overrides": ["a=1", f"b={n}"], "folder": "", **c} for n, c in enumerate(cells)]
    sweep.sweep.write_text(json.dumps({"cells": plain}))
    return sweep


def test_runs_of_a_sweep_are_listed(run, tmp_path) -> None:
    leave(run("x"), "ok", 20)
    run("y")
    sweep = write_cells(
        tmp_path,
        {"folder": "somewhere/else/x"},
        {"run_id": "y"},
        {"run_id": "", "outcome": "refused", "reason": "needs a GPU"},
        {"run_id": "z", "outcome": "skipped", "reason": "x ran out of memory"},
        {"run_id": "w"},
    )
    found = find_statuses(sweep.folder)
    assert [s.state for s in found] == ["ok", "not started", "refused", "skipped", "not started"]
    assert [s.note for s in found][2] == "needs a GPU"
    assert [s.label for s in found][:2] == ["a=1 b=0", "a=1 b=1"]


def test_unstarted_run_has_the_outcome_of_its_sweep(run, tmp_path, queue) -> None:
    run("x", element=1)
    leave(run("y"), "preempted", 3)
    why = {"outcome": "crashed", "reason": "sbatch: Invalid partition"}
    full = {"run_id": "", "outcome": "crashed", "reason": "the disk has 3 MiB left"}
    sweep = write_cells(tmp_path, {"run_id": "x", **why}, {"run_id": "y", **why}, full)
    found = find_statuses(sweep.folder)
    assert [s.state for s in found] == ["crashed", "preempted", "crashed"], "a record knows better"
    assert [s.note for s in found] == [why["reason"], "", full["reason"]]
    queue.put("5_1", "PENDING", "", "Priority")
    assert find_statuses(sweep.folder)[0].state == "queued", "somebody has submitted it since"


def test_pending_run_of_an_active_sweep_is_waiting(run, tmp_path, queue) -> None:
    leave(run("x"), "ok", 20)
    leave(run("y"), "crashed", 3)
    run("z", element=1)
    done = {"run_id": "x", "outcome": "ok"}
    sweep = write_cells(tmp_path, done, {"run_id": "y"}, {"run_id": "z"}, {"run_id": "w"})
    with watching(sweep):
        found = find_statuses(sweep.folder)
        assert [s.state for s in found] == ["ok", "waiting", "waiting", "waiting"]
        assert [s.is_active for s in found] == [False, True, True, True]
        assert is_active(sweep.folder, found[:1])
        queue.put("5_1", "PENDING", "", "Priority")
        assert find_statuses(sweep.folder)[2].state == "queued"
    found = find_statuses(sweep.folder)
    assert [s.state for s in found] == ["ok", "crashed", "queued", "not started"]
    assert not is_active(sweep.folder, found[:1])


def test_copied_sweep_without_runs_is_reported(run, tmp_path) -> None:
    run("y")
    ok = {"outcome": "ok"}
    sweep = write_cells(tmp_path, {"run_id": "x", **ok}, {"run_id": "y", **ok}, {"run_id": "z"})
    found = find_statuses(sweep.folder)
    assert [s.state for s in found] == ["not started"] * 3
    gone = tmp_path / "runs" / "x"
    said = f"ok according to its sweep, but {gone} is missing (moved or not copied?)"
    assert [s.note for s in found] == [said, "", ""]


@pytest.mark.parametrize("named", [".", "../sweep-1", "link", "../x/../sweep-1/."])
def test_sweep_is_found_by_any_path(named, run, tmp_path, monkeypatch) -> None:
    leave(run("x"), "ok", 20)
    sweep = write_cells(tmp_path, {"run_id": "x"})
    monkeypatch.chdir(sweep.folder)
    if named == "link":
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        Path(named).symlink_to(sweep.folder)
    found = only(Path(named))
    assert (found.state, found.paths.folder.name) == ("ok", "x")
    monkeypatch.chdir(tmp_path / "runs" / "x")
    found = only(Path())
    assert (found.state, found.paths.folder.name) == ("ok", "x")


def test_all_runs_of_a_folder_need_one_query(run, tmp_path, queue) -> None:
    run("b", element=1)
    run("a", element=2)
    run("no plan", planned=False)
    write_cells(tmp_path, {"run_id": "a"})
    assert [s.paths.folder.name for s in find_statuses(tmp_path / "runs")] == ["a", "b"]
    assert queue.asked == 1


def test_folder_without_runs_is_an_error(tmp_path) -> None:
    for folder, why in ((tmp_path, "no readable run"), (tmp_path / "none", "no such folder")):
        with pytest.raises(ConfigError, match=why):
            find_statuses(folder)


@pytest.mark.parametrize("text", ["{", "{}", "3"])
def test_unreadable_sweep_is_reported(text, tmp_path) -> None:
    sweep = write_cells(tmp_path)
    sweep.sweep.write_text(text)
    with pytest.raises(EkeError, match="not a readable sweep"):
        find_statuses(sweep.folder)
