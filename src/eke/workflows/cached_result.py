"""A finished run is answered from its record, whatever keeps it from being started now."""

from collections.abc import Callable

from eke.common.errors import ConfigError
from eke.estimate.memory import DOES_NOT_FIT
from eke.launch import FOR_WRITING, Place
from eke.plan.planner import Plan

FOR_STARTING = FOR_WRITING | {DOES_NOT_FIT}
"""Rules about the machine as it is now: room on a disk, and in a memory that others use, too."""


def plan_unless_answered(
    planned: Callable[[bool], Plan], place_of: Callable[[Plan], Place]
) -> Plan:
    """The plan of a run that is to start, or of one that its record answers.

    Args:
        planned: makes the plan; told whether nothing will be run.
        place_of: where a plan's run is.

    Raises:
        ConfigError: every rule it breaks, unless they are about now and there is a record.
    """
    try:
        return planned(False)
    except ConfigError as error:
        if not {problem.rule for problem in error.problems} <= FOR_STARTING:
            raise
        try:
            plan = planned(True)
            answered = place_of(plan).record is not None
        except OSError:  # a folder with such a name, or behind such rights, cannot be read either
            raise error from None
        if not answered:
            raise
        return plan
