"""A pool: every run once, one run's end never another's, signals, crashes, memory."""

import os
import signal
from collections import deque

import pytest
from unit.launch.scripted import record_for

from eke.common.errors import ConfigError, EkeError, Problem
from eke.launch.local import MAX_QUEUE_JUMPS
from eke.plan.record import Outcome


def test_device_never_has_two_runs(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(*[1, 2, 1, 3, 1, 1, 2, 1, 4, 1])
    machine.ends = {job.plan.run_id: deque([("ok", 20, job.number % 4)]) for job in jobs}
    pool = make_pool(jobs, gpus(4))
    looked = pool.step

    def step() -> None:
        looked()
        used = [s.device for job in pool.books.running() for s in job.grant.slots]
        assert len(used) == len(set(used))

    pool.step = step
    pool.wait()
    assert {job.outcome for job in jobs} == {Outcome.ok}
    assert len(machine.started) == len(jobs)


@pytest.mark.parametrize("outcome", ["crashed", "diverged", "timeout"])
def test_failed_run_does_not_end_other_runs(outcome, make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1, 1, 1)
    machine.ends["a"] = deque([(outcome, 0, 0)])
    machine.ends["b"] = deque([("ok", 20, 0)])
    pool = make_pool(jobs, gpus(3))
    pool.wait()
    assert jobs[0].outcome is Outcome[outcome]
    assert [job.outcome for job in jobs[1:]] == [Outcome.ok, Outcome.ok]


def test_unexpected_error_of_one_run_does_not_stop_the_others(make_jobs, make_pool, gpus) -> None:
    jobs = make_jobs(1, 1, 1)
    pool = make_pool(jobs, gpus(3))
    settled = pool.books.settle

    def settle(job, *arguments, **options) -> None:
        if job is jobs[0]:
            raise TypeError("a number is missing")
        settled(job, *arguments, **options)

    pool.books.settle = settle
    pool.wait()
    assert [job.outcome for job in jobs] == [Outcome.crashed, Outcome.ok, Outcome.ok]
    assert jobs[0].reason.endswith("TypeError: a number is missing")
    assert not pool.books.running()


def test_small_run_fills_the_gap_before_a_large_run(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1, 2, 1)
    machine.ends["a"] = deque([("ok", 20, 5)])
    make_pool(jobs, gpus(2)).wait()
    assert [run for run, _ in machine.started] == ["a", "c", "b"]


def test_large_run_does_not_starve(make_jobs, make_pool, machine, gpus) -> None:
    """Two GPUs, small runs that never end together, and one run that needs both."""
    jobs = make_jobs(1, 2, *[1] * 23)
    machine.ends = {job.plan.run_id: deque([("ok", 20, 3 + job.number % 2)]) for job in jobs}
    make_pool(jobs, gpus(2)).wait()
    order = [run for run, _ in machine.started]
    assert order.index("b") <= MAX_QUEUE_JUMPS + 2
    assert len(order) == 25


def test_crashed_run_is_retried_once(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1, 1)
    machine.ends["a"] = deque([("crashed", 0, 0), ("ok", 20, 0)])
    machine.ends["b"] = deque([("crashed", 0, 0)])
    make_pool(jobs, gpus(1)).wait()
    assert [job.outcome for job in jobs] == [Outcome.ok, Outcome.crashed]
    assert [run for run, _ in machine.started].count("b") == 2


def test_finished_runs_reuse_their_records(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1, 1, 1)
    machine.finished = {"a": record_for("a", "ok", 20), "c": record_for("c", "diverged", 4)}
    make_pool(jobs, gpus(1)).wait()
    assert [job.reused for job in jobs] == [True, False, True]
    assert [job.outcome for job in jobs] == [Outcome.ok, Outcome.ok, Outcome.diverged]
    assert machine.started == [("b", "GPU 0")]


def test_outdated_records_are_reported_once_with_the_reason(
    make_jobs, make_pool, machine, gpus
) -> None:
    jobs = make_jobs(1, 1, 1, 1)
    whatever = machine.place_of
    differs = {"a": ("torch: 1 -> 2", "eke_source: x -> y"), "b": ("eke_source: x -> y",)}
    differs["d"] = differs["a"]
    pool = make_pool(jobs, gpus(1))
    pool.books.place_of = lambda plan: whatever(plan)._replace(
        outdated=differs.get(plan.run_id, ())
    )
    pool.wait()
    assert pool.books.board.notes == [
        "repeated in a new folder: 2 runs (torch: 1 -> 2; eke_source: x -> y). "
        "eke report shows both",
        "repeated in a new folder: 1 run (eke_source: x -> y). eke report shows both",
    ]


def test_run_finished_by_another_pool_is_not_repeated(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1)
    machine.busy = {"a"}
    pool = make_pool(jobs, gpus(1))
    answered = pool.launch

    def launch(job, grant) -> None:
        answered(job, grant)
        machine.finished["a"] = record_for("a", "ok", 20)

    pool.launch = launch
    pool.wait()
    assert (jobs[0].outcome, machine.started) == (Outcome.ok, [])


def test_start_error_is_reported_on_one_line(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1, 1)
    pool = make_pool(jobs, gpus(1))

    def start(plan, paths, grant):
        if plan.run_id == "a":
            raise ConfigError(Problem("paths.runs", "r", "is full", "paths.runs=X", passing=True))
        return machine.start(plan, paths, grant)

    pool.start = start
    pool.wait()
    assert [job.outcome for job in jobs] == [Outcome.crashed, Outcome.ok]
    assert jobs[0].reason == "paths.runs = r is full -> paths.runs=X"


def test_failed_lease_does_not_stop_running_runs(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1, 1)
    machine.ends["a"] = deque([("ok", 20, 9)])
    pool = make_pool(jobs, gpus(2))
    take = pool.devices["cuda"].take

    def full_when_one_runs(count, *, gather=False, **options):
        if pool.books.running():
            raise EkeError("no device can be leased")
        return take(count, gather=gather, **options)

    pool.devices["cuda"].take = full_when_one_runs
    pool.wait()
    assert [job.outcome for job in jobs] == [Outcome.ok, Outcome.ok]

    def full(count, **options):
        raise EkeError("no device can be leased")

    pool = make_pool(make_jobs(1), gpus(2))
    pool.devices["cuda"].take = full
    with pytest.raises(EkeError, match="no device can be leased"):
        pool.wait()


def test_run_with_too_many_devices_is_rejected(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(3, 1)
    make_pool(jobs, gpus(2)).wait()
    assert [job.outcome for job in jobs] == [Outcome.refused, Outcome.ok]
    assert "needs 3 devices" in jobs[0].reason


def test_stopped_pool_waits_for_checkpoints_and_starts_no_run(
    make_jobs, make_pool, machine, gpus
) -> None:
    jobs = make_jobs(1, 1, 1, 1)
    machine.ends = {job.plan.run_id: deque([("ok", 20, 1000)]) for job in jobs}
    pool = make_pool(jobs, gpus(2))
    looked = pool.step

    def step() -> None:
        looked()
        if len(pool.books.running()) == 2 and not pool.heard:
            os.kill(os.getpid(), signal.SIGTERM)

    pool.step = step
    pool.wait()
    assert [run.signals for run in machine.runs] == [[signal.SIGTERM]] * 2
    assert [job.outcome for job in jobs] == [Outcome.preempted] * 2 + [None] * 2
    assert [job.waiting_for for job in jobs] == [""] * 4, "nothing waits for devices any more"


def test_internal_pool_error_leaves_no_worker(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1, 1)
    machine.ends = {job.plan.run_id: deque([("crashed", 0, 10**9)]) for job in jobs}
    pool = make_pool(jobs, gpus(2))

    def update(jobs) -> None:
        raise RuntimeError("the terminal is gone")

    pool.books.board.update = update
    with pytest.raises(RuntimeError, match="terminal"):
        pool.wait()
    assert pool.books.running() == []
    assert gpus(2).take(2) is not None, "their devices are free"
