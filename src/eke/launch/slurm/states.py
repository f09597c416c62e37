"""SLURM's words for what a job does, and what they mean for a run.

All states of slurm.h (22.05 to 25.05), https://slurm.schedmd.com/job_state_codes.html.
"""

from enum import Enum

from eke.plan.record import Outcome


class Phase(Enum):
    """What SLURM has in mind with a job."""

    waits = "waits"
    """In the queue, also again."""
    runs = "runs"
    """On its nodes, or just leaving them."""
    over = "over"
    """It will not run again by itself."""
    unknown = "unknown"
    """A word that is not in the table: no verdict."""


_WAITS = (
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "RESV_DEL_HOLD", "RECONFIG_FAIL", "POWER_UP_NODE", "EXPEDITING",
)  # fmt: skip
_RUNS = (
    "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING",
    "UPDATE_DB",
)  # fmt: skip

OUT_OF_MEMORY = "OUT_OF_MEMORY"
"""Of the host's memory, which says nothing about a GPU's."""

OVER: dict[str, Outcome] = {
    "COMPLETED": Outcome.crashed,  # but without a record of ours
    "FAILED": Outcome.crashed,
    "LAUNCH_FAILED": Outcome.crashed,
    OUT_OF_MEMORY: Outcome.crashed,
    "CANCELLED": Outcome.cancelled,
    "REVOKED": Outcome.cancelled,
    "TIMEOUT": Outcome.timeout,
    "DEADLINE": Outcome.timeout,
    "PREEMPTED": Outcome.preempted,
    "NODE_FAIL": Outcome.preempted,
    "BOOT_FAIL": Outcome.preempted,
}
"""How a run has ended that left no record, by its job's last state."""

HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
"""Waits until somebody releases it: `scontrol release`."""


def phase_of(state: str) -> Phase:
    """What a state means; SLURM adds a `+` and a reason to some (`CANCELLED by 0`)."""
    word = state.split()[0].rstrip("+") if state.strip() else ""
    if word in _WAITS:
        return Phase.waits
    if word in _RUNS:
        return Phase.runs
    return Phase.over if word in OVER else Phase.unknown


def outcome_of(state: str) -> Outcome:
    """How a run ended whose job is over in this state and left no record."""
    word = state.split()[0].rstrip("+") if state.strip() else ""
    return OVER.get(word, Outcome.crashed)
