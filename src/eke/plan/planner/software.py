"""The software of a run, held against what it was planned with: the record names the worker's."""

from dataclasses import replace

from eke.common.errors import ChangedError
from eke.hardware import software_now
from eke.plan.identity import changed_fingerprint
from eke.plan.planner.plan import Plan


def with_own_software(plan: Plan) -> Plan:
    """The plan with the software of this process, as it is on disk now."""
    device = {key: plan.machine[key] for key in plan.machine if key.startswith("device")}
    return replace(plan, machine={**device, **software_now()})


def software_changes(plan: Plan) -> list[str]:
    """What of eke's source and the libraries' versions on disk is not as planned, in words."""
    return changed_fingerprint(plan.machine, with_own_software(plan).machine)


def check_software(plan: Plan, own: Plan | None = None) -> None:
    """Hold the software on disk against the plan.

    Args:
        plan: the run.
        own: what `with_own_software` has just returned; None looks at the disk, some 30 ms.

    Raises:
        ChangedError: something differs.
    """
    own = own or with_own_software(plan)
    if changes := changed_fingerprint(plan.machine, own.machine):
        told = "; ".join(changes)
        why = f"the software has changed since the run was planned ({told})"
        raise ChangedError(f"{why} -> the same command again")
