"""Which run may be forked, and what its server imports: functions of plans and environments."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eke.plan.planner import Plan

READ_LATER = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Read by CUDA when it is first used, and the server never uses it (CUDA C++ Programming Guide,
environment variables)."""

OWN = "EKE_"
"""What eke's own variables begin with: read when they are needed."""


@dataclass(frozen=True)
class Surroundings:
    """What a process finds when it starts."""

    environment: Mapping[str, str]
    cores: frozenset[int]
    """Where it may run."""

    @staticmethod
    def here(environment: Mapping[str, str]) -> "Surroundings":
        """Of a process that this thread would start now."""
        return Surroundings(environment, frozenset(os.sched_getaffinity(0)))


def why_fresh(plan: Plan, worker: Surroundings, server: Surroundings) -> str:
    """Why a run needs a process that has imported nothing yet; empty when it may be forked.

    Whatever libraries may read while they are imported must be the server's. It is not known of
    every variable who reads it when, so that any other one counts.

    Args:
        plan: of the run.
        worker: what its process would find.
        server: what the server has found.
    """
    if plan.batch.world_size > 1:
        return f"it has {plan.batch.world_size} processes, which their agent starts"
    if plan.deepspeed is not None:
        return "DeepSpeed changes torch when it is imported"
    different = sorted(
        name
        for name in {*worker.environment, *server.environment}
        if worker.environment.get(name) != server.environment.get(name)
        and name not in READ_LATER
        and not name.startswith(OWN)
    )
    if different:
        return f"{different[0]} is not the server's, and may be read by an import"
    if worker.cores != server.cores and "OMP_NUM_THREADS" not in worker.environment:
        return "it has other cores than the server, and OpenMP counts them when it is loaded"
    return ""


def modules_of(plans: Iterable[Plan]) -> list[str]:
    """Modules that runs of a sweep need beside what all runs do: their models', and W&B's."""
    configs = [plan.config for plan in plans]
    families = sorted({config.model.family for config in configs})
    trackers = ["wandb"] if any(config.tracker.option == "wandb" for config in configs) else []
    return [f"transformers.models.{family}.modeling_{family}" for family in families] + trackers
