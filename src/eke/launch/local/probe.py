"""Trying a run of a sweep out, on devices that nobody else has."""

from eke.launch.local.devices import Devices
from eke.launch.local.start import start_run
from eke.launch.processes.probe import Probed, probe
from eke.launch.processes.run_dir import Place
from eke.launch.processes.running_run import LiveRun
from eke.plan.planner import Plan


def probe_in_pool(plan: Plan, devices: Devices) -> Probed:
    """Run the trial of a plan as its run would be started, if its devices are free now.

    Args:
        plan: of the run, with the micro-batch in question.
        devices: of the sweep.

    Raises:
        KeyboardInterrupt: a signal asked to stop; no process is left.
        RunError: the folder for temporary files cannot be written.
    """
    grant = devices.take(plan.batch.world_size * plan.batch.devices)
    if grant is None:
        return Probed(None, devices.why or "there are too few devices")

    def start(trial: Plan, place: Place) -> LiveRun:
        return start_run(trial, place, grant)

    try:
        return probe(plan, start)
    finally:
        grant.release()
