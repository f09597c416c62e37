"""What a run may spend on its choice of a micro-batch, and how one is tried out."""

from collections.abc import Callable

from eke.common.started_ranks import is_first, ranks_are_started
from eke.config.schema import Config
from eke.estimate.memory import Trial, stop_tracing
from eke.launch import Probed, find_devices, probe, probe_in_pool
from eke.plan.planner import Plan
from eke.workflows.auto_batch import Means
from eke.workflows.console import say


def means_of_a_run(config: Config) -> Means:
    """What a single run may spend that is to start on this machine.

    Processes that somebody else has started each make the plan, and have to come to the same.
    """
    if ranks_are_started():
        why = "processes that another launcher has started are not tried out"
        return Means(not_probed=why, keep=is_first())
    if config.distributed.num_nodes > 1:
        return Means(trace=True, not_probed="it has several machines", keep=True)
    return Means(trace=True, probe=probe_aloud, keep=True)


def means_of_a_cell(config: Config, in_cluster: bool) -> Means:
    """What a run of a sweep may spend on its choice, before the first one starts.

    Args:
        config: of the run.
        in_cluster: it will run on a node of a cluster, not here.
    """
    if config.plan_only:
        return Means(in_pool=not in_cluster)
    if in_cluster:
        return Means(trace=True, not_probed="the cluster's nodes are not this machine", keep=True)
    return Means(trace=True, probe=probe_cell, in_pool=True, keep=True)


def probe_cell(plan: Plan) -> Trial:
    """Try a run of a sweep out, if its devices are free."""
    launcher = plan.config.launcher
    devices = find_devices(plan.device.kind, launcher.cpu_slots, launcher.runs_per_device)
    return probe_aloud(plan, lambda each: probe_in_pool(each, devices))


def probe_aloud(plan: Plan, probe: Callable[[Plan], Probed] = probe) -> Trial:
    """Try a plan out, and say so."""
    size = plan.batch.per_device
    stop_tracing()
    say(f"  probing batch.per_device={size}: two steps, to see whether they fit into memory")
    found = probe(plan)
    if found.fits is None:
        say(f"  the probe says nothing: {found.reason}")
        return Trial.unknown
    say(f"  batch.per_device={size} {'fits' if found.fits else f'does not fit: {found.reason}'}")
    return Trial.fits if found.fits else Trial.fails
