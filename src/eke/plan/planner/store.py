"""Plans on disk: what the worker reads."""

from typing import Any

import cattrs

from eke.common.errors import RunError
from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths
from eke.config.schema.codec import make_converter
from eke.plan.planner.plan import Plan


def plan_to_plain(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    content: dict[str, Any] = make_converter().unstructure(plan)
    return content


def write_plan(paths: RunPaths, plan: Plan) -> None:
    """Freeze the plan into its run folder."""
    write_json(paths.plan, plan_to_plain(plan))


def read_plan(paths: RunPaths) -> Plan:
    """The plan of a run folder.

    Raises:
        RunError: there is none, or it cannot be read.
    """
    try:
        return make_converter().structure(read_json(paths.plan), Plan)
    except (OSError, ValueError, TypeError, AttributeError, cattrs.BaseValidationError) as error:
        raise RunError(f"{paths.plan}: not a readable plan ({error})") from error
