"""Commands and environments of child processes. Detection of externally started ranks."""

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import make_private_dir
from eke.common.output import write_line
from eke.common.paths import (
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    RANK,
    WORLD_SIZE,
    home_folder,
    program,
    source_folder,
    user_path,
)


@dataclass(frozen=True)
class SlurmTask:
    """Task of a SLURM step."""

    node: int
    """Index of the task. 0 is the leader."""
    count: int
    """Number of tasks in the step, one per node."""
    step: str
    """Identifier of the step, different for each restart of a job: `123.0.1`."""


def current_cluster_task(environment: Mapping[str, str] = os.environ) -> SlurmTask:
    """Return this process's SLURM task, a single task outside SLURM."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, count, job, step = (environment.get(name, "") for name in names)
    if not (rank.isdecimal() and count.isdecimal()):
        return SlurmTask(0, 1, "")
    restarts = environment.get("SLURM_RESTART_COUNT", 0)
    return SlurmTask(int(rank), int(count), f"{job}.{step}.{restarts}")


def check_started_tasks(what: str, num_nodes: int) -> None:
    """Raise ConfigError if the SLURM step has not as many tasks as the run has nodes (1: sweep)."""
    count = current_cluster_task().count
    if count in (1, num_nodes):
        return
    why = f"srun started {count} tasks, and {what} needs one task per node"
    fix = Fix(remark=f"srun --ntasks={num_nodes} --ntasks-per-node=1 {program()} ...")
    number = str(num_nodes)
    raise ConfigError(Problem("distributed.num_nodes", number, why, fix, "started_processes"))


_RENDEZVOUS = (RANK, WORLD_SIZE, LOCAL_RANK, "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for each process (https://docs.pytorch.org/docs/stable/elastic/run.html)."""

RANK_0_ERROR_TIMEOUT_S = 30.0
"""Seconds for rank 0 to report an error before torchrun ends all ranks."""


def _number_of(name: str) -> int:
    """Return the number in an environment variable, 1 if it has none."""
    try:
        return max(1, int(os.environ.get(name, "1")))
    except ValueError:
        return 1


def _started_ranks() -> int:
    """Return the number of processes started by torchrun or `accelerate launch`, else 1."""
    # Incomplete variables are left from another job.
    return _number_of(WORLD_SIZE) if all(name in os.environ for name in _RENDEZVOUS) else 1


def ranks_are_started() -> bool:
    """Return whether this process is one of several ranks of a run."""
    return _started_ranks() > 1


def my_rank() -> int:
    """Return the rank of this process. Rank 0 plans, prints and writes."""
    return int(os.environ[RANK]) if ranks_are_started() else 0


def is_first() -> bool:
    """Return whether this process reports for all processes of the command."""
    return my_rank() == 0 and current_cluster_task().node == 0


def num_allocated_nodes() -> int:
    """Return the number of nodes on which srun or torchrun started this command."""
    return max(1, current_cluster_task().count, _started_ranks() // _number_of(LOCAL_WORLD_SIZE))


def check_started_ranks(option: str, num_processes: int) -> None:
    """Raise ConfigError if other processes are started than `distributed=option` or a sweep has."""
    started = _started_ranks()
    if started in (1, num_processes):
        return
    why = f"{started} processes were started ({WORLD_SIZE} in the environment)"
    fix = Fix(f"distributed.num_processes={started}")
    if option == "a sweep":
        why = f"{why}. A sweep starts its own"
        fix = Fix(remark=f"{program()} -m ...   (without torchrun or accelerate launch)")
    elif option == "none":
        fix = Fix(remark=f"distributed=ddp {fix}")
    number = str(num_processes)
    raise ConfigError(Problem("distributed.num_processes", number, why, fix, "started_processes"))


RANK_VARIABLES = (
    r"((LOCAL|GROUP|ROLE|NODE|CROSS)_)?(RANK|WORLD_SIZE)$|(LOCAL|CROSS)_SIZE$|ROLE_NAME$"
    r"|MASTER_(ADDR|PORT)$|TORCHELASTIC_|ACCELERATE_|OMPI_|PMI|MPI_LOCAL|MV2_COMM_WORLD|SUBMITIT_"
)
"""Pattern of variables that torchrun, accelerate, MPI or submitit set for one process."""

TRACKED_RUN_VARIABLES = (
    r"WANDB_(RUN_(ID|NAME)|NAME|RESUME(_FROM)?|FORK_FROM|SWEEP_ID|SWEEP_PARAM_PATH)$"
    r"|WANDB_(LAUNCH|AGENT)|MLFLOW_(RUN_ID|NESTED_RUN)$"
)
"""Pattern of variables that a tracker or a search agent sets for one run."""

SAFE_PATH = "-P"
"""Option of Python that removes the current folder from the import path."""

_AGENT = ("WANDB_SWEEP_ID", "WANDB_RUN_ID")
"""Variables that W&B's agent sets for each run it starts."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command for a module of eke, safe from a `torch.py` in the current folder."""
    return [sys.executable, SAFE_PATH, "-m", module, *arguments]


VERBOSE = "EKE_VERBOSE"
"""Environment variable with comma-separated loggers at level debug."""


def be_verbose() -> None:
    """Set the loggers of EKE_VERBOSE to level debug, on standard error (train.log of a worker)."""
    for name in filter(None, os.environ.get(VERBOSE, "").split(",")):
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger(name).setLevel(logging.DEBUG)


def child_environment() -> dict[str, str]:
    """Return this process's environment for a child that imports the same eke."""
    kept = dict(os.environ)
    # Incomplete variables of torchrun, `accelerate launch` or W&B's agent belong to another
    # process. A worker would use them as its rank, rendezvous or tracker run.
    if not ranks_are_started():
        kept = {name: value for name, value in kept.items() if not re.match(RANK_VARIABLES, name)}
    if any(name not in kept for name in _AGENT):
        kept = {k: value for k, value in kept.items() if not re.match(TRACKED_RUN_VARIABLES, k)}
    # An empty or relative entry refers to the current folder.
    entries = filter(os.path.isabs, kept.get("PYTHONPATH", "").split(os.pathsep))
    kept["PYTHONPATH"] = os.pathsep.join((source_folder(), *entries))
    kept["PYTHONSAFEPATH"] = "1"
    return kept


def ensure_home() -> None:
    """Set HOME to a private folder, for libraries, if this user id has no home."""
    if not user_path("~").is_absolute():
        with suppress(OSError):
            os.environ["HOME"] = str(make_private_dir(home_folder(), private=True))


def leave_tracked_run() -> None:
    """Remove variables of one tracked run, since each of several runs has its own id."""
    if all(name in os.environ for name in _AGENT):
        why = "W&B's agent expects one run. These runs are outside its sweep"
        write_line(f"  warning: {why}", sys.stderr)
    for name in [each for each in os.environ if re.match(TRACKED_RUN_VARIABLES, each)]:
        del os.environ[name]


def end_with_parent(number: signal.Signals, parent: str) -> None:
    """Make the kernel send a signal to this process when `parent` (a process id) dies."""
    if not parent.isdigit():
        return
    import ctypes  # most commands do not need it

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    try:
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    except (OSError, AttributeError):  # not Linux
        return
    if os.getppid() != int(parent):  # the parent died before the call
        os.kill(os.getpid(), number)
