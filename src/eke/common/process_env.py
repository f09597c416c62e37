"""Command and environment of the processes that eke starts; ranks that others started."""

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, WORLD_SIZE, program, source_folder


@dataclass(frozen=True)
class SlurmTask:
    """A task of a step of SLURM's."""

    node: int
    """Its number: 0 leads."""
    count: int
    """Tasks of the step, one for each machine."""
    step: str
    """Unlike that of any other step, restarts of the same job included: `123.0.1`."""


def this_task(environment: Mapping[str, str] = os.environ) -> SlurmTask:
    """Which task of its step this process is; the only one where SLURM has not started it."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, count, job, step = (environment.get(name, "") for name in names)
    if not (rank.isdecimal() and count.isdecimal()):
        return SlurmTask(0, 1, "")
    return SlurmTask(
        int(rank), int(count), f"{job}.{step}.{environment.get('SLURM_RESTART_COUNT', 0)}"
    )


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
    fix = Fix(remark=f"srun --ntasks={num_nodes} --ntasks-per-node=1 {program()} ...")
    raise ConfigError(Problem("distributed.num_nodes", str(num_nodes), why, fix))


RENDEZVOUS = (RANK, WORLD_SIZE, LOCAL_RANK, "MASTER_ADDR", "MASTER_PORT")
"""Variables of torchrun's for each process (https://docs.pytorch.org/docs/stable/elastic/run.html)."""

#: What rank 0 may need to say why nothing runs, s: the launcher ends all ranks when one leaves.
SPEECH_S = 30.0


def started_ranks() -> int:
    """How many processes torchrun or `accelerate launch` started for this run; 1 without them.

    Both set all that an `env://` rendezvous reads; a part of it is left over from another job.
    """
    if any(name not in os.environ for name in RENDEZVOUS):
        return 1
    try:
        return max(1, int(os.environ[WORLD_SIZE]))
    except ValueError:
        return 1


def ranks_are_started() -> bool:
    """Whether this process is one of several of the same run."""
    return started_ranks() > 1


def my_rank() -> int:
    """The number of this process among them; 0 for the one that plans, prints and writes."""
    return int(os.environ[RANK]) if ranks_are_started() else 0


def is_first() -> bool:
    """Whether this process speaks for all that were started for the same command."""
    return my_rank() == 0 and this_task().node == 0


def machines_at_hand() -> int:
    """Machines that somebody has started this command on: by srun, or by torchrun."""
    try:
        here = int(os.environ.get(LOCAL_WORLD_SIZE, "1"))
    except ValueError:
        here = 1
    return max(this_task().count, started_ranks() // max(1, here) if ranks_are_started() else 1)


def check_started_ranks(option: str, num_processes: int) -> None:
    """The launcher and the configuration must speak of the same number of processes.

    Args:
        option: of the group `distributed`, or `a sweep`.
        num_processes: what the configuration says.

    Raises:
        ConfigError: they do not.
    """
    started = started_ranks()
    if started in (1, num_processes):
        return
    why = f"{started} processes were started for this run, as {WORLD_SIZE} in the environment says"
    fix = Fix(f"distributed.num_processes={started}")
    if option == "a sweep":
        why = f"{why}; a sweep starts its own"
        fix = Fix(remark=f"{program()} -m ...   (without torchrun or accelerate launch)")
    elif option == "none":
        fix = Fix(remark=f"distributed=ddp {fix}")
    raise ConfigError(Problem("distributed.num_processes", str(num_processes), why, fix))


def let_rank_0_speak() -> None:
    """Wait, in another rank, until the launcher ends it because rank 0 has spoken and left.

    All ranks find the same mistake at about the same time, and torchrun sends SIGTERM to the
    others as soon as the first one leaves: rank 0 must be the first.
    """
    time.sleep(SPEECH_S)


RANK_VARIABLES = (
    r"((LOCAL|GROUP|ROLE|NODE|CROSS)_)?(RANK|WORLD_SIZE)$|(LOCAL|CROSS)_SIZE$|ROLE_NAME$"
    r"|MASTER_(ADDR|PORT)$|TORCHELASTIC_|ACCELERATE_|OMPI_|PMI|MPI_LOCAL|MV2_COMM_WORLD|SUBMITIT_"
)
"""Names of variables that torchrun, accelerate, MPI or submitit set for one process of one job."""

TRACKED_RUN_VARIABLES = (
    r"WANDB_(RUN_ID|NAME|RESUME|SWEEP_ID|SWEEP_PARAM_PATH)$|WANDB_(LAUNCH|AGENT)|MLFLOW_RUN_ID$"
)
"""Names of variables that a tracker or a search agent sets for one run of its own."""

SAFE_PATH = "-P"
"""Python's option that leaves the current folder out of the import path."""

AGENT = ("WANDB_SWEEP_ID", "WANDB_RUN_ID")
"""What W&B's agent sets for a run that it starts."""

_OF_RANKS, _OF_TRACKED_RUNS = re.compile(RANK_VARIABLES), re.compile(TRACKED_RUN_VARIABLES)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of eke's, `python -m MODULE ARGUMENTS`.

    Without `-P` a file `torch.py` in the folder where a command is typed would be imported first.
    """
    return [sys.executable, SAFE_PATH, "-m", module, *arguments]


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment for one that imports the same eke.

    What another launcher has set for another process is left out: a worker would take it for its
    own rank and rendezvous, or its own run of a tracker. Where torchrun, `accelerate launch` or
    W&B's agent started this run, all that they set is there, and stays.
    """
    kept = dict(environment)
    if not ranks_are_started():
        kept = {name: value for name, value in kept.items() if not _OF_RANKS.match(name)}
    if any(name not in kept for name in AGENT):
        kept = {name: value for name, value in kept.items() if not _OF_TRACKED_RUNS.match(name)}
    inherited = environment.get("PYTHONPATH")
    # An empty or relative entry is the folder where a command is typed.
    entries = filter(os.path.isabs, (inherited or "").split(os.pathsep))
    kept["PYTHONPATH"] = os.pathsep.join((source_folder(), *entries))
    kept["PYTHONSAFEPATH"] = "1"
    return kept
