"""How a run ended: a written outcome stands; without one, the exit says why."""

import dataclasses
import resource
import signal

import pytest
from unit.plan.record.samples import bare_record, step_row

from eke.common.text import GIB
from eke.launch.processes.run_attempt import (
    LOG_LINES,
    SECOND_SIGNAL_REASON,
    describe_exit,
    finish_attempt,
    log_tail,
)
from eke.plan.record import (
    DeadRank,
    Failure,
    Outcome,
    RankFailure,
    metrics,
    read_record,
    start_attempt,
    write_end,
    write_record,
)
from eke.results.report.summary import render_summary


def test_written_outcome_overrides_the_exit_code(paths, plan) -> None:
    number = start_attempt(paths, {})
    record = bare_record(attempt=number)
    write_record(paths, record)
    for code in (0, 1, -signal.SIGABRT, -signal.SIGKILL):
        assert finish_attempt(paths, plan, code, attempts_before=0) == record


@pytest.mark.parametrize(
    ("code", "words"),
    [(-signal.SIGKILL, "SIGKILL"), (-40, "signal 40"), (0, "exit code 0")],
    ids=["killed", "real-time signal", "no error"],
)
def test_silent_crash_gets_a_record(code, words, paths, plan) -> None:
    start_attempt(paths, {})
    metrics.append_rows(paths.metrics, [step_row(1), step_row(2)])
    paths.log.write_text("\n".join(f"line {n}" for n in range(100)))
    record = finish_attempt(paths, plan, code, attempts_before=0)
    assert (record.outcome, record.exit_code, record.attempt) == ("crashed", 1, 0)
    assert words in record.failure.message
    assert record.failure.traceback.splitlines() == [f"line {n}" for n in range(60, 100)]
    assert len(record.failure.traceback.splitlines()) == LOG_LINES
    assert record.steps_done == 2
    assert record.loss.train_final == 2.0
    assert record.environment, "time, host and versions"
    assert read_record(paths).failure == record.failure


def test_run_killed_by_a_second_signal_is_cancelled(paths, plan) -> None:
    number = start_attempt(paths, {})
    record = finish_attempt(
        paths, plan, -signal.SIGKILL, attempts_before=0, cancelled=SECOND_SIGNAL_REASON
    )
    assert (record.outcome, record.exit_code) == ("cancelled", 75)
    assert record.failure.phase == "worker"
    write_record(paths, bare_record(attempt=number))
    saved = finish_attempt(
        paths, plan, -signal.SIGKILL, attempts_before=0, cancelled=SECOND_SIGNAL_REASON
    )
    assert saved.outcome == "ok", "it had written how it ended"


def test_worker_that_died_at_start_counts_as_an_attempt(paths, plan) -> None:
    """The record of an earlier one is not taken for its own."""
    record = finish_attempt(paths, plan, 1, attempts_before=0)
    assert (record.outcome, record.attempt, record.steps_done) == ("crashed", 0, 0)
    assert record.failure.traceback == ""
    start_attempt(paths, {})
    write_record(paths, bare_record(outcome="cancelled", exit_code=75, attempt=0))
    start_attempt(paths, {})
    record = finish_attempt(paths, plan, -signal.SIGKILL, attempts_before=1)
    assert (record.outcome, record.attempt) == ("crashed", 1)


@pytest.mark.parametrize(
    ("code", "kind", "given_up", "told"),
    [
        (-signal.SIGKILL, "cpu", False, True),
        (-signal.SIGKILL, "cpu", True, False),
        (-signal.SIGSEGV, "cpu", False, False),
        (-signal.SIGKILL, "cuda", False, False),
    ],
    ids=["killed", "somebody would not wait", "another signal", "a GPU's memory is another"],
)
def test_possible_oom_kill_gets_memory_advice(code, kind, given_up, told, paths, plan) -> None:
    start_attempt(paths, {})
    device = dataclasses.replace(plan.device, kind=kind, memory_bytes=8 * GIB)
    plan = dataclasses.replace(plan, device=device)
    record = finish_attempt(
        paths, plan, code, attempts_before=0, cancelled=SECOND_SIGNAL_REASON * given_up
    )
    assert bool(record.memory.advice) is told
    summary = render_summary(record, str(paths.folder))
    assert ("would need less" in summary) is told
    assert read_record(paths).memory.advice == record.memory.advice


def test_killed_rank_without_record_gets_a_record(paths, plan) -> None:
    number = start_attempt(paths, {})
    write_record(paths, lost(number))
    write_end(paths, DeadRank(number, 1, -signal.SIGKILL))
    plan = dataclasses.replace(plan, device=dataclasses.replace(plan.device, memory_bytes=8 * GIB))
    assert finish_attempt(paths, plan, 1, attempts_before=0).memory.advice


def test_tail_of_a_binary_log_is_readable(paths) -> None:
    assert log_tail(paths) == ""
    paths.log.write_bytes(b"good\n\xff\xfe bad\n")
    assert log_tail(paths).splitlines()[0] == "good"


def lost(attempt: int):
    """Rank 0's record of a run whose other process is gone."""
    record = bare_record(outcome="crashed", exit_code=1, attempt=attempt)
    record.failure = Failure("backward", "another process of this run is gone", lost_contact=True)
    return record


def test_failure_of_a_rank_replaces_the_symptom(paths, plan) -> None:
    number = start_attempt(paths, {})
    write_record(paths, lost(number))
    told = Failure("forward", "out of memory in forward: 2 GiB", "trace")
    write_end(paths, RankFailure(number, 3, Outcome.oom, told))
    record = finish_attempt(paths, plan, 1, attempts_before=0)
    assert (record.outcome, record.exit_code) == ("oom", Outcome.oom.exit_code)
    assert record.failure.message == "process 3 of this run: out of memory in forward: 2 GiB"
    assert read_record(paths) == record


@pytest.mark.parametrize(
    ("dead", "named"),
    [
        ([(1, -signal.SIGSEGV, 0)], "process 1 of this run: killed by SIGSEGV"),
        ([(0, 1, 0), (4, -signal.SIGKILL, 1), (8, 1, 2)], "process 4 of this run: killed by"),
    ],
    ids=["one", "of several machines the killed one"],
)
def test_silent_dead_rank_is_named(dead, named, paths, plan) -> None:
    number = start_attempt(paths, {})
    write_record(paths, lost(number))
    for rank, code, node in dead:
        write_end(paths, DeadRank(number, rank, code, node))
    record = finish_attempt(paths, plan, 1, attempts_before=0)
    assert record.failure.message.startswith(named)


def test_early_end_of_rank_0_keeps_its_failure(paths, plan) -> None:
    """It gave up waiting for a process that hangs; that one was killed afterwards.

    Notes of an earlier attempt count for nothing.
    """
    start_attempt(paths, {})
    write_end(paths, RankFailure(0, 1, Outcome.oom, Failure("forward", "old")))
    write_end(paths, DeadRank(0, 1, -9))
    number = start_attempt(paths, {})
    write_record(paths, lost(number))
    assert finish_attempt(paths, plan, 1, attempts_before=1) == lost(number)
    write_end(paths, DeadRank(number, 0, 1))
    assert finish_attempt(paths, plan, 1, attempts_before=1) == lost(number)


def test_rank_failure_is_kept_without_a_record_of_rank_0(paths, plan) -> None:
    number = start_attempt(paths, {})
    write_end(paths, RankFailure(number, 1, Outcome.oom, Failure("forward", "2 GiB")))
    record = finish_attempt(paths, plan, -signal.SIGKILL, attempts_before=0)
    assert (record.outcome, record.failure.phase) == ("oom", "forward")


@pytest.mark.parametrize("content", ["", "[]", '{"attempt": 0}'])
def test_torn_end_files_are_ignored(content, paths, plan) -> None:
    number = start_attempt(paths, {})
    write_record(paths, lost(number))
    paths.rank_failure(1).write_text(content)
    paths.dead_rank().write_text(content)
    assert finish_attempt(paths, plan, 1, attempts_before=0) == lost(number)


NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("code", "limits", "named"),
    [
        (-signal.SIGXCPU, (6, NO_LIMIT), True),
        (-signal.SIGKILL, (6, 7), True),
        (-signal.SIGKILL, (6, NO_LIMIT), False),
        (-signal.SIGTERM, (6, 7), False),
    ],
    ids=["soft", "hard", "soft and killed", "another signal"],
)
def test_cpu_time_limit_is_named(code, limits, named, monkeypatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    assert ("CPU time" in describe_exit(code)) is named
    assert signal.Signals(-code).name in describe_exit(code)
