"""A sweep in a cluster beside others: other commands, other sweeps, and what it says meanwhile."""

import json
from pathlib import Path

import pytest
from unit.launch.scripted import QuietBoard, QuietLedger, leave, look, record_for

from eke import cli
from eke.common.errors import EkeError
from eke.common.paths import SweepPaths
from eke.launch.processes.run_dir import lock_run_folder
from eke.launch.processes.sweep_scheduler import SweepState
from eke.launch.slurm import scheduler
from eke.launch.slurm.cluster_run import ClusterRun
from eke.launch.slurm.dispatch import MAX_MISSING_POLLS, Cluster, paths_of
from eke.launch.slurm.submission_file import JobEntry, read_ticket, write_ticket
from eke.launch.slurm.submit_array import submitting
from eke.plan.record import Outcome

# --- others ---------------------------------------------------------------------------------------


def test_queued_runs_are_found_again(submitted, cluster) -> None:
    submitted(3)
    del cluster.now["100_1"]
    again = submitted(3)
    assert cluster.submitted == [3, 1]
    assert cluster.numbers(again) == {0: "100_0", 1: "101_0", 2: "100_2"}


def test_ticket_of_a_finished_job_is_ignored(submitted, cluster) -> None:
    made = submitted()
    write_ticket(paths_of(made.books.jobs[0]), JobEntry("/nowhere.json", 0))
    submitted()
    assert cluster.submitted == [1, 1]


def test_finished_runs_need_no_cluster(submitted, machine, cluster) -> None:
    machine.records = {"a": record_for("a", "ok", 20), "b": record_for("b", "diverged", 3)}
    cluster.down = "squeue is not there"
    made = submitted(2)
    assert [job.outcome for job in made.books.jobs] == [Outcome.ok, Outcome.diverged]
    assert cluster.asked == []
    made.wait()


def test_run_claimed_by_another_process_is_awaited(submitted, cluster) -> None:
    made = submitted()
    (job,) = made.books.jobs
    cluster.end("100_0", "FAILED")
    with lock_run_folder(paths_of(job)):
        look(made, 2 * MAX_MISSING_POLLS)
        assert job.outcome is None
        assert "is in use" in job.waiting_for
    leave(job, "ok", 20)
    look(made)
    assert job.outcome is Outcome.ok
    assert cluster.submitted == [1]


def test_run_finished_by_another_process_is_reused(submitted, cluster) -> None:
    cluster.room = 0
    made = submitted()
    (job,) = made.books.jobs
    leave(job, "ok", 20)
    cluster.room = 10
    look(made)
    assert (job.outcome, job.reused) == (Outcome.ok, True)
    assert cluster.submitted == []


def test_held_submission_lock_defers_submission(submitted, cluster) -> None:
    cluster.room = 0
    made = submitted()
    cluster.room = 10
    with submitting(made.paths.launcher("slurm")):
        look(made)
    assert cluster.submitted == []
    look(made)
    assert cluster.submitted == [1]


def test_only_own_jobs_are_shown_and_cancelled(jobs_here, machine, stubs, tmp_path, capsys) -> None:
    """A number may be another job's by now: a new cluster, MaxJobId, or a copied folder of runs."""
    for name, said in (("squeue", ""), ("sbatch", "5\n"), ("scontrol", ""), ("scancel", "")):
        stubs.say(name, said)
    runs = tmp_path / "runs"
    books = SweepState(jobs_here(2), QuietBoard(), QuietLedger(), machine.place_of)
    Cluster(books, SweepPaths(runs / "sweep-1"), "1").submit()
    name = Path(read_ticket(paths_of(books.jobs[0])).submission).stem

    def ask(*lines: str) -> tuple[str, str, list[str]]:
        """What status and cancel say, and which numbers scancel is given."""
        stubs.say("squeue", "\n".join(lines))
        capsys.readouterr()
        said = []
        for command in ("status", "cancel"):
            assert cli.main([command, str(runs)]) == 0
            said.append(capsys.readouterr().out)
        calls = stubs.calls("scancel")
        (stubs.folder / "calls").unlink()
        return said[0], said[1], calls

    status, cancel, calls = ask("5|0|RUNNING|n1|my_other_work|None", "5|1|PENDING||other|Priority")
    assert "2 not started" in status
    assert f"{name}_0" in status
    assert " 2 runs " in cancel
    assert calls == []
    # Requeued under its number, and submitted once more under another one.
    mine = [f"5|0|PENDING||{name}|BeginTime", f"9|0|RUNNING|n2|{name}|None"]
    status, cancel, calls = ask(*mine, f"9|1|PENDING||{name}|Priority", "6|0|RUNNING|n1|x|None")
    assert "job 9_0: running" in status
    assert "job 9_1: Priority" in status
    assert cancel.startswith("asked 2 runs ")
    assert calls == ["scancel 9_0 5_0 9_1"]


# --- dominance ------------------------------------------------------------------------------------


@pytest.fixture
def one_needs_more(monkeypatch):
    monkeypatch.setattr(
        "eke.launch.processes.sweep_scheduler.needs_at_least", lambda *_: "it needs no less"
    )


def run_out_of_memory(made, cluster) -> None:
    leave(made.books.jobs[0], "oom", 0)
    cluster.end("100_0", "FAILED")
    made.look()


def test_larger_runs_are_removed_from_the_queue_after_oom(
    submitted, cluster, one_needs_more
) -> None:
    made = submitted(4)
    cluster.put("100_3", "RUNNING")
    look(made)
    run_out_of_memory(made, cluster)
    outcomes = [job.outcome for job in made.books.jobs]
    assert outcomes == [Outcome.oom, Outcome.skipped, Outcome.skipped, None]
    assert cluster.cancelled == ["100_1", "100_2"]
    assert cluster.asked.count("cancel") == 1


def test_unanswered_cancellation_is_repeated(
    submitted, cluster, one_needs_more, monkeypatch
) -> None:
    made = submitted(3)

    def fail(elements) -> None:
        raise EkeError("scancel gave no answer")

    works = scheduler.cancel
    monkeypatch.setattr(scheduler, "cancel", fail)
    run_out_of_memory(made, cluster)
    monkeypatch.setattr(scheduler, "cancel", works)
    look(made)
    assert cluster.cancelled == ["100_1", "100_2"]


# --- the screen -----------------------------------------------------------------------------------


def test_one_query_per_look(submitted, cluster, unfrozen, monkeypatch) -> None:
    monkeypatch.setattr(ClusterRun, "record_lost", lambda run: record_for("x", "crashed"))
    made = submitted(100)
    cluster.asked.clear()
    look(made)
    assert cluster.asked == ["queue"]
    for element in list(cluster.now):
        cluster.end(element, "FAILED")
    look(made, MAX_MISSING_POLLS)
    assert cluster.asked == [*["queue"] * (MAX_MISSING_POLLS + 1), "last_states"]
    assert not made.books.unfinished()


def test_watching_ends_with_the_last_run(submitted, cluster, monkeypatch) -> None:
    made = submitted(2)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        # The plan is that of all tests of this folder.
        monkeypatch.setattr(made.books.jobs[0].plan.config.slurm, "poll_s", 0.0)
        if len(slept) == 3:
            for job, element in zip(made.books.jobs, ("100_0", "100_1"), strict=True):
                leave(job, "ok", 20)
                cluster.end(element, "COMPLETED")

    made.sleep = sleep
    made.wait()
    assert [job.outcome for job in made.books.jobs] == [Outcome.ok, Outcome.ok]


def test_sweep_file_lists_places_of_queued_runs(jobs_here, machine, cluster, tmp_path) -> None:
    from eke.launch.processes.sweep import SweepFile, SweepRun

    jobs = jobs_here(2)
    paths = SweepPaths(tmp_path / "runs" / "sweep-1")
    file = SweepFile(paths, ("-m",), [SweepRun(("seed=0",)), SweepRun(("seed=1",))])
    Cluster(SweepState(jobs, QuietBoard(), file, machine.place_of), paths, "1").submit()
    cells = json.loads(paths.sweep.read_text())["cells"]
    assert [cell["folder"] for cell in cells] == [job.folder for job in jobs]
