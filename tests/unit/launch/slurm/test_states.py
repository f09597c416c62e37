"""SLURM's words: every state of 22.05 to 25.05 has a meaning, and no other word has one."""

from eke.launch.slurm.scheduler import HELD, is_over, is_running, outcome_of
from eke.plan.record import Outcome

# https://slurm.schedmd.com/job_state_codes.html, base states and flags
MEANINGS = {
    "preempted": "BOOT_FAIL NODE_FAIL PREEMPTED",
    "cancelled": "CANCELLED REVOKED",
    "crashed": "COMPLETED FAILED LAUNCH_FAILED OUT_OF_MEMORY",
    "waits": (
        "CONFIGURING EXPEDITING PENDING POWER_UP_NODE RECONFIG_FAIL REQUEUED REQUEUE_FED "
        "REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT"
    ),
    "runs": "COMPLETING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED UPDATE_DB",
    "timeout": "DEADLINE TIMEOUT",
}
STATES = {state: meaning for meaning, states in MEANINGS.items() for state in states.split()}


OF_SACCT = {"CANCELLED by 0": "cancelled", "CANCELLED+": "cancelled", "COMPLETED+": "crashed"}


def test_every_slurm_state_has_a_meaning() -> None:
    for state, meaning in {**STATES, **OF_SACCT}.items():
        assert is_running(state) == (meaning == "runs"), state
        assert is_over(state) == (meaning not in ("runs", "waits")), state
        if is_over(state):
            assert outcome_of(state) is Outcome[meaning], state


def test_unknown_slurm_state_is_undecided() -> None:
    unknown = ("", "  ", "NEW_IN_26", "running", "CD", "N/A", "COMPLETE")
    assert not any(is_over(word) or is_running(word) for word in (*unknown, *HELD))
