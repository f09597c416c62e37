"""What to do about steps that wait for their data."""

from eke.hardware import usable_cores
from eke.plan.planner.plan import Plan
from eke.plan.record.record import Timing

WORTH_SAYING_FRAC = 0.1
"""Without any waiting a step would then be 1 / (1 - 0.1) = 1.11 times as fast at the most; less
than that drowns in the spread of step times."""

MIN_STEPS = 10
"""Steady steps below which a share says nothing: one slow step would make it."""


def waiting_hints(plan: Plan, timing: Timing) -> list[str]:
    """A warning with the override to type, where waiting for data cost a good part of the time."""
    waited, steps = timing.data_frac, timing.steady_step_s
    if waited is None or steps is None or steps.n < MIN_STEPS or waited < WORTH_SAYING_FRAC:
        return []
    said = f"{waited:.0%} of the time of a step went by waiting for data"
    workers = plan.config.dataloader.workers
    cores = usable_cores() // plan.processes_per_node
    if workers == 0:
        return [f"{said} (dataloader=workers)"]
    if 2 * workers <= cores:
        return [f"{said} (dataloader.workers={2 * workers})"]
    return [f"{said}; {workers} loader processes are all that {cores} cores can feed"]
