"""What a job asks before it acts: why SLURM signals it, and whether its node is the right one."""

import dataclasses
import signal

import pytest
from unit.launch.scripted import record_for

from eke.common.errors import EkeError
from eke.launch.slurm import watcher
from eke.launch.slurm.watcher import for_this_node, reason_of, with_reason
from eke.plan.record import Failure, Outcome, read_record

TERM, INT, USR1, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2

# As seen in SLURM 22.05: signal, the controller's books, SLURM_RESTART_COUNT -> why.
BOOKS = {
    "time limit ahead": (USR2, {"JobState": "RUNNING"}, "", "timeout"),
    "time limit ahead, another signal": (USR1, {}, "", "timeout"),
    "time limit": (TERM, {"JobState": "COMPLETING", "Reason": "TimeLimit"}, "", "timeout"),
    "time limit, later": (TERM, {"JobState": "TIMEOUT", "Reason": "TimeLimit"}, "", "timeout"),
    "grace of a preemption": (TERM, {"JobState": "RUNNING", "Restarts": "0"}, "", "preempted"),
    "a few ms of it": (TERM, {"JobState": "SIGNALING", "Restarts": "0"}, "", "preempted"),
    "in grace, second start": (TERM, {"JobState": "RUNNING", "Restarts": "1"}, "1", "preempted"),
    "put back": (TERM, {"JobState": "COMPLETING", "Restarts": "1"}, "", "preempted"),
    "put back again": (TERM, {"JobState": "COMPLETING", "Restarts": "2"}, "1", "preempted"),
    "waits already": (TERM, {"JobState": "PENDING", "Restarts": "1"}, "", "preempted"),
    "scancel": (TERM, {"JobState": "COMPLETING", "Restarts": "0"}, "", "cancelled"),
    "scancel, second start": (TERM, {"JobState": "COMPLETING", "Restarts": "1"}, "1", "cancelled"),
    "scancel, gone": (TERM, {"JobState": "CANCELLED", "Restarts": "0"}, "", "cancelled"),
    "no answer": (TERM, {}, "", "preempted"),
    "no answer, second start": (TERM, {}, "1", "preempted"),
    "Ctrl-C": (INT, {"JobState": "RUNNING"}, "", "cancelled"),
}


@pytest.mark.parametrize("case", BOOKS)
def test_reason_of_a_slurm_signal_is_found(case) -> None:
    number, job, count, why = BOOKS[case]
    environment = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "5"}
    environment |= {"SLURM_RESTART_COUNT": count} if count else {}
    asked = []
    assert reason_of(number, environment, lambda e: asked.append(e) or job) is Outcome[why]
    assert set(asked) <= {"5_3"}, "the bare id is the whole array's"


def test_reason_outside_an_array_needs_no_query() -> None:
    assert reason_of(TERM, {}, pytest.fail) is Outcome.preempted


@pytest.mark.parametrize("wrote", ["timeout", "preempted", "cancelled"])
def test_accounting_reason_is_used(wrote, paths) -> None:
    record = with_reason(paths, record_for("a", wrote, 3), Outcome.cancelled)
    assert (record.outcome, record.exit_code) == ("cancelled", 75)


@pytest.mark.parametrize("wrote", ["ok", "oom", "diverged", "crashed"])
def test_finished_job_keeps_outcome(wrote, paths) -> None:
    assert with_reason(paths, record_for("a", wrote, 3), Outcome.timeout).outcome == wrote
    assert not paths.record.exists()
    assert with_reason(paths, record_for("a", wrote, 3), None).outcome == wrote


def test_worker_killed_by_the_signal_was_interrupted(paths) -> None:
    record = record_for("a", "crashed", 3)
    record.failure = Failure("worker", "killed by SIGUSR2")
    assert with_reason(paths, record, Outcome.timeout, -signal.SIGUSR2).outcome == "timeout"
    assert (read_record(paths).outcome, read_record(paths).failure) == ("timeout", None)
    record = record_for("a", "crashed", 3)
    record.failure = Failure("worker", "killed by SIGSEGV")
    assert with_reason(paths, record, Outcome.timeout, -signal.SIGSEGV).outcome == "crashed"
    record.failure = Failure("backward", "a signal came later")
    assert with_reason(paths, record, Outcome.timeout, -signal.SIGUSR2).outcome == "crashed"


@pytest.fixture
def node(monkeypatch):
    """This node has such a device."""

    def make(device) -> None:
        monkeypatch.setattr(watcher, "choose_device", lambda option: (device, ""))
        monkeypatch.setattr(watcher, "machine_fingerprint", lambda d: {"device": d.name})

    return make


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def gpu(plan, name: str, count: int = 1):
    return dataclasses.replace(plan.device, kind="cuda", name=name, count=count)


@pytest.mark.parametrize(
    ("planned", "here"), [(H100, H100), ("some GPU", "some GPU")], ids=["known", "unknown"]
)
def test_planned_gpu_is_accepted(planned, here, plan, node) -> None:
    node(gpu(plan, here))
    wanted = dataclasses.replace(plan, device=gpu(plan, planned))
    found = for_this_node(wanted)
    assert found.device.name == here
    assert found.machine == {"device": here}, "what the record says is the node's"


@pytest.mark.parametrize(
    ("planned", "here"),
    [(H100, A100), ("some GPU", "another GPU"), (H100, "some GPU"), ("some GPU", H100)],
)
def test_different_gpu_is_rejected_with_a_fix(planned, here, plan, node) -> None:
    node(gpu(plan, here))
    with pytest.raises(EkeError, match=rf"{planned}.*{here}.*constraint"):
        for_this_node(dataclasses.replace(plan, device=gpu(plan, planned)))


def test_too_few_gpus_are_rejected(plan, node) -> None:
    node(gpu(plan, H100, 1))
    batch = dataclasses.replace(plan.batch, world_size=2)
    with pytest.raises(EkeError, match="needs 2 GPUs, 1 visible"):
        for_this_node(dataclasses.replace(plan, device=gpu(plan, H100), batch=batch))
