"""Starting one run of a pool on the devices it was granted."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from eke.common.paths import SHARED_DEVICE
from eke.launch.fork import ForkServer, modules_of
from eke.launch.local.devices import Devices, Grant
from eke.launch.processes.run_dir import Place
from eke.launch.processes.running_run import LiveRun
from eke.launch.processes.worker_process import spawn
from eke.plan.planner import Plan


def start_run(plan: Plan, place: Place, grant: Grant, server: ForkServer | None = None) -> LiveRun:
    """Start a run on its devices.

    Args:
        plan: what is to be done.
        place: where.
        grant: its devices.
        server: forks its process, if it can.

    Raises:
        BusyError: somebody works on this run.
        RunError: the folder cannot be written.
    """
    environment = grant.environment(plan.batch.world_size)
    if grant.shared:
        environment[SHARED_DEVICE] = "1"
    start = partial(server.start, plan) if server else spawn
    size = plan.batch.world_size
    with held_to(grant.cores()):
        return LiveRun(plan, place, size, environment, grant.descriptors, start=start)


@contextmanager
def forking(
    plans: Sequence[Plan], devices: Mapping[str, Devices], log: Path, say: Callable[[str], object]
) -> Iterator[ForkServer]:
    """A server that forks the runs of a sweep, ended with it; it starts with the first run.

    Args:
        plans: of the runs.
        devices: that they will have.
        log: where the server prints.
        say: tells the user what concerns all runs.
    """
    # On a CPU that several runs share, each is told how many threads it may have.
    common = [taken.threads() for kind, taken in devices.items() if kind == "cpu"]
    server = ForkServer(log, modules_of(plans), say, *common)
    try:
        yield server
    finally:
        server.close()


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
