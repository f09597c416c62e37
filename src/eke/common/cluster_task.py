"""Being one task of a step that srun started: one on each machine of a run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from eke.common.errors import ConfigError, Problem
from eke.common.paths import program


@dataclass(frozen=True)
class Task:
    """A task of a step of SLURM's."""

    node: int
    """Its number: 0 leads."""
    count: int
    """Tasks of the step, one for each machine."""
    step: str
    """Unlike that of any other step, restarts of the same job included: `123.0.1`."""


def this_task(environment: Mapping[str, str] = os.environ) -> Task:
    """Which task of its step this process is; the only one where SLURM has not started it."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, count, job, step = (environment.get(name, "") for name in names)
    if not (rank.isdecimal() and count.isdecimal()):
        return Task(0, 1, "")
    return Task(int(rank), int(count), f"{job}.{step}.{environment.get('SLURM_RESTART_COUNT', 0)}")


def check_started_tasks(what: str, num_nodes: int) -> None:
    """A step of SLURM's and the configuration must speak of the same number of machines.

    Args:
        what: `a run` or `a sweep`.
        num_nodes: what the configuration says; 1 for a sweep.

    Raises:
        ConfigError: they do not.
    """
    count = this_task().count
    if count in (1, num_nodes):
        return
    why = f"srun has started {count} tasks, and {what} takes one on each of its machines"
    fix = f"srun --ntasks={num_nodes} --ntasks-per-node=1 {program()} ..."
    raise ConfigError(Problem("distributed.num_nodes", str(num_nodes), why, fix))
