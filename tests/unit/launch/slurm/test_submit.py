"""From runs to arrays: each run once, whatever sbatch answers."""

import contextlib
import dataclasses
import os

import pytest
from unit.launch.scripted import QuietBoard, QuietLedger

from eke.common.errors import BusyError, EkeError
from eke.common.paths import RunPaths, SweepPaths
from eke.launch.processes.run_dir import lock_run_folder
from eke.launch.processes.sweep_scheduler import SweepState
from eke.launch.slurm import scheduler
from eke.launch.slurm.dispatch import Cluster, SlurmLauncher, paths_of
from eke.launch.slurm.submission_file import read_ticket
from eke.launch.slurm.submit_array import LEDGER_LOCK, PATIENCE_S, arrays, submitting
from eke.plan.planner import read_plan
from eke.plan.record import Outcome


@pytest.fixture
def sweep(tmp_path):
    return SweepPaths(tmp_path / "runs" / "sweep-0123456789ab")


@pytest.fixture
def make_cluster(machine, sweep, cluster):
    """Jobs -> what submits them."""

    def make(jobs) -> Cluster:
        books = SweepState(jobs, QuietBoard(), QuietLedger(), machine.place_of)
        return Cluster(books, sweep, "0123456789ab", sleep=pytest.fail)

    return make


def with_values(jobs, plan_with, values) -> None:
    for job, each in zip(jobs, values, strict=True):
        job.plan = dataclasses.replace(job.plan, config=plan_with(each).config)


def test_equal_requests_go_into_one_array(jobs_here, plan_with) -> None:
    jobs = jobs_here(5)
    hours = {"resources.time": "2:00:00"}
    with_values(jobs, plan_with, [{}, hours, {}, {"resources.time": "120"}, {"slurm.grace_s": 60}])
    found = arrays(jobs, 1001)
    assert [[job.number for job in group] for _, group in found] == [[0, 2], [1, 3], [4]]


@pytest.mark.parametrize(("limit", "sizes"), [(7, [7]), (3, [3, 3, 1])])
def test_arrays_respect_the_size_limit(
    limit, sizes, jobs_here, make_cluster, cluster, unfrozen
) -> None:
    cluster.array_size = limit
    jobs = jobs_here(7)
    made = make_cluster(jobs)
    made.submit()
    assert cluster.submitted == sizes
    assert sorted(made.elements) == list(range(7))
    tickets = [read_ticket(paths_of(job)) for job in jobs]
    assert [each.job for each in tickets] == [made.elements[n] for n in range(7)]


def test_queued_plan_is_stored(jobs_here, make_cluster, cluster) -> None:
    (job,) = jobs_here(1)
    make_cluster([job]).submit()
    paths = paths_of(job)
    plan = read_plan(paths)
    assert plan.run_id == job.plan.run_id
    assert plan.config == job.plan.config
    assert paths.config.exists()


def test_environment_secrets_are_not_written(
    jobs_here, make_cluster, cluster, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-of-mine")
    make_cluster(jobs_here(2)).submit()
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(files) > 6
    assert not [path for path in files if b"s3cret" in path.read_bytes()]


def test_rejected_submission_is_cleaned_up(jobs_here, make_cluster, cluster, sweep) -> None:
    cluster.refusal = "sbatch: error: Invalid partition name specified"
    jobs = jobs_here(2)
    made = make_cluster(jobs)
    made.submit()
    assert list(sweep.launcher("slurm").iterdir()) == []
    assert not [job for job in jobs if paths_of(job).ticket("slurm").exists()]
    assert [(job.outcome, job.reason) for job in jobs] == [(Outcome.crashed, cluster.refusal)] * 2
    assert made.books.board.notes == [cluster.refusal], "once, and the summary has it, too"


@pytest.mark.parametrize("room", [10, 2], ids=["room", "full"])
def test_rejected_request_does_not_block_other_requests(
    room, jobs_here, plan_with, make_cluster, cluster, sweep
) -> None:
    cluster.refusal, cluster.refuses = "sbatch: error: Invalid partition", "--partition=old"
    cluster.room = room
    jobs = jobs_here(5)
    old, new = {"resources.partition": "old"}, {"resources.partition": "new"}
    with_values(jobs, plan_with, [{}, old, new, old, {"resources.time": "9"}])
    made = make_cluster(jobs)
    made.submit()
    assert cluster.submitted == [1] * min(3, room)
    assert [job.outcome for job in jobs] == [None, Outcome.crashed, None, Outcome.crashed, None]
    assert jobs[3].reason == cluster.refusal
    assert made.books.board.notes == [cluster.refusal], "once"
    assert len(list(sweep.launcher("slurm").glob("*.sbatch"))) == min(3, room)
    assert {each.stat().st_mode & 0o777 for each in sweep.launcher("slurm").glob("*.sbatch")} <= {
        0o600
    }


def _raise(error: BaseException):
    raise error


def test_lost_answer_is_found_without_resubmission(
    jobs_here, make_cluster, cluster, monkeypatch
) -> None:
    """Sbatch has taken the array; whoever called it was killed before it could say so."""
    jobs = jobs_here(3)
    taken = cluster.submit

    def submit(*arguments) -> str:
        taken(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        make_cluster(jobs).submit()
    monkeypatch.setattr(scheduler, "submit", taken)
    again = make_cluster(jobs)
    again.submit()
    assert cluster.submitted == [3]
    assert cluster.numbers(again) == {0: "100_0", 1: "100_1", 2: "100_2"}


def test_lost_answer_is_not_resubmitted_by_another_sweep(
    jobs_here, make_cluster, cluster, sweep, monkeypatch
) -> None:
    taken = cluster.submit
    monkeypatch.setattr(
        scheduler, "submit", lambda *asked: _raise(KeyboardInterrupt(taken(*asked)))
    )
    with pytest.raises(KeyboardInterrupt):
        make_cluster(jobs_here(2)).submit()
    monkeypatch.setattr(scheduler, "submit", taken)
    other = make_cluster(jobs_here(3))
    other.paths = SweepPaths(sweep.folder.with_name("sweep-ba9876543210"))
    other.submit()
    assert cluster.submitted == [2, 1]
    assert cluster.numbers(other) == {0: "100_0", 1: "100_1", 2: "101_0"}


@pytest.mark.parametrize("question", ["queue", "names"])
def test_unanswered_query_prevents_submission(question, jobs_here, make_cluster, cluster) -> None:
    jobs = jobs_here(2)
    if question == "names":
        cluster.room = 0
        made = make_cluster(jobs)
        made.submit()
        cluster.room = 100
    cluster.down = "squeue: no controller"
    with pytest.raises(EkeError, match="no controller"):
        make_cluster(jobs).submit()
    assert cluster.submitted == []


def test_full_queue_receives_the_remaining_runs_later(
    jobs_here, make_cluster, cluster, unfrozen
) -> None:
    jobs = jobs_here(10)
    cluster.room = 4
    made = make_cluster(jobs)
    made.submit()
    assert sum(cluster.submitted) == 4
    assert len(made.not_started()) == 6
    assert all("QOSMaxSubmit" in job.waiting_for for job in made.not_started())
    tries = cluster.asked.count("submit")
    made.look()
    assert cluster.asked.count("submit") == tries + 1, "one question while it is full"
    for element in list(cluster.now):
        cluster.end(element, "COMPLETED")
    for submitted in (8, 10):
        with submitting(made.folder) as lock:
            made.submit_missing(lock)
        assert sum(cluster.submitted) == submitted
        cluster.now.clear()
    assert len({*made.elements.values()}) == 10
    assert len(unfrozen) == 10, "a plan is written once, however often it is handed in"


def test_oversized_array_is_submitted_in_halves(jobs_here, make_cluster, cluster, unfrozen) -> None:
    """Where nobody can tell the site's limit; all runs are in the queue at once."""
    cluster.largest = 3
    made = make_cluster(jobs_here(8))
    made.submit()
    assert sum(cluster.submitted) == 8
    assert max(cluster.submitted) <= 3
    assert not made.not_started()


def test_two_submitters_submit_once(jobs_here, make_cluster, cluster, sweep) -> None:
    made, waited = make_cluster(jobs_here(2)), []
    made.sleep = waited.append
    with (
        submitting(sweep.launcher("slurm")),
        pytest.raises(BusyError, match="Try again"),
    ):
        made.submit()
    assert cluster.submitted == []
    assert sum(waited) == PATIENCE_S


def test_concurrent_sweep_finds_submitted_runs(jobs_here, make_cluster, cluster, sweep) -> None:
    """Two sweeps of the same second have a run in common: it is in the queue once."""
    first, second = make_cluster(jobs_here(1)), make_cluster(jobs_here(2))
    other = SweepPaths(sweep.folder.with_name("sweep-ba9876543210"))
    second.paths = other
    with contextlib.ExitStack() as held:
        lock = held.enter_context(submitting(sweep.launcher("slurm")))

        def meanwhile(_: float) -> None:
            first.books.answer_from_records()
            first.submit_missing(lock)
            held.close()

        second.sleep = meanwhile
        second.submit()
    assert cluster.submitted == [1, 1]
    assert cluster.numbers(second) == {0: "100_0", 1: "101_0"}


def test_other_users_may_submit_from_the_same_folder(sweep) -> None:
    before = os.umask(0o077)
    try:
        with submitting(sweep.launcher("slurm")):
            mode = (sweep.folder.parent / LEDGER_LOCK).stat().st_mode
    finally:
        os.umask(before)
    assert mode & 0o666 == 0o666


def test_busy_run_is_not_submitted(jobs_here, make_cluster, cluster) -> None:
    jobs = jobs_here(3)
    made = make_cluster(jobs)
    with lock_run_folder(RunPaths(paths_of(jobs[1]).folder)):
        made.submit()
    assert cluster.submitted == [2]
    assert "is in use" in jobs[1].waiting_for
    assert jobs[1].outcome is None
    made.look()
    assert cluster.submitted == [2, 1]


def test_dry_run_shows_scripts_without_queries(jobs_here, plan_with, sweep, cluster) -> None:
    jobs = jobs_here(3)
    with_values(jobs, plan_with, [{}, {}, {"resources.time": "2:00:00"}])
    text = SlurmLauncher().preview(jobs, sweep, "0123456789ab")
    assert text.count("#!/bin/bash") == 2
    assert "3 runs in 2 arrays" in text
    assert "60 min each, 1 GPU" in text
    assert cluster.asked == []
    assert not sweep.folder.exists()
