"""What a tracker is told about a run: by its worker, and by `eke sync` afterwards."""

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from eke.common.masking import masked
from eke.plan.record import Record
from eke.results.trackers.tracker import Value

OF_SLURM = re.compile(r"\+*slurm[.=]")
SPEEDS = ("samples_per_s", "tokens_per_s", "mfu_frac", "steady_step_s")


def shown_of(
    overrides: Iterable[str],
    command: Iterable[str],
    factors: Mapping[str, str],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """What a tracker is told of how a run was asked for, as fields of a TrackedRun.

    No secret, and nothing of the group `slurm`: lines of shell are for this user alone.
    """
    typed, whole = ([w for w in words if not OF_SLURM.match(w)] for words in (overrides, command))
    return {
        "name": " ".join(masked(typed)) or "defaults",
        "notes": shlex.join(masked(whole)),
        "factors": {key: option for key, option in factors.items() if key != "slurm"},
        "config": masked({key: value for key, value in config.items() if key != "slurm"}),
    }


def tracker_id(folder: str, run_id: str) -> str:
    """A run's id in trackers: its folder's name, for runs beside another (`-2`) have one identity.

    A folder that was renamed says nothing; then it is the identity.
    """
    return folder if re.fullmatch(rf"{re.escape(run_id)}(-\d+)?", folder) else run_id


def summary_values(record: Record) -> Mapping[str, Value]:
    """The record's main numbers as flat values; what was not measured is left out.

    Speeds of a run that shared its device are absent, as in reports: they measure the neighbour.
    """
    memory = record.memory.measured
    step = record.timing.steady_step_s
    values: dict[str, Value | None] = {
        "outcome": record.outcome,
        "samples_per_s": record.throughput.samples_per_s,
        "tokens_per_s": record.throughput.tokens_per_s,
        "mfu_frac": record.throughput.mfu_frac,
        "steady_step_s": step.median if step else None,
        "peak_allocated_bytes": memory.peak_allocated_bytes if memory else None,
        "peak_reserved_bytes": memory.peak_reserved_bytes if memory else None,
        "eval_start": record.loss.eval_start,
        "eval_final": record.loss.eval_final,
        "python": record.environment.get("python"),
    }
    hidden = SPEEDS if record.shared_device else ()
    return {key: value for key, value in values.items() if value is not None and key not in hidden}
