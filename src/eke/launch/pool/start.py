"""Starting one run of a pool on the devices it was granted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from eke.launch.folder import Place
from eke.launch.live import LiveRun
from eke.launch.pool.devices import Grant
from eke.paths import SHARED_DEVICE
from eke.plan import Plan


def start_run(plan: Plan, place: Place, grant: Grant) -> LiveRun:
    """Start a run on its devices.

    Raises:
        BusyError: somebody works on this run.
        RunError: the folder cannot be written.
    """
    environment = grant.environment(plan.batch.world_size)
    if grant.shared:
        environment[SHARED_DEVICE] = "1"
    with held_to(grant.cores()):
        return LiveRun(plan, place, plan.batch.world_size, environment, grant.descriptors)


@contextmanager
def held_to(cores: set[int]) -> Iterator[None]:
    """Have processes that are started in here use these cores only; all of them if there is none.

    The kernel hands a thread's cores on to what it starts, so no code runs between fork and exec.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
