"""Which run a pool starts next: in order, small ones into gaps, large ones never forgotten."""

from collections.abc import Callable, Iterable

from eke.launch.processes.sweep_job import Job

MAX_OVERTAKEN = 8
"""Runs that may be started before one that waits for more devices than are free; then what gets
free is kept for it. A number of runs and not a time: runs of a sweep last about equally long."""

Take = Callable[[Job, bool], bool]
"""Start a job if its devices can be had, and say so; the flag says to keep what is free until there
are enough."""


def start_what_fits(due: Iterable[Job], take: Take) -> list[Job]:
    """Start every job that can be started, in order; returns them.

    Args:
        due: jobs that could be started, the first of the sweep first.
        take: starts a job.
    """
    started: list[Job] = []
    passed_over: list[Job] = []
    too_many: dict[str, int] = {}
    for job in due:
        # What one job could not get, no later one gets that wants as much.
        fits = job.num_devices < too_many.get(job.kind, job.num_devices + 1)
        if not fits or not take(job, starves(job)):
            passed_over.append(job)
            wanted = 0 if starves(job) else job.num_devices
            too_many[job.kind] = min(wanted, too_many.get(job.kind, wanted))
            continue
        started.append(job)
        for other in passed_over:
            other.overtaken += other.kind == job.kind
    return started


def starves(job: Job) -> bool:
    """Whether enough others have been started before it."""
    return job.overtaken >= MAX_OVERTAKEN
