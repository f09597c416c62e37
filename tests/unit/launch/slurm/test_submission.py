"""The ledger: what a kill at any moment leaves, and what becomes of it."""

import shutil

import pytest

from eke.common.errors import EkeError
from eke.common.paths import RunPaths
from eke.launch.slurm import submission_file as submission_module
from eke.launch.slurm import submit_array as submit_module
from eke.launch.slurm.submission_file import (
    name_in_runs,
    new_submission,
    read_submission,
    read_ticket,
    submission_file,
    with_job,
    write_submission,
    write_ticket,
)
from eke.launch.slurm.submit_array import (
    GIVEN_UP_S,
    arrays,
    freeze_run,
    resolve_pending_submissions,
    submit_array,
)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "sweep" / "slurm"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def runs(tmp_path):
    """Three run folders."""
    made = [RunPaths(tmp_path / "runs" / name) for name in "abc"]
    for paths in made:
        paths.folder.mkdir(parents=True)
    return made


@pytest.fixture
def intend(folder, runs):
    """An intent of so long ago: sbatch has been called, or not."""

    def intend(age_s: float = 0.0):
        made = new_submission("0123456789ab", [str(p.folder) for p in runs], 5)
        made = submission_module.replace(made, created=made.created - age_s)
        path = submission_file(folder, made)
        write_submission(path, made)
        name_in_runs(path, made)
        path.with_suffix(".sbatch").write_text("#!/bin/bash\n")
        return path, made

    return intend


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch) -> None:
        self.now = submit_module.time.time()
        self.slept: list[float] = []
        monkeypatch.setattr(submit_module.time, "time", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def test_submission_round_trips(intend) -> None:
    path, made = intend()
    assert read_submission(path) == made
    assert made.name.startswith("eke-0123456789ab-")
    assert made.job_id == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a readable submission"),
        ('{"schema_version": 1, "name": "eke-', "not a readable submission"),
        ("[]", "version None"),
        ("3", "not a readable submission"),
        ('{"schema_version": 2}', "version 2, this eke reads 1"),
        ('{"schema_version": 1, "name": "x"}', "not a readable submission"),
        ('{"schema_version": 1, "runs": [], "more": 1}', "not a readable submission"),
    ],
    ids=["empty", "torn", "list", "number", "version", "incomplete", "unknown"],
)
def test_unreadable_ledger_stops_the_command(text, says, folder, intend) -> None:
    path, _ = intend()
    path.write_text(text)
    with pytest.raises(EkeError, match=says) as caught:
        resolve_pending_submissions(folder, [], pytest.fail)
    assert str(path) in str(caught.value)
    assert path.read_text() == text


# --- intents --------------------------------------------------------------------------------------


def test_unconfirmed_submission_is_dropped_after_a_wait(intend, cluster, folder, clock) -> None:
    path, _ = intend()
    resolve_pending_submissions(folder, [], clock.sleep)
    assert GIVEN_UP_S <= sum(clock.slept) <= GIVEN_UP_S + 2
    assert list(folder.iterdir()) == [], "the script goes, too"
    assert not path.exists()


def test_late_submission_is_adopted(intend, cluster, folder, clock) -> None:
    path, made = intend()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if len(clock.slept) == 3:
            cluster.names[made.name] = "12"

    resolve_pending_submissions(folder, [], sleep)
    assert len(clock.slept) == 3
    assert read_submission(path).job_id == "12"


def test_old_intent_is_dropped_immediately(intend, cluster, folder) -> None:
    path, _ = intend(age_s=GIVEN_UP_S + 1)
    resolve_pending_submissions(folder, [], pytest.fail)
    assert not path.exists()


def test_unanswered_query_drops_no_submission(intend, cluster, folder) -> None:
    path, _ = intend(age_s=10 * GIVEN_UP_S)
    cluster.down = "squeue: Unable to contact slurm controller"
    with pytest.raises(EkeError, match="Unable to contact"):
        resolve_pending_submissions(folder, [], pytest.fail)
    assert path.exists()


def test_query_is_skipped_without_pending_submissions(intend, cluster, folder) -> None:
    path, made = intend()
    with_job(path, made, "12")
    resolve_pending_submissions(folder, [], pytest.fail)
    assert cluster.asked == []


def test_intent_of_another_sweep_is_awaited_and_kept(
    intend, cluster, tmp_path, runs, clock
) -> None:
    path, _ = intend()
    resolve_pending_submissions(tmp_path / "other" / "slurm", runs, clock.sleep)
    assert GIVEN_UP_S <= sum(clock.slept) <= GIVEN_UP_S + 2
    assert path.exists()
    asked = len(cluster.asked)
    resolve_pending_submissions(tmp_path / "other" / "slurm", [], pytest.fail)
    assert len(cluster.asked) == asked, "of other runs nobody asks"


def test_incomplete_tickets_prevent_submission(jobs_here, cluster, folder, monkeypatch) -> None:
    """Of three runs one has its ticket when the launcher is killed: sbatch was not called."""
    jobs = jobs_here(3)
    for job in jobs:
        freeze_run(job)
    written = []

    def die_at_the_second(paths, ticket) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(ticket)
        write_ticket(paths, ticket)

    monkeypatch.setattr(submission_module, "write_ticket", die_at_the_second)
    ((request, group),) = arrays(jobs, 10)
    with pytest.raises(KeyboardInterrupt):
        submit_array(folder, "s", request, group, 0)
    assert written
    assert cluster.submitted == []


def test_deleted_run_does_not_block_others(intend, runs) -> None:
    runs[1].folder.rmdir()
    path, made = intend()
    with_job(path, made, "12")
    assert [each and each.element for each in map(read_ticket, runs)] == [0, None, 2]


# --- tickets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"submission": 5, "element": 0}', '{"x": 1}', '{"element": 1}'),
        *('{"submission": "s", "element": "0"}', '{"submission": "s", "element": null}'),
    ],
)
def test_unreadable_ticket_is_ignored(text, runs) -> None:
    runs[0].ticket("slurm").write_text(text)
    assert read_ticket(runs[0]) is None


def test_job_of_a_copied_folder_belongs_to_the_original(intend, runs) -> None:
    """Its ticket was copied with it: `eke cancel` of the copy must not end that job."""
    intend()
    copy = RunPaths(runs[0].folder.with_name("backup"))
    shutil.copytree(runs[0].folder, copy.folder)
    assert read_ticket(runs[0]).element == 0
    assert read_ticket(copy) is None


# --- the lock -------------------------------------------------------------------------------------
