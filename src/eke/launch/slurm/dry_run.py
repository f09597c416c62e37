"""What a sweep would ask a cluster for, and the very text that sbatch would get."""

from collections.abc import Sequence

from eke.common.paths import SweepPaths
from eke.common.units import format_number
from eke.launch.processes.sweep_job import Job
from eke.launch.slurm import scheduler
from eke.launch.slurm.script import script_text
from eke.launch.slurm.submission import new_submission, submission_file
from eke.launch.slurm.submit import arrays, describe_request


def describe_arrays(jobs: Sequence[Job], paths: SweepPaths, sweep: str) -> str:
    """Every array with its batch script, and what all of them may take at most.

    Raises:
        ConfigError: a run asks for what sbatch would not read.
    """
    parts, hours = [], 0.0
    found = arrays(jobs, scheduler.max_array_size())
    for request, group in found:
        profile = group[0].plan.config.slurm
        intent = new_submission(sweep, [], profile.max_restarts)
        path = submission_file(paths.slurm, intent).absolute()
        text = script_text(request, profile, intent.name, path, len(group))
        parts += [f"array of {describe_request(request, len(group), profile)}\n\n{text}"]
        if objection := scheduler.objection_to(text):
            parts += [f"whether this array would be taken now: {objection}\n"]
        hours += request.gpu_hours * len(group)
    jobs_text = f"{format_number(len(jobs), 'run')} in {format_number(len(found), 'array')}"
    return "\n".join([*parts, f"{jobs_text}, at most {hours:.1f} GPU-hours; nothing was submitted"])
