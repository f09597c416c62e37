"""The software of a run, held against what it was planned with: the record names the worker's."""

from dataclasses import replace

from eke.errors import ChangedError
from eke.hardware import software_now
from eke.identity import changed_fingerprint
from eke.plan.plan import Plan

OF_DEVICE = ("device", "device_count")
"""Parts of a machine's fingerprint that are no software."""


def with_own_software(plan: Plan) -> Plan:
    """The plan with the software of this process, as it is on disk now."""
    device = {key: plan.machine[key] for key in OF_DEVICE if key in plan.machine}
    return replace(plan, machine={**device, **software_now()})


def software_changes(plan: Plan) -> str:
    """What of the software is not as planned on this machine, and what helps; empty: nothing."""
    changes = changed_fingerprint(plan.machine, with_own_software(plan).machine)
    return (
        f"the software has changed since the run was planned ({'; '.join(changes)}) -> the same "
        "command again"
        if changes
        else ""
    )


def check_software(plan: Plan) -> None:
    """Hold eke's source and the libraries' versions on disk against the plan.

    Raises:
        ChangedError: something differs.
    """
    if why := software_changes(plan):
        raise ChangedError(why)
