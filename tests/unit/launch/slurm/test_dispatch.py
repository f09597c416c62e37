"""Following a sweep through a cluster: what the queue says, what jobs leave, what is done then."""

import dataclasses

import pytest
from unit.launch.scripted import QuietBoard, QuietLedger, leave, look

from eke.common.paths import SweepPaths
from eke.launch.processes.sweep_scheduler import SweepState
from eke.launch.slurm.dispatch import MAX_MISSING_POLLS, Cluster, paths_of
from eke.launch.slurm.submission_file import read_ticket, write_ticket
from eke.plan.record import Outcome, read_record


def test_job_is_followed_from_queue_to_end(submitted, cluster) -> None:
    made = submitted()
    (job,) = made.books.jobs
    cluster.put("100_0", "PENDING", "Priority")
    look(made)
    assert (job.live, job.waiting_for) == (None, "job 100_0: Priority")
    cluster.put("100_0", "RUNNING")
    look(made)
    assert (job.where, job.waiting_for) == ("n1", "")
    assert job.live.paths == paths_of(job)
    leave(job, "ok", 20)
    cluster.end("100_0", "COMPLETED")
    look(made)
    assert (job.outcome, job.live, job.reused) == (Outcome.ok, None, False)
    assert not made.books.unfinished()
    assert "last_states" not in cluster.asked, "its record says it all"


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_final_record_ends_a_job_immediately(state, submitted, cluster) -> None:
    """What SLURM has still to do for the job, an epilog or a transfer, may take minutes."""
    made = submitted()
    (job,) = made.books.jobs
    cluster.put("100_0", "RUNNING")
    look(made)
    leave(job, "crashed", 3)
    look(made)
    assert job.outcome is None, "its job tries again"
    leave(job, "ok", 20, attempt=1)
    cluster.put("100_0", state)
    look(made)
    assert (job.outcome, job.live) == (Outcome.ok, None)
    assert not made.books.unfinished()


def test_requeued_job_waits_and_runs_again(submitted, cluster) -> None:
    made = submitted()
    (job,) = made.books.jobs
    cluster.put("100_0", "RUNNING")
    look(made)
    cluster.put("100_0", "COMPLETING")
    look(made)
    assert job.live is not None, "it is just leaving its node"
    cluster.put("100_0", "PENDING", "BeginTime")
    look(made)
    assert (job.live, job.waiting_for) == (None, "job 100_0: BeginTime")
    cluster.put("100_0", "RUNNING")
    look(made)
    assert job.live is not None
    assert cluster.submitted == [1]


def test_held_job_is_reported_with_the_release_command(submitted, cluster) -> None:
    made = submitted()
    cluster.put("100_0", "REQUEUE_HOLD", "launch failed requeued held")
    look(made)
    assert made.books.jobs[0].waiting_for.endswith("; scontrol release 100_0")


@pytest.mark.parametrize("state", ["NEW_IN_26", "", "COMPLETING"])
def test_unknown_state_is_neither_start_nor_end(state, submitted, cluster) -> None:
    made = submitted()
    cluster.put("100_0", state)
    look(made, 2 * MAX_MISSING_POLLS)
    assert made.books.running() == []
    assert made.books.jobs[0].outcome is None
    assert cluster.submitted == [1]


def test_missing_job_counts_as_finished_after_several_misses(submitted, cluster) -> None:
    made = submitted()
    cluster.end("100_0", "FAILED")
    look(made, MAX_MISSING_POLLS - 1)
    assert made.books.jobs[0].outcome is None
    look(made)
    assert made.books.jobs[0].outcome is Outcome.crashed


def test_reappearing_job_resets_the_miss_count(submitted, cluster) -> None:
    made = submitted()
    for _ in range(3):
        del cluster.now["100_0"]
        look(made, MAX_MISSING_POLLS - 1)
        cluster.put("100_0", "RUNNING")
        look(made)
    assert made.books.jobs[0].outcome is None


def test_unanswered_query_does_not_end_a_job(submitted, cluster) -> None:
    made = submitted(2)
    down = cluster.down = "squeue: no controller"
    look(made, 3 * MAX_MISSING_POLLS)
    assert [job.outcome for job in made.books.jobs] == [None, None]
    assert made.books.jobs[0].waiting_for == down
    cluster.down = ""
    look(made)
    assert made.missed == {}


@pytest.mark.parametrize(
    ("state", "outcome", "printed"),
    [
        ("CANCELLED by 0", "cancelled", False),
        ("OUT_OF_MEMORY", "crashed", False),
        ("COMPLETED", "crashed", True),
        (None, "crashed", False),
        ("RUNNING", None, False),
        ("NEW_IN_26", None, False),
    ],
)
def test_job_without_a_record_is_settled(state, outcome, printed, submitted, cluster) -> None:
    """It is looked into; what the controller still has is not over."""
    made = submitted()
    (job,) = made.books.jobs
    log = made.paths.launcher("slurm").absolute() / f"{made.elements[0]}.log"
    if printed:
        log.write_text("module: command not found")
    cluster.end("100_0", state)
    if state is None:
        del cluster.ended["100_0"]
    look(made, MAX_MISSING_POLLS + 2)
    assert cluster.submitted == [1]
    assert job.outcome is (Outcome[outcome] if outcome else None)
    if outcome:
        assert read_record(paths_of(job)).outcome == outcome
        # A folder of the login node's own.
        unseen = f" (no output in {log}: is that folder shared with the nodes?)"
        told = f" (output: {log})" if printed else unseen
        told = (state or "SLURM has no reason") + told * (outcome == "crashed")
        assert job.reason.partition("without a record: ")[2] == told


@pytest.mark.parametrize("outcome", ["preempted", "timeout"])
def test_cancelled_job_is_not_resubmitted(outcome, submitted, cluster) -> None:
    """scancel reaches the worker, too, and may kill the watcher before it has said why."""
    made = submitted()
    (job,) = made.books.jobs
    leave(job, outcome, 5)
    cluster.end("100_0", "CANCELLED by 1000")
    look(made, MAX_MISSING_POLLS)
    assert (job.outcome, cluster.submitted) == (Outcome.cancelled, [1])
    record = read_record(paths_of(job))
    assert (record.outcome, record.exit_code, record.steps_done) == ("cancelled", 75, 5)


@pytest.mark.parametrize("state", ["TIMEOUT", "NODE_FAIL"])
def test_lost_job_is_resubmitted_a_limited_number_of_times(state, submitted, cluster) -> None:
    made = submitted()
    (job,) = made.books.jobs
    said = f"the job ended without a record: {state}"
    for number in range(5):
        assert (job.outcome, cluster.numbers(made)) == (None, {0: f"{100 + number}_0"})
        cluster.end(f"{100 + number}_0", state)
        look(made, MAX_MISSING_POLLS)
        assert job.record.failure.message == said
    assert job.outcome is not None
    assert cluster.submitted == [1] * 5


@pytest.mark.parametrize(
    ("outcome", "again"), [("timeout", 2), ("preempted", 2), ("cancelled", 1), ("crashed", 1)]
)
def test_interrupted_run_is_resubmitted_unless_cancelled(
    outcome, again, submitted, cluster
) -> None:
    made = submitted()
    leave(made.books.jobs[0], outcome, 5)
    cluster.end("100_0", "FAILED")
    look(made, MAX_MISSING_POLLS)
    assert len(cluster.submitted) == again
    assert made.books.jobs[0].outcome is (None if again == 2 else Outcome[outcome])


@pytest.mark.parametrize("stalled", [2, 3])
def test_job_that_gave_up_is_not_resubmitted(stalled, submitted, cluster) -> None:
    """Five restarts that came to nothing would come to nothing five times more."""
    made = submitted()
    (job,) = made.books.jobs
    job.plan.config.slurm.max_restarts = 2
    leave(job, "timeout", 5)
    ticket = read_ticket(paths_of(job))
    write_ticket(paths_of(job), dataclasses.replace(ticket, stalled=stalled))
    cluster.end("100_0", "FAILED")
    look(made, MAX_MISSING_POLLS)
    assert job.outcome is (Outcome.timeout if stalled > 2 else None)
    assert cluster.submitted == ([1] if stalled > 2 else [1, 1])


@pytest.mark.parametrize("before", ["cancelled", "crashed"])
def test_record_of_an_earlier_job_is_not_used(
    before, jobs_here, machine, cluster, tmp_path
) -> None:
    (job,) = jobs_here(1)
    paths_of(job).folder.mkdir(parents=True)
    leave(job, before, 7)
    books = SweepState([job], QuietBoard(), QuietLedger(), machine.place_of)
    made = Cluster(books, SweepPaths(tmp_path / "runs" / "sweep-1"), "1", sleep=pytest.fail)
    made.submit()
    cluster.end("100_0", "NODE_FAIL")
    look(made, MAX_MISSING_POLLS)
    assert (job.outcome, job.record.outcome) == (None, "preempted")
    assert cluster.submitted == [1, 1]
    assert "NODE_FAIL" in job.record.failure.message


def test_final_record_is_never_overwritten(submitted, cluster) -> None:
    """Somebody else has finished the run just before its plan was frozen."""
    made = submitted()
    (job,) = made.books.jobs
    leave(job, "ok", 20)
    made.stamps[0] = paths_of(job).record.stat().st_mtime_ns
    cluster.end("100_0", "COMPLETED")
    look(made, MAX_MISSING_POLLS)
    assert job.outcome is Outcome.ok
