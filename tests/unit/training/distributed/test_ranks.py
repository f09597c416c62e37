"""The processes of one run: who failed, and what one process does without the others."""

import pytest
import torch
import torch.distributed as dist

from eke.plan.record import Outcome
from eke.training.distributed.ranks import SINGLE_PROCESS, StepTotals
from eke.training.loop.agent import first_failed_rank
from eke.training.loop.failure import classify


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ({1: (5, -9)}, 1),
        ({0: (5, 1), 1: (5, -9)}, 1),
        ({0: (5, -9), 1: (5, 1)}, 0),
        ({0: (5, 1), 2: (5, 1), 1: (5, 1)}, 1),
        ({0: (5, 1), 1: (35, -9)}, 0),
        ({3: (4, 1), 1: (5, -11)}, 3),
    ],
    ids=["alone", "killed", "rank 0 killed", "not rank 0", "hung, killed later", "the first"],
)
def test_first_failed_rank_is_identified(ends, rank) -> None:
    assert first_failed_rank(ends) == rank


def test_single_process_sends_no_messages() -> None:
    assert not dist.is_initialized()
    totals = StepTotals(3, 2, 1, Outcome.preempted, (2, 0), (3, 0))
    values = torch.arange(3.0)
    assert SINGLE_PROCESS.totals([0, 2, 1], None) == StepTotals(1, 2, 1), (
        "a loss of 0 / 0 is no number"
    )
    assert SINGLE_PROCESS.totals([3, 2, 1, 2, 0, 3, 0], Outcome.preempted) == totals
    assert SINGLE_PROCESS.sum(values) is values
    assert SINGLE_PROCESS.tell("word") == "word"
    assert SINGLE_PROCESS.gather(7) == [7]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:537] Connection closed by peer"),
        RuntimeError("Timed out waiting 5000ms for recv operation to complete"),
        dist.DistBackendError("NCCL error in: ..."),
    ],
    ids=["gloo", "timeout", "nccl"],
)
def test_lost_contact_is_classified_as_a_crash_elsewhere(error) -> None:
    outcome, failure = classify(error, "backward")
    assert outcome is Outcome.crashed
    assert failure.lost_contact
    assert "another process" in failure.message


def test_ordinary_error_is_not_lost_contact() -> None:
    _, failure = classify(RuntimeError("shapes do not match"), "forward")
    assert not failure.lost_contact
