"""Which folder a run gets, and that only one process works in it."""

import dataclasses
import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import environment
from unit.launch.scripted import QuietBoard, QuietLedger
from unit.plan.record.samples import bare_record

import eke.plan.record
from eke.common.errors import BusyError, ConfigError, EkeError
from eke.common.paths import RunPaths
from eke.config.schema import Tracker
from eke.launch.processes import run_dir
from eke.launch.processes.run_dir import RunFolder, lock_run_folder
from eke.launch.processes.sweep_scheduler import SweepState
from eke.plan.planner import write_plan
from eke.plan.record import NoRecord, Outcome, read_record, start_attempt, write_record


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def leave(runs, plan):
    """Leave a run folder behind: a number beside the first, an outcome, a machine."""

    def leave(outcome=None, number=1, machine=None, attempts=1):
        name = plan.run_id if number == 1 else f"{plan.run_id}-{number}"
        paths = RunPaths(runs / name)
        paths.folder.mkdir(parents=True)
        for _ in range(attempts):
            start_attempt(paths, plan.machine)
        if outcome:
            machine = plan.machine if machine is None else machine
            facts = {"run_id": plan.run_id, "outcome": outcome, "machine": dict(machine)}
            write_record(paths, bare_record(**facts))
        return paths

    return leave


def find_place(runs, plan, rerun: bool) -> RunFolder:
    """Where a plan goes in this folder of runs."""
    config = dataclasses.replace(
        plan.config, rerun=rerun, paths=dataclasses.replace(plan.config.paths, runs=str(runs))
    )
    return run_dir.find_place(dataclasses.replace(plan, config=config))


FINAL = ["ok", "oom", "diverged"]
UNFINISHED = ["crashed", "preempted", "cancelled", "timeout"]


def test_new_run_gets_its_id_as_folder(runs, plan, leave) -> None:
    expected = RunFolder(RunPaths(runs / plan.run_id), None, "")
    assert find_place(runs, plan, rerun=False) == expected
    assert not runs.exists(), "looking makes nothing"
    leave(attempts=0)
    assert find_place(runs, plan, rerun=False) == expected, "nothing was tried in it"


@pytest.mark.parametrize(
    ("outcome", "rerun"),
    [*((outcome, False) for outcome in UNFINISHED), ("cancelled", True), (None, True)],
)
def test_unfinished_run_is_resumed(outcome, rerun, runs, plan, leave) -> None:
    paths = leave(outcome)
    place = find_place(runs, plan, rerun)
    assert (place.paths, place.record) == (paths, None)
    assert place.note == f"resuming {paths.folder}"


@pytest.mark.parametrize(
    ("had", "asked", "words"),
    [
        ("none", "wandb", " (it ran with tracker=none, to upload: eke sync {folder})"),
        ("wandb", "mlflow", " (it ran with tracker=wandb, for mlflow: rerun=true)"),
        ("wandb", "wandb", ""),
        ("wandb", "none", ""),
    ],
)
def test_reused_record_names_another_tracker(had, asked, words, runs, plan, leave) -> None:
    """Which tracker it has is no part of a run's identity: rows would be missing without a word."""
    paths = leave("ok")
    write_record(paths, dataclasses.replace(read_record(paths), choices={"tracker": had}))
    config = dataclasses.replace(plan.config, tracker=Tracker(option=asked))
    note = find_place(runs, dataclasses.replace(plan, config=config), rerun=False).note
    assert note.removesuffix(words.format(folder=paths.folder)).endswith("rerun=true")


@pytest.mark.parametrize("outcome", FINAL)
def test_final_record_is_reused(outcome, runs, plan, leave) -> None:
    paths = leave(outcome)
    place = find_place(runs, plan, rerun=False)
    assert place.paths == paths
    assert place.record.outcome == outcome
    assert "rerun=true" in place.note
    assert str(paths.record) in place.note


def test_rerun_uses_a_new_folder(runs, plan, leave) -> None:
    first = leave("ok")
    place = find_place(runs, plan, rerun=True)
    assert place.paths.folder.name == f"{plan.run_id}-2"
    assert place.record is None
    assert place.note == f"next to {first.folder.name}: rerun=true"
    leave("ok", number=2)
    assert find_place(runs, plan, rerun=True).paths.folder.name == f"{plan.run_id}-3"


@pytest.fixture
def leave_as(runs, leave):
    """A run of the plan in a folder that somebody has given another name."""

    def leave_as(name, outcome="ok", **more):
        return RunPaths(leave(outcome, **more).folder.rename(runs / name))

    return leave_as


@pytest.mark.parametrize("outcome", FINAL)
def test_renamed_folder_is_found_by_its_record(outcome, runs, plan, leave_as) -> None:
    """Nothing that has been paid for is done again because it got a nicer name."""
    paths = leave_as("the-good-one", outcome)
    (runs / "notes.txt").touch()
    (runs / "sweep-0123456789ab").mkdir()
    place = find_place(runs, plan, rerun=False)
    assert place.paths == paths
    assert place.record.outcome == outcome
    assert place.note.startswith(f"answered from {paths.record}")
    assert find_place(runs, plan, rerun=True).paths.folder == runs / plan.run_id
    other = dataclasses.replace(plan, run_id="0123456789abcdef")
    assert find_place(runs, other, rerun=False).record is None, "it is another run"


def test_record_is_reused_only_on_the_same_machine(runs, plan, leave, leave_as) -> None:
    leave_as("kept", machine=plan.machine | {"device": "other"})
    assert find_place(runs, plan, rerun=False).record is None
    paths = leave("ok")
    assert find_place(runs, plan, rerun=False).paths == paths


@pytest.mark.parametrize("outcome", ["crashed", None])
def test_moved_unfinished_run_starts_from_scratch(outcome, runs, plan, leave_as) -> None:
    leave_as("broken", outcome)
    place = find_place(runs, plan, rerun=False)
    assert (place.paths.folder, place.record, place.note) == (runs / plan.run_id, None, "")


def test_other_machine_gets_a_new_folder_and_the_difference_is_named(runs, plan, leave) -> None:
    leave("ok", machine=plan.machine | {"device": "other", "torch": "2.11.0"})
    place = find_place(runs, plan, rerun=False)
    assert place.paths.folder.name == f"{plan.run_id}-2"
    assert "device: other -> test cpu" in place.note
    assert place.outdated[0] == "device: other -> test cpu"
    assert find_place(runs, plan, rerun=True).outdated == (), "it was asked for"
    assert "torch: 2.11.0 -> " in place.note


@pytest.mark.parametrize("outcome", ["ok", "cancelled"])
def test_second_folder_of_this_machine_is_found(outcome, runs, plan, leave) -> None:
    leave("ok", machine={"device": "other"})
    second = leave(outcome, number=2)
    place = find_place(runs, plan, rerun=False)
    assert place.paths == second
    assert (place.record is not None) == (outcome == "ok"), "else it is continued"


def test_final_record_is_never_overwritten(runs, plan, leave) -> None:
    """Whatever is asked, the folder that is given out holds no final record of another run."""
    machines = [plan.machine, {"device": "other"}]
    for number, (outcome, machine) in enumerate([(o, m) for o in FINAL for m in machines], 1):
        leave(outcome, number=number, machine=machine)
    for rerun in (False, True):
        place = find_place(runs, plan, rerun)
        assert place.record is not None or not place.paths.record.exists()


def foreign(paths) -> str:
    """The record of another run, copied here."""
    write_record(RunPaths(paths.folder.parent), bare_record(run_id="0123456789abcdef"))
    return (paths.folder.parent / "record.json").read_text()


@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "{}", '"\\ud800"', "\0", '{"schema_version": "2"}', foreign],
    ids=["empty", "torn", "list", "number", "object", "text", "zeros", "version", "foreign"],
)
def test_unreadable_or_foreign_record_is_kept(content, rerun, runs, plan, leave) -> None:
    paths = leave("ok")
    content = content if isinstance(content, str) else content(paths)
    paths.record.write_text(content)
    place = find_place(runs, plan, rerun)
    assert place.paths.folder.name == f"{plan.run_id}-2"
    assert place.record is None
    assert str(paths.record) in place.note
    assert str(paths.record) in place.outdated[0], "a sweep names it"
    assert paths.record.read_text() == content
    second = leave("ok", number=2)
    assert find_place(runs, plan, rerun=False).paths == second, "the run beside it answers"


def test_checkpoints_of_another_run_are_not_resumed(runs, plan, leave) -> None:
    """An unfinished run was copied into this run's folder."""
    paths = leave()
    write_plan(paths, plan)
    assert find_place(runs, plan, rerun=False).note == f"resuming {paths.folder}"
    write_plan(paths, dataclasses.replace(plan, run_id="0123456789abcdef"))
    place = find_place(runs, plan, rerun=False)
    assert place.paths.folder.name == f"{plan.run_id}-2"
    assert "0123456789abcdef" in place.note


def test_renamed_folder_belongs_to_the_run_of_its_plan(runs, plan, leave_as) -> None:
    paths = leave_as("kept")
    write_plan(paths, dataclasses.replace(plan, run_id="0123456789abcdef"))
    with pytest.raises(NoRecord, match=f"{plan.run_id}.* 0123456789abcdef"):
        read_record(paths)
    assert find_place(runs, plan, rerun=False).record is None


def make_folder(record) -> None:
    record.unlink()
    record.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [lambda record: record.write_text('{"schema_version": 99}'), make_folder],
    ids=["newer version", "folder"],
)
def test_temporarily_unreadable_record_fails_only_its_run(
    spoil, runs, plan, leave, make_jobs
) -> None:
    paths = leave("ok")
    spoil(paths.record)
    with pytest.raises(EkeError, match="Nothing was changed") as caught:
        find_place(runs, plan, rerun=False)
    assert str(paths.record) in str(caught.value)
    assert "delete" not in str(caught.value)
    jobs = make_jobs(1, 1)
    jobs[1].plan = plan
    board = QuietBoard()
    books = SweepState(jobs, board, QuietLedger(), lambda each: find_place(runs, each, rerun=False))
    books.answer_from_records()
    assert [job.outcome for job in jobs] == [None, Outcome.crashed], "the other goes on"


def test_record_of_another_user_is_read(runs, plan, leave, monkeypatch) -> None:
    def refuse(path, *_, **__) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    paths = leave("ok")
    monkeypatch.setattr(eke.plan.record, "read_json", refuse)
    with pytest.raises(EkeError, match="Nothing was changed") as caught:
        find_place(runs, plan, rerun=False)
    assert f"{paths.record}: Permission denied" in str(caught.value)


# --- the lock -----------------------------------------------------------------------------------

HOLD = """
import sys, pathlib
from eke.launch.processes.run_dir import lock_run_folder
from eke.common.paths import RunPaths
with lock_run_folder(RunPaths(pathlib.Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(paths, tmp_path):
    """Another process that works on the run until its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(paths.folder)],
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_second_process_is_rejected_with_the_owner(holder, paths) -> None:
    said = f"run {paths.folder.name} .* by process {holder.pid}$"
    with pytest.raises(BusyError, match=said) as busy, lock_run_folder(paths):
        pytest.fail("two processes hold one run")
    assert busy.value.exit_code == 16, "neither invalid (2) nor interrupted (75)"
    holder.kill()
    holder.wait()
    with lock_run_folder(paths):
        assert paths.lock.read_text() == f"process {os.getpid()}\n", "free when that one is gone"


def test_claim_ends_with_its_block(paths) -> None:
    for _ in range(2):
        with lock_run_folder(paths), pytest.raises(BusyError), lock_run_folder(paths):
            pytest.fail("held twice")


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC])
def test_folder_that_became_unusable_is_reported(code, paths, monkeypatch) -> None:
    open_any = os.open

    def refuse(path, flags, *rest, **more) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return open_any(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError) as caught, lock_run_folder(paths):
        pytest.fail("held")
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("paths.runs", str(paths.folder.parent))
    assert problem.why == f"{paths.lock} cannot be written: {os.strerror(code)}"
    assert caught.value.exit_code == 1, "nothing is wrong with what was typed"


def test_run_of_another_user_is_awaited(holder, paths, monkeypatch) -> None:
    """Whose files are everybody's to read, and theirs alone to write."""
    open_any = os.open

    def read_only(path, flags, *mode, **more) -> int:
        if Path(path).name == paths.lock.name and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_any(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(BusyError, match=f"by process {holder.pid}$"), lock_run_folder(paths):
        pytest.fail("two processes hold one run")
    holder.kill()
    holder.wait()
    with pytest.raises(ConfigError, match="Permission denied"), lock_run_folder(paths):
        pytest.fail("it is not ours")


def test_missing_file_locks_are_reported(paths, monkeypatch) -> None:
    def flock(*_) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    why = "no locks .Function not implemented."
    with pytest.raises(ConfigError, match=why) as caught, lock_run_folder(paths):
        pytest.fail("held without a lock")
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("paths.runs", str(paths.folder.parent))


def test_lock_check_does_not_make_a_run_busy(paths) -> None:
    """`eke sync` takes it shared for a moment, to see whether somebody works on the run."""
    paths.lock.touch()
    glance = os.open(paths.lock, os.O_RDONLY)
    fcntl.flock(glance, fcntl.LOCK_SH)
    over = threading.Timer(0.03, os.close, [glance])
    over.start()
    with lock_run_folder(paths):
        pass
    over.join()
