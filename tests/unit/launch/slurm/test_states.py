"""SLURM's words: every state of 22.05 to 25.05 has a meaning, and no other word has one."""

import pytest

from eke.launch.slurm.scheduler import HELD, Phase, outcome_of, phase_of
from eke.plan.record import Outcome

# https://slurm.schedmd.com/job_state_codes.html, base states and flags
STATES = {
    "BOOT_FAIL": "preempted",
    "CANCELLED": "cancelled",
    "COMPLETED": "crashed",
    "CONFIGURING": "waits",
    "COMPLETING": "runs",
    "DEADLINE": "timeout",
    "EXPEDITING": "waits",
    "FAILED": "crashed",
    "LAUNCH_FAILED": "crashed",
    "NODE_FAIL": "preempted",
    "OUT_OF_MEMORY": "crashed",
    "PENDING": "waits",
    "POWER_UP_NODE": "waits",
    "PREEMPTED": "preempted",
    "RECONFIG_FAIL": "waits",
    "REQUEUED": "waits",
    "REQUEUE_FED": "waits",
    "REQUEUE_HOLD": "waits",
    "RESIZING": "runs",
    "RESV_DEL_HOLD": "waits",
    "REVOKED": "cancelled",
    "RUNNING": "runs",
    "SIGNALING": "runs",
    "SPECIAL_EXIT": "waits",
    "STAGE_OUT": "runs",
    "STOPPED": "runs",
    "SUSPENDED": "runs",
    "TIMEOUT": "timeout",
    "UPDATE_DB": "runs",
}


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_a_meaning(state) -> None:
    meaning = STATES[state]
    if meaning in Phase.__members__:
        assert phase_of(state) is Phase[meaning]
    else:
        assert phase_of(state) is Phase.over
        assert outcome_of(state) is Outcome[meaning]


@pytest.mark.parametrize(
    ("said", "outcome"),
    [("CANCELLED by 0", "cancelled"), ("CANCELLED+", "cancelled"), ("COMPLETED+", "crashed")],
)
def test_what_sacct_adds(said, outcome) -> None:
    assert phase_of(said) is Phase.over
    assert outcome_of(said) is Outcome[outcome]


@pytest.mark.parametrize("word", ["", "  ", "NEW_IN_26", "running", "CD", "N/A", "COMPLETE"])
def test_an_unknown_word_is_no_verdict(word) -> None:
    assert phase_of(word) is Phase.unknown


def test_what_is_held_waits() -> None:
    assert {phase_of(state) for state in HELD} == {Phase.waits}
